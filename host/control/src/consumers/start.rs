//! Starts of consumers, one of which may end the process: no row of a tenant ends a host twice.
//!
//! A host writes a mark, starts the consumer, and takes the mark away when it has survived that.
//! Whoever comes next finds the marks of hosts that are gone and judges them. A policy that no host
//! of this build has survived yet is *unproven*: one host at a time tries it, and each host tries
//! one such consumer at a time, so that the mark of a host that ended in that part names the one it
//! was about, which is *quarantined*: no host starts it until its policy is another, or an operator
//! resumes it. A host that ended later in a start, or in that of a policy that was survived before,
//! may have had any reason, such as a power cut: what it was starting is suspected, and quarantined
//! when that comes again.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::PgConnection;

use crate::{audit::Subject, control::Admin, hosts::GONE};

/// Hosts in a row that may end during the start of a policy that was survived before.
const SUSPICIONS_MAX: i32 = 3;
/// The same of one that no host survived yet.
const SUSPICIONS_UNPROVEN_MAX: i32 = 2;
/// Hosts that a consumer may end before another policy does not release it any more, and only an
/// operator does.
pub const DEATHS_MAX: i32 = 3;

/// A consumer that no host starts, since its start ended one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Quarantine {
    /// Since when.
    pub at: DateTime<Utc>,
    /// The host that ended: the name of the machine and the id of the process.
    pub host: String,
    /// Hosts that it ended so far.
    pub deaths: i32,
}

/// A [`Quarantine`] in a query of `oncebox.consumer c` that has `oncebox.consumer_start s` joined:
/// null for none.
pub(crate) const QUARANTINE: &str = "CASE WHEN s.quarantined_revision = c.policy_revision OR \
    s.quarantined_revision IS NOT NULL AND s.deaths >= 3 \
    THEN jsonb_build_object('at', s.quarantined_at, 'host', s.quarantined_host, 'deaths', \
    s.deaths) END AS quarantine";

impl Quarantine {
    /// What happened, and what to do.
    pub fn text(&self, tenant: &str, consumer: &str) -> String {
        let Self { at, host, deaths } = self;
        let by_policy = if *deaths < DEATHS_MAX { "change its policy, or " } else { "" };
        format!(
            "quarantined: host `{host}` ended while it started this consumer, which was seen at \
                {}; {by_policy}let an operator resume it: \
             `oncebox consumer resume {consumer} --tenant {tenant}`",
            at.format("%Y-%m-%d %H:%M:%S UTC")
        )
    }
}

/// What a host is to do that wants to start a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartTurn {
    /// Start it; the mark is written.
    Begin(Start),
    /// It is unproven: ask again as the only one of this host that starts such a consumer.
    Alone,
    /// Another host is trying it; ask again.
    Elsewhere(String),
    /// Its policy is another by now, or it is gone.
    Changed,
    /// Leave it.
    Quarantined(Quarantine),
}

/// A start under a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// The consumer.
    pub consumer_id: i32,
    /// The host.
    pub host_id: i64,
    /// The policy, by its revision.
    pub policy_revision: i64,
    /// No host of this build survived it yet.
    pub is_unproven: bool,
    /// A host ended during its start before.
    pub is_suspected: bool,
}

/// A consumer that is quarantined from now on.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Quarantined {
    /// Name of its tenant.
    pub tenant: String,
    /// Its name.
    pub consumer: String,
    /// The host that ended.
    pub host: String,
}

#[derive(sqlx::FromRow)]
struct Known {
    revision: i64,
    policy_revision: i64,
    proven_revision: Option<i64>,
    proven_build: Option<String>,
    suspicions: i32,
    deaths: i32,
    quarantined_revision: Option<i64>,
    quarantined_at: Option<DateTime<Utc>>,
    quarantined_host: Option<String>,
}

impl Known {
    fn quarantine(&self) -> Option<Quarantine> {
        let revision = self
            .quarantined_revision
            .filter(|revision| *revision == self.policy_revision || self.deaths >= DEATHS_MAX);
        revision?;
        Some(Quarantine {
            at: self.quarantined_at?,
            host: self.quarantined_host.clone()?,
            deaths: self.deaths,
        })
    }
}

