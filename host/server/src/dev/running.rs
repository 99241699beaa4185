//! What an `oncebox dev` tells the commands of its folder: first that it starts and what it is
//! about, then where its broker and its database are. Both files are locked for as long as the
//! process lives; a lock ends with the process however that ends, so a file that was left behind is
//! told from one that holds.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{ErrorKind, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::config::Config;

/// Where `oncebox dev` keeps its files, unless it is told otherwise.
pub(crate) const DIR: &str = ".oncebox/dev";

const FILE: &str = "dev.json";
/// Holds what a starting `oncebox dev` is about, and nothing once it is up.
const START_FILE: &str = "dev.lock";

/// How long a command waits for an `oncebox dev` that a shell may have put into the background a
/// moment ago.
const APPEAR_MAX: Duration = Duration::from_secs(2);
/// How long it waits for one that starts: a large component may take minutes to compile.
const START_MAX: Duration = Duration::from_secs(600);
/// How often it looks.
const POLL: Duration = Duration::from_millis(50);
/// A command that looks holds the lock for an instant: an `oncebox dev` tries again this often
/// before it believes that another one has it.
const LOCK_TRIES: u32 = 20;
/// Pause between two tries.
const LOCK_AGAIN: Duration = Duration::from_millis(10);

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

/// An `oncebox dev` from its first moment to its last; there is one of a folder.
pub(super) struct Start {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl Start {
    /// Begin, unless another one of this folder lives.
    pub(super) fn begin(dir: &Path) -> Result<Self> {
        let path = dir.join(START_FILE);
        let failed = || format!("failed to write `{}`", path.display());
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .with_context(failed)?;
        let mut locked = file.try_lock();
        for _ in 0..LOCK_TRIES {
            if !matches!(locked, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(LOCK_AGAIN);
            locked = file.try_lock();
        }
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!(
                    "an `oncebox dev` is running with `{}` already; stop it, or use another \
                        `--dir`",
                    dir.display()
                )
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(failed),
        }
        Ok(Self { path, file })
    }

    /// Say what it is about, for commands that wait for it.
    pub(super) fn is_about(&mut self, what: &str) -> Result<()> {
        self.write(what).with_context(|| format!("failed to write `{}`", self.path.display()))
    }

    /// It is up, or ends: nothing waits for its start any more.
    pub(super) fn end(&mut self) -> Result<()> {
        self.is_about("")
    }

    fn write(&mut self, what: &str) -> std::io::Result<()> {
        // In this order: an empty file says that nothing starts, and a command may read at any
        // moment.
        self.file.rewind()?;
        self.file.write_all(what.as_bytes())?;
        self.file.set_len(what.len() as u64)
    }

    /// What the one that starts with this folder is about, if one does.
    fn find(dir: &Path) -> Result<Option<String>> {
        let path = dir.join(START_FILE);
        let failed = || format!("failed to read `{}`", path.display());
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(failed)?,
        };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => {
                let what = std::io::read_to_string(file).with_context(failed)?;
                Ok(Some(what).filter(|what| !what.is_empty()))
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(failed),
            Ok(()) => Ok(None),
        }
    }
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
            bail!(
                "an `oncebox dev` is running with `{}` already; stop it, or use another `--dir`",
                dir.display()
            );
        }
        let new = dir.join(format!("{FILE}.new"));
        let _ = std::fs::remove_file(&new);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .with_context(failed)?;
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
            Err(TryLockError::WouldBlock) => {
                Ok(Some(serde_json::from_reader(&file).with_context(failed)?))
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(failed),
            // Nobody holds it: its owner was killed.
            Ok(()) => Ok(None),
        }
    }

    /// What runs with this folder, if anything does. One that starts is waited for, with a line on
    /// standard error.
    pub(crate) async fn wait(dir: &Path) -> Result<Option<Self>> {
        let began = Instant::now();
        let mut told = None;
        loop {
            // In this order: the one that is up wrote its file before it said so.
            let starting = Start::find(dir)?;
            if let Some(running) = Self::find(dir)? {
                return Ok(Some(running));
            }
            let elapsed = began.elapsed();
            match starting {
                Some(what) if elapsed >= START_MAX => {
                    bail!(
                        "the `oncebox dev` of this folder is not ready after {} s; it is {what}",
                        START_MAX.as_secs()
                    )
                }
                Some(what) if told.as_ref() != Some(&what) => {
                    eprintln!("waiting for the `oncebox dev` of this folder, which is {what}");
                    told = Some(what);
                }
                Some(_) => {}
                None if told.is_some() => bail!(
                    "the `oncebox dev` of this folder ended before it was ready; it says why where \
                        it ran"
                ),
                None if elapsed >= APPEAR_MAX => return Ok(None),
                None => {}
            }
            sleep(POLL).await;
        }
    }
}

