//! `oncebox send`: the messages of a file, onto a topic.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use oncebox_server::Config;
use rdkafka::{
    ClientConfig,
    error::KafkaError,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord, Producer},
};
use serde_json::json;

use crate::output;
use crate::{
    dev::running::{self, RunningDev},
    messages::{self, FileMessage},
};

/// Longest time for the broker's first answer, and for each message.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Number of messages under way at one time.
const UNDER_WAY: usize = 1_000;

/// Options of `oncebox send`.
pub struct SendOptions {
    /// File of messages; `-` is standard input.
    pub file: PathBuf,
    /// Brokers; none for those of the configuration, else of the `oncebox dev` of this folder.
    pub brokers: Option<String>,
    /// Topic; none for the one that `oncebox dev` reads, else `events`.
    pub topic: Option<String>,
}

/// Destination of the messages.
struct Target {
    brokers: String,
    topic: String,
    is_dev: bool,
}

/// Publishes the messages of a file and prints their number.
pub async fn run(config: &Config, args: SendOptions, json: bool) -> Result<()> {
    let messages = messages::read(&args.file)?;
    let target = target(config, &args).await?;
    let producer = producer(config, &target)?;
    send(&producer, &target, &messages).await?;
    if json {
        return output::json(
            &json!({ "sent": messages.len(), "topic": target.topic, "brokers": target.brokers }),
        );
    }
    let (count, s) = (messages.len(), if messages.len() == 1 { "" } else { "s" });
    let to = if target.is_dev { " of the `oncebox dev` in this folder" } else { "" };
    println!("sent {count} message{s} to topic `{}`{to}", target.topic);
    Ok(())
}

async fn target(config: &Config, args: &SendOptions) -> Result<Target> {
    let topic = || args.topic.clone().unwrap_or_else(|| "events".to_owned());
    if let Some(brokers) = args
        .brokers
        .clone()
        .or_else(|| Some(config.kafka.brokers.clone()).filter(|brokers| !brokers.is_empty()))
    {
        return Ok(Target { brokers, topic: topic(), is_dev: false });
    }
    match RunningDev::wait(Path::new(running::DIR)).await? {
        Some(dev) => Ok(Target {
            brokers: dev.brokers,
            topic: args.topic.clone().unwrap_or(dev.topic),
            is_dev: true,
        }),
        None => {
            bail!("no brokers to send to; start `oncebox dev` in this folder, or give `--brokers`")
        }
    }
}

/// Returns a producer that sends keys to the partition where a Java client would send them.
fn producer(config: &Config, target: &Target) -> Result<FutureProducer> {
    let mut client = ClientConfig::new();
    for (name, value) in config.kafka.properties.iter().filter(|_| !target.is_dev) {
        client.set(name, value);
    }
    client
        .set("bootstrap.servers", &target.brokers)
        .set("enable.idempotence", "true")
        .set("partitioner", "murmur2_random")
        .set("message.timeout.ms", TIMEOUT.as_millis().to_string())
        .set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg);
    client.create().map_err(|error| match error {
        // The text of this error shows the value, which may be a password.
        KafkaError::ClientConfig(_, _, name, _) => {
            anyhow::anyhow!(
                "kafka property `{name}` is unknown or its value is not accepted; \
                check `kafka.properties`"
            )
        }
        other => anyhow::Error::new(other).context("failed to start the kafka client"),
    })
}

/// Sends all messages. `Ok` means that the broker has all of them.
async fn send(producer: &FutureProducer, target: &Target, messages: &[FileMessage]) -> Result<()> {
    check(producer, target).await?;
    for batch in messages.chunks(UNDER_WAY) {
        let sent =
            batch.iter().map(|message| (message, producer.send(record(target, message), TIMEOUT)));
        let (messages, sent): (Vec<_>, Vec<_>) = sent.unzip();
        for (message, answer) in messages.iter().zip(futures::future::join_all(sent).await) {
            answer
                .map_err(|(error, _)| error)
                .with_context(|| format!("message `{}` was not sent", message.id))?;
        }
    }
    Ok(())
}

/// Checks that a broker answers, so that a missing one is reported once and not for each message.
async fn check(producer: &FutureProducer, target: &Target) -> Result<()> {
    let (client, topic) = (producer.clone(), target.topic.clone());
    let answer =
        tokio::task::spawn_blocking(move || client.client().fetch_metadata(Some(&topic), TIMEOUT))
            .await?;
    let metadata = answer.with_context(|| format!("no broker answers at `{}`", target.brokers))?;
    let problem = metadata.topics().iter().find_map(|topic| topic.error());
    match problem {
        Some(error) => {
            bail!("topic `{}`: {}", target.topic, KafkaError::MetadataFetch(error.into()))
        }
        None => Ok(()),
    }
}

fn record<'a>(target: &'a Target, message: &'a FileMessage) -> FutureRecord<'a, str, [u8]> {
    let headers =
        message.wire_headers().iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value: Some(value) })
        });
    FutureRecord {
        topic: &target.topic,
        partition: None,
        payload: message.payload.as_deref(),
        key: message.key.as_deref(),
        timestamp: message.timestamp_ms,
        headers: Some(headers),
    }
}
