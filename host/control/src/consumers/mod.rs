//! Consumers' rows: subscriptions of tenants, with their policies.

// The work that hosts do for a consumer.
pub(crate) mod state;
// Starts that end the process, and the quarantine of their consumers.
pub(crate) mod start;
// Another policy while hosts run, and its consequences.
pub(crate) mod policy_change;
// Changes of a group's offsets.
pub(crate) mod seek;
// Deletion of a consumer.
pub(crate) mod delete;

use oncebox_model::{
    error::InboxError,
    policy::{MemoryRaise, Policy},
    status::{ConsumerState, TenantState},
};
use serde_json::{Value, json};
use sqlx::PgConnection;

use self::{
    seek::Seek,
    start::{QUARANTINE, Quarantine},
};
use crate::{
    audit::Subject,
    control::{check_name, taken},
    database::{
        locks::{self, HostLock},
        schema,
    },
    handles::Consumers,
};

/// A consumer's row.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Consumer {
    /// Key.
    pub consumer_id: i32,
    /// Key of its tenant.
    #[serde(skip)]
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name.
    pub name: String,
    /// Policy, as stored.
    #[serde(serialize_with = "without_secrets")]
    pub policy: Value,
    /// State.
    pub state: ConsumerState,
    /// Number of the latest change of policy or state.
    pub revision: i64,
    /// Generation of its deployments.
    pub generation: i64,
    /// Offsets to set in its group; none once they are set.
    #[sqlx(json(nullable))]
    pub seek: Option<Seek>,
    /// State of its tenant; a consumer runs only while this is `active`.
    pub tenant_state: TenantState,
    /// Quarantine that keeps hosts from starting it, if any.
    #[sqlx(json(nullable))]
    pub quarantine: Option<Quarantine>,
    /// Time of creation.
    pub created_at: chrono::DateTime<chrono::Utc>,
}

impl Consumer {
    /// Returns the policy for operators, without the values of Kafka's properties, which may be
    /// passwords.
    pub fn policy_shown(&self) -> Value {
        shown(&self.policy)
    }

    /// Returns the policy, parsed.
    ///
    /// # Errors
    /// `Invalid` where the stored policy is not readable.
    pub fn policy(&self) -> Result<Policy, InboxError> {
        serde_json::from_value(self.policy.clone()).map_err(|error| {
            InboxError::Invalid(format!(
                "the policy of consumer `{}/{}` is not readable: {error}",
                self.tenant, self.name
            ))
        })
    }
}

/// Builds a statement for all columns of a consumer, with a condition `what`.
fn select(what: &str) -> sqlx::AssertSqlSafe<String> {
    sqlx::AssertSqlSafe(format!(
        "SELECT c.consumer_id, c.tenant_id, t.name AS tenant, c.name, c.policy, c.state, \
            c.revision, c.generation, c.seek, \
            t.state AS tenant_state, c.created_at, {QUARANTINE} FROM oncebox.consumer c JOIN \
            oncebox.tenant t USING (tenant_id) \
            LEFT JOIN oncebox.consumer_start s USING (consumer_id) {what}"
    ))
}

