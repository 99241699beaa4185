//! The statuses of an outgoing message.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sqlx::{
    Decode, Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgTypeInfo, PgValueRef},
};

/// Status of an outgoing message: the column `status` of its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutgoingStatus {
    /// Stored, to be sent when it is due, with no failed attempt since. The completion of its cause
    /// or a redrive moves it here.
    Received,
    /// Leased by a relay until `locked_until`. The relay's lease moves it here, and the relay's
    /// confirmation or the next lease after that time moves it on.
    InProgress,
    /// Confirmed by its destination. The relay moves it here, for good.
    Completed,
    /// An attempt failed and another will follow. The relay moves it here, and leases it again at
    /// `next_attempt_at`.
    FailedRetryable,
    /// Refused by its destination for ever, or failed for too long. The relay moves it here. It
    /// stays until an operator redrives or discards it.
    Parked,
    /// Withdrawn by its consumer before a relay sent it, for good. The transaction of a handler's
    /// cancel moves it here.
    Cancelled,
    /// Excluded from any attempt, for good. An operator's discard, or the erasure of its cause,
    /// moves it here.
    Discarded,
}

impl OutgoingStatus {
    /// All statuses, in the order of the table's constraint.
    pub const ALL: [Self; 7] = [
        Self::Received,
        Self::InProgress,
        Self::Completed,
        Self::FailedRetryable,
        Self::Parked,
        Self::Cancelled,
        Self::Discarded,
    ];

    /// Names of all statuses, in the order of [`ALL`](Self::ALL).
    pub const NAMES: [&str; Self::ALL.len()] = {
        let mut names = [""; Self::ALL.len()];
        let mut nth = 0;
        while nth < names.len() {
            names[nth] = Self::ALL[nth].as_str();
            nth += 1;
        }
        names
    };

    /// Statuses of messages that are being sent or are still to be sent.
    pub const OPEN: [Self; 3] = [Self::Received, Self::InProgress, Self::FailedRetryable];

    /// Returns the name of the status in rows, metrics and the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::FailedRetryable => "failed_retryable",
            Self::Parked => "parked",
            Self::Cancelled => "cancelled",
            Self::Discarded => "discarded",
        }
    }

    /// Returns whether the message is being sent or is still to be sent.
    pub fn is_open(self) -> bool {
        Self::OPEN.contains(&self)
    }

    /// Returns whether the message is never sent again, and its row leaves with its time partition.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Completed | Self::Cancelled | Self::Discarded)
    }
}

/// A text that is no status of an outgoing message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no status of an outgoing message; there are `received`, `in_progress`, `completed`, \
     `failed_retryable`, `parked`, `cancelled` and `discarded`"
)]
pub struct UnknownOutgoingStatus(String);

impl FromStr for OutgoingStatus {
    type Err = UnknownOutgoingStatus;

    fn from_str(text: &str) -> Result<Self, UnknownOutgoingStatus> {
        let status = Self::ALL.into_iter().find(|status| status.as_str() == text);
        status.ok_or_else(|| UnknownOutgoingStatus(text.to_owned()))
    }
}

impl fmt::Display for OutgoingStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// The column is a text. A type by name would cost a query for its number on each connection.
impl Type<Postgres> for OutgoingStatus {
    fn type_info() -> PgTypeInfo {
        <str as Type<Postgres>>::type_info()
    }

    fn compatible(ty: &PgTypeInfo) -> bool {
        <str as Type<Postgres>>::compatible(ty)
    }
}

impl Encode<'_, Postgres> for OutgoingStatus {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        <&str as Encode<Postgres>>::encode(self.as_str(), buffer)
    }
}

impl<'r> Decode<'r, Postgres> for OutgoingStatus {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(<&str as Decode<Postgres>>::decode(value)?.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEMA: &str = include_str!("../../../../migrations/0001_schema.sql");

    // What could go wrong: a status of the code is none of the table, so that a row cannot be
    // written, or the other way round, so that it cannot be read.
    #[test]
    fn statuses_are_those_of_the_table() {
        let (_, constraint) = SCHEMA.split_once("outgoing_status_known").expect("a constraint");
        let (constraint, _) = constraint.split_once("CONSTRAINT").expect("another constraint");
        let known: Vec<_> = constraint.split('\'').skip(1).step_by(2).collect();
        assert_eq!(known, OutgoingStatus::NAMES);
        let unknown = "gone".parse::<OutgoingStatus>().expect_err("an unknown status").to_string();
        for status in OutgoingStatus::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
            assert_eq!(serde_json::json!(status), status.as_str());
            assert!(unknown.contains(&format!("`{status}`")), "{unknown}");
            let groups = [status.is_open(), status.is_settled(), status == OutgoingStatus::Parked];
            assert_eq!(groups.into_iter().filter(|is| *is).count(), 1, "{status}");
        }
    }
}
