//! `log`: lines that a guest adds to the handler's log.

pub(crate) mod lines;

use crate::{
    bindings::oncebox::handler::log::{self, Level},
    state::StoreState,
};

impl log::Host for StoreState {
    async fn log(&mut self, level: Level, message: String) -> wasmtime::Result<()> {
        self.log.line(level, &message);
        Ok(())
    }
}
