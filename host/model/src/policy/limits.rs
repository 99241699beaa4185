//! The limits of handlers, and of a consumer as a whole.

use serde::{Deserialize, Serialize};

/// Caps on one message and on one run of its handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Longest call, milliseconds of wall clock.
    pub deadline_ms: u64,
    /// Bytes of linear memory of the instance, all memories together.
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
    /// Savepoints open at once.
    pub savepoints_max: usize,
    /// Bytes of log lines per message.
    pub log_bytes_max: usize,
    /// Bytes of the JSON result kept in the inbox row.
    pub outcome_bytes_max: usize,
    /// Bytes of a message's payload. Over it, the message is parked without its payload.
    pub payload_bytes_max: usize,
    /// Messages that a handler may send per message.
    pub outgoing_max: u32,
    /// Bytes of the messages that a handler may send in one run, all of them together.
    pub outgoing_bytes_max: u64,
    /// Concurrent transactions of this consumer on one host, hence instances; none for the tenant's
    /// bound. Over it, messages wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transactions_max: Option<usize>,
    /// Messages a second on one host; none for no bound. Over it, messages wait. Hosts do not
    /// coordinate it, which would cost every message a round trip: n hosts take n times as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages_per_second: Option<u32>,
}

/// Limits of the consumer alone, which a deployment cannot set.
pub const OF_CONSUMER: [&str; 3] = ["payload_bytes_max", "transactions_max", "messages_per_second"];

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
            payload_bytes_max: 8 << 20,
            outgoing_max: 100,
            outgoing_bytes_max: 1 << 20,
            transactions_max: None,
            messages_per_second: None,
        }
    }
}
