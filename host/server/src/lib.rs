//! The host: configuration, wiring, supervision and the command line.

pub mod cli;
mod config;
mod demo;
mod dev;
mod handlers;
mod http;
mod lint;
pub mod local;
mod logs;
mod messages;
mod report;
mod scratch;
mod serve;
mod supervisor;
mod tables;
mod verify;

pub use config::Config;
