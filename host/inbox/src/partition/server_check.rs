//! The check of a partition that is held, in another run of the server than that of its last
//! transaction.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    inbox::ServerRun,
};
use tokio::time::sleep;

use super::PartitionInbox;

/// Pause between two checks of a server that does not answer.
const CHECK_AGAIN: Duration = Duration::from_secs(1);

impl PartitionInbox {
    /// Waits until another server answers than the one that has all commits of the partition, and
    /// checks what it has. Returns the error of one that has lost commits.
    pub(super) async fn watch_server(&mut self) -> InboxError {
        let mut present = self.consumer.sessions.server();
        loop {
            let known = self.position.server.clone();
            let is_other = |server: &ServerRun| {
                known.is_some()
                    && server.is_some()
                    && *server != known
                    && !hooks::sabotage(Defect::ServerUnchecked)
            };
            if present.wait_for(is_other).await.is_err() {
                return std::future::pending().await; // the sessions live as long as the consumer
            }
            match self.check_server().await {
                Ok(()) => {}
                Err(error @ InboxError::CommitsLost { .. }) => return error,
                Err(error) => {
                    tracing::debug!(%error, "the database does not say what it has; asked again");
                    sleep(CHECK_AGAIN).await;
                }
            }
        }
    }

    /// Checks, in a run of the server that began after the partition's last transaction, that the
    /// database has all commits of the partition.
    ///
    /// # Errors
    ///
    /// [`InboxError::CommitsLost`] where it has not.
    pub(super) async fn check_server(&mut self) -> Result<(), InboxError> {
        let (has_commits, server) = self.consumer.has_commits(&self.position).await?;
        if !has_commits {
            return Err(InboxError::CommitsLost {
                topic: self.topic.clone(),
                partition: self.partition,
            });
        }
        tracing::info!(
            tenant = self.consumer.tenant,
            consumer = self.consumer.name,
            topic = self.topic,
            partition = self.partition,
            "database's server started again; it has all commits of the partition"
        );
        self.position.server = server;
        Ok(())
    }
}
