//! Spans of a handler's own, in the trace of its message.
//!
//! This module needs the feature `trace` of this crate. A component that calls it imports
//! `oncebox:handler/trace`, for which its deployment needs no grant. Where the host does not trace
//! the message, and in tests, the calls do nothing.
//!
//! ```no_run
//! use oncebox_guest::{Result, execute, handler, params, trace::Span};
//!
//! #[derive(serde::Deserialize)]
//! struct Order {
//!     order_id: String,
//!     currency: String,
//! }
//!
//! # fn main() {}
//! #[handler]
//! fn place(order: Order) -> Result<()> {
//!     let span = Span::begin("price");
//!     span.set("currency", &order.currency);
//!     execute("UPDATE orders SET price = 7 WHERE id = $1", params![order.order_id])?;
//!     drop(span); // else it ends with the block
//!     Ok(())
//! }
//! ```
//!
//! What a span holds leaves the database for a collector, and no erasure reaches it there: no
//! personal data belongs into it.

#[cfg(target_family = "wasm")]
use crate::bindings::tracer::oncebox::handler0_2_0::trace::Span as HostSpan;

/// A part of the run. Its parent is the youngest span that is open, or else the run. It ends where
/// it is dropped; one that is open at the end of the run counts as interrupted, unless it failed.
///
/// The host keeps as many spans of a run as its operator allows, and 4 KiB of their names, keys,
/// values and classes of errors; it leaves out what comes after that.
#[must_use = "a span that is dropped at once has no length"]
pub struct Span(HostSpan);

impl Span {
    /// Begins a span. A name says what is done, and not for whom; the host cuts it to 100 bytes.
    pub fn begin(name: &str) -> Self {
        Self(HostSpan::new(name))
    }

    /// Sets an attribute, which is shown as `handler.` and its key. The host cuts the key to 100
    /// bytes and the value to 1 KiB.
    pub fn set(&self, key: &str, value: &str) {
        self.0.set_attribute(key, value);
    }

    /// Marks the span as failed, by the class of the error. The last call counts.
    pub fn fail(&self, error_type: &str) {
        self.0.fail(error_type);
    }
}

/// What stands for a span where there is no host.
#[cfg(not(target_family = "wasm"))]
struct HostSpan;

#[cfg(not(target_family = "wasm"))]
impl HostSpan {
    fn new(_: &str) -> Self {
        Self
    }

    fn set_attribute(&self, _: &str, _: &str) {}

    fn fail(&self, _: &str) {}
}
