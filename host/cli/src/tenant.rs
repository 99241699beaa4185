//! `oncebox tenant …`

mod delete;
mod limits;
mod moves;
mod schema;
mod store;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_api::wire::{self, NewTenant, Nothing};
use oncebox_devkit::{
    api::{Api, path},
    migration::Migration,
    output,
};

use super::arguments;

#[derive(Subcommand)]
pub(super) enum TenantCommand {
    /// Create a tenant: its schema and its login roles
    Create {
        /// Name: a-z, 0-9 and `-`
        name: String,
        /// SQL file with the tenant's tables, applied as the owner of its schema
        #[arg(long)]
        schema: Vec<PathBuf>,
        /// File with the URL of an empty PostgreSQL database that holds its inbox and tables
        /// instead of the host's; or ONCEBOX_TENANT_DATABASE_URL
        #[arg(long)]
        database_url_file: Option<PathBuf>,
        /// Name of a database of the hosts' configuration; without it the host chooses by weight
        #[arg(long, conflicts_with = "database_url_file")]
        database: Option<String>,
    },
    /// List tenants
    List,
    /// Show a tenant: state, limits, schema, logins
    Show {
        /// The tenant; by default the only one
        tenant: Option<String>,
    },
    /// The tables of a tenant: its own SQL migrations
    #[command(subcommand)]
    Schema(schema::SchemaCommand),
    /// The stores that a tenant has access to, from which payloads are fetched
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Let all of a tenant's consumers rest, and refuse changes by its tokens
    Suspend {
        /// The tenant
        tenant: String,
    },
    /// Let a suspended tenant's consumers go on where they were
    Resume {
        /// The tenant
        tenant: String,
    },
    /// Change what each host gives a tenant; without options, show it
    Limits(limits::LimitsArgs),
    /// Give a tenant new passwords and a new session secret; its messages go on
    RotateCredentials {
        /// The tenant
        tenant: String,
    },
    /// Move a tenant to another database of the hosts' configuration; again, to see how far it is
    Move(moves::MoveArgs),
    /// Delete a tenant with its tables and messages, for good; again, to go on or see how far it is
    Delete(delete::DeleteArgs),
}

pub(super) async fn run(api: &Api, command: TenantCommand, json: bool) -> Result<()> {
    match command {
        TenantCommand::Create { name, schema, database_url_file, database } => {
            let database_url = match database {
                Some(_) => None,
                None => database_url(database_url_file.as_deref())?,
            };
            let new = NewTenant { name, migrations: Vec::new(), database_url, database };
            create(api, new, &schema, json).await
        }
        TenantCommand::List => list(api, json).await,
        TenantCommand::Show { tenant } => {
            let tenant = arguments::named_or_only(api, tenant).await?;
            show(&api.get(&path(&["tenants", &tenant])).await?, json)
        }
        TenantCommand::Schema(command) => schema::run(api, command, json).await,
        TenantCommand::Store(command) => store::run(api, command, json).await,
        TenantCommand::Suspend { tenant } => {
            let done = change(api, &tenant, "suspend").await?;
            say(
                json,
                &done,
                &format!(
                    "tenant `{tenant}` is suspended: its hosts finish what they run and let its \
                        consumers rest"
                ),
            )
        }
        TenantCommand::Resume { tenant } => {
            let done = change(api, &tenant, "resume").await?;
            say(
                json,
                &done,
                &format!("tenant `{tenant}` is active: its consumers go on where they were"),
            )
        }
        TenantCommand::Limits(args) => limits::run(api, args, json).await,
        TenantCommand::RotateCredentials { tenant } => {
            let done = change(api, &tenant, "rotate-credentials").await?;
            say(
                json,
                &done,
                &format!(
                    "tenant `{tenant}` has new credentials; sessions with those before go on for \
                        ten minutes at most"
                ),
            )
        }
        TenantCommand::Move(args) => moves::run(api, args, json).await,
        TenantCommand::Delete(args) => delete::run(api, args, json).await,
    }
}

/// Returns the URL of a tenant's own database. It holds a password, so it is no argument, which
/// every process can read.
fn database_url(file: Option<&Path>) -> Result<Option<String>> {
    let Some(path) = file else {
        return Ok(std::env::var("ONCEBOX_TENANT_DATABASE_URL").ok().filter(|url| !url.is_empty()));
    };
    let read = std::fs::read_to_string(path);
    let url = read.with_context(|| {
        format!("failed to read the tenant's database URL from `{}`", path.display())
    })?;
    Ok(Some(url.trim().to_owned()))
}

async fn change(api: &Api, tenant: &str, verb: &str) -> Result<wire::TenantBody> {
    api.post(&path(&["tenants", tenant, verb]), &Nothing {}).await
}

fn say(json: bool, tenant: &wire::TenantBody, text: &str) -> Result<()> {
    if json {
        return output::json(tenant);
    }
    println!("{text}");
    Ok(())
}

fn show(tenant: &wire::TenantBody, json: bool) -> Result<()> {
    if json {
        return output::json(tenant);
    }
    let mut rows = vec![
        vec!["tenant".to_owned(), tenant.name.clone()],
        vec!["state".to_owned(), tenant.state.clone()],
        vec![
            "database".to_owned(),
            tenant.database.clone().unwrap_or_else(|| "the host's".to_owned()),
        ],
        vec!["schema".to_owned(), tenant.schema_name.clone()],
        vec!["login of handlers".to_owned(), tenant.login.clone()],
        vec!["login of the owner".to_owned(), tenant.owner_login.clone()],
        vec!["created".to_owned(), output::time(tenant.created_at)],
    ];
    rows.extend(limits::rows(tenant));
    output::table(&["WHAT", "VALUE"], &rows);
    Ok(())
}

async fn create(api: &Api, new: NewTenant, schema: &[PathBuf], json: bool) -> Result<()> {
    let files: Vec<_> = schema
        .iter()
        .map(|path| Migration::read(path, &|path| std::fs::read(path)))
        .collect::<Result<_>>()?;
    let migrations = files.iter().map(Migration::to_send).collect();
    let new = NewTenant { migrations, ..new };
    let tenant: wire::TenantBody = api.post(&path(&["tenants"]), &new).await?;
    if json {
        return output::json(&tenant);
    }
    let place = match tenant.database {
        Some(database) if new.database_url.is_some() => format!(" of its own database {database}"),
        Some(database) => format!(" of database `{database}`"),
        None => String::new(),
    };
    let (name, schema) = (tenant.name, tenant.schema_name);
    println!("tenant `{name}` created; its tables live in schema `{schema}`{place}");
    Ok(())
}

async fn list(api: &Api, json: bool) -> Result<()> {
    let tenants = arguments::tenants(api).await?;
    if json {
        return output::json(&tenants);
    }
    let rows: Vec<_> = tenants
        .iter()
        .map(|t| {
            let created = output::time(t.created_at);
            let database = t.database.clone().unwrap_or_else(|| "-".to_owned());
            vec![t.name.clone(), t.state.clone(), database, t.schema_name.clone(), created]
        })
        .collect();
    output::table(&["TENANT", "STATE", "DATABASE", "SCHEMA", "CREATED"], &rows);
    Ok(())
}
