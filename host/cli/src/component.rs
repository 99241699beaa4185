//! `oncebox component …`

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_devkit::output;

#[derive(Subcommand)]
pub(super) enum ComponentCommand {
    /// Make a component of a core module that carries its component type
    Encode {
        /// The core module
        module: PathBuf,
        /// Where to write the component
        #[arg(long, short)]
        output: PathBuf,
    },
}

pub(super) fn run(command: ComponentCommand, json: bool) -> Result<()> {
    let ComponentCommand::Encode { module, output } = command;
    let core =
        std::fs::read(&module).with_context(|| format!("failed to read `{}`", module.display()))?;
    let component = oncebox_runtime::encode_component(&core)
        .with_context(|| format!("failed to encode `{}`", module.display()))?;
    std::fs::write(&output, &component)
        .with_context(|| format!("failed to write `{}`", output.display()))?;
    output::done(json, &format!("wrote `{}`, {} bytes", output.display(), component.len()))
}
