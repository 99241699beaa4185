//! What a transaction uses of the host and of the database, measured while it runs.

use std::{
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

/// A poll that takes longer than this is that of a guest that computes: its next one is measured by the
/// processor's clock. Well below the time after which a spinning guest yields.
const LONG_POLL: Duration = Duration::from_micros(250);

/// Turns of handlers that compute, each for one poll: on all processors but one, so that what only sends
/// statements, of this tenant and of the others, finds one at once. Who has had a turn queues behind the rest.
static TURNS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(turns())));

fn turns() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1)
}

/// A tenant's places in the queue for turns: as many as there are turns, so that tenants alternate however
/// many handlers of each compute.
#[derive(Debug, Clone)]
pub(crate) struct TenantTurns(Arc<Semaphore>);

impl Default for TenantTurns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(turns())))
    }
}

/// Adds up what one transaction uses.
#[derive(Debug, Default)]
pub struct Meter {
    cpu_ns: AtomicU64,
    database_ns: AtomicU64,
    turns: TenantTurns,
}

/// What a transaction used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of its handlers.
    pub cpu: Duration,
    /// Time between its statements and their answers.
    pub database: Duration,
}

impl Usage {
    /// Both together, in nanoseconds: what a tenant's share is counted in.
    pub(crate) fn cost_ns(self) -> f64 {
        (self.cpu + self.database).as_nanos() as f64
    }
}

impl Meter {
    /// A meter of one of a tenant's transactions.
    pub(crate) fn of(turns: TenantTurns) -> Self {
        Self { turns, ..Self::default() }
    }

    /// A handler computed for so long.
    pub(crate) fn add_cpu(&self, time: Duration) {
        self.cpu_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A statement was under way for so long.
    pub(crate) fn add_database(&self, time: Duration) {
        self.database_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// What was used so far.
    pub fn usage(&self) -> Usage {
        let nanos = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        Usage { cpu: nanos(&self.cpu_ns), database: nanos(&self.database_ns) }
    }
}

/// A handler's future, whose polls are measured. The processor's clock costs a system call, a
/// microsecond or two for each of the many polls that only send a statement; so it is read where the poll
/// before was long, and short polls count by the wall, on which little else fits between. A handler that
/// computes waits for its turn before each poll.
pub(crate) struct Metered<F> {
    future: F,
    meter: Arc<Meter>,
    computes: bool,
    place: PollSemaphore,
    /// A place in the queue, until its turn has been.
    waits: Option<OwnedSemaphorePermit>,
    turns: PollSemaphore,
}

impl<F> Metered<F> {
    pub(crate) fn new(future: F, meter: Arc<Meter>) -> Self {
        let place = PollSemaphore::new(meter.turns.0.clone());
        Self { future, meter, computes: false, place, waits: None, turns: PollSemaphore::new(TURNS.clone()) }
    }
}

impl<F: Future + Unpin> Future for Metered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let _turn = if this.computes {
            if this.waits.is_none() {
                this.waits = ready!(this.place.poll_acquire(context));
            }
            ready!(this.turns.poll_acquire(context))
        } else {
            None
        };
        let (started, processor) = (Instant::now(), self.computes.then(thread_time).flatten());
        let polled = Pin::new(&mut self.future).poll(context);
        let wall = started.elapsed();
        let used = processor.and_then(|before| Some(thread_time()?.saturating_sub(before))).unwrap_or(wall);
        self.meter.add_cpu(used);
        self.computes = wall >= LONG_POLL;
        self.waits = None;
        polled
    }
}

/// Processor time of this thread.
fn thread_time() -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this frame, which the call only writes.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (answer == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes for about so long at every poll.
    fn spin(polls: u32, each: Duration) -> impl Future<Output = ()> + Unpin {
        let mut left = polls;
        futures::future::poll_fn(move |context| {
            let started = Instant::now();
            while started.elapsed() < each {}
            left -= 1;
            context.waker().wake_by_ref();
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
    }

    /// What only sends statements could wait behind handlers that compute, for as long as those do.
    #[tokio::test(flavor = "multi_thread", worker_threads = 8)]
    async fn handlers_that_compute_leave_a_processor() {
        static RUNNING: AtomicU64 = AtomicU64::new(0);
        static MOST: AtomicU64 = AtomicU64::new(0);
        let computing = (0..16).map(|_| {
            let mut polls = 0;
            let future = futures::future::poll_fn(move |context| {
                // The first poll tells that it computes.
                let counts = u64::from(polls > 0);
                MOST.fetch_max(RUNNING.fetch_add(counts, Ordering::SeqCst) + counts, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                RUNNING.fetch_sub(counts, Ordering::SeqCst);
                polls += 1;
                context.waker().wake_by_ref();
                if polls == 20 { Poll::Ready(()) } else { Poll::Pending }
            });
            tokio::spawn(Metered::new(future, Arc::default()))
        });
        futures::future::try_join_all(computing.collect::<Vec<_>>()).await.expect("no task panics");
        assert_eq!(MOST.load(Ordering::SeqCst), turns().min(8) as u64);
    }

    /// A tenant with many handlers that compute could make those of another wait as many times as long.
    #[tokio::test]
    async fn tenants_that_compute_alternate() {
        static OTHERS: AtomicU64 = AtomicU64::new(0);
        let (many, one) = (TenantTurns::default(), TenantTurns::default());
        let metered = |of: &TenantTurns, mut polls: u64, counted: u64| {
            let future = futures::future::poll_fn(move |context| {
                OTHERS.fetch_add(counted, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                polls -= 1;
                context.waker().wake_by_ref();
                if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
            });
            Metered::new(future, Arc::new(Meter::of(of.clone())))
        };
        // This executor has one thread, so all polls come one after the other.
        let crowd: Vec<_> = (0..16 * turns()).map(|_| tokio::spawn(metered(&many, 1_000, 1))).collect();
        tokio::spawn(metered(&one, 20, 0)).await.expect("it does not panic");
        let others = OTHERS.load(Ordering::SeqCst) as usize;
        // The first poll of each tells that it computes.
        assert!(others <= crowd.len() + (turns() + 2) * 20, "{others} turns of another tenant");
        crowd.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test]
    async fn a_handler_pays_for_what_it_computes_and_not_for_what_it_waits() {
        let meter = Arc::new(Meter::default());
        Metered::new(spin(5, Duration::from_millis(4)), meter.clone()).await;
        let spun = meter.usage().cpu;
        // A busy machine takes the processor away in between; most of the polls do not count that.
        assert!(spun > Duration::from_millis(4) && spun < Duration::from_secs(2), "{spun:?}");
        Metered::new(Box::pin(tokio::time::sleep(Duration::from_millis(50))), meter.clone()).await;
        assert!(meter.usage().cpu - spun < Duration::from_millis(25), "{:?}", meter.usage().cpu - spun);
    }
}
