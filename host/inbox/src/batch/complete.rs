//! The completion: the last statement of the host before COMMIT.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    headers, hooks,
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    policy::{Dedup, NoRoute, PayloadPolicy, Policy, Retry},
    tx::bounded,
};

use crate::{
    batch::claim::Offered,
    host_call::{column, host_call},
    ordering::sequence::Place,
    session::Transaction,
};

/// What a failure makes of a message after this many attempts, so long after it was received or
/// redriven.
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
        _ if attempts >= policy.retry.attempts_max || policy.retry.is_too_old(age) => {
            Disposition::FailedTerminal
        }
        _ => Disposition::FailedRetryable,
    }
}

/// What becomes of a message that no deployment takes.
pub(crate) fn unrouted(policy: &Policy) -> Disposition {
    match policy.no_route {
        NoRoute::Park => Disposition::Parked,
        NoRoute::Skip => Disposition::Skipped,
        NoRoute::Reject => Disposition::FailedTerminal,
    }
}

/// Delay before the next attempt: what the handler asked for, else what the policy says.
pub fn delay(failure: &Failure, attempts: u32, retry: &Retry) -> Duration {
    match failure.kind {
        FailureKind::Retry { delay: Some(delay) } => delay.min(DELAY_MAX),
        _ => retry.delay(attempts),
    }
}

/// Longest delay a handler can ask for: thirty days.
const DELAY_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);

/// What one transaction has to write at its end. A message that completed without a result and
/// was claimed in this transaction needs nothing: its claim says it all.
#[derive(Debug, Default)]
pub struct Completion {
    withdrawn: Vec<String>,
    rows: Vec<Row>,
    failures: Vec<Recorded>,
}

/// A failure that becomes a row. It is told when that is committed: until then the transaction may
/// be repeated.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Id of the message.
    pub message_id: String,
    /// What happened.
    pub failure: Failure,
    /// What became of the message.
    pub disposition: Disposition,
    /// Which run it was, from 1.
    pub attempt: u32,
}

#[derive(Debug)]
struct Row {
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
}

/// Longest text kept in `last_error`, bytes.
const ERROR_BYTES_MAX: usize = 4_096;

/// A run that came to an end.
#[derive(Clone, Copy)]
pub struct Ran<'a> {
    /// The message.
    pub message: &'a Message,
    /// Epoch of its lease; 0 for a claim of this transaction.
    pub epoch: i64,
    /// The version that ran it, where one did.
    pub version: Option<i32>,
    /// Which run it was, from 1.
    pub attempt: u32,
    /// Since it was received, or last redriven.
    pub age: Duration,
}

impl<'a> Ran<'a> {
    /// A claim of this transaction that is not run.
    pub(crate) fn not(message: &'a Message) -> Self {
        Self { message, epoch: 0, version: None, attempt: 1, age: Duration::ZERO }
    }
}

/// Reason of a message that waits, or is parked, for versions before its own.
pub(crate) const GAP: &str = "gap";
/// Reason of a message whose aggregate is past its version.
pub(crate) const OLD: &str = "old_version";

impl Completion {
    /// A claim that was not run; it comes again.
    pub fn withdraw(&mut self, id: &str) {
        self.withdrawn.push(id.to_owned());
    }

    /// A run that succeeded.
    pub fn succeeded(&mut self, ran: Ran<'_>, result: Option<String>, policy: &Policy) {
        if ran.epoch == 0 && (result.is_none() || policy.dedup == Dedup::Off) {
            return;
        }
        self.rows.push(Row {
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
        });
    }

    /// A claim that is not run now, since it is not its turn: its row is given what it will need.
    pub fn waits(&mut self, offered: &Offered, is_due: bool) {
        let status = if is_due { "received" } else { "waiting" };
        self.open(Ran::not(&offered.message), status, None, is_due.then_some(Duration::ZERO));
    }

    /// A message before which versions of its aggregate are missing waits for them at most so long.
    pub(crate) fn waits_for_gap(&mut self, ran: Ran<'_>, gap: &Place, wait: Duration) {
        self.open(ran, "waiting", Some((GAP, gap.to_string())), Some(wait));
    }

    /// A message that waited too long for a gap is kept for a person.
    pub(crate) fn parked_for_gap(&mut self, ran: Ran<'_>, gap: &Place) {
        self.open(ran, Disposition::Parked.status(), Some((GAP, gap.to_string())), None);
    }

    /// What is still to be run keeps its payload, whatever the policy says.
    fn open(
        &mut self,
        ran: Ran<'_>,
        status: &'static str,
        why: Option<(&str, String)>,
        delay: Option<Duration>,
    ) {
        let record = &ran.message.record;
        let (reason, error) = why.unzip();
        self.rows.push(Row {
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
        });
    }

    /// A message that its aggregate is past.
    pub(crate) fn is_old(&mut self, ran: Ran<'_>, place: &Place, policy: &Policy) {
        let keep = policy.payload == PayloadPolicy::All;
        self.rows.push(Row {
            id: ran.message.id.clone(),
            epoch: ran.epoch,
            status: Disposition::Skipped.status(),
            reason: Some(OLD.to_owned()),
            error: Some(place.to_string()),
            result: None,
            delay: None,
            version: None,
            keep,
            headers: None,
            payload: None,
        });
    }

    /// The delays after which rows that it makes are due.
    pub(crate) fn delays(&self) -> impl Iterator<Item = Duration> {
        self.rows.iter().filter(|row| row.status != "waiting").filter_map(|row| row.delay)
    }

    /// The failures that it recorded, once.
    pub(crate) fn recorded(&mut self) -> Vec<Recorded> {
        std::mem::take(&mut self.failures)
    }

    /// A run that failed: the claim row becomes the failure record, in the same transaction.
    pub fn failed(&mut self, ran: Ran<'_>, failure: &Failure, policy: &Policy) -> Disposition {
        let disposition = disposition(failure, ran.attempt, ran.age, policy);
        // A row that is to run again needs its payload whatever the policy says.
        let keep =
            disposition == Disposition::FailedRetryable || policy.payload != PayloadPolicy::None;
        let record = &ran.message.record;
        let (message_id, attempt) = (ran.message.id.clone(), ran.attempt);
        self.failures.push(Recorded { message_id, failure: failure.clone(), disposition, attempt });
        self.rows.push(Row {
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
        });
        disposition
    }
}

/// A text that PostgreSQL takes and a row can afford.
fn storable(text: &str) -> String {
    let mut end = text.len().min(ERROR_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace('\0', "\u{fffd}")
}

/// Write the completion. Raises unless the claim is in this very transaction, and in a transaction
/// that a swallowed error has aborted.
pub async fn complete(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    completion: &Completion,
) -> Result<(), InboxError> {
    hooks::point("inbox:complete:before");
    let rows = &completion.rows;
    let query = host_call!("complete" {
        p_secret: transaction.secret(),
        p_consumer: consumer_id,
        p_withdrawn: &completion.withdrawn,
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
    });
    let mut statement = transaction.tx().statement().await;
    let answer = bounded(query.execute(statement.connection())).await;
    statement.finish(answer.as_ref().err());
    answer?;
    hooks::point("inbox:complete:after");
    Ok(())
}

#[cfg(test)]
mod tests {
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
        check_under("park", FailureKind::NoRoute, 1, Disposition::Parked);
        check_under("skip", FailureKind::NoRoute, 1, Disposition::Skipped);
        check_under("reject", FailureKind::NoRoute, 1, Disposition::FailedTerminal);
    }

    // S2-009: from an age on nothing is tried again, whatever attempts are left.
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
