//! The places to which outgoing messages go.

use std::{fmt, str::FromStr};

use crate::policy::{is_topic, shown};

/// Maximum bytes of a destination.
const BYTES_MAX: usize = 300;

/// Maximum bytes of the name of a consumer, and of an endpoint.
const NAME_BYTES_MAX: usize = 63;

/// Place to which an outgoing message goes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Destination {
    /// A topic of Kafka: `kafka:<topic>`.
    Kafka {
        /// Name of the topic.
        topic: String,
    },
    /// The inbox of another consumer of the tenant, or of the same one: `inbox:<consumer>`.
    Inbox {
        /// Name of the consumer.
        consumer: String,
    },
    /// An endpoint that the tenant has named, outside: `http:<endpoint>`.
    Http {
        /// Name of the endpoint.
        endpoint: String,
    },
}

impl Destination {
    /// Returns the kind, which is the part before the colon: `kafka`, `inbox` or `http`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Kafka { .. } => "kafka",
            Self::Inbox { .. } => "inbox",
            Self::Http { .. } => "http",
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kafka { topic } => write!(f, "kafka:{topic}"),
            Self::Inbox { consumer } => write!(f, "inbox:{consumer}"),
            Self::Http { endpoint } => write!(f, "http:{endpoint}"),
        }
    }
}

/// A text that is no destination.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationFault {
    /// It is of no kind that the host knows.
    #[error(
        "`{0}` is no destination; there are `kafka:<topic>`, `inbox:<consumer>` and \
         `http:<endpoint>`, of at most 300 bytes"
    )]
    Unknown(String),
    /// It names no topic.
    #[error(
        "`{0}` names no topic; behind `kafka:` stand 1 to 249 of the characters a-z, A-Z, 0-9, \
         `.`, `_` and `-`, and not `.` or `..`"
    )]
    Topic(String),
    /// It names no consumer.
    #[error(
        "`{0}` names no consumer; behind `inbox:` stand a lower-case letter and up to 62 of a-z, \
         0-9 and `-`"
    )]
    Consumer(String),
    /// It names no endpoint.
    #[error(
        "`{0}` names no endpoint; behind `http:` stand a lower-case letter and up to 62 of a-z, \
         0-9 and `-`, and never a URL: `oncebox endpoint set` gives a URL a name"
    )]
    Endpoint(String),
}

impl FromStr for Destination {
    type Err = DestinationFault;

    fn from_str(text: &str) -> Result<Self, DestinationFault> {
        if text.len() > BYTES_MAX {
            return Err(DestinationFault::Unknown(shown(text)));
        }
        match text.split_once(':') {
            Some(("kafka", topic)) if is_topic(topic) => {
                Ok(Self::Kafka { topic: topic.to_owned() })
            }
            Some(("kafka", _)) => Err(DestinationFault::Topic(shown(text))),
            Some(("inbox", consumer)) if is_name(consumer) => {
                Ok(Self::Inbox { consumer: consumer.to_owned() })
            }
            Some(("inbox", _)) => Err(DestinationFault::Consumer(shown(text))),
            Some(("http", endpoint)) if is_name(endpoint) => {
                Ok(Self::Http { endpoint: endpoint.to_owned() })
            }
            Some(("http", _)) => Err(DestinationFault::Endpoint(shown(text))),
            _ => Err(DestinationFault::Unknown(shown(text))),
        }
    }
}

/// Returns whether a text can be the name of a consumer or of an endpoint, as the constraints of
/// their rows say.
fn is_name(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(is_of_name)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'
}

/// Returns whether an entry of a list of destinations stands for a destination: it is the
/// destination, or its beginning followed by `*`.
pub fn matches_destination(entry: &str, destination: &str) -> bool {
    match entry.strip_suffix('*') {
        Some(beginning) => destination.starts_with(beginning),
        None => entry == destination,
    }
}

