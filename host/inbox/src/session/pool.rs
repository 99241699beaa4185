//! Sessions of a tenant: connections that log in as its guest role.

use std::{
    collections::VecDeque,
    sync::{Arc, LazyLock, Mutex},
    time::{Duration, Instant},
};

use oncebox_model::{
    connect::{self, CONNECT_TIMEOUT, NOTICE_SILENCE},
    error::InboxError,
    hooks::{self, Defect},
    inbox::ServerRun,
    payload_key::PayloadKey,
    session_target::SessionTarget,
    sqlstate,
    tx::{Silence, bounded},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, postgres::PgConnectOptions,
};
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{budget::Budget, reconnect::ConnectBackoff};
use crate::admission::Scheduler;

/// Settings of every session of a tenant. They travel as startup options, so they hold after `RESET
/// ALL` and override the defaults of a role.
#[derive(Debug, Clone)]
pub struct SessionSettings {
    /// Longest statement of a guest, milliseconds.
    pub statement_timeout_ms: u64,
    /// Longest wait for a lock, milliseconds.
    pub lock_timeout_ms: u64,
    /// Longest pause between two statements of an open transaction, milliseconds.
    pub idle_in_transaction_timeout_ms: u64,
}

impl Default for SessionSettings {
    fn default() -> Self {
        Self {
            statement_timeout_ms: 5_000,
            lock_timeout_ms: 2_000,
            idle_in_transaction_timeout_ms: 10_000,
        }
    }
}

/// The connections of one tenant. Each is opened when it is needed and counts against the host's
/// budget for as long as it lives.
pub struct Sessions {
    pub(crate) tenant_id: i32,
    /// Login options and secret, shared with the sessions that `giving_way` makes, so that one
    /// renewal reaches all of them.
    access: Arc<watch::Sender<Arc<Access>>>,
    /// Longest wait for a lock, where it differs from that of `access`.
    giving_way: Option<Duration>,
    pub(super) budget: Arc<Budget>,
    /// The host's own connections. One of them ends a backend whose client went away.
    pub(super) host_pool: PgPool,
    pub(super) idle: Mutex<VecDeque<Session>>,
    pub(super) away: ConnectBackoff,
    /// Time of the last probe of the server after a session broke, and the server's uptime then.
    /// The uptime is none where the server did not answer.
    pub(super) asked: tokio::sync::Mutex<Option<(Instant, Option<Duration>)>>,
    /// Time since when the database leaves a question unanswered; none while no question is open.
    pub(super) silence: Arc<Silence>,
    /// Run of the server that answered last.
    server: watch::Sender<ServerRun>,
    /// Key of the hashes of the tenant's payloads.
    payload_key: PayloadKey,
}

/// Expression for the run of the server: the time at which it started, in microseconds.
pub(crate) const SERVER_RUN: &str =
    "(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint::text";

/// Login options of connections, and the secret of calls of host functions. A connection keeps
/// those that it was opened with, and is closed once they are replaced.
pub(super) struct Access {
    pub(super) options: PgConnectOptions,
    pub(super) secret: [u8; 32],
}

/// Longest wait for the new password, of a login whose password was just changed.
const RENEWAL_WAIT: Duration = Duration::from_secs(5);

/// One connection, its backend and its share of the budget.
pub(super) struct Session {
    pub(super) connection: PgConnection,
    pub(super) backend: i32,
    /// Run of the server that it is connected to.
    pub(super) server: ServerRun,
    pub(super) access: Arc<Access>,
    /// End of its last transaction; none where it had none.
    pub(super) used_at: Option<Instant>,
    /// End of the transaction before that one; none where there was none.
    pub(super) used_before: Option<Instant>,
    pub(super) _permit: OwnedSemaphorePermit,
}

/// End of the last transaction but one on a connection, and end of the last one. Each is none where
/// there was no such transaction.
pub(super) type LastUses = (Option<Instant>, Option<Instant>);

/// Most connections that a tenant keeps open when nothing runs.
const IDLE_MAX: usize = 8;

/// Name of shadows' connections in `pg_stat_activity`.
const SHADOW_NAME: &str = "oncebox shadow";

/// Longest wait for a server to show that it is reachable.
pub(super) const PROBE: Duration = Duration::from_secs(3);

/// Time in which sessions that broke together notice it.
pub(super) const OTHERS_NOTICE: Duration = Duration::from_millis(100);

