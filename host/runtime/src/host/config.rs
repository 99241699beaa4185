//! `config`: settings of the deployment.

use crate::{bindings::oncebox::handler::config, state::StoreState};

impl config::Host for StoreState {
    async fn get(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        Ok(self.config.iter().find(|(name, _)| *name == key).map(|(_, value)| value.clone()))
    }

    async fn get_all(&mut self) -> wasmtime::Result<Vec<(String, String)>> {
        Ok(self.config.to_vec())
    }
}
