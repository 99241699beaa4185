//! The host: configuration, wiring, supervision and the command line.

pub mod cli;
mod config;
mod demo;
mod dev;
mod handlers;
mod http;
pub mod local;
mod logs;
mod report;
mod serve;
mod supervisor;

pub use config::Config;
