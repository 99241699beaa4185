//! The raise of a memory: with `replay.horizon = "raise"` a new consumer whose inbox would forget
//! too soon gets a longer retention class.
//!
//! The class of an existing consumer never changes. A claim looks for a message in the class of its
//! consumer and nowhere else: with rows in two classes one message could run twice.

use serde::{Deserialize, Serialize};

use super::{Dedup, Policy, Retention, horizon_input::TimeSpan};

/// The treatment of a new consumer whose memory is shorter than the longest redelivery needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HorizonRule {
    /// It gets the memory of `retention`.
    #[default]
    Keep,
    /// It gets the shortest class that suffices, up to a bound.
    Raise,
}

impl HorizonRule {
    pub(super) fn is_keep(&self) -> bool {
        *self == Self::Keep
    }
}

/// A raise of the memory of a new consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRaise {
    /// Class that the policy names.
    pub from: Retention,
    /// Class that the consumer gets.
    pub to: Retention,
    /// The setting that needs it, as text for a reader.
    pub cause: String,
}

impl MemoryRaise {
    /// Returns the sentence about a raise that was made.
    pub fn made(&self) -> String {
        format!("the memory is raised {}", self.change())
    }

    /// Returns the sentence about a raise that a consumer with the same policy would get.
    pub fn described(&self) -> String {
        format!("the memory of a new consumer with this policy would be raised {}", self.change())
    }

    fn change(&self) -> String {
        let Self { from, to, cause } = self;
        format!("from `{}` to `{}` (`replay.horizon = \"raise\"`): {cause}", from.name(), to.name())
    }
}

impl Policy {
    /// Returns the longest class that a new consumer may get; none where its memory is not raised.
    /// No factor forbids to keep messages for as long as that class does.
    pub fn raise_bound(&self) -> Option<Retention> {
        if self.replay.horizon == HorizonRule::Keep || self.dedup == Dedup::Off {
            return None;
        }
        let bound = self.raise_max().min(self.factors_max());
        Some(bound.max(self.retention))
    }

    /// Returns the key that sets the bound of a raise.
    pub(super) fn raise_bound_key(&self) -> &'static str {
        match self.factors.ceiling() {
            Some((key, _)) if self.factors_max() < self.raise_max() => key,
            _ => "replay.raise_max",
        }
    }

    /// Returns the longest class that the policy's owner lets a raise choose.
    fn raise_max(&self) -> Retention {
        self.replay.raise_max.unwrap_or(self.retention.next())
    }

    /// Returns the longest class that no factor forbids, or that of the policy where there is none.
    fn factors_max(&self) -> Retention {
        let ceiling = self.factors.ceiling();
        let allowed = ceiling.map_or(TimeSpan::Forever, |(_, days)| TimeSpan::days(days));
        Retention::at_most(allowed).unwrap_or(self.retention)
    }

    /// Keeps the class that an existing consumer got at its creation, where this policy may have
    /// been raised to it. So the file that the consumer was created from may be applied again.
    pub fn keep_memory(&mut self, existing: &Self) {
        let is_raised = |bound| existing.retention > self.retention && existing.retention <= bound;
        if existing.replay.horizon == HorizonRule::Raise
            && self.raise_bound().is_some_and(is_raised)
        {
            self.retention = existing.retention;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['orders']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test")
    }

    const RAISE: &str = "replay = { horizon = 'raise' }";

    // What could go wrong: a consumer gets a class that its owner did not mean to pay for, or keeps
    // its messages for ever.
    #[test]
    fn a_raise_goes_one_class_further_unless_the_policy_names_another() {
        use Retention::{OneYear, Permanent, SevenDays, ThirtyDays};
        for (text, expected) in [
            ("", None),
            ("replay = { raise_max = '1y' }", None),
            (RAISE, Some(ThirtyDays)),
            ("retention = '30d'\nreplay = { horizon = 'raise' }", Some(OneYear)),
            ("retention = '1y'\nreplay = { horizon = 'raise' }", Some(OneYear)),
            ("replay = { horizon = 'raise', raise_max = '7d' }", Some(SevenDays)),
            ("replay = { horizon = 'raise', raise_max = 'permanent' }", Some(Permanent)),
            (
                "replay = { horizon = 'raise', raise_max = 'permanent' }\nfactors = { \
                    legal_max_days = 60 }",
                Some(ThirtyDays),
            ),
        ] {
            assert_eq!(policy(text).raise_bound(), expected, "{text}");
        }
    }

    // What could go wrong: the file of a consumer whose class was raised cannot be applied again,
    // or a file that could not lead to its class passes for it.
    #[test]
    fn a_file_that_was_raised_keeps_the_class_of_its_consumer() {
        let raised = policy(&format!("retention = '30d'\n{RAISE}"));
        for (text, expected) in [
            (RAISE, Retention::ThirtyDays),
            ("", Retention::SevenDays),
            ("replay = { horizon = 'raise', raise_max = '7d' }", Retention::SevenDays),
            ("retention = '1y'\nreplay = { horizon = 'raise' }", Retention::OneYear),
        ] {
            let mut file = policy(text);
            file.keep_memory(&raised);
            assert_eq!(file.retention, expected, "{text}");
        }
        let mut file = policy(RAISE);
        file.keep_memory(&policy("retention = '30d'"));
        assert_eq!(file.retention, Retention::SevenDays, "that consumer was not raised");
    }
}
