//! Tests against librdkafka's mock cluster, with an inbox that only counts.

mod flow;
mod group;
mod pauses;
pub(crate) mod support;
mod watcher;
