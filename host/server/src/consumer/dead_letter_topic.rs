//! Copies of dead letters, for consumers whose policy names a topic for them.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use oncebox_inbox::{ConsumerInbox, DeadLetter};
use oncebox_kafka::{ConsumerConfig, NewRecord, ProduceError, Producer};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::error_text;

/// Pause between two searches for dead letters without a copy.
const EVERY: Duration = Duration::from_secs(2);
/// Pause after a failure.
const TROUBLE: Duration = Duration::from_secs(10);
/// Limits the consumers whose dead letters are copied at a time; each has a client of its own for
/// it.
static COPYING: Semaphore = Semaphore::const_new(4);
/// The header of a copy that lacks the payload.
const TOO_LARGE: (&str, &[u8]) = ("oncebox-payload", b"too-large");

/// Copies dead letters to a topic until told to stop. Copies that fail are tried again; nothing
/// else waits for them.
pub(crate) async fn copy(
    inbox: Arc<ConsumerInbox>,
    config: ConsumerConfig,
    topic: String,
    stop: CancellationToken,
) {
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
                let (tenant, consumer, error) =
                    (&config.tenant, &config.consumer, error_text::one_line(&error));
                tracing::warn!(
                    tenant,
                    consumer,
                    topic,
                    error,
                    "dead letters are not copied to their topic; it is tried again"
                );
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
    // Before anything is read: a consumer that waits here holds no payloads.
    let _place = tokio::select! {
        place = COPYING.acquire() => place?,
        () = stop.cancelled() => return Ok(()),
    };
    let mut dead_letters = inbox.pending(topic).await?;
    if dead_letters.is_empty() {
        return Ok(());
    }
    let producer = Producer::new(config)?;
    let mut answer = Ok(());
    while !dead_letters.is_empty() && !stop.is_cancelled() && answer.is_ok() {
        let sent = send(&producer, topic, &dead_letters).await;
        inbox.copied(&sent.done).await?;
        copied.increment(sent.copied);
        for (letter, error) in &sent.refused {
            let (tenant, consumer, message_id) = (&inbox.tenant, &inbox.name, &letter.message_id);
            tracing::warn!(tenant, consumer, topic, message_id, %error, "the brokers take no copy \
                of a dead letter; it has none");
        }
        answer = sent.failure.map_or(Ok(()), |error| Err(error.into()));
        dead_letters = inbox.pending(topic).await?;
    }
    // Dropping a producer waits for its threads.
    tokio::task::spawn_blocking(move || drop(producer));
    answer
}

/// The results of sending dead letters.
#[derive(Default)]
struct Sent<'a> {
    /// Letters that need no further try.
    done: Vec<&'a DeadLetter>,
    /// Number of dead letters in `done` that the brokers have accepted.
    copied: u64,
    /// Letters in `done` that the brokers refuse in any form.
    refused: Vec<(&'a DeadLetter, ProduceError)>,
    /// The reason that the other dead letters were not sent.
    failure: Option<ProduceError>,
}

async fn send<'a>(producer: &Producer, topic: &str, dead_letters: &'a [DeadLetter]) -> Sent<'a> {
    let (copies, dead_letters): (Vec<_>, Vec<_>) =
        dead_letters.iter().partition(|letter| letter.is_copy);
    let records: Vec<_> = dead_letters.iter().copied().map(record).collect();
    let mut all = Sent { done: copies, ..Sent::default() };
    for (letter, mut sent) in dead_letters.iter().copied().zip(producer.send(topic, &records).await)
    {
        if sent == Err(ProduceError::TooLarge) {
            // Another record of its batch may have been too large.
            sent = alone(producer, topic, &record(letter)).await;
        }
        if sent == Err(ProduceError::TooLarge) {
            let headers: Vec<_> = letter
                .headers
                .iter()
                .cloned()
                .chain([(TOO_LARGE.0.to_owned(), TOO_LARGE.1.to_vec())])
                .collect();
            sent = alone(
                producer,
                topic,
                &NewRecord { payload: None, headers: &headers, ..record(letter) },
            )
            .await;
        }
        match sent {
            Ok(()) => {
                all.copied += 1;
                all.done.push(letter);
            }
            Err(error) if !error.is_of_record() => all.failure = Some(error),
            Err(error) => {
                all.done.push(letter);
                all.refused.push((letter, error));
            }
        }
    }
    all
}

async fn alone(
    producer: &Producer,
    topic: &str,
    record: &NewRecord<'_>,
) -> std::result::Result<(), ProduceError> {
    producer.send(topic, std::slice::from_ref(record)).await.remove(0)
}

fn record(letter: &DeadLetter) -> NewRecord<'_> {
    NewRecord {
        key: letter.key.as_deref(),
        headers: &letter.headers,
        payload: letter.payload.as_deref(),
    }
}
