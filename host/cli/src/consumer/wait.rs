//! Waiting until every running host has carried out a change of a consumer.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use oncebox_api::wire::{ConsumerBody, HostConsumerStatusBody};
use oncebox_devkit::{
    api::{Api, Refused},
    terminal,
    upload::spinner,
};

use super::Named;

/// Pause between two requests for the state of the hosts.
const POLL: Duration = Duration::from_millis(200);

/// How long to wait.
#[derive(Args)]
pub(super) struct Patience {
    /// Wait until every running host has done it, for so many seconds; 0 for not at all
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(super) wait: u64,
}

/// Condition that is awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// No running part of the consumer.
    Rest,
    /// Hosts that do what the rows say now.
    Work,
    /// No open message in its inbox, and no running part of the consumer.
    Drained,
    /// Offsets of the group that are set, and hosts that do what the rows say.
    Sought,
    /// Deletion of the consumer.
    Gone,
}

/// Waits for a condition, if waiting was requested. Returns the consumer as it is then, or `None`
/// once it is gone.
pub(super) async fn wait(
    api: &Api,
    of: &Named,
    what: For,
    patience: &Patience,
    json: bool,
) -> Result<Option<ConsumerBody>> {
    let deadline = Instant::now() + Duration::from_secs(patience.wait);
    let (bar, mut consumer) = (spinner(), Option::<ConsumerBody>::None);
    loop {
        match api.get::<ConsumerBody>(&of.path(&[])).await {
            // A consumer that was made again under this name is another one.
            Ok(now)
                if consumer.as_ref().is_none_or(|known| known.consumer_id == now.consumer_id) =>
            {
                consumer = Some(now)
            }
            Ok(_) => return Ok(None),
            Err(error) if what == For::Gone && is_missing(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let Some(now) = &consumer else { continue };
        if patience.wait == 0 || (is_done(now, what)? && !now.hosts.is_empty()) {
            bar.finish_and_clear();
            return Ok(consumer);
        }
        if now.hosts.is_empty() {
            bar.finish_and_clear();
            if !json {
                println!("no host is running; the first that starts takes it up");
            }
            return Ok(consumer);
        }
        if Instant::now() >= deadline {
            bail!(
                "after {} s it is not done: {}; it goes on by itself, and `oncebox consumer show` \
                    tells how far it is",
                patience.wait,
                late(now, what)
            );
        }
        terminal::tell(&bar, &late(now, what));
        tokio::time::sleep(POLL).await;
    }
}

pub(super) fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404)
}

fn is_done(consumer: &ConsumerBody, what: For) -> Result<bool> {
    if what == For::Drained && consumer.state == "running" {
        bail!("consumer `{}/{}` was resumed meanwhile", consumer.tenant, consumer.name);
    }
    let is_set = match what {
        For::Gone => false,
        For::Drained => consumer.state == "paused",
        For::Sought => consumer.seek.is_none(),
        For::Rest | For::Work => true,
    };
    let failing = |host: &&HostConsumerStatusBody| {
        host.state == "failing" && host.revision >= consumer.revision
    };
    if let (true, Some(host)) =
        (matches!(what, For::Work | For::Sought) && is_set, consumer.hosts.iter().find(failing))
    {
        bail!(
            "host `{}` cannot run it: {}",
            host.host,
            host.error.as_deref().unwrap_or("it did not say why")
        );
    }
    Ok(is_set && consumer.hosts.iter().all(|host| has_done(consumer, host, what)))
}

fn has_done(consumer: &ConsumerBody, host: &HostConsumerStatusBody, what: For) -> bool {
    let is_there = match what {
        For::Rest | For::Drained => host.state == "stopped",
        _ => host.state != "starting" && host.state != "failing",
    };
    is_there && host.revision >= consumer.revision
}

/// Describes in a line what is still missing.
fn late(consumer: &ConsumerBody, what: For) -> String {
    let late =
        consumer.hosts.iter().filter(|host| what == For::Gone || !has_done(consumer, host, what));
    let told = |host: &HostConsumerStatusBody| match &host.error {
        Some(error) => format!("`{}` is {}: {error}", host.host, host.state),
        None => format!("`{}` is {}", host.host, host.state),
    };
    let mut parts: Vec<_> = late.map(told).collect();
    if let (For::Drained, "draining", Some(open)) =
        (what, consumer.state.as_str(), consumer.open_messages)
    {
        parts.push(format!("{open} messages are still to be run"));
    }
    if parts.is_empty() { format!("the consumer is {}", consumer.state) } else { parts.join("; ") }
}
