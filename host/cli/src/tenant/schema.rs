//! `oncebox tenant schema …`: a tenant's own SQL migrations, each applied once, in a transaction of
//! its own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use oncebox_api::wire;
use oncebox_devkit::{
    api::{Api, path},
    migration::Migration,
    output,
    upload::short,
};
use oncebox_server::error_text::Unfit;

#[derive(Subcommand)]
pub(crate) enum SchemaCommand {
    /// Apply migrations, each once, named by its file's stem
    Apply {
        /// The tenant
        tenant: String,
        /// A folder, whose files `*.sql` are applied by name, or files, in the order in which they
        /// stand here
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// List those that were applied
    List {
        /// The tenant
        tenant: String,
    },
}

pub(super) async fn run(api: &Api, command: SchemaCommand, json: bool) -> Result<()> {
    match command {
        SchemaCommand::Apply { tenant, paths } => apply(api, &tenant, &paths, json).await,
        SchemaCommand::List { tenant } => list(api, &tenant, json).await,
    }
}

/// Applies the migrations that were not applied before, in order. The first that fails is the last
/// that is tried. Statements that would be refused are found in all files before anything runs.
async fn apply(api: &Api, tenant: &str, paths: &[PathBuf], json: bool) -> Result<()> {
    let files: Vec<_> = files(paths)?
        .iter()
        .map(|path| Migration::read(path, &|path| std::fs::read(path)))
        .collect::<Result<_>>()?;
    let route = path(&["tenants", tenant, "migrations"]);
    let known: Vec<wire::MigrationBody> = api.get(&route).await?;
    files.iter().try_for_each(|file| file.check(tenant, &known))?;
    let (before, new): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| known.iter().any(|known| known.name == file.name));
    check(&new)?;
    for file in &new {
        let _: wire::MigrationBody = api
            .post(&route, &file.to_send())
            .await
            .with_context(|| format!("`{}`", file.path.display()))?;
        if !json {
            println!("applied `{}` to tenant `{tenant}`", file.name);
        }
    }
    if json {
        let names =
            |files: &[&Migration]| files.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
        return output::json(
            &serde_json::json!({ "applied": names(&new), "known": names(&before) }),
        );
    }
    if new.is_empty() {
        println!("tenant `{tenant}` holds all of them already");
    }
    Ok(())
}

fn check(files: &[&Migration]) -> Result<()> {
    let problems = files.iter().flat_map(|file| {
        let name = file.path.display().to_string();
        oncebox_control::check_schema(&file.sql)
            .into_iter()
            .map(move |problem| format!("`{name}`, {problem}"))
    });
    let problems: Vec<_> = problems.collect();
    if problems.is_empty() { Ok(()) } else { Err(Unfit::statements(problems).into()) }
}

/// Returns the files that the paths stand for, in order.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(of_folder(path)?);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

fn of_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = || format!("failed to read the folder `{}`", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == "sql") {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "the folder `{}` holds no file `*.sql`", folder.display());
    files.sort();
    Ok(files)
}

async fn list(api: &Api, tenant: &str, json: bool) -> Result<()> {
    let migrations: Vec<wire::MigrationBody> =
        api.get(&path(&["tenants", tenant, "migrations"])).await?;
    if json {
        return output::json(&migrations);
    }
    let cells = |m: &wire::MigrationBody| {
        vec![
            m.name.clone(),
            short(&m.digest).to_owned(),
            output::time(m.applied_at),
            m.applied_by.clone(),
        ]
    };
    output::table(
        &["MIGRATION", "SHA-256", "APPLIED", "BY"],
        &migrations.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}
