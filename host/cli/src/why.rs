//! `oncebox why`

use anyhow::{Result, bail};
use clap::Args;
use oncebox_api::wire::{HistoryEventBody, MessageHistoryBody};
use oncebox_devkit::{
    api::{Api, Refused, path},
    output,
    upload::short,
};
use oncebox_model::MessageStatus;

use super::{consumer, endpoint, outgoing};

#[derive(Args)]
pub(super) struct WhyArgs {
    /// The message id
    message_id: String,
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
}

pub(super) async fn run(api: &Api, args: WhyArgs, as_json: bool) -> Result<()> {
    let WhyArgs { message_id, tenant, consumer } = args;
    let all = consumer::all(api, tenant.as_deref()).await?.into_iter().map(|c| (c.tenant, c.name));
    let asked: Vec<_> =
        all.filter(|(_, name)| consumer.as_ref().is_none_or(|consumer| consumer == name)).collect();
    let (mut histories, mut failed) = (Vec::new(), Vec::new());
    for (tenant, consumer) in &asked {
        let path =
            path(&["tenants", tenant, "consumers", consumer, "inbox", &message_id, "history"]);
        match api.get::<MessageHistoryBody>(&path).await {
            Ok(history) => histories.push(history),
            Err(error)
                if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404) => {
            }
            Err(error) => failed.push(error),
        }
    }
    if let (true, Some(error)) = (histories.is_empty(), failed.pop()) {
        return Err(error);
    }
    // The message may be in an inbox that failed as well.
    failed.iter().for_each(|error| eprintln!("{error:#}"));
    if histories.is_empty() {
        let looked = match &asked[..] {
            [] => bail!(
                "there is no such consumer; `oncebox consumer list` shows those that there are"
            ),
            [(tenant, consumer)] => format!("the inbox of `{tenant}/{consumer}` holds"),
            _ => format!("the inboxes of {} consumers hold", asked.len()),
        };
        bail!(
            "{looked} no message `{message_id}`: its record was not read yet (the metric \
                `oncebox_kafka_lag_records` of the hosts counts \
             those), or its id is another one (`oncebox inbox list --reason undecodable` shows \
             records without one)"
        );
    }
    if as_json {
        return output::json(&histories);
    }
    for (nth, message) in histories.iter().enumerate() {
        if nth > 0 {
            println!();
        }
        // The history is told also where the endpoints are not known.
        let notes = endpoint::notes(api, &message.outgoing).await.unwrap_or_default();
        tell(message, &notes);
    }
    Ok(())
}

fn tell(message: &MessageHistoryBody, notes: &[String]) {
    let row = &message.message;
    let reason = row.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    println!("{} of {}/{} is {}{reason}", row.message_id, row.tenant, row.consumer, row.status);
    let kind = match row.event_type.as_deref() {
        None => "-", // a light row
        Some("") => "no event type",
        Some(kind) => kind,
    };
    let mut facts = vec![kind.to_owned()];
    facts.extend(row.event_version.as_ref().map(|version| format!("event version {version}")));
    facts.extend(message.ordering_key.as_ref().map(|key| format!("key {key}")));
    facts.extend(message.aggregate_version.map(|version| match message.aggregate_at {
        Some(at) => format!("version {version} of an aggregate that is at {at}"),
        None => format!("version {version} of an aggregate that has none yet"),
    }));
    facts.push(format!("{}[{}]@{}", row.topic, row.partition, row.offset));
    facts.extend(row.trace_parent.as_ref().map(|trace| format!("trace {trace}")));
    println!("{}\n", facts.join(", "));

    let mut lines = vec![(row.received_at, "received".to_owned(), None)];
    lines.extend(
        message.history.iter().map(|event| (event.at, happened(event), event.error.clone())),
    );
    if let Some(at) = row.processed_at.filter(|_| row.status == MessageStatus::Completed) {
        let runs =
            if row.attempts > 1 { format!(" on run {}", row.attempts) } else { String::new() };
        lines.push((at, format!("completed{runs}{}", by(row.version.as_deref())), None));
    }
    for (at, text, error) in lines {
        println!("{}  {text}", at.format("%F %T%.3f"));
        for line in error.iter().flat_map(|error| error.lines()) {
            println!("{:25}{line}", "");
        }
    }
    if let Some(result) = &row.result {
        println!("\nthe handler answered: {result}");
    }
    let caused = outgoing::caused(&message.outgoing, message.outgoing_total);
    if !caused.is_empty() {
        println!();
        caused.iter().chain(notes).for_each(|line| println!("{line}"));
    }
    println!("\n{}", message.next);
    message.commands.iter().for_each(|command| println!("  $ {command}"));
}

fn happened(event: &HistoryEventBody) -> String {
    let HistoryEventBody { attempt, reason, .. } = event;
    let run = attempt
        .filter(|attempt| *attempt > 0)
        .map_or_else(String::new, |attempt| format!("run {attempt} "));
    let reason = reason.as_deref().unwrap_or_default();
    match event.event.as_str() {
        "failed" if run.is_empty() => format!("not run: {reason}"),
        "failed" => format!("{run}failed: {reason}{}", by(event.version.as_deref())),
        "crashed" => {
            format!("{run}ended with its process or connection{}", by(event.version.as_deref()))
        }
        "interrupted" => {
            format!("{run}was under way when the database went away; it does not count")
        }
        "restored" => "restored: a redelivery brought its record back".to_owned(),
        other => format!("{other} by {}: {reason}", event.actor.as_deref().unwrap_or("someone")),
    }
}

fn by(version: Option<&str>) -> String {
    version.map_or_else(String::new, |version| format!(", version {}", short(version)))
}
