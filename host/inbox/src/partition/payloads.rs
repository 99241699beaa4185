//! Payloads that the records of a partition refer to. They are fetched ahead of the transaction, a
//! few at a time, and held until their records are settled.
//!
//! Fetches are tasks of the partition: they go on while its transactions run, and end with it.
//! Their ends are collected in the order of the records, so that no fetched payload stands behind
//! one that is missing. A fetch ahead never waits for memory. The first record's does, and only
//! while the partition holds no other payload; so partitions do not wait for each other.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use oncebox_model::{
    error::InboxError,
    handler::Handlers,
    hooks::{self, Defect},
    identity,
    message::Message,
    outcome::Failure,
    policy::Policy,
    record::Record,
    reference::{FetchError, FetchedPayload, ReferenceError},
};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::PartitionInbox;
use crate::{admission::breaker::RECHECK, reference::Fetched};

/// Bytes of fetched payloads of one partition after which no further fetch begins. A fetch under
/// way counts as the most bytes that the policy allows.
const FETCHED_BYTES_MAX: usize = 32 << 20;
/// Most payloads of one partition that are fetched at a time; the host bounds those of a tenant.
const FETCHES_MAX: usize = 4;
/// Longest wait for payloads ahead, while that of the first record is at hand.
const GATHERING_MAX: Duration = Duration::from_millis(250);
/// Age at which a payload is fetched again, since its object or the tenant's access may be another.
const FETCHED_AGE_MAX: Duration = Duration::from_secs(60);
/// Age at which a fetch that failed is made again, where the failure is not recorded yet.
const FAILED_AGE_MAX: Duration = Duration::from_secs(5);

/// The payload of a record, as far as it is known.
enum RecordPayload {
    /// Nothing is to be fetched, as far as the handlers say that were loaded then.
    NotNeeded,
    Fetched(FetchedPayload),
    Failed(ReferenceError),
}

/// A fetch under way.
struct RunningFetch {
    offset: i64,
    task: AbortOnDropHandle<Fetched>,
}

/// Payloads of records at the front, and the fetches under way for records behind them.
#[derive(Default)]
pub(super) struct FetchedPayloads {
    /// Payloads by offset, each with the time since when it is known.
    known: BTreeMap<i64, (RecordPayload, Instant)>,
    /// Fetches in the order of their records.
    running: VecDeque<RunningFetch>,
    /// Cause for which the payload of the first record is not fetched now.
    held_up: Option<InboxError>,
}

/// The payload that a message got.
pub(super) enum AttachedPayload {
    /// The message has its whole payload.
    Whole,
    /// The message is stored, and its payload is fetched before it runs.
    Later,
    /// The payload was not fetched.
    Failed(Failure),
    /// The payload is still to be fetched.
    NotFetched,
}

impl RecordPayload {
    fn is_old(&self, age: Duration) -> bool {
        match self {
            Self::NotNeeded => false,
            Self::Fetched(_) => age > FETCHED_AGE_MAX,
            Self::Failed(_) => age > FAILED_AGE_MAX,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Fetched(payload) => payload.len(),
            Self::NotNeeded | Self::Failed(_) => 0,
        }
    }
}

impl FetchedPayloads {
    fn insert(&mut self, offset: i64, payload: RecordPayload) {
        self.known.insert(offset, (payload, Instant::now()));
    }

    fn is_known(&self, record: &Record) -> bool {
        self.known.contains_key(&record.offset)
    }

    /// Returns whether a payload is known or being fetched.
    fn has(&self, record: &Record) -> bool {
        self.is_known(record) || self.running.iter().any(|fetch| fetch.offset == record.offset)
    }

    /// Drops all payloads, and ends all fetches.
    pub(super) fn clear(&mut self) {
        self.known.clear();
        self.running.clear();
    }

    /// Drops the payloads of other records. Drops all where one is too old, or where that of the
    /// first record is neither known nor being fetched.
    fn keep(&mut self, records: &[Record]) {
        self.held_up = None;
        let Some((first, last)) = records.first().zip(records.last()) else { return };
        let offered = first.offset..=last.offset;
        self.known.retain(|offset, _| offered.contains(offset));
        self.running.retain(|fetch| offered.contains(&fetch.offset));
        if !self.has(first) || self.known.values().any(|(known, at)| known.is_old(at.elapsed())) {
            self.clear();
        }
    }

