//! Connections of the host's own login to a database. The host checks that the options of its
//! connections arrive at the server, and tells a silent connection from a slow one.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use oncebox_model::{
    connect::{NOTICE_SILENCE, connect},
    error::InboxError,
    sqlstate,
};
use sqlx::{
    Connection, Executor, PgConnection, Postgres, Row,
    pool::PoolOptions,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};

/// Longest wait for the ping of an idle connection.
const PING_MAX: Duration = Duration::from_secs(2);
/// Longest wait for an answer on a connection of the host's login, except for migrations. No other
/// statement takes that long. Without a bound, a connection that a firewall has dropped would stay
/// in use for ever.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// Options that the host sends to learn whether options arrive: values that no server has by
/// default.
const ASKED: [(&str, &str); 5] = [
    ("search_path", "oncebox_asked"),
    ("statement_timeout", "54321"),
    ("lock_timeout", "12345"),
    ("idle_in_transaction_session_timeout", "43210"),
    ("default_transaction_read_only", "on"),
];

/// Returns the options of a pool for the host's login. An idle connection is pinged before use, for
/// at most [`PING_MAX`]. After one stays silent, those that were opened before that moment are
/// dropped without a ping.
pub(crate) fn pool(connections_max: u32, patience: Duration) -> PgPoolOptions {
    let fell_silent: Arc<Mutex<Option<Instant>>> = Arc::default();
    let options: PoolOptions<Postgres> = PgPoolOptions::new()
        .max_connections(connections_max)
        .acquire_timeout(patience)
        .test_before_acquire(false);
    options.before_acquire(move |connection, resting| {
        let fell_silent = fell_silent.clone();
        Box::pin(async move {
            let opened_at = Instant::now().checked_sub(resting.age);
            let silent_at = *fell_silent.lock().unwrap_or_else(PoisonError::into_inner);
            if silent_at
                .is_some_and(|silent_at| opened_at.is_none_or(|opened_at| opened_at < silent_at))
            {
                return Ok(false);
            }
            let answered = tokio::time::timeout(PING_MAX, connection.ping()).await;
            if answered.is_err() {
                *fell_silent.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            }
            Ok(matches!(answered, Ok(Ok(()))))
        })
    })
}

/// Adds the options of the host's login by which neither side waits for the other for ever.
pub(crate) fn noticing_silence(options: PgConnectOptions) -> PgConnectOptions {
    options.options(NOTICE_SILENCE).answer_timeout(ANSWER_MAX)
}

/// Checks that a connection to this database begins with the requested options. A pooler in between
/// drops them, and with them the settings that the host's sessions depend on.
pub(crate) async fn check_options_arrive(options: &PgConnectOptions) -> Result<(), InboxError> {
    // The session is read-only (`default_transaction_read_only`), so an observer sees that it
    // changes nothing.
    let mut connection = connect(&options.clone().options(ASKED)).await?;
    let found = ASKED
        .map(|(name, _)| {
            format!("(SELECT setting FROM pg_catalog.pg_settings WHERE name = '{name}')")
        })
        .join(", ");
    // Uses the simple protocol: a pooler may hand out a connection on which another client has
    // prepared statements.
    let row: PgRow =
        connection.fetch_one(sqlx::raw_sql(sqlx::AssertSqlSafe(format!("SELECT {found}")))).await?;
    let _ = connection.close().await; // the answer has arrived
    let mut lost = Vec::new();
    for (nth, (name, value)) in ASKED.iter().enumerate() {
        if row.try_get::<Option<&str>, _>(nth)? != Some(value) {
            lost.push((*name).to_owned());
        }
    }
    if lost.is_empty() { Ok(()) } else { Err(InboxError::OptionsLost { lost }) }
}

/// Opens a connection to the host's own database. Returns `NoDatabase` where it does not exist.
pub(crate) async fn connect_to_own(options: &PgConnectOptions) -> Result<PgConnection, InboxError> {
    connect(options).await.map_err(|error| match error {
        InboxError::Unreachable(sqlx::Error::Database(answer))
            if answer.code().is_some_and(|code| code == sqlstate::UNDEFINED_DATABASE) =>
        {
            // The default name is that of the login.
            let database = options.get_database().unwrap_or_else(|| options.get_username());
            InboxError::NoDatabase { database: database.to_owned() }
        }
        error => error,
    })
}
