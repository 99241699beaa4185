//! Messages that run from the inbox: retries, and messages that other processes left.

// The worker: lease, run, complete, commit.
mod worker;
// Leases: claims committed on their own, with an expiry.
pub(crate) mod lease;
// Leases whose runs ended for no fault of their messages.
pub(crate) mod interrupted;
// Wakeups of the workers.
pub(crate) mod wakeup;
// Polling for due messages, for all consumers of a host together.
pub mod poller;
// Counts of open messages, for metrics and alerts.
pub mod backlog;

pub use worker::{step, work};
