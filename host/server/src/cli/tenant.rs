//! `oncebox tenant …`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_inbox::{Admin, Tenant};

use super::{
    api::{Api, path},
    migration::Migration,
    output,
    upload::short,
    wire::{self, NewTenant},
};

#[derive(Subcommand)]
pub(super) enum TenantCommand {
    /// Create a tenant: its schema and its login roles
    Create {
        /// Name: a-z, 0-9 and `-`
        name: String,
        /// SQL file with the tenant's tables, applied as the owner of its schema
        #[arg(long)]
        schema: Vec<PathBuf>,
        /// File with the URL of an empty PostgreSQL database that holds its inbox and tables instead of the
        /// host's; or ONCEBOX_TENANT_DATABASE_URL
        #[arg(long)]
        database_url_file: Option<PathBuf>,
    },
    /// List tenants
    List,
    /// Apply migrations to a tenant's tables, each once, named by its file's stem
    Migrate {
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// SQL files, in the order in which they are applied
        #[arg(required_unless_present = "list")]
        files: Vec<PathBuf>,
        /// Show those that were applied instead
        #[arg(long, conflicts_with = "files")]
        list: bool,
    },
}

pub(super) async fn run(api: &Api, command: TenantCommand, json: bool) -> Result<()> {
    match command {
        TenantCommand::Create { name, schema, database_url_file } => {
            let database_url = database_url(database_url_file.as_deref())?;
            create(api, &name, &schema, database_url, json).await
        }
        TenantCommand::List => list(api, json).await,
        TenantCommand::Migrate { tenant, list: true, .. } => applied(api, &tenant, json).await,
        TenantCommand::Migrate { tenant, files, list: false } => migrate(api, &tenant, &files, json).await,
    }
}

/// The URL of a tenant's own database. It holds a password, so it is no argument, which every process can read.
fn database_url(file: Option<&Path>) -> Result<Option<String>> {
    let Some(path) = file else { return Ok(std::env::var("ONCEBOX_TENANT_DATABASE_URL").ok().filter(|url| !url.is_empty())) };
    let read = std::fs::read_to_string(path);
    let url = read.with_context(|| format!("failed to read the tenant's database URL from `{}`", path.display()))?;
    Ok(Some(url.trim().to_owned()))
}

async fn create(api: &Api, name: &str, schema: &[PathBuf], database_url: Option<String>, json: bool) -> Result<()> {
    let files: Vec<_> = schema.iter().map(|path| Migration::read(path, &|path| std::fs::read(path))).collect::<Result<_>>()?;
    let migrations = files.iter().map(Migration::to_send).collect();
    let tenant: wire::Tenant = api.post(&path(&["tenants"]), &NewTenant { name: name.to_owned(), migrations, database_url }).await?;
    if json {
        return output::json(&tenant);
    }
    let place = tenant.database.map(|database| format!(" of its own database {database}")).unwrap_or_default();
    println!("tenant `{name}` created; its tables live in schema `{}`{place}", tenant.schema_name);
    Ok(())
}

/// Apply what was not applied before, in order; the first that fails is the last that is tried.
async fn migrate(api: &Api, tenant: &str, files: &[PathBuf], json: bool) -> Result<()> {
    let files: Vec<_> = files.iter().map(|path| Migration::read(path, &|path| std::fs::read(path))).collect::<Result<_>>()?;
    let route = path(&["tenants", tenant, "migrations"]);
    let known: Vec<wire::Migration> = api.get(&route).await?;
    files.iter().try_for_each(|file| file.check(tenant, &known))?;
    let (mut applied, mut before) = (Vec::new(), Vec::new());
    for file in &files {
        if known.iter().any(|known| known.name == file.name) {
            before.push(&file.name);
            continue;
        }
        let _: wire::Migration = api.post(&route, &file.to_send()).await.with_context(|| format!("`{}`", file.path.display()))?;
        applied.push(&file.name);
        if !json {
            println!("applied `{}` to tenant `{tenant}`", file.name);
        }
    }
    if json {
        return output::json(&serde_json::json!({ "applied": applied, "known": before }));
    }
    if applied.is_empty() {
        println!("tenant `{tenant}` holds all of them already");
    }
    Ok(())
}

async fn applied(api: &Api, tenant: &str, json: bool) -> Result<()> {
    let migrations: Vec<wire::Migration> = api.get(&path(&["tenants", tenant, "migrations"])).await?;
    if json {
        return output::json(&migrations);
    }
    let cells = |m: &wire::Migration| vec![m.name.clone(), short(&m.digest).to_owned(), output::time(m.applied_at), m.applied_by.clone()];
    output::table(&["MIGRATION", "SHA-256", "APPLIED", "BY"], &migrations.iter().map(cells).collect::<Vec<_>>());
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

async fn list(api: &Api, json: bool) -> Result<()> {
    let tenants: Vec<wire::Tenant> = api.get(&path(&["tenants"])).await?;
    if json {
        return output::json(&tenants);
    }
    let rows: Vec<_> = tenants.iter().map(|t| vec![t.name.clone(), t.schema_name.clone(), output::time(t.created_at)]).collect();
    output::table(&["TENANT", "SCHEMA", "CREATED"], &rows);
    Ok(())
}
