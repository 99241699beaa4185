//! Names of the defects that the test suite switches on to show that it notices them.

/// The offset is stored before the records are processed.
pub(crate) const ACK_BEFORE_COMMIT: &str = "ack_before_commit";
/// The offset of the whole batch offered is stored, not of what was settled.
pub(crate) const OFFSET_STORED_BEFORE_SETTLED: &str = "offset_stored_before_settled";
/// A partition is given up while a batch of it still runs.
pub(crate) const REVOKE_WITHOUT_WAITING: &str = "revoke_without_waiting";
/// An offset is taken as it is, whatever topic it was committed for.
pub(crate) const TOPIC_ID_IGNORED: &str = "topic_id_ignored";
/// The topic that an offset is committed for is not noted beside it.
pub(crate) const TOPIC_ID_NOT_NOTED: &str = "topic_id_not_noted";

pub(crate) use oncebox_model::hooks::sabotage as on;
