//! The next step of a message, and the commands that move it on.

use chrono::{DateTime, Utc};
use oncebox_model::{
    MessageStatus, Reason,
    policy::{Gap, Order, Policy},
};

use super::{
    bulk::Action,
    history::{AggregateVersion, MessageHistory},
};

/// The next step of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextStep {
    /// Explanation for the operator, in a sentence or two.
    pub text: String,
    /// Commands from which an operator may choose.
    pub commands: Vec<String>,
}

/// A command for an operator.
#[derive(Debug, Clone, Copy)]
enum OperatorCommand {
    /// Shows the message with its payload.
    Show,
    /// Explains the message that blocks it.
    ExplainBlocker,
    /// Acts on the message.
    Act(Action),
}

const NONE: &[OperatorCommand] = &[];
const DISCARD: &[OperatorCommand] = &[OperatorCommand::Act(Action::Discard)];
const SHOW_OR_DISCARD: &[OperatorCommand] =
    &[OperatorCommand::Show, OperatorCommand::Act(Action::Discard)];
const UNBLOCK_OR_DISCARD: &[OperatorCommand] =
    &[OperatorCommand::ExplainBlocker, OperatorCommand::Act(Action::Discard)];
const RETRY_OR_DISCARD: &[OperatorCommand] =
    &[OperatorCommand::Act(Action::Retry), OperatorCommand::Act(Action::Discard)];
const REDRIVE_OR_DISCARD: &[OperatorCommand] =
    &[OperatorCommand::Act(Action::Redrive), OperatorCommand::Act(Action::Discard)];

