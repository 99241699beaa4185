//! The factors that choose a retention beside the brokers: the law, the cost of storage, the time
//! for which ids are unique, the longest replay, and the risk of a second effect.

use serde::{Deserialize, Serialize};

use super::{
    Dedup, HorizonRule, PastHorizon, Policy, PolicyProblem, Retention,
    explain::listed,
    horizon_input::{DAY_MS, HorizonInput, RetentionFactor, TimeSpan},
};

/// The factor between the longest redelivery and the memory that it needs.
pub const MARGIN: u64 = 2;

/// What the owner of a consumer knows of the time for which its messages must, or may, be kept.
/// `retention` is compared with it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Factors {
    /// Days for which the law demands that a completed message is kept; none for no demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub legal_min_days: Option<u64>,
    /// Days after which the law demands that a completed message is removed; none for no demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub legal_max_days: Option<u64>,
    /// Days for which producers use an id for one message alone; none for ever. A message under an
    /// id that is used again while the inbox knows it passes for a duplicate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id_unique_days: Option<u64>,
    /// Age, days, of the oldest messages of a replay from another source than the topic, such as a
    /// backfill or a bridge; none for no such replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_days: Option<u64>,
    /// Bytes that the consumer's messages may take in the inbox; none for no bound. More is a
    /// warning, and removes nothing sooner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<u64>,
    /// Risk of a second effect.
    #[serde(skip_serializing_if = "EffectRisk::is_normal")]
    pub effect_risk: EffectRisk,
}

/// The risk of a second effect of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EffectRisk {
    /// It can be corrected. The memory is twice the longest redelivery.
    #[default]
    Normal,
    /// It cannot, such as a payment. The memory is four times the longest redelivery, and a message
    /// that may have been forgotten never runs by itself.
    High,
}

impl EffectRisk {
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }

    /// Returns the factor between the longest redelivery and the memory that it needs.
    pub fn margin(self) -> u64 {
        match self {
            Self::Normal => MARGIN,
            Self::High => 2 * MARGIN,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::High => "high",
        }
    }
}

impl Factors {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the keys that bound the time for which a message may be kept, with their days.
    pub(super) fn ceilings(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let keys = [
            ("factors.legal_max_days", self.legal_max_days),
            ("factors.id_unique_days", self.id_unique_days),
        ];
        keys.into_iter().filter_map(|(key, days)| days.map(|days| (key, days)))
    }

    /// Returns the shortest of those bounds, with its key.
    pub(super) fn ceiling(&self) -> Option<(&'static str, u64)> {
        self.ceilings().min_by_key(|(_, days)| *days)
    }

    /// Returns the memory that the longest replay needs, as an input of the proof.
    pub(super) fn replay_input(&self) -> HorizonInput {
        let needs = self.replay_days.map(TimeSpan::days);
        let needs = needs.map(|span| span.times(self.effect_risk.margin()));
        days_input(RetentionFactor::ReplayWindow, "factors.replay_days", self.replay_days)
            .needing(needs)
    }

    /// Returns the inputs of the proof that bring no message again. `bytes_per_day` is the measured
    /// growth; none where it is not known.
    pub(super) fn inputs(&self, bytes_per_day: Option<u64>) -> Vec<HorizonInput> {
        let Self { legal_min_days: least, legal_max_days: most, id_unique_days: unique, .. } = self;
        let dead_letters = HorizonInput::new(
            RetentionFactor::DeadLetters,
            "inbox",
            "open and dead letters",
            "never forgotten".to_owned(),
        );
        let risk = self.effect_risk;
        let risk = HorizonInput::new(
            RetentionFactor::EffectRisk,
            "policy",
            "factors.effect_risk",
            format!("{} (factor {})", risk.name(), risk.margin()),
        );
        vec![
            dead_letters,
            risk,
            days_input(RetentionFactor::Law, "factors.legal_min_days", *least)
                .needing(least.map(TimeSpan::days)),
            days_input(RetentionFactor::Law, "factors.legal_max_days", *most)
                .allowing(most.map(TimeSpan::days)),
            days_input(RetentionFactor::IdUniqueness, "factors.id_unique_days", *unique)
                .allowing(unique.map(TimeSpan::days)),
            self.cost_input(bytes_per_day),
        ]
    }

    /// Describes the factors that are set, as a sentence after others.
    pub(super) fn explain(&self) -> String {
        let numbers = [
            (self.legal_min_days, "the law demands", "days at least"),
            (self.legal_max_days, "the law allows", "days at most"),
            (self.id_unique_days, "an id names one message for", "days"),
            (self.replay_days, "a replay reaches back for", "days"),
            (self.budget_bytes, "its messages may take", "bytes"),
        ];
        let mut parts: Vec<_> = numbers
            .into_iter()
            .filter_map(|(number, before, after)| Some(format!("{before} {} {after}", number?)))
            .collect();
        if self.effect_risk == EffectRisk::High {
            parts.push("a second effect cannot be corrected".to_owned());
        }
        if parts.is_empty() {
            return String::new();
        }
        let said = listed(parts.into_iter(), "and");
        format!(" Its retention is compared with what its owner says: {said}.")
    }

