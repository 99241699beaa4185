//! Retention classes: the times for which an inbox can remember.

use serde::{Deserialize, Serialize};

use super::horizon_input::TimeSpan;

/// Retention classes, the shortest first; each has its own set of time partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Retention {
    /// Seven days.
    #[default]
    #[serde(rename = "7d")]
    SevenDays,
    /// Thirty days.
    #[serde(rename = "30d")]
    ThirtyDays,
    /// One year, of 366 days.
    #[serde(rename = "1y")]
    OneYear,
    /// For ever.
    #[serde(rename = "permanent")]
    Permanent,
}

impl Retention {
    /// The classes, the shortest first.
    pub const ALL: [Self; 4] = [Self::SevenDays, Self::ThirtyDays, Self::OneYear, Self::Permanent];

    /// Returns the class's key in `oncebox.retention_class`.
    pub fn class(self) -> i16 {
        match self {
            Self::SevenDays => 1,
            Self::ThirtyDays => 2,
            Self::OneYear => 3,
            Self::Permanent => 4,
        }
    }

    /// Returns the name of the class in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::SevenDays => "7d",
            Self::ThirtyDays => "30d",
            Self::OneYear => "1y",
            Self::Permanent => "permanent",
        }
    }

    /// Returns the number of days for which a completed message is surely remembered; none for
    /// ever.
    pub fn days(self) -> Option<i64> {
        match self {
            Self::SevenDays => Some(7),
            Self::ThirtyDays => Some(30),
            Self::OneYear => Some(366),
            Self::Permanent => None,
        }
    }

    /// Returns the time for which a completed message is surely remembered.
    pub fn span(self) -> TimeSpan {
        self.days().map_or(TimeSpan::Forever, |days| TimeSpan::days(days.unsigned_abs()))
    }

    /// Returns the longest time for which a completed message stays, where retention runs every
    /// hour: the retention of the class, the time of one partition, and an hour.
    pub fn longest_kept(self) -> TimeSpan {
        let days_and_hours = |days: u64, hours: u64| {
            TimeSpan::days(days).map(|ms| ms.saturating_add(hours.saturating_mul(3_600_000)))
        };
        match self {
            Self::SevenDays => days_and_hours(7, 56 + 1),
            Self::ThirtyDays => days_and_hours(30 + 10, 1),
            Self::OneYear => days_and_hours(366 + 122, 1),
            Self::Permanent => TimeSpan::Forever,
        }
    }

    /// Returns the next longer class that ends; the class itself where there is none.
    pub(super) fn next(self) -> Self {
        match self {
            Self::SevenDays => Self::ThirtyDays,
            Self::ThirtyDays | Self::OneYear => Self::OneYear,
            Self::Permanent => Self::Permanent,
        }
    }

    /// Returns the shortest class that remembers for at least a time.
    pub(super) fn at_least(needed: TimeSpan) -> Self {
        Self::ALL.into_iter().find(|class| class.span() >= needed).unwrap_or(Self::Permanent)
    }

    /// Returns the longest class that keeps no completed message for longer than a time.
    pub(super) fn at_most(allowed: TimeSpan) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|class| class.longest_kept() <= allowed)
    }
}
