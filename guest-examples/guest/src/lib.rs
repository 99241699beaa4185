#![doc = include_str!("../README.md")]

extern crate self as oncebox_guest;

mod batch;
mod bindings;
pub mod config;
mod context;
#[cfg(feature = "emit")]
pub mod emit;
mod failure;
mod handler;
#[cfg(all(feature = "arena", target_family = "wasm"))]
mod heap;
mod ids;
pub mod log;
mod message;
pub mod once;
pub mod saga;
mod sql;
mod sys;
#[cfg(all(feature = "test", not(target_family = "wasm")))]
pub mod test;
#[cfg(feature = "trace")]
pub mod trace;

pub use batch::{Batch, BatchHandler, Item};
pub use bindings::handler::oncebox::handler::{
    context::DeliveryKind,
    sql::{DatabaseError, Element, Interval, Value},
    types::Message,
};
pub use context::Context;
pub use failure::{Failure, OrFail, Result, retry_after};
pub use handler::{FromMessage, Handler, IntoAnswer};
pub use ids::derive_id;
pub use oncebox_guest_macros::{batch_handler, handler};
pub use serde_json::json;
pub use sql::{
    Date, Json, Numeric, Row, SqlError, Time, Timestamp, Timestamptz, ToElement, ToValue, enqueue,
    enqueue_expecting, execute, query, query_as, query_one, query_optional, savepoint,
};

/// What the attributes expand to; not for handlers.
#[doc(hidden)]
pub mod __private {
    pub use crate::batch::handle_batch;
    pub use crate::bindings::batch_handler::{self, __export_batch_handler};
    pub use crate::bindings::handler::{self, __export_handler, oncebox::handler::types};
    pub use crate::handler::handle;

    /// The trait behind the second world's export.
    pub use batch_handler::exports::oncebox::handler::incoming_batch_handler::Guest as BatchGuest;
    /// The trait behind the first world's export.
    pub use handler::exports::oncebox::handler::incoming_handler::Guest;
}
