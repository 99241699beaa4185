//! The retry workers. They run due messages of the inbox: retries, messages on probation, and all
//! messages of a consumer that acks after the insert.

use std::{pin::pin, sync::Arc, time::Duration};

use oncebox_model::{
    error::InboxError,
    handler::{Handler, Handlers},
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    reference::FetchError,
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    admission::{
        Admission,
        breaker::{BreakerDecision, Probe, RECHECK},
    },
    batch::{routed::Routed, settled::Settled},
    consumer::ConsumerInbox,
    reference::Fetched,
    retry::lease::Leased,
};

/// Pause of a worker when nothing is due, where no poller wakes it.
const IDLE: Duration = Duration::from_millis(250);
/// Pause after a fault of the host, and delay of a lease that such a fault gives back.
const TROUBLE: Duration = Duration::from_secs(1);

/// Messages in a row that wait for a circuit breaker or a registry, before a worker pauses.
const WAITING_IN_A_ROW: u32 = 16;

/// Longest delay of a message that a circuit breaker holds back.
const PUT_OFF: Duration = Duration::from_secs(5);

/// Runs a worker until `stop` is cancelled; a message that runs at that time is finished. Where a
/// poller exists, the worker holds no connection and sends no query until it is woken.
pub async fn work(consumer: Arc<ConsumerInbox>, stop: CancellationToken) {
    let mut pause = if consumer.wakeup.is_polled() { Duration::MAX } else { Duration::ZERO };
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = consumer.wakeup.wait() => {}
            () = tokio::time::sleep(pause) => {}
        }
        pause = match work_off(&consumer, &stop).await {
            Ok(()) if let Some(wait) = consumer.held_back() => wait.min(RECHECK),
            Ok(()) if consumer.wakeup.is_polled() => Duration::MAX,
            Ok(()) | Err(InboxError::BreakerOpen { .. }) => IDLE,
            Err(InboxError::DatabaseUnavailable { retry_after }) => retry_after,
            Err(error @ InboxError::Stopped { .. }) => error.retry_after().unwrap_or(IDLE),
            Err(error) => {
                tracing::warn!(tenant = consumer.tenant, consumer = consumer.name, %error, "the \
                    retry worker waits");
                TROUBLE
            }
        };
    }
}

/// Runs due messages until none is left, or none may run. Where there is more than one message,
/// wakes another worker to help.
async fn work_off(consumer: &ConsumerInbox, stop: &CancellationToken) -> Result<(), InboxError> {
    let (mut is_more, mut waiting) = (false, 0);
    while !stop.is_cancelled() && consumer.held_back().is_none() {
        match step(consumer, stop).await {
            Ok(0) => break,
            Ok(_) => waiting = 0,
            // Messages of other versions may be due behind it.
            Err(
                InboxError::BreakerOpen { .. }
                | InboxError::RegistryUnavailable(_)
                | InboxError::SchemaTimeout
                | InboxError::StoreNotOpened(_),
            ) if waiting < WAITING_IN_A_ROW => {
                waiting += 1;
            }
            Err(error) => return Err(error),
        }
        if is_more {
            consumer.wakeup.now();
        }
        is_more = true;
    }
    Ok(())
}

/// Leases one due message and runs it, in a transaction of its own. Returns how many messages were
/// due: 0 or 1.
///
/// # Errors
///
/// Returns an error where the message was not run, or its result is not recorded.
pub async fn step(consumer: &ConsumerInbox, stop: &CancellationToken) -> Result<usize, InboxError> {
    // The admission comes before the lease. A lease could run out while its message waits for
    // admission, and would count as a crash.
    let admission = tokio::select! {
        biased;
        admission = consumer.admit(1, true) => admission,
        () = stop.cancelled() => return Ok(0),
    };
    consumer.tell_interrupted(&admission).await?;
    let Some(mut leased) = consumer.lease(&admission).await? else { return Ok(0) };
    if stop.is_cancelled() {
        // The attempt did not happen.
        consumer.release(&admission, &leased, Duration::ZERO).await?;
    } else if consumer.decode_leased(&mut leased) {
        if let Some(admission) = consumer.fetch_leased(admission, &mut leased, stop).await? {
            consumer.run_leased(admission, &leased).await?;
        }
    } else {
        // Nor did this one. A wait for a registry holds no lease and no place of the host.
        consumer.release(&admission, &leased, TROUBLE).await?;
        drop(admission);
        consumer.prepare(std::iter::once(leased.message.record.payload.as_deref())).await?;
    }
    Ok(1)
}

/// End of the work under a lease.
enum Ended {
    /// The message's disposition, and the kind of its failure.
    Settled(Disposition, Option<FailureKind>),
    /// Failure of a run whose lease another worker has by now.
    Unrecorded(FailureKind),
    /// No run: the lease is lost, or it is not the message's turn.
    NotRun,
}

