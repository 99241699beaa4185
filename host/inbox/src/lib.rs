//! The inbox: claim, handle, complete, commit, in one transaction. Knows no broker, no
//! WebAssembly and no HTTP.
//!
//! `process` holds the protocol; everything else is a helper to it.

mod admin;
mod audit;
mod browse;
mod canary;
mod claim;
mod cloudevents;
mod complete;
mod component;
mod consumer;
mod deploy;
mod deployment;
mod error;
pub mod event_versions;
pub mod handler;
mod headers;
pub mod hooks;
mod host;
mod identity;
mod keys;
mod lease;
pub mod message;
mod migration;
mod pace;
mod parking;
mod partition;
pub mod policy;
mod probation;
mod problem;
mod process;
mod rehearsal;
pub mod retry;
mod run;
pub mod schema;
mod scope;
mod scram;
mod session;
mod shadow;
mod suspects;
mod together;
mod token;
pub mod tx;
mod version;

pub use admin::{Admin, Consumer, Tenant, check_name};
pub use audit::AuditEntry;
pub use browse::{Filter, InboxDetail, InboxRow};
pub use canary::{CanaryRates, Outcomes, Withdrawn};
pub use complete::Disposition;
pub use component::{Begun, Compiled};
pub use consumer::ConsumerInbox;
pub use deploy::{CHANNEL, Rollback, limits};
pub use deployment::{Deployment, Deployments, Guard, NewDeployment, Retries, Role, Slot};
pub use error::{Blame, InboxError};
pub use host::{Host, HostProgress, Progress};
pub use identity::collapses;
pub use keys::{Login, MasterKey};
pub use migration::Migration;
pub use partition::PartitionInbox;
pub use problem::Problem;
pub use rehearsal::{Rehearsal, Rehearsed};
pub use session::{Budget, SessionSettings, Sessions};
pub use shadow::{DURATION_DEFAULT as SHADOW_DURATION_DEFAULT, Shadow, ShadowDifference, ShadowReport, ShadowSkipped, ShadowSum};
pub use token::{NewToken, Shown, Token, TokenRole, TokenSecret};
pub use version::{HandlerRow, NewVersion, Version};
