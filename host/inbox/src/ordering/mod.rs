//! Messages that must run in order.

// Locks of ordering keys, and messages behind a failed one.
pub(crate) mod key_lock;
// Versions of aggregates, and gaps between them.
pub(crate) mod sequence;
