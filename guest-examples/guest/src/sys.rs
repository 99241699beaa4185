//! The host's side: its imports in a component, the test harness elsewhere.

#[cfg(all(feature = "test", not(target_family = "wasm")))]
pub(crate) use crate::test::sys::*;
#[cfg(not(any(feature = "test", target_family = "wasm")))]
pub(crate) use absent::*;
#[cfg(target_family = "wasm")]
pub(crate) use wasm::*;

#[cfg(target_family = "wasm")]
mod wasm {
    use crate::{
        Failure, Row, SqlError, Value,
        bindings::{
            enqueuer::oncebox::handler0_2_0::sql as enqueuer,
            handler::oncebox::handler::{log as host_log, sql},
        },
        log::Level,
    };

    pub(crate) use crate::bindings::handler::oncebox::handler::context;

    pub(crate) mod config {
        pub(crate) use crate::bindings::handler::oncebox::handler::config::{get, get_all as all};
    }

    pub(crate) fn log(level: Level, line: &str) {
        host_log::log(level, line);
    }

    pub(crate) fn execute(statement: &str, params: &[Value]) -> Result<u64, SqlError> {
        Ok(sql::execute(statement, params)?)
    }

    pub(crate) fn query(statement: &str, params: &[Value]) -> Result<Vec<Row>, SqlError> {
        let answer = sql::query(statement, params)?;
        let columns = answer
            .columns
            .into_iter()
            .map(|column| column.name)
            .collect();
        Ok(Row::all(columns, answer.rows))
    }

    pub(crate) fn enqueue(
        statement: &str,
        params: &[Value],
        expected: Option<(u64, Failure)>,
    ) -> Result<(), SqlError> {
        let expected = expected.map(|(rows, otherwise)| enqueuer::Expected {
            rows,
            otherwise: otherwise.into_wire(),
        });
        Ok(enqueuer::enqueue(statement, params, expected.as_ref())?)
    }

    pub(crate) struct Savepoint(sql::Savepoint);

    impl Savepoint {
        pub(crate) fn open() -> Result<Self, SqlError> {
            Ok(Self(sql::Savepoint::open()?))
        }

        pub(crate) fn rollback(&self) -> Result<(), SqlError> {
            Ok(self.0.rollback()?)
        }

        pub(crate) fn release(&self) -> Result<(), SqlError> {
            Ok(self.0.release()?)
        }
    }

    #[cfg(feature = "emit")]
    pub(crate) use outgoing::{cancel, emit};

    #[cfg(feature = "emit")]
    mod outgoing {
        use crate::{
            bindings::emitter::oncebox::handler0_2_0::emit as host,
            emit::{Due, EmitError, Outgoing},
        };

        pub(crate) fn emit(outgoing: Outgoing) -> Result<String, EmitError> {
            let message = host::Outgoing {
                event_type: outgoing.event_type,
                content_type: outgoing.content_type,
                headers: outgoing.headers,
                payload: outgoing.payload.map_err(EmitError::Refused)?,
            };
            let options = host::Options {
                key: outgoing.key,
                due: match outgoing.due {
                    Due::Now => host::Due::Now,
                    // What does not fit is too far ahead for the host in any case.
                    Due::After(delay) => {
                        host::Due::After(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX))
                    }
                    Due::At(ms) => host::Due::At(ms),
                },
                cancel_token: outgoing.cancel_token,
                cause: outgoing.cause,
            };
            Ok(host::emit(&outgoing.destination, &message, &options)?)
        }

        pub(crate) fn cancel(token: &str) -> Result<bool, EmitError> {
            Ok(host::cancel(token)?)
        }

        impl From<host::Error> for EmitError {
            fn from(error: host::Error) -> Self {
                match error {
                    host::Error::Refused(text) => Self::Refused(text),
                    host::Error::Limit(text) => Self::Limit(text),
                    host::Error::Database(text) => Self::Database(text),
                }
            }
        }
    }

    impl From<sql::Error> for SqlError {
        fn from(error: sql::Error) -> Self {
            match error {
                sql::Error::Database(error) => Self::Database(error),
                sql::Error::Refused(text) => Self::Refused(text),
                sql::Error::Unsupported(text) => Self::Unsupported(text),
                sql::Error::Limit(text) => Self::Limit(text),
            }
        }
    }
}

/// A native build without the harness: it can be checked, and has nothing to run on.
#[cfg(not(any(feature = "test", target_family = "wasm")))]
mod absent {
    use crate::{Failure, Row, SqlError, Value, log::Level};

    const NO_HOST: &str = "there is no host here; enable the feature `test` of `oncebox-guest` and run the handler through `oncebox_guest::test::Database`";

    fn refused<T>() -> Result<T, SqlError> {
        Err(SqlError::Refused(NO_HOST.to_owned()))
    }

    #[cfg(feature = "emit")]
    pub(crate) fn emit(_: crate::emit::Outgoing) -> Result<String, crate::emit::EmitError> {
        Err(crate::emit::EmitError::Refused(NO_HOST.to_owned()))
    }

    #[cfg(feature = "emit")]
    pub(crate) fn cancel(_: &str) -> Result<bool, crate::emit::EmitError> {
        Err(crate::emit::EmitError::Refused(NO_HOST.to_owned()))
    }

    pub(crate) fn execute(_: &str, _: &[Value]) -> Result<u64, SqlError> {
        refused()
    }

    pub(crate) fn query(_: &str, _: &[Value]) -> Result<Vec<Row>, SqlError> {
        refused()
    }

    pub(crate) fn enqueue(_: &str, _: &[Value], _: Option<(u64, Failure)>) -> Result<(), SqlError> {
        refused()
    }

    pub(crate) fn log(level: Level, line: &str) {
        eprintln!("{level:?}: {line}");
    }

    pub(crate) struct Savepoint;

    impl Savepoint {
        pub(crate) fn open() -> Result<Self, SqlError> {
            refused()
        }

        pub(crate) fn rollback(&self) -> Result<(), SqlError> {
            refused()
        }

        pub(crate) fn release(&self) -> Result<(), SqlError> {
            refused()
        }
    }

    pub(crate) mod config {
        pub(crate) fn get(_: &str) -> Option<String> {
            None
        }

        pub(crate) fn all() -> Vec<(String, String)> {
            Vec::new()
        }
    }

    pub(crate) mod context {
        use crate::DeliveryKind;

        pub(crate) fn tenant() -> String {
            String::new()
        }

        pub(crate) fn consumer() -> String {
            String::new()
        }

        pub(crate) fn topic() -> String {
            String::new()
        }

        pub(crate) fn partition() -> i32 {
            0
        }

        pub(crate) fn offset() -> i64 {
            0
        }

        pub(crate) fn attempt() -> u32 {
            1
        }

        pub(crate) fn delivery() -> DeliveryKind {
            DeliveryKind::Live
        }

        pub(crate) fn event_version() -> Option<String> {
            None
        }

        pub(crate) fn trace_parent() -> Option<String> {
            None
        }

        pub(crate) fn deadline_left_ms() -> u64 {
            0
        }
    }
}
