//! A record as a broker delivers it.

use std::sync::Arc;

/// Header names and their values, in the record's order; names may repeat.
pub type Headers = Vec<(String, Vec<u8>)>;

/// A raw record of a partitioned log, before it is decoded.
#[derive(Debug, Clone)]
pub struct Record {
    /// Topic the record was read from.
    pub topic: Arc<str>,
    /// The broker's own id of the topic, which a re-created topic of that name does not share. None
    /// where the broker reports no id.
    pub topic_id: Option<Arc<str>>,
    /// Partition of the topic.
    pub partition: i32,
    /// Position in the partition.
    pub offset: i64,
    /// Milliseconds since the Unix epoch; 0 where the record has none.
    pub timestamp_ms: i64,
    /// The record's key.
    pub key: Option<Vec<u8>>,
    /// The record's headers.
    pub headers: Headers,
    /// The record's value; none is a tombstone.
    pub payload: Option<Vec<u8>>,
}

impl Record {
    /// Returns the bytes that this record holds in memory, for prefetch limits.
    pub fn size(&self) -> usize {
        let headers: usize =
            self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        headers + self.key.as_ref().map_or(0, Vec::len) + self.payload_bytes() + 64
    }

    /// Returns the bytes of the payload; a tombstone has none.
    pub fn payload_bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, Vec::len)
    }

    /// Returns the position: topic, topic id where there is one, partition and offset. Without the
    /// topic id, a topic that is deleted and created again would be taken for its predecessor.
    pub fn position(&self) -> String {
        position(&self.topic, self.topic_id.as_deref(), self.partition, self.offset)
    }

    /// Returns the last value of a header, compared without regard to case.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers
            .iter()
            .rev()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_slice())
    }
}

fn position(topic: &str, topic_id: Option<&str>, partition: i32, offset: i64) -> String {
    match topic_id {
        Some(id) => format!("{topic}:{id}:{partition}:{offset}"),
        None => format!("{topic}:{partition}:{offset}"),
    }
}

/// Returns whether a text is the position of the record at this place, with any topic id or none.
pub(crate) fn is_position(text: &str, topic: &str, partition: i32, offset: i64) -> bool {
    // Neither topics nor topic ids have colons.
    let topic_id = text.split(':').nth(1);
    [None, topic_id].iter().any(|id| position(topic, *id, partition, offset) == text)
}
