//! Outgoing messages: what operators read of them and do with them.

// Filters of outgoing messages.
pub(crate) mod filter;
// Outgoing messages, newest first, and one of them.
pub(crate) mod list;
// Counts of what is to be sent, and of what is parked.
pub(crate) mod stats;
// Redrive and discard.
pub(crate) mod act;

use std::time::Duration;

use oncebox_model::error::InboxError;

use crate::{database::tenant_database::TenantDatabase, handles::OutgoingMessages};

/// Statement that ends one read on the server, after 9,000 milliseconds.
const WITHIN: &str = "SET LOCAL statement_timeout = 9000";
/// Longest wait of a request for one read; shorter than the server's bound.
const READ_MAX: Duration = Duration::from_secs(8);

impl OutgoingMessages<'_> {
    /// Returns the database with a tenant's outgoing messages. A misspelt name of a consumer must
    /// not look like one without messages.
    async fn database(
        &self,
        tenant: &str,
        consumer: Option<&str>,
    ) -> Result<TenantDatabase, InboxError> {
        let row = self.0.tenants().get(tenant).await?;
        if let Some(consumer) = consumer {
            self.0.consumers().get(tenant, consumer).await?;
        }
        self.0.tenant_databases().get(&row)
    }
}

/// Waits for a read of outgoing messages for as long as a request may.
///
/// # Errors
/// `Invalid` with advice for a narrower filter where the read takes longer; else the read's error.
async fn within<T>(read: impl Future<Output = Result<T, InboxError>>) -> Result<T, InboxError> {
    within_bound(READ_MAX, read).await
}

async fn within_bound<T>(
    bound: Duration,
    read: impl Future<Output = Result<T, InboxError>>,
) -> Result<T, InboxError> {
    tokio::time::timeout(bound, read).await.unwrap_or_else(|_| {
        Err(InboxError::Invalid(format!(
            "these outgoing messages are not found within {} s; ask for one `consumer` and its \
                `cause`, or for one `status` other than `completed`",
            bound.as_secs()
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a wide filter holds a request and its connection for as long as the
    // table is large, or its error says nothing of what to do.
    #[tokio::test]
    async fn a_read_without_end_is_refused_with_advice() {
        let endless = std::future::pending::<Result<(), InboxError>>();
        let read = within_bound(Duration::from_millis(1), endless);
        let error = read.await.expect_err("too long").to_string();
        assert!(error.contains("are not found within") && error.contains("`cause`"), "{error}");
        assert_eq!(within(async { Ok(1) }).await.expect("in time"), 1);
    }
}
