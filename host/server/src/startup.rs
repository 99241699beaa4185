//! The database and the brokers that a host needs before it can begin. The host waits for both, and
//! `/readyz` states the reason. An error that waiting cannot mend ends the process.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Result, anyhow};
use oncebox_model::InboxError;
use rdkafka::{
    ClientConfig, ClientContext,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode},
};
use tokio::sync::watch;

use crate::{
    Config, error_text,
    http::{self, Readiness},
    serve,
};

/// First pause between two tries; it doubles with each.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Longest wait for a broker's answer.
const BROKER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for one more event of the client.
const EVENT_TIMEOUT: Duration = Duration::from_millis(100);
/// Most events that are read after a try; many brokers may fail faster than that.
const EVENTS_MAX: usize = 1_000;

/// Repeats an attempt until it succeeds, or fails with an error that waiting cannot mend. Readiness
/// and the log state what the host waits for.
pub(crate) async fn wait<F: Future<Output = Result<()>>>(
    readiness: &watch::Sender<Readiness>,
    attempt: impl Fn() -> F,
) -> Result<()> {
    let mut pause = PAUSE_MIN;
    loop {
        match attempt().await {
            Err(error) if is_away(&error) => {
                http::announce(readiness, Err(error_text::one_line(&error)))
            }
            done => return done,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Brings the database up to date. Notes in it that messages are archived before their removal,
/// where this host does that: no other process removes messages unarchived from then on.
pub(crate) async fn database(config: &Config) -> Result<()> {
    serve::migrate(config).await?;
    Ok(config.control()?.archive().announce().await?)
}

/// A client that queries brokers.
pub(crate) type Client = BaseConsumer<Refusal>;

/// The last refusal of a broker: the error and librdkafka's text. A query fails as if the broker
/// were unavailable; librdkafka reports the cause in an event.
#[derive(Default)]
pub(crate) struct Refusal(Mutex<Option<(KafkaError, String)>>);

impl Refusal {
    fn last(&self) -> Option<(KafkaError, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ConsumerContext for Refusal {}

impl ClientContext for Refusal {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let refusal = match error.rdkafka_error_code() {
            // librdkafka reports it after each of the others.
            Some(RDKafkaErrorCode::AllBrokersDown) => return,
            Some(RDKafkaErrorCode::SSL) => Some((error, reason.to_owned())),
            _ if !is_broker_away(&error) => Some((error, reason.to_owned())),
            // The broker became unavailable after an earlier refusal.
            _ => None,
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = refusal;
    }
}

/// Makes a client that queries brokers. A property that librdkafka does not accept is an error at
/// once.
pub(crate) fn brokers(properties: &BTreeMap<String, String>) -> Result<Arc<Client>> {
    let mut config = ClientConfig::new();
    for (name, value) in oncebox_kafka::CONNECTION {
        config.set(*name, *value);
    }
    for (name, value) in properties {
        config.set(name, value);
    }
    // librdkafka would repeat every refused connection on standard error.
    config.set_log_level(RDKafkaLogLevel::Emerg);
    config.create_with_context(Refusal::default()).map(Arc::new).map_err(|error| match error {
        // The error's own text shows the value, which may be a password.
        KafkaError::ClientConfig(_, _, name, _) => {
            anyhow!(
                "kafka property `{name}` is unknown or its value is not accepted; check \
                `kafka.properties`"
            )
        }
        other => anyhow::Error::new(other).context(
            "failed to start the kafka client; check \
            `kafka.properties`",
        ),
    })
}

/// Checks that a broker answers a query for metadata.
pub(crate) async fn answered(client: Arc<Client>, brokers: &str) -> Result<()> {
    let brokers = brokers.to_owned();
    let asked = tokio::task::spawn_blocking(move || {
        client.fetch_metadata(None, BROKER_TIMEOUT).map(drop).map_err(|error| {
            for _ in 0..EVENTS_MAX {
                if client.poll(EVENT_TIMEOUT).is_none() {
                    break;
                }
            }
            unanswered(error, client.context().last(), &brokers)
        })
    });
    asked.await?
}

/// Returns the error for brokers that did not answer: the cause, and what to check.
fn unanswered(
    error: KafkaError,
    refusal: Option<(KafkaError, String)>,
    brokers: &str,
) -> anyhow::Error {
    match refusal {
        Some((refused, reason)) if !is_broker_away(&refused) => {
            let text = format!(
                "the brokers at `{brokers}` refuse this host: {reason}; check `kafka.properties`"
            );
            anyhow::Error::new(refused).context(text)
        }
        Some((_, reason)) => {
            let text = format!(
                "no broker answers at `{brokers}`: {reason}; check `kafka.brokers` and \
                    `kafka.properties`"
            );
            anyhow::Error::new(error).context(text)
        }
        None => {
            let text = format!(
                "no broker answers at `{brokers}`; check `kafka.brokers` (ONCEBOX_KAFKA_BROKERS)"
            );
            anyhow::Error::new(error).context(text)
        }
    }
}

/// Returns whether an error means that the database or the brokers are unavailable, which waiting
/// mends. Other errors need an operator.
fn is_away(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let of_database = cause.downcast_ref::<InboxError>().is_some_and(InboxError::is_away);
        of_database || cause.downcast_ref::<KafkaError>().is_some_and(is_broker_away)
    })
}

/// Returns whether an error means that a broker is unavailable. A broker that refuses this host's
/// credentials is not: it refuses them again.
fn is_broker_away(error: &KafkaError) -> bool {
    let refusals = [
        RDKafkaErrorCode::Authentication,
        RDKafkaErrorCode::SaslAuthenticationFailed,
        RDKafkaErrorCode::UnsupportedSASLMechanism,
        RDKafkaErrorCode::ClusterAuthorizationFailed,
    ];
    !error.rdkafka_error_code().is_some_and(|code| refusals.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Could fail so: the host waits for brokers that refuse its password as if they were
    /// unavailable, or brokers that are unavailable end the host.
    #[test]
    fn only_a_refusal_ends_the_wait() {
        let transport = || KafkaError::MetadataFetch(RDKafkaErrorCode::BrokerTransportFailure);
        for (events, is_waited_for, says) in [
            (&[][..], true, "no broker answers at `b:1`; check `kafka.brokers`"),
            (
                &[RDKafkaErrorCode::SSL, RDKafkaErrorCode::AllBrokersDown][..],
                true,
                "no broker answers at `b:1`: said 0;",
            ),
            (
                &[RDKafkaErrorCode::Authentication, RDKafkaErrorCode::AllBrokersDown][..],
                false,
                "the brokers at `b:1` refuse this host: said 0;",
            ),
            (
                &[RDKafkaErrorCode::Authentication, RDKafkaErrorCode::BrokerTransportFailure][..],
                true,
                "no broker answers at `b:1`; check",
            ),
        ] {
            let refusal = Refusal::default();
            for (number, code) in events.iter().enumerate() {
                refusal.error(KafkaError::Global(*code), &format!("said {number}"));
            }
            let error = unanswered(transport(), refusal.last(), "b:1");
            assert_eq!(is_away(&error), is_waited_for, "{events:?}");
            assert!(error_text::one_line(&error).starts_with(says), "{error:#}");
        }
    }
}
