//! `sql`: statements of a guest, one at a time, in the host's open transaction.
//!
//! A statement goes through four steps. The host checks its kind and size. PostgreSQL describes it.
//! The host encodes the parameters by the *described* types, and reads the rows as they arrive.

mod decode;
mod encode;
mod enqueue;
mod numeric;
mod run;
mod session;
mod span;
mod statement;
mod stop;
mod types;

pub use crate::bindings::oncebox::handler::sql::{
    Column, DatabaseError, Element, Error, Interval, OtherValue, ResultSet, Value,
};
pub(crate) use enqueue::Enqueued;
pub(crate) use run::control;
pub use run::{SqlAnswer, StatementMode, run_statement};
pub(crate) use session::SqlSession;
pub use stop::{ConnectionLost, SqlStop};
