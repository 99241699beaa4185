//! One transaction: claim, handle, complete, commit.

// The protocol, and the reaction to a transaction that stops.
pub(crate) mod process;
// The claim: inbox rows for the new messages, in the open transaction.
pub(crate) mod claim;
// One call of a handler, and its result.
pub(crate) mod call;
// Several messages in one call of a handler.
pub(crate) mod group;
// The last statement of the host before COMMIT.
pub(crate) mod complete;
// The protocol in a transaction that is always rolled back, for `oncebox test`.
pub(crate) mod rehearsal;
