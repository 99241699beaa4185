//! Limits of tenants' migrations on the server.

/// Limits of a tenant's migration on the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationBounds {
    /// Longest wait for a lock, milliseconds. Every other session that wants the table queues
    /// behind it.
    pub lock_timeout_ms: u64,
    /// Number of attempts for a migration that meets locks of other sessions.
    pub attempts_max: u32,
    /// Longest duration of a statement, milliseconds.
    pub statement_timeout_ms: u64,
}

impl Default for MigrationBounds {
    fn default() -> Self {
        Self { lock_timeout_ms: 500, attempts_max: 10, statement_timeout_ms: 600_000 }
    }
}