    fn cost_input(&self, bytes_per_day: Option<u64>) -> HorizonInput {
        let value = match (self.budget_bytes, bytes_per_day) {
            (None, _) => "not set".to_owned(),
            (Some(budget), None) => format!("{budget} (growth not known)"),
            (Some(budget), Some(growth)) => format!("{budget} ({growth} more each day)"),
        };
        let allows = self.affordable(bytes_per_day);
        HorizonInput::new(RetentionFactor::Cost, "policy", "factors.budget_bytes", value)
            .allowing(allows)
    }

    /// Returns the time for which messages can be kept within the budget, with the present growth;
    /// none where there is no budget or the growth is not known.
    pub(super) fn affordable(&self, bytes_per_day: Option<u64>) -> Option<TimeSpan> {
        let (budget, growth) = (u128::from(self.budget_bytes?), u128::from(bytes_per_day?));
        let Some(ms) = (budget * u128::from(DAY_MS)).checked_div(growth) else {
            return Some(TimeSpan::Forever); // nothing is added
        };
        Some(TimeSpan::Ms(u64::try_from(ms).unwrap_or(u64::MAX)))
    }
}

fn days_input(factor: RetentionFactor, name: &str, days: Option<u64>) -> HorizonInput {
    let value = days.map_or_else(|| "not set".to_owned(), |days| days.to_string());
    HorizonInput::new(factor, "policy", name, value)
}

impl Policy {
    /// Checks for factors that contradict each other, the retention or its raise.
    pub(super) fn check_factors(&self, found: &mut Vec<PolicyProblem>) {
        let faults = match self.dedup {
            Dedup::Off => self.forgetful_faults(),
            Dedup::Inbox => {
                [self.legal_faults(), self.ceiling_faults(), self.raise_faults()].concat()
            }
        };
        for (key, text) in faults {
            // A key that is wrong by itself is reported once.
            if !found.iter().any(|problem| problem.key == key) {
                found.push(PolicyProblem::new(key, text));
            }
        }
    }

