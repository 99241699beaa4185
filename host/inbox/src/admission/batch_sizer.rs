//! How large a consumer's transactions are, how many run side by side, and whether they carry
//! savepoints.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use oncebox_model::hooks;
use tokio::sync::OwnedMutexGuard;

/// Commits in a row after which the batch doubles, at first and where nothing stands against it.
const CLEAN_COMMITS: u32 = 100;
/// The same, at most: how often a size that led to contention is tried again.
const CLEAN_COMMITS_MAX: u32 = 6_400;
/// Messages over which failures are remembered.
const WINDOW: f64 = 1_000.0;
/// Share of failed messages over which savepoints are set from the start.
const FAILURE_SHARE: f64 = 0.01;
/// Savepoints of one transaction; more than 64 overflow a cache of PostgreSQL's.
const SAVEPOINTS_MAX: usize = 60;

/// Adapts to what a consumer's messages do to each other. Kept per consumer: hot rows are hot in
/// all of its partitions.
#[derive(Debug)]
pub struct Pace {
    messages_max: usize,
    state: Mutex<State>,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// Leave to run one transaction; while transactions take turns, the only one of this host.
#[derive(Default)]
pub struct Turn(Option<OwnedMutexGuard<()>>);

impl Turn {
    /// Others wait for its end.
    pub fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

#[derive(Debug)]
struct State {
    /// Messages of a transaction, as far as they stand in each other's way.
    size: usize,
    /// Messages that a transaction has time for. What is claimed and not run is written, taken back
    /// and written again: the slower the database, the more.
    fits: usize,
    /// Transactions take turns. Large ones in turn do more than small ones side by side that run
    /// into each other, and never into a deadlock.
    in_turn: bool,
    clean: u32,
    /// Commits in a row after which more is tried: a double batch, then side by side again. Every
    /// contention doubles it: a deadlock stops two workers for as long as PostgreSQL takes to
    /// notice, many times what is to be gained.
    patience: u32,
    /// Share of failed messages, averaged over the window.
    failing: f64,
}

/// How much of what it claimed a transaction had time for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fit {
    /// Messages that it ran.
    pub ran: usize,
    /// Messages that it settled, duplicates included.
    pub settled: usize,
    /// Claims that it took back, since its time was over.
    pub withdrawn: usize,
    /// Its time was over before it came to every message.
    pub is_cut: bool,
    /// From the answer to its claim to the end of its last run.
    pub took: Duration,
}

/// How a transaction guards its messages against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No savepoints: a failure rolls the whole batch back.
    Optimistic,
    /// A savepoint before each message: a failure costs only itself.
    Savepoints,
}

impl Mode {
    /// Messages a transaction of this mode takes, at most.
    pub fn limit(self, size: usize) -> usize {
        match self {
            Self::Optimistic => size,
            Self::Savepoints => size.min(SAVEPOINTS_MAX),
        }
    }
}

impl Pace {
    /// Starts at the policy's bound.
    pub fn new(messages_max: usize) -> Self {
        Self {
            messages_max,
            state: Mutex::new(State {
                size: messages_max,
                fits: messages_max,
                in_turn: false,
                clean: 0,
                patience: CLEAN_COMMITS,
                failing: 0.0,
            }),
            turn: Arc::default(),
        }
    }

    /// Size and mode of the next transaction.
    pub fn next(&self) -> (usize, Mode) {
        let state = self.state.lock().expect("no panic while held");
        (
            state.size.min(state.fits),
            if state.failing > FAILURE_SHARE { Mode::Savepoints } else { Mode::Optimistic },
        )
    }

    /// Whether transactions take turns.
    pub fn takes_turns(&self) -> bool {
        self.state.lock().expect("no panic while held").in_turn
    }

    /// Wait until a transaction may run. Never with an admission in hand: who has the turn may wait
    /// for it.
    pub async fn turn(&self) -> Turn {
        Turn(if self.takes_turns() { Some(self.turn.clone().lock_owned().await) } else { None })
    }

    /// A turn, if nobody has it. Without one a transaction may run into others, which costs time
    /// alone.
    pub fn try_turn(&self) -> Turn {
        Turn(if self.takes_turns() { self.turn.clone().try_lock_owned().ok() } else { None })
    }

    /// Deadlock, serialization failure or lock timeout in a transaction that ran in this turn: from
    /// now on in turn, and where that does not help, since it is another host's transactions that
    /// stand against it, half the size.
    pub fn contended(&self, turn: &Turn) {
        let mut state = self.state.lock().expect("no panic while held");
        if turn.0.is_none() && state.in_turn {
            return; // it began before another one drew the conclusion
        }
        if !std::mem::replace(&mut state.in_turn, true) {
            state.clean = 0;
            state.patience = (state.patience * 2).min(CLEAN_COMMITS_MAX);
        } else {
            state.shrink();
        }
    }

    /// The server had no room for so many claims.
    pub fn crowded(&self) {
        self.state.lock().expect("no panic while held").shrink();
    }

    /// A transaction committed after it had worked on its claims for `took` of the `time` that it
    /// had. What it did not come to is not claimed the next time. Where it came to all that it was
    /// let claim, the next one claims as many as there was time for at this speed, at most twice as
    /// many: so no more is ever taken back than was run since the last time, and a database that is
    /// quick again has full batches after a few.
    pub fn fitted(&self, fit: Fit, time: Duration) {
        let mut state = self.state.lock().expect("no panic while held");
        if hooks::sabotage("what_fits_unlearned") {
            return;
        }
        if fit.is_cut {
            state.fits = fit.ran.max(1);
        } else if fit.settled >= state.fits {
            let each = fit.took.as_secs_f64() / fit.settled as f64;
            let room = (time.as_secs_f64() / each.max(f64::MIN_POSITIVE)) as usize;
            state.fits = room.clamp(state.fits, state.fits * 2).min(self.messages_max);
        }
    }

