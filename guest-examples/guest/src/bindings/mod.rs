//! The contract in Rust, as `wit-bindgen` writes it; see `bindgen/` beside this crate.

#![allow(
    missing_docs,
    clippy::all,
    clippy::unwrap_used,
    rustdoc::all,
    reason = "generated; what is public is documented in `wit/`"
)]

#[rustfmt::skip]
pub mod batch_handler;
#[cfg(all(feature = "emit", target_family = "wasm"))]
#[rustfmt::skip]
pub mod emitter;
#[cfg(target_family = "wasm")]
#[rustfmt::skip]
pub mod enqueuer;
#[rustfmt::skip]
pub mod handler;
#[cfg(all(feature = "trace", target_family = "wasm"))]
#[rustfmt::skip]
pub mod tracer;
