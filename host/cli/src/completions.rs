//! `oncebox completions`

use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

use super::arguments;

#[derive(Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script, and installs nothing.
pub(super) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut arguments::command(), "oncebox", &mut script);
    std::io::Write::write_all(&mut std::io::stdout(), &script)?;
    Ok(())
}
