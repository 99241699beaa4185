//! The host's functions, called step by step in a tenant's session.

use sqlx::{AssertSqlSafe, Executor, PgConnection};
use tokio::time::timeout;

use super::{InboxFixture, TestConsumer};
use crate::wait::DEADLINE;

/// A session of a tenant that calls the host's functions as a host would, step by step.
pub struct Guest {
    connection: PgConnection,
    /// What it binds as its secret; its tenant's, unless a test says otherwise.
    pub secret: Vec<u8>,
    /// The consumer it speaks for.
    pub consumer_id: i32,
}

const CLAIM: &str = "SELECT outcome, known_result FROM oncebox_host.claim($1, $2, 0, \
    'completed', '{}', 't', 0, $3, $4, $4, \
    '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', NULL, NULL)";

impl Guest {
    /// A session of the consumer's tenant.
    pub async fn connect(fixture: &InboxFixture, consumer: &TestConsumer) -> Self {
        let connection = fixture.guest(&consumer.tenant).await;
        Self {
            connection,
            secret: fixture.secret(&consumer.tenant),
            consumer_id: consumer.row.consumer_id,
        }
    }

    /// The same with a transaction, as a host begins it.
    pub async fn begin(fixture: &InboxFixture, consumer: &TestConsumer) -> Self {
        let mut guest = Self::connect(fixture, consumer).await;
        guest.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.expect("BEGIN");
        guest
    }

    /// Any statements.
    pub async fn execute(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        let running = self.connection.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())));
        timeout(DEADLINE, running).await.expect("an answer").map(drop)
    }

    /// Claim messages; outcome and stored result of each.
    pub async fn claim(
        &mut self,
        ids: &[&str],
    ) -> Result<Vec<(String, Option<String>)>, sqlx::Error> {
        let offsets = vec![0_i64; ids.len()];
        sqlx::query_as(CLAIM)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(ids)
            .bind(offsets)
            .fetch_all(&mut self.connection)
            .await
    }

    /// Claim messages; the answer is how many pages that touched.
    pub async fn claim_and_count_pages(&mut self, ids: &[&str]) -> Result<i64, sqlx::Error> {
        let explain = AssertSqlSafe(format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {CLAIM}"));
        let query = sqlx::query_scalar(explain)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(ids)
            .bind(vec![0_i64; ids.len()]);
        let plan: serde_json::Value = query.fetch_one(&mut self.connection).await?;
        let pages = |kind| {
            plan.pointer(&format!("/0/Plan/Shared {kind} Blocks"))
                .and_then(serde_json::Value::as_i64)
        };
        Ok(pages("Hit").unwrap_or_default() + pages("Read").unwrap_or_default())
    }

    /// Complete; withdraw claims of these ids, and make these dead letters.
    pub async fn complete(
        &mut self,
        withdrawn: &[&str],
        rejected: &[&str],
    ) -> Result<(), sqlx::Error> {
        const COMPLETE: &str = "SELECT FROM oncebox_host.complete($1, $2, $3, $4, $5, $6, $7, \
            '{}', '{}', '{}', '{}', '{}', '{}', '{}')";
        let query = sqlx::query(COMPLETE)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(withdrawn)
            .bind(rejected);
        let query = query
            .bind(vec![0_i64; rejected.len()])
            .bind(vec!["failed_terminal"; rejected.len()])
            .bind(vec!["reject"; rejected.len()]);
        query.execute(&mut self.connection).await.map(drop)
    }

    /// Lease what is due, as a worker that then dies; ids and epochs.
    pub async fn lease(&mut self, lease_ms: i64) -> Result<Vec<(String, i64)>, sqlx::Error> {
        const LEASE: &str = "SELECT id, epoch FROM oncebox_host.lease($1, $2, 'dead', 8, $3, 3, 5) \
            WHERE ended IS DISTINCT FROM 'parked'";
        self.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
        let leased = sqlx::query_as(LEASE)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(lease_ms)
            .fetch_all(&mut self.connection)
            .await?;
        self.execute("COMMIT").await?;
        Ok(leased)
    }

    /// Say that the run of a lease was interrupted, as its host does; what becomes of the message.
    pub async fn interrupted(&mut self, id: &str, epoch: i64) -> Result<String, sqlx::Error> {
        const TELL: &str =
            "SELECT outcome FROM oncebox_host.lease_interrupted($1, $2, $3, $4, 3, 5)";
        self.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
        let query = sqlx::query_scalar(TELL)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(vec![id])
            .bind(vec![epoch]);
        let outcome = query.fetch_one(&mut self.connection).await?;
        self.execute("COMMIT").await?;
        Ok(outcome)
    }

    /// Begin the work of a lease. False: it is lost.
    pub async fn resume(&mut self, id: &str, epoch: i64) -> Result<bool, sqlx::Error> {
        const RESUME: &str = "SELECT * FROM oncebox_host.resume($1, $2, 0, $3, $4)";
        sqlx::query_scalar(RESUME)
            .bind(&self.secret)
            .bind(self.consumer_id)
            .bind(id)
            .bind(epoch)
            .fetch_one(&mut self.connection)
            .await
    }
}

/// The code of an error that PostgreSQL answered; empty for any other.
pub fn code(error: &sqlx::Error) -> String {
    error
        .as_database_error()
        .and_then(|error| error.code())
        .map(|code| code.into_owned())
        .unwrap_or_default()
}
