//! `oncebox retention …`

use std::{collections::HashMap, time::Duration};

use anyhow::{Result, bail};
use clap::Subcommand;
use oncebox_api::wire::{
    DatabaseLabelBody, ForgottenBody, Nothing, RemovalBody, RetentionBegunBody, RetentionBody,
    RetentionDatabaseBody, RetentionFailureBody, RetentionRunBody, TimePartitionBody,
};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

use crate::horizon::{self, ExplainArgs};

/// Pause between two looks at a run.
const PAUSE: Duration = Duration::from_secs(1);
/// State of a removal that is finished.
const DROPPED: &str = "dropped";

#[derive(Subcommand)]
pub(super) enum RetentionCommand {
    /// Show the time partitions of the inbox, and when each is removed
    Plan,
    /// Show what is being removed and what was
    Status,
    /// Remove what is due, and follow it to its end
    Run,
    /// Show whether a consumer's inbox remembers for as long as its brokers keep records
    Explain(ExplainArgs),
}

pub(super) async fn run(api: &Api, command: RetentionCommand, json: bool) -> Result<()> {
    match command {
        RetentionCommand::Plan => plan(&look(api).await?, json),
        RetentionCommand::Status => status(&look(api).await?, json),
        RetentionCommand::Run => remove(api, json).await,
        RetentionCommand::Explain(arguments) => horizon::run(api, &arguments, json).await,
    }
}

async fn look(api: &Api) -> Result<RetentionBody> {
    api.get(&path(&["retention"])).await
}

fn plan(retention: &RetentionBody, json: bool) -> Result<()> {
    if json {
        return output::json(retention);
    }
    let rows: Vec<_> = each(retention, |database| &database.partitions)
        .map(|(database, partition)| {
            let mut cells = vec![
                partition.name.clone(),
                partition.class.clone(),
                output::time(partition.from_at),
                output::time(partition.to_at),
                partition.due_at.map_or_else(|| "never".to_owned(), output::time),
                partition.messages.map(output::number).unwrap_or_default(),
                partition.staying.map(output::number).unwrap_or_default(),
                output::bytes(partition.bytes),
                due(partition).to_owned(),
            ];
            cells.extend(of_tenant(retention, database));
            cells
        })
        .collect();
    let headings =
        ["PARTITION", "CLASS", "FROM", "TO", "DUE AT", "MESSAGES", "STAYING", "SIZE", "DUE"];
    table(retention, &headings, &rows);
    println!("{}", next(retention));
    errors(retention);
    Ok(())
}

fn status(retention: &RetentionBody, json: bool) -> Result<()> {
    if json {
        return output::json(retention);
    }
    let removals: Vec<_> = each(retention, |database| &database.removals)
        .map(|(database, removal)| {
            let mut cells = vec![
                removal.partition.clone(),
                removal.class.clone(),
                removal.state.clone(),
                output::number(removal.moved),
                removal.removed.map(output::number).unwrap_or_default(),
                removal.bytes.map(output::bytes).unwrap_or_default(),
                output::time(removal.dropped_at.unwrap_or(removal.began_at)),
                removal.host.clone(),
                removal.error.clone().unwrap_or_default(),
            ];
            cells.extend(of_tenant(retention, database));
            cells
        })
        .collect();
    if removals.is_empty() {
        println!("no time partition was removed yet");
    } else {
        let headings =
            ["PARTITION", "CLASS", "STATE", "MOVED", "REMOVED", "SIZE", "WHEN", "BY", "ERROR"];
        table(retention, &headings, &removals);
    }
    let forgotten: Vec<_> = each(retention, |database| &database.forgotten)
        .map(|(_, forgotten)| {
            let ForgottenBody { tenant, consumer, completed, skipped, discarded } = forgotten;
            let mut cells = vec![format!("{tenant}/{consumer}")];
            cells.extend([*completed, *skipped, *discarded].map(output::number));
            cells
        })
        .collect();
    if !forgotten.is_empty() {
        println!("\nmessages that were removed so far:");
        output::table(&["CONSUMER", "COMPLETED", "SKIPPED", "DISCARDED"], &forgotten);
    }
    errors(retention);
    Ok(())
}

