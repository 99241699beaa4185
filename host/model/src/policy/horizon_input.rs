//! The inputs of the proof that an inbox remembers for long enough, each with the time that it asks
//! for.

use std::fmt;

use super::explain::duration;

/// Milliseconds of a day.
pub(super) const DAY_MS: u64 = 86_400_000;

/// A length of time. For ever is longer than any number of milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimeSpan {
    /// Milliseconds.
    Ms(u64),
    /// For ever.
    Forever,
}

impl TimeSpan {
    /// Returns a number of days.
    pub(super) fn days(days: u64) -> Self {
        Self::Ms(days.saturating_mul(DAY_MS))
    }

    /// Returns the milliseconds; none for ever.
    pub fn ms(self) -> Option<u64> {
        match self {
            Self::Ms(ms) => Some(ms),
            Self::Forever => None,
        }
    }

    pub(super) fn map(self, change: impl FnOnce(u64) -> u64) -> Self {
        self.ms().map_or(Self::Forever, |ms| Self::Ms(change(ms)))
    }

    /// Returns a multiple of the time.
    pub(super) fn times(self, factor: u64) -> Self {
        self.map(|ms| ms.saturating_mul(factor))
    }
}

/// Writes the time in words.
impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ms(ms) => f.write_str(&duration(*ms)),
            Self::Forever => f.write_str("for ever"),
        }
    }
}

/// A reason for which messages must, or may not, be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetentionFactor {
    /// The time for which brokers keep records.
    BrokerRetention,
    /// Redeliveries by the group and by producers.
    Redelivery,
    /// The longest replay from another source than the topic.
    ReplayWindow,
    /// Dead letters, and other messages that are open.
    DeadLetters,
    /// The risk of a second effect.
    EffectRisk,
    /// The law.
    Law,
    /// The time for which an id names one message.
    IdUniqueness,
    /// The cost of the storage.
    Cost,
}

impl RetentionFactor {
    /// Returns the name of the factor.
    pub fn name(self) -> &'static str {
        match self {
            Self::BrokerRetention => "broker retention",
            Self::Redelivery => "redelivery",
            Self::ReplayWindow => "replay window",
            Self::DeadLetters => "dead letters",
            Self::EffectRisk => "effect risk",
            Self::Law => "law",
            Self::IdUniqueness => "id uniqueness",
            Self::Cost => "cost",
        }
    }
}

/// One input of the proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HorizonInput {
    /// Factor to which it belongs.
    pub factor: RetentionFactor,
    /// Place of the setting, such as a topic.
    pub of: String,
    /// Name of the setting.
    pub name: String,
    /// Its value, with the value in words where it is a time.
    pub value: String,
    /// Memory that it needs; none where it does not count.
    pub needs: Option<TimeSpan>,
    /// Longest time that it allows to keep a message; none where it sets no bound.
    pub allows: Option<TimeSpan>,
    /// Whether it decides: no other input needs more, or none allows less.
    pub decides: bool,
}

impl HorizonInput {
    pub(super) fn new(factor: RetentionFactor, of: &str, name: &str, value: String) -> Self {
        Self {
            factor,
            of: of.to_owned(),
            name: name.to_owned(),
            value,
            needs: None,
            allows: None,
            decides: false,
        }
    }

    pub(super) fn needing(self, needs: Option<TimeSpan>) -> Self {
        Self { needs, ..self }
    }

    pub(super) fn allowing(self, allows: Option<TimeSpan>) -> Self {
        Self { allows, ..self }
    }

    /// Returns the setting with its value, as a part of a sentence.
    pub(super) fn cause(&self) -> String {
        format!("`{}` of {} is {}", self.name, self.of, self.value)
    }
}
