//! Reading, setting and deleting a group's offsets, each with a client of its own that is no member
//! of the group.

use std::{collections::HashMap, time::Duration};

use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions},
    client::DefaultClientContext,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer as _},
    error::KafkaError,
    types::RDKafkaErrorCode,
};

use crate::{
    client::{add_offset, committed_in},
    config::ConsumerConfig,
    error::ConsumerError,
    topic_id::{self, TopicId},
};

/// The longest wait for one answer of the brokers.
const ASK: Duration = Duration::from_secs(5);
/// The longest wait for the answer to a commit, in milliseconds.
const SESSION_MS: &str = "10000";

/// The position that a group is to continue at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeekTo {
    /// The first record that the brokers still have.
    Beginning,
    /// The end, after the last record.
    End,
    /// The first record with this timestamp or a later one, in milliseconds since 1970.
    Time(i64),
    /// Offsets, each of a partition. An entry without a topic is of the consumer's only one. Other
    /// partitions stay.
    Offsets(Vec<(Option<String>, i32, i64)>),
}

/// The positions of a partition of a group's topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPosition {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition.
    pub partition: i32,
    /// The offset that the group continues at; none where it never committed one, or only for a
    /// deleted topic of this name.
    pub committed: Option<i64>,
    /// The offset that was asked for; none where none was.
    pub target: Option<i64>,
    /// The first offset that still exists.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// The first offset of a record that is not older than the requested horizon.
    pub horizon: Option<i64>,
}

/// The reason why a group's offsets were not read or not changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SeekError {
    /// A request that cannot be met.
    #[error("{0}")]
    Invalid(String),
    /// A group with members; brokers then refuse to change or delete its offsets from outside.
    #[error(
        "the group `{0}` still has a member; a process that was killed is one until its session \
            times out"
    )]
    HasMembers(String),
    /// A refused property.
    #[error(transparent)]
    Client(#[from] ConsumerError),
    /// A missing or unexpected answer of the brokers.
    #[error("{what}: {error}")]
    Broker {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: String,
    },
}

impl SeekError {
    fn broker(what: &'static str) -> impl Fn(KafkaError) -> Self {
        move |error| Self::Broker { what, error: error.to_string() }
    }
}

/// Returns the positions of a consumer's group in each partition of its topics, with the offsets
/// that `to` stands for. With a horizon, in milliseconds since 1970, also returns the first offsets
/// of records that are not older.
///
/// # Errors
///
/// A [`SeekError`] when `to` cannot be met, a property is refused or brokers do not answer.
pub async fn positions(
    config: ConsumerConfig,
    to: SeekTo,
    horizon_ms: Option<i64>,
) -> Result<Vec<GroupPosition>, SeekError> {
    blocking(move || Asking::new(&config)?.positions(&config, &to, horizon_ms)).await
}

/// Sets offsets of a consumer's group, which must have no members, and checks the result. With
/// `only_forward`, a partition keeps an offset that is past the given one.
///
/// # Errors
///
/// A [`SeekError`] when the group has members, a property is refused or brokers do not answer.
pub async fn set_offsets(
    config: ConsumerConfig,
    mut offsets: Vec<(String, i32, i64)>,
    only_forward: bool,
) -> Result<(), SeekError> {
    blocking(move || {
        let asking = Asking::new(&config)?;
        if only_forward {
            asking.leave_behind(&mut offsets)?;
        }
        asking.set(&config, &offsets)
    })
    .await
}

