//! Settings of the host's database, and of those in which hosts place tenants.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::MigrationBounds;
use oncebox_control::{DatabaseUrl, NamedDatabase};
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

/// `[[databases]]`
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedDatabaseSettings {
    /// Name, which the rows of its tenants keep.
    pub name: String,
    /// URL of the host's login there.
    #[serde(default)]
    pub url: String,
    /// File with that URL.
    pub url_file: Option<PathBuf>,
    /// Share of new tenants, beside the weights of the others; 0 for none.
    #[serde(default = "weight")]
    pub weight: u32,
    /// Most connections of all tenants in it together.
    #[serde(default = "connections_max")]
    pub connections_max: usize,
}

/// Most connections of one host to a database.
const CONNECTIONS_MAX: usize = 10_000;

fn weight() -> u32 {
    1
}

fn connections_max() -> usize {
    DatabaseSettings::default().connections_max
}

impl NamedDatabaseSettings {
    /// Returns the database.
    ///
    /// # Errors
    /// A setting cannot be used, or the file cannot be read.
    pub fn database(&self) -> Result<NamedDatabase> {
        let Self { name, url, url_file, weight, connections_max } = self;
        let text = match (url.as_str(), url_file) {
            ("", Some(path)) => std::fs::read_to_string(path).with_context(|| {
                format!("failed to read the URL of database `{name}` from `{}`", path.display())
            })?,
            ("", None) => bail!("database `{name}` has no URL; set `url` or `url_file`"),
            (url, None) => url.to_owned(),
            (_, Some(_)) => bail!("database `{name}` has two URLs; leave out `url` or `url_file`"),
        };
        ensure!(
            (1..=CONNECTIONS_MAX).contains(connections_max),
            "`connections_max` of database `{name}` is {connections_max}; it must be 1 to \
                {CONNECTIONS_MAX}"
        );
        let url = DatabaseUrl::parse(&text).with_context(|| format!("database `{name}`"))?;
        Ok(NamedDatabase {
            name: name.clone(),
            url,
            weight: *weight,
            connections_max: *connections_max,
        })
    }
}

/// The URL holds a password.
impl std::fmt::Debug for NamedDatabaseSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NamedDatabaseSettings").field("name", &self.name).finish_non_exhaustive()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        let settings: NamedDatabaseSettings = toml::from_str(text).expect("settings");
        settings.database().err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    // What could go wrong: a host begins without a database that its tenants are in, or with one
    // that takes no connection; an error shows a password.
    #[test]
    fn databases_that_cannot_be_used_are_refused_by_their_names() {
        const URL: &str = "url = 'postgres://oncebox:secret@db1:5432/oncebox'";
        assert_eq!(fault(&format!("name = 'db1'\n{URL}\nweight = 0\nconnections_max = 1")), "");
        for (more, says) in [
            ("", "database `db1` has no URL; set `url` or `url_file`"),
            ("url_file = '/nowhere/url'", "the URL of database `db1` from `/nowhere/url`"),
            (&format!("{URL}\nurl_file = '/nowhere/url'"), "two URLs"),
            (&format!("{URL}\nconnections_max = 0"), "it must be 1 to 10000"),
            ("url = 'mysql://oncebox:secret@db1/x'", "database `db1`: the database URL must begin"),
            ("url = 'postgres://oncebox:secret@db1/x?options=-c'", "takes no parameters"),
        ] {
            let fault = fault(&format!("name = 'db1'\n{more}"));
            assert!(fault.contains(says) && !fault.contains("secret"), "`{more}`: {fault}");
        }
        let settings = format!("name = 'db1'\n{URL}\nport = 1");
        assert!(toml::from_str::<NamedDatabaseSettings>(&settings).is_err());
        let settings: NamedDatabaseSettings =
            toml::from_str(&format!("name = 'db1'\n{URL}")).expect("settings");
        assert!(!format!("{settings:?}").contains("secret"));
    }
}
