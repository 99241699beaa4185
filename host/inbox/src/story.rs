//! The whole story of one message: what became of it run by run, what it waits for, and what can be
//! done about it.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use sqlx::PgPool;

use crate::{
    admin::Admin,
    browse::InboxDetail,
    deployment::{Role, Slot},
    error::InboxError,
    policy::Policy,
};

/// Entries of a story, the newest; what people and failures leave behind is bounded by
/// `retry.attempts_max` between two redrives.
const HISTORY_MAX: i64 = 200;

/// A message with all that is known of its way.
#[derive(Debug, Clone)]
pub struct Story {
    /// The message.
    pub detail: InboxDetail,
    /// What it is in order with.
    pub ordering_key: Option<Vec<u8>>,
    /// Failed runs, and what people did, in order.
    pub history: Vec<StoryEvent>,
    /// The open message of its key that it waits for.
    pub behind: Option<Behind>,
    /// The version that it makes of its aggregate.
    pub aggregate: Option<AggregateVersion>,
    /// Until when it waits for versions before its own.
    pub waits_until: Option<DateTime<Utc>>,
    /// State of its consumer, and of its tenant.
    pub consumer_state: String,
    /// What comes next.
    pub next: Next,
}

/// Something that happened to a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoryEvent {
    /// When.
    pub at: DateTime<Utc>,
    /// `failed`, `crashed`, `interrupted`, `redriven`, `discarded`, `retried`, `revised` or
    /// `restored`.
    pub event: String,
    /// Which run, since the message was first received or last redriven.
    pub attempt: Option<i32>,
    /// Digest of the version that ran it.
    pub version: Option<String>,
    /// Of a run, its reason; of a person, their words.
    pub reason: Option<String>,
    /// What the failure said.
    pub error: Option<String>,
    /// Who, where it was a person.
    pub actor: Option<String>,
}

/// A message that holds back others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behind {
    /// Its id.
    pub message_id: String,
    /// Its state.
    pub status: String,
    /// Why it is in it.
    pub reason: Option<String>,
}

/// A version, and where its aggregate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateVersion {
    /// The version that the message makes.
    pub version: i64,
    /// The version that the aggregate is at; none before the first.
    pub at: Option<i64>,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// In a sentence or two.
    pub text: String,
    /// Commands that bring it on, for whoever decides so.
    pub commands: Vec<String>,
}

#[derive(sqlx::FromRow)]
struct Place {
    consumer_id: i32,
    ordering_key: Option<Vec<u8>>,
    sequence_version: Option<i64>,
    at: Option<i64>,
    waits_until: Option<DateTime<Utc>>,
}

#[derive(sqlx::FromRow)]
struct Entry {
    message_id: String,
    at: DateTime<Utc>,
    event: String,
    attempt: Option<i32>,
    version_id: Option<i32>,
    reason: Option<String>,
    error: Option<String>,
    actor: Option<String>,
}

impl Admin {
    /// The story of a message.
    pub async fn story(
        &self,
        tenant: &str,
        consumer: &str,
        message_id: &str,
    ) -> Result<Story, InboxError> {
        const PLACE: &str = "SELECT consumer_id, ordering_key, sequence_version, waits_until, \
            CASE WHEN sequence_version IS NOT NULL THEN oncebox.version_of(consumer_id, \
            retention_class, ordering_hash, ordering_key) END AS at \
            FROM oncebox.inbox_message WHERE tenant_name = $1 AND consumer_name = $2 AND \
            message_id = $3";
        let detail = self.inbox_show(tenant, consumer, message_id).await?;
        let row = self.consumer(tenant, consumer).await?;
        let place = self.place(&self.tenant(tenant).await?)?;
        let query = sqlx::query_as(PLACE).bind(tenant).bind(consumer).bind(message_id);
        let found: Option<Place> = query.fetch_optional(&place.pool).await?;
        let found = found.ok_or_else(|| {
            InboxError::NotFound(format!("message `{message_id}` was removed just now"))
        })?;
        let mut histories =
            self.histories(&place.pool, found.consumer_id, &[message_id.to_owned()]).await?;
        let history = histories.remove(message_id).unwrap_or_default();
        let behind = behind(&place.pool, found.consumer_id, message_id).await?;
        let aggregate =
            found.sequence_version.map(|version| AggregateVersion { version, at: found.at });
        let consumer_state = if row.tenant_state == "active" {
            row.state.clone()
        } else {
            format!("its tenant is {}", row.tenant_state)
        };
        let mut story = Story {
            detail,
            ordering_key: found.ordering_key,
            history,
            behind,
            aggregate,
            waits_until: found.waits_until,
            consumer_state,
            next: Next { text: String::new(), commands: Vec::new() },
        };
        story.next = story.what_comes_next(&row.policy()?);
        if story.detail.row.reason.as_deref() == Some("no_route") {
            story.next.text.push_str(&self.deployed_types(found.consumer_id).await?);
        }
        Ok(story)
    }

