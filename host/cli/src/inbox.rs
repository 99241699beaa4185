//! `oncebox inbox …`

mod edit;
mod export;
mod stats;
mod tail;

use std::cmp::Ordering;

use anyhow::{Result, bail};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use clap::{Args, Subcommand};
use oncebox_api::wire::{InboxDetailBody, InboxRowBody, JobFilterBody, NewJobBody, NewUnmasking};
use oncebox_control::Cursor;
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};
use oncebox_model::MessageStatus;
use serde_json::Value;

use super::{
    consumer,
    job::{self, StartArgs},
};

#[derive(Subcommand)]
pub(super) enum InboxCommand {
    /// List messages, newest first
    List(Box<Wanted>),
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
        /// Also print headers and payload, where the policy keeps them, and masked where it says so
        #[arg(long)]
        payload: bool,
    },
    /// Show one message with what its policy masks
    Unmask {
        /// The message id
        message_id: String,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// The consumer
        #[arg(long)]
        consumer: String,
        /// Why: kept in the audit log
        #[arg(long, value_name = "TEXT")]
        because: String,
    },
    /// Count what is open, and say what is too much by the policy
    Stats {
        /// Only this tenant
        #[arg(long)]
        tenant: Option<String>,
        /// Only this consumer
        #[arg(long)]
        consumer: Option<String>,
    },
    /// Show messages as they come, until broken off
    Tail(Box<tail::Tail>),
    /// Write messages with what became of them, one JSON object a line, newest first
    Export(export::Export),
    /// Run dead letters again, under their ids and with their headers
    Redrive(Box<ActionArgs>),
    /// Never run messages that did not complete; their rows stay, and what waits behind them
    /// follows
    Discard(Box<ActionArgs>),
    /// Run messages now that wait for their next attempt
    Retry(Box<ActionArgs>),
    /// Give a dead letter another payload and run it again, under its id and with its headers
    Edit(edit::EditArgs),
}

/// Which messages.
#[derive(Args)]
pub(super) struct Wanted {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
    #[command(flatten)]
    narrowed: Narrowed,
    /// Only messages after this cursor, which the last page ended with
    #[arg(long, value_name = "CURSOR")]
    after: Option<ListCursor>,
    /// At most this many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
    limit: i64,
}

/// By what is known of a message.
#[derive(Clone, Default, Args)]
pub(super) struct Narrowed {
    /// Only this status
    #[arg(long, value_parser = MessageStatus::NAMES)]
    status: Option<String>,
    /// Only what is there for this reason, as `no_route`, `sql_error` or `sql_error:23505`
    #[arg(long)]
    reason: Option<String>,
    /// Only this event type
    #[arg(long)]
    event_type: Option<String>,
    /// Only this ordering key; bytes that are no text as `0x` and hexadecimal digits
    #[arg(long)]
    key: Option<String>,
    /// Only those whose last error holds this text, regardless of case
    #[arg(long)]
    error: Option<String>,
    /// Only those that a version ran last whose digest begins like this
    #[arg(long)]
    version: Option<String>,
    /// Only those received at this time or later: RFC 3339, or how long ago, as `90s`, `15m`, `2h`,
    /// `3d`
    #[arg(long, value_parser = moment)]
    since: Option<DateTime<Utc>>,
    /// Only those received before this time
    #[arg(long, value_parser = moment)]
    until: Option<DateTime<Utc>>,
}

/// Options of an action on messages of a consumer.
#[derive(Args)]
pub(super) struct ActionArgs {
    /// Only these messages; or say which by an option
    message_ids: Vec<String>,
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
    #[command(flatten)]
    narrowed: Narrowed,
    /// All messages of the consumer that it can be done with
    #[arg(long)]
    all: bool,
    /// Why: kept with each message and in the audit log
    #[arg(long, value_name = "TEXT")]
    because: String,
    #[command(flatten)]
    start: StartArgs,
}

/// A position in a list of several consumers' messages. Messages of one time are ordered by the
/// names of their consumers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ListCursor {
    received_at: DateTime<Utc>,
    consumer: String,
    message_id: String,
}

impl std::fmt::Display for ListCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = self.received_at.to_rfc3339_opts(SecondsFormat::Micros, true);
        write!(f, "{time},{},{}", self.consumer, self.message_id)
    }
}

impl std::str::FromStr for ListCursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, ',');
        let mut part = || {
            parts
                .next()
                .ok_or("a cursor is a time, a consumer and a message id, with commas between them")
        };
        let (time, consumer, message_id) = (part()?, part()?.to_owned(), part()?.to_owned());
        let received_at = DateTime::parse_from_rfc3339(time)
            .map_err(|error| format!("`{time}` is no time: {error}"))?
            .into();
        Ok(Self { received_at, consumer, message_id })
    }
}

impl ListCursor {
    fn of(row: &InboxRowBody) -> Self {
        Self {
            received_at: row.received_at,
            consumer: named(row),
            message_id: row.message_id.clone(),
        }
    }

