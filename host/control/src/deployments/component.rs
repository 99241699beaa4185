//! The state of a component between its upload and its first run: queued, compiling, ready or
//! failed.
//!
//! A compilation that ends its host must not be tried for ever. Its start is therefore counted and
//! committed before it begins. The compiling process keeps a session open for it. Once that session
//! has ended, or its process is silent for too long, another host takes the component over.

use oncebox_model::{connect::connect, error::InboxError, problem::Problem};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::handles::Versions;

/// Most starts of a compilation that did not end.
const STARTS_MAX: i32 = 3;

/// Condition of an abandoned compilation: its session has ended, or its host has ended or is silent
/// for too long. A login that may not see when other sessions began goes by the process id alone.
const ABANDONED: &str = "(c.state_at < now() - interval '30 seconds' OR c.host_id IS NOT NULL AND \
    NOT EXISTS \
    (SELECT FROM oncebox.host h WHERE h.host_id = c.host_id AND h.seen_at > now() - interval '30 \
    seconds') \
    OR c.session_pid IS NOT NULL AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a \
        WHERE a.pid = c.session_pid AND coalesce(a.backend_start = c.session_began_at, true)))";

/// The session that the row of a compilation names. The component is free again when this value is
/// dropped, or when its process ends.
#[derive(Debug)]
pub struct CompilationClaim {
    session: PgConnection,
    /// Process id of the server process for the session.
    pid: i32,
}

