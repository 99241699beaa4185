//! What the tests share: real servers, real hosts, handlers that do what they are told.

pub mod aging;
pub mod attacks;
pub mod cli;
pub mod collisions;
pub mod console;
pub mod coverage;
pub mod guests;
pub mod host;
pub mod http;
pub mod inbox;
pub mod kafka;
pub mod load;
pub mod lookup3;
mod maven;
pub mod pooler;
pub mod postgres;
pub mod program;
pub mod proxy;
pub mod registry;
pub mod s3;
pub mod services;
pub mod telemetry;
pub mod temp_dir;
pub mod wait;