/// Reports the first run of a message to its handler, and no further one. Otherwise a message that
/// is stuck would count as many.
fn settled_first(leased: &Leased, handler: &Arc<dyn Handler>, disposition: Disposition) {
    if leased.lease.attempt == 1 {
        handler.settled(disposition);
    }
}

impl ConsumerInbox {
    /// Returns how long circuit breakers hold back every message that may be due; none where a
    /// lease is worth taking. A lease that is given back at once costs two commits.
    fn held_back(&self) -> Option<Duration> {
        // An interrupted lease has to be reported to the database, whatever the breakers say.
        if self.interrupted().is_empty() {
            self.breakers.held_back(&*self.handlers())
        } else {
            None
        }
    }

    /// Fetches the payload of a leased message, where it refers to one and may run. The fetch holds
    /// no admission of the host. Returns an admission for the run; none where the worker is told to
    /// stop, or the lease is lost.
    async fn fetch_leased(
        &self,
        admission: Admission,
        leased: &mut Leased,
        stop: &CancellationToken,
    ) -> Result<Option<Admission>, InboxError> {
        if leased.fault.is_some() || !self.refers(&leased.message) {
            return Ok(Some(admission));
        }
        let handlers = self.handlers();
        let Some(handler) = handlers.resolve(&leased.message, leased.version) else {
            return Ok(Some(admission)); // it fails without a run
        };
        if let Some(left) = self.breakers.wait_of(&*handler) {
            return Err(self.put_off(&admission, leased, handler.version(), left).await?);
        }
        drop(admission);
        let Some((fetched, admission)) = self.fetch_and_admit(leased, stop).await? else {
            return Ok(None);
        };
        match fetched {
            Ok(payload) => leased.message.fetched = Some(payload),
            Err(FetchError::Reference(error)) => leased.unfetched = Some(error.into()),
            Err(error) => {
                // The attempt did not happen.
                self.release(&admission, leased, TROUBLE).await?;
                return Err(InboxError::StoreNotOpened(error.to_string()));
            }
        }
        Ok(Some(admission))
    }

