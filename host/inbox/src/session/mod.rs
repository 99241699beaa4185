//! Sessions of a tenant: connections that log in as its guest role, and transactions on them.

// The host's bound on connections, of all tenants together.
mod budget;
// The connections of one tenant.
mod pool;
// Outages, restarts and silence of its database.
mod health;
// A transaction on one of them.
mod transaction;
// Backoff while a tenant's database is unavailable.
mod reconnect;

pub use budget::Budget;
pub(crate) use pool::SERVER_RUN;
pub use pool::{SessionSettings, Sessions};
pub use transaction::{CommitError, Transaction};
