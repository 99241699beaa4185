//! The completion: the last statement of the host before COMMIT.

use std::time::Duration;

use oncebox_model::{
    MessageStatus, Reason,
    error::InboxError,
    headers,
    hooks::{self, Defect},
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    outgoing::{OutgoingMessage, Output},
    policy::{Dedup, NoRoute, PayloadPolicy, Policy, Retry},
};
use serde_json::{Value, json};

use crate::{
    batch::outgoing::{Emitted, with_outgoing},
    host_call::{column, host_call},
    ordering::sequence::SequencePosition,
    session::Transaction,
};

/// Returns the disposition of a message after a failure. `attempts` counts its runs, and `age` is
/// the time since it was received or redriven.
pub fn disposition(
    failure: &Failure,
    attempts: u32,
    age: Duration,
    policy: &Policy,
) -> Disposition {
    match failure.kind {
        FailureKind::Reject => Disposition::FailedTerminal,
        FailureKind::NoRoute => unrouted(policy),
        FailureKind::Park | FailureKind::Crashed | FailureKind::Schema => Disposition::Parked,
        FailureKind::Reference(fault) if !fault.may_pass() => Disposition::Parked,
        _ if attempts >= policy.retry.attempts_max || policy.retry.is_too_old(age) => {
            Disposition::FailedTerminal
        }
        _ => Disposition::FailedRetryable,
    }
}

/// Returns the disposition that the policy gives to a message that no deployment takes.
pub(crate) fn unrouted(policy: &Policy) -> Disposition {
    match policy.no_route {
        NoRoute::Park => Disposition::Parked,
        NoRoute::Skip => Disposition::Skipped,
        NoRoute::Reject => Disposition::FailedTerminal,
    }
}

/// Returns the delay before the next attempt: the handler's, up to thirty days, or else the
/// policy's.
pub fn delay(failure: &Failure, attempts: u32, retry: &Retry) -> Duration {
    match failure.kind {
        FailureKind::Retry { delay: Some(delay) } => delay.min(DELAY_MAX),
        _ => retry.delay(attempts),
    }
}

/// Longest delay that a handler can ask for: thirty days.
const DELAY_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Rows that one transaction writes at its end, beyond its claims. A message that was claimed in
/// this transaction and completed without a result needs none: its claim is written as `completed`.
#[derive(Debug)]
pub struct Completion {
    /// Whether a message that completes leaves a light row.
    is_light: bool,
    /// Ids of claims that did not run; their rows are deleted.
    withdrawn: Vec<String>,
    /// Rows that are to be changed.
    rows: Vec<CompletedRow>,
    /// Failures among the rows, to be counted and logged after the commit.
    failures: Vec<Recorded>,
    /// Messages that the runs which succeeded emitted.
    emitted: Emitted,
}

/// Failure that becomes a row. It is counted and logged after the commit, since the transaction may
/// be repeated until then.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Id of the message.
    pub message_id: String,
    /// Failure of the run.
    pub failure: Failure,
    /// Disposition that the message gets.
    pub disposition: Disposition,
    /// Number of the run, from 1.
    pub attempt: u32,
}

#[derive(Debug)]
/// Change of one inbox row, as the host function `complete` takes it.
struct CompletedRow {
    id: String,
    epoch: i64,
    status: &'static str,
    reason: Option<String>,
    error: Option<String>,
    result: Option<String>,
    delay: Option<Duration>,
    version: Option<i32>,
    keep: bool,
    headers: Option<Vec<u8>>,
    payload: Option<Vec<u8>>,
    /// Columns that the light row of a claim lacks; none where the row is full, or stays light.
    record: Option<Value>,
}

/// Longest text kept in `last_error`, in bytes.
const ERROR_BYTES_MAX: usize = 4_096;

/// A counted attempt of a message, whose lease was committed before the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Number of the lease among those of the message; a later lease has a higher one.
    pub epoch: i64,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Time since the message was received, or last redriven.
    pub age: Duration,
}

