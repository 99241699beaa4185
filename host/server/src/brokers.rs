//! This process's access to the brokers: for consumers, and for requests that read a group's
//! positions.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use chrono::{DateTime, Utc};
use oncebox_api::{Asking, AskingRedelivery, BrokerError, Brokers, GroupPosition, SeekTo};
use oncebox_kafka::{ConsumerConfig, SeekError, Timing, positions, topic_settings};
use oncebox_model::policy::{Policy, Redelivery, TopicSettings};

use crate::Config;

/// Longest wait for each of the brokers' answers about topics.
pub(crate) const ASK: Duration = Duration::from_secs(3);

/// The properties of the host's configuration that every client starts from.
#[derive(Clone)]
pub struct BrokerAccess {
    properties: BTreeMap<String, String>,
}

impl BrokerAccess {
    /// Reads the properties from the configuration, which must name brokers.
    pub fn of(config: &Config) -> Result<Self> {
        let mut properties = config.kafka.properties.clone();
        if !config.kafka.brokers.is_empty() {
            properties.insert("bootstrap.servers".to_owned(), config.kafka.brokers.clone());
        }
        if !properties.contains_key("bootstrap.servers") {
            bail!("no brokers are configured; set `kafka.brokers` or ONCEBOX_KAFKA_BROKERS");
        }
        Ok(Self { properties })
    }

    /// Returns the host's own properties.
    pub fn properties(&self) -> &BTreeMap<String, String> {
        &self.properties
    }

    /// Returns the settings that a consumer's client is made from.
    pub fn config(&self, tenant: &str, consumer: &str, policy: &Policy) -> ConsumerConfig {
        ConsumerConfig {
            tenant: tenant.to_owned(),
            consumer: consumer.to_owned(),
            topics: policy.topics.clone(),
            kafka: policy.reading(),
            host_properties: self.properties.clone(),
            timing: Timing::default(),
        }
    }
}

/// Refuses Kafka properties that a policy may not set. Only the client of the broker knows them.
pub fn check_kafka(tenant: &str, name: &str, policy: &Policy) -> Result<()> {
    let config = ConsumerConfig {
        tenant: tenant.to_owned(),
        consumer: name.to_owned(),
        topics: policy.topics.clone(),
        kafka: policy.kafka.clone(),
        host_properties: BTreeMap::new(),
        timing: Timing::default(),
    };
    Ok(config.check()?)
}

impl Brokers for BrokerAccess {
    fn positions<'a>(
        &'a self,
        tenant: &'a str,
        consumer: &'a str,
        policy: &'a Policy,
        to: SeekTo,
        horizon: Option<DateTime<Utc>>,
    ) -> Asking<'a> {
        let config = self.config(tenant, consumer, policy);
        Box::pin(async move {
            let found =
                positions(config, wanted(to), horizon.map(|at| at.timestamp_millis())).await;
            found.map(|found| found.into_iter().map(shown).collect()).map_err(refused)
        })
    }

    fn redelivery<'a>(
        &'a self,
        tenant: &'a str,
        consumer: &'a str,
        policy: &'a Policy,
    ) -> AskingRedelivery<'a> {
        let config = self.config(tenant, consumer, policy);
        Box::pin(async move {
            let topics = topic_settings(std::slice::from_ref(&config), ASK).await;
            redelivery(&config, topics.into_iter().next().unwrap_or_default())
        })
    }
}

/// Returns the ways in which a consumer's messages come again, by the settings of its topics.
pub(crate) fn redelivery(config: &ConsumerConfig, topics: Vec<TopicSettings>) -> Redelivery {
    let group_ms = u64::try_from(config.redelivery().as_millis()).unwrap_or(u64::MAX);
    Redelivery { topics, group_ms }
}

fn wanted(to: SeekTo) -> oncebox_kafka::SeekTo {
    match to {
        SeekTo::Beginning => oncebox_kafka::SeekTo::Beginning,
        SeekTo::End => oncebox_kafka::SeekTo::End,
        SeekTo::Time(at) => oncebox_kafka::SeekTo::Time(at.timestamp_millis()),
        SeekTo::Offsets(offsets) => oncebox_kafka::SeekTo::Offsets(
            offsets.into_iter().map(|to| (to.topic, to.partition, to.offset)).collect(),
        ),
    }
}

fn shown(position: oncebox_kafka::GroupPosition) -> GroupPosition {
    let oncebox_kafka::GroupPosition { topic, partition, committed, target, low, high, horizon } =
        position;
    GroupPosition { topic, partition, committed, target, low, high, horizon }
}

fn refused(error: SeekError) -> BrokerError {
    match error {
        SeekError::Invalid(text) => BrokerError::Invalid(text),
        other => BrokerError::Unavailable(other.to_string()),
    }
}
