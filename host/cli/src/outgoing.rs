//! `oncebox outgoing …`

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use oncebox_api::wire::{
    JobFilterBody, NewJobBody, OutgoingCountBody, OutgoingDetailBody, OutgoingRowBody,
};
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};
use oncebox_model::outgoing::OutgoingStatus;

use super::{
    inbox::members,
    job::{self, StartArgs},
};

#[derive(Subcommand)]
pub(super) enum OutgoingCommand {
    /// List outgoing messages, newest first
    List(ListArgs),
    /// Show one outgoing message, and the message that caused it
    Show {
        /// Its id
        id: String,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// The consumer whose handler emitted it, which makes the search short
        #[arg(long)]
        consumer: Option<String>,
        /// The id of the message that caused it, which makes the search short
        #[arg(long, value_name = "MESSAGE")]
        cause: Option<String>,
        /// Also print key, headers, payload and the endpoint's answer
        #[arg(long)]
        payload: bool,
    },
    /// Count what is still to be sent and what is parked, by destination
    Stats {
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// Only this consumer
        #[arg(long)]
        consumer: Option<String>,
    },
    /// Send parked messages, and those that wait for their next attempt, now
    Redrive(ActArgs),
    /// Never send messages that no host is sending; their rows stay
    Discard(ActArgs),
}

/// Which outgoing messages.
#[derive(Args)]
pub(super) struct ListArgs {
    /// The tenant
    #[arg(long)]
    tenant: String,
    #[command(flatten)]
    selected: SelectedArgs,
    /// Only messages before this position, which the last page ended with
    #[arg(long, value_name = "POSITION")]
    after: Option<i64>,
    /// At most this many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
    limit: i64,
}

/// By what is known of an outgoing message.
#[derive(Clone, Args)]
pub(super) struct SelectedArgs {
    /// Only those that handlers of this consumer emitted
    #[arg(long)]
    consumer: Option<String>,
    /// Only this status
    #[arg(long, value_parser = OutgoingStatus::NAMES)]
    status: Option<String>,
    /// Only those to this destination, as `kafka:orders`, `inbox:billing` or `http:payments`
    #[arg(long)]
    destination: Option<String>,
    /// Only those that this message caused
    #[arg(long, value_name = "MESSAGE")]
    cause: Option<String>,
}

/// Options of an action on outgoing messages.
#[derive(Args)]
pub(super) struct ActArgs {
    /// Only these outgoing messages, by their ids; or say which by an option
    ids: Vec<String>,
    /// The tenant
    #[arg(long)]
    tenant: String,
    #[command(flatten)]
    selected: SelectedArgs,
    /// All messages of the tenant that it can be done with
    #[arg(long)]
    all: bool,
    /// Why: kept in the audit log
    #[arg(long, value_name = "TEXT")]
    because: String,
    #[command(flatten)]
    start: StartArgs,
}

pub(super) async fn run(api: &Api, command: OutgoingCommand, as_json: bool) -> Result<()> {
    match command {
        OutgoingCommand::List(args) => {
            let rows: Vec<OutgoingRowBody> = api.get(&args.query()).await?;
            if as_json { output::json(&rows) } else { list(&rows, args.limit) }
        }
        OutgoingCommand::Show { id, tenant, consumer, cause, payload } => {
            let query = [
                ("consumer", consumer),
                ("cause", cause),
                ("payload", payload.then(|| "true".to_owned())),
            ];
            let path = path(&["tenants", &tenant, "outgoing", "messages", &id]);
            show(&api.get(&with_query(&path, &query)).await?, as_json)
        }
        OutgoingCommand::Stats { tenant, consumer } => {
            let path = path(&["tenants", &tenant, "outgoing", "stats"]);
            let counts: Vec<OutgoingCountBody> =
                api.get(&with_query(&path, &[("consumer", consumer)])).await?;
            stats(&counts, as_json)
        }
        OutgoingCommand::Redrive(args) => act(api, &args, "outgoing_redrive", as_json).await,
        OutgoingCommand::Discard(args) => act(api, &args, "outgoing_discard", as_json).await,
    }
}