impl Lease {
    /// The first attempt of a message that this transaction claims.
    const NONE: Self = Self { epoch: 0, attempt: 1, age: Duration::ZERO };
}

/// Run of a message, or a claim or lease of one that does not run.
#[derive(Clone, Copy)]
pub struct Execution<'a> {
    /// The message.
    pub message: &'a Message,
    /// Epoch of its lease; 0 for a claim of this transaction.
    pub epoch: i64,
    /// Version that ran it; none where none did.
    pub version: Option<i32>,
    /// Number of the run, from 1.
    pub attempt: u32,
    /// Time since the message was received, or last redriven.
    pub age: Duration,
}

impl<'a> Execution<'a> {
    /// Returns a claim of this transaction, or a lease, that no handler ran.
    pub(crate) fn of(message: &'a Message, lease: Option<Lease>) -> Self {
        let Lease { epoch, attempt, age } = lease.unwrap_or(Lease::NONE);
        Self { message, epoch, version: None, attempt, age }
    }
}

/// Reason in the row of a message that waits, or is parked, for versions before its own.
pub(crate) const GAP: &str = Reason::Gap.as_str();
/// Text in the row of a message that is parked since it may have run.
pub(crate) const PAST_HORIZON: &str = "the inbox has forgotten messages up to this offset of the \
    partition, and this one may be among them";
/// Reason in the row of a message whose aggregate is at its version or a later one.
pub(crate) const SUPERSEDED: &str = Reason::OldVersion.as_str();

impl Completion {
    /// Creates a completion without rows, for a consumer with this policy.
    pub(crate) fn new(policy: &Policy) -> Self {
        Self {
            is_light: policy.is_light(),
            withdrawn: Vec::new(),
            rows: Vec::new(),
            failures: Vec::new(),
            emitted: Emitted::default(),
        }
    }

    /// Returns what the row of a message that does not complete lacks, where its claim is light. A
    /// leased message has a full row.
    fn record(&self, ran: Execution<'_>) -> Option<Value> {
        (self.is_light && ran.epoch == 0).then(|| record_of(ran.message))
    }

    /// Withdraws a claim that did not run; its message comes again.
    pub fn withdraw(&mut self, id: &str) {
        if hooks::sabotage(Defect::WithdrawnClaimsStay) {
            return;
        }
        self.withdrawn.push(id.to_owned());
    }

    /// Completes a run that succeeded, and keeps what it emitted. Adds no row where the claim
    /// already says it all. `create` returns the trace context of an emit.
    pub(crate) fn succeeded(
        &mut self,
        ran: Execution<'_>,
        output: Output,
        policy: &Policy,
        create: impl FnMut(&OutgoingMessage) -> Option<String>,
    ) {
        let Output { result, outgoing } = output;
        self.emitted.add(ran.message, outgoing, create);
        let result = result.filter(|_| policy.keeps_result());
        if ran.epoch == 0 && (result.is_none() || policy.dedup == Dedup::Off) {
            return;
        }
        self.rows.push(CompletedRow {
            id: ran.message.id.clone(),
            epoch: ran.epoch,
            status: Disposition::Completed.status(),
            reason: None,
            error: None,
            result,
            delay: None,
            version: ran.version,
            keep: policy.payload == PayloadPolicy::All,
            headers: None,
            payload: None,
            record: None,
        });
    }

    /// Stores a claim that is behind another message of its key, with the payload that its later
    /// run needs. With `is_due` a retry worker looks at it at once. Otherwise the message before it
    /// releases it.
    pub fn waits(&mut self, message: &Message, is_due: bool) {
        let status = if is_due { MessageStatus::Received } else { MessageStatus::Waiting }.as_str();
        self.open(Execution::of(message, None), status, None, is_due.then_some(Duration::ZERO));
    }

