//! The host: configuration, wiring, supervision and the command line.

pub mod cli;
mod config;
mod demo;
mod dev;
mod handlers;
mod http;
#[allow(dead_code, reason = "`verify` asks for it next")]
mod lint;
pub mod local;
mod logs;
mod messages;
mod report;
mod scratch;
mod serve;
mod supervisor;
mod tables;

pub use config::Config;