impl ListArgs {
    /// Returns the path of the request for this page.
    fn query(&self) -> String {
        let SelectedArgs { consumer, status, destination, cause } = self.selected.clone();
        with_query(
            &path(&["tenants", &self.tenant, "outgoing"]),
            &[
                ("consumer", consumer),
                ("status", status),
                ("destination", destination),
                ("cause", cause),
                ("after", self.after.map(|after| after.to_string())),
                ("limit", Some(self.limit.to_string())),
            ],
        )
    }
}

impl ActArgs {
    /// Returns the job. Refuses a command that says of nothing, or of too much, what it is about.
    fn job(&self, action: &str) -> Result<NewJobBody> {
        let SelectedArgs { consumer, status, destination, cause } = self.selected.clone();
        let ids = (!self.ids.is_empty()).then(|| self.ids.clone());
        let filter = JobFilterBody { status, destination, cause, ids, ..JobFilterBody::default() };
        let is_selected = consumer.is_some() || filter != JobFilterBody::default();
        if self.all == is_selected {
            bail!(
                "say which outgoing messages: by their ids, by an option such as `--destination`, \
                    or with `--all`"
            );
        }
        let (action, reason) = (action.to_owned(), self.because.clone());
        Ok(NewJobBody { action, consumer, filter, reason, rate: None })
    }
}

/// Starts the job of a command.
async fn act(api: &Api, args: &ActArgs, action: &str, as_json: bool) -> Result<()> {
    job::start(api, &args.tenant, args.job(action)?, &args.start, as_json).await
}

