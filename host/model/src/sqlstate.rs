//! SQLSTATEs, the five-character codes of errors: those of PostgreSQL that the host acts on, and
//! those that the schema's functions raise.
//!
//! Two sets name contention. [`is_contention`] judges a statement of a handler or of the host in an
//! open transaction: the transaction is given up, and run again later.
//! [`is_of_another_transaction`] judges a statement of the inbox: the message is in flight
//! elsewhere. A full lock table is in the first set alone, because no other transaction then holds
//! the message. The claim answers a full lock table with a smaller batch, and its error counts as
//! an outage like all exhausted resources.

/// A check constraint is violated. Without a constraint's name, a time partition is missing.
pub const CHECK_VIOLATION: &str = "23514";
/// A database exists already.
pub const DUPLICATE_DATABASE: &str = "42P04";
/// A trigger or another object of a table exists already.
pub const DUPLICATE_OBJECT: &str = "42710";
/// A transaction was ended because it waited in a circle with others.
pub const DEADLOCK_DETECTED: &str = "40P01";
/// The result of a prepared statement has changed, or a feature is missing.
pub const FEATURE_NOT_SUPPORTED: &str = "0A000";
/// The role lacks a privilege, or does not own an object.
pub const INSUFFICIENT_PRIVILEGE: &str = "42501";
/// An internal error, such as of a cache whose object was dropped meanwhile.
pub const INTERNAL_ERROR: &str = "XX000";
/// A function cannot be replaced, because its result or the names of its parameters differ.
pub const INVALID_FUNCTION_DEFINITION: &str = "42P13";
/// The password of a role is wrong, or the role does not exist.
pub const INVALID_PASSWORD: &str = "28P01";
/// A lock was not available in time.
pub const LOCK_NOT_AVAILABLE: &str = "55P03";
/// A row that a completion is to write is not the transaction's any more. The schema's functions
/// raise it.
pub const NOT_OURS: &str = "OB003";
/// Memory is exhausted; in practice, the lock table is full.
pub const OUT_OF_MEMORY: &str = "53200";
/// A statement was cancelled, such as by its time limit.
pub const QUERY_CANCELED: &str = "57014";
/// The server only reads: it is a standby, about to become the primary or just no longer it.
pub const READ_ONLY_TRANSACTION: &str = "25006";
/// A transaction cannot be put in an order with others.
pub const SERIALIZATION_FAILURE: &str = "40001";
/// The host's deployments are older than those that a claim requires. The schema's functions raise
/// it.
pub const STALE_DEPLOYMENTS: &str = "OB005";
/// The server takes no more connections.
pub const TOO_MANY_CONNECTIONS: &str = "53300";
/// A database does not exist.
pub const UNDEFINED_DATABASE: &str = "3D000";
/// A prepared statement that its session has lost.
pub const UNDEFINED_PREPARED_STATEMENT: &str = "26000";
/// A table does not exist.
pub const UNDEFINED_TABLE: &str = "42P01";

/// Codes of a statement that another transaction was in the way of.
const OF_ANOTHER_TRANSACTION: [&str; 3] =
    [SERIALIZATION_FAILURE, DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE];

/// Returns whether a code means contention: a deadlock, a serialization failure, a lock timeout, or
/// a lock table that is full. The handler is not to blame, and another run may succeed.
pub fn is_contention(sqlstate: &str) -> bool {
    is_of_another_transaction(sqlstate) || sqlstate == OUT_OF_MEMORY
}

/// Returns whether a code means that another transaction was in the way: a deadlock, a
/// serialization failure or a lock timeout.
pub fn is_of_another_transaction(sqlstate: &str) -> bool {
    OF_ANOTHER_TRANSACTION.contains(&sqlstate)
}
