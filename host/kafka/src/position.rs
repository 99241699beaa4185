//! Where a partition starts.

use crate::client::Bearings;

/// Where a partition starts, and whether that is a loss.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Where the group left off.
    Committed(i64),
    /// Nothing was committed yet.
    Beginning(i64),
    /// The broker deleted records that were not settled.
    HeadLost { committed: i64, low: i64 },
    /// The topic was truncated or created anew.
    BeyondEnd { committed: i64, low: i64 },
}

impl Start {
    pub(crate) fn next(&self) -> i64 {
        match *self {
            Self::Committed(next) | Self::Beginning(next) => next,
            Self::HeadLost { low, .. } | Self::BeyondEnd { low, .. } => low,
        }
    }
}

/// Compares what the group has committed with what the broker still has.
pub(crate) fn start(Bearings { committed, low, high }: Bearings) -> Start {
    match committed {
        None => Start::Beginning(low),
        Some(committed) if committed < low => Start::HeadLost { committed, low },
        Some(committed) if committed > high => Start::BeyondEnd { committed, low },
        Some(committed) => Start::Committed(committed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_starts_where_it_was_left_or_says_why_not() {
        let start = |committed| start(Bearings { committed, low: 10, high: 20 });
        assert_eq!(start(None), Start::Beginning(10));
        assert_eq!(start(Some(10)), Start::Committed(10));
        assert_eq!(start(Some(20)), Start::Committed(20));
        assert_eq!(start(Some(9)), Start::HeadLost { committed: 9, low: 10 });
        assert_eq!(start(Some(21)), Start::BeyondEnd { committed: 21, low: 10 });
        assert_eq!(start(Some(9)).next(), 10);
    }
}