    /// Returns a sentence with the event types that deployments of a consumer take.
    async fn deployed_types(&self, consumer_id: i32) -> Result<String, InboxError> {
        const SHOWN_MAX: usize = 10;
        let live = self.deployment_list(consumer_id, false).await?;
        let slot = |slot: &Slot| match &slot.event_versions {
            Some(versions) => format!("`{}` in versions `{versions}`", slot.event_type),
            None => format!("`{}`", slot.event_type),
        };
        let types: BTreeSet<_> = live
            .iter()
            .filter(|deployment| deployment.role == Role::Stable)
            .map(|d| slot(&d.slot))
            .collect();
        let shown: Vec<_> = types.iter().take(SHOWN_MAX).map(String::as_str).collect();
        Ok(match types.len() {
            0 => " Nothing is deployed.".to_owned(),
            count if count > SHOWN_MAX => {
                format!(" Deployed are {}, and {} more.", shown.join(", "), count - SHOWN_MAX)
            }
            _ => format!(" Deployed: {}.", shown.join(", ")),
        })
    }

    /// What became of messages, by id.
    pub(crate) async fn histories(
        &self,
        place: &PgPool,
        consumer_id: i32,
        message_ids: &[String],
    ) -> Result<HashMap<String, Vec<StoryEvent>>, InboxError> {
        const HISTORY: &str = "SELECT h.message_id, h.at, h.event, h.attempt, h.version_id, \
            h.reason, h.error, h.actor \
            FROM unnest($2::text[]) AS m(id), LATERAL (SELECT * FROM oncebox.inbox_history \
                WHERE consumer_id = $1 AND message_id = m.id ORDER BY history_id DESC LIMIT $3) h \
                ORDER BY h.history_id";
        let query = sqlx::query_as(HISTORY).bind(consumer_id).bind(message_ids).bind(HISTORY_MAX);
        let entries: Vec<Entry> = query.fetch_all(place).await?;
        let digests =
            self.digests(entries.iter().filter_map(|entry| entry.version_id).collect()).await?;
        let mut histories: HashMap<_, Vec<_>> = HashMap::new();
        for entry in entries {
            histories.entry(entry.message_id).or_default().push(StoryEvent {
                at: entry.at,
                event: entry.event,
                attempt: entry.attempt,
                version: entry.version_id.and_then(|id| digests.get(&id).cloned()),
                reason: entry.reason,
                error: entry.error,
                actor: entry.actor,
            });
        }
        Ok(histories)
    }
}

/// The first open message of the key before this one.
async fn behind(
    place: &PgPool,
    consumer_id: i32,
    message_id: &str,
) -> Result<Option<Behind>, InboxError> {
    const BEHIND: &str = "SELECT f.message_id, f.status, f.reason FROM oncebox.inbox i JOIN \
        oncebox.inbox f \
        ON f.consumer_id = i.consumer_id AND f.retention_class = i.retention_class AND \
        f.ordering_hash = i.ordering_hash \
        AND (f.ordering_position < i.ordering_position \
            OR f.ordering_position = i.ordering_position AND f.message_id COLLATE \"C\" < \
            i.message_id) AND f.status NOT IN ('completed', 'skipped', 'discarded') \
        WHERE i.consumer_id = $1 AND i.message_id = $2 AND i.status NOT IN ('completed', \
        'skipped', 'discarded') \
        ORDER BY f.ordering_position, f.message_id COLLATE \"C\" LIMIT 1";
    let found: Option<(String, String, Option<String>)> =
        sqlx::query_as(BEHIND).bind(consumer_id).bind(message_id).fetch_optional(place).await?;
    Ok(found.map(|(message_id, status, reason)| Behind { message_id, status, reason }))
}

impl Story {
    fn what_comes_next(&self, policy: &Policy) -> Next {
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
                        .behind
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
        Next { text: text + &paused, commands: verbs.iter().map(command).collect() }
    }

    fn waits(&self, policy: &Policy) -> (String, &'static [&'static str]) {
        if let Some(behind) = &self.behind {
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
                    Some(crate::policy::Gap::GoOn) | None => "runs all the same",
                    Some(crate::policy::Gap::Park) => "is parked",
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

    /// What a person can do with a dead letter or a parked message.
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
            "collision" if policy.order != crate::policy::Order::None => {
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
            "gap" if let Some(behind) = &self.behind => {
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
        let behind = match &self.behind {
            Some(behind) => format!(
                " It then runs after `{}`, which is before it in its key.",
                behind.message_id
            ),
            None if policy.order != crate::policy::Order::None && self.ordering_key.is_some() => {
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

/// A word of a shell's command line.
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
