//! Retention: what is removed when, and runs that an operator begins.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{Json, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use futures::StreamExt;
use oncebox_control::{Control, InboxDatabase, OtherProcess};
use oncebox_model::InboxError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api, auth::Caller, databases::DatabaseLabelBody, error::ApiError, extract,
    tenant_changes::Nothing,
};

/// Longest wait for one database, before the answer is given without it.
const ANSWER_MAX: Duration = Duration::from_secs(12);
/// Databases that are asked at a time.
const AT_ONCE: usize = 16;
/// Longest wait of a run until another process has ended its work on a database.
const OTHER_MAX: Duration = Duration::from_secs(3_600);

/// The time partitions of every database with an inbox, and their removals.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Retention)]
pub struct RetentionBody {
    /// Newest run that a request began in the process that answers; null where there was none.
    pub run: Option<RetentionRunBody>,
    /// The databases: the host's first, then the others by name.
    pub databases: Vec<RetentionDatabaseBody>,
}

/// A database with an inbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = RetentionDatabase)]
pub struct RetentionDatabaseBody {
    /// The database.
    #[serde(flatten)]
    pub label: DatabaseLabelBody,
    /// Cause where the database does not answer. Then the lists are empty.
    pub error: Option<String>,
    /// Time partitions of the inbox, by the time at which they are due.
    pub partitions: Vec<TimePartitionBody>,
    /// Removals, newest first: at most the last 50, and all that are not finished.
    pub removals: Vec<RemovalBody>,
    /// Numbers of messages that were removed so far.
    pub forgotten: Vec<ForgottenBody>,
}

/// A time partition of an inbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = TimePartition)]
pub struct TimePartitionBody {
    /// Name of its table.
    pub name: String,
    /// Name of its retention class, as `retention` in a policy.
    pub class: String,
    /// Begin of the time in which its messages changed their status for the last time.
    pub from_at: DateTime<Utc>,
    /// End of that time, exclusive.
    pub to_at: DateTime<Utc>,
    /// Time from which it is removed; null for never.
    pub due_at: Option<DateTime<Utc>>,
    /// Whether that time has come, by the database's clock.
    pub is_due: bool,
    /// Messages in it, as PostgreSQL estimates them; null where it does not know.
    pub messages: Option<i64>,
    /// Messages in it that stay: they move before it is removed. Null where it is not due.
    pub staying: Option<i64>,
    /// Size with its indexes, bytes.
    pub bytes: i64,
    /// Whether Oncebox made it. Others are never removed.
    pub is_ours: bool,
}

/// The removal of a time partition.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Removal)]
pub struct RemovalBody {
    /// Name of the partition's table.
    pub partition: String,
    /// Name of its retention class.
    pub class: String,
    /// Begin of the partition's time.
    pub from_at: DateTime<Utc>,
    /// End of the partition's time, exclusive.
    pub to_at: DateTime<Utc>,
    /// `moving`: messages that stay are moved. `counted`: the rest is counted, and is being
    /// removed. `dropped`: the partition is gone.
    pub state: String,
    /// Messages that were moved so far.
    pub moved: i64,
    /// Messages that were removed; null before they are counted.
    pub removed: Option<i64>,
    /// Size of the partition with its indexes, bytes; null before it is counted.
    pub bytes: Option<i64>,
    /// Time of the first step.
    pub began_at: DateTime<Utc>,
    /// Time of the last step; null where the removal is not finished.
    pub dropped_at: Option<DateTime<Utc>>,
    /// Host or operator that did the last step.
    pub host: String,
    /// Error that ended the last try; null where there was none.
    pub error: Option<String>,
}

/// Messages of a consumer that were removed so far.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Forgotten)]
pub struct ForgottenBody {
    /// Tenant of the consumer.
    pub tenant: String,
    /// The consumer.
    pub consumer: String,
    /// Number of messages that had completed.
    pub completed: i64,
    /// Number of messages that had been skipped.
    pub skipped: i64,
    /// Number of messages that had been discarded.
    pub discarded: i64,
}