    /// A transaction committed.
    pub fn committed(&self, ran: usize, failed: usize) {
        let mut state = self.state.lock().expect("no panic while held");
        for index in 0..ran {
            let sample = if index < failed { 1.0 } else { 0.0 };
            state.failing += (sample - state.failing) / WINDOW;
        }
        state.clean += 1;
        if state.clean >= state.patience {
            state.clean = 0;
            if state.size < self.messages_max {
                state.size = (state.size * 2).min(self.messages_max);
            } else {
                state.in_turn = false;
            }
            state.patience = (state.patience / 2).max(CLEAN_COMMITS);
        }
    }
}

impl State {
    fn shrink(&mut self) {
        self.size = (self.size / 2).max(1);
        self.clean = 0;
        self.patience = (self.patience * 2).min(CLEAN_COMMITS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(pace: &Pace, times: u32) {
        (0..times).for_each(|_| pace.committed(8, 0));
    }

    #[tokio::test]
    async fn contention_leads_to_turns_then_to_smaller_batches_and_back() {
        let pace = Pace::new(64);
        let early = pace.turn().await;
        pace.contended(&early);
        let turn = pace.turn().await;
        assert!(turn.0.is_some(), "transactions take turns");
        assert_eq!(pace.next().0, 64);
        pace.contended(&early); // says nothing about turns
        assert_eq!(pace.next().0, 64);
        (0..3).for_each(|_| pace.contended(&turn));
        assert_eq!(pace.next().0, 8);
        drop(turn);
        // The more often it happened, the longer until more is tried again.
        commit(&pace, CLEAN_COMMITS * 16 - 1);
        assert_eq!(pace.next().0, 8);
        commit(&pace, 1);
        assert_eq!(pace.next().0, 16);
        commit(&pace, CLEAN_COMMITS * (8 + 4));
        assert_eq!(pace.next().0, 64);
        assert!(pace.turn().await.0.is_some());
        commit(&pace, CLEAN_COMMITS * 2);
        assert!(pace.turn().await.0.is_none(), "side by side again");
    }

    const TIME: Duration = Duration::from_millis(50);

    /// A batch of messages that take this long each, in microseconds; claims written, and messages
    /// settled.
    fn batch(pace: &Pace, mut each_us: impl FnMut() -> u64) -> (usize, usize) {
        let claimed = pace.next().0;
        let (mut ran, mut took) = (0, Duration::ZERO);
        while ran < claimed && (ran == 0 || took < TIME) {
            took += Duration::from_micros(each_us());
            ran += 1;
        }
        let withdrawn = claimed - ran;
        pace.fitted(Fit { ran, settled: ran, withdrawn, is_cut: withdrawn > 0, took }, TIME);
        (claimed, ran)
    }

    #[test]
    fn what_fits_is_learned_at_once_and_grows_back() {
        let pace = Pace::new(64);
        assert_eq!(batch(&pace, || 10_000), (64, 5));
        (0..10).for_each(|_| assert_eq!(batch(&pace, || 10_000), (5, 5)));
        assert_eq!(batch(&pace, || 200_000), (5, 1));
        (0..10).for_each(|_| assert_eq!(batch(&pace, || 200_000), (1, 1)));
        let sizes: Vec<_> = (0..8).map(|_| batch(&pace, || 100).0).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 64]);
        // As many as there is time for, not twice as many.
        assert_eq!(batch(&pace, || 1_250), (64, 40));
        (0..10).for_each(|_| assert_eq!(batch(&pace, || 1_250), (40, 40)));
        assert_eq!(batch(&pace, || 1_000).0, 40);
        assert_eq!(batch(&pace, || 1_000).0, 50);
    }

    // However the database turns, from message to message or from hour to hour, a message is
    // written twice on average at most.
    #[test]
    fn claims_stay_within_twice_what_completes() {
        use rand::{Rng, SeedableRng, rngs::StdRng};
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let pace = Pace::new(rng.random_range(1..=1_000));
            let (mut claims, mut completed, mut scale) = (0, 0, 1_000);
            for _ in 0..500 {
                if rng.random_bool(0.1) {
                    scale = 10_u64.pow(rng.random_range(1..6));
                }
                let (claimed, ran) = batch(&pace, || rng.random_range(0..=scale));
                (claims, completed) = (claims + claimed, completed + ran);
            }
            assert!(
                claims <= 2 * completed + pace.messages_max,
                "seed {seed}: {claims} claims for {completed} messages"
            );
        }
    }

    #[test]
    fn a_full_lock_table_halves() {
        let pace = Pace::new(64);
        (0..10).for_each(|_| pace.crowded());
        assert_eq!(pace.next().0, 1);
        commit(&pace, CLEAN_COMMITS_MAX * 2);
        assert_eq!(pace.next().0, 64);
    }

    #[test]
    fn savepoints_stay_on_while_failures_are_common() {
        let pace = Pace::new(64);
        assert_eq!(pace.next().1, Mode::Optimistic);
        (0..20).for_each(|_| pace.committed(64, 3));
        assert_eq!(pace.next().1, Mode::Savepoints);
        (0..200).for_each(|_| pace.committed(60, 0));
        assert_eq!(pace.next().1, Mode::Optimistic);
    }
}
