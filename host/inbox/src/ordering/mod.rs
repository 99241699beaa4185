//! Messages that must run in order.

// Locks of what must run in order, and what stands behind what failed.
pub(crate) mod key_lock;
// Versions of aggregates, and gaps between them.
pub(crate) mod sequence;
