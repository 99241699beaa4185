//! Leases whose runs ended for no fault of their messages.

/// Lease whose run ended for no fault of its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interrupted {
    /// Id of the message.
    pub(crate) message_id: String,
    /// Number of the lease.
    pub(crate) epoch: i64,
}
