//! Two files by which an `oncebox dev` informs the commands of its folder: that it starts and what
//! it is doing, then where its broker and its database are. The process locks both for as long as
//! it lives. A lock ends with its process, so a file that was left behind differs from one that
//! holds.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{ErrorKind, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use oncebox_control::Control;
use oncebox_server::Config;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

/// Default folder of the files of `oncebox dev`.
pub const DIR: &str = ".oncebox/dev";

const FILE: &str = "dev.json";
/// File with the present step of an `oncebox dev` that starts; empty once it is up.
const START_FILE: &str = "dev.lock";

/// Longest wait of a command for an `oncebox dev` that a shell may have put into the background a
/// moment ago.
const APPEAR_MAX: Duration = Duration::from_secs(2);
/// Longest wait of a command for one that starts: a large component may take minutes to compile.
const START_MAX: Duration = Duration::from_secs(600);
/// Pause between two looks at the files.
const POLL: Duration = Duration::from_millis(50);
/// Tries of an `oncebox dev` to take the lock before it concludes that another one has it. A
/// command that looks holds the lock for an instant.
const LOCK_TRIES: u32 = 20;
/// Pause between two tries to take the lock.
const LOCK_AGAIN: Duration = Duration::from_millis(10);

/// A running `oncebox dev`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunningDev {
    /// `bootstrap.servers`.
    pub(crate) brokers: String,
    /// The topic that it reads.
    pub(crate) topic: String,
    /// URL of the private database, with its password. None where it uses a database that it was
    /// given.
    pub(crate) database_url: Option<String>,
    /// File with the master key.
    pub(crate) master_key_file: PathBuf,
}

/// The start of an `oncebox dev`, locked from its first moment to its last; a folder has one.
pub(super) struct DevStart {
    path: PathBuf,
    /// The file, which holds the lock.
    file: File,
}

impl DevStart {
    /// Begins the start of an `oncebox dev`, unless another one of this folder lives.
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

    /// Writes its present step, for commands that wait for it.
    pub(super) fn is_about(&mut self, what: &str) -> Result<()> {
        self.write(what).with_context(|| format!("failed to write `{}`", self.path.display()))
    }

    /// Ends the start: it is up or stops, so no command waits for it any longer.
    pub(super) fn end(&mut self) -> Result<()> {
        self.is_about("")
    }

    fn write(&mut self, what: &str) -> std::io::Result<()> {
        // In this order: an empty file means that nothing starts, and a command may read at any
        // moment.
        self.file.rewind()?;
        self.file.write_all(what.as_bytes())?;
        self.file.set_len(what.len() as u64)
    }

    /// Returns the present step of an `oncebox dev` that starts with this folder, if one does.
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

/// The file of a running `oncebox dev`, until this is dropped.
pub(super) struct Announced {
    path: PathBuf,
    /// The file, which holds the lock.
    _file: File,
}

impl Drop for Announced {
    fn drop(&mut self) {
        // A file that is left behind does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl RunningDev {
    /// Writes the file. It appears complete and locked, and only its owner can read it.
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

    /// Returns the `oncebox dev` that runs with this folder, if one does.
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
            // The lock is free: the file's owner was killed.
            Ok(()) => Ok(None),
        }
    }

