//! A partition that is held: its position is noted while nothing comes, and another run of the
//! server than that of its last transaction is checked.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    inbox::ServerRun,
};
use tokio::time::sleep;

use super::{PartitionInbox, position::NOTE_INTERVAL};

/// Pause before a check of a server.
const CHECK_AGAIN: Duration = Duration::from_secs(1);

impl PartitionInbox {
    /// Watches the partition while there is no record to process. Ends once another server answers
    /// than the one that had all commits of the partition, and says whether it has them too.
    pub(super) async fn watch_server(&mut self) -> Result<(), InboxError> {
        self.note_at_rest().await;
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
            // Two servers may answer in turn for a while.
            sleep(CHECK_AGAIN).await;
            match self.check_server().await {
                Ok(()) => return Ok(()),
                Err(error @ InboxError::CommitsLost { .. }) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "the database does not say what it has; asked again");
                }
            }
        }
    }

    /// Notes the position of a partition to which nothing has come for a while. Its last rows may
    /// be removed before more comes.
    async fn note_at_rest(&mut self) {
        // Duplicates alone are no progress, and leave the partition under suspicion.
        let Some(next_offset) = self.position.unnoted().filter(|_| self.is_cleared) else { return };
        sleep(NOTE_INTERVAL).await;
        let mut admission = self.consumer.admit_first().await;
        admission.hold_to(self.position.turn());
        let Self { consumer, topic, partition, .. } = self;
        let noted = consumer.partition_cleared(&admission, topic, *partition, Some(next_offset));
        match noted.await {
            Ok(()) => self.position.noted_as(next_offset),
            Err(error) => tracing::debug!(%error, "position not noted; the next claim notes it"),
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
