//! How a connection to a database begins, and how long its answers are waited for.

use std::time::Duration;

use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::error::InboxError;

/// How long a connection may take to open.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than a statement may take its answer is waited for. A server that is heard of no
/// more is noticed by that, also where something in between still acknowledges what is sent.
const ANSWER_MARGIN: Duration = Duration::from_secs(3);

/// Startup options by which the server notices that its client is not reachable any more, and lets
/// go of the locks of what it had open. The driver asks the same of its own side of the connection.
pub const NOTICE_SILENCE: [(&str, &str); 5] = [
    ("tcp_keepalives_idle", "4"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "2"),
    ("tcp_user_timeout", "8000"),
    ("client_connection_check_interval", "500"),
];

/// For how long an answer is waited for whose statement the server ends after so many milliseconds;
/// zero is never, as the server takes it.
pub fn answer_max(statement_timeout_ms: u64) -> Duration {
    match statement_timeout_ms {
        0 => Duration::MAX,
        ms => Duration::from_millis(ms).saturating_add(ANSWER_MARGIN),
    }
}

/// Open a connection, or say that the database does not answer.
pub async fn connect(options: &PgConnectOptions) -> Result<PgConnection, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(options))
        .await
        .map_err(silent)?;
    connected.map_err(lost_on_connecting)
}

/// A pooler that does not drop startup options refuses them.
fn lost_on_connecting(error: sqlx::Error) -> InboxError {
    let message =
        error.as_database_error().map(|error| error.message().to_owned()).unwrap_or_default();
    if message.contains("unsupported startup parameter") {
        return InboxError::OptionsLost { lost: vec!["options".to_owned()] };
    }
    error.into()
}