    /// Returns whether another fetch of at most `bytes_max` bytes may begin.
    fn has_room(&self, bytes_max: usize) -> bool {
        let known = self.known.values().map(|(payload, _)| payload.bytes()).sum::<usize>();
        let running = self.running.len();
        running < FETCHES_MAX
            && known.saturating_add(running.saturating_mul(bytes_max)) < FETCHED_BYTES_MAX
    }

    /// Returns the records at the front whose payloads are at hand.
    fn front<'a>(&self, records: &'a [Record]) -> &'a [Record] {
        &records[..records.iter().take_while(|record| self.is_known(record)).count()]
    }

    /// Drops the payloads of settled records.
    pub(super) fn settled(&mut self, records: &[Record]) {
        for record in records {
            self.known.remove(&record.offset);
        }
    }

    /// Returns whether the first record's payload cannot be fetched now.
    pub(super) fn is_held_up(&self) -> bool {
        self.held_up.is_some()
    }

    /// Returns the error of records whose payloads are not at hand.
    pub(super) fn missing(&mut self) -> InboxError {
        self.held_up.take().unwrap_or(InboxError::PayloadNotAtHand)
    }
}

impl PartitionInbox {
    /// Returns whether payloads are fetched before the records are processed. Those of records that
    /// are stored are fetched by the worker that runs them.
    fn fetches(&self) -> bool {
        self.consumer.policy.reference.is_some() && !self.stores()
    }

