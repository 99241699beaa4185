//! Settings of the master key.

use std::path::PathBuf;

use anyhow::{Context, Result};
use oncebox_control::MasterKey;
use serde::Deserialize;

/// `[keys]`
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeySettings {
    /// File with the master key, 64 hexadecimal digits.
    pub master_key_file: Option<PathBuf>,
    /// The master key itself; only from the environment.
    #[serde(skip)]
    pub master_key: Option<String>,
    /// File with the key before this one, while `oncebox keys rotate` changes it.
    pub previous_master_key_file: Option<PathBuf>,
    /// The previous master key itself; only from the environment.
    #[serde(skip)]
    pub previous_master_key: Option<String>,
}

impl std::fmt::Debug for KeySettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeySettings")
            .field("master_key_file", &self.master_key_file)
            .field("previous_master_key_file", &self.previous_master_key_file)
            .finish_non_exhaustive()
    }
}

/// Reads a key from its value, or else from its file.
pub(super) fn read_key(
    key: &Option<String>,
    file: &Option<PathBuf>,
    what: &str,
) -> Result<Option<MasterKey>> {
    let text = match (key, file) {
        (Some(key), _) => key.clone(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("failed to read {what} from `{}`", path.display()))?,
        (None, None) => return Ok(None),
    };
    Ok(Some(MasterKey::parse(&text)?))
}
