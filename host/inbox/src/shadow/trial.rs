//! One trial: a transaction that begins where the live run began, runs the candidate and is rolled
//! back.

use std::{collections::BTreeMap, time::Duration};

use oncebox_model::{
    error::InboxError,
    handler::DeliveryKind,
    hooks::{self, Defect},
    outcome::{Failure, FailureKind},
    outgoing::Output,
    policy::PayloadPolicy,
    tx::{Tx, bounded},
};
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{
    cancels,
    capture::{self, Change, Trace},
    compare::{self, Difference},
    net::{self, Net},
    queue::{LiveRun, Sampled, TrialContext},
    table::{self, TableRefs},
    tally::{Cost, TrialVerdict},
    undo,
};
use crate::{
    admission::{Admission, AdmissionRequest, Class},
    batch::{
        call::{Call, CallResult, call},
        claim::{Claimant, InitialStatus, claim},
        outgoing::outbox,
        statements::refused,
    },
    session::Transaction,
};

/// Interval at which the host checks whether a transaction waits for the trial.
const LOOK: Duration = Duration::from_millis(20);
/// Longest duration of that check: a trial that is not watched is stopped.
const LOOK_MAX: Duration = Duration::from_millis(200);

/// Reason why a trial came to no comparison.
enum Unfit {
    Skipped(&'static str),
    Failed(Failure),
    Host(InboxError),
}

impl From<InboxError> for Unfit {
    fn from(error: InboxError) -> Self {
        Self::Host(error)
    }
}

impl TrialContext {
    /// Tries the candidate on a message. Nothing of the trial remains in the tenant's tables,
    /// whatever happens.
    pub(super) async fn attempt(&self, sampled: &Sampled) -> TrialVerdict {
        let Some(admission) = self.admission() else {
            return TrialVerdict::Skipped("no_connection");
        };
        let transaction = match self.sessions.begin_spare(&admission).await {
            Ok(Some(transaction)) => transaction,
            Ok(None) => return TrialVerdict::Skipped("no_connection"),
            Err(_) => return TrialVerdict::Skipped("database"),
        };
        let ends_at = Instant::now() + sampled.shadow.duration;
        let tried = tokio::select! {
            biased;
            reason = self.in_the_way(transaction.backend()) => Err(Unfit::Skipped(reason)),
            tried = timeout_at(ends_at, self.steps(&transaction, sampled, ends_at)) => tried.unwrap_or(Err(Unfit::Skipped("time"))),
        };
        if hooks::sabotage(Defect::ShadowCommits) && tried.is_ok() {
            let _ = transaction.commit().await; // a defect, for the tests to notice
        } else {
            transaction.rollback().await;
        }
        match tried {
            Ok(verdict) => verdict,
            Err(Unfit::Skipped(reason)) => TrialVerdict::Skipped(reason),
            Err(Unfit::Failed(failure)) => TrialVerdict::Failed(failed(&failure)),
            Err(Unfit::Host(error)) => {
                tracing::debug!(message_id = sampled.message.id, %error, "a trial of a shadow came \
                    to nothing");
                TrialVerdict::Skipped(reason(&error))
            }
        }
    }

    /// Returns an admission for a trial, where no transaction waits for what it takes.
    fn admission(&self) -> Option<Admission> {
        let ask = AdmissionRequest {
            tenant_id: self.sessions.tenant_id,
            consumer_id: self.consumer_id,
            class: Class::Fair,
            memory: self.memory,
            messages: 0,
        };
        self.sessions.scheduler().admit_spare(ask)
    }

    async fn steps(
        &self,
        transaction: &Transaction<'_>,
        sampled: &Sampled,
        ends_at: Instant,
    ) -> Result<TrialVerdict, Unfit> {
        let tx = transaction.tx();
        if !hooks::sabotage(Defect::ShadowCommits) {
            self.forbid_commit(transaction, sampled.generation).await?;
        }
        let live = restore(transaction, sampled).await?;
        let watch = capture::begin(tx).await?;
        let output = self.run(transaction, sampled, ends_at).await?;
        let trace = watch.end(transaction).await?;
        check_deferred(tx).await?;
        let candidate =
            trace.changes.as_ref().map_err(|reason| Unfit::Skipped(of_candidate(reason)))?;
        compare(tx, sampled, &live, (candidate, &trace), output).await
    }

