//! `oncebox rights`.

use anyhow::Result;
use clap::Args;
use oncebox_control::{rights, rights_script};
use oncebox_devkit::output;

/// The names in the script.
#[derive(Args)]
pub(super) struct RightsArgs {
    /// Name of the hosts' login: a-z, 0-9 and `_`
    #[arg(long, default_value = "oncebox")]
    login: String,
    /// Name of the database: a-z, 0-9 and `_`
    #[arg(long, default_value = "oncebox")]
    database: String,
}

/// Prints the statements for an administrator of a server.
pub(super) fn run(args: &RightsArgs, json: bool) -> Result<()> {
    let RightsArgs { login, database } = args;
    if json {
        return output::json(&rights(login, database)?);
    }
    print!("{}", rights_script(login, database)?);
    Ok(())
}
