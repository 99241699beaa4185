//! The offsets that a group is to continue at, and its positions.

use rdkafka::error::KafkaError;

use crate::error::ConsumerError;

/// The position that a group is to continue at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeekTo {
    /// The first record that the brokers still have.
    Beginning,
    /// The end, after the last record.
    End,
    /// The first record with this timestamp or a later one, in milliseconds since 1970.
    Time(i64),
    /// Offsets, each of a partition. An entry without a topic is of the consumer's only one. Other
    /// partitions stay.
    Offsets(Vec<(Option<String>, i32, i64)>),
}

/// The positions of a partition of a group's topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPosition {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition.
    pub partition: i32,
    /// The offset that the group continues at; none where it never committed one, or only for a
    /// deleted topic of this name.
    pub committed: Option<i64>,
    /// The offset that was asked for; none where none was.
    pub target: Option<i64>,
    /// The first offset that still exists.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// The first offset of a record that is not older than the requested horizon.
    pub horizon: Option<i64>,
}

/// The reason why a group's offsets were not read or not changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SeekError {
    /// A request that cannot be met.
    #[error("{0}")]
    Invalid(String),
    /// A group with members; brokers then refuse to change or delete its offsets from outside.
    #[error(
        "the group `{0}` still has a member; a process that was killed is one until its session \
            times out"
    )]
    HasMembers(String),
    /// A refused property.
    #[error(transparent)]
    Client(#[from] ConsumerError),
    /// A missing or unexpected answer of the brokers.
    #[error("{what}: {error}")]
    Broker {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: String,
    },
}

impl SeekError {
    pub(super) fn broker(what: &'static str) -> impl Fn(KafkaError) -> Self {
        move |error| Self::Broker { what, error: error.to_string() }
    }
}
