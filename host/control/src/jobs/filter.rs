//! The messages that a job selects.

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, error::InboxError, outgoing::OutgoingStatus};
use serde::{Deserialize, Serialize};

use super::JobAction;
use crate::{
    messages::filter::{Filter, keys},
    outgoing::filter::OutgoingFilter,
};

/// Most ids of one filter.
const IDS_MAX: usize = 1_000;
/// Longest text of a filter, bytes: the length of an id.
const TEXT_MAX: usize = 600;

/// Conditions on messages. A member that is absent restricts nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobFilter {
    /// Status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Reason of the status, with any details after a colon. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Event type. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// Ordering key; bytes that are no text as `0x` and hexadecimal digits. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Text within the last error, regardless of case. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// First digits of the digest of the version that ran the message last. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Earliest time of receipt. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<DateTime<Utc>>,
    /// Time before which the message was received. Only of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<DateTime<Utc>>,
    /// Whole destination, such as `kafka:orders`. Only of outgoing messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// Id of the message that caused them. Only of outgoing messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Ids, at most 1,000; none for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<String>>,
}

impl JobFilter {
    /// Refuses a filter that an action does not have, and one with too many ids.
    pub(super) fn check(&self, action: JobAction) -> Result<(), InboxError> {
        let of_inbox = [
            ("reason", self.reason.is_some()),
            ("event_type", self.event_type.is_some()),
            ("key", self.key.is_some()),
            ("error", self.error.is_some()),
            ("version", self.version.is_some()),
            ("since", self.since.is_some()),
            ("until", self.until.is_some()),
        ];
        let of_outgoing =
            [("destination", self.destination.is_some()), ("cause", self.cause.is_some())];
        let (foreign, kind) = match action {
            JobAction::Inbox(_) => (&of_outgoing[..], "outgoing messages"),
            JobAction::Outgoing(_) => (&of_inbox[..], "messages of an inbox"),
        };
        if let Some((name, _)) = foreign.iter().find(|(_, is_given)| *is_given) {
            return Err(InboxError::Invalid(format!(
                "`filter.{name}` is of {kind}, and the action `{}` is not",
                action.name()
            )));
        }
        match action {
            JobAction::Inbox(_) => self.message_status().map(drop)?,
            JobAction::Outgoing(_) => self.outgoing_status().map(drop)?,
        }
        self.check_lengths()?;
        match self.ids.as_ref().map_or(1, Vec::len) {
            1..=IDS_MAX => Ok(()),
            0 => Err(InboxError::Invalid("`filter.ids` is empty; leave it out for any".to_owned())),
            ids => Err(InboxError::Invalid(format!(
                "`filter.ids` has {ids} ids; name at most {IDS_MAX}, or select by the other \
                    members"
            ))),
        }
    }

    fn check_lengths(&self) -> Result<(), InboxError> {
        let texts = [
            ("reason", &self.reason),
            ("event_type", &self.event_type),
            ("key", &self.key),
            ("error", &self.error),
            ("version", &self.version),
            ("destination", &self.destination),
            ("cause", &self.cause),
        ];
        let texts = texts.into_iter().filter_map(|(name, text)| Some((name, text.as_ref()?)));
        let ids = self.ids.iter().flatten().map(|id| ("ids", id));
        match texts.chain(ids).find(|(_, text)| text.len() > TEXT_MAX) {
            None => Ok(()),
            Some((name, text)) => Err(InboxError::Invalid(format!(
                "`filter.{name}` has a text of {} bytes; {TEXT_MAX} is the longest",
                text.len()
            ))),
        }
    }

    fn message_status(&self) -> Result<Option<MessageStatus>, InboxError> {
        let known = |name: &String| {
            name.parse().map_err(|_| unknown_status(name, &MessageStatus::NAMES.join(", ")))
        };
        self.status.as_ref().map(known).transpose()
    }