    /// Returns the `oncebox dev` that runs with this folder, if one does. It waits for one that
    /// starts, with a line on standard error.
    pub(crate) async fn wait(dir: &Path) -> Result<Option<Self>> {
        let began = Instant::now();
        let mut told = None;
        loop {
            // In this order: one that is up wrote its file before it ended its start.
            let starting = DevStart::find(dir)?;
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

/// Returns the configuration of operators' commands: database, key and brokers are those of the
/// `oncebox dev` of the current folder for a user who configured no database. A database or a key
/// that is configured is never mixed with it.
pub async fn filled_in(config: &Config) -> Result<Config> {
    let mut config = config.clone();
    let is_configured = !config.database.url.is_empty()
        || config.keys.master_key.is_some()
        || config.keys.master_key_file.is_some();
    if is_configured {
        return Ok(config);
    }
    if let Some(RunningDev { database_url: Some(url), master_key_file, brokers, .. }) =
        RunningDev::wait(Path::new(DIR)).await?
    {
        config.database.url = url;
        config.keys.master_key_file = Some(master_key_file);
        if config.kafka.brokers.is_empty() {
            config.kafka.brokers = brokers;
        }
    }
    Ok(config)
}

/// Returns the functions of operators' commands, on a database that holds an inbox. This is the
/// configured database, else that of the `oncebox dev` that runs in this folder.
pub async fn ready(config: &Config) -> Result<Control> {
    let control = filled_in(config).await?.control()?;
    control.check().await?;
    Ok(control)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Could fail so: a command that comes a moment after `oncebox dev` finds none, or waits for
    /// one that has ended.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_start_is_waited_for_and_its_end_is_told() {
        let dir = std::env::temp_dir().join(format!("oncebox-start-{}", std::process::id()));
        let running = || RunningDev {
            brokers: "127.0.0.1:1".to_owned(),
            topic: "events".to_owned(),
            database_url: None,
            master_key_file: dir.join("master.key"),
        };
        assert_eq!(RunningDev::wait(&dir).await.expect("no folder"), None);
        // The command comes first.
        let waiting = tokio::spawn({
            let dir = dir.clone();
            async move { RunningDev::wait(&dir).await }
        });
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut start = DevStart::begin(&dir).expect("a start");
        let second = DevStart::begin(&dir).err().expect("one at a time").to_string();
        assert!(second.contains("running with"), "{second}");
        start.is_about("starting PostgreSQL").expect("a file");
        assert_eq!(DevStart::find(&dir).expect("a file").as_deref(), Some("starting PostgreSQL"));
        start.is_about("compiling").expect("a file");
        assert_eq!(
            DevStart::find(&dir).expect("a file").as_deref(),
            Some("compiling"),
            "the shorter text replaces the longer one"
        );
        assert!(!waiting.is_finished());
        let announced = running().announce(&dir).expect("a file");
        start.end().expect("a file");
        assert_eq!(waiting.await.expect("no panic").expect("it is up"), Some(running()));
        // It stops: no command waits for it.
        drop(announced);
        assert_eq!(
            (DevStart::find(&dir).expect("a file"), RunningDev::find(&dir).expect("no file")),
            (None, None)
        );

        start.is_about("starting PostgreSQL").expect("a file");
        let waiting = tokio::spawn({
            let dir = dir.clone();
            async move { RunningDev::wait(&dir).await }
        });
        sleep(4 * POLL).await;
        drop(start);
        let ended = waiting.await.expect("no panic").expect_err("it ended").to_string();
        assert!(ended.contains("ended before it was ready"), "{ended}");

        // A command that looks in that instant does not prevent a start.
        let looking = File::open(dir.join(START_FILE)).expect("a file");
        looking.try_lock_shared().expect("nobody starts");
        let looked = std::thread::spawn(move || {
            std::thread::sleep(2 * LOCK_AGAIN);
            drop(looking);
        });
        drop(DevStart::begin(&dir).expect("a start"));
        looked.join().expect("no panic");
        std::fs::remove_dir_all(&dir).expect("the folder");
    }

    #[test]
    fn the_file_holds_only_while_its_owner_lives() {
        let dir = std::env::temp_dir().join(format!("oncebox-running-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let running = || RunningDev {
            brokers: "127.0.0.1:1".to_owned(),
            topic: "events".to_owned(),
            database_url: Some("postgres://secret".to_owned()),
            master_key_file: dir.join("master.key"),
        };
        assert_eq!(RunningDev::find(&dir).expect("no file"), None);
        let announced = running().announce(&dir).expect("a file");
        assert_eq!(RunningDev::find(&dir).expect("a file"), Some(running()));
        let mode = std::fs::metadata(dir.join(FILE)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = running().announce(&dir).err().expect("one at a time").to_string();
        assert!(second.contains("running with"), "{second}");
        drop(announced);
        assert!(!dir.join(FILE).exists());
        // A file left behind by a process that was killed.
        std::fs::write(dir.join(FILE), "{}").expect("a file");
        assert_eq!(RunningDev::find(&dir).expect("a stale file"), None);
        drop(running().announce(&dir).expect("it takes the place of the stale one"));
        std::fs::remove_dir_all(&dir).expect("the folder");
    }
}
