//! The number that messages of one ordering key, or of one partition, share.
//!
//! A transaction that runs or settles one of them holds their lock to its commit. The upper half of
//! the number names the lock among the locks of the consumer. The host functions `claim`, `resume`
//! and `complete` describe the protocol. Two keys that share a lock wait for each other, and have
//! no other effect on each other.

use std::collections::HashMap;

use oncebox_model::{
    hooks::{self, Defect},
    message::Message,
    outcome::Disposition,
    policy::Order,
};
use sha2::{Digest, Sha256};

use crate::batch::claim::{ClaimOutcome, ClaimRequest};

/// Returns the number that a decoded message shares with those that it must run in order with; none
/// where order does not matter. It is the first 8 bytes of a SHA-256 over the consumer and the key
/// or partition.
pub(crate) fn ordering(consumer_id: i32, order: Order, message: &Message) -> Option<i64> {
    let hash = Sha256::new_with_prefix(consumer_id.to_be_bytes());
    let hash = match order {
        Order::None => return None,
        Order::Partition => {
            let record = &message.record;
            hash.chain_update(b"partition")
                .chain_update(record.partition.to_be_bytes())
                .chain_update(record.topic.as_bytes())
        }
        Order::Key => hash.chain_update(b"key").chain_update(message.ordering_key.as_deref()?),
    };
    let [a, b, c, d, e, f, g, h, ..] = hash.finalize()[..] else { return None };
    Some(i64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// First failed message of each ordering key in one transaction: its index in the batch, by number.
/// It holds back claimed messages behind it.
#[derive(Debug, Default)]
pub(crate) struct BlockedKeys(HashMap<i64, usize>);

impl BlockedKeys {
    /// Blocks the key of a message whose result leaves it open, so that later messages of the key
    /// do not run.
    pub(crate) fn failed(
        &mut self,
        index: usize,
        request: &ClaimRequest,
        disposition: Disposition,
    ) {
        let Some(ordering) = request.ordering.filter(|_| disposition.is_open()) else { return };
        if hooks::sabotage(Defect::FailurePassedInBatch) {
            return;
        }
        self.0.entry(ordering).and_modify(|first| *first = index.min(*first)).or_insert(index);
    }

    /// Makes a new message wait where an earlier message of its key failed in this transaction.
    pub(crate) fn hold_back(&self, index: usize, request: &ClaimRequest, claim: &mut ClaimOutcome) {
        let failed = request.ordering.and_then(|ordering| self.0.get(&ordering));
        if *claim == ClaimOutcome::New && failed.is_some_and(|failed| *failed < index) {
            *claim = ClaimOutcome::Waiting { is_due: false };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncebox_model::record::Record;

    fn message(topic: &str, partition: i32, key: Option<&str>) -> Message {
        let record = Record {
            topic: topic.into(),
            topic_id: None,
            partition,
            offset: 7,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: None,
        };
        Message {
            id: "m".to_owned(),
            source: String::new(),
            event_type: String::new(),
            event_version: None,
            ordering_key: key.map(|key| key.as_bytes().to_vec()),
            sequence: None,
            content_type: None,
            trace_parent: None,
            decoded: None,
            fetched: None,
            payload_hash: None,
            record,
        }
    }

    #[test]
    fn a_lock_is_that_of_a_key_or_of_a_partition_of_one_consumer() {
        let (here, there) = (message("t", 0, Some("k")), message("u", 1, Some("k")));
        assert_eq!(ordering(1, Order::None, &here), None);
        assert_eq!(ordering(1, Order::Key, &message("t", 0, None)), None);
        assert_eq!(ordering(1, Order::Key, &here), ordering(1, Order::Key, &there));
        let different = [
            ordering(1, Order::Key, &here),
            ordering(2, Order::Key, &here),
            ordering(1, Order::Key, &message("t", 0, Some("l"))),
            ordering(1, Order::Partition, &here),
            ordering(1, Order::Partition, &there),
            ordering(1, Order::Partition, &message("t", 1, Some("k"))),
        ];
        let known: std::collections::HashSet<_> = different.iter().flatten().collect();
        assert_eq!(known.len(), different.len());
    }
}
