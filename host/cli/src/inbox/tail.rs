//! `oncebox inbox tail`

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Write},
    time::Duration,
};

use anyhow::Result;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use oncebox_control::Cursor;
use oncebox_devkit::terminal;

use super::{Api, InboxRowBody, Narrowed, cells, consumers, moment, path, with_query};

/// Pause between two polls.
const EVERY: Duration = Duration::from_secs(1);
/// Longest time from a message's timestamp to the moment it can be seen. The timestamp is the begin
/// of its transaction, and the message is seen when that has committed.
const LATE: TimeDelta = TimeDelta::seconds(60);
/// Messages per request.
const PAGE: i64 = 1_000;

/// By what never changes: a message is shown once, as it is when it is first seen.
#[derive(Args)]
pub(crate) struct Tail {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
    /// Only this event type
    #[arg(long)]
    event_type: Option<String>,
    /// Only this ordering key; bytes that are no text as `0x` and hexadecimal digits
    #[arg(long)]
    key: Option<String>,
    /// Begin with those received at this time or later: RFC 3339, or how long ago, as `90s`, `15m`,
    /// `2h`, `3d`
    #[arg(long, value_parser = moment)]
    since: Option<DateTime<Utc>>,
}

/// Prints messages in the order in which they arrive. Without `--since`, it begins with the next
/// one.
pub(super) async fn tail(api: &Api, wanted: Tail, as_json: bool) -> Result<()> {
    let Tail { tenant, consumer, event_type, key, since } = wanted;
    let narrowed = Narrowed { event_type, key, since, ..Narrowed::default() };
    let mut followed = Vec::new();
    for (tenant, consumer) in consumers(api, &tenant, &consumer).await? {
        let path = path(&["tenants", &tenant, "consumers", &consumer, "inbox"]);
        followed.push(Followed::new(api, path, narrowed.clone()).await?);
    }
    loop {
        let mut rows = Vec::new();
        for followed in &mut followed {
            rows.extend(followed.look(api).await?);
        }
        rows.sort_by(|a, b| (a.received_at, &a.message_id).cmp(&(b.received_at, &b.message_id)));
        for row in &rows {
            let line = if as_json {
                serde_json::to_string(row)?
            } else {
                terminal::cell(&cells(row).join("  ")).into_owned()
            };
            match writeln!(std::io::stdout(), "{line}") {
                // The reader has closed the pipe.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// The inbox of a consumer that is followed.
struct Followed {
    path: String,
    narrowed: Narrowed,
    since: Option<DateTime<Utc>>,
    /// Time at which the newest seen message was received. Clocks differ, so only the time of the
    /// consumer's database counts.
    newest: Option<DateTime<Utc>>,
    /// Times and ids of the messages seen within [`LATE`] before the newest one.
    seen: BTreeSet<(DateTime<Utc>, String)>,
}

impl Followed {
    async fn new(api: &Api, path: String, narrowed: Narrowed) -> Result<Self> {
        let mut followed =
            Self { path, since: narrowed.since, narrowed, newest: None, seen: BTreeSet::new() };
        if followed.since.is_none() {
            // Messages that are there already were not requested.
            let last: Vec<InboxRowBody> =
                api.get(&with_query(&followed.path, &followed.narrowed.query(None, 1))).await?;
            followed.newest = last.first().map(|row| row.received_at);
            followed.look(api).await?;
        }
        Ok(followed)
    }

    /// Returns the messages that arrived since the last poll and were not seen.
    async fn look(&mut self, api: &Api) -> Result<Vec<InboxRowBody>> {
        self.narrowed.since = self.newest.map(|newest| newest - LATE).max(self.since);
        let mut rows = Vec::new();
        let mut after = None;
        loop {
            let page: Vec<InboxRowBody> =
                api.get(&with_query(&self.path, &self.narrowed.query(after, PAGE))).await?;
            let last = page.last().filter(|_| page.len() as i64 == PAGE);
            after = last.map(|row| Cursor {
                received_at: row.received_at,
                message_id: Some(row.message_id.clone()),
            });
            rows.extend(page);
            if after.is_none() {
                break;
            }
        }
        rows.retain(|row| self.seen.insert((row.received_at, row.message_id.clone())));
        self.newest = rows.iter().map(|row| row.received_at).max().max(self.newest);
        if let Some(newest) = self.newest {
            self.seen.retain(|(received_at, _)| *received_at >= newest - LATE);
        }
        Ok(rows)
    }
}
