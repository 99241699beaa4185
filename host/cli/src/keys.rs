//! `oncebox keys …`: the master key that credentials are sealed under. The command works on the
//! database itself, since it takes both keys.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_control::{Control, MasterKey};
use oncebox_devkit::output;

#[derive(Subcommand)]
pub(super) enum KeysCommand {
    /// Seal all credentials under a new master key
    ///
    /// The configured key is the one that they are sealed under now. Everything is sealed anew in
    /// one transaction, or nothing; running it twice changes nothing more. Hosts keep in memory
    /// what they opened, so that no message stops. In this order:
    ///
    /// 1. On every host, set the new key as `keys.master_key_file` and the old one as
    ///    `keys.previous_master_key_file` (ONCEBOX_PREVIOUS_MASTER_KEY), and restart one after the
    ///    other.
    ///
    /// 2. `oncebox keys rotate --new-key-file NEW`, with the old key configured.
    ///
    /// 3. Take `keys.previous_master_key_file` away on every host, and restart one after the other.
    #[command(verbatim_doc_comment)]
    Rotate {
        /// File with the new key, 64 hexadecimal digits (`openssl rand -hex 32`)
        #[arg(long, value_name = "FILE")]
        new_key_file: PathBuf,
    },
}

pub(super) async fn run(control: &Control, command: KeysCommand, json: bool) -> Result<()> {
    let KeysCommand::Rotate { new_key_file } = command;
    let text = std::fs::read_to_string(&new_key_file).with_context(|| {
        format!("failed to read the new master key from `{}`", new_key_file.display())
    })?;
    let new = MasterKey::parse(&text)
        .with_context(|| format!("`{}` holds no key", new_key_file.display()))?;
    let rotation = control.tenants().rotate_master_key(&new).await?;
    if json {
        return output::json(&rotation);
    }
    let (key, sealed, unchanged) = (rotation.key, rotation.sealed, rotation.unchanged);
    println!(
        "sealed under `{key}`: the credentials of {sealed} tenants anew, of {unchanged} already"
    );
    Ok(())
}
