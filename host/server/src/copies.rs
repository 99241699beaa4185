//! Copies of dead letters, where a policy names a topic for them.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use oncebox_inbox::{ConsumerInbox, DeadLetter};
use oncebox_kafka::{ConsumerConfig, NewRecord, ProduceError, Producer};
use tokio_util::sync::CancellationToken;

use crate::report;

/// Pause between two looks.
const EVERY: Duration = Duration::from_secs(2);
/// Pause after trouble.
const TROUBLE: Duration = Duration::from_secs(10);
/// The header of a copy that lacks the payload.
const TOO_LARGE: (&str, &[u8]) = ("oncebox-payload", b"too-large");

/// Copy dead letters to a topic until told to stop. What fails is tried again; nothing else waits for it.
pub(crate) async fn copy(inbox: Arc<ConsumerInbox>, config: ConsumerConfig, topic: String, stop: CancellationToken) {
    let labels = [("tenant", config.tenant.clone()), ("consumer", config.consumer.clone())];
    let copied = metrics::counter!("oncebox_dead_letters_copied_total", &labels);
    let failed = metrics::counter!("oncebox_dead_letter_copies_failed_total", &labels);
    let mut pause = EVERY;
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = match copy_all(&inbox, &config, &topic, &stop, &copied).await {
            Ok(()) => EVERY,
            Err(error) => {
                failed.increment(1);
                let (tenant, consumer, error) = (&config.tenant, &config.consumer, report::one_line(&error));
                tracing::warn!(tenant, consumer, topic, error, "dead letters are not copied to their topic; it is tried again");
                TROUBLE
            }
        };
    }
}

async fn copy_all(
    inbox: &ConsumerInbox,
    config: &ConsumerConfig,
    topic: &str,
    stop: &CancellationToken,
    copied: &metrics::Counter,
) -> Result<()> {
    let mut producer = None;
    while !stop.is_cancelled() {
        let letters = inbox.uncopied(topic).await?;
        if letters.is_empty() {
            return Ok(());
        }
        let producer = match &mut producer {
            Some(producer) => &*producer,
            none => none.insert(Producer::new(config)?),
        };
        let (there, error) = send(producer, topic, &letters).await;
        inbox.copied(&there).await?;
        copied.increment(there.len() as u64);
        if let Some(error) = error {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Those that the brokers have, and why others are not there.
async fn send<'a>(producer: &Producer, topic: &str, letters: &'a [DeadLetter]) -> (Vec<&'a DeadLetter>, Option<ProduceError>) {
    let records: Vec<_> = letters.iter().map(record).collect();
    let mut there = Vec::new();
    let mut failure = None;
    for (letter, mut sent) in letters.iter().zip(producer.send(topic, &records).await) {
        if sent == Err(ProduceError::TooLarge) {
            // Perhaps one of those that went with it.
            sent = alone(producer, topic, &record(letter)).await;
        }
        if sent == Err(ProduceError::TooLarge) {
            let headers: Vec<_> = letter.headers.iter().cloned().chain([(TOO_LARGE.0.to_owned(), TOO_LARGE.1.to_vec())]).collect();
            sent = alone(producer, topic, &NewRecord { payload: None, headers: &headers, ..record(letter) }).await;
        }
        match sent {
            Ok(()) => there.push(letter),
            Err(error) => failure = Some(error),
        }
    }
    (there, failure)
}

async fn alone(producer: &Producer, topic: &str, record: &NewRecord<'_>) -> std::result::Result<(), ProduceError> {
    producer.send(topic, std::slice::from_ref(record)).await.remove(0)
}

fn record(letter: &DeadLetter) -> NewRecord<'_> {
    NewRecord { key: letter.key.as_deref(), headers: &letter.headers, payload: letter.payload.as_deref() }
}