    fn outgoing_status(&self) -> Result<Option<OutgoingStatus>, InboxError> {
        let known = |name: &String| {
            name.parse().map_err(|_| unknown_status(name, &OutgoingStatus::NAMES.join(", ")))
        };
        self.status.as_ref().map(known).transpose()
    }

    /// Returns the conditions on messages of an inbox.
    pub(super) fn of_inbox(&self) -> Result<Filter, InboxError> {
        Ok(Filter {
            status: self.message_status()?,
            reason: self.reason.clone(),
            event_type: self.event_type.clone(),
            ordering_keys: self.key.as_deref().map(keys).unwrap_or_default(),
            error: self.error.clone(),
            version: self.version.clone(),
            since: self.since,
            until: self.until,
            ..Filter::default()
        })
    }

    /// Returns the conditions on outgoing messages.
    pub(super) fn of_outgoing(&self, consumer: Option<&str>) -> Result<OutgoingFilter, InboxError> {
        Ok(OutgoingFilter {
            consumer: consumer.map(str::to_owned),
            status: self.outgoing_status()?,
            destination: self.destination.clone(),
            cause: self.cause.clone(),
            ids: self.ids.clone().unwrap_or_default(),
        })
    }
}

fn unknown_status(name: &str, names: &str) -> InboxError {
    InboxError::Invalid(format!("`filter.status` is `{name}`; use {names}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{messages::bulk::Action, outgoing::act::OutgoingAction};

    // What could go wrong: a member that the action does not have is passed over, so that a job
    // takes more than was asked.
    #[test]
    fn a_member_of_the_other_kind_is_refused() {
        let full: serde_json::Map<String, serde_json::Value> =
            serde_json::from_value(serde_json::json!({
                "reason": "no_route", "event_type": "paid", "key": "k", "error": "e",
                "version": "ab", "since": "2026-01-01T00:00:00Z",
                "until": "2026-01-01T00:00:00Z", "destination": "kafka:a", "cause": "m",
                "status": "parked", "ids": ["a"],
            }))
            .expect("an object");
        let both = ["status", "ids"];
        let outgoing = ["destination", "cause"];
        for (name, value) in full {
            let one = serde_json::json!({ name.clone(): value });
            let filter: JobFilter = serde_json::from_value(one).expect("a filter");
            assert_ne!(filter, JobFilter::default(), "{name} is a member");
            let is_of_both = both.contains(&&*name);
            let is_of_outgoing = outgoing.contains(&&*name);
            let inbox = filter.check(JobAction::Inbox(Action::Redrive));
            assert_eq!(inbox.is_ok(), is_of_both || !is_of_outgoing, "{name}");
            let sent = filter.check(JobAction::Outgoing(OutgoingAction::Discard));
            assert_eq!(sent.is_ok(), is_of_both || is_of_outgoing, "{name}");
        }
    }

    #[test]
    fn ids_and_statuses_are_checked() {
        let ids = |count: usize| JobFilter {
            ids: Some(vec!["a".to_owned(); count]),
            ..JobFilter::default()
        };
        for (count, is_sound) in [(0, false), (1, true), (IDS_MAX, true), (IDS_MAX + 1, false)] {
            assert_eq!(ids(count).check(JobAction::Inbox(Action::Retry)).is_ok(), is_sound);
        }
        for (length, is_sound) in [(TEXT_MAX, true), (TEXT_MAX + 1, false)] {
            let id = JobFilter { ids: Some(vec!["a".repeat(length)]), ..JobFilter::default() };
            let error = JobFilter { error: Some("a".repeat(length)), ..JobFilter::default() };
            for filter in [id, error] {
                assert_eq!(filter.check(JobAction::Inbox(Action::Retry)).is_ok(), is_sound);
            }
        }
        let lost = JobFilter { status: Some("lost".to_owned()), ..JobFilter::default() };
        for action in JobAction::ALL {
            let error = lost.check(action).expect_err("unknown").to_string();
            assert!(error.contains("`lost`") && error.contains("parked"), "{error}");
        }
    }
}
