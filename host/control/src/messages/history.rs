//! The history of one message: each of its runs, and what it waits for.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, Reason, error::InboxError};
use sqlx::PgPool;

use crate::{
    deployments::{DeploymentRole, Slot},
    handles::Messages,
    messages::{list::InboxDetail, next_step::NextStep},
    outgoing::list::CausedMessages,
};

/// Newest history entries that are returned. Operators' actions and failures add entries;
/// `retry.attempts_max` bounds the failures between two redrives.
const HISTORY_MAX: i64 = 200;

/// A message with everything that is known of its processing.
#[derive(Debug, Clone)]
pub struct MessageHistory {
    /// The message.
    pub detail: InboxDetail,
    /// Key that orders it; none for a message without order.
    pub ordering_key: Option<Vec<u8>>,
    /// Failed runs and operators' actions, oldest first.
    pub history: Vec<HistoryEvent>,
    /// Open message of its key that it waits for.
    pub blocked_by: Option<BlockedBy>,
    /// Version that it gives its aggregate.
    pub aggregate: Option<AggregateVersion>,
    /// Time until which it waits for earlier versions of its aggregate.
    pub waits_until: Option<DateTime<Utc>>,
    /// State of its consumer; the tenant's state, in words, where that is not `active`.
    pub consumer_state: String,
    /// Outgoing messages that its run emitted.
    pub outgoing: CausedMessages,
    /// Next step of the message.
    pub next: NextStep,
}

/// An event in the history of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryEvent {
    /// Time of the event.
    pub at: DateTime<Utc>,
    /// Kind: `failed`, `crashed`, `interrupted`, `redriven`, `discarded`, `retried`, `edited`,
    /// `restored`, `erased` or `replayed`.
    pub event: String,
    /// Number of the run, since the message was first received or last redriven.
    pub attempt: Option<i32>,
    /// Digest of the version that ran it.
    pub version: Option<String>,
    /// Reason of the run's failure, or the reason that an operator gave.
    pub reason: Option<String>,
    /// Error text of the failure.
    pub error: Option<String>,
    /// Actor, where an operator acted.
    pub actor: Option<String>,
}

/// A message that holds back later ones of its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockedBy {
    /// Its id.
    pub message_id: String,
    /// Its status.
    pub status: MessageStatus,
    /// Reason for that state.
    pub reason: Option<String>,
}

/// A message's aggregate version, with the present version of the aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateVersion {
    /// Version that the message gives the aggregate.
    pub version: i64,
    /// Present version of the aggregate; none before the first.
    pub at: Option<i64>,
}

#[derive(sqlx::FromRow)]
struct OrderRow {
    consumer_id: i32,
    ordering_key: Option<Vec<u8>>,
    sequence_version: Option<i64>,
    at: Option<i64>,
    waits_until: Option<DateTime<Utc>>,
}

#[derive(sqlx::FromRow)]
struct HistoryRow {
    message_id: String,
    at: DateTime<Utc>,
    event: String,
    attempt: Option<i32>,
    version_id: Option<i32>,
    reason: Option<String>,
    error: Option<String>,
    actor: Option<String>,
}

