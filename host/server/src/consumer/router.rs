//! The live deployments of a consumer, loaded, and the choice of the one that takes a message.

use std::{
    cell::LazyCell,
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use oncebox_control::{Deployment, DeploymentRole, Outcomes, Retries, Slot};
use oncebox_model::{
    Disposition, SHADOW_DURATION_DEFAULT, Shadow, event_versions,
    handler::{Answer, BatchRun, Handler, Handlers, Run},
    message::Message,
    outcome::Failure,
    tx::Tx,
};
use semver::VersionReq;
use sha2::{Digest, Sha256};

/// A consumer's handlers at one generation.
pub struct Routes {
    generation: i64,
    /// Slots of one event type: those with a range first, each kind from the newest to the oldest.
    exact: HashMap<String, Vec<RouteEntry>>,
    /// Slots of many event types, the longest common prefix first. `*` has an empty prefix, so it
    /// is last.
    prefixes: Vec<(String, Vec<RouteEntry>)>,
    has_canary: bool,
}

/// The live deployments of a slot.
struct RouteEntry {
    versions: Option<VersionReq>,
    stable: Arc<RunnableDeployment>,
    canary: Option<Canary>,
    /// A candidate that is tried on messages that the stable version completed.
    shadow: Option<Arc<Shadow>>,
    /// Superseded versions, to which messages that failed on them return.
    pinned: HashMap<i32, Arc<RunnableDeployment>>,
}

/// A candidate with its share of the ordering keys.
struct Canary {
    percent: f64,
    deployed: Arc<RunnableDeployment>,
}

/// A deployment, ready to run.
pub struct RunnableDeployment {
    deployment_id: i64,
    retries: Retries,
    deadline: Duration,
    handler: Box<dyn Handler>,
    /// Counts of outcomes, where a canary is compared with the stable version.
    counts: Option<Arc<Counts>>,
    /// Whether a canary's guard judges it.
    is_judged: bool,
}

/// Completed and failed runs by deployment, since they were last taken.
#[derive(Default)]
pub struct Counts(Mutex<HashMap<i64, (i64, i64)>>);

impl Counts {
    fn add(&self, deployment_id: i64, completed: i64, failed: i64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(deployment_id).or_default();
        *count = (count.0 + completed, count.1 + failed);
    }

    /// Takes all counts, which start again at zero.
    pub fn take(&self) -> Vec<Outcomes> {
        let counts = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let outcome =
            |(deployment_id, (completed, failed))| Outcomes { deployment_id, completed, failed };
        counts.into_iter().map(outcome).collect()
    }

    /// Adds counts again that could not be written.
    pub fn put_back(&self, outcomes: &[Outcomes]) {
        for outcome in outcomes {
            self.add(outcome.deployment_id, outcome.completed, outcome.failed);
        }
    }
}

impl RunnableDeployment {
    /// Creates a deployment that can run.
    pub fn new(
        deployment: &Deployment,
        deadline: Duration,
        handler: Box<dyn Handler>,
        counts: Option<Arc<Counts>>,
    ) -> Arc<Self> {
        let is_judged = deployment.role == DeploymentRole::Canary && deployment.guard.is_some();
        Arc::new(Self {
            deployment_id: deployment.deployment_id,
            retries: deployment.retries,
            deadline,
            handler,
            counts,
            is_judged,
        })
    }
}

impl Handler for RunnableDeployment {
    fn version(&self) -> i32 {
        self.handler.version()
    }

    fn settled(&self, disposition: Disposition) {
        if let Some(counts) = &self.counts {
            let is_completed = disposition == Disposition::Completed;
            counts.add(self.deployment_id, is_completed.into(), (!is_completed).into());
        }
    }

    fn is_judged(&self) -> bool {
        self.is_judged
    }

    fn may_emit(&self) -> bool {
        self.handler.may_emit()
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.deadline)
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        self.handler.handle(tx, run)
    }

    fn takes_batches(&self) -> bool {
        self.handler.takes_batches()
    }

    fn handle_batch<'a>(
        &'a self,
        tx: &'a Tx,
        run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        self.handler.handle_batch(tx, run)
    }
}

