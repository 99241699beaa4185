//! What a running `oncebox dev` tells the commands of its folder: where its broker and its database
//! are. The file is there, and locked, for as long as the process lives; the lock ends with the
//! process however that ends, so a file that was left behind is told from one that holds.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// Where `oncebox dev` keeps its files, unless it is told otherwise.
pub(crate) const DIR: &str = ".oncebox/dev";

const FILE: &str = "dev.json";

/// A running `oncebox dev`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Running {
    /// `bootstrap.servers`.
    pub(crate) brokers: String,
    /// The topic it reads.
    pub(crate) topic: String,
    /// The private database, with its password. None when it uses one that it was given.
    pub(crate) database_url: Option<String>,
    /// File with the master key.
    pub(crate) master_key_file: PathBuf,
}

/// The file, until this is dropped.
pub(super) struct Announced {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Left behind it would do no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Running {
    /// Write the file. It appears complete and locked, and nobody but its owner can read it.
    pub(super) fn announce(&self, dir: &Path) -> Result<Announced> {
        let path = dir.join(FILE);
        let failed = || format!("failed to write `{}`", path.display());
        if Self::find(dir)?.is_some() {
            bail!("an `oncebox dev` is running with `{}` already; stop it, or use another `--dir`", dir.display());
        }
        let new = dir.join(format!("{FILE}.new"));
        let _ = std::fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).with_context(failed)?;
        file.lock().with_context(failed)?;
        file.write_all(&serde_json::to_vec_pretty(self)?).with_context(failed)?;
        std::fs::rename(&new, &path).with_context(failed)?;
        Ok(Announced { path, _file: file })
    }

    /// What runs with this folder, if anything does.
    pub(crate) fn find(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE);
        let failed = || format!("failed to read `{}`", path.display());
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(failed)?,
        };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Ok(Some(serde_json::from_reader(&file).with_context(failed)?)),
            Err(TryLockError::Error(error)) => Err(error).with_context(failed),
            // Nobody holds it: its owner was killed.
            Ok(()) => Ok(None),
        }
    }
}

/// Commands of a person who configured nothing speak to the `oncebox dev` of the folder they are in.
/// A database or a key that is configured is never mixed with it.
pub(crate) fn fill_in(config: &mut Config) -> Result<()> {
    let is_configured = !config.database.url.is_empty() || config.keys.master_key.is_some() || config.keys.master_key_file.is_some();
    if is_configured {
        return Ok(());
    }
    if let Some(Running { database_url: Some(url), master_key_file, brokers, .. }) = Running::find(Path::new(DIR))? {
        config.database.url = url;
        config.keys.master_key_file = Some(master_key_file);
        if config.kafka.brokers.is_empty() {
            config.kafka.brokers = brokers;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_file_holds_only_while_its_owner_lives() {
        let dir = std::env::temp_dir().join(format!("oncebox-running-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let running = || Running {
            brokers: "127.0.0.1:1".to_owned(),
            topic: "events".to_owned(),
            database_url: Some("postgres://secret".to_owned()),
            master_key_file: dir.join("master.key"),
        };
        assert_eq!(Running::find(&dir).expect("no file"), None);
        let announced = running().announce(&dir).expect("a file");
        assert_eq!(Running::find(&dir).expect("a file"), Some(running()));
        let mode = std::fs::metadata(dir.join(FILE)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = running().announce(&dir).err().expect("one at a time").to_string();
        assert!(second.contains("running with"), "{second}");
        drop(announced);
        assert!(!dir.join(FILE).exists());
        // Left behind by a process that was killed.
        std::fs::write(dir.join(FILE), "{}").expect("a file");
        assert_eq!(Running::find(&dir).expect("a stale file"), None);
        drop(running().announce(&dir).expect("it takes the place of the stale one"));
        std::fs::remove_dir_all(&dir).expect("the folder");
    }
}