/// Deletes a consumer's group with its offsets. Returns false if there was no group.
///
/// # Errors
///
/// A [`SeekError`] when the group has members, the broker is an embedded one, or brokers do not
/// answer.
pub async fn delete_group(config: &ConsumerConfig) -> Result<bool, SeekError> {
    let asking = config.clone();
    // librdkafka ends the process when a broker does not know how to delete a group.
    if blocking(move || Ok(Asking::new(&asking)?.is_embedded())).await? {
        return Err(SeekError::Broker {
            what: "the group stays",
            error: "an embedded broker cannot delete groups".to_owned(),
        });
    }
    let mut client = ClientConfig::new();
    client.set_log_level(RDKafkaLogLevel::Emerg);
    for (name, value) in config.connection_properties() {
        client.set(name, value);
    }
    let failed = |error| ConsumerError::from_creation(error, &config.secrets());
    let admin: AdminClient<DefaultClientContext> = client.create().map_err(failed)?;
    let group = config.group();
    let options = AdminOptions::new().request_timeout(Some(ASK)).operation_timeout(Some(ASK));
    let results = admin
        .delete_groups(&[&group], &options)
        .await
        .map_err(SeekError::broker("failed to delete the group"))?;
    match results.into_iter().next() {
        None | Some(Ok(_)) => Ok(true),
        Some(Err((_, RDKafkaErrorCode::GroupIdNotFound))) => Ok(false),
        Some(Err((group, RDKafkaErrorCode::NonEmptyGroup))) => Err(SeekError::HasMembers(group)),
        Some(Err((_, code))) => {
            Err(SeekError::Broker { what: "failed to delete the group", error: code.to_string() })
        }
    }
}

/// Runs a blocking request outside the runtime's threads.
async fn blocking<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, SeekError> + Send + 'static,
) -> Result<T, SeekError> {
    let asked = tokio::task::spawn_blocking(ask).await;
    asked.map_err(|error| SeekError::Broker {
        what: "the client's task did not end",
        error: error.to_string(),
    })?
}

/// A client with the group's name that never joins it.
struct Asking(BaseConsumer);

impl Asking {
    fn new(config: &ConsumerConfig) -> Result<Self, SeekError> {
        let mut client = config.client_config()?;
        client.set_log_level(RDKafkaLogLevel::Emerg);
        client
            .set("enable.auto.commit", "false")
            .set("session.timeout.ms", SESSION_MS)
            .set("heartbeat.interval.ms", "3000");
        // With it the client would act for the static member of that name.
        client.remove("group.instance.id");
        Ok(Self(
            client
                .create()
                .map_err(|error| ConsumerError::from_creation(error, &config.secrets()))?,
        ))
    }

    fn positions(
        &self,
        config: &ConsumerConfig,
        to: &SeekTo,
        horizon_ms: Option<i64>,
    ) -> Result<Vec<GroupPosition>, SeekError> {
        let mut found = Vec::new();
        for (topic, partition) in self.partitions(config, to)? {
            let (low, high) = self
                .0
                .fetch_watermarks(&topic, partition, ASK)
                .map_err(SeekError::broker("failed to ask for watermarks"))?;
            found.push(GroupPosition {
                topic,
                partition,
                committed: None,
                target: None,
                low,
                high,
                horizon: None,
            });
        }
        self.fill_committed(&mut found)?;
        self.fill_targets(config, to, &mut found)?;
        if let Some(horizon_ms) = horizon_ms {
            let offsets = self.at_time(&found, horizon_ms)?;
            for (position, offset) in found.iter_mut().zip(offsets) {
                position.horizon = Some(offset);
            }
        }
        Ok(found)
    }

    /// Returns whether the broker is librdkafka's own mock.
    fn is_embedded(&self) -> bool {
        self.0.client().fetch_cluster_id(ASK).is_some_and(|id| id.starts_with("mockCluster"))
    }

    /// Returns the partitions to look up.
    fn partitions(
        &self,
        config: &ConsumerConfig,
        to: &SeekTo,
    ) -> Result<Vec<(String, i32)>, SeekError> {
        let mut topics = config.topics.clone();
        if let Some(pattern) = topics.iter().find(|topic| topic.starts_with('^')) {
            let SeekTo::Offsets(offsets) = to else {
                return Err(SeekError::Invalid(format!(
                    "`{pattern}` stands for any number of topics; name an offset for each partition"
                )));
            };
            topics = offsets.iter().filter_map(|(topic, ..)| topic.clone()).collect();
            topics.sort();
            topics.dedup();
        }
        let mut found = Vec::new();
        for topic in topics {
            let metadata = self
                .0
                .fetch_metadata(Some(&topic), ASK)
                .map_err(SeekError::broker("failed to ask for the topic's partitions"))?;
            let known = metadata
                .topics()
                .iter()
                .find(|known| known.name() == topic && known.error().is_none());
            let known = known.ok_or_else(|| {
                SeekError::Invalid(format!("the brokers know no topic `{topic}`"))
            })?;
            let mut partitions: Vec<_> =
                known.partitions().iter().map(|partition| partition.id()).collect();
            partitions.sort_unstable();
            found.extend(partitions.into_iter().map(|partition| (topic.clone(), partition)));
        }
        Ok(found)
    }

