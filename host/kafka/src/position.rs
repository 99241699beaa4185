//! Where a partition starts.

use std::sync::Arc;

use crate::{client::Bearings, sabotage, topic_id::TopicId};

/// An offset that a group has committed, and the id of the topic that it was committed for, where
/// that is noted beside it: offsets of hosts before this rule, and of other programs, have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Committed {
    pub(crate) offset: i64,
    pub(crate) topic_id: TopicId,
}

impl Committed {
    /// Whether it means anything in the topic with that id. Where one of the ids is not known, it
    /// is taken as it is.
    pub(crate) fn is_of(&self, topic_id: &TopicId) -> bool {
        match (&self.topic_id, topic_id) {
            (Some(noted), Some(present)) => {
                noted == present || sabotage::on(sabotage::TOPIC_ID_IGNORED)
            }
            _ => true,
        }
    }
}

/// First word of what this program notes beside an offset. Others may note what they like.
const OURS: &str = "oncebox";
const TOPIC_ID: &str = "topic-id=";

/// What is noted beside an offset of the topic with that id.
pub(crate) fn note(topic_id: &TopicId) -> String {
    let noted = topic_id.as_ref().filter(|_| !sabotage::on(sabotage::TOPIC_ID_NOT_NOTED));
    noted.map_or_else(String::new, |id| format!("{OURS} {TOPIC_ID}{id}"))
}

/// The topic's id in what is noted beside an offset.
pub(crate) fn noted(note: &[u8]) -> TopicId {
    let mut words = std::str::from_utf8(note).ok()?.split(' ');
    words.next().filter(|word| *word == OURS)?;
    words.find_map(|word| word.strip_prefix(TOPIC_ID)).filter(|id| !id.is_empty()).map(Arc::from)
}

/// Where a partition starts, and whether that is a loss.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Where the group left off.
    Committed(i64),
    /// Nothing was committed yet.
    Beginning(i64),
    /// What was committed is of a topic of the same name that was deleted; nothing of this one was
    /// settled.
    MadeAgain { committed: i64, low: i64 },
    /// The broker deleted records that were not settled.
    HeadLost { committed: i64, low: i64 },
    /// The topic was truncated or created anew.
    BeyondEnd { committed: i64, low: i64 },
}

impl Start {
    pub(crate) fn next(&self) -> i64 {
        match *self {
            Self::Committed(next) | Self::Beginning(next) => next,
            Self::MadeAgain { low, .. }
            | Self::HeadLost { low, .. }
            | Self::BeyondEnd { low, .. } => low,
        }
    }
}

/// Compares what the group has committed with the topic that there is, and with what the broker
/// still has.
pub(crate) fn start(bearings: &Bearings, topic_id: &TopicId) -> Start {
    let Bearings { committed, low, high } = bearings;
    let (low, high) = (*low, *high);
    match committed {
        None => Start::Beginning(low),
        Some(committed) if !committed.is_of(topic_id) => {
            Start::MadeAgain { committed: committed.offset, low }
        }
        Some(Committed { offset: committed, .. }) => match *committed {
            committed if committed < low => Start::HeadLost { committed, low },
            committed if committed > high => Start::BeyondEnd { committed, low },
            committed => Start::Committed(committed),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(offset: i64, topic_id: Option<&str>) -> Option<Committed> {
        Some(Committed { offset, topic_id: topic_id.map(Arc::from) })
    }

    #[test]
    fn a_partition_starts_where_it_was_left_or_says_why_not() {
        for id in [None, Some("a")] {
            let start =
                |committed| start(&Bearings { committed, low: 10, high: 20 }, &id.map(Arc::from));
            assert_eq!(start(None), Start::Beginning(10));
            assert_eq!(start(committed(10, id)), Start::Committed(10));
            assert_eq!(start(committed(20, id)), Start::Committed(20));
            assert_eq!(start(committed(9, id)), Start::HeadLost { committed: 9, low: 10 });
            assert_eq!(start(committed(21, id)), Start::BeyondEnd { committed: 21, low: 10 });
            assert_eq!(start(committed(9, id)).next(), 10);
        }
    }

    #[test]
    fn an_offset_of_another_topic_is_none() {
        let start = |noted, present: Option<&str>| {
            start(
                &Bearings { committed: committed(15, noted), low: 10, high: 20 },
                &present.map(Arc::from),
            )
        };
        assert_eq!(start(Some("a"), Some("b")), Start::MadeAgain { committed: 15, low: 10 });
        assert_eq!(start(Some("a"), Some("b")).next(), 10);
        assert_eq!(start(Some("a"), Some("a")), Start::Committed(15));
        assert_eq!(start(None, Some("a")), Start::Committed(15), "of a host that noted nothing");
        assert_eq!(start(Some("a"), None), Start::Committed(15), "of brokers that tell no ids");
    }

    #[test]
    fn what_others_note_is_no_topic() {
        let id: TopicId = Some("cGkQNj1IQ2iKZ4wCjoO8jg".into());
        assert_eq!(noted(note(&id).as_bytes()), id);
        assert_eq!(noted(format!("{} more=1", note(&id)).as_bytes()), id);
        assert_eq!(note(&None), "");
        for other in [
            &b""[..],
            b"oncebox",
            b"oncebox topic-id=",
            b"topic-id=a",
            b"another topic-id=a",
            b"\xff\xfe",
            b"oncebox \xff topic-id=a",
        ] {
            assert_eq!(noted(other), None, "{other:?}");
        }
    }
}
