//! `wasi:clocks`: time that only the guest advances, so that two runs of a message agree.
//!
//! The wall clock starts at the message's timestamp and the monotonic clock at zero. A read
//! advances both by a microsecond. A poll advances them to the nearest deadline and returns at
//! once.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use wasmtime::component::{Resource, ResourceTable};
use wasmtime_wasi::p2::{
    DynPollable, Pollable,
    bindings::clocks::{
        monotonic_clock,
        wall_clock::{self, Datetime},
    },
    subscribe,
};

/// Advance of the clocks at each read, in nanoseconds.
const TICK: u64 = 1_000;
const SECOND: u64 = 1_000_000_000;

/// The two clocks of one run. Clones share the time.
#[derive(Clone)]
pub(crate) struct Clock {
    start_ms: u64,
    time: Arc<Mutex<Time>>,
}

/// The time of one run, and the deadlines that advance it.
#[derive(Default)]
struct Time {
    /// Monotonic time in nanoseconds.
    now: u64,
    /// Deadlines of the timers that are being polled.
    waiting: Vec<u64>,
}

impl Clock {
    /// Makes clocks whose wall clock starts at these milliseconds since the Unix epoch.
    pub(crate) fn starting_at(timestamp_ms: i64) -> Self {
        Self { start_ms: u64::try_from(timestamp_ms).unwrap_or(0), time: Arc::default() }
    }

    /// Advances both clocks and returns the monotonic time.
    fn read(&self) -> u64 {
        let mut time = self.time();
        time.now = time.now.saturating_add(TICK);
        time.now
    }

    fn time(&self) -> MutexGuard<'_, Time> {
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wall(&self) -> Datetime {
        let now = self.read();
        let nanoseconds = (self.start_ms % 1_000) * 1_000_000 + now % SECOND;
        let seconds = (self.start_ms / 1_000)
            .saturating_add(now / SECOND)
            .saturating_add(nanoseconds / SECOND);
        Datetime { seconds, nanoseconds: (nanoseconds % SECOND) as u32 }
    }
}

/// The clocks of a run, with the table of their pollables.
pub(crate) struct ClockView<'a> {
    pub(crate) clock: &'a Clock,
    pub(crate) table: &'a mut ResourceTable,
}

impl wall_clock::Host for ClockView<'_> {
    fn now(&mut self) -> wasmtime::Result<Datetime> {
        Ok(self.clock.wall())
    }

    fn resolution(&mut self) -> wasmtime::Result<Datetime> {
        Ok(Datetime { seconds: 0, nanoseconds: TICK as u32 })
    }
}

impl monotonic_clock::Host for ClockView<'_> {
    fn now(&mut self) -> wasmtime::Result<u64> {
        Ok(self.clock.read())
    }

    fn resolution(&mut self) -> wasmtime::Result<u64> {
        Ok(TICK)
    }

    fn subscribe_instant(&mut self, deadline: u64) -> wasmtime::Result<Resource<DynPollable>> {
        let timer = self.table.push(Timer { clock: self.clock.clone(), deadline })?;
        subscribe(self.table, timer)
    }

    fn subscribe_duration(&mut self, duration: u64) -> wasmtime::Result<Resource<DynPollable>> {
        let deadline = self.clock.read().saturating_add(duration);
        self.subscribe_instant(deadline)
    }
}

/// A deadline that a guest can poll.
struct Timer {
    clock: Clock,
    deadline: u64,
}

impl Pollable for Timer {
    // Written as the trait's macro expands it, to return the future below.
    fn ready<'life0, 'async_trait>(
        &'life0 mut self,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(Wait { clock: self.clock.clone(), deadline: self.deadline, is_registered: false })
    }
}

/// The wait for a deadline ahead. It is ready in the second round of polls at the earliest, when
/// every deadline of the guest's poll is known. Only the nearest deadline advances the time, so a
/// poll of two timers fires one of them. A wait counts until it is dropped with its poll.
struct Wait {
    clock: Clock,
    deadline: u64,
    is_registered: bool,
}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let clock = self.clock.clone();
        let mut time = clock.time();
        if time.now >= self.deadline {
            return Poll::Ready(());
        }
        if !self.is_registered {
            self.is_registered = true;
            time.waiting.push(self.deadline);
            // A guest that polls in a loop without waiting advances the time as well.
            time.now = time.now.saturating_add(TICK);
        } else if time.waiting.iter().all(|other| self.deadline <= *other) {
            time.now = time.now.max(self.deadline);
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if self.is_registered {
            let mut time = self.clock.time();
            if let Some(at) = time.waiting.iter().position(|other| *other == self.deadline) {
                time.waiting.swap_remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::{Either, select};

    use super::*;

    fn timer(clock: &Clock, deadline: u64) -> Timer {
        Timer { clock: clock.clone(), deadline }
    }

    #[test]
    fn reads_move_both_clocks_and_the_wall_clock_starts_at_the_message() {
        let clock = Clock::starting_at(1_700_000_000_999);
        assert_eq!(clock.read(), TICK);
        let wall = clock.wall();
        assert_eq!((wall.seconds, wall.nanoseconds), (1_700_000_000, 999_002_000));
        clock.time().now = SECOND;
        assert_eq!(clock.wall().seconds, 1_700_000_001);
        assert_eq!(Clock::starting_at(-5).wall().seconds, 0);
    }

    #[tokio::test]
    async fn a_wait_ends_at_once_at_its_deadline() {
        let clock = Clock::starting_at(0);
        timer(&clock, 3_600 * SECOND).ready().await;
        assert_eq!(clock.time().now, 3_600 * SECOND);
        assert!(clock.time().waiting.is_empty());
        timer(&clock, SECOND).ready().await;
        assert_eq!(clock.time().now, 3_600 * SECOND, "a deadline that has passed moves nothing");
    }

    #[tokio::test]
    async fn of_two_timers_only_the_nearer_fires() {
        for (first, second) in [(SECOND, 10 * SECOND), (10 * SECOND, SECOND)] {
            let clock = Clock::starting_at(0);
            let (mut a, mut b) = (timer(&clock, first), timer(&clock, second));
            let fired = match select(a.ready(), b.ready()).await {
                Either::Left(_) => first,
                Either::Right(_) => second,
            };
            assert_eq!(fired, SECOND);
            assert_eq!(clock.time().now, SECOND);
        }
    }
}