/// Returns the fault of an entry of a list of destinations; none where it is a destination, or the
/// beginning of destinations of one kind followed by `*`.
pub fn destination_part_fault(entry: &str) -> Option<DestinationFault> {
    let Some(beginning) = entry.strip_suffix('*') else {
        return entry.parse::<Destination>().err();
    };
    let fits = entry.len() <= BYTES_MAX;
    match beginning.split_once(':') {
        // `.` and `..` are no topics, but topics begin so.
        Some(("kafka", part)) => {
            let is_beginning = part.is_empty() || [".", ".."].contains(&part) || is_topic(part);
            (!is_beginning || !fits).then(|| DestinationFault::Topic(shown(entry)))
        }
        Some(("inbox", part)) => {
            let is_beginning = part.is_empty() || is_name(part);
            (!is_beginning || !fits).then(|| DestinationFault::Consumer(shown(entry)))
        }
        Some(("http", part)) => {
            let is_beginning = part.is_empty() || is_name(part);
            (!is_beginning || !fits).then(|| DestinationFault::Endpoint(shown(entry)))
        }
        _ => Some(DestinationFault::Unknown(shown(entry))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, String> {
        let parsed: Result<Destination, _> = text.parse();
        parsed.map(|parsed| parsed.to_string()).map_err(|fault| fault.to_string())
    }

    // What could go wrong: a text passes that the broker's client takes for a pattern, or two texts
    // stand for one destination and so for two lanes.
    #[test]
    fn a_destination_is_read_and_written_as_it_is() {
        for text in ["kafka:orders", "kafka:a.b_c-D9", "inbox:billing", "inbox:b-2", "http:pay-2"] {
            assert_eq!(parsed(text), Ok(text.to_owned()));
        }
        let long = format!("kafka:{}", "x".repeat(250));
        for (text, part) in [
            ("", "there are `kafka:<topic>`, `inbox:<consumer>` and `http:<endpoint>`"),
            ("orders", "there are `kafka:<topic>`"),
            ("https://example.com", "there are `kafka:<topic>`"),
            ("http://example.com", "names no endpoint"),
            ("http:", "names no endpoint"),
            ("http:Pay", "names no endpoint"),
            ("http:pay.example", "names no endpoint"),
            ("Kafka:orders", "there are `kafka:<topic>`"),
            ("kafka:", "names no topic"),
            ("kafka:^orders", "names no topic"),
            ("kafka:.", "names no topic"),
            ("kafka: orders", "names no topic"),
            (long.as_str(), "names no topic"),
            ("inbox:", "names no consumer"),
            ("inbox:Billing", "names no consumer"),
            ("inbox:2", "names no consumer"),
            ("inbox:a\n", "names no consumer"),
        ] {
            let fault = parsed(text).expect_err(text);
            assert!(fault.contains(part) && !fault.contains('\n'), "{text}: {fault}");
        }
        let endless = parsed(&format!("kafka:{}", "x".repeat(400))).expect_err("too long");
        assert!(endless.contains("at most 300 bytes") && endless.len() < 300, "{endless}");
    }

    #[test]
    fn an_entry_stands_for_itself_or_for_what_begins_with_it() {
        assert!(matches_destination("kafka:orders", "kafka:orders"));
        assert!(!matches_destination("kafka:orders", "kafka:orders.dead"));
        assert!(matches_destination("kafka:acme.*", "kafka:acme.orders"));
        assert!(!matches_destination("kafka:acme.*", "inbox:acme"));
        for entry in ["kafka:orders", "kafka:*", "kafka:acme.*", "kafka:.*", "inbox:*", "inbox:a*"]
            .into_iter()
            .chain(["http:*", "http:pay", "http:pay-*"])
        {
            assert_eq!(destination_part_fault(entry), None, "{entry}");
        }
        for entry in ["*", "", "kaf*", "orders*", "kafka:", "kafka:a b*", "inbox:A*", "kafka:a**"]
            .into_iter()
            .chain(["http:", "http://*", "http:a.*"])
        {
            assert!(destination_part_fault(entry).is_some(), "{entry}");
        }
    }
}