/// An explanation, with the commands for it.
type Advice = (String, &'static [OperatorCommand]);

impl MessageHistory {
    /// Explains what happens to the message next, and what an operator may do.
    pub(super) fn next_step(&self, policy: &Policy) -> NextStep {
        let row = &self.detail.row;
        if let Some(erased_at) = row.erased_at {
            return NextStep { text: erased(erased_at, row.status), commands: Vec::new() };
        }
        let (text, commands) = match row.status {
            MessageStatus::Completed => (self.completed(), NONE),
            MessageStatus::Discarded => {
                ("It is never run any more, as someone said.".to_owned(), NONE)
            }
            MessageStatus::Skipped => (self.skipped().to_owned(), NONE),
            MessageStatus::InProgress => {
                let until = row.locked_until.map(shown).unwrap_or_default();
                let text = format!(
                    "A worker runs it. If that dies, another one takes it over after {until}."
                );
                (text, NONE)
            }
            MessageStatus::Received => {
                ("A worker runs it as soon as one is free.".to_owned(), DISCARD)
            }
            MessageStatus::FailedRetryable => {
                let at = row.next_attempt_at.map(shown).unwrap_or_default();
                let attempts_max = policy.retry.attempts_max;
                let left = i64::from(attempts_max) - i64::from(row.attempts);
                let text =
                    format!("It is run again at {at}; {left} of {attempts_max} runs are left.");
                (text, RETRY_OR_DISCARD)
            }
            MessageStatus::Waiting => self.waiting(policy),
            MessageStatus::FailedTerminal | MessageStatus::Parked => self.dead_letter(policy),
        };
        NextStep {
            text: text + &self.halted(),
            commands: commands.iter().map(|command| self.command(*command)).collect(),
        }
    }

    /// Returns the line of a command for a shell.
    fn command(&self, command: OperatorCommand) -> String {
        let row = &self.detail.row;
        let (id, tenant, consumer) = (quoted(&row.message_id), &row.tenant, &row.consumer);
        match command {
            OperatorCommand::ExplainBlocker => {
                let blocker = self.blocked_by.as_ref();
                let id = blocker.map(|blocker| quoted(&blocker.message_id)).unwrap_or_default();
                format!("oncebox why {id} --tenant {tenant} --consumer {consumer}")
            }
            OperatorCommand::Show => {
                format!("oncebox inbox show {id} --tenant {tenant} --consumer {consumer} --payload")
            }
            OperatorCommand::Act(action) => format!(
                "oncebox inbox {} {id} --tenant {tenant} --consumer {consumer} --because '…'",
                action.name()
            ),
        }
    }

    /// Returns a sentence about the state of the consumer or its tenant, where that keeps the
    /// message from running.
    fn halted(&self) -> String {
        match self.consumer_state.as_str() {
            _ if self.detail.row.status.is_settled() => String::new(),
            state if state.starts_with("its tenant") => format!(" But nothing runs: {state}."),
            state @ ("paused" | "deleting") => {
                format!(" But nothing runs: its consumer is {state}.")
            }
            _ => String::new(),
        }
    }

    /// Returns the reason of the message's status.
    fn reason(&self) -> Option<Reason> {
        self.detail.row.reason.as_deref().and_then(Reason::of)
    }

    /// Explains a completed message.
    fn completed(&self) -> String {
        let mut text = "Its effect is committed. Nothing is to be done; another delivery of it is \
            a duplicate."
            .to_owned();
        if self.detail.row.is_light() {
            text.push_str(LIGHT);
        }
        text
    }

    /// Explains a skipped message.
    fn skipped(&self) -> &'static str {
        if self.reason() == Some(Reason::OldVersion) {
            "It had no effect, since its aggregate was past its version when it came."
        } else {
            "Nobody took its event type when it came, and its consumer says that this is well."
        }
    }

    /// Explains what a waiting message waits for.
    fn waiting(&self, policy: &Policy) -> Advice {
        if let Some(blocker) = &self.blocked_by {
            let (id, status) = (&blocker.message_id, blocker.status);
            let text = format!(
                "It runs when `{id}`, which is {status} and before it in its key, is done."
            );
            return (text, UNBLOCK_OR_DISCARD);
        }
        let text = match (self.missing_versions(), self.waits_until) {
            (Some(missing), Some(until)) => {
                let then = match policy.sequence.as_ref().map(|sequence| sequence.gap) {
                    Some(Gap::Proceed) | None => "runs all the same",
                    Some(Gap::Park) => "is parked",
                };
                let until = shown(until);
                format!("It runs when {missing} of its aggregate came; at {until} it {then}.")
            }
            _ => "Nothing is before it any more: it is due within ten seconds.".to_owned(),
        };
        (text, DISCARD)
    }

    /// Names the versions of the aggregate that are missing before the message's own.
    fn missing_versions(&self) -> Option<String> {
        match self.aggregate {
            Some(AggregateVersion { version, at: Some(at) }) if at + 1 < version => {
                Some(missing(at + 1, version - 1))
            }
            _ => None,
        }
    }

    /// Explains a dead letter or a parked message, with the actions that an operator can take.
    fn dead_letter(&self, policy: &Policy) -> Advice {
        let reason = self.reason();
        let is_without_identity = reason.is_some_and(Reason::is_without_identity);
        match reason {
            Some(Reason::TooLarge) if !self.detail.is_kept => (TOO_LARGE.to_owned(), DISCARD),
            _ if !self.detail.is_kept && !is_without_identity => {
                (WITHOUT_RECORD.to_owned(), DISCARD)
            }
            _ if is_without_identity => (WITHOUT_IDENTITY.to_owned(), SHOW_OR_DISCARD),
            Some(Reason::Collision) if policy.order != Order::None => {
                (COLLISION_IN_ORDER.to_owned(), SHOW_OR_DISCARD)
            }
            Some(Reason::Gap) => self.parked_for_gap(),
            _ => (cure(reason).to_owned() + &self.order_after_redrive(policy), REDRIVE_OR_DISCARD),
        }
    }

    /// Explains a message that was parked for missing versions of its aggregate.
    fn parked_for_gap(&self) -> Advice {
        if let Some(blocker) = &self.blocked_by {
            let text = format!(
                "Versions before its own had not come in time. `{}`, which is before it, is {}.",
                blocker.message_id, blocker.status
            );
            return (text, UNBLOCK_OR_DISCARD);
        }
        let missing = self.missing_versions().unwrap_or_else(|| "what is missing".to_owned());
        let text = format!(
            "It goes on by itself when {missing} of its aggregate came. Redrive it to go on \
                without: what is missing is skipped when it comes."
        );
        (text, REDRIVE_OR_DISCARD)
    }

    /// Returns a sentence about the order of a message's key around its redrive.
    fn order_after_redrive(&self, policy: &Policy) -> String {
        match &self.blocked_by {
            Some(blocker) => format!(
                " It then runs after `{}`, which is before it in its key.",
                blocker.message_id
            ),
            None if policy.order != Order::None && self.ordering_key.is_some() => {
                " Until then later messages of its key wait.".to_owned()
            }
            None => String::new(),
        }
    }
}

