//! The inbox: claim, handle, complete, commit, in one transaction. Knows no broker, no
//! WebAssembly and no HTTP.
//!
//! `process` holds the protocol; everything else is a helper to it.

mod admin;
mod audit;
mod away;
pub mod backlog;
mod breaker;
mod browse;
mod canary;
mod claim;
mod clock;
mod cloudevents;
mod complete;
mod component;
mod consumer;
mod copies;
mod credentials;
mod deploy;
mod deployment;
mod doctor;
pub mod due;
mod error;
pub mod event_versions;
mod export;
pub mod handler;
mod headers;
pub mod hooks;
mod host;
mod identity;
mod keys;
mod lease;
mod locks;
pub mod message;
mod migration;
mod order;
mod pace;
mod parking;
mod partition;
mod place;
pub mod policy;
mod policy_change;
mod probation;
mod problem;
mod process;
mod reach;
mod rehearsal;
mod remedy;
mod removal;
pub mod retry;
mod revision;
mod rotation;
mod run;
mod scheduler;
pub mod schema;
mod scope;
mod scram;
mod seal;
mod seek;
mod sequence;
mod session;
mod shadow;
mod standing;
mod start;
mod statements;
mod story;
mod subscription;
mod suspects;
mod tenant;
mod tenant_change;
mod tenant_removal;
mod together;
mod token;
pub mod tx;
mod version;

pub use admin::{Admin, check_name};
pub use audit::AuditEntry;
pub use backlog::{Alert, Backlog, Open};
pub use breaker::BreakerState;
pub use browse::{Filter, InboxDetail, InboxRow, Place as InboxPlace};
pub use canary::{CanaryRates, Outcomes, Withdrawn};
pub use complete::Disposition;
pub use component::{Begun, CompilationClaim, Compiled};
pub use consumer::ConsumerInbox;
pub use copies::DeadLetter;
pub use credentials::Credentials;
pub use deploy::{CHANNEL, Rollback, limits};
pub use deployment::{Deployment, Deployments, Guard, NewDeployment, Retries, Role, Slot};
pub use doctor::{Finding, HostLimits, Severity};
pub use due::Lookout;
pub use error::{Blame, InboxError};
pub use export::Exported;
pub use host::{Duplicates, Host, HostProgress, HostRun, Progress, Run, RunState};
pub use identity::collapses;
pub use keys::MasterKey;
pub use migration::{Migration, MigrationBounds};
pub use partition::PartitionInbox;
pub use place::{DatabaseUrl, Drift, Place};
pub use policy_change::{Consequence, PolicyChange, PolicyDifference};
pub use problem::Problem;
pub use rehearsal::{Rehearsal, Rehearsed};
pub use remedy::{Remedied, Remedy, Verb};
pub use removal::{LastOfConsumer, RemovalTurn};
pub use revision::Revision;
pub use rotation::KeyRotation;
pub use scheduler::{
    Admission, Ask, Class, ConsumerCaps, HostBounds, Meter, Scheduler, Snapshot, TenantCounts,
    Usage,
};
pub use seek::{Seek, SeekInHand, SeekOffset, SeekTurn};
pub use session::{Budget, SessionSettings, Sessions};
pub use shadow::{
    DURATION_DEFAULT as SHADOW_DURATION_DEFAULT, Shadow, ShadowDifference, ShadowReport,
    ShadowSkipped, ShadowSum,
};
pub use standing::{Standing, Work};
pub use start::{Quarantine, Quarantined, Start, StartTurn};
pub use statements::check_schema;
pub use story::{AggregateVersion, Behind, Next, Story, StoryEvent};
pub use subscription::Consumer;
pub use tenant::{Tenant, TenantLimits};
pub use tenant_removal::TenantRemoval;
pub use token::{NewToken, Shown, Token, TokenRole, TokenSecret};
pub use version::{HandlerRow, NewVersion, Version};
