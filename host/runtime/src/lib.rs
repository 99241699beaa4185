//! Components in wasmtime: compiling and checking them, running them with limits, and the
//! host's side of every interface they may import.
//!
//! A message is handled by a fresh instance in a store of its own. No state of a message
//! or a tenant reaches the next one, and a trap takes nothing with it.

mod bindings;
mod cache;
mod compiler;
mod component;
mod encode;
mod ending;
mod engine;
mod error;
mod handler;
mod host;
mod inspect;
mod limiter;
mod load;
mod probe;
mod record;
mod state;
mod text;

pub use compiler::{COMPILE_SUBCOMMAND, Compiler, compile_stdin};
pub use component::LoadedComponent;
pub use encode::{WIT, encode_component};
pub use engine::{RuntimeConfig, executor};
pub use error::{EncodeError, LoadError};
pub use handler::{ComponentHandler, HandlerSettings};
pub use host::sql;
pub use inspect::{Allowance, CustomSection, Inspected, Report, Tool, inspect};
pub use load::Runtime;
pub use oncebox_model::Problem;
pub use record::{LineRecord, Recorder, RunRecord, StatementRecord};

#[cfg(test)]
mod tests;
