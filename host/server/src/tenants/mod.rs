//! The host's side of tenants.

// Their sessions, shared by their consumers.
pub(crate) mod sessions;
// What those of one database server share.
pub(crate) mod budgets;
// Work on them, by database.
pub(crate) mod by_database;
// Databases outside the host's.
pub(crate) mod databases;
// Replays of paused consumers in those.
pub(crate) mod replays;
// Deletions that any host carries on.
pub(crate) mod deletion;
// Tenants that are being moved.
pub(crate) mod moves;
