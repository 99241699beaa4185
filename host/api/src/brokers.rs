//! The interface to the brokers, which this crate does not reach itself.

use std::{future::Future, pin::Pin};

use chrono::{DateTime, Utc};
use oncebox_model::policy::{Policy, Redelivery};

use crate::error::{ApiError, Code};

/// The reason why a process knows nothing of the brokers.
pub(crate) const NO_BROKERS: &str = "this process knows no brokers; set `kafka.brokers` \
    (ONCEBOX_KAFKA_BROKERS), or ask a server";

/// The position that a group is to be set to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeekTo {
    /// The first record that the brokers still have.
    Beginning,
    /// The end, after the last record.
    End,
    /// The first record of this time or a later one.
    Time(DateTime<Utc>),
    /// These offsets; other partitions keep theirs.
    Offsets(Vec<SeekToOffset>),
}

/// The offset at which a partition is to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeekToOffset {
    /// The topic; `None` for the only one of the consumer.
    pub topic: Option<String>,
    /// The partition.
    pub partition: i32,
    /// Offset of the record that is read next.
    pub offset: i64,
}

/// The present and the requested position of a group in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPosition {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// Committed offset of the group; `None` where it never committed one.
    pub committed: Option<i64>,
    /// Requested offset; `None` where the partition keeps its own.
    pub target: Option<i64>,
    /// First offset that still exists.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// First offset of a record that is not older than the requested horizon.
    pub horizon: Option<i64>,
}

impl GroupPosition {
    /// Returns the offset at which the group continues. A group without an offset begins at the
    /// first record.
    pub(crate) fn next(&self) -> i64 {
        self.committed.unwrap_or(self.low).clamp(self.low, self.high.max(self.low))
    }
}

/// The reason why the brokers gave no positions.
#[derive(Debug, Clone)]
pub enum BrokerError {
    /// A request that cannot be met.
    Invalid(String),
    /// Brokers that do not answer.
    Unavailable(String),
}

impl From<BrokerError> for ApiError {
    fn from(error: BrokerError) -> Self {
        match error {
            BrokerError::Invalid(text) => Self::invalid(text),
            BrokerError::Unavailable(text) => Self::new(Code::Unavailable, text),
        }
    }
}

/// A future of the brokers' answer.
pub type Asking<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<GroupPosition>, BrokerError>> + Send + 'a>>;

/// A future of the ways in which a consumer's messages come again.
pub type AskingRedelivery<'a> = Pin<Box<dyn Future<Output = Redelivery> + Send + 'a>>;

/// The brokers, as far as the API needs them.
pub trait Brokers: Send + Sync {
    /// Returns, for each partition, the present and the requested position of a consumer's group,
    /// and the first offset that is not older than a horizon.
    ///
    /// # Errors
    ///
    /// [`BrokerError`] when the request cannot be met, or the brokers do not answer.
    fn positions<'a>(
        &'a self,
        tenant: &'a str,
        consumer: &'a str,
        policy: &'a Policy,
        to: SeekTo,
        horizon: Option<DateTime<Utc>>,
    ) -> Asking<'a>;

    /// Returns the settings of a consumer's topics, within seconds. Brokers that do not answer are
    /// topics whose settings are not known.
    fn redelivery<'a>(
        &'a self,
        tenant: &'a str,
        consumer: &'a str,
        policy: &'a Policy,
    ) -> AskingRedelivery<'a>;
}
