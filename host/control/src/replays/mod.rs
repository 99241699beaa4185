//! Replays of completed messages, as operators plan, start, pause and end them.
//!
//! A plan counts the messages and returns a token; the token starts that plan and no other, within
//! a quarter of an hour, and only while the policy and the deployments are those of the plan. The
//! rows are in the database with the inbox, where the hosts that run the consumer work on them.

// The messages that a replay selects.
pub(crate) mod filter;
// The token that starts a plan.
mod token;
// Plans.
pub(crate) mod plan;
// The start of a planned replay, and what each kind asks for.
pub(crate) mod start;
// Replays that were started: lists, and the actions of operators on them.
pub(crate) mod job;

use oncebox_model::{error::InboxError, policy::Policy};
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    audit::Subject, consumers::Consumer, database::tenant_database::TenantDatabase,
    handles::Replays,
};

/// A consumer whose messages are replayed, with its policy and its database.
pub(crate) struct ReplayTarget {
    pub(crate) consumer: Consumer,
    pub(crate) policy: Policy,
    pub(crate) database: TenantDatabase,
}

impl Replays<'_> {
    /// Reads a consumer that is not being deleted.
    async fn target(&self, tenant: &str, name: &str) -> Result<ReplayTarget, InboxError> {
        let consumer = self.0.consumers().get(tenant, name).await?;
        if consumer.state.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        let policy = consumer.policy()?;
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        Ok(ReplayTarget { consumer, policy, database })
    }

    /// Writes the audit log before a change in a database of the tenant's own. Elsewhere the log is
    /// written in the transaction of the change, by [`Self::audit_with`].
    async fn audit_before(
        &self,
        target: &ReplayTarget,
        action: &str,
        details: &Value,
    ) -> Result<(), InboxError> {
        if !target.database.is_dedicated {
            return Ok(());
        }
        let mut tx = self.0.pool.begin().await?;
        self.0.audit().record(&mut tx, action, target.subject(), details.clone()).await?;
        Ok(tx.commit().await?)
    }

    /// Writes the audit log in the transaction of a change in the host's database.
    async fn audit_with(
        &self,
        connection: &mut PgConnection,
        target: &ReplayTarget,
        action: &str,
        details: &Value,
    ) -> Result<(), InboxError> {
        if target.database.is_dedicated {
            return Ok(());
        }
        self.0.audit().record(connection, action, target.subject(), details.clone()).await
    }
}

impl ReplayTarget {
    /// Returns the consumer as the object of an entry of the audit log.
    fn subject(&self) -> Subject {
        Subject::of(&self.consumer.tenant, &self.consumer.name)
    }

    /// Returns tenant and consumer as one name, for texts.
    fn shown(&self) -> String {
        format!("{}/{}", self.consumer.tenant, self.consumer.name)
    }
}
