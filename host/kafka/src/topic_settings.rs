//! The settings by which brokers remove the records of topics.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::StreamExt;
use oncebox_model::policy::{BrokerRetention, TopicRetention, TopicSettings, is_pattern};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier},
    client::DefaultClientContext,
    config::RDKafkaLogLevel,
};
use regex::Regex;

use crate::{config::ConsumerConfig, error::ConsumerError};

/// The most topics of one request.
const TOPICS_MAX: usize = 200;
/// The most clusters that are asked at a time.
const CLUSTERS_AT_ONCE: usize = 16;
/// `segment.ms` where a broker does not tell it: Kafka's default, seven days.
const SEGMENT_MS: u64 = 7 * 86_400_000;

type Client = AdminClient<DefaultClientContext>;
/// The settings of the topics that each entry of `topics` stands for.
type Found = BTreeMap<String, Vec<TopicSettings>>;

/// Returns the settings of each consumer's topics, as the brokers have them now, in the order of
/// `configs`. Consumers that connect alike share a client. Without an answer within about twice
/// `within`, the settings of a topic are [`TopicRetention::Unknown`].
pub async fn topic_settings(
    configs: &[ConsumerConfig],
    within: Duration,
) -> Vec<Vec<TopicSettings>> {
    let mut groups: BTreeMap<BTreeMap<String, String>, Vec<usize>> = BTreeMap::new();
    for (index, config) in configs.iter().enumerate() {
        groups.entry(config.connection_properties()).or_default().push(index);
    }
    let mut found = vec![Vec::new(); configs.len()];
    let asked = groups.into_values().map(|members| async move {
        let topics: BTreeSet<String> =
            members.iter().flat_map(|index| configs[*index].topics.iter().cloned()).collect();
        // All members connect as the first does.
        let answer = ask(configs[members[0]].clone(), topics, within).await;
        (members, answer)
    });
    let mut answers = futures::stream::iter(asked).buffer_unordered(CLUSTERS_AT_ONCE);
    while let Some((members, answer)) = answers.next().await {
        for index in members {
            found[index] = of_consumer(&configs[index].topics, &answer);
        }
    }
    found
}

/// Returns the settings of a consumer's topics, each once.
fn of_consumer(topics: &[String], answer: &Result<Found, String>) -> Vec<TopicSettings> {
    let mut all: Vec<TopicSettings> = Vec::new();
    for topic in topics {
        let settings = match answer {
            Ok(found) => found.get(topic).cloned().unwrap_or_default(),
            Err(reason) => vec![TopicSettings {
                topic: topic.clone(),
                kept: TopicRetention::Unknown(reason.clone()),
            }],
        };
        for settings in settings {
            if !all.iter().any(|known| known.topic == settings.topic) {
                all.push(settings);
            }
        }
    }
    all
}

/// Asks the brokers of a consumer about topics and patterns.
async fn ask(
    config: ConsumerConfig,
    topics: BTreeSet<String>,
    within: Duration,
) -> Result<Found, String> {
    let asked = topics.clone();
    let opened = tokio::task::spawn_blocking(move || open(&config, within)).await;
    let (client, cluster) = opened.map_err(|error| error.to_string())??;
    let answer = match cluster {
        // The embedded broker has no such request.
        None => Ok(topics.iter().map(|topic| (topic.clone(), embedded(topic))).collect()),
        Some(known) => {
            let describing = describe(&client, resolve(asked, &known), within);
            let late = |_| Err("the brokers do not tell the topics' settings in time".to_owned());
            tokio::time::timeout(within, describing).await.unwrap_or_else(late)
        }
    };
    // On another thread: dropping a client waits for its threads.
    tokio::task::spawn_blocking(move || drop(client));
    answer
}

fn embedded(topic: &str) -> Vec<TopicSettings> {
    vec![TopicSettings { topic: topic.to_owned(), kept: TopicRetention::Embedded }]
}

/// Connects, and returns the names of all topics; none where the broker is an embedded one.
fn open(
    config: &ConsumerConfig,
    within: Duration,
) -> Result<(Client, Option<BTreeSet<String>>), String> {
    config.check().map_err(|error| error.to_string())?;
    let mut properties = ClientConfig::new();
    properties.set_log_level(RDKafkaLogLevel::Emerg);
    for (name, value) in config.connection_properties() {
        properties.set(name, value);
    }
    let failed = |error| ConsumerError::from_creation(error, &config.secrets()).to_string();
    let client: Client = properties.create().map_err(failed)?;
    // For all topics: a request for one that does not exist could create it.
    let metadata = client
        .inner()
        .fetch_metadata(None, within)
        .map_err(|error| format!("the brokers do not answer: {error}"))?;
    let topics = metadata.topics().iter().filter(|topic| topic.error().is_none()).map(|t| t.name());
    let topics = topics.map(str::to_owned).collect();
    let cluster_id = client.inner().fetch_cluster_id(within);
    let is_embedded = cluster_id.is_some_and(|id| id.starts_with("mockCluster"));
    Ok((client, (!is_embedded).then_some(topics)))
}

/// Returns the names that each topic or pattern stands for.
fn resolve(topics: BTreeSet<String>, known: &BTreeSet<String>) -> BTreeMap<String, Vec<String>> {
    topics
        .into_iter()
        .map(|topic| {
            let names = names(&topic, known);
            (topic, names)
        })
        .collect()
}

fn names(topic: &str, known: &BTreeSet<String>) -> Vec<String> {
    if !is_pattern(topic) {
        return known.get(topic).cloned().into_iter().collect();
    }
    // Patterns of policies are of the part of POSIX's language that this one shares.
    match Regex::new(topic) {
        Ok(pattern) => known.iter().filter(|name| pattern.is_match(name)).cloned().collect(),
        Err(_) => Vec::new(),
    }
}

