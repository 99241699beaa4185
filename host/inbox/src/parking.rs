//! What cannot be handled is kept under an id of its own, where a person sees it; it is never
//! dropped and never holds its partition.

use crate::{
    claim::Offered,
    handler::Failure,
    identity::Undecodable,
    message::{Message, Record, hash_payload},
};

/// A record without a usable id or event type, with its raw bytes.
pub fn undecodable(record: &Record, undecodable: &Undecodable) -> Offered {
    Offered { message: bare(record), version: None, reason: Some(format!("undecodable: {undecodable}")) }
}

/// A message that no deployment takes, under its own id.
pub fn unrouted(message: &Message) -> Offered {
    Offered { message: message.clone(), version: None, reason: Some("no_route".to_owned()) }
}

/// A known id that came with another payload.
pub fn collision(message: &Message) -> Offered {
    let mut newcomer = message.clone();
    let hash = message.payload_hash.map_or_else(|| "tombstone".to_owned(), |hash| hex::encode(&hash[..8]));
    newcomer.id = format!("{}#{hash}", message.id);
    Offered { message: newcomer, version: None, reason: Some("collision".to_owned()) }
}

/// A message whose row PostgreSQL does not take.
pub fn unclaimable(message: &Message, failure: &Failure) -> Offered {
    Offered { message: bare(&message.record), version: None, reason: Some(format!("unclaimable: {}", failure.kind.reason())) }
}

/// What a record says of itself when nothing in it is understood.
fn bare(record: &Record) -> Message {
    Message {
        id: format!("undecodable:{}", position(record)),
        source: record.topic.to_string(),
        event_type: String::new(),
        event_version: None,
        ordering_key: None,
        content_type: None,
        trace_parent: None,
        payload_hash: record.payload.as_deref().map(hash_payload),
        record: record.clone(),
    }
}

/// A record's place: topic, topic id where there is one, partition and offset. Without the topic id
/// a topic that is deleted and made again would be taken for its predecessor.
pub fn position(record: &Record) -> String {
    let Record { topic, partition, offset, .. } = record;
    match &record.topic_id {
        Some(id) => format!("{topic}:{id}:{partition}:{offset}"),
        None => format!("{topic}:{partition}:{offset}"),
    }
}
