//! Opening a connection to a database, and the time limits on its answers.

use std::time::Duration;

use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::error::InboxError;

/// Longest time that a connection may take to open.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the client waits for an answer beyond the statement's own time limit. It reveals a
/// server that has gone silent, even where a device in between still acknowledges what is sent.
const ANSWER_MARGIN: Duration = Duration::from_secs(3);

/// Startup options by which the server notices that its client is unreachable. The server then
/// releases the locks of the client's open transaction. The driver does likewise on its own side of
/// the connection.
pub const NOTICE_SILENCE: [(&str, &str); 5] = [
    ("tcp_keepalives_idle", "4"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "2"),
    ("tcp_user_timeout", "8000"),
    ("client_connection_check_interval", "500"),
];

/// Returns how long the client waits for an answer to a statement that the server ends after
/// `statement_timeout_ms` milliseconds. Zero means no limit, as it does for the server.
pub fn answer_max(statement_timeout_ms: u64) -> Duration {
    match statement_timeout_ms {
        0 => Duration::MAX,
        ms => Duration::from_millis(ms).saturating_add(ANSWER_MARGIN),
    }
}

/// Opens a connection to a database.
///
/// # Errors
///
/// [`InboxError::Unreachable`] where the database does not answer within [`CONNECT_TIMEOUT`];
/// [`InboxError::OptionsLost`] where a pooler refuses the startup options.
pub async fn connect(options: &PgConnectOptions) -> Result<PgConnection, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(options))
        .await
        .map_err(silent)?;
    connected.map_err(lost_on_connecting)
}

/// Converts an error of connecting. A pooler that does not drop startup options refuses them, so
/// that its refusal means lost options.
fn lost_on_connecting(error: sqlx::Error) -> InboxError {
    let message =
        error.as_database_error().map(|error| error.message().to_owned()).unwrap_or_default();
    if message.contains("unsupported startup parameter") {
        return InboxError::OptionsLost { lost: vec!["options".to_owned()] };
    }
    error.into()
}