/// A run that a request began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RetentionRun)]
pub struct RetentionRunBody {
    /// Time of its begin.
    pub began_at: DateTime<Utc>,
    /// Name of the token, or of the user of the host's machine, that began it.
    pub by: String,
    /// Time of its end; null while it is under way.
    pub ended_at: Option<DateTime<Utc>>,
    /// Number of partitions that it removed, at its end.
    pub removed: i64,
    /// Partitions and databases that stay for the next run, at its end.
    pub failed: Vec<RetentionFailureBody>,
}

/// A partition that a run did not remove, or a database on which it removed none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RetentionFailure)]
pub struct RetentionFailureBody {
    /// The database.
    #[serde(flatten)]
    pub label: DatabaseLabelBody,
    /// Name of the partition; null for the whole database.
    pub partition: Option<String>,
    /// Cause.
    pub error: String,
}

/// The answer to a request for a run.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = RetentionBegun)]
pub struct RetentionBegunBody {
    /// Whether this request began the run. False where one was under way in this process.
    pub is_begun: bool,
    /// The run that is under way.
    pub run: RetentionRunBody,
    /// The time partitions that are due.
    pub due: Vec<DuePartitionBody>,
}

/// A time partition that is due.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = DuePartition)]
pub struct DuePartitionBody {
    /// The database.
    #[serde(flatten)]
    pub label: DatabaseLabelBody,
    /// The partition.
    pub partition: TimePartitionBody,
}

impl From<oncebox_control::TimePartition> for TimePartitionBody {
    fn from(partition: oncebox_control::TimePartition) -> Self {
        let oncebox_control::TimePartition {
            name,
            class,
            from_at,
            to_at,
            due_at,
            is_due,
            messages,
            staying,
            bytes,
            is_ours,
            ..
        } = partition;
        Self { name, class, from_at, to_at, due_at, is_due, messages, staying, bytes, is_ours }
    }
}

impl From<oncebox_control::Removal> for RemovalBody {
    fn from(removal: oncebox_control::Removal) -> Self {
        let oncebox_control::Removal {
            partition_name: partition,
            class,
            from_at,
            to_at,
            state,
            moved,
            removed,
            bytes,
            began_at,
            dropped_at,
            host,
            error,
        } = removal;
        Self {
            partition,
            class,
            from_at,
            to_at,
            state,
            moved,
            removed,
            bytes,
            began_at,
            dropped_at,
            host,
            error,
        }
    }
}

impl From<oncebox_control::Forgotten> for ForgottenBody {
    fn from(forgotten: oncebox_control::Forgotten) -> Self {
        let oncebox_control::Forgotten { tenant, consumer, completed, skipped, discarded } =
            forgotten;
        Self { tenant, consumer, completed, skipped, discarded }
    }
}

impl From<oncebox_control::RetentionFailure> for RetentionFailureBody {
    fn from(failure: oncebox_control::RetentionFailure) -> Self {
        let oncebox_control::RetentionFailure { label, partition, error } = failure;
        Self { label: label.into(), partition, error }
    }
}

/// The newest run that a request began in this process.
#[derive(Default)]
pub(crate) struct RetentionRuns(Mutex<Option<RetentionRunBody>>);

impl RetentionRuns {
    fn newest(&self) -> MutexGuard<'_, Option<RetentionRunBody>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the begin of a run. Returns the run that is under way, and whether it is this one.
    fn begin(&self, by: &str, began_at: DateTime<Utc>) -> (RetentionRunBody, bool) {
        let mut newest = self.newest();
        if let Some(run) = newest.as_ref().filter(|run| run.ended_at.is_none()) {
            return (run.clone(), false);
        }
        let run = RetentionRunBody {
            began_at,
            by: by.to_owned(),
            ended_at: None,
            removed: 0,
            failed: Vec::new(),
        };
        *newest = Some(run.clone());
        (run, true)
    }

    /// Notes the end of the run that is under way.
    fn end(&self, ended_at: DateTime<Utc>, removed: i64, failed: Vec<RetentionFailureBody>) {
        if let Some(run) = self.newest().as_mut() {
            (run.ended_at, run.removed, run.failed) = (Some(ended_at), removed, failed);
        }
    }
}

