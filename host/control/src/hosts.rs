//! The hosts that run, and how far each is with a consumer's deployments.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, status::BreakerState};

use crate::{consumers::start::forget_starts, control::Admin};

/// How far a host is with a generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It loads what is new; what it ran before goes on.
    Compiling,
    /// Its next transaction uses it.
    Switched,
    /// It could not load it, and goes on with what it ran before.
    Failed(String),
}

impl Progress {
    fn name(&self) -> &'static str {
        match self {
            Self::Compiling => "compiling",
            Self::Switched => "switched",
            Self::Failed(_) => "failed",
        }
    }
}

/// A host that was seen lately.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Host {
    /// Key; a restart is another host.
    pub host_id: i64,
    /// Name of the machine and id of the process.
    pub name: String,
    /// When it started.
    pub started_at: DateTime<Utc>,
    /// When it last said that it lives.
    pub seen_at: DateTime<Utc>,
}

/// A host's progress with a consumer.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct HostProgress {
    /// The host.
    pub host_id: i64,
    /// Its name.
    pub host: String,
    /// Generation of deployments that it runs.
    pub generation: i64,
    /// The generation that `state` speaks of.
    pub next_generation: i64,
    /// `compiling`, `switched` or `failed`.
    pub state: String,
    /// Why it failed.
    pub error: Option<String>,
    /// When it said so.
    pub at: DateTime<Utc>,
}

/// What a host does with a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// It loads what the consumer needs.
    Starting,
    /// It waits: for a first deployment, or for something to read.
    Idle,
    /// It reads, or runs what is due.
    Running,
    /// Nothing of the consumer runs.
    Stopped,
    /// It did not start or ended by itself, and is tried again later and later.
    Failing,
}

impl RunState {
    fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Failing => "failing",
        }
    }
}

/// How a host is with a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The consumer.
    pub consumer_id: i32,
    /// What the host does with it.
    pub state: RunState,
    /// The consumer's revision that this speaks of: nothing of an older one runs here any more.
    pub revision: i64,
    /// What is wrong.
    pub error: Option<String>,
    /// Where nothing runs, nothing of an older generation of deployments runs either.
    pub rests_at: Option<i64>,
}

/// How a host that lives is with a consumer, as it says.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct HostRun {
    /// The consumer.
    pub consumer_id: i32,
    /// The host.
    pub host_id: i64,
    /// Its name.
    pub host: String,
    /// `starting`, `idle`, `running`, `stopped` or `failing`.
    pub state: String,
    /// The consumer's revision that `state` speaks of; less than none before the host has said
    /// anything.
    pub revision: i64,
    /// What is wrong.
    pub error: Option<String>,
}

/// Deliveries of a consumer that hosts refused, since their message was done already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct Duplicates {
    /// How many, at least: a host adds what it refused every two seconds, and one that dies has not
    /// added its last.
    pub refused: i64,
    /// Since when they are counted.
    pub since: DateTime<Utc>,
    /// When a host added some last; none before the first.
    pub last_at: Option<DateTime<Utc>>,
}

/// A host that was not seen for this long is taken for gone: nobody waits for it.
pub(crate) const GONE: &str = "interval '10 seconds'";

impl Admin {
    /// A host starts.
    pub async fn host_starts(&self, name: &str) -> Result<i64, InboxError> {
        let insert =
            sqlx::query_scalar("INSERT INTO oncebox.host (name) VALUES ($1) RETURNING host_id")
                .bind(name);
        Ok(insert.fetch_one(&self.pool).await?)
    }

    /// A host lives. Those that have been gone for an hour are forgotten. False: this one was.
    pub async fn host_lives(&self, host_id: i64) -> Result<bool, InboxError> {
        let seen = sqlx::query("UPDATE oncebox.host SET seen_at = now() WHERE host_id = $1")
            .bind(host_id)
            .execute(&self.pool)
            .await?;
        sqlx::query("DELETE FROM oncebox.host WHERE seen_at < now() - interval '1 hour'")
            .execute(&self.pool)
            .await?;
        Ok(seen.rows_affected() > 0)
    }

