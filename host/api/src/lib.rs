//! The HTTP API: all operations of operators and tenants, over the functions of `oncebox-control`.
//! Routes, wire types and document come from one place each. Requests are authorized by the
//! document.

mod archive;
mod audit;
mod auth;
mod brokers;
mod changes;
mod components;
mod connections;
mod consumer_changes;
mod consumers;
mod databases;
mod deployments;
mod doctor;
mod edit;
mod endpoints;
mod erase;
mod error;
mod export;
mod extract;
mod handlers;
mod horizon;
mod hosts;
mod inbox;
mod ingress;
mod jobs;
mod lag;
pub mod link;
pub mod listen;
mod masking;
mod migrations;
mod openapi;
mod origin;
mod outgoing;
mod readiness;
mod replays;
mod request;
mod retention;
mod seek;
pub mod session;
mod shadows;
mod shared_answers;
mod storage;
mod stores;
mod tenant_changes;
mod tenant_moves;
mod tenants;
mod tokens;
mod unmask;
mod upload;
mod verifications;
mod versions;
mod whoami;
pub mod wire;

pub use auth::Principal;
pub use brokers::{
    Asking, AskingRedelivery, BrokerError, Brokers, GroupPosition, SeekTo, SeekToOffset,
};
pub use components::{Checked, Checking, Components, Unchecked};
pub use error::{ApiError, Code, ProblemBody, ProblemDetails};
pub use openapi::document;
pub use request::Refresh;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{Router, http::StatusCode, middleware};
use oncebox_control::Control;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// The callers that the API answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Callers with a valid token.
    Tokens,
    /// All programs of this machine, without a token; for `oncebox dev`, on a loopback address.
    Open,
}

/// Bounds of requests.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest JSON body, bytes.
    pub json_bytes_max: usize,
    /// Largest upload, bytes.
    pub component_bytes_max: usize,
    /// Longest duration of a request.
    pub request_timeout: Duration,
    /// Longest duration of an upload.
    pub upload_timeout: Duration,
    /// Longest pause within an upload.
    pub idle_timeout: Duration,
    /// Largest number of uploads in memory at a time.
    pub uploads_max: usize,
    /// Database connections that a host opens at most, for all tenants together. `doctor` checks
    /// that the server allows them.
    pub connections_max: usize,
    /// Days for which settled outgoing messages are kept, in a removal that an operator begins.
    pub outgoing_days: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            json_bytes_max: 1 << 20,
            component_bytes_max: 64 << 20,
            request_timeout: Duration::from_secs(30),
            upload_timeout: Duration::from_secs(300),
            idle_timeout: Duration::from_secs(15),
            uploads_max: 2,
            connections_max: 32,
            outgoing_days: 7,
        }
    }
}

/// The state that all routes share.
#[derive(Clone)]
pub struct Api(Arc<Shared>);

struct Shared {
    control: Control,
    components: Arc<dyn Components>,
    brokers: OnceLock<Arc<dyn Brokers>>,
    limits: Limits,
    mode: Mode,
    uploads: Semaphore,
    retention_runs: retention::RetentionRuns,
    storage_reports: storage::StorageReports,
    doctor_reports: doctor::DoctorReports,
    inbox_scans: readiness::scans::InboxScans,
    lag_answers: lag::LagAnswers,
    database_checks: databases::DatabaseChecks,
    tasks: TaskTracker,
}

impl Api {
    /// Creates the API over a database.
    pub fn new(
        control: Control,
        components: Arc<dyn Components>,
        limits: Limits,
        mode: Mode,
    ) -> Self {
        let uploads = Semaphore::new(limits.uploads_max);
        Self(Arc::new(Shared {
            control,
            components,
            brokers: OnceLock::new(),
            limits,
            mode,
            uploads,
            retention_runs: retention::RetentionRuns::default(),
            storage_reports: storage::reports(),
            doctor_reports: doctor::reports(),
            inbox_scans: readiness::scans::scans(),
            lag_answers: lag::answers(),
            database_checks: databases::checks(),
            tasks: TaskTracker::new(),
        }))
    }

    /// Adds the brokers, in a process that can reach them.
    #[must_use]
    pub fn with_brokers(self, brokers: Arc<dyn Brokers>) -> Self {
        let _ = self.0.brokers.set(brokers); // earlier brokers stay
        self
    }

    /// Waits for the tasks of all requests, also of those whose clients are gone.
    pub async fn finish(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    pub(crate) fn control(&self) -> &Control {
        &self.0.control
    }

    pub(crate) fn components(&self) -> &dyn Components {
        &*self.0.components
    }

    pub(crate) fn brokers(&self) -> Option<&dyn Brokers> {
        self.0.brokers.get().map(|brokers| &**brokers)
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// Returns the callers that the API answers.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// Returns the largest upload of a component, bytes.
    pub fn component_bytes_max(&self) -> usize {
        self.0.limits.component_bytes_max
    }

    pub(crate) fn uploads(&self) -> &Semaphore {
        &self.0.uploads
    }

    pub(crate) fn retention_runs(&self) -> &retention::RetentionRuns {
        &self.0.retention_runs
    }

    pub(crate) fn database_checks(&self) -> &databases::DatabaseChecks {
        &self.0.database_checks
    }

    pub(crate) fn storage_reports(&self) -> &storage::StorageReports {
        &self.0.storage_reports
    }

    pub(crate) fn doctor_reports(&self) -> &doctor::DoctorReports {
        &self.0.doctor_reports
    }

    pub(crate) fn inbox_scans(&self) -> &readiness::scans::InboxScans {
        &self.0.inbox_scans
    }

    pub(crate) fn lag_answers(&self) -> &lag::LagAnswers {
        &self.0.lag_answers
    }

    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.0.tasks
    }
}

/// Returns the API as a service. A caller in this process uses tower's `oneshot`, with a
/// [`Principal`] among the request's extensions.
pub fn router(api: Api) -> Router {
    let (routes, document) = openapi::routes().split_for_parts();
    let gate = auth::Gate { api: api.clone(), rules: Arc::new(auth::Rules::of(&document)) };
    routes
        // The gate refuses a path without an entry before it comes here. A fallback of its own keeps
        // these layers where the router is merged with another one.
        .fallback(async || StatusCode::NOT_FOUND)
        .with_state(api.clone())
        .layer(middleware::from_fn_with_state(gate, auth::gate))
        .layer(middleware::from_fn_with_state(api, request::around))
}
