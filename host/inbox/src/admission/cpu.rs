//! Measured polls of handlers, and the turns that handlers which compute wait for.

use std::{
    pin::Pin,
    sync::{Arc, LazyLock, atomic::Ordering},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use oncebox_model::meter::{Meter, turns};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

/// Duration above which a poll may be that of a handler that computes: the next one is measured by
/// the processor's clock. Well below the time after which a spinning guest yields.
const LONG_POLL: Duration = Duration::from_micros(250);

/// Processor time of long polls in a row after which a handler counts as computing. More than an
/// instance takes to begin and to send a statement, even where nothing is in the processor's
/// caches. A spinning guest reaches it in a few polls.
const COMPUTES: Duration = Duration::from_millis(2);

/// Turns of handlers that compute, each for one poll: on all processors but one. So a handler that
/// only sends statements, of any tenant, finds a processor at once. A handler that has had a turn
/// queues behind the rest.
static CPU_SLOTS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(turns())));

/// A handler's future, whose polls are measured. The processor's clock costs a system call, a
/// microsecond or two for each of the many polls that only send a statement. So it is read only
/// after a long poll. Short polls count by the wall clock, since little else fits between. A
/// handler that computes waits for its turn before each poll.
pub(crate) struct MeteredFuture<F> {
    future: F,
    meter: Arc<Meter>,
    /// Processor time of the long polls in a row up to the last poll; none where that was short.
    computed: Option<Duration>,
    place: PollSemaphore,
    /// Ticket in the tenant's queue for a turn, held until the turn is over.
    waits: Option<OwnedSemaphorePermit>,
    turns: PollSemaphore,
}

impl<F> MeteredFuture<F> {
    pub(crate) fn new(future: F, meter: Arc<Meter>) -> Self {
        let place = PollSemaphore::new(meter.turns().places.clone());
        let computed = meter.turns().computes.load(Ordering::Relaxed).then_some(COMPUTES);
        Self {
            future,
            meter,
            computed,
            place,
            waits: None,
            turns: PollSemaphore::new(CPU_SLOTS.clone()),
        }
    }

    fn computes(&self) -> bool {
        self.computed.is_some_and(|computed| computed >= COMPUTES)
    }
}

impl<F: Future + Unpin> Future for MeteredFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let _turn = if this.computes() {
            if this.waits.is_none() {
                this.waits = ready!(this.place.poll_acquire(context));
            }
            ready!(this.turns.poll_acquire(context))
        } else {
            None
        };
        let (started, processor) = (Instant::now(), self.computed.and_then(|_| thread_time()));
        let polled = Pin::new(&mut self.future).poll(context);
        let wall = started.elapsed();
        let measured = processor.and_then(|before| Some(thread_time()?.saturating_sub(before)));
        let used = measured.unwrap_or(wall);
        self.meter.add_cpu(used);
        // An unmeasured poll may have been long because the machine ran something else.
        let before = self.computed.unwrap_or_default();
        self.computed = (used >= LONG_POLL).then(|| before + measured.unwrap_or_default());
        self.meter.turns().computes.store(self.computes(), Ordering::Relaxed);
        self.waits = None;
        polled
    }
}

