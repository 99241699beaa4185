//! The program of the release before, which `scripts/previous_release.sh` builds.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use tokio::task::spawn_blocking;

use crate::services::target_dir;

/// Its version and its commit.
const PREVIOUS: &str = include_str!("../previous_release");

/// Returns the version of the release before.
pub fn previous_version() -> &'static str {
    PREVIOUS.split_whitespace().next().unwrap_or_default()
}

/// Returns the program of the release before, without variables that name an Oncebox.
pub fn previous_release() -> Result<Command> {
    Ok(apart(Command::new(made("")?)))
}

/// Returns the component of the ledger, of the release before. It imports nothing that is newer.
pub fn previous_ledger() -> Result<Vec<u8>> {
    Ok(std::fs::read(made("-ledger.wasm")?)?)
}

/// Returns a file of the release before.
fn made(suffix: &str) -> Result<PathBuf> {
    let name = format!("oncebox-{}{suffix}", PREVIOUS.trim().replace(' ', "-"));
    let file = target_dir().join("releases").join(name);
    ensure!(file.is_file(), "`{}` is missing; run scripts/previous_release.sh", file.display());
    Ok(file)
}

/// Runs a command of the release before to its end.
pub async fn run_previous(arguments: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    let mut command = previous_release()?;
    command.args(arguments).envs(variables.iter().copied());
    let output = spawn_blocking(move || command.output()).await?;
    let output = output.context("failed to run the release before")?;
    ensure!(
        output.status.success(),
        "{arguments:?} of release {}: {}",
        previous_version(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Takes the variables that name an Oncebox from a command.
pub(crate) fn apart(mut command: Command) -> Command {
    for (variable, _) in std::env::vars().filter(|(variable, _)| variable.starts_with("ONCEBOX_")) {
        command.env_remove(variable);
    }
    command
}
