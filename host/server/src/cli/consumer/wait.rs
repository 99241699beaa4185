//! Waiting until every running host has done what a consumer was told.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use super::Named;
use crate::{
    cli::{
        api::{Api, Refused},
        upload::spinner,
        wire::{Consumer, HostRun},
    },
    terminal,
};

/// How often the hosts are asked for.
const POLL: Duration = Duration::from_millis(200);

/// How long to wait.
#[derive(Args)]
pub(super) struct Patience {
    /// Wait until every running host has done it, for so many seconds; 0 for not at all
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(super) wait: u64,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// Nothing of the consumer runs.
    Rest,
    /// Hosts do what the rows say now.
    Work,
    /// Nothing in its inbox is open, and nothing of it runs.
    Drained,
    /// The group's offsets are set, and hosts do what the rows say.
    Sought,
    /// It is gone.
    Gone,
}

/// Wait, where that is asked for. The consumer as it is then; none where it is gone.
pub(super) async fn wait(
    api: &Api,
    of: &Named,
    what: For,
    patience: &Patience,
    json: bool,
) -> Result<Option<Consumer>> {
    let deadline = Instant::now() + Duration::from_secs(patience.wait);
    let (bar, mut consumer) = (spinner(), Option::<Consumer>::None);
    loop {
        match api.get::<Consumer>(&of.path(&[])).await {
            // One that was made again under the same name is another.
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

fn is_done(consumer: &Consumer, what: For) -> Result<bool> {
    if what == For::Drained && consumer.state == "running" {
        bail!("consumer `{}/{}` was resumed meanwhile", consumer.tenant, consumer.name);
    }
    let is_set = match what {
        For::Gone => false,
        For::Drained => consumer.state == "paused",
        For::Sought => consumer.seek.is_none(),
        For::Rest | For::Work => true,
    };
    let failing = |host: &&HostRun| host.state == "failing" && host.revision >= consumer.revision;
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

fn has_done(consumer: &Consumer, host: &HostRun, what: For) -> bool {
    let is_there = match what {
        For::Rest | For::Drained => host.state == "stopped",
        _ => host.state != "starting" && host.state != "failing",
    };
    is_there && host.revision >= consumer.revision
}

/// What is still missing, in a line.
fn late(consumer: &Consumer, what: For) -> String {
    let late =
        consumer.hosts.iter().filter(|host| what == For::Gone || !has_done(consumer, host, what));
    let told = |host: &HostRun| match &host.error {
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
