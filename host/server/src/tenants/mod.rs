//! The host's side of tenants.

// Their sessions, shared by their consumers.
pub(crate) mod sessions;
// Databases of their own.
pub(crate) mod databases;
// Deletions that any host carries on.
pub(crate) mod deletion;
