//! Tools for authors of handlers: a host with services of its own, new projects, trials of a
//! handler, and the client of the API that they share with the command line.
//!
//! The modules are declared from the shared parts to the commands.

// Text that is safe for a terminal, and the macros that print it.
#[macro_use]
pub mod terminal;
// Tables and JSON.
pub mod output;
// The client of the API.
pub mod api;
// The choice of a pattern for an effect.
pub mod choose;
// A tenant's migrations as files.
pub mod migration;
// Policies as files.
pub mod policy_file;
// Uploads of components.
pub mod upload;
// Places of deployments.
pub mod slot;
// Tenants, consumers and deployments as a file says them.
pub mod apply;
// A private PostgreSQL and an embedded broker.
pub mod local;
// Messages as files.
pub mod messages;
// Files that the program holds compressed.
mod packed;
// `oncebox new`.
pub mod new_project;
// `oncebox dev`.
pub mod dev;
// `oncebox send`.
pub mod send;
// A database for one command.
pub mod scratch;
// Tables of a tenant, before and after.
mod tables;
// `oncebox test`.
pub mod test;
// Statements that break under repetition.
mod lint;
// `oncebox verify`.
pub mod verify;
// `oncebox demo`.
pub mod demo;

#[cfg(feature = "test-hooks")]
pub use demo::events as demo_events;