fn list(rows: &[OutgoingRowBody], limit: i64) -> Result<()> {
    let cells = |row: &OutgoingRowBody| {
        vec![
            output::time(row.created_at),
            format!("{}/{}", row.tenant, row.consumer),
            row.id.clone(),
            row.destination.clone(),
            row.event_type.clone(),
            row.status.to_string(),
            output::time(row.next_attempt_at.unwrap_or(row.due_at)),
            row.attempts.to_string(),
            row.cause.clone(),
            row.reason.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &[
            "EMITTED",
            "CONSUMER",
            "ID",
            "DESTINATION",
            "EVENT TYPE",
            "STATUS",
            "DUE",
            "ATTEMPTS",
            "CAUSE",
            "REASON",
        ],
        &rows.iter().map(cells).collect::<Vec<_>>(),
    );
    if let Some(last) = rows.last().filter(|_| rows.len() as i64 == limit) {
        println!("there may be more: --after {}", last.position);
    }
    Ok(())
}

fn show(message: &OutgoingDetailBody, as_json: bool) -> Result<()> {
    let mut value = serde_json::to_value(message)?;
    if let (None, Some(object)) = (&message.headers, value.as_object_mut()) {
        // The request did not ask for them.
        for name in [
            "key",
            "headers",
            "payload",
            "masked",
            "answer",
            "answer_content_type",
            "answer_is_whole",
        ] {
            object.remove(name);
        }
    }
    if as_json {
        return output::json(&value);
    }
    if let Some(object) = value.as_object_mut() {
        object.remove("caused_by");
    }
    members(&value);
    println!("\n{}", cause(message));
    Ok(())
}

/// Describes the message that caused an outgoing message.
fn cause(message: &OutgoingDetailBody) -> String {
    let OutgoingRowBody { tenant, consumer, cause, .. } = &message.row;
    match &message.caused_by {
        Some(row) => format!(
            "caused by message `{cause}` of `{tenant}/{consumer}`, which is {}; `oncebox why {} \
                --tenant {tenant} --consumer {consumer}` tells its history",
            row.status,
            word(cause)
        ),
        None => format!(
            "caused by message `{cause}` of `{tenant}/{consumer}`, which the inbox does not hold"
        ),
    }
}

fn stats(counts: &[OutgoingCountBody], as_json: bool) -> Result<()> {
    if as_json {
        return output::json(&counts);
    }
    let cells = |count: &OutgoingCountBody| {
        vec![
            count.consumer.clone(),
            count.destination.clone(),
            count.status.to_string(),
            count.reason.clone().unwrap_or_default(),
            count.messages.to_string(),
            count.due.to_string(),
            output::time(count.oldest_due_at),
            count.breaker.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &["CONSUMER", "DESTINATION", "STATUS", "REASON", "MESSAGES", "DUE", "FIRST DUE", "BREAKER"],
        &counts.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

/// Returns what `why` says of the outgoing messages of one message, a line for each; empty without
/// any.
pub(super) fn caused(first: &[OutgoingRowBody], total: i64) -> Vec<String> {
    let Some(OutgoingRowBody { tenant, consumer, cause, .. }) = first.first() else {
        return Vec::new();
    };
    let mut lines = vec![format!("it caused {}:", outgoing(total))];
    lines.extend(first.iter().map(|row| {
        let reason = row.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
        let due = match row.status.is_open() {
            true => format!(", due {}", output::time(row.next_attempt_at.unwrap_or(row.due_at))),
            false => String::new(),
        };
        let OutgoingRowBody { id, destination, event_type, status, .. } = row;
        format!("  {id}  {destination}  {event_type}  {status}{reason}{due}")
    }));
    let left = total - first.len() as i64;
    if left > 0 {
        lines.push(format!(
            "  and {left} more: oncebox outgoing list --tenant {tenant} --consumer {consumer} \
                --cause {}",
            word(cause)
        ));
    }
    lines
}

fn outgoing(count: i64) -> String {
    if count == 1 { "1 outgoing message".to_owned() } else { format!("{count} outgoing messages") }
}

/// Returns a text as one word of a shell.
fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.,:/@%+=".contains(c);
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(ids: &[&str], destination: Option<&str>, all: bool) -> ActArgs {
        ActArgs {
            ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            tenant: "acme".to_owned(),
            selected: SelectedArgs {
                consumer: None,
                status: None,
                destination: destination.map(str::to_owned),
                cause: None,
            },
            all,
            because: "a test".to_owned(),
            start: StartArgs::default(),
        }
    }

    // What could go wrong: a command without a selection discards everything of a tenant.
    #[test]
    fn an_action_says_of_what() {
        for (ids, destination, all) in
            [(&["a"][..], None, false), (&[][..], Some("kafka:a"), false), (&[][..], None, true)]
        {
            let job = args(ids, destination, all).job("outgoing_discard").expect("a job");
            assert_eq!(job.filter.ids.is_some(), !ids.is_empty());
            assert_eq!(job.filter.destination.as_deref(), destination);
        }
        for (ids, destination, all) in [(&[][..], None, false), (&["a"][..], None, true)] {
            let error = args(ids, destination, all).job("outgoing_discard");
            let error = error.expect_err("no selection");
            assert!(error.to_string().contains("`--destination`"), "{error}");
        }
    }

    fn row(status: OutgoingStatus) -> OutgoingRowBody {
        let time = "2026-11-20T18:38:52Z";
        let row: serde_json::Value = serde_json::json!({
            "tenant": "acme", "consumer": "orders", "cause": "m-1", "ordinal": 0, "id": "o-1",
            "position": 1, "destination": "kafka:receipts", "event_type": "receipt",
            "status": status, "attempts": 0, "due_at": time, "correlation_id": "m-1",
            "created_at": time,
        });
        serde_json::from_value(row).expect("a row")
    }

    #[test]
    fn the_history_names_what_a_message_caused() {
        assert!(caused(&[], 0).is_empty());
        let lines = caused(&[row(OutgoingStatus::Received), row(OutgoingStatus::Completed)], 3);
        assert_eq!(lines[0], "it caused 3 outgoing messages:");
        assert_eq!(lines[1], "  o-1  kafka:receipts  receipt  received, due 2026-11-20 18:38:52");
        assert_eq!(lines[2], "  o-1  kafka:receipts  receipt  completed");
        assert!(lines[3].ends_with("--cause m-1"), "{}", lines[3]);
        // What a producer chose as an id is pasted into a shell.
        let strange = OutgoingRowBody { cause: "m'; rm".to_owned(), ..row(OutgoingStatus::Parked) };
        let lines = caused(&[strange], 2);
        assert!(lines[1].ends_with("parked"), "{}", lines[1]);
        assert!(lines[2].ends_with(r"--cause 'm'\''; rm'"), "{}", lines[2]);
    }
}