impl Routes {
    /// Builds the routes of a generation from deployments and their loaded handlers. Live
    /// deployments come first, then those that messages may be pinned to.
    pub fn new(generation: i64, loaded: Vec<(Deployment, Arc<RunnableDeployment>)>) -> Self {
        let mut routes =
            Self { generation, exact: HashMap::new(), prefixes: Vec::new(), has_canary: false };
        let mut slots: HashMap<Slot, RouteEntry> = HashMap::new();
        let mut order = Vec::new();
        for (deployment, deployed) in
            loaded.iter().filter(|(d, _)| d.role == DeploymentRole::Stable && d.ended_at.is_none())
        {
            // A range was checked when it was deployed.
            let versions = deployment
                .slot
                .event_versions
                .as_deref()
                .and_then(|text| event_versions::parse(text).ok());
            let entry = RouteEntry {
                versions,
                stable: deployed.clone(),
                canary: None,
                shadow: None,
                pinned: HashMap::new(),
            };
            slots.insert(deployment.slot.clone(), entry);
            order.push((deployment.deployment_id, deployment.slot.clone()));
        }
        for (deployment, deployed) in &loaded {
            let Some(entry) = slots.get_mut(&deployment.slot) else { continue };
            if deployment.role == DeploymentRole::Canary {
                entry.canary = Some(Canary {
                    percent: deployment.percent.unwrap_or_default(),
                    deployed: deployed.clone(),
                });
                routes.has_canary = true;
            } else if deployment.role == DeploymentRole::Shadow {
                entry.shadow = shadow(deployment, deployed);
            } else if deployment.ended_at.is_some() {
                entry.pinned.entry(deployment.version_id).or_insert_with(|| deployed.clone());
            }
        }
        order.sort_by_key(|(deployment_id, slot)| (slot.event_versions.is_none(), -deployment_id));
        for (_, slot) in order {
            if let Some(entry) = slots.remove(&slot) {
                routes.add(&slot.event_type, entry);
            }
        }
        routes.prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        routes
    }

    fn add(&mut self, event_type: &str, entry: RouteEntry) {
        let Some(prefix) = event_type.strip_suffix('*') else {
            self.exact.entry(event_type.to_owned()).or_default().push(entry);
            return;
        };
        match self.prefixes.iter_mut().find(|(known, _)| known == prefix) {
            Some((_, entries)) => entries.push(entry),
            None => self.prefixes.push((prefix.to_owned(), vec![entry])),
        }
    }

    /// Returns whether a slot has a canary.
    pub fn has_canary(&self) -> bool {
        self.has_canary
    }

    /// Returns the most specific slot that takes a message: its own event type before a prefix, a
    /// range of event versions before none.
    fn entry(&self, message: &Message) -> Option<&RouteEntry> {
        // Most slots have no range, so most messages need not be parsed.
        let version =
            LazyCell::new(|| message.event_version.as_deref().and_then(event_versions::version));
        let takes = |entry: &&RouteEntry| match &entry.versions {
            None => true,
            Some(range) => version.as_ref().is_some_and(|version| range.matches(version)),
        };
        let exact = self.exact.get(&message.event_type).into_iter().flatten();
        let wider =
            self.prefixes.iter().filter(|(prefix, _)| message.event_type.starts_with(prefix));
        exact.chain(wider.flat_map(|(_, entries)| entries)).find(takes)
    }
}

impl Handlers for Routes {
    fn resolve(&self, message: &Message, failed: Option<i32>) -> Option<Arc<dyn Handler>> {
        let entry = self.entry(message)?;
        Some(entry.choose(message, failed).clone())
    }

    fn shadow(&self, message: &Message) -> Option<Arc<Shadow>> {
        let entry = self.entry(message)?;
        let shadow = entry.shadow.as_ref()?;
        // The comparison is with the stable version's own run; a call for several messages belongs
        // to none of them alone.
        let taken = entry.choose(message, None);
        (Arc::ptr_eq(taken, &entry.stable) && !taken.takes_batches()).then(|| shadow.clone())
    }

    fn all(&self) -> Vec<Arc<dyn Handler>> {
        let entries =
            self.exact.values().chain(self.prefixes.iter().map(|(_, entries)| entries)).flatten();
        entries.flat_map(RouteEntry::all).map(|deployed| deployed as Arc<dyn Handler>).collect()
    }

    fn generation(&self) -> i64 {
        self.generation
    }
}

/// Returns a candidate as a shadow, bounded by the deployment's `limits.deadline_ms` or else by the
/// default of a trial.
fn shadow(deployment: &Deployment, deployed: &Arc<RunnableDeployment>) -> Option<Arc<Shadow>> {
    if deployed.takes_batches() {
        tracing::warn!(
            deployment = deployment.deployment_id,
            "a component that takes batches cannot be a shadow; it is not run"
        );
        return None;
    }
    let duration_ms = deployment.limits.get("deadline_ms").and_then(serde_json::Value::as_u64);
    Some(Arc::new(Shadow {
        deployment_id: deployment.deployment_id,
        handler: deployed.clone(),
        percent: deployment.percent.unwrap_or_default(),
        duration: duration_ms.map_or(SHADOW_DURATION_DEFAULT, Duration::from_millis),
    }))
}

