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
    caused::{CausedKind, CausedMessage, causes_first},
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
    /// Death of the process while it handles a reply or a timer from the inbox. Later messages
    /// are delivered once it is settled.
    CausedCrash { point: &'static str, target: usize },
    /// Two or three deliveries of every message.
    Duplicates,
    /// Two processes at once, each with its own partition first and then with the other's messages.
    TwoWorkers,
    /// Another order of the messages, in which none comes before its cause.
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

/// Input of a plan: the messages of the file, and their runs in a clean run.
pub(super) struct PlanInput<'a> {
    /// Ids of the messages, in the order of the file.
    pub(super) ids: &'a [&'a str],
    /// Runs of a clean run.
    pub(super) runs: &'a [RunRecord],
    /// Ids of the messages that it completed.
    pub(super) completed: &'a BTreeSet<String>,
    /// Messages that others cause.
    pub(super) caused: &'a [CausedMessage],
    /// Cause of each message.
    pub(super) causes: &'a [Option<usize>],
}

impl PlanInput<'_> {
    fn first_run(&self, index: usize) -> Option<&RunRecord> {
        self.runs.iter().find(|run| run.message_id == self.ids[index] && run.attempt == 1)
    }

    /// Returns the numbers of SQL calls and of outgoing messages.
    fn calls(&self, index: usize) -> (usize, usize) {
        self.first_run(index).map_or((0, 0), |run| (run.statements.len(), run.outgoing.len()))
    }

    /// Returns the completed message with the most SQL calls and, among such, the most outgoing
    /// messages. Of several it is the middle one, so that something is settled before it and
    /// something shares its transaction.
    fn busiest(&self, messages: impl Iterator<Item = usize>) -> Option<usize> {
        let ok: Vec<_> =
            messages.filter(|index| self.completed.contains(self.ids[*index])).collect();
        let most = ok.iter().map(|index| self.calls(*index)).max();
        let busiest: Vec<_> =
            ok.into_iter().filter(|index| Some(self.calls(*index)) == most).collect();
        busiest.get(busiest.len() / 2).copied()
    }

    /// Returns whether every message completed at its first run.
    fn is_straight(&self) -> bool {
        self.ids.iter().all(|id| self.completed.contains(*id)) && self.runs.len() == self.ids.len()
    }
}

