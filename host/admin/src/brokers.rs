//! What the API asks of whoever can reach the brokers, which is not this crate's business.

use std::{future::Future, pin::Pin};

use chrono::{DateTime, Utc};
use oncebox_inbox::policy::Policy;

/// Where a group is to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeekTo {
    /// At the first record that the brokers still have.
    Beginning,
    /// After the last record.
    End,
    /// At the first record of this time or a later one.
    Time(DateTime<Utc>),
    /// At these offsets; other partitions stay where they are.
    Offsets(Vec<SeekToOffset>),
}

/// Where one partition is to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeekToOffset {
    /// The topic; none for the only one of the consumer.
    pub topic: Option<String>,
    /// The partition.
    pub partition: i32,
    /// The offset of the record that is read next.
    pub offset: i64,
}

/// Where a group stands in a partition, and where it would go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPosition {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset that the group goes on at; none where it never committed one.
    pub committed: Option<i64>,
    /// The offset that is asked for; none where nothing is.
    pub target: Option<i64>,
    /// The first offset that still exists.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// The first offset of a record that is not older than the horizon that was asked for.
    pub horizon: Option<i64>,
}

/// Why there is no answer.
#[derive(Debug, Clone)]
pub enum BrokerError {
    /// What was asked for cannot be.
    Invalid(String),
    /// The brokers do not answer.
    Unavailable(String),
}

/// An answer of the brokers.
pub type Asking<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<GroupPosition>, BrokerError>> + Send + 'a>>;

/// The brokers, as far as the API needs them.
pub trait Brokers: Send + Sync {
    /// Where the group of a consumer stands, where it would go on, and where records begin that are
    /// not older than a horizon.
    fn positions<'a>(
        &'a self,
        tenant: &'a str,
        consumer: &'a str,
        policy: &'a Policy,
        to: SeekTo,
        horizon: Option<DateTime<Utc>>,
    ) -> Asking<'a>;
}
