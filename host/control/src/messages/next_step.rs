//! The next step of a message, and the commands that move it on.

use chrono::{DateTime, Utc};
use oncebox_model::policy::Policy;

use super::history::{AggregateVersion, MessageHistory};

/// The next step of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextStep {
    /// Explanation for the operator, in a sentence or two.
    pub text: String,
    /// Commands from which an operator may choose.
    pub commands: Vec<String>,
}

impl MessageHistory {
    pub(super) fn next_step(&self, policy: &Policy) -> NextStep {
        let row = &self.detail.row;
        let (text, verbs): (String, &[&str]) = match row.status.as_str() {
            "completed" => (
                "Its effect is committed. Nothing is to be done; another delivery of \
                it is a duplicate."
                    .to_owned(),
                &[],
            ),
            "discarded" => ("It is never run any more, as someone said.".to_owned(), &[]),
            "skipped" if row.reason.as_deref() == Some("old_version") => (
                "It had no effect, since its aggregate was past its version when it came."
                    .to_owned(),
                &[],
            ),
            "skipped" => (
                "Nobody took its event type when it came, and its consumer says that \
                this is well."
                    .to_owned(),
                &[],
            ),
            "in_progress" => {
                let until = row.locked_until.map(shown).unwrap_or_default();
                (
                    format!(
                        "A worker runs it. If that dies, another one takes it over after \
                    {until}."
                    ),
                    &[],
                )
            }
            "received" => ("A worker runs it as soon as one is free.".to_owned(), &["discard"]),
            "failed_retryable" => {
                let at = row.next_attempt_at.map(shown).unwrap_or_default();
                let left = i64::from(policy.retry.attempts_max) - i64::from(row.attempts);
                (
                    format!(
                        "It is run again at {at}; {left} of {} runs are left.",
                        policy.retry.attempts_max
                    ),
                    &["retry", "discard"],
                )
            }
            "waiting" => self.waits(policy),
            _ => self.is_dead(policy),
        };
        let is_settled = matches!(row.status.as_str(), "completed" | "discarded" | "skipped");
        let paused = match self.consumer_state.as_str() {
            state if state.starts_with("its tenant") && !is_settled => {
                format!(" But nothing runs: {state}.")
            }
            state @ ("paused" | "deleting") if !is_settled => {
                format!(" But nothing runs: its consumer is {state}.")
            }
            _ => String::new(),
        };
        let command = |verb: &&str| {
            let (id, tenant, consumer) = (quoted(&row.message_id), &row.tenant, &row.consumer);
            match *verb {
                "behind" => {
                    let id = self
                        .blocked_by
                        .as_ref()
                        .map(|behind| quoted(&behind.message_id))
                        .unwrap_or_default();
                    format!("oncebox why {id} --tenant {tenant} --consumer {consumer}")
                }
                "show" => format!(
                    "oncebox inbox show {id} --tenant {tenant} --consumer {consumer} --payload"
                ),
                verb => format!(
                    "oncebox inbox {verb} {id} --tenant {tenant} --consumer {consumer} --because \
                        '…'"
                ),
            }
        };
        NextStep { text: text + &paused, commands: verbs.iter().map(command).collect() }
    }

