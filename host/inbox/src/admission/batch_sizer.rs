//! Size of a consumer's transactions, whether they run side by side, and whether they carry
//! savepoints.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use oncebox_model::hooks::{self, Defect};
use tokio::sync::OwnedMutexGuard;

/// Least number of commits in a row after which the batch doubles. It holds at first, and where
/// there is no contention.
const CLEAN_COMMITS: u32 = 100;
/// Largest number of commits in a row after which more is tried: it bounds how rarely a size that
/// led to contention is tried again.
const CLEAN_COMMITS_MAX: u32 = 6_400;
/// Messages over which the share of failed ones is averaged.
const WINDOW: f64 = 1_000.0;
/// Share of failed messages above which savepoints are set from the start.
const FAILURE_SHARE: f64 = 0.01;
/// Most savepoints of one transaction; more than 64 overflow a cache of PostgreSQL's.
const SAVEPOINTS_MAX: usize = 60;

/// Size and mode of a consumer's transactions, adapted to the contention and the failures of its
/// messages. Kept per consumer: hot rows are hot in all of its partitions.
#[derive(Debug)]
pub struct BatchSizer {
    messages_max: usize,
    state: Mutex<SizerState>,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// Permit to run one transaction. While transactions take turns, it is the only one of this host.
#[derive(Default)]
pub struct SerialPermit(Option<OwnedMutexGuard<()>>);

impl SerialPermit {
    /// Returns whether it holds the turn, for whose end other transactions wait.
    pub fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

#[derive(Debug)]
struct SizerState {
    /// Messages of a transaction, as bounded by contention.
    size: usize,
    /// Messages of a transaction, as bounded by its time. A claim that is not run is written, taken
    /// back and written again: the slower the database, the more.
    fits: usize,
    /// True while transactions take turns. Large ones in turn do more than small ones side by side
    /// that run into each other, and never run into a deadlock.
    is_serialized: bool,
    clean: u32,
    /// Commits in a row after which more is tried: a double batch, then side by side again. Every
    /// contention doubles it. A deadlock stops two workers until PostgreSQL notices it, which costs
    /// many times the possible gain.
    clean_commits_needed: u32,
    /// Share of failed messages, averaged over the window.
    failing: f64,
}

/// Use that a transaction made of its claims in its time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fit {
    /// Messages that it ran.
    pub ran: usize,
    /// Messages that it settled, duplicates included.
    pub settled: usize,
    /// Claims that it took back because its time was over.
    pub withdrawn: usize,
    /// True where its time was over before it ran every message.
    pub is_cut: bool,
    /// Time from the answer to its claim to the end of its last run.
    pub took: Duration,
}

/// Protection of a transaction's messages against each other's failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavepointMode {
    /// No savepoints: a failure rolls the whole batch back.
    Optimistic,
    /// A savepoint before each message: a failure costs only itself.
    Savepoints,
}

impl SavepointMode {
    /// Returns the most messages that a transaction of this mode takes.
    pub fn limit(self, size: usize) -> usize {
        match self {
            Self::Optimistic => size,
            Self::Savepoints => size.min(SAVEPOINTS_MAX),
        }
    }
}

impl BatchSizer {
    /// Makes a sizer that starts at the policy's bound.
    pub fn new(messages_max: usize) -> Self {
        Self {
            messages_max,
            state: Mutex::new(SizerState {
                size: messages_max,
                fits: messages_max,
                is_serialized: false,
                clean: 0,
                clean_commits_needed: CLEAN_COMMITS,
                failing: 0.0,
            }),
            turn: Arc::default(),
        }
    }

    /// Returns size and mode of the next transaction.
    pub fn next(&self) -> (usize, SavepointMode) {
        let state = self.state.lock().expect("no panic while held");
        (
            state.size.min(state.fits),
            if state.failing > FAILURE_SHARE {
                SavepointMode::Savepoints
            } else {
                SavepointMode::Optimistic
            },
        )
    }

