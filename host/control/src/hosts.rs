//! The hosts that run, and the progress of each with a consumer's deployments.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, status::BreakerState};

use crate::{consumers::start::forget_starts, handles::Hosts};

/// Progress of a host with a generation of deployments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// The host loads the new versions; the earlier ones go on.
    Compiling,
    /// The next transaction of the host uses the generation.
    Switched,
    /// The host could not load the generation, and goes on with the earlier one.
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

/// A host with a recent heartbeat.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Host {
    /// Key; a restart is another host.
    pub host_id: i64,
    /// Name of the machine and id of the process.
    pub name: String,
    /// Time at which it started.
    pub started_at: DateTime<Utc>,
    /// Time of its last heartbeat.
    pub seen_at: DateTime<Utc>,
    /// The release that it runs; none for one of 0.1, which does not say it.
    pub version: Option<String>,
}

/// Progress of a host with a consumer.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct HostProgress {
    /// Id of the host.
    pub host_id: i64,
    /// Name of the host.
    pub host: String,
    /// Generation of deployments that the host runs.
    pub generation: i64,
    /// Generation that `state` refers to.
    pub next_generation: i64,
    /// `compiling`, `switched` or `failed`.
    pub state: String,
    /// Reason of a failure.
    pub error: Option<String>,
    /// Time of the report.
    pub at: DateTime<Utc>,
}

/// State of a consumer on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// The host loads what the consumer needs.
    Starting,
    /// The host waits for a first deployment, or for messages to read.
    Idle,
    /// The host reads messages, or runs those that are due.
    Running,
    /// The host runs nothing of the consumer.
    Stopped,
    /// The consumer did not start or ended by itself. The host retries at growing intervals.
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

/// Report of a host about a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerStatus {
    /// Id of the consumer.
    pub consumer_id: i32,
    /// State of the consumer on the host.
    pub state: RunState,
    /// Revision of the consumer that the report is about. Nothing of an older revision runs on this
    /// host.
    pub revision: i64,
    /// Problem of the consumer on the host, if any.
    pub error: Option<String>,
    /// Generation of deployments at which the consumer is stopped on this host, where it is
    /// stopped. Nothing of an older generation runs either.
    pub stopped_generation: Option<i64>,
}

/// Circuit breaker of a version that is not closed on a host.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VersionBreaker {
    /// Name of the handler.
    pub handler: String,
    /// Digest of the version, in hex.
    pub digest: String,
    /// `open` or `half_open`.
    pub state: String,
    /// Milliseconds, from the report on, until it lets a message probe; none while one probes.
    pub probes_in_ms: Option<u64>,
}

/// Report of a live host about a consumer, as stored.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct HostConsumerStatus {
    /// Id of the consumer.
    pub consumer_id: i32,
    /// Id of the host.
    pub host_id: i64,
    /// Name of the host.
    pub host: String,
    /// `starting`, `idle`, `running`, `stopped` or `failing`.
    pub state: String,
    /// Revision of the consumer that `state` is about; -1 before the first report of the host.
    pub revision: i64,
    /// Problem of the consumer on the host, if any.
    pub error: Option<String>,
    /// Circuit breakers of its versions that are not closed on the host.
    pub breakers: sqlx::types::Json<Vec<VersionBreaker>>,
}

/// Deliveries of a consumer that hosts refused, since their message was done already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct Duplicates {
    /// Number of refused deliveries, at least. A host adds its count every two seconds, and one
    /// that dies has not added its last.
    pub refused: i64,
    /// Time since which they are counted.
    pub since: DateTime<Utc>,
    /// Time at which a host last added some; none before the first.
    pub last_at: Option<DateTime<Utc>>,
}

/// Time without a heartbeat after which a host counts as gone, as SQL. Nothing waits for such a
/// host.
pub(crate) const HEARTBEAT_TIMEOUT: &str = "interval '10 seconds'";

