//! The open messages of an inbox, and the bounds of the policy that they reach.

use chrono::{DateTime, Utc};

use crate::{
    policy::Alerts,
    status::{MessageStatus, Reason},
};

/// Keys of the bounds in `[alerts]` that a policy can set.
pub const ALERTS: [&str; 4] = ["pending_age_s", "parked", "dead_letters", "collisions"];

/// Messages of a consumer that are in one state for one reason.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct OpenMessages {
    /// Key of the consumer.
    #[sqlx(rename = "id")]
    pub consumer_id: i32,
    /// Status of the messages; an open one.
    pub status: MessageStatus,
    /// Reason, without the part after a colon.
    pub reason: Option<String>,
    /// Number of messages; those of one state are counted up to a bound.
    pub messages: i64,
    /// Time at which the first of them was received.
    pub oldest: DateTime<Utc>,
    /// Seconds since `oldest`, by the database's clock.
    pub oldest_age_s: f64,
}

/// Open messages of one inbox.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Backlog {
    /// Messages by state and reason.
    pub open: Vec<OpenMessages>,
}

/// A bound of the policy that the inbox has reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Alert {
    /// Key of the bound in `[alerts]`.
    pub name: &'static str,
    /// Present value: messages, or seconds for `pending_age_s`.
    pub value: f64,
    /// Lowest value that is an alert.
    pub bound: u64,
}

impl Backlog {
    /// Counts the messages in a state.
    pub fn messages(&self, status: MessageStatus) -> i64 {
        self.open.iter().filter(|open| open.status == status).map(|open| open.messages).sum()
    }

    /// Counts the messages that run or are still to run.
    pub fn pending(&self) -> i64 {
        MessageStatus::PENDING.into_iter().map(|status| self.messages(status)).sum()
    }

    /// Returns the seconds since the oldest message that runs or is still to run was received.
    pub fn oldest_pending_age_s(&self) -> Option<f64> {
        let pending = self.open.iter().filter(|open| open.status.is_pending());
        pending.map(|open| open.oldest_age_s).reduce(f64::max)
    }

    fn collisions(&self) -> i64 {
        self.open
            .iter()
            .filter(|open| open.reason.as_deref() == Some(Reason::Collision.as_str()))
            .map(|open| open.messages)
            .sum()
    }

    /// Returns the bounds of a policy that this inbox has reached. A bound of 0 is never reached.
    pub fn alerts(&self, policy: &Alerts) -> Vec<Alert> {
        let values = [
            (
                "pending_age_s",
                self.oldest_pending_age_s().unwrap_or_default(),
                policy.pending_age_s,
            ),
            ("parked", self.messages(MessageStatus::Parked) as f64, policy.parked),
            (
                "dead_letters",
                self.messages(MessageStatus::FailedTerminal) as f64,
                policy.dead_letters,
            ),
            ("collisions", self.collisions() as f64, policy.collisions),
        ];
        let reached =
            values.into_iter().filter(|(_, value, bound)| *bound > 0 && *value >= *bound as f64);
        reached.map(|(name, value, bound)| Alert { name, value, bound }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(
        status: MessageStatus,
        reason: Option<Reason>,
        messages: i64,
        oldest_age_s: f64,
    ) -> OpenMessages {
        let reason = reason.map(|reason| reason.to_string());
        OpenMessages { consumer_id: 1, status, reason, messages, oldest: Utc::now(), oldest_age_s }
    }

    // S1-116, S1-117, S0-041, S0-048, S2-014: each bound by itself, and none where it is 0.
    #[test]
    fn an_alert_is_a_bound_that_is_reached() {
        let backlog = Backlog {
            open: vec![
                open(MessageStatus::Received, None, 5, 61.0),
                open(MessageStatus::Waiting, Some(Reason::Gap), 2, 300.0),
                open(MessageStatus::Parked, Some(Reason::Collision), 2, 900.0),
                open(MessageStatus::Parked, Some(Reason::Crashed), 1, 10.0),
                open(MessageStatus::FailedTerminal, Some(Reason::Reject), 4, 9_000.0),
            ],
        };
        assert_eq!((backlog.pending(), backlog.oldest_pending_age_s()), (7, Some(300.0)));
        let names = |policy: Alerts| {
            backlog.alerts(&policy).into_iter().map(|alert| alert.name).collect::<Vec<_>>()
        };
        let off = Alerts { pending_age_s: 0, parked: 0, dead_letters: 0, collisions: 0 };
        assert_eq!(names(off.clone()), [""; 0]);
        assert_eq!(names(Alerts { pending_age_s: 300, ..off.clone() }), ["pending_age_s"]);
        assert_eq!(
            names(Alerts { pending_age_s: 301, parked: 4, dead_letters: 5, collisions: 3 }),
            [""; 0]
        );
        // S0-041, S1-116, S1-117, S2-014.
        assert_eq!(
            names(Alerts { parked: 3, dead_letters: 4, collisions: 2, ..off }),
            ["parked", "dead_letters", "collisions"]
        );
        assert!(
            Backlog::default()
                .alerts(&Alerts { pending_age_s: 1, parked: 1, dead_letters: 1, collisions: 1 })
                .is_empty()
        );
    }
}
