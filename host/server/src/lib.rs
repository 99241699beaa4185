//! The host: configuration, wiring, supervision and the command line.

#[macro_use]
mod terminal;

mod announcements;
mod away;
mod brokers;
mod changes;
pub mod cli;
pub mod compilations;
mod config;
mod copies;
mod deletions;
mod demo;
mod dev;
mod duplicates;
mod fleet;
mod handlers;
mod http;
mod lint;
pub mod local;
mod logs;
mod messages;
mod open;
mod places;
mod presence;
mod report;
mod routes;
mod running;
mod scratch;
mod serve;
mod sessions;
mod starts;
mod supervisor;
mod tables;
mod tasks;
mod uploads;
mod verify;
mod wakeups;

pub use config::Config;
#[cfg(feature = "test-hooks")]
pub use demo::events as demo_events;