    fn fill_committed(&self, positions: &mut [GroupPosition]) -> Result<(), SeekError> {
        let ids = self.topic_ids(positions.iter().map(|position| position.topic.as_str()))?;
        let failed = SeekError::broker("failed to ask for the group's offsets");
        let committed = self.0.committed_offsets(list(positions), ASK).map_err(&failed)?;
        for position in positions {
            let found =
                committed_in(&committed, &position.topic, position.partition).map_err(&failed)?;
            position.committed =
                found.filter(|found| found.is_of(&ids[&position.topic])).map(|found| found.offset);
        }
        Ok(())
    }

    /// Returns the ids of topics, as far as the brokers have any.
    fn topic_ids<'a>(
        &self,
        topics: impl Iterator<Item = &'a str>,
    ) -> Result<HashMap<String, TopicId>, SeekError> {
        let mut ids = HashMap::new();
        for topic in topics {
            if !ids.contains_key(topic) {
                let id = topic_id::describe(&self.0, topic, ASK);
                let id = id.map_err(|error| SeekError::Broker {
                    what: "failed to ask for the topic's id",
                    error,
                })?;
                ids.insert(topic.to_owned(), id);
            }
        }
        Ok(ids)
    }

    fn fill_targets(
        &self,
        config: &ConsumerConfig,
        to: &SeekTo,
        positions: &mut [GroupPosition],
    ) -> Result<(), SeekError> {
        match to {
            SeekTo::Beginning => {
                positions.iter_mut().for_each(|position| position.target = Some(position.low))
            }
            SeekTo::End => {
                positions.iter_mut().for_each(|position| position.target = Some(position.high))
            }
            SeekTo::Time(at) => {
                let offsets = self.at_time(positions, *at)?;
                for (position, offset) in positions.iter_mut().zip(offsets) {
                    position.target = Some(offset);
                }
            }
            SeekTo::Offsets(offsets) => {
                for (topic, partition, offset) in offsets {
                    let topic = only_topic(config, topic.as_deref())?;
                    let position = positions.iter_mut().find(|position| {
                        position.topic == topic && position.partition == *partition
                    });
                    let position = position.ok_or_else(|| {
                        SeekError::Invalid(format!(
                            "the consumer reads no partition `{topic}:{partition}`"
                        ))
                    })?;
                    check_range(position, *offset)?;
                    if position.target.replace(*offset).is_some_and(|other| other != *offset) {
                        return Err(SeekError::Invalid(format!(
                            "`{topic}:{partition}` has two offsets"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns, by partition, the first offset of a record that is not older than `at_ms`, or the
    /// end where there is none.
    fn at_time(&self, positions: &[GroupPosition], at_ms: i64) -> Result<Vec<i64>, SeekError> {
        let mut times = TopicPartitionList::new();
        for position in positions {
            times
                .add_partition_offset(
                    &position.topic,
                    position.partition,
                    Offset::Offset(at_ms.max(0)),
                )
                .map_err(SeekError::broker("failed to ask for a time"))?;
        }
        let found = self
            .0
            .offsets_for_times(times, ASK)
            .map_err(SeekError::broker("failed to ask for the offsets of a time"))?;
        let offset = |position: &GroupPosition| {
            let element = found.find_partition(&position.topic, position.partition);
            match element.as_ref().map(|element| (element.error(), element.offset())) {
                Some((Ok(()), Offset::Offset(offset))) => {
                    Ok(offset.clamp(position.low, position.high))
                }
                Some((Ok(()), _)) => Ok(position.high),
                Some((Err(error), _)) => {
                    Err(SeekError::broker("failed to ask for the offset of a time")(error))
                }
                None => Ok(position.high),
            }
        };
        positions.iter().map(offset).collect()
    }

    /// Removes the offsets that the group is past.
    fn leave_behind(&self, offsets: &mut Vec<(String, i32, i64)>) -> Result<(), SeekError> {
        let ids = self.topic_ids(offsets.iter().map(|(topic, ..)| topic.as_str()))?;
        let mut asked = TopicPartitionList::new();
        for (topic, partition, _) in offsets.iter() {
            asked.add_partition(topic, *partition);
        }
        let failed = SeekError::broker("failed to ask for the group's offsets");
        let committed = self.0.committed_offsets(asked, ASK).map_err(&failed)?;
        let mut kept = Vec::new();
        for (topic, partition, offset) in std::mem::take(offsets) {
            let now = committed_in(&committed, &topic, partition).map_err(&failed)?;
            if !now.is_some_and(|now| now.is_of(&ids[&topic]) && now.offset > offset) {
                kept.push((topic, partition, offset));
            }
        }
        *offsets = kept;
        Ok(())
    }

    fn set(
        &self,
        config: &ConsumerConfig,
        offsets: &[(String, i32, i64)],
    ) -> Result<(), SeekError> {
        if offsets.is_empty() {
            return Ok(());
        }
        let ids = self.topic_ids(offsets.iter().map(|(topic, ..)| topic.as_str()))?;
        let mut wanted = TopicPartitionList::new();
        for (topic, partition, offset) in offsets {
            let added = add_offset(&mut wanted, topic, *partition, *offset, &ids[topic]);
            added.map_err(SeekError::broker("failed to name an offset"))?;
        }
        // Without a membership the brokers accept a commit only while the group is empty.
        self.0.commit(&wanted, CommitMode::Sync).map_err(|error| {
            match error.rdkafka_error_code() {
                Some(
                    RDKafkaErrorCode::UnknownMemberId
                    | RDKafkaErrorCode::IllegalGeneration
                    | RDKafkaErrorCode::RebalanceInProgress
                    | RDKafkaErrorCode::FencedInstanceId,
                ) => SeekError::HasMembers(config.group()),
                _ => SeekError::broker("failed to set the group's offsets")(error),
            }
        })?;
        let found = self
            .0
            .committed_offsets(wanted.clone(), ASK)
            .map_err(SeekError::broker("failed to look at the group's offsets"))?;
        let differs = |element: &rdkafka::topic_partition_list::TopicPartitionListElem<'_>| {
            found
                .find_partition(element.topic(), element.partition())
                .is_none_or(|now| now.offset() != element.offset())
        };
        match wanted.elements().iter().find(|element| differs(element)) {
            Some(element) => Err(SeekError::Broker {
                what: "the group's offsets are not what was set",
                error: format!("`{}:{}`", element.topic(), element.partition()),
            }),
            None => Ok(()),
        }
    }
}

fn list(positions: &[GroupPosition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for position in positions {
        list.add_partition(&position.topic, position.partition);
    }
    list
}

fn only_topic<'a>(
    config: &'a ConsumerConfig,
    topic: Option<&'a str>,
) -> Result<&'a str, SeekError> {
    match (topic, config.topics.as_slice()) {
        (Some(topic), _) => Ok(topic),
        (None, [topic]) => Ok(topic),
        (None, _) => Err(SeekError::Invalid(
            "the consumer reads more than one topic; name it, as in `topic:0=500`".to_owned(),
        )),
    }
}

fn check_range(position: &GroupPosition, offset: i64) -> Result<(), SeekError> {
    let GroupPosition { topic, partition, low, high, .. } = position;
    if (*low..=*high).contains(&offset) {
        return Ok(());
    }
    Err(SeekError::Invalid(format!(
        "offset {offset} of `{topic}:{partition}` is not there; the brokers have {low} to {high}"
    )))
}