impl Sessions {
    /// Makes the sessions of a tenant's guest role, under the host's budget.
    pub fn of(target: SessionTarget, settings: &SessionSettings, budget: Arc<Budget>) -> Arc<Self> {
        let SessionTarget {
            tenant_id,
            tenant,
            revision,
            limits,
            options,
            secret,
            payload_key,
            schema,
            pool,
        } = target;
        budget.scheduler().set_limits(tenant_id, revision, &tenant, &limits);
        // A guest's texts and notices are its own; the host's log carries none of them.
        let options = options.disable_statement_logging().statement_cache_capacity(200).options([
            ("statement_timeout", settings.statement_timeout_ms.to_string()),
            ("lock_timeout", settings.lock_timeout_ms.to_string()),
            (
                "idle_in_transaction_session_timeout",
                settings.idle_in_transaction_timeout_ms.to_string(),
            ),
            ("default_transaction_read_only", "on".to_owned()),
            ("search_path", schema),
            ("application_name", "oncebox".to_owned()),
        ]);
        let options = options
            .options(NOTICE_SILENCE)
            .answer_timeout(connect::answer_max(settings.statement_timeout_ms));
        let access = Arc::new(watch::Sender::new(Arc::new(Access { options, secret })));
        Self::with(tenant_id, access, None, pool, payload_key, budget)
    }

    fn with(
        tenant_id: i32,
        access: Arc<watch::Sender<Arc<Access>>>,
        giving_way: Option<Duration>,
        host_pool: PgPool,
        payload_key: PayloadKey,
        budget: Arc<Budget>,
    ) -> Arc<Self> {
        let away = ConnectBackoff::new(access.borrow().options.get_username());
        let sessions = Arc::new(Self {
            tenant_id,
            access,
            giving_way,
            budget,
            host_pool,
            idle: Mutex::default(),
            away,
            asked: tokio::sync::Mutex::default(),
            silence: Arc::default(),
            server: watch::Sender::default(),
            payload_key,
        });
        sessions
            .budget
            .tenants
            .lock()
            .expect("no panic while held")
            .push(Arc::downgrade(&sessions));
        sessions
    }

    /// Makes sessions of this role that wait for no lock for longer than `lock_timeout`.
    pub(crate) fn giving_way(&self, lock_timeout: Duration) -> Arc<Self> {
        Self::with(
            self.tenant_id,
            self.access.clone(),
            Some(lock_timeout),
            self.host_pool.clone(),
            self.payload_key.clone(),
            self.budget.clone(),
        )
    }

    /// Replaces the password of logins and the secret of calls of host functions. Open transactions
    /// keep the secret that they began with; when they end, their connections are closed.
    pub fn renew(&self, password: &str, secret: [u8; 32]) {
        let renewed = self.access.send_if_modified(|access| {
            let options = access.options.clone().password(password);
            let is_new = access.secret != secret;
            if is_new {
                *access = Arc::new(Access { options, secret });
            }
            is_new
        });
        if renewed {
            self.idle.lock().expect("no panic while held").clear();
        }
    }

    pub(super) fn access(&self) -> Arc<Access> {
        self.access.borrow().clone()
    }

    /// Returns the scheduler that admits transactions.
    pub(crate) fn scheduler(&self) -> &Arc<Scheduler> {
        self.budget.scheduler()
    }

    /// Returns whether a transaction waits for a connection, or for what this tenant's transactions
    /// hold.
    pub(crate) fn is_short(&self) -> bool {
        self.budget.is_short() || self.scheduler().is_crowded(self.tenant_id)
    }

    /// Returns the key of the hashes of the tenant's payloads. A renewal does not change it.
    pub(crate) fn payload_key(&self) -> &PayloadKey {
        &self.payload_key
    }

    /// Returns the run of the server that answered last, as it changes.
    pub fn server(&self) -> watch::Receiver<ServerRun> {
        self.server.subscribe()
    }

    /// Records the run of the server that just answered.
    pub(crate) fn saw_server(&self, server: &ServerRun) {
        self.server.send_if_modified(|known| {
            let is_new = known != server;
            if is_new {
                known.clone_from(server);
            }
            is_new
        });
    }

    /// Returns the host's own connections.
    pub(crate) fn host_pool(&self) -> &PgPool {
        &self.host_pool
    }

    pub(super) async fn connect(&self) -> Result<Session, InboxError> {
        let permit = self.budget.permit().await;
        self.connect_with(permit).await
    }

    pub(super) async fn connect_with(
        &self,
        permit: OwnedSemaphorePermit,
    ) -> Result<Session, InboxError> {
        self.silence.asked();
        self.away.connect(self.open(permit)).await
    }

