//! The functions `query` and `execute`.

use oncebox_model::hooks;

use super::{
    run::{SqlAnswer, StatementMode, run_statement},
    stop::SqlStop,
};
use crate::{
    bindings::oncebox::handler::sql::{self, Error, ResultSet, Value},
    state::StoreState,
};

impl sql::Host for StoreState {
    async fn query(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<ResultSet, Error>> {
        let answer = self.run(StatementMode::Query, &statement, &params).await?;
        Ok(answer.map(|answer| ResultSet { columns: answer.columns, rows: answer.rows }))
    }

    async fn execute(
        &mut self,
        statement: String,
        params: Vec<Value>,
    ) -> wasmtime::Result<Result<u64, Error>> {
        let answer = self.run(StatementMode::Execute, &statement, &params).await?;
        Ok(answer.map(|answer| answer.rows_affected))
    }
}

impl StoreState {
    async fn run(
        &mut self,
        mode: StatementMode,
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