    /// Returns whether transactions take turns.
    pub fn is_serialized(&self) -> bool {
        self.state.lock().expect("no panic while held").is_serialized
    }

    /// Waits until a transaction may run. Must not be called with an admission in hand: the
    /// transaction that has the turn may wait for that admission.
    pub async fn serial_permit(&self) -> SerialPermit {
        SerialPermit(if self.is_serialized() {
            Some(self.turn.clone().lock_owned().await)
        } else {
            None
        })
    }

    /// Takes the turn, if it is free. Without it a transaction may run into others, which costs
    /// only time.
    pub fn try_serial_permit(&self) -> SerialPermit {
        SerialPermit(if self.is_serialized() {
            self.turn.clone().try_lock_owned().ok()
        } else {
            None
        })
    }

    /// Records a deadlock, serialization failure or lock timeout in a transaction that ran in this
    /// turn. From then on transactions take turns. Where they do so already, the contention is with
    /// another host's transactions, and the size is halved.
    pub fn contended(&self, turn: &SerialPermit) {
        let mut state = self.state.lock().expect("no panic while held");
        if turn.0.is_none() && state.is_serialized {
            return; // it began before transactions took turns
        }
        if !std::mem::replace(&mut state.is_serialized, true) {
            state.clean = 0;
            state.clean_commits_needed = (state.clean_commits_needed * 2).min(CLEAN_COMMITS_MAX);
        } else {
            state.shrink();
        }
    }

    /// Halves the size, since the server had no room for this many claims.
    pub fn crowded(&self) {
        self.state.lock().expect("no panic while held").shrink();
    }

