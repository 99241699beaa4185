//! Consumers' rows: what their tenants subscribed to, and how.

use serde_json::{Value, json};

use crate::{
    admin::{Admin, check_name, taken},
    audit::Subject,
    error::InboxError,
    policy::Policy,
};

/// A consumer's row.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Consumer {
    /// Key.
    pub consumer_id: i32,
    /// Its tenant.
    #[serde(skip)]
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name.
    pub name: String,
    /// Policy, as kept.
    #[serde(serialize_with = "without_secrets")]
    pub policy: Value,
    /// `running`, `paused`, `draining` or `deleting`.
    pub state: String,
    /// Grows with every change of policy or state.
    pub revision: i64,
    /// Generation of its deployments.
    pub generation: i64,
    /// When it was created.
    pub created_at: chrono::DateTime<chrono::Utc>,
}

impl Consumer {
    /// The policy for people: without the values of Kafka's properties, which may be passwords.
    pub fn policy_shown(&self) -> Value {
        shown(&self.policy)
    }

    /// The policy, typed.
    pub fn policy(&self) -> Result<Policy, InboxError> {
        serde_json::from_value(self.policy.clone()).map_err(|error| {
            InboxError::Invalid(format!("the policy of consumer `{}/{}` is not readable: {error}", self.tenant, self.name))
        })
    }
}

impl Admin {
    /// Create a consumer with its policy.
    pub async fn create_consumer(&self, tenant: &str, name: &str, policy: &Policy) -> Result<Consumer, InboxError> {
        check_name("consumer", name)?;
        policy.check()?;
        let tenant = self.tenant(tenant).await?;
        let mut tx = self.pool.begin().await?;
        const INSERT: &str = "INSERT INTO oncebox.consumer (tenant_id, name, policy, retention_class) VALUES ($1, $2, $3, $4)";
        sqlx::query(INSERT)
            .bind(tenant.tenant_id)
            .bind(name)
            .bind(json!(policy))
            .bind(policy.retention.class())
            .execute(&mut *tx)
            .await
            .map_err(|error| taken(error, "consumer", name))?;
        self.audit(&mut tx, "consumer.create", Subject::of(&tenant.name, name), json!({})).await?;
        tx.commit().await?;
        self.consumer(&tenant.name, name).await
    }

    /// All consumers, by tenant and name.
    pub async fn consumers(&self) -> Result<Vec<Consumer>, InboxError> {
        const LIST: &str = "SELECT c.consumer_id, c.tenant_id, t.name AS tenant, c.name, c.policy, c.state, c.revision, c.generation, c.created_at \
            FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) ORDER BY t.name, c.name";
        Ok(sqlx::query_as(LIST).fetch_all(&self.pool).await?)
    }

    /// One consumer.
    pub async fn consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        let found = self.consumers().await?.into_iter().find(|c| c.tenant == tenant && c.name == name);
        found.ok_or_else(|| {
            InboxError::NotFound(format!("there is no consumer `{tenant}/{name}`; `oncebox consumer list` shows those there are"))
        })
    }
}

fn shown(policy: &Value) -> Value {
    let mut policy = policy.clone();
    for (_, value) in policy.pointer_mut("/kafka/properties").and_then(Value::as_object_mut).into_iter().flatten() {
        *value = "…".into();
    }
    policy
}

fn without_secrets<S: serde::Serializer>(policy: &Value, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&shown(policy), serializer)
}