    /// Returns the keys that mean nothing without a memory, each with the problem.
    fn forgetful_faults(&self) -> Vec<(&'static str, String)> {
        let keys = [
            ("factors", !self.factors.is_default()),
            ("replay.horizon", self.replay.horizon == HorizonRule::Raise),
        ];
        let fault = |key: &'static str| {
            let text = "needs `dedup = \"inbox\"`: without it nothing is remembered of any message";
            (key, format!("`{key}` {text}"))
        };
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| fault(key)).collect()
    }

    /// Returns the problems with the least time that the law demands.
    fn legal_faults(&self) -> Vec<(&'static str, String)> {
        const KEY: &str = "factors.legal_min_days";
        let Some(least) = self.factors.legal_min_days else { return Vec::new() };
        let mut faults = Vec::new();
        if let Some(most) = self.factors.legal_max_days.filter(|most| *most < least) {
            let text = format!("`{KEY}` is {least}, above `factors.legal_max_days`, {most}");
            faults.push((KEY, text));
        }
        let class = self.retention;
        if class.span() < TimeSpan::days(least) {
            let longer = Retention::at_least(TimeSpan::days(least)).name();
            let text = format!(
                "`{KEY}` is {least}, and `retention = \"{}\"` keeps a completed message for {} at \
                    least; choose `retention = \"{longer}\"`",
                class.name(),
                class.span()
            );
            faults.push((KEY, text));
        }
        faults
    }

    /// Returns the bounds that are below the time for which the retention keeps messages, each with
    /// the problem.
    fn ceiling_faults(&self) -> Vec<(&'static str, String)> {
        let (class, kept) = (self.retention, self.retention.longest_kept());
        let is_below = |(_, days): &(&str, u64)| TimeSpan::days(*days) < kept;
        let fault = |(key, days): (&'static str, u64)| {
            let way_out = match Retention::at_most(TimeSpan::days(days)) {
                Some(shorter) => format!("choose `retention = \"{}\"`", shorter.name()),
                None => {
                    format!("no `retention` is shorter; raise `{key}`, or use `dedup = \"off\"`")
                }
            };
            let up_to = if kept == TimeSpan::Forever { "" } else { "for up to " };
            let text = format!(
                "`{key}` is {days}, and `retention = \"{}\"` keeps a completed message \
                    {up_to}{kept}; {way_out}",
                class.name()
            );
            (key, text)
        };
        self.factors.ceilings().filter(is_below).map(fault).collect()
    }

    /// Returns the problems with the treatment of a memory that is too short.
    fn raise_faults(&self) -> Vec<(&'static str, String)> {
        let mut faults = Vec::new();
        if self.factors.effect_risk == EffectRisk::High
            && self.replay.past_horizon == PastHorizon::Run
        {
            let text = "`factors.effect_risk = \"high\"` needs `replay.past_horizon = \"park\"` or \
                \"park_by_time\": with \"run\" a message that was forgotten has its effect again";
            faults.push(("factors.effect_risk", text.to_owned()));
        }
        if let Some(most) = self.replay.raise_max.filter(|most| *most < self.retention) {
            let text = format!(
                "`replay.raise_max` is \"{}\", below `retention`, \"{}\"",
                most.name(),
                self.retention.name()
            );
            faults.push(("replay.raise_max", text));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let text = format!("topics = ['orders']\nack = 'after_commit'\n{text}");
        Policy::read(&text).1.iter().map(ToString::to_string).collect()
    }

    // What could go wrong: a policy promises the law, or its ids, what its retention does not keep;
    // or one that keeps it is refused.
    #[test]
    fn factors_that_contradict_the_retention_are_refused_by_name() {
        for (text, expected) in [
            (
                "factors = { legal_min_days = 8 }",
                "`factors.legal_min_days` is 8, and `retention = \"7d\"` keeps a completed message \
                    for 7 d at least; choose `retention = \"30d\"`",
            ),
            (
                "factors = { legal_min_days = 7, legal_max_days = 5 }",
                "`factors.legal_min_days` is 7, above `factors.legal_max_days`, 5",
            ),
            (
                "factors = { legal_max_days = 9 }",
                "`factors.legal_max_days` is 9, and `retention = \"7d\"` keeps a completed message \
                    for up to 225 h; no `retention` is shorter",
            ),
            (
                "retention = '30d'\nfactors = { legal_max_days = 40 }",
                "for up to 961 h; choose `retention = \"7d\"`",
            ),
            (
                "retention = '1y'\nfactors = { id_unique_days = 90 }",
                "`factors.id_unique_days` is 90, and `retention = \"1y\"`",
            ),
            (
                "retention = '1y'\nfactors = { legal_min_days = 367 }",
                "`retention = \"1y\"` keeps a completed message for 366 d at least; choose \
                    `retention = \"permanent\"`",
            ),
            (
                "retention = 'permanent'\nfactors = { legal_max_days = 36525 }",
                "`retention = \"permanent\"` keeps a completed message for ever; choose `retention \
                    = \"1y\"`",
            ),
            (
                "factors = { effect_risk = 'high' }\nreplay = { past_horizon = 'run' }",
                "`factors.effect_risk = \"high\"` needs `replay.past_horizon = \"park\"`",
            ),
            ("dedup = 'off'\nfactors = { replay_days = 1 }", "`factors` needs `dedup = \"inbox\"`"),
            (
                "dedup = 'off'\nreplay = { horizon = 'raise' }",
                "`replay.horizon` needs `dedup = \"inbox\"`",
            ),
            (
                "retention = '30d'\nreplay = { horizon = 'raise', raise_max = '7d' }",
                "`replay.raise_max` is \"7d\", below `retention`, \"30d\"",
            ),
            ("factors = { replay_days = 0 }", "`factors.replay_days` is 0; it must be at least 1"),
        ] {
            let found = problems(text);
            // S1-046.
            assert!(found.iter().any(|problem| problem.contains(expected)), "{text}: {found:#?}");
        }
        for text in [
            "factors = { legal_min_days = 7, legal_max_days = 10, id_unique_days = 10 }",
            "retention = '30d'\nfactors = { legal_min_days = 30, legal_max_days = 41 }",
            "retention = '1y'\nfactors = { legal_min_days = 366 }",
            "retention = 'permanent'\nfactors = { legal_min_days = 3650 }",
            "factors = { effect_risk = 'high' }\nreplay = { past_horizon = 'park_by_time' }",
            "dedup = 'off'",
        ] {
            assert_eq!(problems(text), [""; 0], "{text}");
        }
    }

    // What could go wrong: a budget is compared with another growth, or one without growth is taken
    // for used up.
    #[test]
    fn a_budget_lasts_for_its_bytes_by_the_growth() {
        let factors = Factors { budget_bytes: Some(1_000), ..Factors::default() };
        assert_eq!(factors.affordable(None), None);
        assert_eq!(factors.affordable(Some(0)), Some(TimeSpan::Forever));
        assert_eq!(factors.affordable(Some(100)), Some(TimeSpan::days(10)));
        assert_eq!(Factors::default().affordable(Some(100)), None);
        let large = Factors { budget_bytes: Some(u64::MAX), ..Factors::default() };
        assert_eq!(large.affordable(Some(1)), Some(TimeSpan::Ms(u64::MAX)));
    }
}