/// The answer to a host that asks to compile a component.
#[derive(Debug)]
pub enum Begun {
    /// The caller compiles it, and keeps the claim until it ends the compilation.
    Yours(CompilationClaim),
    /// The component is already compiled, here or elsewhere.
    Ready,
    /// The component was refused, for these reasons.
    Failed(Vec<Problem>),
    /// Another host compiles the component.
    Elsewhere,
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compiled {
    /// The component can be deployed.
    Ready {
        /// Duration of the compilation, milliseconds.
        compile_ms: i64,
    },
    /// The component cannot be deployed, for these reasons.
    Failed(Vec<Problem>),
    /// The host could not go on. The component is queued again and the start does not count.
    GivenBack,
}

#[derive(sqlx::FromRow)]
struct Row {
    state: String,
    problems: serde_json::Value,
    compile_starts: i32,
    is_free: bool,
}

impl Versions<'_> {
    /// Takes a component for compilation, unless it is compiled, refused, or being compiled
    /// elsewhere. The start is committed when this returns. `host_id` is none in a process that is
    /// no host.
    ///
    /// # Errors
    /// `NotFound` where there is no such component, or an error of the host's database.
    pub async fn begin_compiling(
        &self,
        digest: &[u8],
        host_id: Option<i64>,
    ) -> Result<Begun, InboxError> {
        let look = format!(
            "SELECT c.state, c.problems, c.compile_starts, c.state = 'queued' OR \
                coalesce(c.host_id = $2, false) OR {ABANDONED} AS is_free \
             FROM oncebox.component c WHERE c.digest = $1 FOR UPDATE"
        );
        const BEGIN: &str = "UPDATE oncebox.component SET state = 'compiling', state_at = now(), \
            host_id = $2, session_pid = $3, \
            session_began_at = (SELECT a.backend_start FROM pg_catalog.pg_stat_activity a WHERE \
            a.pid = $3), \
            compile_starts = compile_starts + 1 WHERE digest = $1";
        let mut tx = self.0.pool.begin().await?;
        let row: Option<Row> = sqlx::query_as(AssertSqlSafe(look))
            .bind(digest)
            .bind(host_id)
            .fetch_optional(&mut *tx)
            .await?;
        let row = row.ok_or_else(|| {
            InboxError::NotFound(format!("there is no component `{}`", hex::encode(digest)))
        })?;
        match row.state.as_str() {
            "ready" => return Ok(Begun::Ready),
            "failed" => {
                return Ok(Begun::Failed(serde_json::from_value(row.problems).unwrap_or_default()));
            }
            _ if !row.is_free => return Ok(Begun::Elsewhere),
            _ => {}
        }
        if row.compile_starts >= STARTS_MAX {
            let problems = vec![ended_the_process(row.compile_starts)];
            const FAIL: &str = "UPDATE oncebox.component SET state = 'failed', state_at = now(), \
                host_id = NULL, session_pid = NULL, session_began_at = NULL, \
                problems = $2 WHERE digest = $1";
            sqlx::query(FAIL).bind(digest).bind(json!(problems)).execute(&mut *tx).await?;
            tx.commit().await?;
            return Ok(Begun::Failed(problems));
        }
        let claim = self.open_claim().await?;
        sqlx::query(BEGIN).bind(digest).bind(host_id).bind(claim.pid).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Begun::Yours(claim))
    }

    async fn open_claim(&self) -> Result<CompilationClaim, InboxError> {
        let mut session = connect(&self.0.options).await?;
        let pid = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut session).await?;
        Ok(CompilationClaim { session, pid })
    }

    /// Reports that a compilation goes on; call it every few seconds. Replaces a session that
    /// broke, unless another process has taken the component over.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn compiling_goes_on(
        &self,
        digest: &[u8],
        host_id: Option<i64>,
        claim: &mut CompilationClaim,
    ) -> Result<(), InboxError> {
        const BEAT: &str = "UPDATE oncebox.component SET state_at = now(), session_pid = \
            pg_backend_pid(), \
            session_began_at = (SELECT a.backend_start FROM pg_catalog.pg_stat_activity a WHERE \
            a.pid = pg_backend_pid()) \
            WHERE digest = $1 AND state = 'compiling' AND host_id IS NOT DISTINCT FROM $2 AND \
            session_pid = $3";
        let before = claim.pid;
        if claim.session.ping().await.is_err() {
            *claim = self.open_claim().await?;
        }
        sqlx::query(BEAT)
            .bind(digest)
            .bind(host_id)
            .bind(before)
            .execute(&mut claim.session)
            .await?;
        Ok(())
    }

    /// Records the result of a compilation. Returns false where another host has taken the
    /// component over; that host then records its result.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn end_compiling(
        &self,
        digest: &[u8],
        host_id: Option<i64>,
        ended: &Compiled,
    ) -> Result<bool, InboxError> {
        const END: &str = "UPDATE oncebox.component SET state = $3, problems = $4, compile_ms = \
            $5, state_at = now(), host_id = NULL, \
            session_pid = NULL, session_began_at = NULL, compile_starts = CASE WHEN $3 = 'queued' \
            THEN greatest(compile_starts - 1, 0) ELSE compile_starts END \
            WHERE digest = $1 AND state = 'compiling' AND host_id IS NOT DISTINCT FROM $2";
        let (state, problems, compile_ms) = match ended {
            Compiled::Ready { compile_ms } => ("ready", &[][..], Some(*compile_ms)),
            Compiled::Failed(problems) => ("failed", &problems[..], None),
            Compiled::GivenBack => ("queued", &[][..], None),
        };
        let end = sqlx::query(END)
            .bind(digest)
            .bind(host_id)
            .bind(state)
            .bind(json!(problems))
            .bind(compile_ms);
        Ok(end.execute(&self.0.pool).await?.rows_affected() > 0)
    }

    /// Lists components that wait for a host: queued for five seconds without a start, or
    /// abandoned.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn unfinished_components(&self, limit: i64) -> Result<Vec<Vec<u8>>, InboxError> {
        let list = format!(
            "SELECT c.digest FROM oncebox.component c WHERE c.state = 'queued' AND c.state_at < \
                now() - interval '5 seconds' \
                OR c.state = 'compiling' AND {ABANDONED} ORDER BY c.state_at LIMIT $1"
        );
        Ok(sqlx::query_scalar(AssertSqlSafe(list)).bind(limit).fetch_all(&self.0.pool).await?)
    }

    /// Lists the digests of components that hosts keep loaded: those of live deployments, and of
    /// the deployment before in each slot, to which a rollback returns.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn warm_components(&self) -> Result<Vec<Vec<u8>>, InboxError> {
        const WARM: &str = "SELECT DISTINCT v.digest FROM ( \
                SELECT d.version_id, d.ended_at, row_number() OVER (PARTITION BY d.consumer_id, \
                d.event_type, d.event_versions \
                    ORDER BY d.ended_at IS NULL DESC, d.deployment_id DESC) AS place \
                FROM oncebox.deployment d WHERE d.role = 'stable' OR d.ended_at IS NULL) d \
            JOIN oncebox.version v USING (version_id) WHERE d.ended_at IS NULL OR d.place <= 2";
        Ok(sqlx::query_scalar(WARM).fetch_all(&self.0.pool).await?)
    }
}

fn ended_the_process(starts: i32) -> Problem {
    let text = format!(
        "compiling this component ended the process that did it {starts} times; upload it again to \
            try once more, and report it if \
         that ends the same way"
    );
    Problem::new("compiling_ended_the_process", text)
}
