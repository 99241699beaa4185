//! The audit log: who changed what, written in the transaction of the change.

use oncebox_model::error::InboxError;
use serde_json::Value;
use sqlx::PgConnection;

use crate::control::Admin;

/// A change that someone made.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct AuditEntry {
    /// Key; grows with time.
    pub audit_id: i64,
    /// When.
    pub at: chrono::DateTime<chrono::Utc>,
    /// Who: the name of a token, or of a user of the host's machine; `oncebox` for a host by
    /// itself.
    pub actor: String,
    /// What was done: `deploy`, `tenant.create`.
    pub action: String,
    /// To what.
    pub subject: String,
    /// The tenant that it was about, where it was about one.
    pub tenant: Option<String>,
    /// What else is worth knowing.
    pub details: Value,
}

/// What a change is about.
pub(crate) struct Subject {
    tenant: Option<String>,
    text: String,
}

impl Subject {
    /// Something of no tenant.
    pub(crate) fn platform(name: &str) -> Self {
        Self { tenant: None, text: name.to_owned() }
    }

    /// A tenant as a whole.
    pub(crate) fn tenant(name: &str) -> Self {
        Self { tenant: Some(name.to_owned()), text: name.to_owned() }
    }

    /// Something of a tenant.
    pub(crate) fn of(tenant: &str, name: &str) -> Self {
        Self { tenant: Some(tenant.to_owned()), text: format!("{tenant}/{name}") }
    }
}

impl Admin {
    /// The newest changes, of one tenant or of all.
    pub async fn audit_list(
        &self,
        tenant: Option<&str>,
        limit: i64,
    ) -> Result<Vec<AuditEntry>, InboxError> {
        const LIST: &str = "SELECT audit_id, at, actor, action, subject, tenant, details FROM \
            oncebox.audit \
            WHERE $1::text IS NULL OR tenant = $1 ORDER BY audit_id DESC LIMIT $2";
        Ok(sqlx::query_as(LIST).bind(tenant).bind(limit).fetch_all(&self.pool).await?)
    }

    pub(crate) async fn audit(
        &self,
        connection: &mut PgConnection,
        action: &str,
        subject: Subject,
        details: Value,
    ) -> Result<(), InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.audit (actor, action, subject, tenant, details) \
            VALUES ($1, $2, $3, $4, $5)";
        let query = sqlx::query(INSERT)
            .bind(&self.actor)
            .bind(action)
            .bind(subject.text)
            .bind(subject.tenant)
            .bind(details);
        query.execute(connection).await?;
        Ok(())
    }
}
