//! `oncebox inbox tail`

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Write},
    time::Duration,
};

use anyhow::Result;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use oncebox_inbox::InboxPlace;

use super::{Api, InboxRow, Narrowed, cells, consumers, named, path, with_query};

/// Pause between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// A message is of the time at which its transaction began, and is seen when that has committed: up to so much later.
const LATE: TimeDelta = TimeDelta::seconds(60);
/// Messages of one request.
const PAGE: i64 = 1_000;

#[derive(Args)]
pub(in crate::cli) struct Tail {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
    #[command(flatten)]
    narrowed: Box<Narrowed>,
}

/// Messages in the order in which they came, as they are when they are first seen. Without `--since`, from now on.
pub(super) async fn tail(api: &Api, wanted: Tail, as_json: bool) -> Result<()> {
    let Tail { tenant, consumer, mut narrowed } = wanted;
    let since = narrowed.since;
    let consumers = consumers(api, &tenant, &consumer).await?;
    let mut newest = None;
    let mut seen = BTreeSet::new();
    if since.is_none() {
        // What is there now was not asked for. Clocks may differ: the last message says what time it is.
        newest = look(api, &consumers, &narrowed, Some(1)).await?.iter().map(|row| row.received_at).max();
        narrowed.since = newest.map(|newest| newest - LATE);
        seen.extend(look(api, &consumers, &narrowed, None).await?.iter().map(place));
    }
    loop {
        narrowed.since = newest.map(|newest| newest - LATE).max(since);
        let mut rows = look(api, &consumers, &narrowed, None).await?;
        rows.retain(|row| seen.insert(place(row)));
        rows.sort_by_key(place);
        for row in &rows {
            newest = newest.max(Some(row.received_at));
            let line = if as_json { serde_json::to_string(row)? } else { cells(row).join("  ") };
            match writeln!(std::io::stdout(), "{line}") {
                // Whoever reads has had enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
        }
        if let Some(newest) = newest {
            seen.retain(|(received_at, ..)| *received_at >= newest - LATE);
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn place(row: &InboxRow) -> (DateTime<Utc>, String, String) {
    (row.received_at, named(row), row.message_id.clone())
}

/// The messages of consumers that are asked for, page by page; or only the newest ones of each.
async fn look(api: &Api, consumers: &[(String, String)], narrowed: &Narrowed, only: Option<i64>) -> Result<Vec<InboxRow>> {
    let mut rows = Vec::new();
    for (tenant, consumer) in consumers {
        let path = path(&["tenants", tenant, "consumers", consumer, "inbox"]);
        let mut after = None;
        loop {
            let page: Vec<InboxRow> = api.get(&with_query(&path, &narrowed.query(after, only.unwrap_or(PAGE)))).await?;
            let last = page.last().filter(|_| only.is_none() && page.len() as i64 == PAGE);
            after = last.map(|row| InboxPlace { received_at: row.received_at, message_id: Some(row.message_id.clone()) });
            rows.extend(page);
            if after.is_none() {
                break;
            }
        }
    }
    Ok(rows)
}
