//! `oncebox migrate`, and what it would do.

use anyhow::{Result, ensure};
use chrono::Utc;
use clap::Args;
use oncebox_api::wire::DatabaseLabelBody;
use oncebox_control::{MigrationPlan, PlannedLock};
use oncebox_devkit::output;
use oncebox_server::{
    Config,
    config::TelemetrySettings,
    logs,
    serve::{self, create_database},
};
use serde_json::{Value, json};

/// How to migrate.
#[derive(Args)]
pub(super) struct MigrateArgs {
    /// Print what would change, and which tables would be locked for how long; change nothing
    #[arg(long)]
    plan: bool,
}

pub(super) async fn run(config: &Config, args: &MigrateArgs, json: bool) -> Result<()> {
    logs::start(&config.log, &TelemetrySettings::default())?;
    if args.plan {
        return plan(config, json).await;
    }
    let created = create_database(config).await?;
    if let Some(database) = created.filter(|_| !json) {
        println!("database `{database}` created");
    }
    serve::migrate(config).await?;
    output::done(json, "the database is up to date")
}

/// Prints the plans. Fails after that where a database could not be read.
async fn plan(config: &Config, json: bool) -> Result<()> {
    let plans = serve::migration_plans(config).await?;
    if json {
        let all = plans
            .iter()
            .map(|(label, plan)| {
                let mut shown = serde_json::to_value(DatabaseLabelBody::from(label.clone()))?;
                match plan {
                    Ok(plan) => shown["plan"] = json!(plan),
                    Err(error) => shown["error"] = json!(error.to_string()),
                }
                Ok(shown)
            })
            .collect::<Result<Vec<Value>>>()?;
        output::json(&all)?;
    } else {
        for (label, plan) in plans.iter().filter_map(|(l, plan)| Some((l, plan.as_ref().ok()?))) {
            print(&DatabaseLabelBody::from(label.clone()).to_string(), plan);
        }
    }
    let unread: Vec<String> = plans
        .into_iter()
        .filter_map(|(label, plan)| {
            let (label, error) = (DatabaseLabelBody::from(label), plan.err()?);
            Some(format!("{label} could not be read: {error}"))
        })
        .collect();
    ensure!(unread.is_empty(), "{}", unread.join("\n"));
    Ok(())
}

fn print(database: &str, plan: &MigrationPlan) {
    if plan.is_newer {
        println!(
            "{database}: a newer release has brought it up to date; no table and no function would change"
        );
        return;
    }
    if plan.is_empty() {
        println!("{database}: up to date");
        return;
    }
    println!("{database}:");
    let rows: Vec<_> = plan
        .migrations
        .iter()
        .flat_map(|migration| {
            let name = format!("{:04}_{}", migration.version, migration.name);
            let none = migration.locks.is_empty();
            let nothing = none.then(|| vec![name.clone(), "no table".to_owned()]);
            nothing.into_iter().chain(migration.locks.iter().map(move |lock| row(&name, lock)))
        })
        .collect();
    if !rows.is_empty() {
        output::table(&["MIGRATION", "LOCKS", "FOR", "SIZE", "WAITS FOR"], &rows);
    }
    if !plan.functions.is_empty() {
        println!("functions, without a lock: {}", plan.functions.join(", "));
    }
}

fn row(migration: &str, lock: &PlannedLock) -> Vec<String> {
    let waits = match (lock.transactions, lock.oldest_since) {
        (0, _) => "nobody".to_owned(),
        (count, since) => {
            let age = since.map(|since| (Utc::now() - since).num_seconds().max(0));
            let noun = if count == 1 { "transaction" } else { "transactions" };
            match age {
                Some(age) => format!("{count} {noun}, the oldest open for {age} s"),
                None => format!("{count} {noun}"),
            }
        }
    };
    let (table, time) = (lock.table.clone(), lock.time.words().to_owned());
    vec![migration.to_owned(), table, time, output::bytes(lock.bytes), waits]
}
