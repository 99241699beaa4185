//! What the tests share: real servers, real hosts, handlers that do what they are told.

pub mod attacks;
pub mod desk;
pub mod guests;
pub mod host;
pub mod inbox;
pub mod kafka;
pub mod load;
mod maven;
pub mod postgres;
pub mod program;
pub mod reached;
pub mod registry;
pub mod services;
