//! The data plane: claim, handle, complete, commit, in one transaction. It knows no broker, no
//! WebAssembly and no HTTP. Of the control plane it knows only what the database says.
//!
//! `batch::process` holds the protocol; all other modules serve it. They are declared in the order
//! in which a message passes through them.

// A consumer as one host runs it.
mod consumer;
// Its metrics and logs.
mod metrics;
// The spans of its messages.
mod spans;
// Payloads that messages refer to.
mod reference;
// The records of one partition, and their way to a run or a parked row.
mod partition;
// Permission to begin a transaction, and the number of its messages.
mod admission;
// Connections of a tenant, and transactions on them.
mod session;
// Calls of the database's functions, which bind their values by name.
mod host_call;
// One transaction: claim, handle, complete, commit.
mod batch;
// Messages that must run in order.
mod ordering;
// Messages that run from the inbox.
pub mod retry;
// Completed messages that operators replay.
pub mod replay;
// Candidates that are tried on live messages, without an effect.
mod shadow;
// Dead letters that are copied to a topic.
mod dead_letter_topic;

pub use admission::{
    Admission, AdmissionRequest, Class, ConsumerCaps, HostBounds, Scheduler, Snapshot, TenantCounts,
};
pub use batch::rehearsal::{Rehearsal, Rehearsed};
pub use consumer::ConsumerInbox;
pub use dead_letter_topic::DeadLetter;
pub use partition::{PartitionInbox, receiver::PartitionReceiver};
pub use retry::poller::DuePoller;
pub use session::{Budget, SessionSettings, Sessions};