impl Consumers<'_> {
    /// Creates a consumer with its policy. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Invalid` for a bad name or policy. `Conflict` for
    /// a name or a group in use, or where the tenant is being deleted.
    pub async fn create(
        &self,
        tenant: &str,
        name: &str,
        policy: &Policy,
    ) -> Result<Consumer, InboxError> {
        self.create_raised(tenant, name, policy, None).await
    }

    /// Creates a consumer with its policy, in which a raise has already chosen the retention. The
    /// audit log keeps the raise. Returns the consumer.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub async fn create_raised(
        &self,
        tenant: &str,
        name: &str,
        policy: &Policy,
        raise: Option<&MemoryRaise>,
    ) -> Result<Consumer, InboxError> {
        check_name("consumer", name)?;
        policy.check_apart().await?;
        let tenant = self.0.tenants().get(tenant).await?;
        if tenant.state.is_deleting() {
            return Err(InboxError::conflict(format!("tenant `{}` is being deleted", tenant.name)));
        }
        // The partitions exist before the row does: with the row, hosts begin to claim messages of
        // it.
        schema::ensure_partitions_for(&self.0.pool, &[policy.retention.class()]).await?;
        let mut tx = self.0.pool.begin().await?;
        group_is_free(&mut tx, &tenant.name, name, policy).await?;
        const INSERT: &str = "INSERT INTO oncebox.consumer (tenant_id, name, policy, \
            retention_class) VALUES ($1, $2, $3, $4)";
        sqlx::query(INSERT)
            .bind(tenant.tenant_id)
            .bind(name)
            .bind(json!(policy))
            .bind(policy.retention.class())
            .execute(&mut *tx)
            .await
            .map_err(|error| taken(error, "consumer", name))?;
        self.0
            .audit()
            .record(&mut tx, "consumer.create", Subject::of(&tenant.name, name), json!({}))
            .await?;
        if let Some(MemoryRaise { from, to, cause }) = raise {
            let details = json!({ "from": from, "to": to, "cause": cause });
            let subject = Subject::of(&tenant.name, name);
            self.0.audit().record(&mut tx, "consumer.raise", subject, details).await?;
        }
        tx.commit().await?;
        self.get(&tenant.name, name).await
    }

    /// Lists all consumers, by tenant and name.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(&self) -> Result<Vec<Consumer>, InboxError> {
        Ok(sqlx::query_as(select("ORDER BY t.name, c.name")).fetch_all(&self.0.pool).await?)
    }

    /// Returns one consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or an error of the host's database.
    pub async fn get(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        let one = select("WHERE t.name = $1 AND c.name = $2");
        let found =
            sqlx::query_as(one).bind(tenant).bind(name).fetch_optional(&self.0.pool).await?;
        found.ok_or_else(|| {
            InboxError::NotFound(format!(
                "there is no consumer `{tenant}/{name}`; `oncebox \
                consumer list` shows those there are"
            ))
        })
    }

    /// Reads a consumer by its key. A later consumer with an equal name has another key.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn by_id(&self, consumer_id: i32) -> Result<Option<Consumer>, InboxError> {
        let one = select("WHERE c.consumer_id = $1");
        Ok(sqlx::query_as(one).bind(consumer_id).fetch_optional(&self.0.pool).await?)
    }
}

/// Reads a consumer in an open transaction. A caller that holds the consumer's lock must not wait
/// for another connection: all connections may be held by callers that wait for the lock.
pub(crate) async fn lock_consumer(
    connection: &mut PgConnection,
    consumer: &Consumer,
) -> Result<Consumer, InboxError> {
    let one = select("WHERE c.consumer_id = $1");
    let found = sqlx::query_as(one).bind(consumer.consumer_id).fetch_optional(connection).await?;
    found.ok_or_else(|| {
        InboxError::NotFound(format!(
            "consumer `{}/{}` was deleted",
            consumer.tenant, consumer.name
        ))
    })
}

/// Checks that the policy's Kafka group belongs to no other consumer, and locks groups until the
/// transaction ends. Two consumers in one group would share their partitions, and one could move or
/// delete the offsets of the other. The lock keeps two concurrent changes apart.
pub(crate) async fn group_is_free(
    connection: &mut PgConnection,
    tenant: &str,
    name: &str,
    policy: &Policy,
) -> Result<(), InboxError> {
    const TAKEN: &str = "SELECT t.name || '/' || c.name FROM oncebox.consumer c JOIN \
        oncebox.tenant t USING (tenant_id) \
        WHERE (t.name, c.name) <> ($1, $2) \
          AND coalesce(nullif(c.policy->'kafka'->>'group', ''), format('oncebox.%s.%s', t.name, \
          c.name)) = $3 LIMIT 1";
    locks::take(connection, HostLock::Groups).await?;
    let group = policy.group(tenant, name);
    let taken: Option<String> = sqlx::query_scalar(TAKEN)
        .bind(tenant)
        .bind(name)
        .bind(&group)
        .fetch_optional(connection)
        .await?;
    match taken {
        // The owner's name is not shown to every caller.
        Some(_) => Err(InboxError::conflict(format!(
            "the kafka group `{group}` is another consumer's; set another `kafka.group`"
        ))),
        None => Ok(()),
    }
}

/// Placeholder for a value that is not shown.
pub(crate) const HIDDEN: &str = "…";

pub(crate) fn shown(policy: &Value) -> Value {
    let mut policy = policy.clone();
    for (_, value) in
        policy.pointer_mut("/kafka/properties").and_then(Value::as_object_mut).into_iter().flatten()
    {
        *value = HIDDEN.into();
    }
    policy
}

fn without_secrets<S: serde::Serializer>(policy: &Value, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&shown(policy), serializer)
}
