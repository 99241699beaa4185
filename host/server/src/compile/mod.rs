//! A host's components: checked, compiled by a few workers, kept while they are of use.

// Uploads of the API.
mod uploads;
// The queue and its workers.
mod pool;
// One compilation.
mod job;
// Components that are kept in memory.
mod cache;

pub use job::CompileFailure;
pub use pool::{Busy, Compilations};
pub use uploads::Uploads;
