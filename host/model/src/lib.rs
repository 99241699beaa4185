//! What everyone speaks of: messages, policies, handlers, outcomes, and the transaction that a
//! handler may use. Knows no broker, no WebAssembly and no HTTP, and writes no SQL.
//!
//! The modules stand in reading order.

// A record as a broker has it.
pub mod record;
// A record that was understood.
pub mod message;
// Headers as bytes of a row.
pub mod headers;
// From a record to a message.
pub mod identity;
// What a consumer is told to do.
pub mod policy;
// Versions of events, and ranges of them.
pub mod event_versions;
// The seam between the inbox and what does the work.
pub mod handler;
// What becomes of a message that ran, and every way in which a run can fail.
pub mod outcome;
// The open transaction, as a handler may use it.
pub mod tx;
// What a transaction uses, added up while it runs.
pub mod meter;
// What is open in an inbox, and whether that is too much.
pub mod backlog;
// States that hosts show.
pub mod status;
// What a tenant may have.
pub mod tenant_limits;
// Where the sessions of a tenant lead to.
pub mod session_target;
// How a connection begins, and how long its answers are waited for.
pub mod connect;
// What can go wrong, and whose fault it is.
pub mod error;
// What is wrong with an upload or a policy, for programs and people.
pub mod problem;
// Fail points, and defects for the test suite.
pub mod hooks;

pub use backlog::{Alert, Backlog, Open};
pub use error::{Blame, InboxError};
pub use handler::{SHADOW_DURATION_DEFAULT, Shadow};
pub use identity::collapses;
pub use meter::{Meter, Usage};
pub use outcome::Disposition;
pub use problem::Problem;
pub use session_target::SessionTarget;
pub use status::BreakerState;
pub use tenant_limits::TenantLimits;
