//! The figures of a removal under load: latency by the moment, and the durations of the steps.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{report::Spread, trend::percentile};

/// Duration of the spans of a round.
pub const MINUTE: Duration = Duration::from_secs(60);
/// Minutes of the load.
pub const MINUTES: u32 = 6;

/// One removal under load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RemovalRound {
    /// Load, messages a second.
    pub rate: f64,
    /// Messages of the partition.
    pub rows: i64,
    /// Those of them that moved to the present partition, since they must stay.
    pub moved: i64,
    /// Size of the partition with its indexes, bytes.
    pub bytes: i64,
    /// Latency by the moment at which messages were sent.
    pub moments: Vec<Moment>,
    /// Durations of the steps, seconds.
    pub steps: Vec<(Stage, f64)>,
}

/// Latency of the messages that were sent in one span of time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Moment {
    /// The span.
    pub when: When,
    /// Messages that were sent in it.
    pub messages: usize,
    /// Median time from send to commit, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of that time, milliseconds.
    pub p99_ms: f64,
    /// 99.9th percentile of that time, milliseconds.
    pub p999_ms: f64,
    /// Longest such time, milliseconds.
    pub max_ms: f64,
}

/// A span of time of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// The minute before the partition is due.
    Before,
    /// The minute that begins when it is due.
    Minute,
    /// The time from the removal's first step to its last.
    Removal,
    /// The last minute of the load.
    After,
}

impl When {
    /// All spans, in the order of tables.
    pub const ALL: [Self; 4] = [Self::Before, Self::Minute, Self::Removal, Self::After];

    /// Returns the name that tables show.
    pub fn title(self) -> &'static str {
        match self {
            Self::Before => "the minute before",
            Self::Minute => "the first minute of the removal",
            Self::Removal => "while the removal runs",
            Self::After => "the last minute",
        }
    }
}

/// A stage of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It has not begun.
    Waiting,
    /// Messages that must stay move to the present partition.
    Move,
    /// The rest is counted.
    Count,
    /// The partition is detached.
    Detach,
    /// The history of its messages is deleted.
    History,
    /// The table is dropped.
    Drop,
    /// It is gone.
    Gone,
}

impl Stage {
    /// The steps of a removal, in their order.
    pub const STEPS: [Self; 5] = [Self::Move, Self::Count, Self::Detach, Self::History, Self::Drop];

    /// Returns the name that tables show.
    pub fn title(self) -> &'static str {
        match self {
            Self::Waiting => "wait",
            Self::Move => "move what must stay",
            Self::Count => "count the rest",
            Self::Detach => "detach, concurrently",
            Self::History => "delete the history",
            Self::Drop => "drop the table",
            Self::Gone => "gone",
        }
    }
}

impl RemovalRound {
    /// Returns the latency of a span; none where no message was sent in it.
    pub fn moment(&self, when: When) -> Option<&Moment> {
        self.moments.iter().find(|moment| moment.when == when)
    }

    /// Returns the duration of the whole removal, seconds.
    pub fn seconds(&self) -> f64 {
        self.steps.iter().map(|(_, seconds)| seconds).sum()
    }

    /// Returns the duration of a step, seconds.
    pub fn step(&self, stage: Stage) -> f64 {
        self.steps.iter().find(|(step, _)| *step == stage).map_or(0.0, |(_, seconds)| *seconds)
    }
}

/// A measure of a moment.
pub type MomentMeasure = fn(&Moment) -> f64;

/// The measures of a moment, with the names that tables show.
pub const MEASURES: [(&str, MomentMeasure); 4] = [
    ("p50", |moment| moment.p50_ms),
    ("p99", |moment| moment.p99_ms),
    ("p99.9", |moment| moment.p999_ms),
    ("max", |moment| moment.max_ms),
];

/// Returns the spread of a measure in a span.
pub fn spread(rounds: &[RemovalRound], when: When, measure: MomentMeasure) -> Option<Spread> {
    Spread::of(rounds.iter().filter_map(|round| round.moment(when)).map(measure))
}

