//! `oncebox archive …`

use anyhow::{Result, bail};
use chrono::{DateTime, Utc};
use clap::Subcommand;
use oncebox_api::wire::{
    ArchiveBody, ArchiveEnded, ArchivedFileBody, ArchivedMessageBody, FilesForgotten, ForgetFiles,
};
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};

use super::{arguments, inbox};

#[derive(Subcommand)]
pub(super) enum ArchiveCommand {
    /// List the files, newest first
    List {
        /// Only files of this tenant
        #[arg(long)]
        tenant: Option<String>,
        /// Only files of consumers of this name
        #[arg(long)]
        consumer: Option<String>,
        /// At most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
        limit: i64,
    },
    /// Show a message that was archived
    Find {
        /// The message id
        message_id: String,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// Only of this consumer
        #[arg(long)]
        consumer: Option<String>,
        /// Also print headers and payload, where the policy kept them
        #[arg(long)]
        payload: bool,
    },
    /// Take files out of the list that are deleted on purpose, and print their paths
    Forget {
        /// Only files of this tenant, which may be deleted
        #[arg(long, required_unless_present = "before")]
        tenant: Option<String>,
        /// Only files of this consumer of the tenant
        #[arg(long, requires = "tenant")]
        consumer: Option<String>,
        /// Only files written before this time: RFC 3339, or how long ago, as `400d`
        #[arg(long, value_parser = inbox::moment)]
        before: Option<DateTime<Utc>>,
    },
    /// Remove messages from now on without archiving them; files that were written stay
    Off,
}

pub(super) async fn run(api: &Api, command: ArchiveCommand, as_json: bool) -> Result<()> {
    match command {
        ArchiveCommand::List { tenant, consumer, limit } => {
            list(api, tenant, consumer, limit, as_json).await
        }
        ArchiveCommand::Find { message_id, tenant, consumer, payload } => {
            let path = path(&["tenants", &tenant, "archive", "messages", &message_id]);
            let query = [("consumer", consumer), ("payload", payload.then(|| "true".to_owned()))];
            let found: Vec<ArchivedMessageBody> = api.get(&with_query(&path, &query)).await?;
            if found.is_empty() {
                bail!("the archive of `{tenant}` has no message `{message_id}`");
            }
            show(&found, as_json)
        }
        ArchiveCommand::Forget { tenant, consumer, before } => {
            let which = ForgetFiles { tenant, consumer, before };
            let forgotten: FilesForgotten = api.post(&path(&["archive", "forget"]), &which).await?;
            if as_json {
                return output::json(&forgotten);
            }
            for file in &forgotten.files {
                println!("{file}");
            }
            println!(
                "{} files are out of the list; they may be deleted from the storage now",
                output::number(forgotten.files.len() as i64)
            );
            Ok(())
        }
        ArchiveCommand::Off => {
            let ended: ArchiveEnded = api.delete(&path(&["archive"])).await?;
            if as_json {
                return output::json(&ended);
            }
            match ended.location {
                None => println!("messages are not archived"),
                Some(location) => println!(
                    "messages are no longer archived at `{location}`; its files stay. A host that \
                        is still set to archive begins again"
                ),
            }
            Ok(())
        }
    }
}

async fn list(
    api: &Api,
    tenant: Option<String>,
    consumer: Option<String>,
    limit: i64,
    as_json: bool,
) -> Result<()> {
    let query = [("consumer", consumer), ("limit", Some(limit.to_string()))];
    if let Some(tenant) = arguments::named_or_own(api, tenant).await? {
        let path = path(&["tenants", &tenant, "archive"]);
        let files: Vec<ArchivedFileBody> = api.get(&with_query(&path, &query)).await?;
        return if as_json { output::json(&files) } else { table(&files, limit) };
    }
    let archive: ArchiveBody = api.get(&with_query(&path(&["archive"]), &query)).await?;
    if as_json {
        return output::json(&archive);
    }
    match (&archive.location, archive.since) {
        (Some(location), Some(since)) => println!(
            "messages are archived at `{location}` before their removal, since {} UTC",
            output::time(since)
        ),
        _ => println!("messages are not archived"),
    }
    table(&archive.files, limit)
}

fn table(files: &[ArchivedFileBody], limit: i64) -> Result<()> {
    if files.is_empty() {
        println!("there is no file yet");
        return Ok(());
    }
    let cells = |file: &ArchivedFileBody| {
        vec![
            file.path.clone(),
            format!("{}/{}", file.tenant, file.consumer),
            output::time(file.from_at),
            output::time(file.to_at),
            output::number(file.messages),
            output::bytes(file.bytes),
            output::time(file.verified_at),
        ]
    };
    output::table(
        &["FILE", "CONSUMER", "FROM", "TO", "MESSAGES", "SIZE", "VERIFIED"],
        &files.iter().map(cells).collect::<Vec<_>>(),
    );
    if files.len() as i64 == limit {
        println!("there may be more: raise `--limit`");
    }
    Ok(())
}

/// Prints messages as `inbox show` does, with what the archive knows beside them.
fn show(found: &[ArchivedMessageBody], as_json: bool) -> Result<()> {
    let mut values = Vec::new();
    for message in found {
        let mut value = serde_json::to_value(message)?;
        if let (None, Some(object)) = (&message.message.headers, value.as_object_mut()) {
            // The request did not ask for them.
            for name in ["key", "headers", "payload"] {
                object.remove(name);
            }
        }
        values.push(value);
    }
    if as_json {
        return output::json(&values);
    }
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            println!();
        }
        inbox::members(value);
    }
    Ok(())
}
