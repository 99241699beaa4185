//! A tenant's migrations as files: named by their stem, identified by their text.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use oncebox_api::wire::{self, NewMigrationBody};
use oncebox_control::{Control, Tenant};
use sha2::{Digest, Sha256};

/// Function that reads the files that an input names.
pub type Open<'a> = &'a dyn Fn(&Path) -> std::io::Result<Vec<u8>>;

/// Reads a file as text.
pub fn read_text(path: &Path, open: Open<'_>) -> std::io::Result<String> {
    String::from_utf8(open(path)?)
        .map_err(|_| std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not UTF-8"))
}

/// A migration as it was read.
#[derive(Debug)]
pub struct Migration {
    /// Stem of the file.
    pub name: String,
    /// Path of the file.
    pub path: PathBuf,
    /// Statements of the migration.
    pub sql: String,
    /// SHA-256 of the text, in hexadecimal digits.
    pub digest: String,
}

impl Migration {
    /// Reads a migration from a file.
    pub fn read(path: &Path, open: Open<'_>) -> Result<Self> {
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
    pub fn to_send(&self) -> NewMigrationBody {
        NewMigrationBody { name: self.name.clone(), sql: self.sql.clone() }
    }

    /// Refuses a migration that was applied under this name with another text.
    pub fn check(&self, tenant: &str, applied: &[wire::MigrationBody]) -> Result<()> {
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

/// Returns the name of a migration: the stem of its file.
fn migration_name(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Creates a tenant with its tables, or, when they are not right, neither.
pub async fn create_with_tables(
    control: &Control,
    name: &str,
    schema: &[PathBuf],
) -> Result<Tenant> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path)
            .with_context(|| format!("failed to read the schema `{}`", path.display()))
    };
    let files = schema.iter().map(|path| Ok((path, read(path)?))).collect::<Result<Vec<_>>>()?;
    let tenant = control.tenants().create(name).await?;
    for (path, sql) in &files {
        if let Err(error) =
            control.tenant_databases().apply_migration(&tenant, &migration_name(path), sql).await
        {
            // The tables are applied over other connections than the tenant's row is written over.
            control
                .tenants()
                .take_back(&tenant)
                .await
                .with_context(|| format!("failed to take tenant `{name}` back after: {error}"))?;
            return Err(error).with_context(|| {
                format!("tenant `{name}` was not created, because of `{}`", path.display())
            });
        }
    }
    Ok(tenant)
}
