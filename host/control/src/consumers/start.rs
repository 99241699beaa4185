//! Starts of consumers, one of which may end the process: no row of a tenant ends a host twice.
//!
//! A host writes a mark, starts the consumer, and removes the mark once it has survived the start.
//! Other hosts find the marks of hosts that are gone, and evaluate them. A policy that no host of
//! this build has survived yet is *unproven*. One host at a time tries such a policy, and each host
//! tries one such consumer at a time. The mark of a host that ended in that part therefore names
//! the cause. That consumer is *quarantined*: no host starts it until its policy changes or an
//! operator resumes it.
//!
//! A host may also end later in a start, or in the start of a policy that was survived before. That
//! may have any reason, such as a power cut. The consumer is then suspected, and quarantined when
//! it happens again.

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    handles::{Consumers, Reconciliation},
    hosts::HEARTBEAT_TIMEOUT,
};

/// Hosts in a row that may end during the start of a policy that was survived before.
const SUSPICIONS_MAX: i32 = 3;
/// Hosts in a row that may end during the start of a policy that no host has survived.
const SUSPICIONS_UNPROVEN_MAX: i32 = 2;
/// Hosts that a consumer may end until another policy does not release it, and only an operator
/// does.
pub const DEATHS_MAX: i32 = 3;

/// The quarantine of a consumer that no host starts, because its start ended a host.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Quarantine {
    /// Time at which it began.
    pub at: DateTime<Utc>,
    /// Host that ended: the name of the machine and the id of the process.
    pub host: String,
    /// Number of hosts that the consumer has ended.
    pub deaths: i32,
}

/// Column of a [`Quarantine`] in a query of `oncebox.consumer c` with `oncebox.consumer_start s`
/// joined: null for none.
pub(crate) const QUARANTINE: &str = "CASE WHEN s.quarantined_revision = c.policy_revision OR \
    s.quarantined_revision IS NOT NULL AND s.deaths >= 3 \
    THEN jsonb_build_object('at', s.quarantined_at, 'host', s.quarantined_host, 'deaths', \
    s.deaths) END AS quarantine";

impl Quarantine {
    /// Explains the quarantine, with the operator's options.
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

/// The answer to a host that asks to start a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartTurn {
    /// Start it; the mark is written.
    Begin(Start),
    /// Its policy is unproven: ask again as the only start of such a consumer on this host.
    Alone,
    /// Another host, named here, tries it; ask again.
    Elsewhere(String),
    /// The policy has changed, or the consumer is gone.
    Changed,
    /// Do not start it.
    Quarantined(Quarantine),
}

/// A start under a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Key of the consumer.
    pub consumer_id: i32,
    /// Key of the host.
    pub host_id: i64,
    /// Revision of the policy.
    pub policy_revision: i64,
    /// Whether no host of this build has survived the policy yet.
    pub is_unproven: bool,
    /// Whether a host has ended during an earlier start of it.
    pub is_suspected: bool,
}

/// A consumer that is newly quarantined.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Quarantined {
    /// Name of its tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub consumer: String,
    /// Host that ended.
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

impl Reconciliation<'_> {
    /// Asks to start a consumer whose row the host read at a revision. The mark is committed before
    /// this returns.
    ///
    /// # Errors
    /// An error of the host's database.
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
        let mut tx = self.0.pool.begin().await?;
        // This lock comes before any row: an evaluation of gone hosts locks the table against all
        // others, and then changes rows.
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
        if hooks::sabotage(Defect::MarkAfterStart) {
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

    /// Ends that part of a start which one consumer of a host has to itself.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn start_settles(&self, start: &Start) -> Result<(), InboxError> {
        const SETTLES: &str = "UPDATE oncebox.start_mark SET is_settling = true WHERE consumer_id \
            = $1 AND host_id = $2";
        sqlx::query(SETTLES)
            .bind(start.consumer_id)
            .bind(start.host_id)
            .execute(&self.0.pool)
            .await?;
        Ok(())
    }

    /// Ends a start that the host has survived. Where the host was silent for so long that it was
    /// taken for gone, the consequences are undone. With `proven_by`, the build has survived the
    /// whole start, and the policy is proven for it.
    ///
    /// # Errors
    /// An error of the host's database.
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
        let mut tx = self.0.pool.begin().await?;
        const OVER: &str = "DELETE FROM oncebox.start_mark WHERE consumer_id = $1 AND host_id = $2";
        let over =
            sqlx::query(OVER).bind(start.consumer_id).bind(start.host_id).execute(&mut *tx).await?;
        // A missing mark means that another host took this host for gone.
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

    /// Evaluates the marks of hosts that are gone. Returns each consumer that is quarantined by
    /// that, once.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn judge_gone_starts(&self) -> Result<Vec<Quarantined>, InboxError> {
        let gone = format!(
            "FROM oncebox.start_mark m WHERE NOT EXISTS (SELECT FROM oncebox.host h WHERE \
                h.host_id = m.host_id AND h.seen_at > now() - {HEARTBEAT_TIMEOUT})"
        );
        let ask = sqlx::AssertSqlSafe(format!("SELECT EXISTS (SELECT {gone})"));
        if !sqlx::query_scalar::<_, bool>(ask).fetch_one(&self.0.pool).await? {
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
        let mut tx = self.0.pool.begin().await?;
        sqlx::query("LOCK TABLE oncebox.start_mark IN SHARE ROW EXCLUSIVE MODE")
            .execute(&mut *tx)
            .await?;
        let quarantined: Vec<Quarantined> =
            sqlx::query_as(sqlx::AssertSqlSafe(judge)).fetch_all(&mut *tx).await?;
        for one in &quarantined {
            let subject = Subject::of(&one.tenant, &one.consumer);
            self.0
                .audit()
                .record(&mut tx, "consumer.quarantine", subject, json!({ "host": one.host }))
                .await?;
        }
        tx.commit().await?;
        Ok(quarantined)
    }
}

impl Consumers<'_> {
    /// Releases a quarantined consumer for starts, on an operator's decision. Returns false where
    /// it is not quarantined.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or an error of the host's database.
    pub async fn release(&self, tenant: &str, name: &str) -> Result<bool, InboxError> {
        let consumer = self.get(tenant, name).await?;
        if consumer.quarantine.is_none() {
            return Ok(false);
        }
        let mut tx = self.0.pool.begin().await?;
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
            self.0
                .audit()
                .record(&mut tx, "consumer.release", Subject::of(tenant, name), json!({}))
                .await?;
        }
        tx.commit().await?;
        self.0.deployments().announce(&consumer).await;
        Ok(released)
    }
}

/// Deletes the start marks of a host that ends by itself, so that they are not evaluated.
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
