//! Settings of the database.

use oncebox_control::MigrationBounds;
use oncebox_inbox::SessionSettings;
use serde::Deserialize;

/// `[database]`
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseSettings {
    /// URL of the host's own login.
    pub url: String,
    /// Most connections of all tenants together.
    pub connections_max: usize,
    /// Longest statement of a guest, in milliseconds.
    pub statement_timeout_ms: u64,
    /// Longest wait for a lock, in milliseconds.
    pub lock_timeout_ms: u64,
    /// Longest pause between two statements of an open transaction, in milliseconds.
    pub idle_in_transaction_timeout_ms: u64,
    /// Longest wait of a tenant's migration for a lock, in milliseconds; messages queue behind it.
    pub migration_lock_timeout_ms: u64,
    /// Most tries of a tenant's migration that meets locks of other sessions.
    pub migration_attempts_max: u32,
    /// Longest statement of a tenant's migration, in milliseconds.
    pub migration_statement_timeout_ms: u64,
    /// Time without reach of a consumer's database, in milliseconds, after which this host leaves
    /// the consumer's group; 0 for never.
    pub leave_after_ms: u64,
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        let SessionSettings {
            statement_timeout_ms,
            lock_timeout_ms,
            idle_in_transaction_timeout_ms,
        } = SessionSettings::default();
        let MigrationBounds {
            lock_timeout_ms: migration_lock_timeout_ms,
            attempts_max,
            statement_timeout_ms: longest,
        } = MigrationBounds::default();
        Self {
            url: String::new(),
            connections_max: 32,
            statement_timeout_ms,
            lock_timeout_ms,
            idle_in_transaction_timeout_ms,
            migration_lock_timeout_ms,
            migration_attempts_max: attempts_max,
            migration_statement_timeout_ms: longest,
            leave_after_ms: 4_000,
        }
    }
}

/// The URL holds a password.
impl std::fmt::Debug for DatabaseSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DatabaseSettings")
            .field("connections_max", &self.connections_max)
            .finish_non_exhaustive()
    }
}
