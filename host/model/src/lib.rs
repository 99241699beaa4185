//! Shared types of the host: messages, policies, handlers, outcomes, and the transaction that a
//! handler may use. The crate knows no broker, no WebAssembly and no HTTP, and writes no SQL.
//!
//! The modules stand in reading order.

// A record as a broker delivers it.
pub mod record;
// A decoded record.
pub mod message;
// The key under which a tenant's payloads are hashed.
pub mod payload_key;
// Headers as bytes of a row.
pub mod headers;
// From a record to a message.
pub mod identity;
// The parts of a message that are masked where it is shown.
pub mod masking;
// The instructions of a consumer.
pub mod policy;
// The number that messages share which must run in order.
pub mod ordering;
// Payloads that stand elsewhere, and that the host fetches.
pub mod reference;
// Versions of events, and ranges of them.
pub mod event_versions;
// The interfaces that a component may import.
pub mod contract;
// The interface between the inbox and the handlers.
pub mod handler;
// The interface between a Kafka consumer and the inbox.
pub mod inbox;
// The results of a run, and every way in which it can fail.
pub mod outcome;
// The open transaction, as a handler may use it.
pub mod tx;
// The messages that a handler sends after its commit.
pub mod outgoing;
// The resources that a transaction uses, added up while it runs.
pub mod meter;
// The open messages of an inbox, and the alerts about them.
pub mod backlog;
// Statuses of messages, their reasons, and states that hosts show.
pub mod status;
// A rate of requests.
pub mod token_bucket;
// The limits of a tenant.
pub mod tenant_limits;
// The database and login of a tenant's sessions.
pub mod session_target;
// Opening a connection, and the time limits on its answers.
pub mod connect;
// The codes of PostgreSQL's errors, by name.
pub mod sqlstate;
// The errors of the inbox, and the side that is to blame.
pub mod error;
// A fault of an upload or a policy: a code for programs and a text for readers.
pub mod problem;
// Spans of messages, for OpenTelemetry.
pub mod trace;
// Fail points, and defects for the test suite.
pub mod hooks;

pub use backlog::{Alert, Backlog, OpenMessages};
pub use error::{Blame, InboxError};
pub use handler::{SHADOW_DURATION_DEFAULT, Shadow};
pub use meter::{Meter, Usage};
pub use outcome::Disposition;
pub use outgoing::{Outbox, Output};
pub use payload_key::PayloadKey;
pub use problem::Problem;
pub use session_target::SessionTarget;
pub use status::{BreakerState, MessageStatus, Reason};
pub use tenant_limits::TenantLimits;
