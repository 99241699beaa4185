//! The time for which topics keep records, as their brokers tell it.

use super::horizon_input::{HorizonInput, RetentionFactor, TimeSpan};

/// The settings of a topic, as its brokers tell them now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicSettings {
    /// Name of the topic; the pattern itself where no topic matches it.
    pub topic: String,
    /// Time for which its records are kept.
    pub kept: TopicRetention,
}

/// The time for which a topic keeps records, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicRetention {
    /// The brokers' answer.
    Known(BrokerRetention),
    /// No such topic, or none that the host may see.
    Missing,
    /// A topic of an embedded broker, which keeps records in memory until its process ends.
    Embedded,
    /// No answer, for this reason.
    Unknown(String),
}

/// The settings by which brokers remove records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerRetention {
    /// `retention.ms`; none for -1, for ever.
    pub retention_ms: Option<u64>,
    /// `retention.bytes`; none for -1, no bound. It only removes records earlier.
    pub retention_bytes: Option<u64>,
    /// `segment.ms`: time for which a segment takes records.
    pub segment_ms: u64,
    /// `cleanup.policy`: `delete`, `compact`, or both with a comma.
    pub cleanup_policy: String,
}

impl BrokerRetention {
    /// Returns `retention.ms` as it counts. A topic that is only compacted keeps the last record of
    /// each key for ever.
    fn kept(&self) -> TimeSpan {
        match self.retention_ms {
            Some(ms) if self.deletes() => TimeSpan::Ms(ms),
            _ => TimeSpan::Forever,
        }
    }

    fn deletes(&self) -> bool {
        self.cleanup_policy.split(',').any(|policy| policy.trim() == "delete")
    }

    /// Returns the inputs of the proof, with `factor` between a redelivery and the memory.
    fn inputs(&self, of: &str, factor: u64) -> Vec<HorizonInput> {
        let kept = self.kept();
        let written =
            |value: Option<u64>| value.map_or_else(|| "-1".to_owned(), |value| value.to_string());
        let input = |name, value, needs| {
            HorizonInput::new(RetentionFactor::BrokerRetention, of, name, value).needing(needs)
        };
        let retention = self.retention_ms.map_or(TimeSpan::Forever, TimeSpan::Ms);
        let mut inputs = vec![
            input(
                "retention.ms",
                format!("{} ({retention})", written(self.retention_ms)),
                self.deletes().then(|| kept.times(factor)),
            ),
            input(
                "segment.ms",
                format!("{} ({})", self.segment_ms, TimeSpan::Ms(self.segment_ms)),
                kept.ms().map(|ms| TimeSpan::Ms(ms.saturating_add(self.segment_ms))),
            ),
            input(
                "cleanup.policy",
                self.cleanup_policy.clone(),
                (!self.deletes()).then_some(TimeSpan::Forever),
            ),
        ];
        if self.retention_bytes.is_some() {
            inputs.push(input("retention.bytes", written(self.retention_bytes), None));
        }
        inputs
    }
}

impl TopicSettings {
    /// Returns the topic as a place of settings.
    pub(super) fn of(&self) -> String {
        format!("topic `{}`", self.topic)
    }

    /// Returns the inputs of the proof, with `factor` between a redelivery and the memory.
    pub(super) fn inputs(&self, factor: u64) -> Vec<HorizonInput> {
        match (&self.kept, self.fault()) {
            (TopicRetention::Known(settings), _) => settings.inputs(&self.of(), factor),
            (_, fault) => vec![HorizonInput::new(
                RetentionFactor::BrokerRetention,
                &self.of(),
                "retention.ms",
                format!("not known: {}", fault.unwrap_or_default()),
            )],
        }
    }

    /// Returns the reason why the settings are not known.
    pub(super) fn fault(&self) -> Option<&str> {
        match &self.kept {
            TopicRetention::Known(_) => None,
            TopicRetention::Missing => Some("the brokers know no such topic yet"),
            TopicRetention::Embedded => {
                Some("an embedded broker keeps records in memory, until its process ends")
            }
            TopicRetention::Unknown(reason) => Some(reason),
        }
    }
}
