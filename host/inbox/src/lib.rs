//! The data plane: claim, handle, complete, commit, in one transaction. Knows no broker, no
//! WebAssembly and no HTTP, and of the control plane what the database says.
//!
//! `batch::process` holds the protocol; everything else is a helper to it. The modules stand in the
//! order in which a message comes by.

// A consumer as one host runs it.
mod consumer;
// The records of one partition: what is run, what is parked, what is settled.
mod partition;
// Who may begin a transaction, when, and for how many messages.
mod admission;
// Connections of a tenant, and transactions on them.
mod session;
// Calls of the database's functions, which bind their values by name.
mod host_call;
// One transaction: claim, handle, complete, commit.
mod batch;
// Messages that must run in order.
mod ordering;
// Messages that are run from the inbox.
pub mod retry;
// Candidates that are tried on live messages, without an effect.
mod shadow;
// Dead letters that are copied to a topic.
mod dead_letter_topic;

pub use admission::{
    Admission, Ask, Class, ConsumerCaps, HostBounds, Scheduler, Snapshot, TenantCounts,
};
pub use batch::rehearsal::{Rehearsal, Rehearsed};
pub use consumer::ConsumerInbox;
pub use dead_letter_topic::DeadLetter;
pub use partition::PartitionInbox;
pub use retry::poller::Lookout;
pub use session::{Budget, SessionSettings, Sessions};
