//! The rules for replays of completed messages, and for reading records again.

use serde::{Deserialize, Serialize};

use super::{HorizonRule, PastHorizon, Retention};

/// The rules for reading records again, and for replays of completed messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Replay {
    /// Permission for `oncebox consumer seek` to set offsets back. Brokers redeliver regardless.
    pub allowed: bool,
    /// Treatment of an unknown message that the inbox may have forgotten.
    pub past_horizon: PastHorizon,
    /// Treatment of a new consumer whose memory is shorter than the longest redelivery needs.
    #[serde(skip_serializing_if = "HorizonRule::is_keep")]
    pub horizon: HorizonRule,
    /// Longest class that `horizon = "raise"` may choose; none for the next longer one that ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raise_max: Option<Retention>,
    /// Meaning of the consumer's effects, which says what `oncebox replay` asks for; none where its
    /// completed messages may not be replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<ReplayKind>,
    /// Answer to an emit of a replayed run. Nothing is sent in either case.
    #[serde(skip_serializing_if = "ReplayEmit::is_suppressed")]
    pub emit: ReplayEmit,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            allowed: true,
            past_horizon: PastHorizon::default(),
            horizon: HorizonRule::default(),
            raise_max: None,
            kind: None,
            emit: ReplayEmit::default(),
        }
    }
}

impl Replay {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Describes the replays that are allowed, as a sentence; none where none is.
    pub(super) fn explain(&self) -> Option<String> {
        let kind = self.kind?;
        let emit = match self.emit {
            ReplayEmit::Suppressed => "",
            ReplayEmit::Withheld => ", and a replayed run that emits fails",
        };
        Some(format!(
            "An operator may replay its completed messages, {}; a replay sends nothing{emit}.",
            kind.asks_for()
        ))
    }
}

/// The meaning of a consumer's effects for a replay of its completed messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayKind {
    /// Rows that are derived from the messages, each from its own: a replay writes them again.
    Projection,
    /// Sums over messages: a replay counts twice what was not reset before.
    Analytics,
    /// Records of what happened: a replay adds to them.
    Audit,
    /// Messages to people.
    Notification,
    /// Commands to other systems.
    Workflow,
    /// Copies that can be made again at any time.
    Cache,
}

impl ReplayKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 6] = [
        Self::Projection,
        Self::Cache,
        Self::Analytics,
        Self::Audit,
        Self::Notification,
        Self::Workflow,
    ];

    /// Returns the name of the kind in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Projection => "projection",
            Self::Analytics => "analytics",
            Self::Audit => "audit",
            Self::Notification => "notification",
            Self::Workflow => "workflow",
            Self::Cache => "cache",
        }
    }

    /// Returns the kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns whether the consumer exists for its effects outside the database, so that a replay
    /// of it is an alert.
    pub fn has_outside_effects(self) -> bool {
        matches!(self, Self::Notification | Self::Workflow)
    }

    /// Returns what the kind asks of an operator, as part of a sentence.
    fn asks_for(self) -> &'static str {
        match self {
            Self::Projection | Self::Cache => "with a plan and a reason",
            Self::Analytics => "while it is paused and after its derived tables were reset",
            Self::Audit => "after the number of messages was confirmed",
            Self::Notification | Self::Workflow => {
                "after it was confirmed that nothing is to be sent"
            }
        }
    }
}

/// The answer to an emit of a replayed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayEmit {
    /// The id that the message would have. The message is dropped, counted and logged.
    #[default]
    Suppressed,
    /// A refusal, which fails the run.
    Withheld,
}

impl ReplayEmit {
    /// Returns the name of the answer in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Suppressed => "suppressed",
            Self::Withheld => "withheld",
        }
    }

    fn is_suppressed(&self) -> bool {
        *self == Self::Suppressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    fn replay(lines: &str) -> Replay {
        let policy = format!("topics = ['t']\nack = 'after_commit'\n{lines}");
        Policy::parse(&policy).expect("a policy").replay
    }

    // What could go wrong: a consumer whose policy says nothing can be replayed, or a name of the
    // documentation is none.
    #[test]
    fn nothing_is_replayed_unless_the_policy_says_so() {
        assert_eq!((replay("").kind, replay("").explain()), (None, None));
        for kind in ReplayKind::ALL {
            let found = replay(&format!("replay = {{ kind = '{}' }}", kind.name()));
            assert_eq!((found.kind, found.emit), (Some(kind), ReplayEmit::Suppressed));
            assert_eq!(ReplayKind::named(kind.name()), Some(kind));
            let text = found.explain().expect("a sentence");
            assert!(text.contains("sends nothing"), "{text}");
        }
        assert_eq!(ReplayKind::named("search"), None);
        let outside: Vec<_> =
            ReplayKind::ALL.into_iter().filter(|kind| kind.has_outside_effects()).collect();
        assert_eq!(outside, [ReplayKind::Notification, ReplayKind::Workflow]);
    }

    #[test]
    fn a_withheld_emit_is_a_choice() {
        let found = replay("replay = { kind = 'cache', emit = 'withheld' }");
        assert_eq!((found.emit, found.emit.name()), (ReplayEmit::Withheld, "withheld"));
        assert!(found.explain().is_some_and(|text| text.contains("emits fails")));
        let problems = Policy::read(
            "topics = ['t']\nack = 'after_commit'\ndedup = 'off'\nreplay = { kind = 'cache' }",
        )
        .1;
        let text = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(text.contains("`replay.kind` needs `dedup = \"inbox\"`"), "{text}");
    }
}