/// Plans all windows for these messages.
pub(super) fn plan(input: &PlanInput<'_>) -> Vec<Window> {
    let messages = input.ids.len();
    let target = input.busiest(0..messages).unwrap_or(messages / 2);
    let crash = |name: &str, point, nth| Window {
        name: name.to_owned(),
        kind: WindowKind::Crash { point, nth, target },
    };
    let mut windows = vec![
        crash("killed before the claim", "inbox:claim:before", 1),
        crash("killed after the claim", "inbox:claim:after", 1),
    ];
    for call in 1..=input.calls(target).0.min(CALLS_MAX) {
        windows.push(crash(
            &format!("killed after SQL call {call} of the handler"),
            "runtime:sql:after",
            call as u64,
        ));
    }
    if input.calls(target).1 > 0 {
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
    let nth = if input.is_straight() { messages as u64 } else { 1 };
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
    windows.extend(caused_windows(input));
    let delivery = |name: &str, kind| Window { name: name.to_owned(), kind };
    windows.push(delivery("each message two or three times", WindowKind::Duplicates));
    windows.push(delivery("two workers at once", WindowKind::TwoWorkers));
    if first_free(input.causes).is_some() {
        windows.extend(
            (1..=SHUFFLES).map(|round| {
                delivery(&format!("in another order ({round})"), WindowKind::Shuffled)
            }),
        );
    }
    windows.push(delivery("again under a second id", WindowKind::SecondIds));
    windows
}

/// Plans the crashes before and after the run of a reply and of a timer. Where a message is retried
/// or fails, the leases of the messages cannot be counted, and there are none.
fn caused_windows(input: &PlanInput<'_>) -> Vec<Window> {
    const POINTS: [(&str, &str); 2] =
        [("the lease", "retry:lease:after"), ("COMMIT", "retry:commit:after")];
    if !input.is_straight() {
        return Vec::new();
    }
    let targets = [CausedKind::Reply, CausedKind::Timer].into_iter().filter_map(|kind| {
        let of_kind = input.caused.iter().filter(|caused| caused.kind == kind);
        Some((kind, input.busiest(of_kind.map(|caused| caused.message))?))
    });
    targets
        .flat_map(|(kind, target)| {
            POINTS.map(|(step, point)| Window {
                name: format!("{}: killed after {step}", kind.name()),
                kind: WindowKind::CausedCrash { point, target },
            })
        })
        .collect()
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
        WindowKind::CausedCrash { point, target } => {
            caused_crash(bench, spec, &log, (point, *target)).await
        }
        WindowKind::Duplicates => {
            settle(bench, spec, &bench.log_of(repeated(log.len(), &mut rng))).await
        }
        WindowKind::TwoWorkers => two_workers(bench, spec).await,
        WindowKind::Shuffled => {
            let order = shuffled(&bench.causes, &mut rng);
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

/// Stores the messages up to the target, kills the worker while it runs that from the inbox, as a
/// host runs replies and timers, and lets another worker take the lease over. It gets the messages
/// behind the target when that is settled, so that the order stays.
async fn caused_crash(
    bench: &Bench,
    spec: Spec,
    log: &[Delivery],
    (point, target): (&str, usize),
) -> Result<WindowRun> {
    let spec = Spec { ack: Ack::AfterInsert, ..spec };
    let (upto, behind) = log.split_at(target + 1);
    let mut first = Worker::start(&bench.program, &spec).await?;
    let acked = first.deliver(upto, false).await?.settled();
    first.order(&WorkOrder::Arm { point: point.to_owned(), nth: upto.len() as u64 }).await?;
    let ended = first.order(&WorkOrder::Finish).await?;
    if !matches!(ended, Ended::Killed(_)) {
        first.stop().await?;
        return Ok(WindowRun { delivered: upto.len(), killed: 0, is_reached: false });
    }
    drop(first);
    let mut second =
        Worker::start(&bench.program, &Spec { next_offset: acked as i64, ..spec }).await?;
    second.order(&WorkOrder::Finish).await?;
    second.deliver(behind, false).await?;
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

/// Returns another order than the file's, if there is one in which no message comes before its
/// cause.
fn shuffled(causes: &[Option<usize>], rng: &mut StdRng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..causes.len()).collect();
    order.shuffle(rng);
    let mut order = causes_first(order, causes);
    if order.is_sorted()
        && let Some(free) = first_free(causes)
    {
        order.swap(free - 1, free);
    }
    order
}

/// Returns the first message that may come before the message in front of it, which is not its
/// cause.
fn first_free(causes: &[Option<usize>]) -> Option<usize> {
    (1..causes.len()).find(|message| causes[*message] != Some(*message - 1))
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
            assert!(!shuffled(&[None, None], &mut rng).is_sorted());
        }
    }

    #[test]
    fn a_shuffle_keeps_causes_first() {
        // An order with its reply and its timer, and another order.
        let causes = [None, Some(0), Some(0), None];
        let mut orders = BTreeSet::new();
        for seed in 0..50 {
            let order = shuffled(&causes, &mut StdRng::seed_from_u64(seed));
            let place = |message| order.iter().position(|it| *it == message);
            assert!(place(0) < place(1).min(place(2)), "{order:?}");
            assert!(!order.is_sorted());
            orders.insert(place(1) < place(2));
        }
        assert_eq!(orders.len(), 2, "a reply and a timer never swapped");
        let only = [None, Some(0), Some(1)];
        assert_eq!(first_free(&only), None);
        assert_eq!(shuffled(&only, &mut StdRng::seed_from_u64(1)), [0, 1, 2]);
    }

    fn run(id: &str, statements: usize) -> RunRecord {
        let statement = || oncebox_runtime::StatementRecord {
            text: "SELECT 1".to_owned(),
            params: Vec::new(),
            is_query: true,
            rows: Some(1),
            error: None,
            elapsed: std::time::Duration::ZERO,
        };
        RunRecord {
            message_id: id.to_owned(),
            attempt: 1,
            statements: std::iter::repeat_with(statement).take(statements).collect(),
            outgoing: Vec::new(),
            cancels: Vec::new(),
            lines: Vec::new(),
            memory_bytes: 0,
            fuel: None,
            elapsed: std::time::Duration::ZERO,
        }
    }

    #[test]
    fn a_reply_and_a_timer_have_windows_where_all_messages_are_straight() {
        let ids = ["m-1", "a-1", "t-1", "t-2"];
        let runs = [run("m-1", 3), run("a-1", 2), run("t-1", 1), run("t-2", 3)];
        let of = |message, kind| CausedMessage { message, cause: 0, kind };
        let caused = [of(1, CausedKind::Reply), of(2, CausedKind::Timer), of(3, CausedKind::Timer)];
        let names = |completed: &[&str]| {
            let completed = completed.iter().map(|id| (*id).to_owned()).collect();
            let causes = [None, Some(0), Some(0), Some(0)];
            let (runs, completed, causes) = (&runs[..], &completed, &causes[..]);
            let input = PlanInput { ids: &ids, runs, completed, caused: &caused, causes };
            let targets = plan(&input).into_iter().filter_map(|window| match window.kind {
                WindowKind::CausedCrash { target, .. } => Some((window.name, target)),
                _ => None,
            });
            targets.collect::<Vec<_>>()
        };
        let expected = [
            ("reply: killed after the lease".to_owned(), 1),
            ("reply: killed after COMMIT".to_owned(), 1),
            ("timer: killed after the lease".to_owned(), 3),
            ("timer: killed after COMMIT".to_owned(), 3),
        ];
        assert_eq!(names(&ids), expected);
        assert!(names(&ids[..3]).is_empty());
    }
}
