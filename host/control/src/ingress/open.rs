//! The consumers that take messages over HTTP, opened for requests.

use oncebox_model::{error::InboxError, status::ConsumerState};
use serde_json::Value;

use super::secret::IngressSecrets;
use crate::handles::Ingress;

/// A consumer that takes messages over HTTP, as its rows are now.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct IngressRow {
    /// Key of the consumer.
    pub consumer_id: i32,
    /// Name.
    pub consumer: String,
    /// Key of its tenant.
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Whether its tenant is neither suspended nor being deleted.
    pub is_active: bool,
    /// State of the consumer.
    pub state: ConsumerState,
    /// Whether its inbox is in another database than the host's.
    pub has_own_database: bool,
    /// Policy, as stored.
    pub policy: Value,
    /// Number of the latest change of the tenant that hosts must observe.
    pub tenant_revision: i64,
    login: String,
    sealed: Vec<u8>,
}

impl Ingress<'_> {
    /// Lists the consumers whose policy takes messages over HTTP and that have a secret, whatever
    /// their state.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn rows(&self) -> Result<Vec<IngressRow>, InboxError> {
        const LIST: &str = "SELECT c.consumer_id, c.name AS consumer, t.tenant_id, \
                t.name AS tenant, t.state = 'active' AS is_active, c.state, \
                t.database_url IS NOT NULL AS has_own_database, c.policy, \
                t.revision AS tenant_revision, t.login, s.sealed \
            FROM oncebox.ingress_secret s JOIN oncebox.consumer c USING (consumer_id) \
            JOIN oncebox.tenant t USING (tenant_id) \
            WHERE c.policy ? 'ingress' ORDER BY c.consumer_id";
        Ok(sqlx::query_as(LIST).fetch_all(&self.0.pool).await?)
    }

    /// Opens the secrets of a consumer.
    ///
    /// # Errors
    /// `Sealed` where no key of this process opens them.
    pub fn open(&self, row: &IngressRow) -> Result<IngressSecrets, InboxError> {
        IngressSecrets::unsealed(&self.0.key, &row.login, &row.consumer, &row.sealed)
    }
}