/// Returns the processor time of this thread.
fn thread_time() -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this frame, which the call only writes.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (answer == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use oncebox_model::meter::CpuSlots;

    /// Returns a future that computes for about this long at every poll.
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

    /// Computes for long, by the processor's clock: whatever else runs, a poll that calls this
    /// computed.
    fn compute() {
        let since = thread_time().expect("there is such a clock");
        while thread_time().expect("there is such a clock") - since < COMPUTES {}
    }

    /// Polls of a handler until the host knows that it computes: one is long, and the next one is
    /// measured.
    const UNKNOWN_POLLS: u64 = 2;

    // What could go wrong: a handler that only sends statements waits behind handlers that compute,
    // for as long as those do.
    #[tokio::test(flavor = "multi_thread", worker_threads = 8)]
    async fn handlers_that_compute_leave_a_processor() {
        static RUNNING: AtomicU64 = AtomicU64::new(0);
        static MOST: AtomicU64 = AtomicU64::new(0);
        let computing = (0..16).map(|_| {
            let mut polls = 0;
            let future = futures::future::poll_fn(move |context| {
                let counts = u64::from(polls >= UNKNOWN_POLLS);
                MOST.fetch_max(
                    RUNNING.fetch_add(counts, Ordering::SeqCst) + counts,
                    Ordering::SeqCst,
                );
                compute();
                RUNNING.fetch_sub(counts, Ordering::SeqCst);
                polls += 1;
                context.waker().wake_by_ref();
                if polls == 20 { Poll::Ready(()) } else { Poll::Pending }
            });
            tokio::spawn(MeteredFuture::new(future, Arc::default()))
        });
        futures::future::try_join_all(computing.collect::<Vec<_>>()).await.expect("no task panics");
        assert_eq!(MOST.load(Ordering::SeqCst), turns().min(8) as u64);
    }

    // What could go wrong: a tenant with many handlers that compute makes the handlers of another
    // tenant wait many times as long.
    #[tokio::test]
    async fn tenants_that_compute_alternate() {
        static OTHERS: AtomicU64 = AtomicU64::new(0);
        let (many, one) = (CpuSlots::default(), CpuSlots::default());
        let metered = |of: &CpuSlots, mut polls: u64, counted: u64| {
            let future = futures::future::poll_fn(move |context| {
                OTHERS.fetch_add(counted, Ordering::SeqCst);
                compute();
                polls -= 1;
                context.waker().wake_by_ref();
                if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
            });
            MeteredFuture::new(future, Arc::new(Meter::of(of.clone())))
        };
        // This executor has one thread, so all polls come one after the other. All handlers wait
        // for a turn before the first one has any.
        let all_turns =
            CPU_SLOTS.clone().acquire_many_owned(turns() as u32).await.expect("it is never closed");
        let crowd: Vec<_> =
            (0..16 * turns()).map(|_| tokio::spawn(metered(&many, 1_000, 1))).collect();
        let alone = tokio::spawn(metered(&one, 20, 0));
        for _ in 0..8 * UNKNOWN_POLLS {
            tokio::task::yield_now().await;
        }
        let unknown = OTHERS.load(Ordering::SeqCst) as usize;
        assert!(
            unknown <= crowd.len() * UNKNOWN_POLLS as usize,
            "{unknown} polls of {} handlers without a turn",
            crowd.len()
        );
        drop(all_turns);
        alone.await.expect("it does not panic");
        let others = OTHERS.load(Ordering::SeqCst) as usize - unknown;
        assert!(others <= (turns() + 2) * 20, "{others} turns of another tenant");
        crowd.iter().for_each(tokio::task::JoinHandle::abort);
    }

    // What could go wrong: handlers that begin together have all processors, each for one poll, as
    // often as they begin. Nothing was known of them before.
    #[tokio::test]
    async fn a_handler_begins_as_the_last_one_of_its_tenant_was() {
        let tenant = CpuSlots::default();
        let begun = AtomicU64::new(0);
        let handler = |computes: bool| {
            let mut left = 8;
            let begun = &begun;
            let future = futures::future::poll_fn(move |context| {
                begun.fetch_add(1, Ordering::SeqCst);
                if computes {
                    compute();
                }
                left -= 1;
                context.waker().wake_by_ref();
                if left == 0 { Poll::Ready(()) } else { Poll::Pending }
            });
            MeteredFuture::new(future, Arc::new(Meter::of(tenant.clone())))
        };
        let polls_without_a_turn = async |computes: bool| {
            let _all_turns = CPU_SLOTS
                .clone()
                .acquire_many_owned(turns() as u32)
                .await
                .expect("it is never closed");
            begun.store(0, Ordering::SeqCst);
            let mut handler = handler(computes);
            for _ in 0..8 {
                let _ = futures::poll!(&mut handler);
            }
            begun.load(Ordering::SeqCst)
        };
        assert_eq!(polls_without_a_turn(true).await, UNKNOWN_POLLS);
        assert_eq!(polls_without_a_turn(true).await, 0, "it is known");
        handler(false).await;
        assert_eq!(polls_without_a_turn(false).await, 8, "it is known that they compute no more");
    }

    // What could go wrong: a handler that only sends statements queues behind all that compute,
    // because the machine ran something else during one of its polls.
    #[tokio::test]
    async fn a_handler_whose_processor_was_taken_away_needs_no_turn() {
        let _all_turns =
            CPU_SLOTS.clone().acquire_many_owned(turns() as u32).await.expect("it is never closed");
        let mut polls = 8;
        let future = futures::future::poll_fn(|context| {
            std::thread::sleep(4 * LONG_POLL);
            polls -= 1;
            context.waker().wake_by_ref();
            if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        let mut metered = MeteredFuture::new(future, Arc::default());
        for _ in 0..7 {
            assert!(futures::poll!(&mut metered).is_pending());
        }
        assert!(futures::poll!(&mut metered).is_ready());
    }

    #[tokio::test]
    async fn a_handler_pays_for_what_it_computes_and_not_for_what_it_waits() {
        let meter = Arc::new(Meter::default());
        MeteredFuture::new(spin(5, Duration::from_millis(4)), meter.clone()).await;
        let spun = meter.usage().cpu;
        // A busy machine takes the processor away in between; most of the polls do not count that.
        assert!(spun > Duration::from_millis(4) && spun < Duration::from_secs(2), "{spun:?}");
        MeteredFuture::new(Box::pin(tokio::time::sleep(Duration::from_millis(50))), meter.clone())
            .await;
        assert!(
            meter.usage().cpu - spun < Duration::from_millis(25),
            "{:?}",
            meter.usage().cpu - spun
        );
    }
}
