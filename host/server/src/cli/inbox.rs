//! `oncebox inbox …`

use anyhow::Result;
use clap::Subcommand;

use super::{
    api::{Api, path, with_query},
    consumer, output,
    wire::{InboxDetail, InboxRow},
};

/// States of a row that can be seen from outside.
const STATUSES: [&str; 9] =
    ["received", "in_progress", "completed", "failed_retryable", "failed_terminal", "parked", "waiting", "skipped", "discarded"];

#[derive(Subcommand)]
pub(super) enum InboxCommand {
    /// List messages, newest first
    List {
        /// Only this tenant
        #[arg(long)]
        tenant: Option<String>,
        /// Only this consumer
        #[arg(long)]
        consumer: Option<String>,
        /// Only this status
        #[arg(long, value_parser = STATUSES)]
        status: Option<String>,
        /// At most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
        limit: i64,
    },
    /// Show one message
    Show {
        /// The message id
        message_id: String,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// The consumer
        #[arg(long)]
        consumer: String,
        /// Also print headers and payload, where the policy keeps them
        #[arg(long)]
        payload: bool,
    },
}

pub(super) async fn run(api: &Api, command: InboxCommand, as_json: bool) -> Result<()> {
    match command {
        InboxCommand::List { tenant, consumer, status, limit } => {
            let consumers = match (tenant, consumer) {
                (Some(tenant), Some(consumer)) => vec![(tenant, consumer)],
                (tenant, consumer) => {
                    let all = consumer::all(api, tenant.as_deref()).await?.into_iter().map(|c| (c.tenant, c.name));
                    all.filter(|(_, name)| consumer.as_ref().is_none_or(|consumer| consumer == name)).collect()
                }
            };
            let rows = rows(api, &consumers, status.as_deref(), limit).await?;
            if as_json { output::json(&rows) } else { list(&rows) }
        }
        InboxCommand::Show { message_id, tenant, consumer, payload } => {
            let path = path(&["tenants", &tenant, "consumers", &consumer, "inbox", &message_id]);
            let message: InboxDetail = api.get(&with_query(&path, &[("payload", payload.then(|| "true".to_owned()))])).await?;
            show(&message, as_json)
        }
    }
}

/// The newest rows of several consumers.
async fn rows(api: &Api, consumers: &[(String, String)], status: Option<&str>, limit: i64) -> Result<Vec<InboxRow>> {
    let mut rows: Vec<InboxRow> = Vec::new();
    for (tenant, consumer) in consumers {
        let path = path(&["tenants", tenant, "consumers", consumer, "inbox"]);
        let query = [("status", status.map(str::to_owned)), ("limit", Some(limit.to_string()))];
        rows.extend(api.get::<Vec<InboxRow>>(&with_query(&path, &query)).await?);
    }
    rows.sort_by(|a, b| (b.received_at, &a.message_id).cmp(&(a.received_at, &b.message_id)));
    rows.truncate(limit.try_into().unwrap_or(0));
    Ok(rows)
}

fn list(rows: &[InboxRow]) -> Result<()> {
    let cells = |r: &InboxRow| {
        vec![
            r.received_at.format("%F %T").to_string(),
            format!("{}/{}", r.tenant, r.consumer),
            r.message_id.clone(),
            r.event_type.clone().unwrap_or_default(),
            r.status.clone(),
            r.attempts.to_string(),
            r.reason.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &["RECEIVED", "CONSUMER", "MESSAGE", "EVENT TYPE", "STATUS", "ATTEMPTS", "REASON"],
        &rows.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

fn show(message: &InboxDetail, as_json: bool) -> Result<()> {
    let mut value = serde_json::to_value(message)?;
    if let (None, Some(object)) = (&message.headers, value.as_object_mut()) {
        // They were not asked for.
        for name in ["key", "headers", "payload"] {
            object.remove(name);
        }
    }
    if as_json {
        return output::json(&value);
    }
    for (name, value) in value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        println!("{name:<16} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
    Ok(())
}
