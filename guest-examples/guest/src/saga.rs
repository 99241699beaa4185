//! Processes of several steps: a row with the state of each, found by its correlation key.
//!
//! A process that takes several messages, a saga, is a row of your own table. Each step is the
//! effect of one message; what a step asks of others are outgoing messages, and their replies and
//! timers come back as messages. A reply may come late, again, or after a timer has ended the wait.
//! So a step moves the row only from the state that its message answers to, and does everything
//! else only if the row has moved.
//!
//! ```no_run
//! use oncebox_guest::{OrFail, Result, execute, params, saga::Saga};
//!
//! const ORDERS: Saga = Saga::new("orders", "order_id", "state");
//!
//! #[derive(serde::Deserialize)]
//! struct Order {
//!     sku: String,
//!     units: i32,
//! }
//!
//! fn refuse(order_id: &str) -> Result<()> {
//!     let order: Order = ORDERS.load(order_id)?.or_reject("no such order")?;
//!     if ORDERS.advance(order_id, "charging", "refused")?.is_moved() {
//!         let release = "UPDATE stock SET units = units + $2 WHERE sku = $1";
//!         execute(release, params![order.sku, order.units])?;
//!     }
//!     Ok(())
//! }
//! ```

use serde::de::DeserializeOwned;

use crate::{
    SqlError, ToValue,
    once::{Transition, transition},
    params, query_optional,
};

/// Longest name that PostgreSQL keeps whole.
const NAME_BYTES_MAX: usize = 63;

/// A table with a row for each process: its correlation key, its state, and what else you keep.
///
/// The key is unique: a statement that finds two rows fails the message. The state is text, or an
/// enum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saga {
    table: &'static str,
    key: &'static str,
    state: &'static str,
}

impl Saga {
    /// The processes of a table, with its columns for the correlation key and the state.
    ///
    /// Names are of lower-case letters, digits and `_`, as PostgreSQL has them without quotes.
    /// Make it a `const`: another name is then an error of the compiler.
    ///
    /// # Panics
    ///
    /// At a name of other characters, outside a `const`.
    pub const fn new(table: &'static str, key: &'static str, state: &'static str) -> Self {
        assert!(
            is_name(table) && is_name(key) && is_name(state),
            "the names of a saga's table and columns are of a-z, 0-9 and `_`, and no digit is first"
        );
        Self { table, key, state }
    }

    /// Reads the row of a process as [`query_as`](crate::query_as) reads rows; none where there is
    /// no such process. Other messages of the process wait for this one's commit.
    pub fn load<T: DeserializeOwned>(&self, key: impl ToValue) -> Result<Option<T>, SqlError> {
        let Self {
            table, key: column, ..
        } = self;
        let statement = format!("SELECT * FROM {table} WHERE {column} = $1 FOR UPDATE");
        query_optional(&statement, params![key])
    }

    /// Moves a process to its next state if it is in the expected one: compare and set.
    ///
    /// [`Transition::NotMoved`] is the answer to a reply or a timer that is late, comes again, or
    /// lost the race: nothing was written, and nothing else is to be done.
    pub fn advance(&self, key: impl ToValue, from: &str, to: &str) -> Result<Transition, SqlError> {
        let Self {
            table,
            key: column,
            state,
        } = self;
        let statement =
            format!("UPDATE {table} SET {state} = $3 WHERE {column} = $1 AND {state} = $2");
        transition(&statement, params![key, from, to])
    }
}

/// Whether a text is a name that needs no quotes.
const fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let is_letter = bytes[at].is_ascii_lowercase() || bytes[at] == b'_';
        if !is_letter && (at == 0 || !bytes[at].is_ascii_digit()) {
            return false;
        }
        at += 1;
    }
    at > 0 && at <= NAME_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_need_no_quotes() {
        let long = "a".repeat(NAME_BYTES_MAX);
        for name in ["orders", "_order_2", long.as_str()] {
            assert!(is_name(name), "{name}");
        }
        let too_long = "a".repeat(NAME_BYTES_MAX + 1);
        for name in [
            "",
            "2orders",
            "Orders",
            "orders; DROP TABLE orders",
            "a.b",
            "\"a\"",
            "é",
            &too_long,
        ] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    #[should_panic(expected = "the names of a saga's table and columns")]
    fn another_name_makes_no_saga() {
        let _ = Saga::new("orders", "order_id", "state = 'paid' --");
    }
}