/// Asks for the settings of topics by the names that they stand for.
async fn describe(
    client: &Client,
    names: BTreeMap<String, Vec<String>>,
    within: Duration,
) -> Result<Found, String> {
    let all: Vec<String> =
        names.values().flatten().cloned().collect::<BTreeSet<_>>().into_iter().collect();
    let options = AdminOptions::new().request_timeout(Some(within));
    let mut kept: BTreeMap<String, TopicRetention> = BTreeMap::new();
    for some in all.chunks(TOPICS_MAX) {
        let resources: Vec<_> =
            some.iter().map(|name| ResourceSpecifier::Topic(name.as_str())).collect();
        let answers = client
            .describe_configs(&resources, &options)
            .await
            .map_err(|error| format!("the brokers do not tell the topics' settings: {error}"))?;
        // The answers are in the order of the question.
        for (name, answer) in some.iter().zip(answers) {
            kept.insert(name.clone(), retention(answer.ok().as_ref()));
        }
    }
    let settings = |name: &String| TopicSettings {
        topic: name.clone(),
        kept: kept.get(name).cloned().unwrap_or_else(|| retention(None)),
    };
    Ok(names
        .into_iter()
        .map(|(topic, names)| match names.is_empty() {
            true => {
                let missing = TopicSettings { topic: topic.clone(), kept: TopicRetention::Missing };
                (topic, vec![missing])
            }
            false => (topic, names.iter().map(&settings).collect()),
        })
        .collect())
}

/// Reads the settings of one topic. The wrapper hands over an error as a topic without settings.
fn retention(answer: Option<&ConfigResource>) -> TopicRetention {
    let value =
        |name: &str| answer?.get(name).and_then(|entry| entry.value.as_deref()).map(str::to_owned);
    let number = |name: &str| value(name).and_then(|value| value.parse::<i64>().ok());
    let Some(retention_ms) = number("retention.ms") else {
        return TopicRetention::Unknown(
            "the brokers do not tell its settings; the host's user needs `DescribeConfigs` on it"
                .to_owned(),
        );
    };
    let positive = |value: i64| u64::try_from(value).ok();
    TopicRetention::Known(BrokerRetention {
        retention_ms: positive(retention_ms),
        retention_bytes: number("retention.bytes").and_then(positive),
        segment_ms: number("segment.ms").and_then(positive).unwrap_or(SEGMENT_MS),
        // An empty list, which Kafka 4 accepts, removes nothing.
        cleanup_policy: value("cleanup.policy").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use rdkafka::admin::{ConfigEntry, ConfigSource, OwnedResourceSpecifier};

    use super::*;

    fn answer(entries: &[(&str, &str)]) -> ConfigResource {
        let entry = |(name, value): &(&str, &str)| ConfigEntry {
            name: (*name).to_owned(),
            value: Some((*value).to_owned()),
            source: ConfigSource::Default,
            is_read_only: false,
            is_default: true,
            is_sensitive: false,
        };
        ConfigResource {
            specifier: OwnedResourceSpecifier::Topic("t".to_owned()),
            entries: entries.iter().map(entry).collect(),
        }
    }

    // What could go wrong: a refusal of the brokers passes for a topic that keeps nothing, or "for
    // ever" for a number.
    #[test]
    fn a_topic_without_settings_is_unknown() {
        let known = answer(&[
            ("retention.ms", "-1"),
            ("retention.bytes", "1000"),
            ("segment.ms", "60000"),
            ("cleanup.policy", "compact,delete"),
        ]);
        let settings = BrokerRetention {
            retention_ms: None,
            retention_bytes: Some(1_000),
            segment_ms: 60_000,
            cleanup_policy: "compact,delete".to_owned(),
        };
        assert_eq!(retention(Some(&known)), TopicRetention::Known(settings));
        for nothing in [None, Some(answer(&[])), Some(answer(&[("retention.ms", "soon")]))] {
            let found = retention(nothing.as_ref());
            assert!(matches!(found, TopicRetention::Unknown(_)), "{found:?}");
        }
    }

    // What could go wrong: a pattern hides the topic that is kept longest, or a topic that does not
    // exist is left out.
    #[test]
    fn patterns_stand_for_what_they_match() {
        let known: BTreeSet<String> =
            ["a.1", "a.2", "ab", "b"].into_iter().map(str::to_owned).collect();
        let topics = ["^a\\.[0-9]+$", "b", "c", "^z"].into_iter().map(str::to_owned).collect();
        let found = resolve(topics, &known);
        assert_eq!(found["^a\\.[0-9]+$"], ["a.1", "a.2"]);
        assert_eq!(found["b"], ["b"]);
        assert!(found["c"].is_empty() && found["^z"].is_empty());
    }

    #[test]
    fn a_topic_that_is_named_twice_counts_once() {
        let settings =
            |topic: &str| TopicSettings { topic: topic.to_owned(), kept: TopicRetention::Missing };
        let found: Found = [
            ("^a".to_owned(), vec![settings("a"), settings("ab")]),
            ("a".to_owned(), vec![settings("a")]),
        ]
        .into();
        let of = of_consumer(&["^a".to_owned(), "a".to_owned()], &Ok(found));
        assert_eq!(of, [settings("a"), settings("ab")]);
        let of = of_consumer(&["a".to_owned()], &Err("away".to_owned()));
        assert_eq!(of[0].kept, TopicRetention::Unknown("away".to_owned()));
    }
}
