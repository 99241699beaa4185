//! The host: configuration, wiring, supervision and the command line.

pub mod cli;
mod config;
mod demo;
mod dev;
mod handlers;
mod http;
pub mod local;
mod logs;
#[allow(dead_code, reason = "the commands that read message files come next")]
mod messages;
mod report;
mod serve;
mod supervisor;

pub use config::Config;
