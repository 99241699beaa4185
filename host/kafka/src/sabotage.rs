//! Names of the defects that the test suite switches on, to show that its tests detect them.

/// Storing the offset before the records are processed.
pub(crate) const ACK_BEFORE_COMMIT: &str = "ack_before_commit";
/// Storing the offset of the whole offered batch instead of the settled prefix.
pub(crate) const OFFSET_STORED_BEFORE_SETTLED: &str = "offset_stored_before_settled";
/// Giving up a partition while a batch of it still runs.
pub(crate) const REVOKE_WITHOUT_WAITING: &str = "revoke_without_waiting";
/// Accepting a committed offset whatever topic it was committed for.
pub(crate) const TOPIC_ID_IGNORED: &str = "topic_id_ignored";
/// Committing an offset without the topic's id beside it.
pub(crate) const TOPIC_ID_NOT_NOTED: &str = "topic_id_not_noted";

pub(crate) use oncebox_model::hooks::sabotage as on;
