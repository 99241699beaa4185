//! What stands in for the host's imports while a handler runs natively.

use super::session;
use crate::{Failure, Row, SqlError, Value, log::Level};

fn attempt<T>(work: impl FnOnce(&mut session::Run) -> Result<T, SqlError>) -> Result<T, SqlError> {
    session::with(|run| run.attempt(work)).unwrap_or_else(|| {
        Err(SqlError::Refused(
            "no handler runs here; run it through `oncebox_guest::test::Database`, whose own `query` and `execute` are for the test".to_owned(),
        ))
    })
}

pub(crate) fn execute(statement: &str, params: &[Value]) -> Result<u64, SqlError> {
    attempt(|run| run.execute(statement, params))
}

pub(crate) fn query(statement: &str, params: &[Value]) -> Result<Vec<Row>, SqlError> {
    attempt(|run| run.query(statement, params))
}

pub(crate) fn enqueue(
    statement: &str,
    params: &[Value],
    expected: Option<(u64, Failure)>,
) -> Result<(), SqlError> {
    attempt(|run| run.enqueue(statement, params, expected))
}

#[cfg(feature = "emit")]
pub(crate) use outgoing::{cancel, emit};

#[cfg(feature = "emit")]
mod outgoing {
    use super::attempt;
    use crate::{
        emit::{EmitError, Outgoing},
        test::outgoing::to_handler,
    };

    pub(crate) fn emit(outgoing: Outgoing) -> Result<String, EmitError> {
        attempt(|run| run.emit(outgoing)).map_err(to_handler)
    }

    pub(crate) fn cancel(token: &str) -> Result<bool, EmitError> {
        attempt(|run| run.cancel(token)).map_err(to_handler)
    }
}

pub(crate) fn log(level: Level, line: &str) {
    session::with(|run| run.lines.push((level, line.to_owned())));
}

pub(crate) struct Savepoint(u64);

impl Savepoint {
    pub(crate) fn open() -> Result<Self, SqlError> {
        attempt(session::Run::open_savepoint).map(Self)
    }

    pub(crate) fn rollback(&self) -> Result<(), SqlError> {
        attempt(|run| run.roll_back_to(self.0))
    }

    pub(crate) fn release(&self) -> Result<(), SqlError> {
        attempt(|run| run.release(self.0))
    }
}

pub(crate) mod config {
    use super::session;

    pub(crate) fn get(key: &str) -> Option<String> {
        session::with(|run| run.settings.get(key).cloned()).flatten()
    }

    pub(crate) fn all() -> Vec<(String, String)> {
        session::with(|run| run.settings.clone().into_iter().collect()).unwrap_or_default()
    }
}

pub(crate) mod context {
    use super::session;
    use crate::{DeliveryKind, test::Delivery};

    macro_rules! facts {
        ($($name:ident: $kind:ty = $value:expr),+ $(,)?) => {$(
            pub(crate) fn $name() -> $kind {
                let value: fn(&Delivery) -> $kind = $value;
                session::with(|run| value(&run.delivery)).unwrap_or_else(|| value(&Delivery::default()))
            }
        )+};
    }

    facts! {
        tenant: String = |it| it.tenant.clone(),
        consumer: String = |it| it.consumer.clone(),
        topic: String = |it| it.topic.clone(),
        partition: i32 = |it| it.partition,
        offset: i64 = |it| it.offset,
        attempt: u32 = |it| it.attempt,
        delivery: DeliveryKind = |it| it.kind,
        event_version: Option<String> = |it| it.event_version.clone(),
        trace_parent: Option<String> = |it| it.trace_parent.clone(),
        deadline_left_ms: u64 = |it| it.deadline_left.as_millis().try_into().unwrap_or(u64::MAX),
    }
}
