//! The search for an installed PostgreSQL.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use oncebox_control::postgres_programs;

use super::PostgresOptions;

/// Returns the folder with the server binaries: the one asked for, else the newest found. A cluster
/// that exists needs the major version that created it.
pub(super) fn find_binaries(options: &PostgresOptions) -> Result<PathBuf> {
    let version = fs::read_to_string(options.dir.join("data/PG_VERSION")).ok();
    let major = version.as_deref().map(str::trim);
    let found = match &options.binaries {
        Some(dir) => vec![dir.clone()],
        None => postgres_programs::folders(major),
    };
    let complete = |dir: &&PathBuf| dir.join("initdb").is_file() && dir.join("postgres").is_file();
    let place = options
        .binaries
        .as_ref()
        .map_or("on this machine".to_owned(), |dir| format!("in `{}`", dir.display()));
    found.iter().find(complete).cloned().with_context(|| {
        let version = major.map(|major| format!(" {major}")).unwrap_or_default();
        format!(
            "no PostgreSQL{version} server binaries (`initdb`, `postgres`) {place}; install the \
                server package \
            (`postgresql` on Debian and Ubuntu, `postgresql-server` on Fedora), or configure the \
            URL of a running database"
        )
    })
}

/// Returns the path of a program of PostgreSQL, such as `pg_dump`, which stands beside the server's
/// binaries.
///
/// # Errors
/// No folder with PostgreSQL has the program.
#[cfg(feature = "test-hooks")]
pub fn program(name: &str) -> Result<PathBuf> {
    postgres_programs::find(name).with_context(|| {
        format!(
            "no `{name}` on this machine; install PostgreSQL's client package \
                (`postgresql-client` on Debian and Ubuntu, `postgresql` on Fedora)"
        )
    })
}