/// Show which messages are removed when, and what was removed
///
/// A database that does not answer is in the answer with its error.
#[utoipa::path(get, path = "/v1/retention", tag = "retention", responses((status = 200, body = RetentionBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    State(api): State<Api>,
) -> Result<Json<RetentionBody>, ApiError> {
    let databases = databases(&caller.control).await?;
    let run = api.retention_runs().newest().clone();
    Ok(Json(RetentionBody { run, databases }))
}

/// Remove the messages that are past their retention
///
/// The run goes on without the caller; `GET /v1/retention` shows its progress. A process has one
/// such run at a time.
#[utoipa::path(post, path = "/v1/retention/run", tag = "retention", request_body = Nothing,
    responses((status = 202, body = RetentionBegunBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn run(
    caller: Caller,
    State(api): State<Api>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<(StatusCode, Json<RetentionBegunBody>), ApiError> {
    let due = due(databases(&caller.control).await?);
    let began_at = caller.control.now().await?;
    let (run, is_begun) = api.retention_runs().begin(caller.principal.name(), began_at);
    if is_begun {
        let names: Vec<_> = due.iter().map(|due| due.partition.name.clone()).collect();
        if let Err(error) = caller.control.retention().record_run(&names).await {
            api.retention_runs().end(began_at, 0, Vec::new());
            return Err(error.into());
        }
        api.tasks().spawn(carry_out(api.clone(), caller.control));
    }
    Ok((StatusCode::ACCEPTED, Json(RetentionBegunBody { is_begun, run, due })))
}

/// Carries out a run that was begun.
async fn carry_out(api: Api, control: Control) {
    let messages = control.retention().run_all(OtherProcess::Await(OTHER_MAX)).await;
    let outgoing = control.retention().remove_outgoing(api.limits().outgoing_days).await;
    // The host's clock stands in for that of a database that is away.
    let ended_at = control.now().await.unwrap_or_else(|_| Utc::now());
    let failed = messages.failed.into_iter().chain(outgoing.failed).map(Into::into).collect();
    api.retention_runs().end(ended_at, messages.removed + outgoing.removed, failed);
}

/// Reads every database with an inbox, in the order of the list.
async fn databases(control: &Control) -> Result<Vec<RetentionDatabaseBody>, InboxError> {
    let read = |database| {
        let control = control.clone();
        async move { body(&control, database).await }
    };
    let reads: Vec<_> = control.tenant_databases().all().await?.into_iter().map(read).collect();
    Ok(futures::stream::iter(reads).buffered(AT_ONCE).collect().await)
}

async fn body(control: &Control, database: InboxDatabase) -> RetentionDatabaseBody {
    let answer = async {
        let report = control.retention().report(&database).await?;
        Ok::<_, InboxError>((report, control.retention().forgotten(&database).await?))
    };
    let nothing = |error: String| RetentionDatabaseBody {
        label: database.label.clone().into(),
        error: Some(error),
        partitions: Vec::new(),
        removals: Vec::new(),
        forgotten: Vec::new(),
    };
    match tokio::time::timeout(ANSWER_MAX, answer).await {
        Ok(Ok((report, forgotten))) => RetentionDatabaseBody {
            label: report.label.into(),
            error: None,
            partitions: report.partitions.into_iter().map(Into::into).collect(),
            removals: report.removals.into_iter().map(Into::into).collect(),
            forgotten: forgotten.into_iter().map(Into::into).collect(),
        },
        Ok(Err(error)) => nothing(error.to_string()),
        Err(_) => nothing(format!("the database did not answer within {} s", ANSWER_MAX.as_secs())),
    }
}

/// Returns the partitions that a run removes.
fn due(databases: Vec<RetentionDatabaseBody>) -> Vec<DuePartitionBody> {
    let due = databases.into_iter().flat_map(|database| {
        let RetentionDatabaseBody { label, partitions, .. } = database;
        partitions
            .into_iter()
            .filter(|partition| partition.is_due && partition.is_ours)
            .map(move |partition| DuePartitionBody { label: label.clone(), partition })
    });
    due.collect()
}
