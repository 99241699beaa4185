//! WebAssembly components in wasmtime. The crate checks and compiles them, runs them within limits,
//! and implements the host's side of every interface that they may import.
//!
//! A fresh instance in a store of its own handles each message. No state of a message or a tenant
//! reaches the next one, and a trap damages nothing else.

mod bindings;
mod cache;
mod compiler;
mod component;
mod encode;
mod engine;
mod error;
mod failure;
mod handler;
mod host;
mod inspect;
mod limiter;
mod load;
mod probe;
mod record;
mod settings;
mod state;
mod text;

pub use compiler::{COMPILE_SUBCOMMAND, Compiler, compile_stdin};
pub use component::LoadedComponent;
pub use encode::{WIT, encode_component};
pub use engine::{RuntimeConfig, executor};
pub use error::{EncodeError, LoadError};
pub use handler::ComponentHandler;
pub use host::sql;
pub use inspect::{Allowance, ComponentReport, CustomSection, Inspected, Tool, inspect};
pub use load::WasmRuntime;
pub use oncebox_model::Problem;
pub use record::{CancelRecord, LineRecord, OutgoingRecord, Recorder, RunRecord, StatementRecord};
pub use settings::HandlerSettings;

#[cfg(test)]
mod tests;