    /// Fetches the payload of a leased message, then waits for the admission to its run. Renews the
    /// lease meanwhile, so that no wait costs the message its place. Gives the lease back where the
    /// worker is told to stop.
    async fn fetch_and_admit(
        &self,
        leased: &mut Leased,
        stop: &CancellationToken,
    ) -> Result<Option<(Fetched, Admission)>, InboxError> {
        let message = leased.message.clone();
        let mut work = pin!(async {
            let fetched = self.fetch(&message, true).await;
            (fetched, self.admit(1, true).await)
        });
        let of_run = Duration::from_millis(self.policy.retry.lease_ms);
        loop {
            let spare = leased.left(self.policy.lease()).saturating_sub(of_run);
            let renewal = async {
                sleep(spare / 2).await;
                self.admit_first().await
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    // The attempt did not happen.
                    let admission = self.admit_first().await;
                    self.release(&admission, leased, Duration::ZERO).await?;
                    return Ok(None);
                }
                (fetched, admission) = &mut work => {
                    let is_short = leased.left(self.policy.lease()) < of_run;
                    let is_ours = !is_short || self.renew(&admission, leased).await?;
                    return Ok(is_ours.then_some((fetched, admission)));
                }
                admission = renewal => {
                    if !self.renew(&admission, leased).await? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Renews a lease before its run. Returns false where another worker has it.
    async fn renew(&self, admission: &Admission, leased: &mut Leased) -> Result<bool, InboxError> {
        let renewed = self.renew_lease(admission, leased).await;
        match renewed {
            Ok(true) => {}
            Ok(false) => self.has_lost(leased),
            // A crash that was counted since is taken back.
            Err(_) => self.was_interrupted(leased),
        }
        renewed
    }

    /// Gives a lease back whose version's circuit breaker waits, and returns the error that says
    /// so. The attempt did not happen. Another version may take the message long before this one is
    /// tried.
    async fn put_off(
        &self,
        admission: &Admission,
        leased: &Leased,
        version: i32,
        left: Duration,
    ) -> Result<InboxError, InboxError> {
        let retry_after = left.min(PUT_OFF);
        self.release(admission, leased, retry_after).await?;
        Ok(InboxError::BreakerOpen { version, retry_after })
    }

    /// Runs a leased message and records its result, or gives the lease back.
    async fn run_leased(&self, admission: Admission, leased: &Leased) -> Result<(), InboxError> {
        let handlers = self.handlers();
        match self.run_leased_with(&admission, &*handlers, leased).await {
            Err(InboxError::StaleDeployments) => {
                // The attempt did not happen; the loaded deployments were withdrawn.
                let _ = self.release(&admission, leased, Duration::ZERO).await;
                drop(admission);
                if self.newer_than(handlers.generation()).await {
                    Ok(())
                } else {
                    Err(InboxError::StaleDeployments)
                }
            }
            answer => {
                // A message that was put off did not use the rate.
                admission.settled(usize::from(answer.is_ok()));
                answer
            }
        }
    }

    /// Runs a leased message by the handler of its event type, as far as its circuit breaker lets
    /// it, and records the result.
    async fn run_leased_with(
        &self,
        admission: &Admission,
        handlers: &dyn Handlers,
        leased: &Leased,
    ) -> Result<(), InboxError> {
        let generation = handlers.generation();
        let handler = match self.handler_of(handlers, leased) {
            Ok(handler) => handler,
            Err(failure) => {
                let (request, lease) = (leased.request(None), Some(leased.lease));
                let settled = self.record(admission, &request, lease, generation, failure).await;
                return self.ended(admission, leased, settled).await.map(drop);
            }
        };
        let probe = match self.breakers.admit(&*handler, true) {
            BreakerDecision::Pass => None,
            BreakerDecision::Probe(probe) => Some(probe),
            BreakerDecision::Wait(left) => {
                return Err(self.put_off(admission, leased, handler.version(), left).await?);
            }
        };
        let (request, lease) = (leased.request(Some(handler.version())), Some(leased.lease));
        let routed = Routed { lease, ..Routed::new(request, handler, generation) };
        let settled = self.settle_leased(admission, &routed).await;
        match self.ended(admission, leased, settled).await? {
            Ended::Settled(disposition, failure) => {
                settled_first(leased, &routed.handler, disposition);
                self.judge(leased, &*routed.handler, probe, failure);
            }
            Ended::Unrecorded(failure) => {
                self.judge(leased, &*routed.handler, probe, Some(failure));
            }
            Ended::NotRun => {}
        }
        Ok(())
    }

    /// Returns the handler of a leased message, or the failure of one that no handler can take.
    fn handler_of(
        &self,
        handlers: &dyn Handlers,
        leased: &Leased,
    ) -> Result<Arc<dyn Handler>, Failure> {
        let Leased { message, version, fault, unfetched, .. } = leased;
        self.handler_for(handlers, (message, *version), (fault.as_deref(), unfetched.as_ref()))
    }

    /// Returns the handler of a stored message, or the failure of one that no handler can take.
    /// `version` ran it last; its faults are those of its payload.
    pub(crate) fn handler_for(
        &self,
        handlers: &dyn Handlers,
        (message, version): (&Message, Option<i32>),
        (fault, unfetched): (Option<&str>, Option<&Failure>),
    ) -> Result<Arc<dyn Handler>, Failure> {
        let Some(handler) = handlers.resolve(message, version) else {
            let text = "no deployment takes this event type";
            return Err(Failure::new(FailureKind::NoRoute, text));
        };
        if let Some(failure) = unfetched {
            return Err(failure.clone());
        }
        match fault.map(str::to_owned).or_else(|| self.schemas.fault(message)) {
            Some(fault) => Err(Failure::new(FailureKind::Schema, fault)),
            None => Ok(handler),
        }
    }

    /// Counts the result of a leased message and returns it. After an error the attempt did not
    /// happen, unless the message broke its connection.
    async fn ended(
        &self,
        admission: &Admission,
        leased: &Leased,
        settled: Result<Settled, InboxError>,
    ) -> Result<Ended, InboxError> {
        let error = match settled {
            Ok(settled) => {
                let Some((_, disposition, failure)) = settled.results.into_iter().next() else {
                    self.has_lost(leased);
                    return Ok(settled.unrecorded.map_or(Ended::NotRun, Ended::Unrecorded));
                };
                self.count_run(&leased.message, disposition);
                return Ok(Ended::Settled(disposition, failure));
            }
            Err(error) => error,
        };
        match error {
            InboxError::StaleDeployments => {} // the caller gives the lease back
            // Where the database cannot be told, the lease runs out.
            InboxError::LostInHandler { .. } => drop(self.end_lease(admission, leased).await),
            InboxError::LostInOutage { .. } => self.was_interrupted(leased),
            // After a lost answer to COMMIT, the release waits for that commit to end. It releases
            // the lease only if the transaction was rolled back.
            _ => {
                if let Ok(false) = self.release(admission, leased, TROUBLE).await {
                    self.has_lost(leased); // another worker took it over
                }
            }
        }
        Err(error)
    }

    /// Reports the end of a run to the version's circuit breaker: of a probe, or of a first run.
    fn judge(
        &self,
        leased: &Leased,
        handler: &dyn Handler,
        probe: Option<Probe>,
        failure: Option<FailureKind>,
    ) {
        match probe {
            Some(probe) => probe.ended(failure.as_ref()),
            None if leased.lease.attempt == 1 => self.breakers.ran(handler, [&failure]),
            None => {}
        }
    }

    /// Remembers a lease that this worker lost, if it ran out because the database was slow or
    /// away. The worker that took it over counted a crash that was none; the database takes that
    /// back.
    fn has_lost(&self, leased: &Leased) {
        if leased.has_run_out(self.policy.lease()) {
            self.was_interrupted(leased);
        }
    }
}