    /// A host ends.
    pub async fn host_ends(&self, host_id: i64) -> Result<(), InboxError> {
        let mut tx = self.pool.begin().await?;
        forget_starts(&mut tx, host_id).await?;
        sqlx::query("DELETE FROM oncebox.host WHERE host_id = $1")
            .bind(host_id)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// The hosts that live.
    pub async fn hosts(&self) -> Result<Vec<Host>, InboxError> {
        let list = format!(
            "SELECT host_id, name, started_at, seen_at FROM oncebox.host WHERE seen_at > now() - \
                {GONE} ORDER BY host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list)).fetch_all(&self.pool).await?)
    }

    /// How far a host is. When every host that lives has switched, what it switched from is fenced
    /// off everywhere: a host that nobody can reach completes nothing with it any more.
    pub async fn host_reports(
        &self,
        host_id: i64,
        consumer_id: i32,
        generation: i64,
        progress: &Progress,
    ) -> Result<(), InboxError> {
        const REPORT: &str = "INSERT INTO oncebox.host_consumer AS r (host_id, consumer_id, \
            generation, next_generation, state, error) \
            VALUES ($1, $2, CASE WHEN $4 = 'switched' THEN $3 ELSE 0 END, $3, $4, $5) \
            ON CONFLICT (host_id, consumer_id) DO UPDATE SET next_generation = \
            excluded.next_generation, state = excluded.state, \
                error = excluded.error, at = now(), \
                generation = CASE WHEN excluded.state = 'switched' THEN excluded.generation ELSE \
                r.generation END";
        let error = match progress {
            Progress::Failed(error) => Some(error.as_str()),
            _ => None,
        };
        sqlx::query(REPORT)
            .bind(host_id)
            .bind(consumer_id)
            .bind(generation)
            .bind(progress.name())
            .bind(error)
            .execute(&self.pool)
            .await?;
        if *progress == Progress::Switched {
            self.fence(consumer_id).await?;
        }
        Ok(())
    }

    /// Which circuit breakers of a consumer are not closed on a host.
    pub async fn host_breakers(
        &self,
        host_id: i64,
        consumer_id: i32,
        breakers: &[BreakerState],
    ) -> Result<(), InboxError> {
        const BREAKERS: &str = "UPDATE oncebox.host_consumer SET breakers = $3 WHERE host_id = $1 \
            AND consumer_id = $2";
        sqlx::query(BREAKERS)
            .bind(host_id)
            .bind(consumer_id)
            .bind(sqlx::types::Json(breakers))
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Adds duplicates that a host refused to the counts of their consumers. Those of a consumer
    /// that was deleted by now are dropped.
    ///
    /// # Errors
    /// The database does not answer. Whether they were added is not known then.
    pub async fn add_duplicates(&self, refused: &BTreeMap<i32, u64>) -> Result<(), InboxError> {
        const ADD: &str = "INSERT INTO oncebox.duplicates_refused AS d (consumer_id, refused, \
            since, last_at) \
            SELECT c.consumer_id, u.refused, c.created_at, now() FROM unnest($1::int[], \
            $2::bigint[]) AS u(id, refused) \
            JOIN oncebox.consumer c ON c.consumer_id = u.id ORDER BY c.consumer_id \
            ON CONFLICT (consumer_id) DO UPDATE SET refused = d.refused + excluded.refused, \
            last_at = excluded.last_at";
        let (ids, counts): (Vec<i32>, Vec<i64>) =
            refused.iter().map(|(id, count)| (*id, count.cast_signed())).unzip();
        sqlx::query(ADD).bind(ids).bind(counts).execute(&self.pool).await?;
        Ok(())
    }

    /// Returns how many duplicates of a consumer hosts refused.
    ///
    /// # Errors
    /// There is no such consumer, or the database does not answer.
    pub async fn duplicates(&self, consumer_id: i32) -> Result<Duplicates, InboxError> {
        const DUPLICATES: &str = "SELECT coalesce(d.refused, 0) AS refused, coalesce(d.since, \
            c.created_at) AS since, d.last_at \
            FROM oncebox.consumer c LEFT JOIN oncebox.duplicates_refused d USING (consumer_id) \
            WHERE c.consumer_id = $1";
        let found = sqlx::query_as(DUPLICATES).bind(consumer_id).fetch_optional(&self.pool).await?;
        found.ok_or_else(|| InboxError::NotFound("the consumer was deleted just now".to_owned()))
    }

    async fn fence(&self, consumer_id: i32) -> Result<(), InboxError> {
        let fence = format!(
            "UPDATE oncebox.consumer c SET generation_required = s.generation \
             FROM (SELECT min(r.generation) AS generation FROM oncebox.host_consumer r JOIN \
             oncebox.host h USING (host_id) \
                   WHERE r.consumer_id = $1 AND h.seen_at > now() - {GONE}) s \
             WHERE c.consumer_id = $1 AND c.generation_required < s.generation"
        );
        sqlx::query(sqlx::AssertSqlSafe(fence)).bind(consumer_id).execute(&self.pool).await?;
        Ok(())
    }

    /// How a host is with some consumers. What is said of one that was deleted by now is dropped.
    pub async fn host_runs(&self, host_id: i64, runs: &[Run]) -> Result<(), InboxError> {
        const REPORT: &str = "INSERT INTO oncebox.host_consumer AS r \
                (host_id, consumer_id, generation, next_generation, state, run_state, \
                run_revision, run_error) \
            SELECT $1, u.id, coalesce(u.rests_at, 0), coalesce(u.rests_at, 0), CASE WHEN \
            u.rests_at IS NULL THEN 'compiling' ELSE 'switched' END, \
                u.state, u.revision, u.error \
            FROM unnest($2::int[], $3::text[], $4::bigint[], $5::text[], $6::bigint[]) AS u(id, \
            state, revision, error, rests_at) \
            WHERE EXISTS (SELECT FROM oncebox.consumer c WHERE c.consumer_id = u.id) ORDER BY u.id \
            ON CONFLICT (host_id, consumer_id) DO UPDATE SET run_state = excluded.run_state, \
            run_revision = excluded.run_revision, \
                run_error = excluded.run_error, generation = greatest(r.generation, \
                excluded.generation), \
                next_generation = greatest(r.next_generation, excluded.next_generation), \
                state = CASE WHEN excluded.state = 'switched' THEN 'switched' ELSE r.state END, \
                error = CASE WHEN excluded.state = 'switched' THEN NULL ELSE r.error END, \
                at = CASE WHEN excluded.state = 'switched' AND r.generation < excluded.generation \
                THEN now() ELSE r.at END";
        let of = |run: fn(&Run) -> Option<i64>| runs.iter().map(run).collect::<Vec<_>>();
        sqlx::query(REPORT)
            .bind(host_id)
            .bind(runs.iter().map(|run| run.consumer_id).collect::<Vec<_>>())
            .bind(runs.iter().map(|run| run.state.name()).collect::<Vec<_>>())
            .bind(of(|run| Some(run.revision)))
            .bind(runs.iter().map(|run| run.error.clone()).collect::<Vec<_>>())
            .bind(of(|run| run.rests_at))
            .execute(&self.pool)
            .await?;
        for run in runs.iter().filter(|run| run.rests_at.is_some_and(|generation| generation > 0)) {
            self.fence(run.consumer_id).await?;
        }
        Ok(())
    }

    /// How the hosts that live are with one consumer, or with all of a tenant, or with all.
    pub async fn runs(
        &self,
        tenant: Option<&str>,
        consumer: Option<&str>,
    ) -> Result<Vec<HostRun>, InboxError> {
        let list = format!(
            "SELECT c.consumer_id, h.host_id, h.name AS host, coalesce(r.run_state, 'starting') AS \
                state, \
                coalesce(r.run_revision, -1) AS revision, r.run_error AS error \
             FROM oncebox.host h CROSS JOIN oncebox.consumer c JOIN oncebox.tenant t USING \
             (tenant_id) \
                LEFT JOIN oncebox.host_consumer r ON r.host_id = h.host_id AND r.consumer_id = \
                c.consumer_id \
             WHERE h.seen_at > now() - {GONE} AND ($1::text IS NULL OR t.name = $1) AND ($2::text \
             IS NULL OR c.name = $2) \
             ORDER BY c.consumer_id, h.host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list))
            .bind(tenant)
            .bind(consumer)
            .fetch_all(&self.pool)
            .await?)
    }

    /// How far the hosts that live are with a consumer.
    pub async fn host_progress(&self, consumer_id: i32) -> Result<Vec<HostProgress>, InboxError> {
        let list = format!(
            "SELECT h.host_id, h.name AS host, coalesce(r.generation, 0) AS generation, \
                coalesce(r.next_generation, 0) AS next_generation, \
                coalesce(r.state, 'compiling') AS state, r.error, coalesce(r.at, h.started_at) AS \
                at \
             FROM oncebox.host h LEFT JOIN oncebox.host_consumer r ON r.host_id = h.host_id AND \
             r.consumer_id = $1 \
             WHERE h.seen_at > now() - {GONE} ORDER BY h.host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list))
            .bind(consumer_id)
            .fetch_all(&self.pool)
            .await?)
    }
}
