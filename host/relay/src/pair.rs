//! The messages of one tenant for one destination: lease, send, mark, until nothing is due.
//!
//! Messages of a lease are sent at once: of each lane there is one. What the destination has
//! answered is marked as it comes, and further messages are leased meanwhile. So a partition of a
//! topic whose broker is away holds up its own messages, and no others. After a lease of few
//! messages to Kafka is a pause. What is answered in it is marked in one transaction, before the
//! next lease.
//!
//! What a process has leased has a bounded room in memory. A pair that has nothing under way waits
//! for its part of it, and gives it back with each answer. So none holds room while it waits.
//!
//! Each send is a task of its own. A delivery that holds one of the database's turns goes on while
//! this task waits for a turn to lease or to mark.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::FutureExt;
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    outgoing::{Destination, OutgoingStatus},
    payload_key::PayloadKey,
};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    attempt::{Attempted, gathered, judge},
    backoff::AGAIN,
    directory::TenantFacts,
    http::{self, HttpFacts},
    inbox,
    kafka::KafkaSender,
    metric::Labels,
    outcome::{Mark, Sent},
    pair_state::{PairEnd, PairKey},
    reason::OutgoingReason,
    relay::Shared,
    row::OutgoingRow,
    span::in_span,
    store::{LEASE_KB, Store},
    turn::{LeasePause, LeaseTerms, Turn, turn},
};

/// Pause between two looks for what is due, while messages are under way and nothing names the pair.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time that a message waits for others of its tenant that are under way to endpoints. It
/// is well below a lease.
const PLACE_MAX: Duration = Duration::from_secs(5);

/// Longest time that a task takes to end after it was told to stop: that of the sends that are
/// under way, and of their marks.
pub(crate) const ENDING_MAX: Duration = Duration::from_secs(25);

/// The task of a pair.
pub(crate) struct PairTask {
    pub(crate) shared: Arc<Shared>,
    pub(crate) store: Arc<Store>,
    pub(crate) key: PairKey,
    /// Destination of the pair; none where this host knows no such kind.
    pub(crate) destination: Option<Destination>,
    /// Signal that the pair was found due while this task works on it.
    pub(crate) named: Arc<Notify>,
    /// Whether it only tries whether the destination is back.
    pub(crate) is_probing: bool,
    pub(crate) stop: CancellationToken,
    /// Whether no further send is to begin, since the destination is away.
    pub(crate) is_halted: AtomicBool,
}

/// What the messages of a lease are sent with.
struct LeaseFacts {
    tenant: Arc<TenantFacts>,
    terms: LeaseTerms,
    /// Key of the tenant's payload hashes, for what goes to an inbox.
    payload_key: Option<PayloadKey>,
    /// By consumer, what goes to a topic.
    kafka: HashMap<i32, KafkaSender>,
    /// Moment of the request for the lease, which is no later than its begin.
    asked_at: Instant,
}

impl PairTask {
    /// Sends what is due, until nothing is left, the destination is away or the host stops.
    pub(crate) async fn drain(self: Arc<Self>) -> PairEnd {
        let mut under_way: JoinSet<Attempted> = JoinSet::new();
        let (mut end, mut confirmed_at) = (None, None::<Instant>);
        let (mut pause, mut is_named) = (LeasePause::none(), false);
        loop {
            let leases = end.is_none() && !self.stop.is_cancelled();
            let probes = self.is_probing && confirmed_at.is_none();
            let turn = match (leases, pause.left()) {
                (false, _) => Turn::Full,
                (true, Some(left)) => Turn::Wait(left),
                (true, None) => self.turn(under_way.len(), probes).await,
            };
            let mut again = LOOK;
            match turn {
                Turn::Full => {}
                Turn::End(ended) => end = Some(ended),
                Turn::Wait(time) if under_way.is_empty() => {
                    self.rest(Instant::now() + time).await;
                    continue;
                }
                Turn::Wait(time) => again = if is_named { time } else { LOOK },
                Turn::Lease(terms) => {
                    // What was named so far is leased now, or without room at the next look.
                    self.named.notified().now_or_never();
                    end = self.begin(&mut under_way, &terms, &mut pause).await;
                    is_named = pause.leaves_more;
                    if is_named && end.is_none() {
                        continue;
                    }
                }
            }
            // One that is slow to end holds up none that becomes due meanwhile.
            let is_busy = leases && !under_way.is_empty();
            let ended = tokio::select! {
                ended = under_way.join_next() => ended,
                () = self.named.notified(), if is_busy && !is_named => {
                    is_named = true;
                    continue;
                }
                () = sleep(again), if is_busy => continue,
            };
            let Some(first) = ended else { break };
            let mut ended = gathered(first, &mut under_way, pause.lease_at).await;
            let mut judged = judge(&mut ended, &mut confirmed_at);
            if let Err(error) = self.mark(ended).await {
                judged = Some(PairEnd::Database(error.to_string()));
            }
            if judged.is_some() {
                self.is_halted.store(true, Ordering::Relaxed);
                end = judged;
            }
        }
        if end.is_none() {
            // The next task leases at once, also where commits name the pair all the time.
            self.rest(pause.end_at).await;
        }
        end.unwrap_or(PairEnd::Dry)
    }