impl Messages<'_> {
    /// Returns a message with its history and its next step.
    pub async fn message_history(
        &self,
        tenant: &str,
        consumer: &str,
        message_id: &str,
    ) -> Result<MessageHistory, InboxError> {
        const ORDER: &str = "SELECT consumer_id, ordering_key, sequence_version, waits_until, \
            CASE WHEN sequence_version IS NOT NULL THEN oncebox.version_of(consumer_id, \
            retention_class, ordering_hash, ordering_key) END AS at \
            FROM oncebox.inbox_message WHERE tenant_name = $1 AND consumer_name = $2 AND \
            message_id = $3";
        let detail = self.inbox_show(tenant, consumer, message_id).await?;
        let row = self.0.consumers().get(tenant, consumer).await?;
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let query = sqlx::query_as(ORDER).bind(tenant).bind(consumer).bind(message_id);
        let found: Option<OrderRow> = query.fetch_optional(&database.pool).await?;
        let found = found.ok_or_else(|| {
            InboxError::NotFound(format!("message `{message_id}` was removed just now"))
        })?;
        let mut histories =
            self.histories(&database.pool, found.consumer_id, &[message_id.to_owned()]).await?;
        let history = histories.remove(message_id).unwrap_or_default();
        let blocked_by = blocked_by(&database.pool, found.consumer_id, message_id).await?;
        let aggregate =
            found.sequence_version.map(|version| AggregateVersion { version, at: found.at });
        let outgoing =
            self.0.outgoing().caused(&database.pool, found.consumer_id, message_id).await?;
        let consumer_state = if row.tenant_state.is_active() {
            row.state.to_string()
        } else {
            format!("its tenant is {}", row.tenant_state)
        };
        let mut message = MessageHistory {
            detail,
            ordering_key: found.ordering_key,
            history,
            blocked_by,
            aggregate,
            waits_until: found.waits_until,
            consumer_state,
            outgoing,
            next: NextStep { text: String::new(), commands: Vec::new() },
        };
        message.next = message.next_step(&row.policy()?);
        if message.detail.row.reason.as_deref() == Some(Reason::NoRoute.as_str()) {
            message.next.text.push_str(&self.deployed_types(found.consumer_id).await?);
        }
        Ok(message)
    }

    /// Returns a sentence with the event types that deployments of a consumer take.
    async fn deployed_types(&self, consumer_id: i32) -> Result<String, InboxError> {
        const SHOWN_MAX: usize = 10;
        let live = self.0.deployments().list(consumer_id, false).await?;
        let slot = |slot: &Slot| match &slot.event_versions {
            Some(versions) => format!("`{}` in versions `{versions}`", slot.event_type),
            None => format!("`{}`", slot.event_type),
        };
        let types: BTreeSet<_> = live
            .iter()
            .filter(|deployment| deployment.role == DeploymentRole::Stable)
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

    /// Reads the histories of messages, by id.
    pub(crate) async fn histories(
        &self,
        database: &PgPool,
        consumer_id: i32,
        message_ids: &[String],
    ) -> Result<HashMap<String, Vec<HistoryEvent>>, InboxError> {
        const HISTORY: &str = "SELECT h.message_id, h.at, h.event, h.attempt, h.version_id, \
            h.reason, h.error, h.actor \
            FROM unnest($2::text[]) AS m(id), LATERAL (SELECT * FROM oncebox.inbox_history \
                WHERE consumer_id = $1 AND message_id = m.id ORDER BY history_id DESC LIMIT $3) h \
                ORDER BY h.history_id";
        let query = sqlx::query_as(HISTORY).bind(consumer_id).bind(message_ids).bind(HISTORY_MAX);
        let entries: Vec<HistoryRow> = query.fetch_all(database).await?;
        let digests =
            self.digests(entries.iter().filter_map(|entry| entry.version_id).collect()).await?;
        let mut histories: HashMap<_, Vec<_>> = HashMap::new();
        for entry in entries {
            histories.entry(entry.message_id).or_default().push(HistoryEvent {
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

/// Finds the first open message before this one in its key.
async fn blocked_by(
    database: &PgPool,
    consumer_id: i32,
    message_id: &str,
) -> Result<Option<BlockedBy>, InboxError> {
    const BLOCKED_BY: &str = "SELECT f.message_id, f.status, f.reason FROM oncebox.inbox i JOIN \
        oncebox.inbox f \
        ON f.consumer_id = i.consumer_id AND f.retention_class = i.retention_class AND \
        f.ordering_hash = i.ordering_hash \
        AND (f.ordering_position < i.ordering_position \
            OR f.ordering_position = i.ordering_position AND f.message_id COLLATE \"C\" < \
            i.message_id) AND f.status NOT IN ('completed', 'skipped', 'discarded') \
        WHERE i.consumer_id = $1 AND i.message_id = $2 AND i.status NOT IN ('completed', \
        'skipped', 'discarded') \
        ORDER BY f.ordering_position, f.message_id COLLATE \"C\" LIMIT 1";
    let found: Option<(String, MessageStatus, Option<String>)> = sqlx::query_as(BLOCKED_BY)
        .bind(consumer_id)
        .bind(message_id)
        .fetch_optional(database)
        .await?;
    Ok(found.map(|(message_id, status, reason)| BlockedBy { message_id, status, reason }))
}
