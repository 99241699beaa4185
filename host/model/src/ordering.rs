//! The number that messages of one ordering key, or of one partition, share.

use sha2::{Digest, Sha256};

use crate::{message::Message, policy::Order};

/// Returns the number that a decoded message shares with those that it must run in order with; none
/// where order does not matter. It is the first 8 bytes of a SHA-256 over the consumer and the key
/// or partition: the column `ordering_hash` of the message's row.
pub fn ordering_hash(consumer_id: i32, order: Order, message: &Message) -> Option<i64> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;

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
    fn a_number_is_that_of_a_key_or_of_a_partition_of_one_consumer() {
        let (here, there) = (message("t", 0, Some("k")), message("u", 1, Some("k")));
        assert_eq!(ordering_hash(1, Order::None, &here), None);
        assert_eq!(ordering_hash(1, Order::Key, &message("t", 0, None)), None);
        assert_eq!(ordering_hash(1, Order::Key, &here), ordering_hash(1, Order::Key, &there));
        let different = [
            ordering_hash(1, Order::Key, &here),
            ordering_hash(2, Order::Key, &here),
            ordering_hash(1, Order::Key, &message("t", 0, Some("l"))),
            ordering_hash(1, Order::Partition, &here),
            ordering_hash(1, Order::Partition, &there),
            ordering_hash(1, Order::Partition, &message("t", 1, Some("k"))),
        ];
        let known: std::collections::HashSet<_> = different.iter().flatten().collect();
        assert_eq!(known.len(), different.len());
    }

    // What could go wrong: a release computes other numbers than the rows have, so that messages of
    // one key run at the same time.
    #[test]
    fn a_number_is_that_of_earlier_releases() {
        let digest = Sha256::digest(b"\0\0\0\x01keyk");
        let number = ordering_hash(1, Order::Key, &message("t", 0, Some("k"))).expect("a number");
        assert_eq!(number.to_be_bytes(), digest[..8]);
    }
}
