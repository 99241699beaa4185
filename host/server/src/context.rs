//! The parts of a host that all its consumers share.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use oncebox_control::Control;
use oncebox_inbox::{DuePoller, SessionSettings};
use oncebox_model::InboxError;
use oncebox_registry::Decoder;
use oncebox_relay::Relay;
use tokio::sync::{Notify, Semaphore};

use crate::{
    brokers::BrokerAccess,
    compile::Compilations,
    config::Config,
    consumer::{
        duplicates::Duplicates, horizon::Horizons, idle::IdleLimits, loader::Loader, starts::Starts,
    },
    http::Scrapes,
    jobs::JobNotes,
    outgoing::RelayAccess,
    tenants::{budgets::Budgets, replays::OwnReplays, sessions::TenantSessions},
};

/// Longest wait of a loop for one answer of the database.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Most consumers whose rows are read for a start at a time. Each read is a query of the host's
/// database.
const STARTS_MAX: usize = 16;
/// Most changes that are carried out at a time. Each holds connections of the host's login.
const CHANGES_MAX: usize = 2;

/// The parts of a host that all its consumers share.
pub(crate) struct HostContext {
    pub(crate) control: Control,
    pub(crate) loader: Loader,
    pub(crate) budgets: Arc<Budgets>,
    pub(crate) settings: SessionSettings,
    pub(crate) kafka: BrokerAccess,
    /// Decoder for consumers whose payloads are in the wire format of a schema registry.
    pub(crate) decoder: Option<Decoder>,
    pub(crate) owner: String,
    /// Watchers and limits for opening and closing consumers.
    pub(crate) idle_limits: Arc<IdleLimits>,
    /// Poller that notifies retry workers of due messages.
    pub(crate) due_poller: Arc<DuePoller>,
    pub(crate) sessions: TenantSessions,
    /// Replays of paused consumers in tenants' own databases.
    pub(crate) own_replays: OwnReplays,
    /// Notification of changed deployments and states, and of claims that were refused because of a
    /// change.
    pub(crate) look: Arc<Notify>,
    /// Databases in which jobs may wait.
    pub(crate) job_notes: Arc<JobNotes>,
    pub(crate) starts: Semaphore,
    pub(crate) changes: Semaphore,
    /// Marks of starts, which tell a host that comes back why the process before it ended.
    pub(crate) starting: Arc<Starts>,
    /// Duplicates that consumers refused, until they are reported.
    pub(crate) duplicates: Arc<Duplicates>,
    /// Whether this host's metrics were read, until that is reported.
    pub(crate) scrapes: Arc<Scrapes>,
    /// Relay of outgoing messages, for all databases.
    pub(crate) relay: Arc<Relay>,
    /// Checks that inboxes remember for longer than topics keep records.
    pub(crate) horizons: Arc<Horizons>,
    group_attempts: Mutex<HashMap<i32, u32>>,
}

impl HostContext {
    /// Creates the shared parts of a host from its configuration.
    pub(crate) fn new(
        config: &Config,
        control: Control,
        components: Compilations,
        kafka: BrokerAccess,
        decoder: Option<Decoder>,
        scrapes: Arc<Scrapes>,
    ) -> Self {
        let owner = owner();
        let loader = Loader::new(control.clone(), components);
        // The audit log names no user for actions of the host itself.
        let control = control.acting_as("oncebox");
        let due_poller = Arc::<DuePoller>::default();
        let access = RelayAccess::new(control.clone(), kafka.clone(), due_poller.clone());
        let relay = Relay::new(Arc::new(access), owner.clone());
        Self {
            starting: Starts::new(control.clone(), owner.clone()),
            control,
            loader,
            budgets: Arc::new(Budgets::of(config)),
            settings: config.session_settings(),
            kafka,
            decoder,
            owner,
            idle_limits: IdleLimits::new(
                Duration::from_millis(config.kafka.idle_after_ms),
                Duration::from_millis(config.database.leave_after_ms),
            ),
            due_poller,
            sessions: TenantSessions::default(),
            own_replays: OwnReplays::default(),
            look: Arc::default(),
            job_notes: Arc::default(),
            starts: Semaphore::new(STARTS_MAX),
            changes: Semaphore::new(CHANGES_MAX),
            duplicates: Arc::default(),
            scrapes,
            relay,
            horizons: Horizons::new(Duration::from_millis(config.kafka.horizon_check_ms)),
            group_attempts: Mutex::default(),
        }
    }

    /// Counts another attempt to delete a consumer's group, and returns the number of attempts.
    pub(crate) fn group_attempt(&self, consumer_id: i32) -> u32 {
        let mut attempts = self.group_attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let attempts = attempts.entry(consumer_id).or_default();
        *attempts += 1;
        *attempts
    }
}

/// Returns the database's answer, or an error after a limited wait. On a connection that a
/// middlebox has forgotten, no answer would ever come, and the loop would wait for it.
pub(crate) async fn answered<T>(
    asked: impl Future<Output = Result<T, InboxError>>,
) -> Result<T, InboxError> {
    let silent = |_| InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(ANSWER_MAX, asked).await.map_err(silent)?
}

/// Returns the name of this process in rows, leases and spans.
pub(crate) fn owner() -> String {
    format!("{}/{}", hostname(), std::process::id())
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "host".to_owned(), |name| name.trim().to_owned())
}