    async fn open(&self, permit: OwnedSemaphorePermit) -> Result<Session, InboxError> {
        let mut renewals = self.access.subscribe();
        let access = renewals.borrow_and_update().clone();
        let (access, mut connection) = match self.log_in(&access).await {
            Ok(connection) => (access, connection),
            Err(error) if is_wrong_password(&error) => {
                // Passwords change a moment before hosts hear of it.
                let renewed = tokio::time::timeout(RENEWAL_WAIT, renewals.changed()).await;
                if !matches!(renewed, Ok(Ok(()))) {
                    return Err(error.into());
                }
                let access = self.access();
                let connection = self.log_in(&access).await?;
                (access, connection)
            }
            Err(error) => return Err(error.into()),
        };
        // A tenant's restrictions rest on its startup options. A pooler that was put in between
        // since then may drop them.
        static BEGUN: LazyLock<String> = LazyLock::new(|| {
            format!(
                "SELECT pg_backend_pid(), current_setting('default_transaction_read_only')::bool, \
                    {SERVER_RUN}"
            )
        });
        let (backend, has_options, server): (i32, bool, String) =
            bounded(sqlx::query_as(AssertSqlSafe(BEGUN.as_str())).fetch_one(&mut connection))
                .await?;
        if !has_options {
            return Err(InboxError::OptionsLost {
                lost: vec!["default_transaction_read_only".to_owned()],
            });
        }
        let server = Some(server.into());
        self.saw_server(&server);
        Ok(Session {
            connection,
            backend,
            server,
            access,
            used_at: None,
            used_before: None,
            _permit: permit,
        })
    }

    pub(super) async fn log_in(&self, access: &Access) -> Result<PgConnection, sqlx::Error> {
        let mut options = access.options.clone();
        if let Some(lock_timeout) = self.giving_way {
            let lock_timeout = format!("{}ms", lock_timeout.as_millis());
            options =
                options.application_name(SHADOW_NAME).options([("lock_timeout", lock_timeout)]);
        }
        let connecting =
            tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options));
        connecting.await.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))?
    }

    /// Takes the idle sessions that were unused for at least this long. The front has rested
    /// longest: sessions are taken from the back and put there.
    pub(super) fn take_unused(&self, unused: Duration) -> Vec<Session> {
        let mut idle = self.idle.lock().expect("no panic while held");
        let old = idle
            .iter()
            .take_while(|session| session.used_at.is_none_or(|at| at.elapsed() >= unused))
            .count();
        idle.drain(..old).collect()
    }

    /// Returns the last uses and the backend of the idle connection whose last use but one is the
    /// longest ago.
    pub(super) fn least_used(&self) -> Option<(LastUses, i32)> {
        let idle = self.idle.lock().expect("no panic while held");
        let least = idle
            .iter()
            .map(|session| ((session.used_before, session.used_at), session.backend))
            .min();
        if hooks::sabotage(Defect::ConnectionsUnranked) {
            least.map(|(_, backend)| ((None, None), backend))
        } else {
            least
        }
    }

    pub(super) fn take(&self, backend: i32) -> Option<Session> {
        let mut idle = self.idle.lock().expect("no panic while held");
        let at = idle.iter().position(|session| session.backend == backend)?;
        idle.remove(at)
    }

    /// Takes an idle connection, and closes those that were opened with a replaced password or
    /// secret.
    pub(super) fn take_idle(&self) -> Option<Session> {
        let access = self.access();
        let mut idle = self.idle.lock().expect("no panic while held");
        idle.retain(|session| Arc::ptr_eq(&session.access, &access));
        idle.pop_back()
    }

    pub(super) fn keep(&self, session: Session) {
        if !Arc::ptr_eq(&session.access, &self.access()) {
            return;
        }
        let mut idle = self.idle.lock().expect("no panic while held");
        if idle.len() >= IDLE_MAX {
            return;
        }
        idle.push_back(session);
        drop(idle);
        if self.budget.is_short() {
            self.budget.close_idle();
        }
    }
}

/// Returns whether a server refused a login because it takes no more connections.
pub(super) fn is_full(error: &sqlx::Error) -> bool {
    has_code(error, sqlstate::TOO_MANY_CONNECTIONS)
}

/// Returns whether PostgreSQL refused the password of a role. Its answer may leave open whether the
/// role or the password is wrong.
fn is_wrong_password(error: &sqlx::Error) -> bool {
    has_code(error, sqlstate::INVALID_PASSWORD)
}

fn has_code(error: &sqlx::Error, sqlstate: &str) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == sqlstate)
}