    fn waits(&self, policy: &Policy) -> (String, &'static [&'static str]) {
        if let Some(behind) = &self.blocked_by {
            let (id, status) = (&behind.message_id, &behind.status);
            return (
                format!(
                    "It runs when `{id}`, which is {status} and before it in its key, is done."
                ),
                &["behind", "discard"],
            );
        }
        match (self.aggregate, self.waits_until) {
            (Some(AggregateVersion { version, at: Some(at) }), Some(until)) if at + 1 < version => {
                let then = match policy.sequence.as_ref().map(|sequence| sequence.gap) {
                    Some(oncebox_model::policy::Gap::Proceed) | None => "runs all the same",
                    Some(oncebox_model::policy::Gap::Park) => "is parked",
                };
                let until = shown(until);
                (
                    format!(
                        "It runs when {} of its aggregate came; at {until} it {then}.",
                        missing(at + 1, version - 1)
                    ),
                    &["discard"],
                )
            }
            _ => (
                "Nothing is before it any more: it is due within ten seconds.".to_owned(),
                &["discard"],
            ),
        }
    }

    /// Explains a dead letter or a parked message, with the actions that an operator can take.
    fn is_dead(&self, policy: &Policy) -> (String, &'static [&'static str]) {
        const EITHER: &[&str] = &["redrive", "discard"];
        let row = &self.detail.row;
        let reason = row.reason.as_deref().unwrap_or_default();
        let kind = reason.split(':').next().unwrap_or_default();
        if !self.detail.is_kept && !matches!(kind, "undecodable" | "unclaimable") {
            let why = "The policy did not keep its record (`payload = \"none\"`), so that it \
                cannot be run again yet. Have it delivered again, \
                under the same id and with the same payload: produced again, or read again by \
                `oncebox consumer seek`. That brings the \
                record back to this row; then redrive it.";
            return (why.to_owned(), &["discard"]);
        }
        let text = match kind {
            "undecodable" | "unclaimable" => {
                let text = "It was never understood, and has no identity to run under. Mend the \
                    producer, or `identity` in the policy, have it \
                    produced again, and discard this row.";
                return (text.to_owned(), &["show", "discard"]);
            }
            "collision" if policy.order != oncebox_model::policy::Order::None => {
                let text = "Its id had come with another payload before, so that it has no place \
                    in the order. Look at both; have it produced \
                    again under an id of its own if it is a message of its own, and discard this \
                    row.";
                return (text.to_owned(), &["show", "discard"]);
            }
            "collision" => {
                "Its id had come with another payload before. Look at both; redrive it if it is a \
                    message of its own."
            }
            "no_route" => {
                "No deployment takes its event type and version. Deploy a handler for it, then \
                    redrive."
            }
            "gap" if let Some(behind) = &self.blocked_by => {
                let text = format!(
                    "Versions before its own had not come in time. `{}`, which is before it, is \
                        {}.",
                    behind.message_id, behind.status
                );
                return (text, &["behind", "discard"]);
            }
            "gap" => {
                let missing = match self.aggregate {
                    Some(AggregateVersion { version, at: Some(at) }) if at + 1 < version => {
                        missing(at + 1, version - 1)
                    }
                    _ => "what is missing".to_owned(),
                };
                let text = format!(
                    "It goes on by itself when {missing} of its aggregate came. Redrive it to go \
                        on without: what is missing is skipped when \
                     it comes."
                );
                return (text, EITHER);
            }
            "horizon" => {
                "It is older than the inbox remembers, so that nobody knows whether it ran before. \
                    Look for its effect; redrive it if there \
                 is none."
            }
            "schema" => {
                "Its payload is not what its schema says. Mend the producer or the schema; redrive \
                    it when it is valid."
            }
            "crashed" => {
                "The process or its connection died whenever it ran. Deploy a mended version, then \
                    redrive."
            }
            "reject" => "The handler refused it. Redrive when it would decide otherwise.",
            "park" => "The handler asked for a person. Redrive when it would decide otherwise.",
            _ => {
                "It failed too often. Deploy a mended version, raise a limit or mend the tables, \
                    then redrive."
            }
        };
        let behind = match &self.blocked_by {
            Some(behind) => format!(
                " It then runs after `{}`, which is before it in its key.",
                behind.message_id
            ),
            None if policy.order != oncebox_model::policy::Order::None
                && self.ordering_key.is_some() =>
            {
                " Until then later messages of its key wait.".to_owned()
            }
            None => String::new(),
        };
        (format!("{text}{behind}"), EITHER)
    }
}

fn shown(at: DateTime<Utc>) -> String {
    at.format("%F %T UTC").to_string()
}

fn missing(first: i64, last: i64) -> String {
    if first == last { format!("version {first}") } else { format!("versions {first} to {last}") }
}

/// Quotes a word for a shell's command line.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.,:/@%+=#".contains(c);
    match !word.is_empty() && !word.starts_with(['-', '#']) && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_words_of_a_shell() {
        assert_eq!(quoted("orders:T1:3:42"), "orders:T1:3:42");
        for (id, expected) in [
            ("/s 1", "'/s 1'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
            ("-x", "'-x'"),
            ("$(rm)", "'$(rm)'"),
            ("#1", "'#1'"),
        ] {
            assert_eq!(quoted(id), expected);
        }
    }
}