/// Commands of a person who configured nothing speak to the `oncebox dev` of the folder they are
/// in. A database or a key that is configured is never mixed with it.
pub(crate) async fn fill_in(config: &mut Config) -> Result<()> {
    let is_configured = !config.database.url.is_empty()
        || config.keys.master_key.is_some()
        || config.keys.master_key_file.is_some();
    if is_configured {
        return Ok(());
    }
    if let Some(Running { database_url: Some(url), master_key_file, brokers, .. }) =
        Running::wait(Path::new(DIR)).await?
    {
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

    /// What could go wrong: a command that comes a moment after `oncebox dev` is told that there is
    /// none, or waits for one that has ended.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_start_is_waited_for_and_its_end_is_told() {
        let dir = std::env::temp_dir().join(format!("oncebox-start-{}", std::process::id()));
        let running = || Running {
            brokers: "127.0.0.1:1".to_owned(),
            topic: "events".to_owned(),
            database_url: None,
            master_key_file: dir.join("master.key"),
        };
        assert_eq!(Running::wait(&dir).await.expect("no folder"), None);
        // The command is the first to be there.
        let waiting = tokio::spawn({
            let dir = dir.clone();
            async move { Running::wait(&dir).await }
        });
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut start = Start::begin(&dir).expect("a start");
        let second = Start::begin(&dir).err().expect("one at a time").to_string();
        assert!(second.contains("running with"), "{second}");
        start.is_about("starting PostgreSQL").expect("a file");
        assert_eq!(Start::find(&dir).expect("a file").as_deref(), Some("starting PostgreSQL"));
        start.is_about("compiling").expect("a file");
        assert_eq!(
            Start::find(&dir).expect("a file").as_deref(),
            Some("compiling"),
            "the shorter text replaces the longer one"
        );
        assert!(!waiting.is_finished());
        let announced = running().announce(&dir).expect("a file");
        start.end().expect("a file");
        assert_eq!(waiting.await.expect("no panic").expect("it is up"), Some(running()));
        // It stops: nobody waits for it.
        drop(announced);
        assert_eq!(
            (Start::find(&dir).expect("a file"), Running::find(&dir).expect("no file")),
            (None, None)
        );

        start.is_about("starting PostgreSQL").expect("a file");
        let waiting = tokio::spawn({
            let dir = dir.clone();
            async move { Running::wait(&dir).await }
        });
        sleep(4 * POLL).await;
        drop(start);
        let ended = waiting.await.expect("no panic").expect_err("it ended").to_string();
        assert!(ended.contains("ended before it was ready"), "{ended}");

        // A command that looks in that instant keeps nobody from starting.
        let looking = File::open(dir.join(START_FILE)).expect("a file");
        looking.try_lock_shared().expect("nobody starts");
        let looked = std::thread::spawn(move || {
            std::thread::sleep(2 * LOCK_AGAIN);
            drop(looking);
        });
        drop(Start::begin(&dir).expect("a start"));
        looked.join().expect("no panic");
        std::fs::remove_dir_all(&dir).expect("the folder");
    }

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
