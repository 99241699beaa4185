//! One partition's way into the inbox: decode, set aside what cannot be handled, settle the rest in
//! order.
//!
//! `process` takes records from Kafka and returns how many of them, from the first, are settled.
//! `route` decides for each record whether it runs or is parked. Then the front of the batch is
//! settled: either its parked records together, or its messages that run.

// Decoding, and the decision about each record.
mod route;
// Rows of records and messages that cannot be handled.
pub(crate) mod parking;
// Parking of those at the front.
mod parked;
// A partition that is taken and given up; messages that run alone, since one of them may kill the
// process.
mod probation;
// Payloads that records refer to.
mod payloads;
// Detection of one payload under two ids.
mod duplicate_payloads;
// The database's clock.
mod clock;
// The partition's position in the database.
mod position;
// The check that a server has all commits of the partition.
mod server_check;
// The receiver of a consumer's partitions.
pub(crate) mod receiver;

use std::sync::Arc;

use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use oncebox_model::{
    error::InboxError,
    handler::Handlers,
    hooks::{self, Defect},
    inbox::{PartitionInboxError, ServerRun},
    message::Message,
    policy::Ack,
    record::Record,
};

use crate::{
    admission::Admission,
    batch::{
        claim::{ClaimOutcome, ClaimRequest, InitialStatus},
        process::Permit,
        routed::Routed,
        settled::Settled,
    },
    consumer::ConsumerInbox,
    partition::{
        clock::DatabaseClock, duplicate_payloads::DuplicatePayloads, payloads::FetchedPayloads,
        position::Position, route::Route,
    },
};

/// Outages in a row without progress, after which the messages that ran are suspected as the cause.
const OUTAGES_MAX: u32 = 2;

/// The inbox of one assigned partition.
pub struct PartitionInbox {
    consumer: Arc<ConsumerInbox>,
    /// Name of the topic.
    topic: String,
    /// Number of the partition.
    partition: i32,
    /// Number of messages that are still to be stored instead of run.
    probation: usize,
    /// Number of messages at the front, one of which may have broken its connection. Half of them
    /// run together. The last one left is stored, to run alone and be counted before it does.
    suspected: usize,
    /// Number of outages in a row that struck while messages ran, without progress between them.
    outages: u32,
    /// Number of messages that are to be settled one by one, after a batch failed at its commit.
    single_runs_left: usize,
    /// True once a new message was settled: the process did not die at the offset where it started.
    /// Duplicates of a redelivery say nothing about the message behind them.
    made_progress: bool,
    /// True once the probation row is deleted.
    is_cleared: bool,
    /// Payloads that records at the front refer to.
    fetched: FetchedPayloads,
    /// Payloads that this partition saw last.
    duplicate_payloads: DuplicatePayloads,
    /// Position in the database.
    position: Position,
    /// Clock for the horizon of replays.
    clock: DatabaseClock,
    /// Permission to begin a transaction, which `ready` got in advance.
    permit: Option<Permit>,
}

// Each method calls the inherent one of its name.
impl oncebox_model::inbox::PartitionInbox for PartitionInbox {
    fn ready<'a>(&'a mut self, records: &'a [Record]) -> BoxFuture<'a, ()> {
        self.ready(records).boxed()
    }

    fn process<'a>(
        &'a mut self,
        records: &'a [Record],
    ) -> BoxFuture<'a, Result<usize, PartitionInboxError>> {
        self.process(records).map_err(PartitionInboxError::from).boxed()
    }

    fn idle(&mut self) -> BoxFuture<'_, Result<(), PartitionInboxError>> {
        self.watch_server().map_err(PartitionInboxError::from).boxed()
    }

    fn batch_max(&self) -> usize {
        self.batch_max()
    }

    fn server(&self) -> ServerRun {
        self.position.server.clone()
    }

    fn close<'a>(self: Box<Self>, _next_offset: i64) -> BoxFuture<'a, ()> {
        (*self).close().boxed()
    }
}

impl PartitionInbox {
    /// Returns the number of records that one call of `process` can use.
    pub fn batch_max(&self) -> usize {
        self.consumer.policy.batch.messages_max
    }

    /// Fetches the payloads that these records refer to, then waits for the permission that
    /// [`PartitionInbox::process`] needs to begin. Beside the wait for schemas that are not at
    /// hand, this is the only wait for other work of the host. Dropping it leaves nothing behind
    /// but payloads that were fetched, and fetches that go on until the partition is closed.
    pub async fn ready(&mut self, records: &[Record]) {
        let records = self.with_payloads(&records[..records.len().min(self.batch_max())]).await;
        if !self.fetched.is_held_up() {
            self.permitted(records.len().max(1)).await;
        }
    }

    /// Waits for the permission to begin, for at most `records` records.
    async fn permitted(&mut self, records: usize) {
        if self.permit.is_none() {
            let runs = self.probation == 0 && self.consumer.policy.ack == Ack::AfterCommit;
            let serial = self.consumer.sizer.serial_permit().await;
            let mut admission = self.consumer.admit(records.min(self.batch_max()), runs).await;
            admission.hold_to(self.position.turn());
            self.permit = Some(Permit { admission, serial });
        }
    }

