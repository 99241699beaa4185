//! A tenant's migrations as files: named by their stem, identified by their text.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use super::{
    tenant::migration_name,
    wire::{self, NewMigration},
};

/// Function that reads the files that an input names.
pub(crate) type Open<'a> = &'a dyn Fn(&Path) -> std::io::Result<Vec<u8>>;

/// Reads a file as text.
pub(super) fn read_text(path: &Path, open: Open<'_>) -> std::io::Result<String> {
    String::from_utf8(open(path)?)
        .map_err(|_| std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not UTF-8"))
}

/// A migration as it was read.
#[derive(Debug)]
pub(crate) struct Migration {
    /// Stem of the file.
    pub(crate) name: String,
    /// Path of the file.
    pub(crate) path: PathBuf,
    /// Statements of the migration.
    pub(super) sql: String,
    /// SHA-256 of the text, in hexadecimal digits.
    pub(crate) digest: String,
}

impl Migration {
    /// Reads a migration from a file.
    pub(crate) fn read(path: &Path, open: Open<'_>) -> Result<Self> {
        let sql = read_text(path, open)
            .with_context(|| format!("failed to read the migration `{}`", path.display()))?;
        Ok(Self {
            name: migration_name(path),
            path: path.to_owned(),
            digest: hex::encode(Sha256::digest(&sql)),
            sql,
        })
    }

    /// Returns the migration as the API takes it.
    pub(crate) fn to_send(&self) -> NewMigration {
        NewMigration { name: self.name.clone(), sql: self.sql.clone() }
    }

    /// Refuses a migration that was applied under this name with another text.
    pub(super) fn check(&self, tenant: &str, applied: &[wire::Migration]) -> Result<()> {
        let is_other =
            applied.iter().any(|known| known.name == self.name && known.digest != self.digest);
        let (name, path) = (&self.name, self.path.display());
        ensure!(
            !is_other,
            "migration `{name}` of tenant `{tenant}` was applied with another text than `{path}` \
                has; write what is new as a migration of its own"
        );
        Ok(())
    }
}
