//! The schemas of a schema registry.

mod http;
mod registry;

pub use http::{HttpRegistry, HttpRegistryOptions};
pub use registry::{Format, Lookup, RegisteredSchema, RegistryError, SchemaRegistry};
