//! A transaction of a tenant: how it commits, and how it ends otherwise.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use oncebox_model::tx::{StatementError, Tx, answered, bounded};
use sqlx::Executor;
use tokio::sync::OwnedSemaphorePermit;

use super::pool::{Access, Session, Sessions};

/// An open transaction of a tenant.
pub struct Transaction<'a> {
    pub(super) sessions: &'a Sessions,
    pub(super) tx: Option<Tx>,
    pub(super) backend: i32,
    pub(super) access: Arc<Access>,
    /// When the transaction before this one ended on its connection, if there was one.
    pub(super) used_before: Option<Instant>,
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// How long ending a backend may take.
const TERMINATE_MAX: Duration = Duration::from_secs(6);

impl Transaction<'_> {
    /// The handle that handlers get.
    pub fn tx(&self) -> &Tx {
        self.tx.as_ref().expect("taken only by commit and rollback, which consume")
    }

    /// Process id of its backend.
    pub(crate) fn backend(&self) -> i32 {
        self.backend
    }

    /// The secret that host functions ask for.
    pub(crate) fn secret(&self) -> &[u8] {
        &self.access.secret
    }

    /// Check deferred constraints at top level, as the tenant, then commit, in one round trip.
    /// The checked completion stands right before it.
    pub async fn commit(self) -> Result<(), CommitError> {
        const COMMIT: &str = "SET CONSTRAINTS ALL IMMEDIATE; COMMIT";
        let mut statement = self.tx().statement().await;
        let answer = bounded(statement.connection().execute(sqlx::raw_sql(COMMIT))).await.map(drop);
        statement.finish(answer.as_ref().err());
        match answer {
            Ok(()) => {
                self.end().await;
                Ok(())
            }
            Err(error) => match answered(&error) {
                Some(answered) => {
                    self.rollback().await;
                    Err(CommitError::RolledBack(answered))
                }
                None => {
                    self.sessions.away.lost(None);
                    Err(CommitError::Unknown(error))
                }
            },
        }
    }

    /// Undo everything and give the connection back. A connection in doubt is closed, and its
    /// backend ended, so that its locks do not outlive it.
    pub async fn rollback(self) {
        if !self.tx().is_broken().await {
            let mut statement = self.tx().statement().await;
            let answer =
                bounded(statement.connection().execute(sqlx::raw_sql("ROLLBACK"))).await.map(drop);
            statement.finish(answer.as_ref().err());
        }
        self.end().await;
    }

    async fn end(mut self) {
        let tx = self.tx.take().expect("a transaction ends once");
        if tx.has_forgotten().await {
            // Others may have forgotten too, and nobody has noticed yet.
            self.sessions.idle.lock().expect("no panic while held").clear();
        }
        let permit = self.permit.take();
        match (tx.into_connection(), permit) {
            (Some(connection), Some(permit)) => {
                let (backend, access) = (self.backend, self.access.clone());
                let (used_at, used_before) = (Some(Instant::now()), self.used_before);
                self.sessions.keep(Session {
                    connection,
                    backend,
                    access,
                    used_at,
                    used_before,
                    _permit: permit,
                });
            }
            _ => {
                self.sessions.silence.asked();
                self.terminate().await;
            }
        }
    }

    async fn terminate(&self) {
        if self.sessions.away.is_known() {
            // Nothing that is asked arrives; the server notices by itself that nobody is there.
            return;
        }
        // Process ids are used again; the role makes sure that it is still one of ours.
        const TERMINATE: &str = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
            WHERE pid = $1 AND usename = $2";
        let terminate =
            sqlx::query(TERMINATE).bind(self.backend).bind(self.access.options.get_username());
        // A little longer than it waits there; a server that is out of reach keeps nobody waiting
        // for it.
        let ended =
            tokio::time::timeout(TERMINATE_MAX, terminate.execute(&self.sessions.admin)).await;
        let ended =
            ended.unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())));
        if let Err(error) = ended {
            tracing::warn!(backend = self.backend, %error, "failed to end the backend of an \
                abandoned statement");
        }
    }
}

/// What became of a COMMIT that did not succeed.
#[derive(Debug)]
pub enum CommitError {
    /// PostgreSQL answered with an error: nothing was committed.
    RolledBack(StatementError),
    /// The answer was lost.
    Unknown(sqlx::Error),
}

impl Drop for Transaction<'_> {
    /// A transaction that is neither committed nor rolled back closes its connection: dropping the
    /// handle does, and PostgreSQL aborts what it held.
    fn drop(&mut self) {
        if self.tx.is_some() {
            tracing::debug!(
                backend = self.backend,
                "a transaction was dropped; its connection is closed"
            );
        }
    }
}
