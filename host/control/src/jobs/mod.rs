//! Jobs: actions of operators on every message that a filter selects, which hosts carry out.
//!
//! A job is a row in the database with the inbox. Any host leases it and works on it page by page;
//! each page, its counts and the place behind it are one transaction. So a job goes on whatever
//! ends in between: the command that started it, or the host that works on it.
//!
//! The state of the messages is the progress. A message that a job changed is not selected by it
//! again, so a job passes over its messages until a pass finds nothing more to do.

// The messages that a job selects.
pub(crate) mod filter;
// The start of a job, and the estimate before it.
pub(crate) mod start;
// Jobs that were started: lists, and the actions of operators on them.
pub(crate) mod job;
// The lease of a job, and its end.
pub(crate) mod lease;
// One page of a job.
pub(crate) mod page;
// A turn of a process on a job.
mod work;

use oncebox_model::error::InboxError;

use crate::{
    audit::Subject, consumers::Consumer, database::tenant_database::TenantDatabase, handles::Jobs,
    messages::bulk::Action, outgoing::act::OutgoingAction,
};

/// What a job does with its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobAction {
    /// An action on messages of a consumer's inbox.
    Inbox(Action),
    /// An action on outgoing messages.
    Outgoing(OutgoingAction),
}

impl JobAction {
    /// Every action.
    pub const ALL: [Self; 5] = [
        Self::Inbox(Action::Redrive),
        Self::Inbox(Action::Retry),
        Self::Inbox(Action::Discard),
        Self::Outgoing(OutgoingAction::Redrive),
        Self::Outgoing(OutgoingAction::Discard),
    ];

    /// Returns its name, which the row and requests hold.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inbox(action) => action.name(),
            Self::Outgoing(OutgoingAction::Redrive) => "outgoing_redrive",
            Self::Outgoing(OutgoingAction::Discard) => "outgoing_discard",
        }
    }

    /// Returns the action of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }

    /// Returns its name in the audit log.
    fn audited(self) -> String {
        match self {
            Self::Inbox(action) => format!("inbox.{}", action.name()),
            Self::Outgoing(action) => format!("outgoing.{}", action.name()),
        }
    }
}

/// A tenant's database, and the consumer that a job is about.
pub(crate) struct JobTarget {
    tenant_id: i32,
    tenant: String,
    /// None for outgoing messages of every consumer.
    consumer: Option<Consumer>,
    database: TenantDatabase,
    /// Name of that database; none for the host's.
    database_name: Option<String>,
}

impl Jobs<'_> {
    /// Reads a tenant and a consumer of it. A misspelt name must not look like a consumer without
    /// messages.
    async fn target(&self, tenant: &str, consumer: Option<&str>) -> Result<JobTarget, InboxError> {
        let row = self.0.tenants().get(tenant).await?;
        let consumer = match consumer {
            Some(name) => Some(self.0.consumers().get(tenant, name).await?),
            None => None,
        };
        if row.state.is_deleting() {
            return Err(InboxError::conflict(format!("tenant `{tenant}` is being deleted")));
        }
        let database = self.0.tenant_databases().get(&row)?;
        Ok(JobTarget {
            tenant_id: row.tenant_id,
            tenant: row.name,
            consumer,
            database,
            database_name: row.database,
        })
    }
}

impl JobTarget {
    /// Returns the object of an entry of the audit log.
    fn subject(&self) -> Subject {
        match &self.consumer {
            Some(consumer) => Subject::of(&self.tenant, &consumer.name),
            None => Subject::tenant(&self.tenant),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_has_one_name() {
        for action in JobAction::ALL {
            assert_eq!(JobAction::named(action.name()), Some(action));
        }
        assert_eq!(JobAction::named("delete"), None);
        assert_eq!(JobAction::Outgoing(OutgoingAction::Redrive).audited(), "outgoing.redrive");
    }
}
