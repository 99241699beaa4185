//! What handlers, and a consumer as a whole, may take.

use serde::{Deserialize, Serialize};

/// Caps on one run of a handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Wall clock around the whole call, milliseconds.
    pub deadline_ms: u64,
    /// Linear memory of the instance, bytes, all memories together.
    pub memory_bytes: usize,
    /// SQL calls per message.
    pub statements_max: u32,
    /// Different statement texts per message.
    pub statement_texts_max: usize,
    /// Bytes of one statement's text.
    pub statement_bytes_max: usize,
    /// Parameters of one statement.
    pub params_max: usize,
    /// Bytes of one statement's parameters.
    pub params_bytes_max: usize,
    /// Rows of one result.
    pub rows_max: usize,
    /// Bytes of one result.
    pub result_bytes_max: usize,
    /// Savepoints open at the same time.
    pub savepoints_max: usize,
    /// Bytes of log lines per message.
    pub log_bytes_max: usize,
    /// Bytes of the JSON result kept in the inbox row.
    pub outcome_bytes_max: usize,
    /// Transactions of this consumer at the same time on one host, hence instances; none for the
    /// tenant's bound. Over it, messages wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transactions_max: Option<usize>,
    /// Messages a second on one host; none for as many as come. Over it, messages wait. Hosts do
    /// not talk to each other about it, which would cost every message a round trip: n hosts take n
    /// times as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages_per_second: Option<u32>,
}

/// What of the limits is a consumer's alone; a deployment cannot say it.
pub const OF_CONSUMER: [&str; 2] = ["transactions_max", "messages_per_second"];

impl Default for Limits {
    fn default() -> Self {
        Self {
            deadline_ms: 5_000,
            memory_bytes: 64 << 20,
            statements_max: 1_000,
            statement_texts_max: 100,
            statement_bytes_max: 64 << 10,
            params_max: 1_000,
            params_bytes_max: 8 << 20,
            rows_max: 10_000,
            result_bytes_max: 8 << 20,
            savepoints_max: 16,
            log_bytes_max: 64 << 10,
            outcome_bytes_max: 64 << 10,
            transactions_max: None,
            messages_per_second: None,
        }
    }
}
