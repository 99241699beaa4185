//! The audit log: each change and its actor, written in the transaction of the change.

use oncebox_model::error::InboxError;
use serde_json::Value;
use sqlx::PgConnection;

use crate::handles::Audit;

/// A recorded change.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct AuditEntry {
    /// Key; grows with time.
    pub audit_id: i64,
    /// Time of the change.
    pub at: chrono::DateTime<chrono::Utc>,
    /// Actor of the change: the name of a token, or of a user of the host's machine. `oncebox`
    /// stands for a host by itself.
    pub actor: String,
    /// Action, such as `deploy` or `tenant.create`.
    pub action: String,
    /// Object of the action.
    pub subject: String,
    /// Tenant that the change concerns, if any.
    pub tenant: Option<String>,
    /// Further details of the change.
    pub details: Value,
}

/// Object of a change.
pub(crate) struct Subject {
    tenant: Option<String>,
    text: String,
}

impl Subject {
    /// Returns an object that belongs to no tenant.
    pub(crate) fn platform(name: &str) -> Self {
        Self { tenant: None, text: name.to_owned() }
    }

    /// Returns a tenant as a whole.
    pub(crate) fn tenant(name: &str) -> Self {
        Self { tenant: Some(name.to_owned()), text: name.to_owned() }
    }

    /// Returns an object that belongs to a tenant.
    pub(crate) fn of(tenant: &str, name: &str) -> Self {
        Self { tenant: Some(tenant.to_owned()), text: format!("{tenant}/{name}") }
    }
}

impl Audit<'_> {
    /// Returns the newest changes of one tenant, or of all, newest first.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(
        &self,
        tenant: Option<&str>,
        limit: i64,
    ) -> Result<Vec<AuditEntry>, InboxError> {
        const LIST: &str = "SELECT audit_id, at, actor, action, subject, tenant, details FROM \
            oncebox.audit \
            WHERE $1::text IS NULL OR tenant = $1 ORDER BY audit_id DESC LIMIT $2";
        Ok(sqlx::query_as(LIST).bind(tenant).bind(limit).fetch_all(&self.0.pool).await?)
    }

    /// Records a change of a tenant's database: in its transaction where that is the host's, else
    /// before it, since no transaction spans both.
    pub(crate) async fn record_beside(
        &self,
        connection: &mut PgConnection,
        is_dedicated: bool,
        action: &str,
        subject: Subject,
        details: Value,
    ) -> Result<(), InboxError> {
        if !is_dedicated {
            return self.record(connection, action, subject, details).await;
        }
        let mut tx = self.0.pool.begin().await?;
        self.record(&mut tx, action, subject, details).await?;
        Ok(tx.commit().await?)
    }

    pub(crate) async fn record(
        &self,
        connection: &mut PgConnection,
        action: &str,
        subject: Subject,
        details: Value,
    ) -> Result<(), InboxError> {
        self.record_with_id(connection, action, subject, details).await.map(drop)
    }

    /// Records a change, and returns the id of the entry.
    pub(crate) async fn record_with_id(
        &self,
        connection: &mut PgConnection,
        action: &str,
        subject: Subject,
        details: Value,
    ) -> Result<i64, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.audit (actor, action, subject, tenant, details) \
            VALUES ($1, $2, $3, $4, $5) RETURNING audit_id";
        let query = sqlx::query_scalar(INSERT)
            .bind(&self.0.actor)
            .bind(action)
            .bind(subject.text)
            .bind(subject.tenant)
            .bind(details);
        Ok(query.fetch_one(connection).await?)
    }
}