    /// Returns the records at the front whose payloads are at hand.
    pub(super) fn fetched_front<'a>(&self, records: &'a [Record]) -> &'a [Record] {
        if self.fetches() { self.fetched.front(records) } else { records }
    }

    /// Fetches the payloads that the records at the front refer to, and returns the records whose
    /// payloads are at hand: at least one, unless the first is held up or its schema is missing. A
    /// wait for a store holds no place of the host. Dropping the future keeps what was fetched and
    /// what is being fetched.
    pub(super) async fn with_payloads<'a>(&mut self, records: &'a [Record]) -> &'a [Record] {
        let Some(first) = records.first().filter(|_| self.fetches()) else { return records };
        self.fetched.keep(records);
        let handlers = self.consumer.handlers();
        let mut wanted = self.wanted(&*handlers, records);
        let mut waits_for_memory = false;
        let gathered_at = Instant::now() + GATHERING_MAX;
        loop {
            self.begin_fetches(&mut wanted, waits_for_memory);
            let is_ahead = self.fetched.is_known(first);
            let Some(fetch) = self.fetched.running.front_mut() else { break };
            self.permit = None;
            let (offset, ended) = match is_ahead {
                true => match timeout_at(gathered_at, &mut fetch.task).await {
                    Ok(ended) => (fetch.offset, ended),
                    Err(_) => break,
                },
                false => (fetch.offset, (&mut fetch.task).await),
            };
            self.fetched.running.pop_front();
            let ended = ended.unwrap_or_else(|error| Err(FetchError::Host(error.to_string())));
            match ended {
                Ok(payload) => self.fetched.insert(offset, RecordPayload::Fetched(payload)),
                Err(FetchError::Reference(error)) => {
                    self.fetched.insert(offset, RecordPayload::Failed(error));
                }
                // It is fetched again when it is the first.
                Err(_) if is_ahead => {
                    self.fetched.running.clear();
                    break;
                }
                Err(FetchError::Host(text)) => {
                    self.fetched.clear();
                    self.fetched.held_up = Some(InboxError::StoreNotOpened(text));
                    break;
                }
                Err(FetchError::NoMemory) => {
                    self.fetched.clear();
                    wanted = self.wanted(&*handlers, &records[..1]);
                    waits_for_memory = true;
                }
            }
        }
        self.fetched.front(records)
    }

    /// Begins to fetch the first of the wanted payloads, as many as there is room for.
    fn begin_fetches(&mut self, wanted: &mut VecDeque<Message>, waits_for_memory: bool) {
        let bytes_max = self.consumer.policy.reference.as_ref().map_or(0, |of| of.bytes_max);
        while self.fetched.has_room(bytes_max) {
            let Some(message) = wanted.pop_front() else { return };
            let (consumer, offset) = (self.consumer.clone(), message.record.offset);
            let task = async move { consumer.fetch(&message, waits_for_memory).await };
            let task = AbortOnDropHandle::new(tokio::spawn(task));
            self.fetched.running.push_back(RunningFetch { offset, task });
        }
    }

    /// Returns the messages whose payloads are to be fetched, up to a record whose schema is not at
    /// hand or whose version's circuit breaker holds it back. Notes the records that need no fetch.
    fn wanted(&mut self, handlers: &dyn Handlers, records: &[Record]) -> VecDeque<Message> {
        let mut wanted = VecDeque::new();
        for (index, record) in records.iter().enumerate() {
            if self.fetched.has(record) {
                continue;
            }
            let Policy { identity, sequence, reference, limits, .. } = &self.consumer.policy;
            let (decoder, key) =
                (self.consumer.decoder.get(), self.consumer.sessions.payload_key());
            let (sequence, reference) = (sequence.as_ref(), reference.as_ref());
            let decoded =
                identity::decode(record.clone(), identity, sequence, reference, decoder, key);
            let message = match decoded {
                Err((_, identity::Undecodable::BadPayload(fault))) if fault.is_not_prepared() => {
                    break;
                }
                Ok(message) if self.consumer.refers(&message) => Some(message),
                _ => None,
            };
            let message = message.filter(|_| record.payload_bytes() <= limits.payload_bytes_max);
            let routed =
                message.and_then(|message| Some((handlers.resolve(&message, None)?, message)));
            let Some((handler, message)) = routed else {
                self.fetched.insert(record.offset, RecordPayload::NotNeeded);
                continue;
            };
            if let Some(left) = self.consumer.breakers.wait_of(&*handler) {
                if index == 0 {
                    let (version, retry_after) = (handler.version(), left.min(RECHECK));
                    let error = InboxError::BreakerOpen { version, retry_after };
                    self.fetched.held_up = Some(error);
                }
                break;
            }
            wanted.push_back(message);
        }
        wanted
    }

    /// Gives a message the payload that was fetched for it.
    pub(super) fn attach_payload(&mut self, message: &mut Message) -> AttachedPayload {
        if self.consumer.policy.reference.is_none() {
            return AttachedPayload::Whole;
        }
        if self.stores() {
            let is_later = self.consumer.refers(message);
            return if is_later { AttachedPayload::Later } else { AttachedPayload::Whole };
        }
        let offset = message.record.offset;
        match self.fetched.known.get(&offset).map(|(payload, _)| payload) {
            Some(RecordPayload::Fetched(payload)) => {
                message.fetched = Some(payload.clone());
                AttachedPayload::Whole
            }
            Some(RecordPayload::Failed(_)) if hooks::sabotage(Defect::ReferenceRuns) => {
                AttachedPayload::Whole
            }
            Some(RecordPayload::Failed(error)) => AttachedPayload::Failed(error.clone().into()),
            Some(RecordPayload::NotNeeded) | None => {
                if !self.consumer.refers(message) {
                    return AttachedPayload::Whole;
                }
                self.fetched.known.remove(&offset);
                AttachedPayload::NotFetched
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let record = |offset| Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: None,
        };
        (1..=3).map(record).collect()
    }

    fn fetched() -> FetchedPayloads {
        let mut fetched = FetchedPayloads::default();
        for offset in 1..=2 {
            let payload = FetchedPayload::new(vec![7; 10], Box::new(()));
            fetched.insert(offset, RecordPayload::Fetched(payload));
        }
        fetched
    }

    // What could go wrong: a payload is handed out long after its object or its access changed; one
    // behind a missing one holds memory that the missing one waits for.
    #[test]
    fn payloads_age_and_none_stands_behind_a_missing_one() {
        let records = records();
        let mut young = fetched();
        young.keep(&records);
        assert_eq!(young.front(&records).len(), 2);

        let mut old = fetched();
        let before = Instant::now().checked_sub(FETCHED_AGE_MAX + Duration::from_secs(1));
        old.known.get_mut(&2).expect("it is known").1 = before.expect("an earlier time");
        old.keep(&records);
        assert!(old.front(&records).is_empty());

        let mut gap = fetched();
        gap.settled(&records[..1]);
        gap.keep(&records);
        assert!(gap.known.is_empty());
    }

    // What could go wrong: fetches under way are not counted, and exceed the bound together.
    #[tokio::test]
    async fn what_is_under_way_counts() {
        let mut fetched = fetched();
        assert!(fetched.has_room(usize::MAX), "one fetch may always begin");
        let bytes_max = FETCHED_BYTES_MAX / 2;
        for offset in 3..=4 {
            assert!(fetched.has_room(bytes_max));
            let task = AbortOnDropHandle::new(tokio::spawn(std::future::pending()));
            fetched.running.push_back(RunningFetch { offset, task });
        }
        assert!(fetched.has_room(1) && !fetched.has_room(bytes_max));
    }
}