    /// Processes records from the front and returns how many of them, from the first, are settled.
    /// Settled means completed, or durably in the inbox in a state that an operator can see. Waits
    /// for admission unless [`PartitionInbox::ready`] has. Fetches no payload: it processes the
    /// records whose payloads `ready` has fetched.
    ///
    /// # Errors
    ///
    /// Returns an error where no record is known to be settled; the caller processes them again,
    /// after a call of `ready`.
    pub async fn process(&mut self, records: &[Record]) -> Result<usize, InboxError> {
        let mut records_max = self.batch_max();
        loop {
            let prepared = self.with_schemas(&records[..records.len().min(records_max)]).await?;
            let records = self.fetched_front(prepared);
            if records.is_empty() && !prepared.is_empty() {
                if records_max > 1 {
                    records_max = 1; // the first record's schema is then the last that was used
                    continue;
                }
                self.permit = None;
                return Err(self.fetched.missing());
            }
            self.permitted(records.len()).await;
            let Some(mut permit) = self.permit.take() else { continue };
            if self.consumer.sizer.is_serialized() && !permit.serial.is_held() {
                continue; // admitted before transactions ran one at a time
            }
            let records = &records[..records.len().min(permit.admission.messages())];
            let handlers = self.consumer.handlers();
            let answer = self.process_with(&mut permit, &*handlers, records).await;
            permit.admission.settled(*answer.as_ref().unwrap_or(&0));
            if let Ok(settled @ 1..) = answer {
                self.position.settled(records[settled - 1].offset + 1);
            }
            drop(permit); // waiting for newer deployments holds no place of the host
            match answer {
                // The loaded deployments were withdrawn, and newer ones have come: again with
                // those.
                Err(InboxError::ServerStarted) => self.check_server().await?,
                Err(InboxError::StaleDeployments)
                    if self.consumer.newer_than(handlers.generation()).await => {}
                // The registry's cache dropped the first record's schema for those of others, or a
                // deployment takes the first message since its payload was to be fetched. The
                // schema is fetched, for this record alone.
                Ok(0) if !records.is_empty() => records_max = 1,
                answer => {
                    match &answer {
                        Ok(settled) => self.fetched.settled(&records[..*settled]),
                        // Others may need the memory until it closes.
                        Err(InboxError::BreakerOpen { .. }) => self.fetched.clear(),
                        Err(_) => {}
                    }
                    return answer;
                }
            }
        }
    }

