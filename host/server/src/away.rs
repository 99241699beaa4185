//! What a host needs before it can begin, and may find away: its database and a broker. Both are waited for, while
//! `/readyz` says why; what no waiting mends ends the process.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use oncebox_inbox::InboxError;
use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
};
use tokio::sync::watch;

use crate::{config::Config, http, http::Readiness, report, serve};

/// The first pause between two tries; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest one.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long a broker may take to answer.
const BROKER_TIMEOUT: Duration = Duration::from_secs(10);

/// Try something until it succeeds, or fails of what is not away. Readiness and the log say what is waited for.
pub(crate) async fn wait<F: Future<Output = Result<()>>>(readiness: &watch::Sender<Readiness>, attempt: impl Fn() -> F) -> Result<()> {
    let mut pause = PAUSE_MIN;
    loop {
        match attempt().await {
            Err(error) if is_away(&error) => http::announce(readiness, Err(report::one_line(&error))),
            done => return done,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Bring the database up to date.
pub(crate) async fn database(config: &Config) -> Result<()> {
    serve::migrate(config).await
}

/// A client to ask brokers with. A property that it does not take is an error at once.
pub(crate) fn brokers(properties: &BTreeMap<String, String>) -> Result<Arc<BaseConsumer>> {
    let mut config = ClientConfig::new();
    for (name, value) in properties {
        config.set(name, value);
    }
    // librdkafka would repeat every refused connection on standard error.
    config.set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg);
    config.create().map(Arc::new).map_err(|error| match error {
        // Its text shows the value, which may be a password.
        KafkaError::ClientConfig(_, _, name, _) => {
            anyhow!("kafka property `{name}` is unknown or its value is not accepted; check `kafka.properties`")
        }
        other => anyhow::Error::new(other).context("failed to start the kafka client; check `kafka.properties`"),
    })
}

/// Whether a broker answers.
pub(crate) async fn answered(client: Arc<BaseConsumer>, brokers: &str) -> Result<()> {
    let answered = tokio::task::spawn_blocking(move || client.fetch_metadata(None, BROKER_TIMEOUT).map(drop)).await?;
    answered.with_context(|| format!("no broker answers at `{brokers}`; check `kafka.brokers` (ONCEBOX_KAFKA_BROKERS)"))
}

/// Whether an error is that something is away, which waiting mends, as opposed to what only a person does.
fn is_away(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let of_database = cause.downcast_ref::<InboxError>().is_some_and(InboxError::is_away);
        of_database || cause.downcast_ref::<KafkaError>().is_some_and(is_broker_away)
    })
}

/// A broker that refuses who asks will refuse again.
fn is_broker_away(error: &KafkaError) -> bool {
    let refusals = [
        RDKafkaErrorCode::Authentication,
        RDKafkaErrorCode::SaslAuthenticationFailed,
        RDKafkaErrorCode::UnsupportedSASLMechanism,
        RDKafkaErrorCode::ClusterAuthorizationFailed,
    ];
    !error.rdkafka_error_code().is_some_and(|code| refusals.contains(&code))
}
