//! stub
pub mod desk;
pub mod guests;
pub mod host;
pub mod inbox;
pub mod kafka;
pub mod load;
pub mod postgres;
pub mod program;
pub mod services;