/// Begins a run, or finds the one that is under way, and follows it.
async fn remove(api: &Api, json: bool) -> Result<()> {
    let mut printed = Printed::default();
    printed.changes(&look(api).await?); // earlier removals are no news
    let begun: RetentionBegunBody = api.post(&path(&["retention", "run"]), &Nothing {}).await?;
    let began_at = output::time(begun.run.began_at);
    match (begun.is_begun, begun.due.len()) {
        _ if json => {}
        (false, _) => {
            println!("a run of `{}` is under way since {began_at}; following it", begun.run.by);
        }
        (true, 0) => {}
        (true, count) => println!("{} due", partitions(count)),
    }
    let (retention, run) = loop {
        let retention = look(api).await?;
        for line in printed.changes(&retention) {
            if !json {
                println!("{line}");
            }
        }
        if let Some(run) = ended(&retention, &begun.run) {
            break (retention, run);
        }
        tokio::time::sleep(PAUSE).await;
    };
    if json {
        output::json(&run)?;
    }
    match run.failed.len() {
        0 if json => Ok(()),
        0 => {
            println!("{}; {}", removed(run.removed), next(&retention));
            Ok(())
        }
        count => {
            let texts: Vec<_> = run.failed.iter().map(shown_failure).collect();
            bail!("{count} of the partitions or databases failed: {}", texts.join("; "))
        }
    }
}

/// Returns the run that this command follows, once it has ended. Behind a load balancer another
/// process may answer, which knows nothing of the run. Then the run has ended when nothing is left
/// to do.
fn ended(retention: &RetentionBody, followed: &RetentionRunBody) -> Option<RetentionRunBody> {
    if let Some(run) = retention.run.as_ref().filter(|run| run.began_at >= followed.began_at) {
        return run.ended_at.map(|_| run.clone());
    }
    let mut failed: Vec<_> = each(retention, |database| &database.removals)
        .filter_map(|(database, removal)| {
            let error = removal.error.clone().filter(|_| removal.state != DROPPED)?;
            let (label, partition) = (database.label.clone(), Some(removal.partition.clone()));
            Some(RetentionFailureBody { label, partition, error })
        })
        .collect();
    let has_failed = |database: &RetentionDatabaseBody, name: &str| {
        failed.iter().any(|failure| {
            failure.label == database.label && failure.partition.as_deref() == Some(name)
        })
    };
    let is_left = each(retention, |database| &database.partitions).any(|(database, partition)| {
        is_removable(partition) && !has_failed(database, &partition.name)
    });
    if is_left {
        return None;
    }
    failed.extend(retention.databases.iter().filter_map(|database| {
        let (label, error) = (database.label.clone(), database.error.clone()?);
        Some(RetentionFailureBody { label, partition: None, error })
    }));
    let removed = each(retention, |database| &database.removals)
        .filter(|(_, removal)| removal.dropped_at.is_some_and(|at| at >= followed.began_at))
        .count() as i64;
    Some(RetentionRunBody { removed, failed, ..followed.clone() })
}

/// The removals that were printed, with the line of each.
#[derive(Default)]
struct Printed(HashMap<(DatabaseLabelBody, String), String>);

