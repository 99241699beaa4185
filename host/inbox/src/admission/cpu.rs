//! The polls of handlers, measured, and the turns that handlers which compute wait for.

use std::{
    pin::Pin,
    sync::{Arc, LazyLock, atomic::Ordering},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use oncebox_model::meter::{Meter, turns};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

/// A poll that takes longer than this may be that of a handler that computes: the next one is
/// measured by the processor's clock. Well below the time after which a spinning guest yields.
const LONG_POLL: Duration = Duration::from_micros(250);

/// A handler computes when long polls in a row took this much of a processor. More than an instance
/// takes to begin and to send a statement, also where nothing is in the processor's caches; a
/// spinning guest has it in a few polls.
const COMPUTES: Duration = Duration::from_millis(2);

/// Turns of handlers that compute, each for one poll: on all processors but one, so that what only
/// sends statements, of this tenant and of the others, finds one at once. Who has had a turn queues
/// behind the rest.
static TURNS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(turns())));

/// A handler's future, whose polls are measured. The processor's clock costs a system call, a
/// microsecond or two for each of the many polls that only send a statement; so it is read where
/// the poll before was long, and short polls count by the wall, on which little else fits between.
/// A handler that computes waits for its turn before each poll.
pub(crate) struct Metered<F> {
    future: F,
    meter: Arc<Meter>,
    /// Processor time of the long polls up to the last one, in a row; none where that was short.
    computed: Option<Duration>,
    place: PollSemaphore,
    /// A place in the queue, until its turn has been.
    waits: Option<OwnedSemaphorePermit>,
    turns: PollSemaphore,
}

impl<F> Metered<F> {
    pub(crate) fn new(future: F, meter: Arc<Meter>) -> Self {
        let place = PollSemaphore::new(meter.turns().places.clone());
        let computed = meter.turns().computes.load(Ordering::Relaxed).then_some(COMPUTES);
        Self {
            future,
            meter,
            computed,
            place,
            waits: None,
            turns: PollSemaphore::new(TURNS.clone()),
        }
    }

    fn computes(&self) -> bool {
        self.computed.is_some_and(|computed| computed >= COMPUTES)
    }
}

impl<F: Future + Unpin> Future for Metered<F> {
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
        // A poll that was not measured may have been long because the machine ran something else.
        let before = self.computed.unwrap_or_default();
        self.computed = (used >= LONG_POLL).then(|| before + measured.unwrap_or_default());
        self.meter.turns().computes.store(self.computes(), Ordering::Relaxed);
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
    use std::sync::atomic::AtomicU64;

    use super::*;
    use oncebox_model::meter::TenantTurns;

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

    /// Compute for long, as the processor's clock has it: whatever else runs, a poll that does this
    /// computed.
    fn compute() {
        let since = thread_time().expect("there is such a clock");
        while thread_time().expect("there is such a clock") - since < COMPUTES {}
    }

    /// Polls of a handler until it is known that it computes: one is long, and the next one is
    /// measured.
    const UNKNOWN_POLLS: u64 = 2;

    /// What only sends statements could wait behind handlers that compute, for as long as those do.
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
            tokio::spawn(Metered::new(future, Arc::default()))
        });
        futures::future::try_join_all(computing.collect::<Vec<_>>()).await.expect("no task panics");
        assert_eq!(MOST.load(Ordering::SeqCst), turns().min(8) as u64);
    }

    /// A tenant with many handlers that compute could make those of another wait as many times as
    /// long.
    #[tokio::test]
    async fn tenants_that_compute_alternate() {
        static OTHERS: AtomicU64 = AtomicU64::new(0);
        let (many, one) = (TenantTurns::default(), TenantTurns::default());
        let metered = |of: &TenantTurns, mut polls: u64, counted: u64| {
            let future = futures::future::poll_fn(move |context| {
                OTHERS.fetch_add(counted, Ordering::SeqCst);
                compute();
                polls -= 1;
                context.waker().wake_by_ref();
                if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
            });
            Metered::new(future, Arc::new(Meter::of(of.clone())))
        };
        // This executor has one thread, so all polls come one after the other; and all of them wait
        // for a turn before the first one has any.
        let all_turns =
            TURNS.clone().acquire_many_owned(turns() as u32).await.expect("it is never closed");
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

    /// Handlers that begin together could have all processors, each for one poll, as often as they
    /// begin: nothing was known of them before.
    #[tokio::test]
    async fn a_handler_begins_as_the_last_one_of_its_tenant_was() {
        let tenant = TenantTurns::default();
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
            Metered::new(future, Arc::new(Meter::of(tenant.clone())))
        };
        let polls_without_a_turn = async |computes: bool| {
            let _all_turns =
                TURNS.clone().acquire_many_owned(turns() as u32).await.expect("it is never closed");
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

    /// A handler that only sends statements could queue behind all that compute because the machine
    /// ran something else during one of its polls.
    #[tokio::test]
    async fn a_handler_whose_processor_was_taken_away_needs_no_turn() {
        let _all_turns =
            TURNS.clone().acquire_many_owned(turns() as u32).await.expect("it is never closed");
        let mut polls = 8;
        let future = futures::future::poll_fn(|context| {
            std::thread::sleep(4 * LONG_POLL);
            polls -= 1;
            context.waker().wake_by_ref();
            if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        let mut metered = Metered::new(future, Arc::default());
        for _ in 0..7 {
            assert!(futures::poll!(&mut metered).is_pending());
        }
        assert!(futures::poll!(&mut metered).is_ready());
    }

    #[tokio::test]
    async fn a_handler_pays_for_what_it_computes_and_not_for_what_it_waits() {
        let meter = Arc::new(Meter::default());
        Metered::new(spin(5, Duration::from_millis(4)), meter.clone()).await;
        let spun = meter.usage().cpu;
        // A busy machine takes the processor away in between; most of the polls do not count that.
        assert!(spun > Duration::from_millis(4) && spun < Duration::from_secs(2), "{spun:?}");
        Metered::new(Box::pin(tokio::time::sleep(Duration::from_millis(50))), meter.clone()).await;
        assert!(
            meter.usage().cpu - spun < Duration::from_millis(25),
            "{:?}",
            meter.usage().cpu - spun
        );
    }
}
