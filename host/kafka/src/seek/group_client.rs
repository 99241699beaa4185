//! The requests of a client that has the group's name and is no member of it.

use std::{collections::HashMap, time::Duration};

use rdkafka::{
    Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer as _},
    types::RDKafkaErrorCode,
};

use super::target::{GroupPosition, SeekError, SeekTo};
use crate::{
    client::committed_in,
    config::ConsumerConfig,
    error::ConsumerError,
    offsets::{OffsetNote, add_offset},
    topic_id::{self, TopicId},
};

/// The longest wait for one answer of the brokers.
pub(super) const ASK: Duration = Duration::from_secs(5);
/// The longest wait for the answer to a commit, in milliseconds.
const SESSION_MS: &str = "10000";

/// A client with the group's name that never joins it.
pub(super) struct GroupClient(BaseConsumer);

impl GroupClient {
    pub(super) fn new(config: &ConsumerConfig) -> Result<Self, SeekError> {
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

    pub(super) fn positions(
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
    pub(super) fn is_embedded(&self) -> bool {
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
    pub(super) fn leave_behind(
        &self,
        offsets: &mut Vec<(String, i32, i64)>,
    ) -> Result<(), SeekError> {
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

    pub(super) fn set(
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
            // No database answers for an offset that an operator chose.
            let note = OffsetNote { topic_id: ids[topic].clone(), server: None };
            let added = add_offset(&mut wanted, topic, *partition, *offset, &note);
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
