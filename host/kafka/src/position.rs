//! The offset at which a partition starts.

use oncebox_model::hooks::{self, Defect};

use crate::{offsets::OffsetNote, topic_id::TopicId};

/// An offset that a group has committed, with its note. Those of other programs note nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Committed {
    pub(crate) offset: i64,
    pub(crate) note: OffsetNote,
}

impl Committed {
    /// Returns whether the offset is valid in the topic with that id. An unknown id, on either
    /// side, counts as a match.
    pub(crate) fn is_of(&self, topic_id: &TopicId) -> bool {
        match (&self.note.topic_id, topic_id) {
            (Some(noted), Some(present)) => {
                noted == present || hooks::sabotage(Defect::TopicIdIgnored)
            }
            _ => true,
        }
    }
}

/// The positions of a partition that brokers know: committed offset and watermarks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Positions {
    /// The group's committed offset; none where the group never committed one.
    pub(crate) committed: Option<Committed>,
    /// The first offset that still exists.
    pub(crate) low: i64,
    /// The offset after the last record.
    pub(crate) high: i64,
}

/// The start of a partition, and whether records are lost by it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PartitionStart {
    /// The committed offset.
    Committed(i64),
    /// The low watermark, where nothing is committed yet.
    Beginning(i64),
    /// The low watermark, where the committed offset belongs to a deleted topic of this name.
    /// Nothing of the present topic is settled.
    MadeAgain { committed: i64, low: i64 },
    /// The low watermark, where the broker deleted records that were not settled.
    TruncatedBefore { committed: i64, low: i64 },
    /// The low watermark, where the topic was truncated, or deleted and made again.
    BeyondEnd { committed: i64, low: i64 },
}

impl PartitionStart {
    /// Returns the offset of the first record to read.
    pub(crate) fn next(&self) -> i64 {
        match *self {
            Self::Committed(next) | Self::Beginning(next) => next,
            Self::MadeAgain { low, .. }
            | Self::TruncatedBefore { low, .. }
            | Self::BeyondEnd { low, .. } => low,
        }
    }
}

/// Compares the group's committed offset with the present topic and with the broker's watermarks.
pub(crate) fn start(positions: &Positions, topic_id: &TopicId) -> PartitionStart {
    let Positions { committed, low, high } = positions;
    let (low, high) = (*low, *high);
    match committed {
        None => PartitionStart::Beginning(low),
        Some(committed) if !committed.is_of(topic_id) => {
            PartitionStart::MadeAgain { committed: committed.offset, low }
        }
        Some(Committed { offset: committed, .. }) => match *committed {
            committed if committed < low => PartitionStart::TruncatedBefore { committed, low },
            committed if committed > high => PartitionStart::BeyondEnd { committed, low },
            committed => PartitionStart::Committed(committed),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn committed(offset: i64, topic_id: Option<&str>) -> Option<Committed> {
        let note = OffsetNote { topic_id: topic_id.map(Arc::from), server: None };
        Some(Committed { offset, note })
    }

    #[test]
    fn a_partition_starts_at_the_committed_offset_or_says_why_not() {
        for id in [None, Some("a")] {
            let start =
                |committed| start(&Positions { committed, low: 10, high: 20 }, &id.map(Arc::from));
            assert_eq!(start(None), PartitionStart::Beginning(10));
            assert_eq!(start(committed(10, id)), PartitionStart::Committed(10));
            assert_eq!(start(committed(20, id)), PartitionStart::Committed(20));
            assert_eq!(
                start(committed(9, id)),
                PartitionStart::TruncatedBefore { committed: 9, low: 10 }
            );
            assert_eq!(
                start(committed(21, id)),
                PartitionStart::BeyondEnd { committed: 21, low: 10 }
            );
            assert_eq!(start(committed(9, id)).next(), 10);
        }
    }

    #[test]
    fn an_offset_of_another_topic_does_not_count() {
        let start = |noted, present: Option<&str>| {
            start(
                &Positions { committed: committed(15, noted), low: 10, high: 20 },
                &present.map(Arc::from),
            )
        };
        assert_eq!(
            start(Some("a"), Some("b")),
            PartitionStart::MadeAgain { committed: 15, low: 10 }
        );
        assert_eq!(start(Some("a"), Some("b")).next(), 10);
        assert_eq!(start(Some("a"), Some("a")), PartitionStart::Committed(15));
        assert_eq!(
            start(None, Some("a")),
            PartitionStart::Committed(15),
            "of a host that noted nothing"
        );
        assert_eq!(
            start(Some("a"), None),
            PartitionStart::Committed(15),
            "of brokers that tell no ids"
        );
    }
}