impl Admin {
    /// A host wants to start a consumer whose row it read at a revision. The mark is committed
    /// before this answers.
    pub async fn begin_start(
        &self,
        (host_id, host): (i64, &str),
        (consumer_id, revision): (i32, i64),
        build: &str,
        is_alone: bool,
    ) -> Result<StartTurn, InboxError> {
        const ROW: &str = "INSERT INTO oncebox.consumer_start (consumer_id) \
            SELECT consumer_id FROM oncebox.consumer WHERE consumer_id = $1 ON CONFLICT DO NOTHING";
        const KNOWN: &str = "SELECT c.revision, c.policy_revision, s.proven_revision, \
            s.proven_build, s.suspicions, s.deaths, \
            s.quarantined_revision, s.quarantined_at, s.quarantined_host \
            FROM oncebox.consumer_start s JOIN oncebox.consumer c USING (consumer_id) WHERE \
            s.consumer_id = $1 FOR NO KEY UPDATE OF s";
        const ELSEWHERE: &str = "SELECT host FROM oncebox.start_mark WHERE consumer_id = $1 AND \
            host_id <> $2 ORDER BY host_id LIMIT 1";
        const MARK: &str = "INSERT INTO oncebox.start_mark (consumer_id, host_id, host, \
            policy_revision, is_unproven) VALUES ($1, $2, $3, $4, $5) \
            ON CONFLICT (consumer_id, host_id) DO UPDATE SET policy_revision = \
            excluded.policy_revision, is_unproven = excluded.is_unproven, \
                is_settling = false, started_at = now()";
        let mut tx = self.pool.begin().await?;
        // Before any row: whoever judges the dead holds this table against everybody, and then
        // changes rows.
        sqlx::query("LOCK TABLE oncebox.start_mark IN ROW EXCLUSIVE MODE")
            .execute(&mut *tx)
            .await?;
        sqlx::query(ROW).bind(consumer_id).execute(&mut *tx).await?;
        let known: Option<Known> =
            sqlx::query_as(KNOWN).bind(consumer_id).fetch_optional(&mut *tx).await?;
        let Some(known) =
            known.filter(|known| known.policy_revision <= revision && revision <= known.revision)
        else {
            return Ok(StartTurn::Changed);
        };
        if let Some(quarantine) = known.quarantine() {
            return Ok(StartTurn::Quarantined(quarantine));
        }
        let is_proven = known.proven_revision == Some(known.policy_revision)
            && known.proven_build.as_deref() == Some(build);
        if !is_proven {
            let elsewhere: Option<String> = sqlx::query_scalar(ELSEWHERE)
                .bind(consumer_id)
                .bind(host_id)
                .fetch_optional(&mut *tx)
                .await?;
            if let Some(host) = elsewhere {
                return Ok(StartTurn::Elsewhere(host));
            }
            if !is_alone {
                return Ok(StartTurn::Alone);
            }
        }
        let mark = sqlx::query(MARK)
            .bind(consumer_id)
            .bind(host_id)
            .bind(host)
            .bind(known.policy_revision)
            .bind(!is_proven);
        mark.execute(&mut *tx).await?;
        if hooks::sabotage("mark_after_start") {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        let Known { policy_revision, suspicions, .. } = known;
        Ok(StartTurn::Begin(Start {
            consumer_id,
            host_id,
            policy_revision,
            is_unproven: !is_proven,
            is_suspected: suspicions > 0,
        }))
    }

    /// The part is over that one consumer of a host has to itself.
    pub async fn start_settles(&self, start: &Start) -> Result<(), InboxError> {
        const SETTLES: &str = "UPDATE oncebox.start_mark SET is_settling = true WHERE consumer_id \
            = $1 AND host_id = $2";
        sqlx::query(SETTLES)
            .bind(start.consumer_id)
            .bind(start.host_id)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// A start is over, and the host lives: where it was so silent that it was taken for gone, what
    /// followed from that is undone. With a build: the start was survived whole, which is known
    /// from now on.
    pub async fn end_start(
        &self,
        start: &Start,
        proven_by: Option<&str>,
    ) -> Result<(), InboxError> {
        const SURVIVED: &str = "UPDATE oncebox.consumer_start SET \
                proven_revision = CASE WHEN $4::text IS NULL THEN proven_revision ELSE $3 END, \
                proven_build = coalesce($4, proven_build), \
                suspicions = CASE WHEN $4 IS NULL THEN greatest(suspicions - 1, 0) ELSE 0 END, \
                deaths = deaths - mine::int, \
                quarantined_revision = CASE WHEN mine THEN NULL ELSE quarantined_revision END, \
                quarantined_at = CASE WHEN mine THEN NULL ELSE quarantined_at END, \
                quarantined_host = CASE WHEN mine THEN NULL ELSE quarantined_host END \
            FROM (SELECT consumer_id AS id, coalesce(quarantined_host_id = $2 AND \
            quarantined_revision = $3, false) AS mine \
                FROM oncebox.consumer_start WHERE consumer_id = $1 FOR NO KEY UPDATE) s WHERE \
                consumer_id = s.id";
        let mut tx = self.pool.begin().await?;
        const OVER: &str = "DELETE FROM oncebox.start_mark WHERE consumer_id = $1 AND host_id = $2";
        let over =
            sqlx::query(OVER).bind(start.consumer_id).bind(start.host_id).execute(&mut *tx).await?;
        // Where the mark is gone, this host was taken for gone with it.
        if proven_by.is_some() || over.rows_affected() == 0 {
            let survived = sqlx::query(SURVIVED)
                .bind(start.consumer_id)
                .bind(start.host_id)
                .bind(start.policy_revision)
                .bind(proven_by);
            survived.execute(&mut *tx).await?;
        }
        Ok(tx.commit().await?)
    }

    /// Judge the marks of hosts that are gone. What is quarantined by that, once.
    pub async fn judge_gone_starts(&self) -> Result<Vec<Quarantined>, InboxError> {
        let gone = format!(
            "FROM oncebox.start_mark m WHERE NOT EXISTS (SELECT FROM oncebox.host h WHERE \
                h.host_id = m.host_id AND h.seen_at > now() - {GONE})"
        );
        let ask = sqlx::AssertSqlSafe(format!("SELECT EXISTS (SELECT {gone})"));
        if !sqlx::query_scalar::<_, bool>(ask).fetch_one(&self.pool).await? {
            return Ok(Vec::new());
        }
        let judge = format!(
            "WITH gone AS (DELETE FROM oncebox.start_mark WHERE (consumer_id, host_id) IN (SELECT \
                m.consumer_id, m.host_id {gone}) RETURNING *), \
             judged AS (SELECT DISTINCT ON (g.consumer_id) g.*, \
                    g.is_unproven AND NOT g.is_settling OR s.suspicions + 1 >= CASE WHEN \
                    g.is_unproven THEN {SUSPICIONS_UNPROVEN_MAX} ELSE {SUSPICIONS_MAX} END AS \
                    is_it \
                FROM gone g JOIN oncebox.consumer_start s USING (consumer_id) JOIN \
                oncebox.consumer c USING (consumer_id) \
                WHERE g.policy_revision = c.policy_revision OR g.is_unproven AND NOT g.is_settling \
                ORDER BY g.consumer_id, g.is_unproven AND NOT g.is_settling DESC, g.host_id), \
             changed AS (UPDATE oncebox.consumer_start s SET \
                    suspicions = CASE WHEN is_it THEN 0 ELSE s.suspicions + 1 END, deaths = \
                    s.deaths + is_it::int, \
                    quarantined_revision = CASE WHEN is_it THEN j.policy_revision ELSE \
                    s.quarantined_revision END, \
                    quarantined_at = CASE WHEN is_it THEN now() ELSE s.quarantined_at END, \
                    quarantined_host_id = CASE WHEN is_it THEN j.host_id ELSE \
                    s.quarantined_host_id END, \
                    quarantined_host = CASE WHEN is_it THEN j.host ELSE s.quarantined_host END \
                FROM judged j WHERE j.consumer_id = s.consumer_id RETURNING s.consumer_id, \
                j.is_it, j.host) \
             SELECT t.name AS tenant, c.name AS consumer, changed.host FROM changed JOIN \
             oncebox.consumer c USING (consumer_id) \
                JOIN oncebox.tenant t USING (tenant_id) WHERE changed.is_it ORDER BY 1, 2"
        );
        let mut tx = self.pool.begin().await?;
        sqlx::query("LOCK TABLE oncebox.start_mark IN SHARE ROW EXCLUSIVE MODE")
            .execute(&mut *tx)
            .await?;
        let quarantined: Vec<Quarantined> =
            sqlx::query_as(sqlx::AssertSqlSafe(judge)).fetch_all(&mut *tx).await?;
        for one in &quarantined {
            let subject = Subject::of(&one.tenant, &one.consumer);
            self.audit(&mut tx, "consumer.quarantine", subject, json!({ "host": one.host }))
                .await?;
        }
        tx.commit().await?;
        Ok(quarantined)
    }

    /// Let hosts start a quarantined consumer again, which is an operator's to decide. False: it is
    /// none.
    pub async fn release_consumer(&self, tenant: &str, name: &str) -> Result<bool, InboxError> {
        let consumer = self.consumer(tenant, name).await?;
        if consumer.quarantine.is_none() {
            return Ok(false);
        }
        let mut tx = self.pool.begin().await?;
        const RELEASE: &str = "UPDATE oncebox.consumer_start SET quarantined_revision = NULL, \
            quarantined_at = NULL, quarantined_host = NULL, \
            quarantined_host_id = NULL, proven_revision = NULL, deaths = 0 WHERE consumer_id = $1 \
            AND quarantined_revision IS NOT NULL";
        let released = sqlx::query(RELEASE)
            .bind(consumer.consumer_id)
            .execute(&mut *tx)
            .await?
            .rows_affected()
            > 0;
        if released {
            const TELL: &str =
                "UPDATE oncebox.consumer SET revision = revision + 1 WHERE consumer_id = $1";
            sqlx::query(TELL).bind(consumer.consumer_id).execute(&mut *tx).await?;
            self.audit(&mut tx, "consumer.release", Subject::of(tenant, name), json!({})).await?;
        }
        tx.commit().await?;
        self.announce(&consumer).await;
        Ok(released)
    }
}

/// What a host was starting is over with it: it ends by itself.
pub(crate) async fn forget_starts(
    connection: &mut PgConnection,
    host_id: i64,
) -> Result<(), InboxError> {
    sqlx::query("DELETE FROM oncebox.start_mark WHERE host_id = $1")
        .bind(host_id)
        .execute(connection)
        .await?;
    Ok(())
}
