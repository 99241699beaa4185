//! `oncebox inbox …`

use anyhow::Result;
use clap::Subcommand;
use oncebox_inbox::{Admin, Filter, InboxDetail, InboxRow};
use serde_json::{Value, json};

use super::output;

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
        #[arg(long, default_value_t = 50)]
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

pub(super) async fn run(admin: &Admin, command: InboxCommand, as_json: bool) -> Result<()> {
    match command {
        InboxCommand::List { tenant, consumer, status, limit } => {
            // A misspelt name must not look like an empty inbox.
            match (&tenant, &consumer) {
                (Some(tenant), Some(consumer)) => drop(admin.consumer(tenant, consumer).await?),
                (Some(tenant), None) => drop(admin.tenant(tenant).await?),
                _ => {}
            }
            let rows = admin.inbox_list(&Filter { tenant, consumer, status, limit }).await?;
            if as_json { output::json(&rows) } else { list(&rows) }
        }
        InboxCommand::Show { message_id, tenant, consumer, payload } => {
            let detail = admin.inbox_show(&tenant, &consumer, &message_id).await?;
            show(&detail, payload, as_json)
        }
    }
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

fn show(detail: &InboxDetail, with_payload: bool, as_json: bool) -> Result<()> {
    let mut value = serde_json::to_value(&detail.row)?;
    if let (true, Some(object)) = (with_payload, value.as_object_mut()) {
        let headers = detail.headers.iter().map(|(name, value)| json!([name, text(value)])).collect();
        object.insert("key".to_owned(), detail.key.as_deref().map_or(Value::Null, |key| text(key).into()));
        object.insert("headers".to_owned(), Value::Array(headers));
        object.insert("payload".to_owned(), detail.payload.as_deref().map_or(Value::Null, |payload| text(payload).into()));
    }
    if as_json {
        return output::json(&value);
    }
    for (name, value) in value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        println!("{name:<16} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
    Ok(())
}

/// Bytes for a person: text where they are text, else hexadecimal.
fn text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| format!("0x{}", hex::encode(bytes)), str::to_owned)
}