    /// Sets a guard that nothing ever takes away, so that the database itself refuses to commit.
    async fn forbid_commit(
        &self,
        transaction: &Transaction<'_>,
        generation: i64,
    ) -> Result<(), InboxError> {
        let claimant = Claimant {
            consumer_id: self.consumer_id,
            generation,
            payload: PayloadPolicy::None,
            payload_bytes_max: 0,
            parks_forgotten: false,
            is_light: false,
            is_front: false,
        };
        claim(transaction, claimant, &[], InitialStatus::Completed).await.map(drop)
    }

    async fn run(
        &self,
        transaction: &Transaction<'_>,
        sampled: &Sampled,
        ends_at: Instant,
    ) -> Result<Output, Unfit> {
        let handler = &sampled.shadow.handler;
        let outbox = outbox(&self.sessions, self.consumer_id, transaction, &**handler);
        let outbox = cancels::replayed(outbox, &sampled.live.cancels);
        let of_candidate = Call {
            tenant: &self.tenant,
            consumer: &self.consumer,
            handler,
            message: &sampled.message,
            attempt: 1,
            kind: DeliveryKind::Shadow,
            // The trial as a whole ends before this deadline.
            deadline: ends_at.saturating_duration_since(Instant::now()) + LOOK,
            outbox: &outbox,
            may_run_ahead: false,
        };
        match call(of_candidate, transaction.tx()).await {
            CallResult::Ok(output) => Ok(output),
            CallResult::Failed(failure) => Err(Unfit::Failed(failure)),
            CallResult::Contention(_) => Err(Unfit::Skipped("busy")),
            CallResult::Abandoned(_) => Err(Unfit::Skipped("time")),
            CallResult::ConnectionLost => Err(Unfit::Skipped("database")),
            CallResult::Stopped(_) => Err(Unfit::Skipped("no_connection")),
        }
    }

    /// Waits until a transaction waits for this backend or for a connection, or until that is
    /// unknown. Returns the reason to stop the trial.
    async fn in_the_way(&self, backend: i32) -> &'static str {
        const WAITED_FOR: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity a \
            WHERE a.wait_event_type = 'Lock' AND a.pid <> $1 AND $1 = ANY \
            (pg_blocking_pids(a.pid)))";
        loop {
            sleep(LOOK).await;
            if self.sessions.is_short() {
                return "no_connection";
            }
            let look =
                sqlx::query_scalar(WAITED_FOR).bind(backend).fetch_one(self.sessions.host_pool());
            match timeout(LOOK_MAX, look).await {
                Ok(Ok(false)) => {}
                Ok(Ok(true)) => return "stood_in_the_way",
                Ok(Err(_)) | Err(_) => return "database",
            }
        }
    }
}

/// Restores the rows that the live run saw, and returns its net effect on them. Captures the undo
/// like a run, so that it is known to have changed these rows back, and no others.
async fn restore(transaction: &Transaction<'_>, sampled: &Sampled) -> Result<Net, Unfit> {
    let tx = transaction.tx();
    let changes = sampled.live.trace.changes.as_ref().map_err(|reason| Unfit::Skipped(reason))?;
    let places = table::read(tx, changes.iter().map(|change| change.table)).await?;
    let live = net::net(changes, &places).ok_or(Unfit::Skipped("not_captured"))?;
    let watch = capture::begin(tx).await?;
    if let Err(error) = undo::undo(tx, &live, &places).await {
        return Err(if is_busy(&error) || refused(&error).is_none() {
            Unfit::Host(error)
        } else {
            Unfit::Skipped("moved_on")
        });
    }
    let undone = watch.end(transaction).await?;
    let undone =
        net_of(tx, undone.changes.as_ref().map_err(|_| Unfit::Skipped("moved_on"))?, places)
            .await?;
    let undone = undone.ok_or(Unfit::Skipped("moved_on"))?.1;
    if undo::is_exact(&live, &undone) { Ok(live) } else { Err(Unfit::Skipped("moved_on")) }
}

