//! The inbox: claim, handle, complete, commit, in one transaction. Knows no broker, no
//! WebAssembly and no HTTP.
//!
//! `process` holds the protocol; everything else is a helper to it.

mod admin;
mod browse;
mod claim;
mod cloudevents;
mod complete;
mod consumer;
mod deployment;
mod error;
pub mod handler;
mod headers;
pub mod hooks;
mod identity;
mod keys;
mod lease;
pub mod message;
mod pace;
mod parking;
mod partition;
pub mod policy;
mod probation;
mod process;
mod rehearsal;
pub mod retry;
mod run;
pub mod schema;
mod scram;
mod session;
mod suspects;
mod together;
pub mod tx;

pub use admin::{Admin, Consumer, Tenant};
pub use browse::{Filter, InboxDetail, InboxRow};
pub use consumer::ConsumerInbox;
pub use deployment::{Deployment, Deployments};
pub use error::{Blame, InboxError};
pub use identity::collapses;
pub use keys::{MasterKey, Role};
pub use partition::PartitionInbox;
pub use rehearsal::{Rehearsal, Rehearsed};
pub use session::{Budget, SessionSettings, Sessions};