    /// Stores a message that waits for missing versions of its aggregate, for at most `wait`.
    pub(crate) fn waits_for_gap(
        &mut self,
        ran: Execution<'_>,
        gap: &SequencePosition,
        wait: Duration,
    ) {
        self.open(ran, MessageStatus::Waiting.as_str(), Some((GAP, gap.to_string())), Some(wait));
    }

    /// Keeps the record of a message that its claim parked, since the inbox may have forgotten that
    /// it ran.
    pub(crate) fn past_horizon(&mut self, message: &Message, policy: &Policy) {
        let why = Some((Reason::Horizon.as_str(), PAST_HORIZON.to_owned()));
        self.open(Execution::of(message, None), Disposition::Parked.status(), why, None);
        if policy.payload == PayloadPolicy::None
            && let Some(row) = self.rows.last_mut()
        {
            (row.keep, row.headers, row.payload) = (false, None, None);
        }
    }

    /// Parks a message that waited too long for missing versions of its aggregate.
    pub(crate) fn parked_for_gap(&mut self, ran: Execution<'_>, gap: &SequencePosition) {
        self.open(ran, Disposition::Parked.status(), Some((GAP, gap.to_string())), None);
    }

    /// Adds the row of a message that has not run. It keeps its headers and payload, whatever the
    /// policy says, since it may run later.
    fn open(
        &mut self,
        ran: Execution<'_>,
        status: &'static str,
        why: Option<(&str, String)>,
        delay: Option<Duration>,
    ) {
        let record = &ran.message.record;
        let (reason, error) = why.unzip();
        self.rows.push(CompletedRow {
            id: ran.message.id.clone(),
            epoch: ran.epoch,
            status,
            reason: reason.map(str::to_owned),
            error,
            result: None,
            delay,
            version: None,
            keep: true,
            headers: Some(headers::encode(&record.headers)),
            payload: record.payload.clone(),
            record: self.record(ran),
        });
    }

    /// Skips a message whose aggregate is at its version or a later one.
    pub(crate) fn is_superseded(
        &mut self,
        ran: Execution<'_>,
        position: &SequencePosition,
        policy: &Policy,
    ) {
        let keep = policy.payload == PayloadPolicy::All;
        self.rows.push(CompletedRow {
            id: ran.message.id.clone(),
            epoch: ran.epoch,
            status: Disposition::Skipped.status(),
            reason: Some(SUPERSEDED.to_owned()),
            error: Some(position.to_string()),
            result: None,
            delay: None,
            version: None,
            keep,
            headers: None,
            payload: None,
            record: self.record(ran),
        });
    }

    /// Returns the messages that the runs emitted.
    pub(crate) fn emitted(&self) -> &Emitted {
        &self.emitted
    }

    /// Notes that the messages that the runs emitted so far have rows.
    pub(crate) fn wrote_emitted(&mut self) {
        self.emitted.wrote();
    }

    /// Returns the result that the first row keeps, as JSON.
    pub(crate) fn result(&self) -> Option<&str> {
        self.rows.first().and_then(|row| row.result.as_deref())
    }

    /// Returns the delays after which rows of this completion become due. Rows that wait for other
    /// messages are left out.
    pub(crate) fn delays(&self) -> impl Iterator<Item = Duration> {
        self.rows
            .iter()
            .filter(|row| row.status != MessageStatus::Waiting.as_str())
            .filter_map(|row| row.delay)
    }

    /// Takes the recorded failures out, so that each is reported once.
    pub(crate) fn recorded(&mut self) -> Vec<Recorded> {
        std::mem::take(&mut self.failures)
    }

