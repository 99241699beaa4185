//! `oncebox manual`

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Command};
use oncebox_devkit::output;

use super::arguments;

#[derive(Args)]
pub(super) struct ManualArgs {
    /// The folder, which is made where it is missing; pages that are there are replaced
    folder: PathBuf,
}

/// Writes a page for the program and one for each command that help lists.
pub(super) fn run(args: &ManualArgs, json: bool) -> Result<()> {
    let folder = args.folder.display();
    std::fs::create_dir_all(&args.folder)
        .with_context(|| format!("failed to create the folder `{folder}`"))?;
    clap_mangen::generate_to(without_help(arguments::command()), &args.folder)
        .with_context(|| format!("failed to write the manual pages into `{folder}`"))?;
    output::done(json, &format!("the manual pages are in `{folder}`"))
}

/// Hides `help`, which would have a page for every command once more.
fn without_help(command: Command) -> Command {
    command.mut_subcommands(|command| {
        let is_hidden = command.is_hide_set() || command.get_name() == "help";
        without_help(command).hide(is_hidden)
    })
}
