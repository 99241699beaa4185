//! How far a component is from its upload to the moment it can run: queued, compiling, ready or
//! failed.
//!
//! A compilation that ends its host must not be tried for ever, so its start is counted and
//! committed before it begins. Whoever compiles keeps a session open for it: where that has ended,
//! or says nothing any more, the next one takes it over.

use oncebox_model::{connect::connect, error::InboxError, problem::Problem};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::control::Admin;

/// Starts of a compilation that never came to an end.
const STARTS_MAX: i32 = 3;

/// Nobody works on it any more: the session that was kept open for it has ended, or its host said
/// nothing for too long, or has ended. A login that may not see when others' sessions began goes by
/// the process id alone.
const ABANDONED: &str = "(c.state_at < now() - interval '30 seconds' OR c.host_id IS NOT NULL AND \
    NOT EXISTS \
    (SELECT FROM oncebox.host h WHERE h.host_id = c.host_id AND h.seen_at > now() - interval '30 \
    seconds') \
    OR c.session_pid IS NOT NULL AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a \
        WHERE a.pid = c.session_pid AND coalesce(a.backend_start = c.session_began_at, true)))";

/// The session that the row of a compilation names. The component is free again when this is
/// dropped, or ends with its process.
#[derive(Debug)]
pub struct CompilationClaim {
    session: PgConnection,
    /// The server's process that serves it.
    pid: i32,
}

/// Whether a host may compile a component.
#[derive(Debug)]
pub enum Begun {
    /// It is compiling now, and the caller's to finish, who keeps this until then.
    Yours(CompilationClaim),
    /// It was compiled before, here or elsewhere.
    Ready,
    /// It was found not to fit.
    Failed(Vec<Problem>),
    /// Another host compiles it.
    Elsewhere,
}

/// How a compilation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compiled {
    /// It can be deployed.
    Ready {
        /// How long it took, milliseconds.
        compile_ms: i64,
    },
    /// It cannot, for these reasons.
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

impl Admin {
    /// Take a component to compile it, unless that is done or being done. The start is committed
    /// when this returns. `host_id` is none in a process that is no host.
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
        let mut tx = self.pool.begin().await?;
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
        let mut session = connect(&self.options).await?;
        let pid = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut session).await?;
        Ok(CompilationClaim { session, pid })
    }

    /// The compilation goes on; said every few seconds. A session that broke is replaced, unless
    /// somebody else has taken the component over meanwhile.
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

    /// The end of a compilation. False: another host has taken it over in the meantime, and says
    /// what becomes of it.
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
        Ok(end.execute(&self.pool).await?.rows_affected() > 0)
    }

    /// Components that wait for a host: queued for some seconds without anyone beginning, or
    /// abandoned.
    pub async fn unfinished_components(&self, limit: i64) -> Result<Vec<Vec<u8>>, InboxError> {
        let list = format!(
            "SELECT c.digest FROM oncebox.component c WHERE c.state = 'queued' AND c.state_at < \
                now() - interval '5 seconds' \
                OR c.state = 'compiling' AND {ABANDONED} ORDER BY c.state_at LIMIT $1"
        );
        Ok(sqlx::query_scalar(AssertSqlSafe(list)).bind(limit).fetch_all(&self.pool).await?)
    }

    /// What every slot runs, and what it ran before, which a rollback goes back to.
    pub async fn warm_components(&self) -> Result<Vec<Vec<u8>>, InboxError> {
        const WARM: &str = "SELECT DISTINCT v.digest FROM ( \
                SELECT d.version_id, d.ended_at, row_number() OVER (PARTITION BY d.consumer_id, \
                d.event_type, d.event_versions \
                    ORDER BY d.ended_at IS NULL DESC, d.deployment_id DESC) AS place \
                FROM oncebox.deployment d WHERE d.role = 'stable' OR d.ended_at IS NULL) d \
            JOIN oncebox.version v USING (version_id) WHERE d.ended_at IS NULL OR d.place <= 2";
        Ok(sqlx::query_scalar(WARM).fetch_all(&self.pool).await?)
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