    /// Returns the position in the list of one consumer.
    fn within(&self, consumer: &str) -> Cursor {
        let message_id = match consumer.cmp(self.consumer.as_str()) {
            Ordering::Less => None,
            Ordering::Equal => Some(self.message_id.clone()),
            // No message id is empty, so all messages of that time are still to come.
            Ordering::Greater => Some(String::new()),
        };
        Cursor { received_at: self.received_at, message_id }
    }
}

fn named(row: &InboxRowBody) -> String {
    format!("{}/{}", row.tenant, row.consumer)
}

/// Units of time for operators, with their seconds.
const UNITS: [(char, i64); 4] = [('s', 1), ('m', 60), ('h', 3_600), ('d', 86_400)];

/// Formats an age in the largest unit that has passed.
fn ago(seconds: i64) -> String {
    let (unit, length) =
        UNITS.into_iter().rev().find(|(_, length)| seconds >= *length).unwrap_or(UNITS[0]);
    format!("{}{unit}", seconds / length)
}

/// Parses a time, or how long ago it was.
pub(super) fn moment(text: &str) -> Result<DateTime<Utc>, String> {
    let ago = UNITS.iter().find_map(|(unit, seconds)| {
        text.strip_suffix(*unit)?.parse::<u32>().ok()?.checked_mul(*seconds as u32)
    });
    if let Some(ago) = ago {
        return Utc::now()
            .checked_sub_signed(TimeDelta::seconds(ago.into()))
            .ok_or_else(|| "that is too long ago".to_owned());
    }
    let time = DateTime::parse_from_rfc3339(text);
    Ok(time
        .map_err(|_| {
            "use a time as `2026-01-31T12:00:00Z`, or how long ago, as `90s`, `15m`, \
        `2h`, `3d`"
        })?
        .into())
}

pub(super) async fn run(api: &Api, command: InboxCommand, as_json: bool) -> Result<()> {
    match command {
        InboxCommand::List(wanted) => {
            let rows = rows(api, &wanted).await?;
            if as_json { output::json(&rows) } else { list(&rows, wanted.limit) }
        }
        InboxCommand::Show { message_id, tenant, consumer, payload } => {
            let path = path(&["tenants", &tenant, "consumers", &consumer, "inbox", &message_id]);
            let message: InboxDetailBody = api
                .get(&with_query(&path, &[("payload", payload.then(|| "true".to_owned()))]))
                .await?;
            show(&message, as_json)
        }
        InboxCommand::Unmask { message_id, tenant, consumer, because } => {
            let inbox = ["tenants", &tenant, "consumers", &consumer, "inbox", &message_id];
            let path = path(&[&inbox[..], &["unmask"]].concat());
            let message: InboxDetailBody =
                api.post(&path, &NewUnmasking { reason: because }).await?;
            show(&message, as_json)
        }
        InboxCommand::Stats { tenant, consumer } => {
            stats::run(api, tenant, consumer, as_json).await
        }
        InboxCommand::Redrive(wanted) => act(api, &wanted, "redrive", as_json).await,
        InboxCommand::Discard(wanted) => act(api, &wanted, "discard", as_json).await,
        InboxCommand::Retry(wanted) => act(api, &wanted, "retry", as_json).await,
        InboxCommand::Edit(wanted) => edit::edit(api, wanted, as_json).await,
        InboxCommand::Tail(wanted) => tail::tail(api, *wanted, as_json).await,
        InboxCommand::Export(wanted) => export::export(api, wanted).await,
    }
}

/// Returns the consumers of these names, with their tenants. A name that is left out matches all.
async fn consumers(
    api: &Api,
    tenant: &Option<String>,
    consumer: &Option<String>,
) -> Result<Vec<(String, String)>> {
    if let (Some(tenant), Some(consumer)) = (tenant, consumer) {
        return Ok(vec![(tenant.clone(), consumer.clone())]);
    }
    let all = consumer::all(api, tenant.as_deref()).await?.into_iter().map(|c| (c.tenant, c.name));
    Ok(all.filter(|(_, name)| consumer.as_ref().is_none_or(|consumer| consumer == name)).collect())
}

/// Returns the newest rows of several consumers.
async fn rows(api: &Api, wanted: &Wanted) -> Result<Vec<InboxRowBody>> {
    let consumers = consumers(api, &wanted.tenant, &wanted.consumer).await?;
    let mut rows: Vec<InboxRowBody> = Vec::new();
    for (tenant, consumer) in &consumers {
        let path = path(&["tenants", tenant, "consumers", consumer, "inbox"]);
        let after =
            wanted.after.as_ref().map(|after| after.within(&format!("{tenant}/{consumer}")));
        rows.extend(
            api.get::<Vec<InboxRowBody>>(&with_query(
                &path,
                &wanted.narrowed.query(after, wanted.limit),
            ))
            .await?,
        );
    }
    rows.sort_by(|a, b| {
        (b.received_at, named(a), &a.message_id).cmp(&(a.received_at, named(b), &b.message_id))
    });
    rows.truncate(wanted.limit.try_into().unwrap_or(0));
    Ok(rows)
}

