//! All actions of the console, each with its request to the API and its command.

mod consumer;
mod job;
mod tenant;
mod words;

pub(crate) use consumer::*;
pub(crate) use job::*;
pub(crate) use tenant::*;

use oncebox_api::wire::Role;

use crate::{action::Action, refusal::Refusal};

/// What is known of an action from outside: for tests that try all of them.
#[derive(Debug, Clone, Copy)]
pub struct ActionInfo {
    /// Name in URLs, behind `/console/actions/`.
    pub name: &'static str,
    /// Fields of its form.
    pub fields: &'static [&'static str],
}

/// All actions, as tests see them.
pub static ACTIONS: std::sync::LazyLock<Vec<ActionInfo>> = std::sync::LazyLock::new(|| {
    ALL.iter().map(|action| ActionInfo { name: action.name, fields: action.fields }).collect()
});

/// An action of operators on what a path names: most differ in no more.
pub(super) const OPERATORS: Action = Action {
    name: "",
    label: "",
    role: Role::Operator,
    is_platform: false,
    fields: &["tenant", "consumer"],
    call: |_| Err(Refusal::invalid("no action")),
    command: |_| Vec::new(),
};

/// All actions.
pub(crate) const ALL: [Action; 24] = [
    CONSUMER_PAUSE,
    CONSUMER_RESUME,
    CONSUMER_DRAIN,
    SEEK_CANCEL,
    ROLLBACK,
    CANARY_GROW,
    CANARY_PROMOTE,
    DEPLOYMENT_END,
    DEPLOY,
    JOB_START,
    JOB_PAUSE,
    JOB_RESUME,
    JOB_CANCEL,
    REPLAY_PAUSE,
    REPLAY_RESUME,
    REPLAY_CANCEL,
    MESSAGE_EDIT,
    RETENTION_RUN,
    TENANT_SUSPEND,
    TENANT_RESUME,
    TENANT_ROTATE,
    TENANT_LIMITS,
    ENDPOINT_TEST,
    TOKEN_REVOKE,
];
