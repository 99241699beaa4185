//! The messages that a replay selects.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde::{Deserialize, Serialize};

/// Most ids of one filter.
const IDS_MAX: usize = 1_000;

/// Completed messages of a consumer. A member that is absent restricts nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReplayFilter {
    /// Event type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// Earliest time of completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<DateTime<Utc>>,
    /// Time before which they completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<DateTime<Utc>>,
    /// Ids; none for any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<String>>,
}

impl ReplayFilter {
    /// Refuses a filter that selects nothing, or more ids than one page holds.
    pub(super) fn check(&self) -> Result<(), InboxError> {
        if self.from.zip(self.to).is_some_and(|(from, to)| from >= to) {
            return Err(InboxError::Invalid("`from` must be before `to`".to_owned()));
        }
        match self.ids.as_ref().map_or(1, Vec::len) {
            1..=IDS_MAX => Ok(()),
            0 => Err(InboxError::Invalid("`ids` is empty; leave it out for any".to_owned())),
            ids => Err(InboxError::Invalid(format!(
                "there are {ids} ids; name at most {IDS_MAX}, or select by type and time"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_selects_nothing_is_refused() {
        let at = |s: i64| DateTime::from_timestamp(s, 0);
        let (whole, turned) = (
            ReplayFilter { from: at(1), to: at(2), ..ReplayFilter::default() },
            ReplayFilter { from: at(2), to: at(2), ..ReplayFilter::default() },
        );
        assert!(ReplayFilter::default().check().is_ok() && whole.check().is_ok());
        assert!(turned.check().is_err());
        for (ids, is_sound) in [(0, false), (1, true), (IDS_MAX, true), (IDS_MAX + 1, false)] {
            let ids = Some(vec!["a".to_owned(); ids]);
            assert_eq!(ReplayFilter { ids, ..ReplayFilter::default() }.check().is_ok(), is_sound);
        }
    }
}
