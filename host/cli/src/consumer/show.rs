//! Output of consumers and their policies.

use anyhow::{Context, Result};
use oncebox_api::wire::{ConsumerBody, DuplicatesBody, HostConsumerStatusBody};
use oncebox_devkit::{api::Api, output, upload::short};
use oncebox_model::policy::Policy;

use super::Named;

/// Number of open messages above which they are not counted.
const OPEN_MAX: i64 = 10_000;

fn readable(consumer: &ConsumerBody) -> Result<Policy> {
    let unreadable = || {
        format!("the policy of consumer `{}/{}` is not readable", consumer.tenant, consumer.name)
    };
    serde_json::from_value(consumer.policy.clone()).with_context(unreadable)
}

/// Returns the state that a consumer is to have, in a word.
pub(super) fn state(consumer: &ConsumerBody) -> &str {
    match () {
        () if consumer.tenant_state != "active" => &consumer.tenant_state,
        () if consumer.quarantine.is_some() => "quarantined",
        () if consumer.seek.is_some() => "seeking",
        () => &consumer.state,
    }
}

/// Prints a list of consumers.
pub(super) fn list(consumers: &[ConsumerBody], json: bool) -> Result<()> {
    if json {
        return output::json(&consumers);
    }
    let mut rows = Vec::new();
    for consumer in consumers {
        let policy = readable(consumer)?;
        rows.push(vec![
            consumer.tenant.clone(),
            consumer.name.clone(),
            state(consumer).to_owned(),
            policy.topics.join(","),
            consumer.policy["ack"].as_str().unwrap_or_default().to_owned(),
            consumer.generation.to_string(),
            policy.collapses().to_owned(),
        ]);
    }
    output::table(
        &["TENANT", "CONSUMER", "STATE", "TOPICS", "ACK", "GENERATION", "COLLAPSES"],
        &rows,
    );
    for consumer in consumers {
        for host in consumer.hosts.iter().filter(|host| host.state == "failing") {
            let error = host.error.as_deref().unwrap_or_default();
            println!(
                "consumer `{}/{}` fails on host `{}`: {error}",
                consumer.tenant, consumer.name, host.host
            );
        }
    }
    Ok(())
}

/// Prints one consumer, with the hosts.
pub(super) async fn one(api: &Api, of: &Named, json: bool) -> Result<()> {
    let consumer: ConsumerBody = api.get(&of.path(&[])).await?;
    if json {
        return output::json(&consumer);
    }
    println!(
        "consumer {}: {}, revision {}, generation {}",
        of.shown(),
        state(&consumer),
        consumer.revision,
        consumer.generation
    );
    if let Some(quarantine) = &consumer.quarantine {
        println!("{}", quarantine.text);
    }
    if let Ok(policy) = readable(&consumer) {
        println!("topics: {}", policy.topics.join(", "));
        println!("kafka group: {}", policy.group(&consumer.tenant, &consumer.name));
    }
    match consumer.open_messages {
        Some(open) if open > OPEN_MAX => println!("messages to be run: more than {OPEN_MAX}"),
        Some(open) => println!("messages to be run: {open}"),
        None => println!("messages to be run: unknown; the database of its inbox does not answer"),
    }
    if let Some(duplicates) = &consumer.duplicates {
        println!("duplicates refused: {}", counted(duplicates));
    }
    hosts(&consumer.hosts);
    Ok(())
}

fn counted(duplicates: &DuplicatesBody) -> String {
    let since = output::time(duplicates.since);
    match duplicates.last_at {
        Some(last_at) => {
            format!("{} since {since}, the last at {}", duplicates.refused, output::time(last_at))
        }
        None => format!("none since {since}"),
    }
}

fn hosts(hosts: &[HostConsumerStatusBody]) {
    if hosts.is_empty() {
        return println!("no host is running");
    }
    let cells = |host: &HostConsumerStatusBody| {
        let revision = if host.revision < 0 { String::new() } else { host.revision.to_string() };
        vec![
            host.host.clone(),
            host.state.clone(),
            revision,
            host.error.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &["HOST", "STATE", "REVISION", "ERROR"],
        &hosts.iter().map(cells).collect::<Vec<_>>(),
    );
    for (host, breaker) in hosts.iter().flat_map(|it| it.breakers.iter().map(move |b| (it, b))) {
        println!(
            "the breaker of handler `{}`, version {}, is {} on host `{}`: its messages wait",
            breaker.handler,
            short(&breaker.digest),
            breaker.state.replace('_', " "),
            host.host
        );
    }
}

/// Prints the policy, as a file that can be changed and set.
pub(super) async fn policy(api: &Api, of: &Named, json: bool) -> Result<()> {
    let consumer: ConsumerBody = api.get(&of.path(&[])).await?;
    if json {
        return output::json(&consumer.policy);
    }
    print!(
        "{}",
        toml::to_string(&readable(&consumer)?).context("failed to write the policy as TOML")?
    );
    Ok(())
}

/// Prints an explanation of a consumer's policy.
pub(super) async fn explain(api: &Api, of: &Named, json: bool) -> Result<()> {
    let consumer: ConsumerBody = api.get(&of.path(&[])).await?;
    crate::policy::explain(&readable(&consumer)?, json)
}
