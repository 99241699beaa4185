//! `oncebox tenant …`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_inbox::{Admin, Tenant};

use super::output;

#[derive(Subcommand)]
pub(super) enum TenantCommand {
    /// Create a tenant: its schema and its login roles
    Create {
        /// Name: a-z, 0-9 and `-`
        name: String,
        /// SQL file with the tenant's tables, applied as the owner of its schema
        #[arg(long)]
        schema: Vec<PathBuf>,
    },
    /// List tenants
    List,
}

pub(super) async fn run(admin: &Admin, command: TenantCommand, json: bool) -> Result<()> {
    match command {
        TenantCommand::Create { name, schema } => create(admin, &name, &schema, json).await,
        TenantCommand::List => list(admin, json).await,
    }
}

async fn create(admin: &Admin, name: &str, schema: &[PathBuf], json: bool) -> Result<()> {
    let tenant = create_with_tables(admin, name, schema).await?;
    if json {
        return output::json(&tenant);
    }
    println!("tenant `{name}` created; its tables live in schema `{}`", tenant.schema_name);
    Ok(())
}

/// The name of a migration: its file's.
pub(crate) fn migration_name(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// A tenant with its tables, or, when they are not right, neither.
pub(crate) async fn create_with_tables(admin: &Admin, name: &str, schema: &[PathBuf]) -> Result<Tenant> {
    let read = |path: &PathBuf| std::fs::read_to_string(path).with_context(|| format!("failed to read the schema `{}`", path.display()));
    let files = schema.iter().map(|path| Ok((path, read(path)?))).collect::<Result<Vec<_>>>()?;
    let tenant = admin.create_tenant(name).await?;
    for (path, sql) in &files {
        if let Err(error) = admin.apply_migration(&tenant, &migration_name(path), sql).await {
            // Its tables are applied by other connections than its row is written by.
            admin.take_back_tenant(&tenant).await.with_context(|| format!("failed to take tenant `{name}` back after: {error}"))?;
            return Err(error).with_context(|| format!("tenant `{name}` was not created, because of `{}`", path.display()));
        }
    }
    Ok(tenant)
}

async fn list(admin: &Admin, json: bool) -> Result<()> {
    let tenants = admin.tenants().await?;
    if json {
        return output::json(&tenants);
    }
    let rows: Vec<_> =
        tenants.iter().map(|t| vec![t.name.clone(), t.schema_name.clone(), t.created_at.format("%F %T").to_string()]).collect();
    output::table(&["TENANT", "SCHEMA", "CREATED"], &rows);
    Ok(())
}
