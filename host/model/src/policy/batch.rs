//! The bounds of a transaction: its messages and its time.

use serde::{Deserialize, Serialize};

/// Most messages of a transaction. A span has as many links.
pub const BATCH_MESSAGES_MAX: u64 = 1_000;

/// Bounds of one transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Batch {
    /// Maximum number of messages of a transaction, 1 to 1,000. Each holds a lock in PostgreSQL's
    /// shared lock table until the commit. Over some hundreds, with many partitions, raise the
    /// server's `max_locks_per_transaction`.
    pub messages_max: usize,
    /// Milliseconds after which no further message of the batch is started.
    pub duration_ms: u64,
}

impl Default for Batch {
    fn default() -> Self {
        Self { messages_max: 64, duration_ms: 50 }
    }
}
