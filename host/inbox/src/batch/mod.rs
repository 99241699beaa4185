//! One transaction: claim, handle, complete, commit.

// The protocol, and what is done when a transaction stops.
pub(crate) mod process;
// Taking the rows of messages in the open transaction.
pub(crate) mod claim;
// One call of a handler, and how it ended.
pub(crate) mod call;
// Several messages in one call.
pub(crate) mod group;
// The last statement of the host before COMMIT.
pub(crate) mod complete;
// The protocol in a transaction that is always rolled back, for `oncebox test`.
pub(crate) mod rehearsal;