const LIGHT: &str =
    " Its row is light (`inbox = \"light\"`): it keeps no key, type, trace or payload.";
const TOO_LARGE: &str = "Its payload has more bytes than `limits.payload_bytes_max` of the policy \
    allows, so that it was not kept. To run it, raise that limit and have it delivered again, \
    under the same id and with the same payload; then redrive it. Or have the producer send less, \
    under another id, and discard this row.";
const WITHOUT_RECORD: &str = "The policy did not keep its record (`payload = \"none\"`, or a \
    payload above `limits.payload_bytes_max`), so that it cannot be run again yet. Have it \
    delivered again, under the same id and with the same payload: produced again, or read again \
    by `oncebox consumer seek`. That brings the record back to this row; then redrive it.";
const WITHOUT_IDENTITY: &str = "It was never understood, and has no identity to run under. Mend the \
    producer, or `identity` in the policy, have it produced again, and discard this row.";
const COLLISION_IN_ORDER: &str = "Its id had come with another payload before, so that it has no \
    place in the order. Look at both; have it produced again under an id of its own if it is a \
    message of its own, and discard this row.";

/// Returns the cure for the cause of a dead letter that can be redriven.
fn cure(reason: Option<Reason>) -> &'static str {
    match reason {
        Some(Reason::Collision) => {
            "Its id had come with another payload before. Look at both; redrive it if it is a \
                message of its own."
        }
        Some(Reason::NoRoute) => {
            "No deployment takes its event type and version. Deploy a handler for it, then \
                redrive."
        }
        Some(Reason::Horizon) => {
            "The inbox does not know it and may have forgotten it, so that it may have run before. \
                Look for its effect; redrive it if there is none."
        }
        Some(Reason::TooLarge) => {
            "Its payload was larger than its consumer takes, and a redelivery has brought it \
                since. Redrive it."
        }
        Some(Reason::Schema) => {
            "Its payload is not what its schema says. Mend the producer or the schema; redrive \
                it when it is valid."
        }
        Some(Reason::ReferenceMalformed) => {
            "The reference to its payload cannot be read. Mend the producer, or \
                `reference.source` in the policy; have it produced again under another id, or edit \
                the payload where the reference stands in it."
        }
        Some(Reason::ReferenceNotAllowed) => {
            "Its tenant may not fetch what it refers to. Change the bucket, the prefix or the \
                access key with `oncebox tenant store set`, or have the producer put the object \
                where the tenant may read; then redrive."
        }
        Some(Reason::ReferenceMissing) => {
            "There is no object where it refers to. Put the object there, then redrive."
        }
        Some(Reason::ReferenceTooLarge) => {
            "The object that it refers to is larger than its consumer takes. Raise \
                `reference.bytes_max` in the policy, or put a smaller object there; then redrive."
        }
        Some(Reason::ReferenceUnavailable) => {
            "The store did not deliver its payload, in any of its runs. Redrive when the store \
                answers again."
        }
        Some(Reason::Crashed) => {
            "The process or its connection died whenever it ran. Deploy a mended version, then \
                redrive."
        }
        Some(Reason::Reject) => "The handler refused it. Redrive when it would decide otherwise.",
        Some(Reason::Park) => {
            "The handler asked for a person. Redrive when it would decide otherwise."
        }
        _ => {
            "It failed too often. Deploy a mended version, raise a limit or mend the tables, \
                then redrive."
        }
    }
}

/// Explains an erased message.
fn erased(at: DateTime<Utc>, status: MessageStatus) -> String {
    let at = shown(at);
    format!(
        "What the inbox held of its payload was erased at {at}. It is {status}, and another \
            delivery of it is a duplicate, whatever its payload."
    )
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