    /// Returns the records at the front whose schemas are at hand, and fetches schemas where they
    /// are not. A wait for a registry holds no place of the host.
    async fn with_schemas<'a>(
        &mut self,
        records: &'a [Record],
    ) -> Result<&'a [Record], InboxError> {
        let payloads = || records.iter().map(|record| record.payload.as_deref());
        let prepared = match self.consumer.prepare(payloads()).now_or_never() {
            Some(prepared) => prepared?,
            None => {
                self.permit = None;
                self.consumer.prepare(payloads()).await?
            }
        };
        Ok(&records[..prepared])
    }

    /// Settles the front of the records in an admitted transaction, and notes the progress.
    async fn process_with(
        &mut self,
        permit: &mut Permit,
        handlers: &dyn Handlers,
        records: &[Record],
    ) -> Result<usize, InboxError> {
        let horizon_ms = self.horizon_ms().await?;
        let routes = self.route(handlers, records, horizon_ms);
        let settled = match routes.first() {
            None => return Ok(0),
            Some(Route::Park(_)) => {
                self.park_front(&permit.admission, handlers.generation(), &routes).await?
            }
            Some(Route::Run(_)) => self.run_front(permit, handlers.generation(), routes).await?,
        };
        self.suspected = self.suspected.saturating_sub(settled);
        self.outages = 0;
        if self.made_progress {
            self.progressed(&permit.admission).await?;
        }
        Ok(settled)
    }

    /// Runs or stores all messages at the front that are to run, and returns how many are settled.
    /// Messages are stored on probation, under suspicion, and where the policy acks after the
    /// insert.
    async fn run_front(
        &mut self,
        permit: &mut Permit,
        generation: i64,
        routes: Vec<Route>,
    ) -> Result<usize, InboxError> {
        let batch: Vec<_> = routes
            .into_iter()
            .map_while(|route| match route {
                Route::Run(routed) => Some(routed),
                Route::Park(_) => None,
            })
            .collect();
        let (batch, settled) = if self.stores() {
            let mut batch = batch;
            if self.suspected > 0 {
                batch.truncate(self.suspected);
            }
            let settled = self.store(&permit.admission, generation, &batch).await?;
            (batch, settled)
        } else {
            let (batch, probe) = self.passed(batch)?;
            let settled = self.settle(permit, &batch).await?;
            if let (Some(probe), [(_, _, failure)]) = (probe, &settled.results[..]) {
                probe.ended(failure.as_ref());
            }
            (batch, settled)
        };
        let claimed = batch.iter().map(message).zip(&settled.claims);
        self.position.claimed(permit.admission.turn(), claimed);
        self.made_progress |= settled.claims.iter().any(ClaimOutcome::is_ours);
        let collided =
            batch.iter().zip(&settled.claims).filter(|(_, claimed)| self.collides(claimed));
        let collisions: Vec<_> =
            collided.map(|(routed, _)| parking::collision(message(routed))).collect();
        if !collisions.is_empty() {
            self.park(&permit.admission, generation, &collisions).await?;
        }
        self.report(&batch, &settled);
        Ok(settled.claims.len())
    }

    /// Returns whether messages are stored now instead of run.
    fn stores(&self) -> bool {
        self.probation > 0 || self.suspected == 1 || self.consumer.policy.ack == Ack::AfterInsert
    }

    /// Stores messages instead of running them: the retry workers count each attempt before it
    /// runs.
    async fn store(
        &mut self,
        admission: &Admission,
        generation: i64,
        batch: &[Routed],
    ) -> Result<Settled, InboxError> {
        let reason = (self.probation > 0 || self.suspected == 1)
            .then(|| oncebox_model::Reason::Probation.to_string());
        let offered: Vec<_> = batch
            .iter()
            .map(|routed| ClaimRequest { reason: reason.clone(), ..routed.request.clone() })
            .collect();
        let claims =
            self.consumer.store(admission, generation, &offered, InitialStatus::Received).await?;
        let new = claims.iter().filter(|claimed| **claimed == ClaimOutcome::New).count();
        self.probation = self.probation.saturating_sub(new);
        Ok(Settled::stored(claims))
    }

    /// Settles the front of a batch, with fewer messages while some are suspected. Notes the
    /// suspicion that an error raises.
    async fn settle(
        &mut self,
        permit: &mut Permit,
        batch: &[Routed],
    ) -> Result<Settled, InboxError> {
        let size = match self.suspected {
            _ if self.single_runs_left > 0 => 1,
            0 => batch.len(),
            suspected => suspected.div_ceil(2).min(batch.len()),
        };
        match self.consumer.settle(permit, batch, size).await {
            Ok(settled) => {
                if self.single_runs_left > 0 {
                    self.single_runs_left -= 1;
                } else if settled.alone {
                    self.single_runs_left = batch.len() - 1;
                }
                Ok(settled)
            }
            Err(error) => {
                match error {
                    InboxError::LostInHandler { among, .. } => self.suspect(among),
                    // Where every run of these messages meets an outage, one of them may cause it.
                    InboxError::LostInOutage { among, .. } => {
                        self.outages += 1;
                        if self.outages >= OUTAGES_MAX || self.suspected > 0 {
                            self.suspect(among);
                        }
                    }
                    InboxError::InFlightElsewhere => {
                        self.consumer.count_elsewhere(batch.iter().map(message))
                    }
                    _ => {}
                }
                Err(error)
            }
        }
    }

    /// Suspects the first `among` messages, which ran on a connection that broke; the last of them
    /// was running when it broke. Halving finds the cause.
    fn suspect(&mut self, among: usize) {
        self.suspected = if hooks::sabotage(Defect::SuspicionForgotten) { 0 } else { among };
        let Self { consumer, topic, partition, .. } = self;
        tracing::warn!(
            tenant = consumer.tenant,
            consumer = consumer.name,
            topic = *topic,
            partition = *partition,
            messages = among,
            "a connection broke while a handler ran; the messages that ran on it run in halves"
        );
    }

    /// Counts and logs the claims and runs of a committed transaction, and reports the runs to the
    /// circuit breakers.
    fn report(&self, batch: &[Routed], settled: &Settled) {
        for (routed, claimed) in
            batch.iter().zip(&settled.claims).filter(|(_, claimed)| !self.collides(claimed))
        {
            self.consumer.count_claim(message(routed), claimed);
        }
        for (index, disposition, _) in &settled.results {
            self.consumer.count_run(message(&batch[*index]), *disposition);
            batch[*index].handler.settled(*disposition);
        }
        let ran: Vec<_> = settled
            .results
            .iter()
            .map(|(index, _, failure)| (&*batch[*index].handler, failure))
            .collect();
        for of_one in ran.chunk_by(|(one, _), (other, _)| std::ptr::addr_eq(*one, *other)) {
            self.consumer.breakers.ran(of_one[0].0, of_one.iter().map(|(_, failure)| *failure));
        }
    }

    /// Deletes the probation row at the first progress: the process did not die at the offset where
    /// it started.
    async fn progressed(&mut self, admission: &Admission) -> Result<(), InboxError> {
        if !self.is_cleared {
            self.consumer.partition_cleared(admission, &self.topic, self.partition, None).await?;
            self.is_cleared = true;
        }
        Ok(())
    }
}

/// Returns the message of a routed one.
fn message(routed: &Routed) -> &Message {
    &routed.request.message
}
