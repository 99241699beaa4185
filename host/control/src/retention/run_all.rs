//! One run over every database with an inbox, some of them at a time.

use std::{sync::Arc, time::Duration};

use oncebox_model::error::InboxError;
use serde_json::json;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Removal, RetentionRun};
use crate::{
    audit::Subject,
    database::tenant_database::{DatabaseLabel, InboxDatabase},
    handles::Retention,
};

/// Databases on which partitions are removed at a time.
const AT_ONCE: usize = 4;
/// Longest run on one database. The next run continues, and other databases have their turn.
const LONGEST: Duration = Duration::from_secs(3_600);
/// Pause between two tries to be the only process at work on a database.
const AGAIN: Duration = Duration::from_secs(1);

/// The treatment of a database on which another process removes partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherProcess {
    /// The database is left to that process.
    Leave,
    /// The run waits until that process ends, at most for this time.
    Await(Duration),
}

/// The result of a run over every database.
#[derive(Debug, Clone, Default)]
pub struct RetentionResult {
    /// Number of partitions that were removed.
    pub removed: i64,
    /// The partitions and databases that stay for the next run.
    pub failed: Vec<RetentionFailure>,
}

/// A partition that was not removed, or a database on which nothing was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionFailure {
    /// The database.
    pub label: DatabaseLabel,
    /// Name of the partition; none where the whole database failed.
    pub partition: Option<String>,
    /// Text of the error.
    pub error: String,
}

impl Retention<'_> {
    /// Removes what is due in every database, and logs it. A database that fails or does not
    /// answer does not keep the others from their turn.
    pub async fn run_all(&self, other: OtherProcess) -> RetentionResult {
        let databases = match self.0.tenant_databases().all().await {
            Ok(databases) => databases,
            Err(error) => return RetentionResult::of_error(DatabaseLabel::default(), &error),
        };
        let (places, mut runs) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
        for database in databases {
            let (control, places) = (self.0.clone(), places.clone());
            runs.spawn(async move {
                let _place = places.acquire_owned().await;
                control.retention().run_on(&database, other).await
            });
        }
        let mut result = RetentionResult::default();
        while let Some(ended) = runs.join_next().await {
            match ended {
                Ok(RetentionResult { removed, failed }) => {
                    result.removed += removed;
                    result.failed.extend(failed);
                }
                Err(error) => {
                    tracing::error!(%error, "retention failed");
                    result.failed.push(RetentionFailure {
                        label: DatabaseLabel::default(),
                        partition: None,
                        error: error.to_string(),
                    });
                }
            }
        }
        result
    }

    /// Leaves a row in the audit log for a run that an operator begins.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn record_run(&self, partitions: &[String]) -> Result<(), InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let (subject, details) = (Subject::platform("retention"), json!({ "due": partitions }));
        self.0.audit().record(&mut tx, "retention.run", subject, details).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn run_on(&self, database: &InboxDatabase, other: OtherProcess) -> RetentionResult {
        let began = Instant::now();
        loop {
            let run = match timeout(LONGEST, self.run(database)).await {
                Ok(Ok(run)) => run,
                Ok(Err(error)) => {
                    return RetentionResult::of_error(database.label.clone(), &error);
                }
                Err(_) => {
                    let text = format!(
                        "it took more than {} s; the next run goes on where it ended",
                        LONGEST.as_secs()
                    );
                    let error = InboxError::conflict(text);
                    return RetentionResult::of_error(database.label.clone(), &error);
                }
            };
            match other {
                _ if run.is_ours => return RetentionResult::of_run(database, run),
                OtherProcess::Leave => return RetentionResult::default(),
                OtherProcess::Await(longest) if began.elapsed() >= longest => {
                    let error = InboxError::conflict("another process removes partitions there");
                    return RetentionResult::of_error(database.label.clone(), &error);
                }
                OtherProcess::Await(_) => sleep(AGAIN).await,
            }
        }
    }
}

impl RetentionResult {
    /// Logs the error of a database, and returns it as the result.
    fn of_error(label: DatabaseLabel, error: &InboxError) -> Self {
        let DatabaseLabel { tenant, database } = &label;
        tracing::error!(tenant, database, %error, "retention failed");
        let failure = RetentionFailure { label, partition: None, error: error.to_string() };
        Self { removed: 0, failed: vec![failure] }
    }

    /// Logs a run on one database, and returns its result.
    fn of_run(database: &InboxDatabase, run: RetentionRun) -> Self {
        let DatabaseLabel { tenant, database: name } = &database.label;
        for Removal { partition_name, class, removed, moved, bytes, .. } in &run.removed {
            tracing::info!(
                tenant,
                database = name,
                partition = partition_name,
                class,
                messages = removed,
                moved,
                bytes,
                "time partition removed"
            );
        }
        let failed = run.failed.into_iter().map(|(partition, error)| {
            tracing::error!(tenant, database = name, partition, error, "retention failed");
            RetentionFailure { label: database.label.clone(), partition: Some(partition), error }
        });
        Self { removed: run.removed.len() as i64, failed: failed.collect() }
    }
}
