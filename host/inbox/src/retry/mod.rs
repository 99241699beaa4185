//! Messages that are run from the inbox: retries, and what was left by others.

// The worker: lease, run, complete, commit.
mod worker;
// A claim committed on its own, with an end.
pub(crate) mod lease;
// When workers have something to do.
pub(crate) mod wakeup;
// What is due in the inbox, for all consumers of a host together.
pub mod poller;
// What is open there, for metrics and alerts.
pub mod backlog;

pub use worker::{step, work};
