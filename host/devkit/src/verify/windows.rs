//! The windows of a verification: where the process dies, and how messages are delivered. Each
//! window has a copy of the database, ends when everything is settled, and is judged by what it
//! left behind.

use std::collections::BTreeSet;

use anyhow::Result;
use oncebox_model::policy::Ack;
use oncebox_runtime::RunRecord;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use sha2::{Digest, Sha256};

use super::{
    bench::Bench,
    compare::{Found, Judgement, Reference, Verdict},
    driver::{Delivery, Spec},
    worker::{Ended, WorkOrder, Worker},
};

/// Plan of one row of the report.
#[derive(Debug, Clone)]
pub(super) struct Window {
    /// Description of the events, for the report.
    pub(super) name: String,
    pub(super) kind: WindowKind,
}

/// Kind of a window.
#[derive(Debug, Clone)]
pub(super) enum WindowKind {
    /// Death of the process at `point`, while it handles a message straight from the log.
    Crash { point: &'static str, nth: u64, target: usize },
    /// Death of the process while it handles a message from the inbox, under a lease.
    LeasedCrash { point: &'static str, nth: u64 },
    /// Two or three deliveries of every message.
    Duplicates,
    /// Two processes at once, each with its own partition first and then with the other's messages.
    TwoWorkers,
    /// Another order of the messages.
    Shuffled,
    /// Every message, and then each again under another id.
    SecondIds,
}

/// A window and its result.
#[derive(Debug, Clone)]
pub(super) struct WindowResult {
    pub(super) window: Window,
    pub(super) delivered: usize,
    pub(super) killed: usize,
    pub(super) judgement: Judgement,
}

/// Deliveries and kills of a window.
struct WindowRun {
    delivered: usize,
    killed: usize,
    is_reached: bool,
}

/// Number of other orders that are tried.
const SHUFFLES: u64 = 3;
/// Highest number of SQL calls of one message after which the process is killed. A handler may make
/// a thousand.
const CALLS_MAX: usize = 12;
/// Shortest duration of each statement where two workers meet, milliseconds: the least, and the most,
/// which few messages have.
const PAUSE_MS: (u64, u64) = (15, 60);
/// Sum of the shortest durations over the messages of a file, milliseconds, within these bounds.
const PAUSES_MS: u64 = 1_000;

/// Plans all windows for these messages. `runs` are those of a clean run.
pub(super) fn plan(
    messages: usize,
    runs: &[RunRecord],
    completed: &BTreeSet<String>,
    ids: &[&str],
) -> Vec<Window> {
    let first_runs = |id: &str| runs.iter().find(|run| run.message_id == id && run.attempt == 1);
    let calls = |index: usize| first_runs(ids[index]).map_or(0, |run| run.statements.len());
    // The target is a completed message with the most calls. Of several such messages it is the
    // middle one, so that something is settled before it and something shares its transaction.
    let ok: Vec<usize> = (0..messages).filter(|index| completed.contains(ids[*index])).collect();
    let most = ok.iter().map(|index| calls(*index)).max();
    let busiest: Vec<usize> = ok.into_iter().filter(|index| Some(calls(*index)) == most).collect();
    let target = busiest.get(busiest.len() / 2).copied().unwrap_or(messages / 2);
    let crash = |name: &str, point, nth| Window {
        name: name.to_owned(),
        kind: WindowKind::Crash { point, nth, target },
    };
    let mut windows = vec![
        crash("killed before the claim", "inbox:claim:before", 1),
        crash("killed after the claim", "inbox:claim:after", 1),
    ];
    for call in 1..=calls(target).min(CALLS_MAX) {
        windows.push(crash(
            &format!("killed after SQL call {call} of the handler"),
            "runtime:sql:after",
            call as u64,
        ));
    }
    if first_runs(ids[target]).is_some_and(|run| !run.outgoing.is_empty()) {
        windows.push(crash(
            "killed before the outgoing messages are written",
            "outgoing:insert:before",
            1,
        ));
    }
    windows.extend([
        crash("killed before the completion", "inbox:complete:before", 1),
        crash("killed before COMMIT", "inbox:commit:before", 1),
        crash("killed after COMMIT, before the ack", "inbox:commit:after", 1),
    ]);
    // The last lease, so that the order of the messages stays. Where messages are retried, the
    // first.
    let is_straight = ids.iter().all(|id| completed.contains(*id)) && runs.len() == messages;
    let nth = if is_straight { messages as u64 } else { 1 };
    let leased = |name: &str, point| Window {
        name: name.to_owned(),
        kind: WindowKind::LeasedCrash { point, nth },
    };
    windows.extend([
        leased("retry: killed after the lease", "retry:lease:after"),
        leased("retry: killed after the handler", "retry:handle:after"),
        leased("retry: killed before COMMIT", "retry:commit:before"),
        leased("retry: killed after COMMIT", "retry:commit:after"),
    ]);
    let delivery = |name: &str, kind| Window { name: name.to_owned(), kind };
    windows.push(delivery("each message two or three times", WindowKind::Duplicates));
    windows.push(delivery("two workers at once", WindowKind::TwoWorkers));
    if messages > 1 {
        windows.extend(
            (1..=SHUFFLES).map(|round| {
                delivery(&format!("in another order ({round})"), WindowKind::Shuffled)
            }),
        );
    }
    windows.push(delivery("again under a second id", WindowKind::SecondIds));
    windows
}

/// Runs one window and judges what it left behind.
pub(super) async fn go(
    bench: &Bench,
    reference: &Reference,
    window: Window,
    number: usize,
    seed: u64,
) -> Result<WindowResult> {
    let rng = StdRng::seed_from_u64(seed ^ (number as u64) << 32);
    let (done, found) = bench
        .in_copy(&format!("window_{number}"), async |spec| {
            run(bench, &window.kind, spec, rng).await
        })
        .await?;
    let judgement = judge(reference, &window.kind, &done, &found);
    Ok(WindowResult { window, delivered: done.delivered, killed: done.killed, judgement })
}

fn judge(reference: &Reference, kind: &WindowKind, done: &WindowRun, found: &Found) -> Judgement {
    let mut judgement = reference.judge(found, !matches!(kind, WindowKind::SecondIds));
    if !done.is_reached {
        judgement.verdict = Verdict::NotReached;
    } else if matches!(kind, WindowKind::Shuffled) && judgement.verdict != Verdict::Once {
        judgement.verdict = Verdict::OrderDependent;
    }
    judgement
}

async fn run(bench: &Bench, kind: &WindowKind, spec: Spec, mut rng: StdRng) -> Result<WindowRun> {
    let log = bench.log();
    match kind {
        WindowKind::Crash { point, nth, target } => {
            crash(bench, spec, &log, *target, (point, *nth)).await
        }
        WindowKind::LeasedCrash { point, nth } => {
            leased_crash(bench, spec, &log, (point, *nth)).await
        }
        WindowKind::Duplicates => {
            settle(bench, spec, &bench.log_of(repeated(log.len(), &mut rng))).await
        }
        WindowKind::TwoWorkers => two_workers(bench, spec).await,
        WindowKind::Shuffled => {
            let order = shuffled(log.len(), &mut rng);
            settle(bench, spec, &bench.log_of(order.into_iter().map(|message| (message, false))))
                .await
        }
        WindowKind::SecondIds => {
            let all = (0..log.len())
                .map(|message| (message, false))
                .chain((0..log.len()).map(|message| (message, true)));
            settle(bench, spec, &bench.log_of(all)).await
        }
    }
}

/// Settles the messages before the target, kills the worker in the batch that begins with it, and
/// goes on from the ack.
async fn crash(
    bench: &Bench,
    spec: Spec,
    log: &[Delivery],
    target: usize,
    (point, nth): (&str, u64),
) -> Result<WindowRun> {
    let mut first = Worker::start(&bench.program, &spec).await?;
    let mut acked = first.deliver(&log[..target], true).await?.settled();
    first.order(&WorkOrder::Arm { point: point.to_owned(), nth }).await?;
    let ended = first.deliver(&log[target..], false).await?;
    acked += ended.settled();
    let mut done = WindowRun {
        delivered: log.len(),
        killed: 0,
        is_reached: matches!(ended, Ended::Killed(_)),
    };
    if !done.is_reached {
        first.stop().await?;
        return Ok(done);
    }
    drop(first);
    done.killed = 1;
    done.delivered += log.len() - acked;
    let spec = Spec { next_offset: acked as i64, ..spec };
    let mut second = Worker::start(&bench.program, &spec).await?;
    second.deliver(&log[acked..], false).await?;
    second.order(&WorkOrder::Finish).await?;
    second.stop().await?;
    Ok(done)
}

/// Stores all messages, kills the worker while it runs them from the inbox, and lets another worker
/// take the lease over.
async fn leased_crash(
    bench: &Bench,
    spec: Spec,
    log: &[Delivery],
    (point, nth): (&str, u64),
) -> Result<WindowRun> {
    let spec = Spec { ack: Ack::AfterInsert, ..spec };
    let mut first = Worker::start(&bench.program, &spec).await?;
    let acked = first.deliver(log, false).await?.settled();
    first.order(&WorkOrder::Arm { point: point.to_owned(), nth }).await?;
    let ended = first.order(&WorkOrder::Finish).await?;
    if !matches!(ended, Ended::Killed(_)) {
        first.stop().await?;
        return Ok(WindowRun { delivered: log.len(), killed: 0, is_reached: false });
    }
    drop(first);
    let mut second =
        Worker::start(&bench.program, &Spec { next_offset: acked as i64, ..spec }).await?;
    second.order(&WorkOrder::Finish).await?;
    second.stop().await?;
    Ok(WindowRun { delivered: log.len(), killed: 1, is_reached: true })
}

/// Settles a log with one worker that is not killed.
async fn settle(bench: &Bench, spec: Spec, log: &[Delivery]) -> Result<WindowRun> {
    let mut worker = Worker::start(&bench.program, &spec).await?;
    worker.deliver(log, false).await?;
    worker.order(&WorkOrder::Finish).await?;
    worker.stop().await?;
    Ok(WindowRun { delivered: log.len(), killed: 0, is_reached: true })
}

/// Delivers the messages with two workers at once. Messages of one key stay in one partition, as a
/// producer would have it.
async fn two_workers(bench: &Bench, spec: Spec) -> Result<WindowRun> {
    let mut logs = [Vec::new(), Vec::new()];
    for (index, message) in bench.messages.iter().enumerate() {
        let partition = match &message.key {
            Some(key) => usize::from(Sha256::digest(key)[0] % 2),
            None => index % 2,
        };
        logs[partition].push((index, false));
    }
    let [left, right] = logs;
    let logs = [[left.clone(), right.clone()].concat(), [right, left].concat()]
        .map(|log| bench.log_of(log));
    let pause_ms = (PAUSES_MS / bench.messages.len().max(1) as u64).clamp(PAUSE_MS.0, PAUSE_MS.1);
    let spec = |partition| Spec { partition, pause_ms, ..spec.clone() };
    let (specs, program) = ([spec(0), spec(1)], &bench.program);
    let (mut first, mut second) =
        tokio::try_join!(Worker::start(program, &specs[0]), Worker::start(program, &specs[1]))?;
    tokio::try_join!(first.deliver(&logs[0], true), second.deliver(&logs[1], true))?;
    first.order(&WorkOrder::Finish).await?;
    first.stop().await?;
    second.stop().await?;
    Ok(WindowRun { delivered: logs[0].len() + logs[1].len(), killed: 0, is_reached: true })
}

/// Returns the messages in order, with one or two repetitions of each somewhere behind its first
/// delivery.
fn repeated(messages: usize, rng: &mut StdRng) -> Vec<(usize, bool)> {
    let mut order: Vec<usize> = (0..messages).collect();
    for message in 0..messages {
        for _ in 0..rng.random_range(1..=2) {
            let first = order.iter().position(|known| *known == message).unwrap_or(0);
            order.insert(rng.random_range(first + 1..=order.len()), message);
        }
    }
    order.into_iter().map(|message| (message, false)).collect()
}

/// Returns another order than the file's.
fn shuffled(messages: usize, rng: &mut StdRng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..messages).collect();
    order.shuffle(rng);
    if order.is_sorted() {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_come_behind_the_first_delivery_and_shuffles_change_something() {
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            let order: Vec<_> =
                repeated(5, &mut rng).into_iter().map(|(message, _)| message).collect();
            let mut firsts = order.clone();
            let mut seen = BTreeSet::new();
            firsts.retain(|message| seen.insert(*message));
            assert_eq!(firsts, [0, 1, 2, 3, 4], "{order:?}");
            assert!(
                (0..5)
                    .all(|message| (2..=3)
                        .contains(&order.iter().filter(|it| **it == message).count())),
                "{order:?}"
            );
            assert!(!shuffled(2, &mut rng).is_sorted());
        }
    }
}