    /// Returns what may be leased now.
    async fn turn(&self, under_way: usize, probes: bool) -> Turn {
        let Shared { directory, endpoints, .. } = &*self.shared;
        let pair = (self.key.tenant_id, self.destination.as_ref());
        turn((directory, endpoints), pair, under_way, probes).await
    }

    /// Waits until then, or until the host stops.
    async fn rest(&self, until: Instant) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = sleep_until(until) => {}
        }
    }

    /// Leases messages and begins to send them. Returns the end of the task where nothing more is
    /// to be leased.
    async fn begin(
        self: &Arc<Self>,
        under_way: &mut JoinSet<Attempted>,
        terms: &LeaseTerms,
        pause: &mut LeasePause,
    ) -> Option<PairEnd> {
        pause.leaves_more = false;
        let Some(room) = self.room(under_way.is_empty()).await else {
            terms.give_back(terms.most);
            return None;
        };
        let (begun, end) = match self.lease(terms).await {
            Ok(Some((facts, rows))) => {
                let kilobytes: usize = rows.iter().map(OutgoingRow::kilobytes).sum();
                let is_full = rows.len() >= terms.most || kilobytes >= LEASE_KB as usize;
                // Kafka's client sends many together.
                let is_kafka = matches!(self.destination, Some(Destination::Kafka { .. }));
                let gathers = !is_full && (is_kafka || rows.is_empty());
                *pause = LeasePause::after(facts.asked_at.elapsed(), gathers, is_full);
                (self.begin_each(under_way, rows, facts, room), None)
            }
            Ok(None) => (0, Some(PairEnd::Resting)),
            Err(error) => (0, Some(PairEnd::Database(error.to_string()))),
        };
        terms.give_back(terms.most.saturating_sub(begun));
        end
    }

    /// Takes room for a lease. A pair with nothing under way waits for it; another one has none
    /// where it would have to wait. None also where the host stops.
    async fn room(&self, waits: bool) -> Option<OwnedSemaphorePermit> {
        let room = self.shared.room.clone();
        if !waits {
            return room.try_acquire_many_owned(LEASE_KB).ok();
        }
        tokio::select! {
            () = self.stop.cancelled() => None,
            room = room.acquire_many_owned(LEASE_KB) => room.ok(), // nobody closes it
        }
    }

    /// Begins to send messages, and returns how many. Each keeps its part of the room until it has
    /// its answer.
    fn begin_each(
        self: &Arc<Self>,
        under_way: &mut JoinSet<Attempted>,
        rows: Vec<OutgoingRow>,
        facts: LeaseFacts,
        mut room: OwnedSemaphorePermit,
    ) -> usize {
        let (begun, facts) = (rows.len(), Arc::new(facts));
        for row in rows {
            let part = room.split(row.kilobytes().min(room.num_permits()));
            let (task, facts) = (self.clone(), facts.clone());
            under_way.spawn(async move {
                let mut attempted = task.attempt(row, &facts).await;
                attempted.row.forget_content();
                drop(part);
                attempted
            });
        }
        begun
    }

    /// Leases messages, and returns them with what they are sent with. None where the tenant sends
    /// nothing now.
    async fn lease(
        &self,
        terms: &LeaseTerms,
    ) -> Result<Option<(LeaseFacts, Vec<OutgoingRow>)>, InboxError> {
        let tenant = self.shared.directory.tenant(self.key.tenant_id).await?;
        let Some(tenant) = tenant.filter(|tenant| tenant.is_active) else { return Ok(None) };
        let is_inbox = matches!(self.destination, Some(Destination::Inbox { .. }));
        let payload_key = match is_inbox || terms.delivers_answers() {
            true => Some(self.shared.host.payload_key(&tenant.name).await?),
            false => None,
        };
        let asked_at = Instant::now();
        let (destination, owner) = (&self.key.destination, &self.shared.owner);
        let rows = self.store.lease(&tenant, destination, (terms.most, terms.lease), owner).await?;
        let is_defective = hooks::sabotage(Defect::OutgoingMarkedBeforeConfirm);
        if is_defective && !rows.is_empty() {
            let confirmed = rows.iter().cloned();
            let marks = confirmed.filter_map(|row| Some((row, Sent::Confirmed.mark(1, 0.0)?)));
            self.store.mark(&marks.collect::<Vec<_>>()).await?;
        }
        // None of its consumers may send: their messages stay due, and are looked at less often.
        let nobody_sends = rows.is_empty() && tenant.sending().is_empty();
        let Shared { producers, host, .. } = &*self.shared;
        let kafka = match (&self.destination, tenant.allows(destination)) {
            (Some(Destination::Kafka { .. }), true) => producers.senders(&**host, &tenant, &rows),
            _ => HashMap::new(),
        };
        let facts = LeaseFacts { tenant, terms: terms.clone(), payload_key, kafka, asked_at };
        Ok((!nobody_sends).then_some((facts, rows)))
    }

    /// Sends one message, unless no send is to begin any more.
    async fn attempt(&self, row: OutgoingRow, facts: &LeaseFacts) -> Attempted {
        let emitter = facts.tenant.consumers.get(&row.consumer_id);
        let emitter = emitter.map(|consumer| consumer.name.clone()).unwrap_or_default();
        let kind = self.destination.as_ref().map_or("unknown", Destination::kind);
        let labels = Labels::new(&facts.tenant.name, &emitter, kind);
        let place = match &facts.terms.endpoint {
            Some(_) => {
                let place = self.shared.endpoints.place(self.key.tenant_id);
                timeout(PLACE_MAX, place).await.ok().flatten()
            }
            None => None,
        };
        let is_crowded = facts.terms.endpoint.is_some() && place.is_none();
        let is_late = facts.asked_at.elapsed() + facts.terms.send_max >= facts.terms.lease;
        let is_halted = self.stop.is_cancelled() || self.is_halted.load(Ordering::Relaxed);
        let sent = if is_crowded || is_late || is_halted {
            Sent::Unsent
        } else {
            hooks::point("outgoing:send:before");
            let names = (&*facts.tenant.name, &*emitter);
            in_span(&row, self.destination.as_ref(), names, self.send(&row, facts)).await
        };
        match &sent {
            Sent::Confirmed | Sent::Answered(_) => hooks::point("outgoing:send:after"),
            Sent::Marked { .. } => hooks::point("outgoing:mark:after"),
            _ => {}
        }
        Attempted { row, labels, sent }
    }

    /// Sends one message to its destination, where that is still allowed.
    async fn send(&self, row: &OutgoingRow, facts: &LeaseFacts) -> Sent {
        let Some(destination) = &self.destination else {
            let text = format!("this host knows no destination `{}`", self.key.destination);
            return Sent::parked(OutgoingReason::UnknownDestination, text);
        };
        // What is not there may have been added since these facts were read.
        let is_there = |tenant: &TenantFacts| match destination {
            Destination::Kafka { .. } | Destination::Http { .. } => {
                tenant.allows(&self.key.destination)
            }
            Destination::Inbox { consumer } => {
                tenant.allows(&self.key.destination) && tenant.by_name(consumer).is_some()
            }
        };
        let newest = match is_there(&facts.tenant) {
            true => Ok(Some(facts.tenant.clone())),
            false => {
                let directory = &self.shared.directory;
                directory.tenant_since(self.key.tenant_id, facts.asked_at).await
            }
        };
        let tenant = match newest {
            Ok(Some(tenant)) => tenant,
            Ok(None) => return Sent::Unsent,
            Err(error) => return Sent::away(OutgoingReason::DestinationAway, error.to_string()),
        };
        if !tenant.allows(&self.key.destination) {
            let text = format!(
                "tenant `{}` may not send to `{}`; `oncebox tenant limits --destinations-allowed` \
                    allows it",
                tenant.name, self.key.destination
            );
            return Sent::parked(OutgoingReason::NotAllowed, text);
        }
        self.send_allowed(row, facts, &tenant, destination).await
    }

    /// Sends one message to a destination that is allowed.
    async fn send_allowed(
        &self,
        row: &OutgoingRow,
        facts: &LeaseFacts,
        tenant: &TenantFacts,
        destination: &Destination,
    ) -> Sent {
        let emitter = tenant.consumers.get(&row.consumer_id);
        let Some(emitter) = emitter.filter(|of| of.policy.is_some()) else { return Sent::Unsent };
        match destination {
            Destination::Kafka { topic } => match facts.kafka.get(&row.consumer_id) {
                Some(sender) => sender.send(&self.shared.producers, topic, row).await,
                None => Sent::Unsent,
            },
            Destination::Inbox { consumer } => {
                let Some(target) = tenant.by_name(consumer) else {
                    let text = format!("tenant `{}` has no consumer `{consumer}`", tenant.name);
                    return Sent::parked(OutgoingReason::NoSuchConsumer, text);
                };
                let Some(key) = &facts.payload_key else { return Sent::Unsent };
                let names = (tenant.name.as_str(), emitter.name.as_str());
                let sent = inbox::deliver(&self.store, row, names, target, key).await;
                if sent.is_confirmed() {
                    self.shared.host.delivered(target.consumer_id);
                }
                sent
            }
            Destination::Http { endpoint } => {
                let host = &self.shared.host;
                let with = HttpFacts {
                    sender: host.sender(),
                    endpoint: facts.terms.endpoint.as_ref(),
                    tenant,
                    emitter: &emitter.name,
                    store: &self.store,
                    key: facts.payload_key.as_ref(),
                };
                let (sent, receiver) = http::send(&with, endpoint, row).await;
                receiver.into_iter().for_each(|consumer_id| host.delivered(consumer_id));
                sent
            }
        }
    }

    /// Marks messages by their results. Where the database does not answer, it is tried again while
    /// the leases live: what was sent and is not marked is sent again.
    async fn mark(&self, ended: Vec<Attempted>) -> Result<(), InboxError> {
        let (mut marks, mut labels) = (Vec::new(), Vec::new());
        for Attempted { row, labels: of, sent } in ended {
            if let Sent::Marked { delay_s } = sent {
                of.sent(delay_s);
                continue;
            }
            if let Some(mark) = sent.mark(row.attempt(), row.spread()) {
                marks.push((row, mark));
                labels.push(of);
            }
        }
        if marks.is_empty() {
            return Ok(());
        }
        let mut pauses = AGAIN.into_iter();
        let marked = loop {
            let error = match self.store.mark(&marks).await {
                Ok(marked) => break marked,
                Err(error) => error,
            };
            let Some(pause) = pauses.next() else { return Err(error) };
            sleep(pause).await;
        };
        hooks::point("outgoing:mark:after");
        for row in &marked {
            if let Some(((sent, mark), labels)) =
                marks.get(row.index()).zip(labels.get(row.index()))
            {
                self.report(sent, mark, row.became, row.delay_s, labels);
            }
        }
        Ok(())
    }

    /// Counts and logs what a row has become.
    fn report(
        &self,
        row: &OutgoingRow,
        mark: &Mark,
        became: OutgoingStatus,
        delay_s: f64,
        labels: &Labels,
    ) {
        if became == OutgoingStatus::Completed {
            return labels.clone().sent(delay_s);
        }
        let Some(reason) = mark.reason else { return };
        labels.clone().failed(reason);
        if became == OutgoingStatus::Parked {
            let is_expired = mark.status != OutgoingStatus::Parked;
            let reason = if is_expired { OutgoingReason::Expired } else { reason };
            labels.clone().parked(reason);
            tracing::warn!(
                tenant_id = self.key.tenant_id,
                consumer_id = row.consumer_id,
                destination = self.key.destination,
                outgoing_id = row.id,
                reason = reason.as_str(),
                error = mark.error.as_deref(),
                "an outgoing message is parked; redrive or discard it"
            );
        }
    }
}
