//! `sql`: one statement at a time, in the host's open transaction.
//!
//! A statement goes through four steps: its kind and size are checked; PostgreSQL describes
//! it; the parameters are encoded by the *described* types; its rows are read as they come.

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
pub use run::{Answer, ConnectionLost, Mode, Stopped, run_statement};
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
    ) -> wasmtime::Result<Result<Answer, Error>> {
        if let Some(recording) = &mut self.recording {
            recording.sent(mode, statement, params);
        }
        let result = match self.session.admit(statement, &self.limits) {
            Ok(()) => match self.tx() {
                Ok(tx) => run_statement(&tx, &self.limits, mode, statement, params).await,
                Err(stopped) => Err(stopped),
            },
            Err(error) => Err(Stopped::Guest(error)),
        };
        hooks::point("runtime:sql:after");
        if let Some(recording) = &mut self.recording {
            recording.answered(&result).await;
        }
        self.session.answer(result)
    }
}
