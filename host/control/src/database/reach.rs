//! How the host's own login reaches a database: whether what its connections ask of the server when
//! they begin arrived, and how a connection on which nothing is heard any more is told from one that
//! is slow.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use oncebox_model::{
    connect::{NOTICE_SILENCE, connect},
    error::InboxError,
};
use sqlx::{
    Connection, Executor, PgConnection, Postgres, Row,
    pool::PoolOptions,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};

/// How long a connection that rested may take to say that it is there.
const PING_MAX: Duration = Duration::from_secs(2);
/// How long the host waits for an answer on a connection of its own login, but for migrations. No
/// other statement of it takes as long; without a bound a connection that a firewall has forgotten
/// would be waited for, and counted as in use, for ever.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// Options that are sent to find out whether such options arrive: values that no server has by
/// itself.
const ASKED: [(&str, &str); 5] = [
    ("search_path", "oncebox_asked"),
    ("statement_timeout", "54321"),
    ("lock_timeout", "12345"),
    ("idle_in_transaction_session_timeout", "43210"),
    ("default_transaction_read_only", "on"),
];

/// The connections of the host's login. One that rested is asked whether it is there before it is
/// used, and not for long; where one does not answer, those that are as old are not asked at all.
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

/// Options of the host's login, by which neither side waits for the other for ever.
pub(crate) fn noticing_silence(options: PgConnectOptions) -> PgConnectOptions {
    options.options(NOTICE_SILENCE).answer_timeout(ANSWER_MAX)
}

/// Check that a connection to this database begins with the options that it asks for. A pooler in
/// between drops them, and with them everything that the host's sessions rest on.
pub(crate) async fn check_options_arrive(options: &PgConnectOptions) -> Result<(), InboxError> {
    // Whoever looks at the database sees that nothing is about to be changed by this.
    let mut connection = connect(&options.clone().options(ASKED)).await?;
    let found = ASKED
        .map(|(name, _)| {
            format!("(SELECT setting FROM pg_catalog.pg_settings WHERE name = '{name}')")
        })
        .join(", ");
    // By the simple protocol: a pooler may hand out a connection on which statements of others are
    // prepared.
    let row: PgRow =
        connection.fetch_one(sqlx::raw_sql(sqlx::AssertSqlSafe(format!("SELECT {found}")))).await?;
    let _ = connection.close().await; // the answer is there
    let mut lost = Vec::new();
    for (nth, (name, value)) in ASKED.iter().enumerate() {
        if row.try_get::<Option<&str>, _>(nth)? != Some(value) {
            lost.push((*name).to_owned());
        }
    }
    if lost.is_empty() { Ok(()) } else { Err(InboxError::OptionsLost { lost }) }
}

/// Open a connection to the host's own database, or say that it does not
/// exist.
pub(crate) async fn connect_to_own(options: &PgConnectOptions) -> Result<PgConnection, InboxError> {
    connect(options).await.map_err(|error| match error {
        InboxError::Unreachable(sqlx::Error::Database(answer))
            if answer.code().is_some_and(|code| code == NO_DATABASE) =>
        {
            // By default that of the login's name.
            let database = options.get_database().unwrap_or_else(|| options.get_username());
            InboxError::NoDatabase { database: database.to_owned() }
        }
        error => error,
    })
}

/// What PostgreSQL answers when it holds no database of a name.
const NO_DATABASE: &str = "3D000";
