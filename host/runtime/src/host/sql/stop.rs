//! Reasons for which a statement has no result.

use crate::bindings::oncebox::handler::sql::Error;

/// The reason for which a statement has no result.
#[derive(Debug)]
pub enum SqlStop {
    /// An error that the guest gets.
    Guest(Error),
    /// A lost connection, which ends the guest.
    Host(ConnectionLost),
}

/// A connection that broke, or whose state forbids further use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection to the database was lost")]
pub struct ConnectionLost;

/// Returns the error of a cap, by its name in the policy.
pub(super) fn limit(name: &str, max: usize) -> Error {
    Error::Limit(format!("the limit of {max} (`{name}`) is reached"))
}