/// Returns the net effect of changes, with the tables that they are about. `places` holds those
/// that are known already.
async fn net_of(
    tx: &Tx,
    changes: &[Change],
    mut places: TableRefs,
) -> Result<Option<(TableRefs, Net)>, InboxError> {
    let unknown: Vec<_> =
        changes.iter().map(|change| change.table).filter(|oid| !places.contains_key(oid)).collect();
    if !unknown.is_empty() {
        let found = table::read(tx, unknown).await?;
        // One table may then be described by two equal values.
        places.extend(found);
    }
    Ok(net::net(changes, &places).map(|net| (places, net)))
}

async fn compare(
    tx: &Tx,
    sampled: &Sampled,
    live: &Net,
    (changes, trace): (&[Change], &Trace),
    output: Output,
) -> Result<TrialVerdict, Unfit> {
    if let Some(text) = &output.result
        && serde_json::from_str::<serde::de::IgnoredAny>(text).is_err()
    {
        return Ok(TrialVerdict::Failed(failed(&Failure::new(
            FailureKind::BadResult,
            "the result is not JSON",
        ))));
    }
    let (_, candidate) =
        net_of(tx, changes, BTreeMap::new()).await?.ok_or(Unfit::Skipped("not_captured"))?;
    let LiveRun { output: live_output, trace: live_trace, .. } = &sampled.live;
    let mut differences = compare::effects((live, live_trace.clock), (&candidate, trace.clock));
    let results = (live_output.result.as_deref(), output.result.as_deref());
    differences.extend(compare::outcome(results.0, results.1));
    differences.extend(compare::outgoing(&live_output.outgoing, &output.outgoing));
    let cost = Cost {
        live: live_trace.took,
        candidate: trace.took,
        live_statements: live_trace.statements,
        candidate_statements: trace.statements,
    };
    Ok(if differences.is_empty() {
        TrialVerdict::Same(cost)
    } else {
        TrialVerdict::Differ(cost, differences)
    })
}

/// Checks the tenant's deferred constraints, by name: all of them at once would include the guard.
/// Their failure is the candidate's, as at a commit.
async fn check_deferred(tx: &Tx) -> Result<(), Unfit> {
    const DEFERRABLE: &str = "SELECT string_agg(format('%I.%I', n.nspname, k.conname), ', ') FROM \
        pg_catalog.pg_constraint k \
        JOIN pg_catalog.pg_namespace n ON n.oid = k.connamespace \
        WHERE n.nspname = current_schema() AND k.condeferrable AND k.conparentid = 0";
    let mut statement = tx.statement().await;
    let names = bounded(
        sqlx::query_scalar::<_, Option<String>>(DEFERRABLE).fetch_one(statement.connection()),
    )
    .await;
    statement.finish(names.as_ref().err());
    let Some(names) = names.map_err(InboxError::from)? else { return Ok(()) };
    let mut statement = tx.statement().await;
    let set = sqlx::raw_sql(AssertSqlSafe(format!("SET CONSTRAINTS {names} IMMEDIATE")));
    let checked = bounded(set.execute(statement.connection())).await;
    statement.finish(checked.as_ref().err());
    match checked.map_err(InboxError::from) {
        Ok(_) => Ok(()),
        Err(error) => Err(match refused(&error) {
            Some(answer) if !is_busy(&error) => Unfit::Failed(Failure::new(
                FailureKind::Sql { sqlstate: answer.sqlstate },
                answer.message,
            )),
            _ => Unfit::Host(error),
        }),
    }
}

fn failed(failure: &Failure) -> Difference {
    Difference {
        table: String::new(),
        change: "outcome",
        column: "failure".to_owned(),
        key: None,
        before: None,
        live: Some("ok".to_owned()),
        candidate: Some(format!("{}: {}", failure.kind.reason(), failure.text)),
    }
}

fn of_candidate(reason: &'static str) -> &'static str {
    if reason == "too_many_changes" { "candidate_changes" } else { reason }
}

/// Returns whether a lock was not to be had.
fn is_busy(error: &InboxError) -> bool {
    matches!(error, InboxError::InFlightElsewhere)
}

fn reason(error: &InboxError) -> &'static str {
    match error {
        InboxError::InFlightElsewhere => "busy",
        InboxError::StaleDeployments => "stale",
        _ => "database",
    }
}
