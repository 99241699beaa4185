//! One host process: configuration, the reconciling of consumers, the pool that compiles
//! components, and the endpoints of health and metrics. It parses no arguments.
//!
//! `serve::serve_until` is a host from its first to its last moment. The modules are declared in the
//! order in which it uses them.

// Settings of the host.
pub mod config;
// Errors as text for operators.
pub mod error_text;
// Log lines.
pub mod logs;
// What goes to a collector.
pub mod telemetry;
// Health, readiness and metrics.
mod http;
// The wait for the database and the brokers at the start.
mod startup;
// One host, from its configuration to its drain.
pub mod serve;
// Access to the brokers.
pub mod brokers;
// Components that are checked and compiled.
pub mod compile;
// The parts that all consumers share.
mod context;
// The loop that brings consumers to the state of their rows.
mod reconcile;
// Decisions of that loop: the actions that rows demand.
mod plan;
// Tasks beside that loop.
mod tasks;
// Reports of this host to the database.
mod heartbeat;
// Notifications of changed rows.
mod notifications;
// One consumer as this host runs it.
pub mod consumer;
// The removal of messages that are past their retention.
mod retention;
// The relay's access to this host.
mod outgoing;
// Messages over HTTP.
mod ingress;
// Jobs: actions of operators on many messages.
mod jobs;
// The size of inboxes, as metrics.
mod storage;
// Sessions, databases and deletions of tenants.
mod tenants;

pub use config::Config;
