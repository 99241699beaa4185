//! How large a consumer's transactions are, and whether they carry savepoints.

use std::sync::Mutex;

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

/// Adapts to what a consumer's messages do to each other. Kept per consumer: hot rows are hot in all
/// of its partitions.
#[derive(Debug)]
pub struct Pace {
    messages_max: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    size: usize,
    clean: u32,
    /// Commits in a row after which the batch doubles. Every contention doubles it: a deadlock stops
    /// two workers for as long as PostgreSQL takes to notice, many times what a larger batch saves.
    patience: u32,
    /// Share of failed messages, averaged over the window.
    failing: f64,
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
        Self { messages_max, state: Mutex::new(State { size: messages_max, clean: 0, patience: CLEAN_COMMITS, failing: 0.0 }) }
    }

    /// Size and mode of the next transaction.
    pub fn next(&self) -> (usize, Mode) {
        let state = self.state.lock().expect("no panic while held");
        (state.size, if state.failing > FAILURE_SHARE { Mode::Savepoints } else { Mode::Optimistic })
    }

    /// Deadlock, serialization failure or lock timeout: half the size.
    pub fn contended(&self) {
        let mut state = self.state.lock().expect("no panic while held");
        state.size = (state.size / 2).max(1);
        state.clean = 0;
        state.patience = (state.patience * 2).min(CLEAN_COMMITS_MAX);
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
            state.size = (state.size * 2).min(self.messages_max);
            state.patience = (state.patience / 2).max(CLEAN_COMMITS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contention_halves_and_clean_commits_double() {
        let pace = Pace::new(64);
        (0..3).for_each(|_| pace.contended());
        assert_eq!(pace.next().0, 8);
        // The more often it happened, the longer until a larger size is tried again.
        (0..CLEAN_COMMITS * 8 - 1).for_each(|_| pace.committed(8, 0));
        assert_eq!(pace.next().0, 8);
        pace.committed(8, 0);
        assert_eq!(pace.next().0, 16);
        (0..CLEAN_COMMITS * 4).for_each(|_| pace.committed(8, 0));
        assert_eq!(pace.next().0, 32);
        (0..10).for_each(|_| pace.contended());
        assert_eq!(pace.next().0, 1);
        (0..CLEAN_COMMITS_MAX * 2).for_each(|_| pace.committed(1, 0));
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
