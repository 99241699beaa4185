//! Why a consumer could not start, or ended.

use rdkafka::error::KafkaError;

/// Why a consumer could not start, or ended by itself. Never holds a property's value.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ConsumerError {
    /// The host depends on this property.
    #[error("kafka property `{name}` cannot be set here: {reason}")]
    RefusedProperty {
        /// Name of the property.
        name: String,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// librdkafka does not know the property or does not take its value.
    #[error(
        "kafka property `{name}` is unknown or its value is not accepted; compare it with \
            librdkafka's list of properties"
    )]
    InvalidProperty {
        /// Name of the property.
        name: String,
    },
    /// Nothing to read.
    #[error("consumer `{consumer}` has no topics; name at least one in its policy")]
    NoTopics {
        /// Name of the consumer.
        consumer: String,
    },
    /// What the client library must not be handed.
    #[error("the policy of consumer `{consumer}` is not handed to kafka's client: {text}")]
    Unfit {
        /// Name of the consumer.
        consumer: String,
        /// What is wrong, with the key.
        text: String,
    },
    /// It was not started at all.
    #[error("{text}")]
    NotStarted {
        /// Why, and what to do.
        text: String,
    },
    /// A bound that cannot work.
    #[error("`{name}` of consumer `{consumer}` must be at least 1")]
    ZeroBound {
        /// Name of the consumer.
        consumer: String,
        /// The setting in the policy.
        name: &'static str,
    },
    /// librdkafka refused the combination of properties or the subscription.
    #[error("failed to start the kafka client: {text}")]
    Client {
        /// What librdkafka said, without values of properties.
        text: String,
    },
    /// librdkafka declared the client dead, for example fenced by another instance.
    #[error("kafka client failed for good: {text}; start the consumer again")]
    Fatal {
        /// What librdkafka said.
        text: String,
    },
    /// The brokers do not let the consumer read.
    #[error(
        "the brokers refuse the consumer: {text}; check its topics and group, and what the host's \
            user may read"
    )]
    Refused {
        /// What librdkafka said.
        text: String,
    },
    /// A partition went on delivering after it was paused; a record would have been lost.
    #[error(
        "partition `{partition}` delivered more records than its queue holds; start the consumer \
            again"
    )]
    Overflow {
        /// `topic/partition`.
        partition: String,
    },
    /// A topic was deleted and made again; the consumer's offsets are of the one that is gone.
    #[error(
        "topic `{topic}` was deleted and made again; the consumer starts again, at the beginning \
            of the new topic"
    )]
    MadeAgain {
        /// Name of the topic.
        topic: String,
    },
    /// A topic was made again under a running consumer.
    #[error(
        "partition `{partition}` went back from offset `{expected}` to `{found}`: its topic was \
            deleted and made again; the consumer starts again, at the beginning of the new topic"
    )]
    WentBack {
        /// Name of the topic.
        topic: String,
        /// `topic/partition`.
        partition: String,
        /// The offset that should have come next.
        expected: i64,
        /// The offset that came.
        found: i64,
    },
    /// A task of the consumer panicked.
    #[error("a task of the consumer panicked; see the log")]
    Panicked,
}

impl ConsumerError {
    /// The topic whose offsets mean nothing any more, so that nothing more of them is to be
    /// committed.
    pub(crate) fn topic_made_again(&self) -> Option<&str> {
        match self {
            Self::WentBack { topic, .. } | Self::MadeAgain { topic } => Some(topic),
            _ => None,
        }
    }

    /// Whether starting the consumer again, with nothing changed, may help.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            Self::RefusedProperty { .. }
                | Self::InvalidProperty { .. }
                | Self::NoTopics { .. }
                | Self::Unfit { .. }
                | Self::ZeroBound { .. }
        )
    }

    /// Translates an error of client creation. `ClientConfig` carries the property's
    /// value in its texts, so only its name is taken over.
    pub(crate) fn from_creation(error: KafkaError, secrets: &[String]) -> Self {
        match error {
            KafkaError::ClientConfig(_, _, name, _) => Self::InvalidProperty { name },
            other => Self::Client { text: hide(other.to_string(), secrets) },
        }
    }
}

/// Takes the values of properties out of a text. Short values (`1`, `true`) are no
/// secrets, and taking them out would garble the text.
fn hide(text: String, secrets: &[String]) -> String {
    secrets
        .iter()
        .filter(|secret| secret.len() > 5)
        .fold(text, |text, secret| text.replace(secret.as_str(), "***"))
}