    /// Turns the claim or lease of a failed run into the failure record, in this very transaction.
    /// Returns the disposition.
    pub fn failed(
        &mut self,
        ran: Execution<'_>,
        failure: &Failure,
        policy: &Policy,
    ) -> Disposition {
        let disposition = disposition(failure, ran.attempt, ran.age, policy);
        // A message that is to run again needs its payload, whatever the policy says.
        let keep =
            disposition == Disposition::FailedRetryable || policy.payload != PayloadPolicy::None;
        let record = &ran.message.record;
        let (message_id, attempt) = (ran.message.id.clone(), ran.attempt);
        self.failures.push(Recorded { message_id, failure: failure.clone(), disposition, attempt });
        self.rows.push(CompletedRow {
            id: ran.message.id.clone(),
            epoch: ran.epoch,
            status: disposition.status(),
            reason: Some(failure.kind.reason()),
            error: Some(storable(&failure.text)),
            result: None,
            delay: (disposition == Disposition::FailedRetryable)
                .then(|| delay(failure, ran.attempt, &policy.retry)),
            version: ran.version,
            keep,
            headers: keep.then(|| headers::encode(&record.headers)),
            payload: record.payload.clone().filter(|_| keep),
            record: self.record(ran),
        });
        disposition
    }
}

/// Returns the columns that a light row lacks of a full one, as the host function `complete` takes
/// them.
fn record_of(message: &Message) -> Value {
    json!({
        "key": message.record.key.as_ref().map(hex::encode),
        "ordering_key": message.ordering_key.as_ref().map(hex::encode),
        "source": message.source,
        "event_type": message.event_type,
        "event_version": message.event_version,
        "content_type": message.content_type,
        "trace_parent": message.trace_parent,
        "payload_hash": message.payload_hash.as_ref().map(hex::encode),
    })
}

