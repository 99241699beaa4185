//! The program as a person has it: run with arguments in a folder, read by what it prints.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use crate::wait::DEADLINE;

/// The program, beside the tests, built by `cargo build --workspace --bins`.
pub fn path() -> Result<PathBuf> {
    find("oncebox")
}

fn find(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path =
        own.ancestors().nth(2).context("tests are built into `target/debug/deps`")?.join(name);
    ensure!(
        path.is_file(),
        "`{}` is missing; run `cargo build --workspace --bins`",
        path.display()
    );
    Ok(path)
}

/// Writes a shell script that can be run at once. Another process writes it: a child that another
/// test starts meanwhile inherits files of this process that are open for writing, and a program
/// that somebody may write to is not run ("text file busy").
///
/// # Errors
/// No shell starts, or the file cannot be written.
pub fn write_script(path: &Path, body: &str) -> Result<()> {
    let mut shell = std::process::Command::new("sh")
        .args(["-c", "cat > \"$0\" && chmod 700 \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()?;
    let mut input = shell.stdin.take().context("it has no input")?;
    input.write_all(format!("#!/bin/sh\n{body}\n").as_bytes())?;
    drop(input);
    ensure!(shell.wait()?.success(), "`{}` cannot be written", path.display());
    Ok(())
}

/// Variable that names the test for which this process was started.
const OWN: &str = "ONCEBOX_TEST_ALONE";

/// Runs a test again, alone in a process of its own: its environment and memory are those of the
/// whole process. Returns whether this is that process, which goes on with the test.
///
/// # Errors
/// The test failed there.
pub fn in_own_process(test: &str) -> Result<bool> {
    if std::env::var(OWN).is_ok_and(|own| own == test) {
        return Ok(true);
    }
    let mut own = std::process::Command::new(std::env::current_exe()?);
    let ran = own.args(["--exact", test]).env(OWN, test).output()?;
    let said = String::from_utf8_lossy(&ran.stdout);
    ensure!(
        ran.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(false)
}

/// A folder in which the program runs, with its environment. It is removed with this value.
#[derive(Debug)]
pub struct WorkingDir {
    dir: PathBuf,
    sabotage: Option<&'static str>,
    environment: Vec<(String, String)>,
}

/// The output of a run of the program.
#[derive(Debug)]
pub struct CommandOutput {
    /// Its exit code.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl WorkingDir {
    /// A new one, in `target`. What its programs compile is shared by all tests.
    pub fn new() -> Result<Self> {
        let target =
            path()?.ancestors().nth(2).context("the program is in `target/debug`")?.to_owned();
        let dir = target.join("test-cli").join(format!("{:016x}", rand::random::<u64>()));
        std::fs::create_dir_all(&dir)?;
        let cache = target.join("test-hosts/cache").display().to_string();
        let environment = vec![("ONCEBOX_RUNTIME_CACHE_DIR".to_owned(), cache)];
        Ok(Self { dir, sabotage: None, environment })
    }

    /// The program with its hooks, and a named defect switched on.
    pub fn sabotaged(mut self, sabotage: &'static str) -> Self {
        self.sabotage = Some(sabotage);
        self
    }

    /// The program with a variable of its environment.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.set(name, value);
        self
    }

    /// The same, from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// A variable of its own.
    pub fn get(&self, name: &str) -> Option<String> {
        self.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    /// Without a variable, from now on.
    pub fn unset(&mut self, name: &str) {
        self.environment.retain(|(known, _)| known != name);
    }

    /// Write a file.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<()> {
        Ok(std::fs::write(self.dir.join(name), content)?)
    }

    /// Where the folder is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Run the program here, with nothing of the tests' own configuration.
    pub async fn run(&self, arguments: &[&str], stdin: &str) -> Result<CommandOutput> {
        let mut command =
            Command::new(if self.sabotage.is_some() { find("host")? } else { path()? });
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEBOX_")) {
            command.env_remove(name);
        }
        if let Some(sabotage) = self.sabotage {
            command.env("ONCEBOX_SABOTAGE", sabotage);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.args(arguments).current_dir(&self.dir).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut input = child.stdin.take().context("it has no input")?;
        input.write_all(stdin.as_bytes()).await?;
        drop(input);
        let Output { status, stdout, stderr } =
            timeout(DEADLINE, child.wait_with_output()).await.context("it does not end")??;
        Ok(CommandOutput {
            code: status.code(),
            stdout: String::from_utf8(stdout)?,
            stderr: String::from_utf8(stderr)?,
        })
    }
}

impl CommandOutput {
    /// What it printed, as JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("not JSON: {}{}", self.stdout, self.stderr))
    }
}

impl Drop for WorkingDir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir); // what is left is in `target`
        }
    }
}