/// Returns the spread of a measure in a span, as a multiple of that in the minute before, round by
/// round.
pub fn ratio(rounds: &[RemovalRound], when: When, measure: MomentMeasure) -> Option<Spread> {
    let of = |round: &RemovalRound| {
        Some(measure(round.moment(when)?) / measure(round.moment(When::Before)?))
    };
    Spread::of(rounds.iter().filter_map(of))
}

/// Returns the latency in each span of a round. `begun` is the begin of the load, and `removal` the
/// begin and the end of the removal, microseconds.
pub fn moments(times: Vec<(f64, f64)>, begun: f64, removal: (f64, f64)) -> Vec<Moment> {
    let minute = MINUTE.as_secs_f64() * 1e6;
    let nth = |number: f64| (begun + number * minute, begun + (number + 1.0) * minute);
    let span = |when| match when {
        When::Before => nth(0.0),
        When::Minute => nth(1.0),
        When::Removal => removal,
        When::After => nth(f64::from(MINUTES - 1)),
    };
    let moment = |when| {
        let (from, to) = span(when);
        let within = times.iter().filter(|(sent, _)| (from..to).contains(sent));
        let mut sorted: Vec<f64> = within.map(|(_, ms)| *ms).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share| percentile(&sorted, share);
        (!sorted.is_empty()).then(|| Moment {
            when,
            messages: sorted.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: at(1.0),
        })
    };
    When::ALL.into_iter().filter_map(moment).collect()
}

/// Returns the duration of each step, seconds.
pub fn durations(looks: &[(f64, Stage)]) -> Vec<(Stage, f64)> {
    let of = |stage: Stage| {
        let spans = looks.windows(2).filter(|pair| pair[0].1 == stage);
        spans.map(|pair| (pair[1].0 - pair[0].0) / 1e6).sum::<f64>()
    };
    Stage::STEPS.into_iter().map(|stage| (stage, of(stage))).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a round whose latency in each minute is one of these times, milliseconds.
    pub fn round(before: f64, minute: f64, after: f64) -> RemovalRound {
        let second = |number: u32| f64::from(number) * 1e6;
        let at = |number: u32| match number / 60 {
            0 => before,
            1 => minute,
            _ => after,
        };
        let times = (0..60 * MINUTES).map(|number| (second(number), at(number))).collect();
        let looks = [
            (second(60), Stage::Move),
            (second(61), Stage::Count),
            (second(70), Stage::Detach),
            (second(71), Stage::History),
            (second(72), Stage::Drop),
            (second(74), Stage::Gone),
        ];
        RemovalRound {
            rate: 1.0,
            rows: 1_000,
            moved: 1,
            bytes: 400_000,
            moments: moments(times, 0.0, (second(60), second(74))),
            steps: durations(&looks),
        }
    }

    #[test]
    fn latencies_belong_to_the_minute_in_which_the_message_was_sent() {
        let round = round(2.0, 6.0, 3.0);
        let counts: Vec<_> = round.moments.iter().map(|moment| moment.messages).collect();
        assert_eq!(counts, [60, 60, 14, 60]);
        let p99 = |when| round.moment(when).map(|moment| moment.p99_ms);
        assert_eq!(When::ALL.map(p99), [2.0, 6.0, 6.0, 3.0].map(Some));
        let rounds = [round, self::round(2.0, 2.0, 2.0)];
        let spread = ratio(&rounds, When::Minute, |moment| moment.p99_ms);
        assert_eq!(spread, Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    }

    #[test]
    fn a_step_lasts_until_the_next_one_is_seen() {
        let round = round(1.0, 1.0, 1.0);
        assert_eq!(Stage::STEPS.map(|stage| round.step(stage)), [1.0, 9.0, 1.0, 1.0, 2.0]);
        assert_eq!(round.seconds(), 14.0);
    }
}
