//! Options that name a server.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use oncebox_devkit::api::RemoteOptions;

/// A server and the files that a connection to it needs.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct ServerArgs {
    /// Work through the API of this server; by default on the database
    #[arg(long, global = true, value_name = "URL", env = "ONCEBOX_SERVER")]
    pub(super) server: Option<String>,
    /// File with the token for the server; else ONCEBOX_TOKEN holds it
    #[arg(long, global = true, value_name = "FILE", env = "ONCEBOX_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Certificates (PEM) of an authority to trust, beside the system's
    #[arg(long, global = true, value_name = "FILE", env = "ONCEBOX_CA_FILE")]
    ca_file: Option<PathBuf>,
}

impl ServerArgs {
    /// Refuses a server for a command that works on this machine alone. A name in the environment
    /// is meant for other commands.
    pub(super) fn refuse(&self) -> Result<()> {
        let is_said = self.server.is_some() && std::env::var_os("ONCEBOX_SERVER").is_none();
        ensure!(
            !is_said,
            "this command works on this machine and not through a server; leave `--server` out"
        );
        Ok(())
    }

    /// Returns the files of a connection.
    pub(super) fn remote(&self) -> RemoteOptions {
        RemoteOptions { token_file: self.token_file.clone(), ca_file: self.ca_file.clone() }
    }
}
