//! The programs of PostgreSQL that are installed on this machine.

use std::{fs, path::PathBuf, process::Command};

/// Returns the path of a program of PostgreSQL's client, such as `pg_dump`: that of the newest
/// version. None where this machine has none.
pub fn find(name: &str) -> Option<PathBuf> {
    folders(None).into_iter().map(|dir| dir.join(name)).find(|program| program.is_file())
}

/// Lists folders that may hold PostgreSQL's programs, best first: the distributions' folders from
/// the newest version down, or of one major version, then `pg_config`'s, then those of PATH.
pub fn folders(major: Option<&str>) -> Vec<PathBuf> {
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