impl Printed {
    /// Returns the lines that are new, the earliest removal first.
    fn changes(&mut self, retention: &RetentionBody) -> Vec<String> {
        let mut lines = Vec::new();
        for database in &retention.databases {
            for removal in database.removals.iter().rev() {
                let (key, line) = (
                    (database.label.clone(), removal.partition.clone()),
                    progress(database, removal),
                );
                if self.0.insert(key, line.clone()).as_ref() != Some(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }
}

/// Returns the progress of a removal, as a line.
fn progress(database: &RetentionDatabaseBody, removal: &RemovalBody) -> String {
    let name = named(&database.label, &removal.partition);
    let (moved, removed) = (messages(removal.moved), messages(removal.removed.unwrap_or_default()));
    let bytes = output::bytes(removal.bytes.unwrap_or_default());
    match (&removal.error, removal.state.as_str()) {
        (_, DROPPED) => format!("{name}: removed with {removed}, {bytes}; {moved} moved"),
        (Some(error), _) => format!("{name}: {error}"),
        (None, "counted") => format!("{name}: {removed} counted; the partition goes"),
        (None, _) => format!("{name}: moving what stays, {moved} so far"),
    }
}

/// Returns what a plan says at its end: what is due, or when the next partition goes.
fn next(retention: &RetentionBody) -> String {
    let all = || each(retention, |database| &database.partitions).map(|(_, partition)| partition);
    let due: Vec<_> = all().filter(|partition| is_removable(partition)).collect();
    if !due.is_empty() {
        let bytes: i64 = due.iter().map(|partition| partition.bytes).sum();
        return format!(
            "{} due, {}; `oncebox retention run` removes them now",
            partitions(due.len()),
            output::bytes(bytes)
        );
    }
    let later = all().filter(|partition| partition.is_ours && !partition.is_due);
    match later.filter_map(|partition| partition.due_at).min() {
        Some(at) => {
            format!("nothing is due; the next partition goes at {} UTC", output::time(at))
        }
        None => "nothing is due, and no partition has a time to go".to_owned(),
    }
}

/// Returns the objects of all databases, each with its database.
fn each<'a, T: 'a>(
    retention: &'a RetentionBody,
    of: impl Fn(&'a RetentionDatabaseBody) -> &'a Vec<T>,
) -> impl Iterator<Item = (&'a RetentionDatabaseBody, &'a T)> {
    let databases = retention.databases.iter();
    databases.flat_map(move |database| of(database).iter().map(move |item| (database, item)))
}

/// Prints a table, with a column for the tenant of a database where tenants have their own.
fn table(retention: &RetentionBody, headings: &[&str], rows: &[Vec<String>]) {
    let mut headings = headings.to_vec();
    if has_tenants(retention) {
        headings.push("DATABASE OF");
    }
    output::table(&headings, rows);
}

fn has_tenants(retention: &RetentionBody) -> bool {
    retention.databases.len() > 1
}

/// Returns the cell of that column, if there is one. It is empty for the host's database.
fn of_tenant(retention: &RetentionBody, database: &RetentionDatabaseBody) -> Option<String> {
    has_tenants(retention).then(|| database.label.name().unwrap_or_default().to_owned())
}

/// Prints the databases that did not answer.
fn errors(retention: &RetentionBody) {
    for database in &retention.databases {
        if let Some(error) = &database.error {
            println!("{}: {error}", database.label);
        }
    }
}

fn shown_failure(failure: &RetentionFailureBody) -> String {
    let name = match &failure.partition {
        Some(partition) => named(&failure.label, partition),
        None => failure.label.to_string(),
    };
    format!("{name}: {}", failure.error)
}

/// Returns the name of a partition, with its database where that is not the host's.
fn named(label: &DatabaseLabelBody, partition: &str) -> String {
    label.name().map_or_else(|| partition.to_owned(), |name| format!("{name}: {partition}"))
}

fn is_removable(partition: &TimePartitionBody) -> bool {
    partition.is_due && partition.is_ours
}

/// Returns the mark of a partition: whether it is due.
fn due(partition: &TimePartitionBody) -> &'static str {
    match (partition.is_ours, partition.is_due) {
        (false, _) => "not ours",
        (true, true) => "due",
        (true, false) => "",
    }
}

fn partitions(count: usize) -> String {
    if count == 1 { "1 partition is".to_owned() } else { format!("{count} partitions are") }
}

fn removed(count: i64) -> String {
    match count {
        0 => "no partition was removed".to_owned(),
        1 => "1 partition was removed".to_owned(),
        count => format!("{count} partitions were removed"),
    }
}

fn messages(count: i64) -> String {
    if count == 1 { "1 message".to_owned() } else { format!("{} messages", output::number(count)) }
}
