//! The API in this process, over the database.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use oncebox_api::{Limits, Mode, Principal};
use oncebox_control::Control;
use oncebox_runtime::{RuntimeConfig, WasmRuntime};
use oncebox_server::{
    Config,
    brokers::BrokerAccess,
    compile::{Compilations, Uploads},
};

use super::{Api, LocalApi};

/// Longest time for a request. The user waits for it at this terminal.
const PATIENCE: Duration = Duration::from_secs(3_600);
/// Largest body of a request, such as a migration, bytes.
const JSON_BYTES_MAX: usize = 64 << 20;

/// Returns the routes for a user who has the database and its key. Everything is allowed, in the
/// name of the user.
pub fn local_api(config: &Config, control: Control) -> Result<Api> {
    let component_bytes_max = config.runtime.component_bytes_max;
    let runtime = WasmRuntime::new(RuntimeConfig {
        instances_max: 1,
        component_bytes_max,
        cache_dir: config.runtime.cache_dir.clone(),
        compiler: Some(config.runtime.compiler()),
        ..RuntimeConfig::default()
    })?;
    let components = Compilations::new(control.clone(), runtime, 1);
    let limits = Limits {
        component_bytes_max,
        json_bytes_max: JSON_BYTES_MAX,
        request_timeout: PATIENCE,
        upload_timeout: PATIENCE,
        connections_max: config.database.connections_max,
        outgoing_days: config.retention.outgoing_days,
        ..Limits::default()
    };
    let principal = Principal::local(std::env::var("USER").unwrap_or_else(|_| "cli".to_owned()));
    let mut state = oncebox_api::Api::new(
        control.clone(),
        Arc::new(Uploads { components: components.clone() }),
        limits,
        Mode::Tokens,
    );
    // Most commands need no brokers. Those that do report what is missing.
    if let Ok(kafka) = BrokerAccess::of(config) {
        state = state.with_brokers(Arc::new(kafka));
    }
    let routes = oncebox_api::router(state);
    Ok(Api::Here(Box::new(LocalApi { routes, principal, components, control })))
}
