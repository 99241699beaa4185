//! The facts of a consumer's readiness that are read from many rows of its inbox, and the checks of
//! `doctor` on its database.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, identity::is_by_position, policy::Policy};
use sqlx::PgPool;

use crate::{consumers::Consumer, doctor::Finding, handles::Consumers, hosts::HEARTBEAT_TIMEOUT};

/// Newest messages of a consumer whose ids are looked at.
const LOOKED_AT_MAX: i64 = 10_000;
/// Dead letters and parked messages that are read at most.
pub(super) const DEAD_MAX: i64 = 100_000;

/// Checks of `doctor` on which the memory of ids rests.
pub(super) const OF_DEDUP: &[&str] =
    &["ids", "partitions", "partition_leftovers", "indexes", "durability"];
/// Checks of `doctor` on which the commit of effect and completion rests.
pub(super) const OF_TRANSACTION: &[&str] =
    &["guard", "guard_rows", "host_code", "host_functions", "foreign_triggers"];
/// Checks of `doctor` that find ways out of the database.
pub(super) const OF_OUTSIDE: &[&str] = &["extensions", "foreign_servers", "reached_functions"];

/// Messages of a consumer, as its inbox shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SeenMessages {
    /// Newest decoded messages that were looked at, received under the present identity.
    pub messages: i64,
    /// Those of them whose id is the position of their record.
    pub by_position: i64,
    /// Dead letters and parked messages that were read; at most 100,000.
    pub dead: i64,
    /// Those of them whose record was not kept, so that they cannot run again.
    pub without_record: i64,
    /// Parked messages with a known id and another payload.
    pub collisions: i64,
    /// Parked records that are no message: without a usable id or type, or not decodable.
    pub undecodable: i64,
}

impl SeenMessages {
    /// Returns whether there may be dead letters and parked messages beyond those that were read.
    pub(super) fn is_cut_off(&self) -> bool {
        self.dead >= DEAD_MAX
    }
}

/// Facts of the database with a consumer's inbox. They cost the reading of many rows.
#[derive(Debug, Clone, Default)]
pub struct InboxScan {
    /// Messages in the inbox.
    pub seen: SeenMessages,
    /// Findings of `doctor` on the database.
    pub findings: Vec<Finding>,
}

/// The id of a message, with the place of its record.
#[derive(sqlx::FromRow)]
struct SeenId {
    message_id: String,
    topic: String,
    partition: i32,
    offset: i64,
}

impl Consumers<'_> {
    /// Reads a consumer's inbox for its readiness, and runs checks of `doctor` on its database. It
    /// reads up to a million rows, and changes nothing.
    ///
    /// # Errors
    /// An error of the host's database, or of the tenant's own.
    pub async fn scan_inbox(
        &self,
        consumer: &Consumer,
        policy: &Policy,
    ) -> Result<InboxScan, InboxError> {
        let tenant = self.0.tenants().get(&consumer.tenant).await?;
        let database = self.0.tenant_databases().get(&tenant)?;
        let since = self.identity_since(consumer).await?;
        let mut seen = dead_letters(&database.pool, consumer.consumer_id).await?;
        let ids = newest_ids(&database.pool, consumer.consumer_id, since).await?;
        let is_position = |id: &&SeenId| {
            let SeenId { message_id, topic, partition, offset } = id;
            is_by_position(&policy.identity, message_id, topic, *partition, *offset)
        };
        seen.messages = ids.len() as i64;
        seen.by_position = ids.iter().filter(is_position).count() as i64;
        let checks = [OF_DEDUP, OF_TRANSACTION, OF_OUTSIDE].concat();
        let findings =
            self.0.doctor().checks_of_consumer(&tenant, consumer.consumer_id, &checks).await?;
        Ok(InboxScan { seen, findings })
    }

    /// Returns the time since when every host finds ids as the policy says now.
    async fn identity_since(&self, consumer: &Consumer) -> Result<DateTime<Utc>, InboxError> {
        // By then a host that ran the policy before has restarted the consumer, or is gone.
        let since = format!(
            "SELECT coalesce(max(a.at) + {HEARTBEAT_TIMEOUT}, $3) FROM oncebox.audit a WHERE \
                a.tenant = $1 AND a.subject = $2 AND a.action = 'consumer.policy' AND a.at >= $3 \
                AND EXISTS (SELECT FROM jsonb_array_elements(a.details -> 'changes') c WHERE c ->> \
                'key' ~ '^(identity|wire_format|topics)')"
        );
        let since = sqlx::query_scalar(sqlx::AssertSqlSafe(since))
            .bind(&consumer.tenant)
            .bind(format!("{}/{}", consumer.tenant, consumer.name))
            .bind(consumer.created_at);
        Ok(since.fetch_one(&self.0.pool).await?)
    }
}

/// Reads the ids of the newest decoded messages that were received since a time.
async fn newest_ids(
    pool: &PgPool,
    consumer_id: i32,
    since: DateTime<Utc>,
) -> Result<Vec<SeenId>, InboxError> {
    // A record that was never decoded has an empty type; a light row has none.
    const NEWEST: &str = "SELECT n.message_id, n.topic, n.partition, n.\"offset\" FROM ( \
            SELECT i.message_id, i.topic, i.partition, i.\"offset\", i.event_type \
            FROM oncebox.inbox i WHERE i.consumer_id::bigint = $1 AND i.received_at >= $2 \
            ORDER BY i.received_at DESC LIMIT $3) n \
        WHERE n.event_type IS DISTINCT FROM ''";
    let ids = sqlx::query_as(NEWEST).bind(i64::from(consumer_id)).bind(since).bind(LOOKED_AT_MAX);
    Ok(ids.fetch_all(pool).await?)
}

/// Counts dead letters and parked messages by kind, up to a bound.
async fn dead_letters(pool: &PgPool, consumer_id: i32) -> Result<SeenMessages, InboxError> {
    const DEAD: &str = "SELECT count(*), \
            count(*) FILTER (WHERE oncebox.has_lost_record(d.status, d.reason, d.headers)), \
            count(*) FILTER (WHERE d.reason ~ '^collision'), \
            count(*) FILTER (WHERE d.reason ~ '^(undecodable|unclaimable)') \
        FROM (SELECT i.status, i.reason, i.headers FROM oncebox.inbox i WHERE i.consumer_id = $1 \
            AND i.status IN ('failed_terminal', 'parked') AND i.status <> 'completed' LIMIT $2) d";
    let (dead, without_record, collisions, undecodable): (i64, i64, i64, i64) =
        sqlx::query_as(DEAD).bind(consumer_id).bind(DEAD_MAX).fetch_one(pool).await?;
    let (messages, by_position) = (0, 0);
    Ok(SeenMessages { messages, by_position, dead, without_record, collisions, undecodable })
}