/// Returns a text that PostgreSQL accepts: of bounded length, without NUL bytes.
pub(crate) fn storable(text: &str) -> String {
    let mut end = text.len().min(ERROR_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace('\0', "\u{fffd}")
}

/// Builds the call of `complete` for the rows of a completion, and further parameters. Two texts
/// are made of it, so that a transaction without outgoing messages binds no parameter of theirs.
macro_rules! completion_call {
    ($transaction:ident, $consumer_id:ident, $completion:ident {
        $($parameter:ident: $value:expr),* $(,)?
    }) => {{
        let rows = &$completion.rows;
        host_call!("complete" {
            p_secret: $transaction.secret(),
            p_consumer: $consumer_id,
            p_withdrawn: &$completion.withdrawn,
            p_id: column(rows, |r| r.id.as_str()),
            p_epoch: column(rows, |r| r.epoch),
            p_status: column(rows, |r| r.status),
            p_reason: column(rows, |r| r.reason.as_deref()),
            p_error: column(rows, |r| r.error.as_deref()),
            p_result: column(rows, |r| r.result.as_deref()),
            p_delay_ms: column(rows, |r| r.delay.map(|delay| delay.as_millis() as i64)),
            p_version: column(rows, |r| r.version),
            p_keep: column(rows, |r| r.keep),
            p_headers: column(rows, |r| r.headers.as_deref()),
            p_payload: column(rows, |r| r.payload.as_deref()),
            p_record: column(rows, |r| r.record.as_ref()),
            p_light: $completion.is_light,
            $($parameter: $value,)*
        })
    }};
}

/// Enqueues the completion: it is sent with COMMIT. It writes the rows and the outgoing messages,
/// withdraws claims and deletes the guard row. PostgreSQL refuses it unless the claim is in this
/// very transaction. It also refuses it where a swallowed error has aborted the transaction.
pub async fn enqueue_completion(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    completion: &Completion,
) -> Result<(), InboxError> {
    hooks::point("inbox:complete:before");
    let emitted = completion.emitted.unwritten();
    let query = if emitted.is_empty() {
        completion_call!(transaction, consumer_id, completion {})
    } else {
        hooks::point("outgoing:insert:before");
        with_outgoing!(emitted, completion_call, transaction, consumer_id, completion)
    };
    Ok(transaction.tx().enqueue(query, Some("inbox:complete:after")).await?)
}

#[cfg(test)]
mod tests {
    use oncebox_model::reference::ReferenceFault;

    use super::*;

    fn check(kind: FailureKind, attempts: u32, expected: Disposition) {
        check_under("park", kind, attempts, expected);
    }

    fn check_under(no_route: &str, kind: FailureKind, attempts: u32, expected: Disposition) {
        let policy = format!(
            "topics = ['t']\nack = 'after_commit'\nno_route = '{no_route}'\n[retry]\nattempts_max \
                = 3"
        );
        let policy = Policy::parse(&policy).expect("a policy");
        assert_eq!(
            disposition(&Failure::new(kind, ""), attempts, Duration::ZERO, &policy),
            expected
        );
    }

    // S1-067, S1-068, S1-115, S2-013: which failures are tried again, and how often.
    #[test]
    fn failures_are_retried_until_the_limit() {
        // S1-067, S1-068, S1-115, S2-013.
        check(FailureKind::Trap, 1, Disposition::FailedRetryable);
        check(FailureKind::Trap, 3, Disposition::FailedTerminal);
        check(FailureKind::Retry { delay: None }, 2, Disposition::FailedRetryable);
        check(FailureKind::Reject, 1, Disposition::FailedTerminal);
        check(FailureKind::Park, 1, Disposition::Parked);
        for fault in ReferenceFault::ALL {
            let is_tried_again = fault == ReferenceFault::Unavailable;
            let after = |again, then| if is_tried_again { again } else { then };
            let first = after(Disposition::FailedRetryable, Disposition::Parked);
            check(FailureKind::Reference(fault), 1, first);
            let last = after(Disposition::FailedTerminal, Disposition::Parked);
            check(FailureKind::Reference(fault), 3, last);
        }
        check_under("park", FailureKind::NoRoute, 1, Disposition::Parked);
        check_under("skip", FailureKind::NoRoute, 1, Disposition::Skipped);
        check_under("reject", FailureKind::NoRoute, 1, Disposition::FailedTerminal);
    }

    // S2-009: no message beyond the age limit is tried again, whatever attempts are left.
    #[test]
    fn what_is_too_old_is_not_tried_again() {
        let policy = |age: &str| {
            Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n[retry]\n{age}"))
                .expect("a policy")
        };
        let after = |policy: &Policy, hours: u64| {
            disposition(
                &Failure::new(FailureKind::Trap, ""),
                1,
                Duration::from_secs(hours * 3_600),
                policy,
            )
        };
        let day = policy("age_max_ms = 86_400_000");
        assert_eq!(after(&day, 23), Disposition::FailedRetryable);
        assert_eq!(after(&day, 24), Disposition::FailedTerminal);
        assert_eq!(after(&policy(""), 24 * 365), Disposition::FailedRetryable);
    }

    #[test]
    fn delays_stay_below_their_bound_and_vary() {
        let retry = Retry { backoff_min_ms: 100, backoff_max_ms: 1_000, ..Retry::default() };
        let failure = Failure::new(FailureKind::Trap, "");
        for (attempts, bound) in [(1, 100), (2, 200), (4, 800), (5, 1_000), (200, 1_000)] {
            let delays: Vec<_> =
                (0..200).map(|_| delay(&failure, attempts, &retry).as_millis()).collect();
            assert!(delays.iter().all(|delay| *delay <= bound));
            assert!(
                delays.iter().any(|delay| *delay > bound / 2)
                    && delays.iter().any(|delay| *delay < bound / 2)
            );
        }
    }

    #[test]
    fn a_delay_asked_for_is_honoured() {
        let asked = Duration::from_millis(123_456);
        let failure = Failure::new(FailureKind::Retry { delay: Some(asked) }, "");
        assert_eq!(delay(&failure, 4, &Retry::default()), asked);
        let endless = Failure::new(FailureKind::Retry { delay: Some(Duration::MAX) }, "");
        assert_eq!(delay(&endless, 1, &Retry::default()), DELAY_MAX);
    }
}