impl RouteEntry {
    fn all(&self) -> impl Iterator<Item = Arc<RunnableDeployment>> {
        let canary = self.canary.iter().map(|canary| &canary.deployed);
        std::iter::once(&self.stable).chain(canary).chain(self.pinned.values()).cloned()
    }

    fn choose(&self, message: &Message, failed: Option<i32>) -> &Arc<RunnableDeployment> {
        if let Some(failed) = failed {
            if let Some(pinned) = self.pinned.get(&failed) {
                return pinned;
            }
            if self.stable.retries == Retries::Pinned && self.stable.version() == failed {
                return &self.stable;
            }
        }
        match &self.canary {
            Some(canary) if share(canary.deployed.deployment_id, message) < canary.percent => {
                &canary.deployed
            }
            _ => &self.stable,
        }
    }
}

/// Returns the position of a message's ordering key between 0 and 100, for one canary. A key always
/// has one position, so it never goes back while the canary's share grows. A message without a key
/// takes the position of its id.
fn share(canary: i64, message: &Message) -> f64 {
    let key = message
        .ordering_key
        .as_deref()
        .or(message.record.key.as_deref())
        .unwrap_or(message.id.as_bytes());
    let hash = Sha256::new().chain_update(canary.to_be_bytes()).chain_update(key).finalize();
    let (first, _) = hash.split_first_chunk::<8>().expect("a hash of 32 bytes");
    u64::from_be_bytes(*first) as f64 / u64::MAX as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use chrono::Utc;
    use oncebox_model::{outgoing::Output, record::Record};
    use serde_json::json;

    use super::*;

    struct Named(i32);

    impl Handler for Named {
        fn version(&self) -> i32 {
            self.0
        }

        fn handle<'a>(&'a self, _: &'a Tx, _: &'a Run<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async { Ok(Output::default()) })
        }
    }

    fn deployment(
        id: i32,
        event_type: &str,
        event_versions: Option<&str>,
        role: DeploymentRole,
    ) -> Deployment {
        Deployment {
            deployment_id: id.into(),
            slot: Slot {
                event_type: event_type.to_owned(),
                event_versions: event_versions.map(str::to_owned),
            },
            role,
            percent: None,
            handler: "h".to_owned(),
            version_id: id,
            digest: Vec::new(),
            settings: json!({}),
            limits: json!({}),
            grants: Vec::new(),
            requires_migration: None,
            retries: Retries::Live,
            guard: None,
            generation: 1,
            created_at: Utc::now(),
            created_by: String::new(),
            ended_at: None,
            ended_how: None,
            ended_reason: None,
        }
    }

    fn routes(deployments: Vec<Deployment>) -> Routes {
        let load = |deployment: Deployment| {
            let deployed = RunnableDeployment::new(
                &deployment,
                Duration::from_secs(1),
                Box::new(Named(deployment.version_id)),
                None,
            );
            (deployment, deployed)
        };
        Routes::new(1, deployments.into_iter().map(load).collect())
    }

    /// Could fail so: a handler that a message may go to is missing from `all`, and its messages
    /// wait for others.
    #[test]
    fn all_are_those_that_some_message_may_go_to() {
        let canary = Deployment {
            percent: Some(10.0),
            ..deployment(2, "order", None, DeploymentRole::Canary)
        };
        let superseded = Deployment {
            ended_at: Some(Utc::now()),
            retries: Retries::Pinned,
            ..deployment(3, "order", None, DeploymentRole::Stable)
        };
        let shadow = Deployment {
            percent: Some(1.0),
            ..deployment(4, "order", None, DeploymentRole::Shadow)
        };
        let others = [
            deployment(5, "order", Some("^2"), DeploymentRole::Stable),
            deployment(6, "refund.*", None, DeploymentRole::Stable),
        ];
        let all = routes(
            [
                vec![
                    deployment(1, "order", None, DeploymentRole::Stable),
                    canary,
                    superseded,
                    shadow,
                ],
                others.to_vec(),
            ]
            .concat(),
        )
        .all();
        let mut versions: Vec<_> = all.iter().map(|handler| handler.version()).collect();
        versions.sort_unstable();
        assert_eq!(versions, [1, 2, 3, 5, 6]);
    }

    fn message(event_type: &str, version: Option<&str>, key: Option<&str>) -> Message {
        Message {
            id: "m".to_owned(),
            source: String::new(),
            event_type: event_type.to_owned(),
            event_version: version.map(str::to_owned),
            ordering_key: key.map(|key| key.as_bytes().to_vec()),
            sequence: None,
            content_type: None,
            trace_parent: None,
            decoded: None,
            fetched: None,
            payload_hash: None,
            record: Record {
                topic: "t".into(),
                topic_id: None,
                partition: 0,
                offset: 0,
                timestamp_ms: 0,
                key: None,
                headers: Vec::new(),
                payload: None,
            },
        }
    }

    fn version(routes: &Routes, message: &Message, failed: Option<i32>) -> Option<i32> {
        routes.resolve(message, failed).map(|handler| handler.version())
    }

    // S1-114: resolution by event type and version, the most specific first.
    #[test]
    fn the_most_specific_deployment_takes_a_message() {
        let routes = routes(vec![
            deployment(1, "*", None, DeploymentRole::Stable),
            deployment(2, "orders.*", None, DeploymentRole::Stable),
            deployment(3, "orders.eu.*", None, DeploymentRole::Stable),
            deployment(4, "orders.placed", None, DeploymentRole::Stable),
            deployment(5, "orders.placed", Some(">=2"), DeploymentRole::Stable),
            deployment(6, "orders.placed", Some("3"), DeploymentRole::Stable),
            deployment(7, "orders.*", Some("9"), DeploymentRole::Stable),
        ]);
        for (event_type, event_version, expected) in [
            ("greeting", None, 1),
            ("orders.paid", None, 2),
            ("orders.eu.paid", None, 3),
            ("orders.placed", None, 4),
            ("orders.placed", Some("1"), 4),
            ("orders.placed", Some("2.1"), 5),
            ("orders.placed", Some("3"), 6),
            ("orders.placed", Some("2024-01-01"), 4),
            ("orders.paid", Some("9.1"), 7),
        ] {
            // S1-114.
            assert_eq!(
                version(&routes, &message(event_type, event_version, None), None),
                Some(expected),
                "{event_type} {event_version:?}"
            );
        }
    }

    #[test]
    fn without_a_wider_slot_there_is_no_route() {
        let routes =
            routes(vec![deployment(1, "orders.placed", Some("2"), DeploymentRole::Stable)]);
        assert_eq!(version(&routes, &message("orders.placed", Some("2"), None), None), Some(1));
        assert_eq!(version(&routes, &message("orders.placed", None, None), None), None);
        assert_eq!(version(&routes, &message("orders.paid", None, None), None), None);
    }

    // A shadow is compared with the stable version, so it does not run on what a canary took.
    #[test]
    fn a_shadow_runs_beside_the_stable_version_alone() {
        let shadow =
            Deployment { percent: Some(50.0), ..deployment(3, "a", None, DeploymentRole::Shadow) };
        let canary = |percent| Deployment {
            percent: Some(percent),
            ..deployment(2, "a", None, DeploymentRole::Canary)
        };
        let all = |percent| {
            routes(vec![
                deployment(1, "a", None, DeploymentRole::Stable),
                canary(percent),
                shadow.clone(),
            ])
        };
        let found = |routes: &Routes, event_type| {
            routes.shadow(&message(event_type, None, None)).map(|shadow| shadow.deployment_id)
        };
        assert_eq!(found(&all(1e-9), "a"), Some(3));
        assert_eq!(found(&all(100.0), "a"), None);
        assert_eq!(found(&all(1e-9), "b"), None);
        assert_eq!(version(&all(1e-9), &message("a", None, None), None), Some(1));
    }

    #[test]
    fn a_key_never_leaves_a_canary_that_grows() {
        let at = |percent: f64| {
            let canary = Deployment {
                percent: Some(percent),
                ..deployment(2, "a", None, DeploymentRole::Canary)
            };
            let routes = routes(vec![deployment(1, "a", None, DeploymentRole::Stable), canary]);
            let takes = |key: usize| {
                version(&routes, &message("a", None, Some(&key.to_string())), None) == Some(2)
            };
            (0..4_000).map(takes).collect::<Vec<_>>()
        };
        let steps: Vec<_> = [1.0, 10.0, 50.0, 100.0].map(at).into();
        for pair in steps.windows(2) {
            assert!(pair[0].iter().zip(&pair[1]).all(|(before, after)| !before || *after));
        }
        let share = steps[1].iter().filter(|takes| **takes).count();
        assert!((320..=480).contains(&share), "{share} of 4,000 keys at 10 %");
        assert!(steps[3].iter().all(|takes| *takes));
    }

    #[test]
    fn what_failed_goes_back_to_its_version_where_that_is_pinned() {
        let was = Deployment {
            ended_at: Some(Utc::now()),
            retries: Retries::Pinned,
            ..deployment(1, "a", None, DeploymentRole::Stable)
        };
        let routes = routes(vec![deployment(2, "a", None, DeploymentRole::Stable), was]);
        let message = message("a", None, None);
        assert_eq!(version(&routes, &message, None), Some(2));
        assert_eq!(version(&routes, &message, Some(1)), Some(1));
        assert_eq!(version(&routes, &message, Some(7)), Some(2));
    }
}
