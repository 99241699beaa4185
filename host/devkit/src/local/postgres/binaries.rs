//! The search for an installed PostgreSQL.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::PostgresOptions;

/// Returns the folder with the server binaries: the one asked for, else the newest found. A cluster
/// that exists needs the major version that created it.
pub(super) fn find_binaries(options: &PostgresOptions) -> Result<PathBuf> {
    let version = fs::read_to_string(options.dir.join("data/PG_VERSION")).ok();
    let major = version.as_deref().map(str::trim);
    let found = match &options.binaries {
        Some(dir) => vec![dir.clone()],
        None => installed_binaries(major),
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
    let mut programs = installed_binaries(None).into_iter().map(|dir| dir.join(name));
    programs.find(|program| program.is_file()).with_context(|| {
        format!(
            "no `{name}` on this machine; install PostgreSQL's client package \
                (`postgresql-client` on Debian and Ubuntu, `postgresql` on Fedora)"
        )
    })
}

/// Lists candidate folders, best first: the distributions' folders from the newest version down,
/// then `pg_config`'s, then those of PATH.
fn installed_binaries(major: Option<&str>) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = Vec::new();
    for (parent, prefix) in
        [("/usr/lib/postgresql", ""), ("/usr/libexec", "postgresql"), ("/usr", "pgsql-")]
    {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let version = name.strip_prefix(prefix).and_then(|version| version.parse().ok());
            let bin = if prefix == "postgresql" { entry.path() } else { entry.path().join("bin") };
            versions.extend(version.map(|version| (version, bin)));
        }
    }
    versions.retain(|(version, _)| major.is_none_or(|major| major == version.to_string()));
    versions.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    let config = Command::new("pg_config").arg("--bindir").output().ok();
    let config = config.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let elsewhere = config.into_iter().chain(std::env::split_paths(&path));
    versions.into_iter().map(|(_, bin)| bin).chain(elsewhere).collect()
}