impl Hosts<'_> {
    /// Inserts the row of a host of this release that starts, and returns its id.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn start(&self, name: &str) -> Result<i64, InboxError> {
        const START: &str =
            "INSERT INTO oncebox.host (name, version) VALUES ($1, $2) RETURNING host_id";
        let insert = sqlx::query_scalar(START).bind(name).bind(env!("CARGO_PKG_VERSION"));
        Ok(insert.fetch_one(&self.0.pool).await?)
    }

    /// Records a heartbeat of a host, and deletes the rows of hosts that have been gone for an
    /// hour. Returns false where the row of this host was deleted.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn beat(&self, host_id: i64) -> Result<bool, InboxError> {
        let seen = sqlx::query("UPDATE oncebox.host SET seen_at = now() WHERE host_id = $1")
            .bind(host_id)
            .execute(&self.0.pool)
            .await?;
        sqlx::query("DELETE FROM oncebox.host WHERE seen_at < now() - interval '1 hour'")
            .execute(&self.0.pool)
            .await?;
        Ok(seen.rows_affected() > 0)
    }

    /// Records that a host has answered a request for its metrics.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn report_scrape(&self, host_id: i64) -> Result<(), InboxError> {
        sqlx::query("UPDATE oncebox.host SET scraped_at = now() WHERE host_id = $1")
            .bind(host_id)
            .execute(&self.0.pool)
            .await?;
        Ok(())
    }

    /// Deletes the row of a host that ends, with its marks of consumer starts.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn end(&self, host_id: i64) -> Result<(), InboxError> {
        let mut tx = self.0.pool.begin().await?;
        forget_starts(&mut tx, host_id).await?;
        sqlx::query("DELETE FROM oncebox.host WHERE host_id = $1")
            .bind(host_id)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// Returns the live hosts, by id.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(&self) -> Result<Vec<Host>, InboxError> {
        let list = format!(
            "SELECT host_id, name, started_at, seen_at, version FROM oncebox.host \
            WHERE seen_at > now() - {HEARTBEAT_TIMEOUT} ORDER BY host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list)).fetch_all(&self.0.pool).await?)
    }

    /// Records the progress of a host with a generation of a consumer. Once a host has switched,
    /// raises the required generation to the lowest that a reporting live host runs. When all have
    /// switched, the earlier generation is fenced off everywhere: a host that is out of reach
    /// completes nothing with it.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn report_progress(
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
            .execute(&self.0.pool)
            .await?;
        if *progress == Progress::Switched {
            self.fence(consumer_id).await?;
        }
        Ok(())
    }

    /// Records the circuit breakers of a consumer that are not closed on a host.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn report_breakers(
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
            .execute(&self.0.pool)
            .await?;
        Ok(())
    }

    /// Adds the duplicates that a host refused to the counts of their consumers. Counts of deleted
    /// consumers are dropped.
    ///
    /// # Errors
    /// The database does not answer. It is then unknown whether the duplicates were added.
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
        sqlx::query(ADD).bind(ids).bind(counts).execute(&self.0.pool).await?;
        Ok(())
    }

    /// Returns the duplicates of a consumer that hosts refused.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or an error of the host's database.
    pub async fn duplicates(&self, consumer_id: i32) -> Result<Duplicates, InboxError> {
        const DUPLICATES: &str = "SELECT coalesce(d.refused, 0) AS refused, coalesce(d.since, \
            c.created_at) AS since, d.last_at \
            FROM oncebox.consumer c LEFT JOIN oncebox.duplicates_refused d USING (consumer_id) \
            WHERE c.consumer_id = $1";
        let found =
            sqlx::query_as(DUPLICATES).bind(consumer_id).fetch_optional(&self.0.pool).await?;
        found.ok_or_else(|| InboxError::NotFound("the consumer was deleted just now".to_owned()))
    }

    async fn fence(&self, consumer_id: i32) -> Result<(), InboxError> {
        let fence = format!(
            "UPDATE oncebox.consumer c SET generation_required = s.generation \
             FROM (SELECT min(r.generation) AS generation FROM oncebox.host_consumer r JOIN \
             oncebox.host h USING (host_id) \
                   WHERE r.consumer_id = $1 AND h.seen_at > now() - {HEARTBEAT_TIMEOUT}) s \
             WHERE c.consumer_id = $1 AND c.generation_required < s.generation"
        );
        sqlx::query(sqlx::AssertSqlSafe(fence)).bind(consumer_id).execute(&self.0.pool).await?;
        Ok(())
    }

    /// Records the reports of a host about some consumers. Reports about deleted consumers are
    /// dropped. Fences off earlier generations of stopped consumers.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn report_statuses(
        &self,
        host_id: i64,
        runs: &[ConsumerStatus],
    ) -> Result<(), InboxError> {
        const REPORT: &str = "INSERT INTO oncebox.host_consumer AS r \
                (host_id, consumer_id, generation, next_generation, state, status, \
                status_revision, status_error) \
            SELECT $1, u.id, coalesce(u.stopped_generation, 0), coalesce(u.stopped_generation, 0), \
            CASE WHEN u.stopped_generation IS NULL THEN 'compiling' ELSE 'switched' END, \
                u.state, u.revision, u.error \
            FROM unnest($2::int[], $3::text[], $4::bigint[], $5::text[], $6::bigint[]) AS u(id, \
            state, revision, error, stopped_generation) \
            WHERE EXISTS (SELECT FROM oncebox.consumer c WHERE c.consumer_id = u.id) ORDER BY u.id \
            ON CONFLICT (host_id, consumer_id) DO UPDATE SET status = excluded.status, \
            status_revision = excluded.status_revision, \
                status_error = excluded.status_error, generation = greatest(r.generation, \
                excluded.generation), \
                next_generation = greatest(r.next_generation, excluded.next_generation), \
                state = CASE WHEN excluded.state = 'switched' THEN 'switched' ELSE r.state END, \
                error = CASE WHEN excluded.state = 'switched' THEN NULL ELSE r.error END, \
                at = CASE WHEN excluded.state = 'switched' AND r.generation < excluded.generation \
                THEN now() ELSE r.at END";
        let of = |run: fn(&ConsumerStatus) -> Option<i64>| runs.iter().map(run).collect::<Vec<_>>();
        sqlx::query(REPORT)
            .bind(host_id)
            .bind(runs.iter().map(|run| run.consumer_id).collect::<Vec<_>>())
            .bind(runs.iter().map(|run| run.state.name()).collect::<Vec<_>>())
            .bind(of(|run| Some(run.revision)))
            .bind(runs.iter().map(|run| run.error.clone()).collect::<Vec<_>>())
            .bind(of(|run| run.stopped_generation))
            .execute(&self.0.pool)
            .await?;
        for run in runs
            .iter()
            .filter(|run| run.stopped_generation.is_some_and(|generation| generation > 0))
        {
            self.fence(run.consumer_id).await?;
        }
        Ok(())
    }

    /// Returns the reports of all live hosts about one consumer, all consumers of a tenant, or all
    /// consumers.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn statuses(
        &self,
        tenant: Option<&str>,
        consumer: Option<&str>,
    ) -> Result<Vec<HostConsumerStatus>, InboxError> {
        let list = format!(
            "SELECT c.consumer_id, h.host_id, h.name AS host, coalesce(r.status, 'starting') AS \
                state, \
                coalesce(r.status_revision, -1) AS revision, r.status_error AS error, \
                (SELECT coalesce(jsonb_agg(b.breaker || jsonb_build_object('handler', n.name, \
                'digest', encode(v.digest, 'hex')) ORDER BY v.version_id), '[]') \
                FROM jsonb_array_elements(r.breakers) AS b (breaker) \
                JOIN oncebox.version v ON v.version_id = (b.breaker->>'version_id')::int \
                JOIN oncebox.handler n USING (handler_id)) AS breakers \
             FROM oncebox.host h CROSS JOIN oncebox.consumer c JOIN oncebox.tenant t USING \
             (tenant_id) \
                LEFT JOIN oncebox.host_consumer r ON r.host_id = h.host_id AND r.consumer_id = \
                c.consumer_id \
             WHERE h.seen_at > now() - {HEARTBEAT_TIMEOUT} AND ($1::text IS NULL OR t.name = $1) \
             AND ($2::text IS NULL OR c.name = $2) \
             ORDER BY c.consumer_id, h.host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list))
            .bind(tenant)
            .bind(consumer)
            .fetch_all(&self.0.pool)
            .await?)
    }

    /// Returns the progress of all live hosts with a consumer.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn progress(&self, consumer_id: i32) -> Result<Vec<HostProgress>, InboxError> {
        let list = format!(
            "SELECT h.host_id, h.name AS host, coalesce(r.generation, 0) AS generation, \
                coalesce(r.next_generation, 0) AS next_generation, \
                coalesce(r.state, 'compiling') AS state, r.error, coalesce(r.at, h.started_at) AS \
                at \
             FROM oncebox.host h LEFT JOIN oncebox.host_consumer r ON r.host_id = h.host_id AND \
             r.consumer_id = $1 \
             WHERE h.seen_at > now() - {HEARTBEAT_TIMEOUT} ORDER BY h.host_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list))
            .bind(consumer_id)
            .fetch_all(&self.0.pool)
            .await?)
    }
}