/// Starts the job of a command.
async fn act(api: &Api, args: &ActionArgs, action: &str, as_json: bool) -> Result<()> {
    let filter = args.narrowed.filter(&args.message_ids);
    if args.all == (filter != JobFilterBody::default()) {
        bail!("say which messages: by their ids, by an option such as `--reason`, or with `--all`");
    }
    let new = NewJobBody {
        action: action.to_owned(),
        consumer: Some(args.consumer.clone()),
        filter,
        reason: args.because.clone(),
        rate: None,
    };
    job::start(api, &args.tenant, new, &args.start, as_json).await
}

impl Narrowed {
    /// Returns the query parameters of a request for one page of these messages.
    fn query(&self, after: Option<Cursor>, limit: i64) -> Vec<(&'static str, Option<String>)> {
        let time = |time: Option<DateTime<Utc>>| {
            time.map(|time| time.to_rfc3339_opts(SecondsFormat::Micros, true))
        };
        vec![
            ("status", self.status.clone()),
            ("reason", self.reason.clone()),
            ("event_type", self.event_type.clone()),
            ("key", self.key.clone()),
            ("error", self.error.clone()),
            ("version", self.version.clone()),
            ("since", time(self.since)),
            ("until", time(self.until)),
            ("after", after.map(|after| after.to_string())),
            ("limit", Some(limit.to_string())),
        ]
    }

    fn filter(&self, ids: &[String]) -> JobFilterBody {
        let Self { status, reason, event_type, key, error, version, since, until } = self;
        JobFilterBody {
            status: status.clone(),
            reason: reason.clone(),
            event_type: event_type.clone(),
            key: key.clone(),
            error: error.clone(),
            version: version.clone(),
            since: *since,
            until: *until,
            ids: (!ids.is_empty()).then(|| ids.to_vec()),
            ..JobFilterBody::default()
        }
    }
}

fn cells(r: &InboxRowBody) -> Vec<String> {
    vec![
        r.received_at.format("%F %T").to_string(),
        named(r),
        r.message_id.clone(),
        // A light row has none.
        r.event_type.clone().unwrap_or_else(|| "-".to_owned()),
        r.status.to_string(),
        r.attempts.to_string(),
        r.reason.clone().unwrap_or_default(),
    ]
}

fn list(rows: &[InboxRowBody], limit: i64) -> Result<()> {
    output::table(
        &["RECEIVED", "CONSUMER", "MESSAGE", "EVENT TYPE", "STATUS", "ATTEMPTS", "REASON"],
        &rows.iter().map(cells).collect::<Vec<_>>(),
    );
    if let Some(last) = rows.last().filter(|_| rows.len() as i64 == limit) {
        println!("there may be more: --after '{}'", ListCursor::of(last));
    }
    Ok(())
}

fn show(message: &InboxDetailBody, as_json: bool) -> Result<()> {
    let mut value = serde_json::to_value(message)?;
    if let (None, Some(object)) = (&message.headers, value.as_object_mut()) {
        // The request did not ask for them.
        for name in ["key", "headers", "payload", "masked"] {
            object.remove(name);
        }
    }
    if as_json {
        return output::json(&value);
    }
    members(&value);
    Ok(())
}

/// Prints the members of an object that have a value, one a line.
pub(super) fn members(object: &Value) {
    for (name, value) in
        object.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null())
    {
        println!("{name:<16} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_given_as_people_say_them() {
        let passed = |text| (Utc::now() - moment(text).expect(text)).num_seconds();
        for (text, seconds) in [("90s", 90), ("15m", 900), ("2h", 7_200), ("3d", 259_200)] {
            assert!((passed(text) - seconds).abs() < 10, "{text}");
        }
        assert_eq!(
            [0, 59, 60, 7_199, 7_200, 300_000].map(ago),
            ["0s", "59s", "1m", "1h", "2h", "3d"]
        );
        assert_eq!(moment("2026-01-31T12:00:00Z").expect("a time").timestamp(), 1_769_860_800);
        for text in ["", "5", "h", "-5m", "99999999999s", "4000000000d", "yesterday", "2026-01-31"]
        {
            assert!(moment(text).is_err(), "{text}");
        }
    }

    // What could go wrong: a message is on no page, or on two, where several have the same time.
    #[test]
    fn a_cursor_among_several_consumers_is_one_in_each() {
        let cursor: ListCursor =
            "2026-01-31T12:00:00.000001Z,acme/b,a,b".parse().expect("a cursor");
        assert_eq!((cursor.consumer.as_str(), cursor.message_id.as_str()), ("acme/b", "a,b"));
        assert_eq!(cursor.to_string().parse(), Ok(cursor.clone()));
        let within = |consumer| cursor.within(consumer).message_id;
        assert_eq!(
            (within("acme/a"), within("acme/b"), within("acme/c")),
            (None, Some("a,b".to_owned()), Some(String::new()))
        );
        for text in ["", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z,acme/b", "noon,acme/b,x"] {
            assert!(text.parse::<ListCursor>().is_err(), "{text}");
        }
    }
}