    /// Learns from a committed transaction that had `time` for its claims. Messages that it did not
    /// reach are not claimed the next time. Where it settled all that it could claim, the next one
    /// claims as many as it has time for, at most twice as many. So no more is ever taken back than
    /// was run since the last time. When the database is quick again, batches are full after a few
    /// transactions.
    pub fn fitted(&self, fit: Fit, time: Duration) {
        let mut state = self.state.lock().expect("no panic while held");
        if hooks::sabotage(Defect::WhatFitsUnlearned) {
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

    /// Records a committed transaction, with the numbers of its messages that ran and that failed.
    /// After enough commits in a row, more is tried.
    pub fn committed(&self, ran: usize, failed: usize) {
        let mut state = self.state.lock().expect("no panic while held");
        for index in 0..ran {
            let sample = if index < failed { 1.0 } else { 0.0 };
            state.failing += (sample - state.failing) / WINDOW;
        }
        state.clean += 1;
        if state.clean >= state.clean_commits_needed {
            state.clean = 0;
            if state.size < self.messages_max {
                state.size = (state.size * 2).min(self.messages_max);
            } else {
                state.is_serialized = false;
            }
            state.clean_commits_needed = (state.clean_commits_needed / 2).max(CLEAN_COMMITS);
        }
    }
}

impl SizerState {
    fn shrink(&mut self) {
        self.size = (self.size / 2).max(1);
        self.clean = 0;
        self.clean_commits_needed = (self.clean_commits_needed * 2).min(CLEAN_COMMITS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(sizer: &BatchSizer, times: u32) {
        (0..times).for_each(|_| sizer.committed(8, 0));
    }

    #[tokio::test]
    async fn contention_leads_to_turns_then_to_smaller_batches_and_back() {
        let sizer = BatchSizer::new(64);
        let early = sizer.serial_permit().await;
        sizer.contended(&early);
        let turn = sizer.serial_permit().await;
        assert!(turn.0.is_some(), "transactions take turns");
        assert_eq!(sizer.next().0, 64);
        sizer.contended(&early); // it ran without a turn
        assert_eq!(sizer.next().0, 64);
        (0..3).for_each(|_| sizer.contended(&turn));
        assert_eq!(sizer.next().0, 8);
        drop(turn);
        // The more often it happened, the later more is tried again.
        commit(&sizer, CLEAN_COMMITS * 16 - 1);
        assert_eq!(sizer.next().0, 8);
        commit(&sizer, 1);
        assert_eq!(sizer.next().0, 16);
        commit(&sizer, CLEAN_COMMITS * (8 + 4));
        assert_eq!(sizer.next().0, 64);
        assert!(sizer.serial_permit().await.0.is_some());
        commit(&sizer, CLEAN_COMMITS * 2);
        assert!(sizer.serial_permit().await.0.is_none(), "side by side again");
    }

    const TIME: Duration = Duration::from_millis(50);

    /// Runs a batch whose messages take this many microseconds each. Returns the claims written and
    /// the messages settled.
    fn batch(sizer: &BatchSizer, mut each_us: impl FnMut() -> u64) -> (usize, usize) {
        let claimed = sizer.next().0;
        let (mut ran, mut took) = (0, Duration::ZERO);
        while ran < claimed && (ran == 0 || took < TIME) {
            took += Duration::from_micros(each_us());
            ran += 1;
        }
        let withdrawn = claimed - ran;
        sizer.fitted(Fit { ran, settled: ran, withdrawn, is_cut: withdrawn > 0, took }, TIME);
        (claimed, ran)
    }

    #[test]
    fn what_fits_is_learned_at_once_and_grows_back() {
        let sizer = BatchSizer::new(64);
        assert_eq!(batch(&sizer, || 10_000), (64, 5));
        (0..10).for_each(|_| assert_eq!(batch(&sizer, || 10_000), (5, 5)));
        assert_eq!(batch(&sizer, || 200_000), (5, 1));
        (0..10).for_each(|_| assert_eq!(batch(&sizer, || 200_000), (1, 1)));
        let sizes: Vec<_> = (0..8).map(|_| batch(&sizer, || 100).0).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 64]);
        // As many as there is time for, not twice as many.
        assert_eq!(batch(&sizer, || 1_250), (64, 40));
        (0..10).for_each(|_| assert_eq!(batch(&sizer, || 1_250), (40, 40)));
        assert_eq!(batch(&sizer, || 1_000).0, 40);
        assert_eq!(batch(&sizer, || 1_000).0, 50);
    }

    // What could go wrong: a message is written more than twice on average. The database may change
    // its speed from message to message or from hour to hour.
    #[test]
    fn claims_stay_within_twice_what_completes() {
        use rand::{Rng, SeedableRng, rngs::StdRng};
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let sizer = BatchSizer::new(rng.random_range(1..=1_000));
            let (mut claims, mut completed, mut scale) = (0, 0, 1_000);
            for _ in 0..500 {
                if rng.random_bool(0.1) {
                    scale = 10_u64.pow(rng.random_range(1..6));
                }
                let (claimed, ran) = batch(&sizer, || rng.random_range(0..=scale));
                (claims, completed) = (claims + claimed, completed + ran);
            }
            assert!(
                claims <= 2 * completed + sizer.messages_max,
                "seed {seed}: {claims} claims for {completed} messages"
            );
        }
    }

    #[test]
    fn a_full_lock_table_halves() {
        let sizer = BatchSizer::new(64);
        (0..10).for_each(|_| sizer.crowded());
        assert_eq!(sizer.next().0, 1);
        commit(&sizer, CLEAN_COMMITS_MAX * 2);
        assert_eq!(sizer.next().0, 64);
    }

    #[test]
    fn savepoints_stay_on_while_failures_are_common() {
        let sizer = BatchSizer::new(64);
        assert_eq!(sizer.next().1, SavepointMode::Optimistic);
        (0..20).for_each(|_| sizer.committed(64, 3));
        assert_eq!(sizer.next().1, SavepointMode::Savepoints);
        (0..200).for_each(|_| sizer.committed(60, 0));
        assert_eq!(sizer.next().1, SavepointMode::Optimistic);
    }
}
