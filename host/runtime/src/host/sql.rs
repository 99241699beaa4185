//! `sql`: statements of a guest, one at a time, in the host's open transaction.
//!
//! A statement goes through four steps. The host checks its kind and size. PostgreSQL describes it.
//! The host encodes the parameters by the *described* types, and reads the rows as they arrive.

mod decode;
mod encode;
mod numeric;
mod run;
mod session;
mod statement;
mod types;

pub use crate::bindings::oncebox::handler::sql::{
    Column, DatabaseError, Element, Error, Interval, OtherValue, ResultSet, Value,
};
pub(crate) use run::control;
pub use run::{ConnectionLost, Mode, SqlAnswer, SqlStop, run_statement};
pub(crate) use session::Session;

use oncebox_model::hooks;

use crate::{bindings::oncebox::handler::sql, state::State};

impl sql::Host for State {
    async fn query(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<ResultSet, Error>> {
        let answer = self.run(Mode::Query, &statement, &params).await?;
        Ok(answer.map(|answer| ResultSet { columns: answer.columns, rows: answer.rows }))
    }

    async fn execute(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<u64, Error>> {
        let answer = self.run(Mode::Execute, &statement, &params).await?;
        Ok(answer.map(|answer| answer.rows_affected))
    }
}

impl State {
    async fn run(
        &mut self,
        mode: Mode,
        statement: &str,
        params: &[Value],
    ) -> wasmtime::Result<Result<SqlAnswer, Error>> {
        if let Some(recording) = &mut self.recording {
            recording.sent(mode, statement, params);
        }
        let result = match self.session.admit(statement, &self.limits) {
            Ok(()) => match self.tx() {
                Ok(tx) => run_statement(&tx, &self.limits, mode, statement, params).await,
                Err(stop) => Err(stop),
            },
            Err(error) => Err(SqlStop::Guest(error)),
        };
        hooks::point("runtime:sql:after");
        if let Some(recording) = &mut self.recording {
            recording.answered(&result).await;
        }
        self.session.answer(result)
    }
}
