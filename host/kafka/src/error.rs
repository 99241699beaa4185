//! The errors of a consumer.

use rdkafka::error::KafkaError;

/// The reason why a consumer did not start, or ended by itself. It never holds a property's value.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ConsumerError {
    /// A property that only the host may set.
    #[error("kafka property `{name}` cannot be set here: {reason}")]
    RefusedProperty {
        /// Name of the property.
        name: String,
        /// The reason, and what to do instead.
        reason: &'static str,
    },
    /// A property that librdkafka does not know, or whose value it refuses.
    #[error(
        "kafka property `{name}` is unknown or its value is not accepted; compare it with \
            librdkafka's list of properties"
    )]
    InvalidProperty {
        /// Name of the property.
        name: String,
    },
    /// A consumer without topics.
    #[error("consumer `{consumer}` has no topics; name at least one in its policy")]
    NoTopics {
        /// Name of the consumer.
        consumer: String,
    },
    /// A policy that must not reach the client library.
    #[error("the policy of consumer `{consumer}` is not handed to kafka's client: {text}")]
    Unfit {
        /// Name of the consumer.
        consumer: String,
        /// The fault, with the key of the setting.
        text: String,
    },
    /// A consumer that the host did not start.
    #[error("{text}")]
    NotStarted {
        /// The reason, and what to do.
        text: String,
    },
    /// A bound of zero.
    #[error("`{name}` of consumer `{consumer}` must be at least 1")]
    ZeroBound {
        /// Name of the consumer.
        consumer: String,
        /// The setting in the policy.
        name: &'static str,
    },
    /// A combination of properties or a subscription that librdkafka refused.
    #[error("failed to start the kafka client: {text}")]
    Client {
        /// librdkafka's text, without values of properties.
        text: String,
    },
    /// A client that librdkafka declared dead, for example fenced by another instance.
    #[error("kafka client failed for good: {text}; start the consumer again")]
    Fatal {
        /// librdkafka's text.
        text: String,
    },
    /// A consumer that the brokers do not authorize.
    #[error(
        "the brokers refuse the consumer: {text}; check its topics and group, and what the host's \
            user may read"
    )]
    Refused {
        /// librdkafka's text.
        text: String,
    },
    /// A partition that kept delivering after its pause; a record would have been lost.
    #[error(
        "partition `{partition}` delivered more records than its queue holds; start the consumer \
            again"
    )]
    Overflow {
        /// `topic/partition`.
        partition: String,
    },
    /// A topic that was deleted and made again; the consumer's offsets belong to the old topic.
    #[error(
        "topic `{topic}` was deleted and made again; the consumer starts again, at the beginning \
            of the new topic"
    )]
    MadeAgain {
        /// Name of the topic.
        topic: String,
    },
    /// A topic that was deleted and made again under a running consumer, seen by a step back.
    #[error(
        "partition `{partition}` went back from offset `{expected}` to `{found}`: its topic was \
            deleted and made again; the consumer starts again, at the beginning of the new topic"
    )]
    WentBack {
        /// Name of the topic.
        topic: String,
        /// `topic/partition`.
        partition: String,
        /// The offset that was expected next.
        expected: i64,
        /// The offset of the record that arrived.
        found: i64,
    },
    /// A database that does not have commits of a partition any more that it had confirmed.
    #[error(
        "the database has lost commits of partition `{partition}` that it had confirmed; the \
            consumer starts again, at the position that the database knows"
    )]
    CommitsLost {
        /// `topic/partition`.
        partition: String,
    },
    /// A panic in a task of the consumer.
    #[error("a task of the consumer panicked; see the log")]
    Panicked,
}

impl ConsumerError {
    /// Returns the topic that was made again, whose offsets must not be committed any more.
    pub(crate) fn topic_made_again(&self) -> Option<&str> {
        match self {
            Self::WentBack { topic, .. } | Self::MadeAgain { topic } => Some(topic),
            _ => None,
        }
    }

    /// Returns whether a restart of the consumer, with nothing changed, may help.
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

    /// Translates an error of client creation. The texts of `ClientConfig` hold the property's
    /// value, so only its name is kept.
    pub(crate) fn from_creation(error: KafkaError, secrets: &[String]) -> Self {
        match error {
            KafkaError::ClientConfig(_, _, name, _) => Self::InvalidProperty { name },
            other => Self::Client { text: hide(other.to_string(), secrets) },
        }
    }
}

/// Removes the values of properties from a text. Short values (`1`, `true`) are no secrets, and
/// their removal would garble the text.
fn hide(text: String, secrets: &[String]) -> String {
    secrets
        .iter()
        .filter(|secret| secret.len() > 5)
        .fold(text, |text, secret| text.replace(secret.as_str(), "***"))
}
