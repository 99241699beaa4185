//! Attempts to send: what has ended together, and what that says of the destination.

use std::time::Duration;

use oncebox_kafka::OUTGOING_MAX;
use tokio::{
    task::{JoinError, JoinSet},
    time::{Instant, timeout_at},
};

use crate::{metric::Labels, outcome::Sent, pair_state::PairEnd, row::OutgoingRow};

/// Shortest time for which the mark of a message waits for those of others that are under way.
const TOGETHER: Duration = Duration::from_millis(2);

/// A message after its attempt, without its payload, and with the name of its consumer.
pub(crate) struct Attempted {
    pub(crate) row: OutgoingRow,
    pub(crate) labels: Labels,
    pub(crate) sent: Sent,
}

/// Returns the attempt that has ended and those that end within a moment or before `until`, for one
/// transaction. One that panicked is in the log, and its lease runs out.
pub(crate) async fn gathered(
    first: Result<Attempted, JoinError>,
    under_way: &mut JoinSet<Attempted>,
    until: Instant,
) -> Vec<Attempted> {
    let mut ended: Vec<_> = first.into_iter().collect();
    let until = until.max(Instant::now() + TOGETHER);
    while let Ok(Some(next)) = timeout_at(until, under_way.join_next()).await {
        ended.extend(next);
    }
    ended
}

/// Judges attempts by what the destination confirmed, and when. Returns the end of the task where
/// the destination is away or asks for fewer.
pub(crate) fn judge(
    ended: &mut [Attempted],
    confirmed_at: &mut Option<Instant>,
) -> Option<PairEnd> {
    if ended.iter().any(|one| one.sent.is_confirmed()) {
        *confirmed_at = Some(Instant::now());
    }
    // What is silent now was sent at most so long ago.
    let confirms = confirmed_at.is_some_and(|at| at.elapsed() < OUTGOING_MAX);
    for one in ended.iter_mut() {
        one.sent = std::mem::replace(&mut one.sent, Sent::Unsent).judged(confirms);
    }
    if let Some(error) = ended.iter().find_map(|one| one.sent.is_away()) {
        let error = error.to_owned();
        return Some(PairEnd::Away { error, has_confirmed: confirmed_at.is_some() });
    }
    let (rest, error) = ended.iter().find_map(|one| one.sent.is_limited())?;
    Some(PairEnd::Limited { error: error.to_owned(), rest })
}
