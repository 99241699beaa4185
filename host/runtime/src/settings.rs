//! Settings of a handler, and the form in which its runs share them.

use std::sync::Arc;

use oncebox_model::policy::Limits;

use crate::record::Recorder;

/// Settings of a component, which its deployment makes.
#[derive(Clone)]
pub struct HandlerSettings {
    /// Version that is recorded in the rows of completed messages.
    pub version: i32,
    /// Limits of one run.
    pub limits: Limits,
    /// Names and values that the `config` interface returns.
    pub config: Vec<(String, String)>,
    /// The tenant's key, from which `wasi:random` derives its stream. A secret.
    pub random_key: [u8; 32],
    /// Whether the component may emit outgoing messages: the grant `emit` of its deployment.
    pub may_emit: bool,
}

/// The settings in the form that all runs share.
pub(crate) struct Settings {
    pub(crate) version: i32,
    pub(crate) limits: Arc<Limits>,
    pub(crate) config: Arc<Vec<(String, String)>>,
    pub(crate) random_key: [u8; 32],
    pub(crate) may_emit: bool,
    /// Whether the engine counts fuel, so that every store needs some.
    pub(crate) counts_fuel: bool,
    /// Recorder of what runs do, for commands that show it.
    pub(crate) recorder: Option<Recorder>,
}

impl Settings {
    pub(crate) fn new(settings: HandlerSettings, counts_fuel: bool) -> Self {
        Self {
            version: settings.version,
            limits: Arc::new(settings.limits),
            config: Arc::new(settings.config),
            random_key: settings.random_key,
            may_emit: settings.may_emit,
            counts_fuel,
            recorder: None,
        }
    }
}
