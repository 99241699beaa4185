//! The endpoints that this host sends to: their settings as they are now, and what this host knows
//! of each: its circuit breaker and its rate.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use oncebox_model::{error::InboxError, token_bucket::TokenBucket};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{
    breaker::{Admission, Breaker, BreakerPhase},
    host::{EndpointBreakerState, RelayEndpoint, RelayHost},
    metric,
};

/// Time for which settings are used. A change takes effect within it.
const FRESH: Duration = Duration::from_secs(1);
/// Time after which what nobody asks for is dropped.
const KEPT: Duration = Duration::from_secs(60);
/// The same of a breaker that is not closed. It is longer than any pause of one: the endpoint has
/// nothing due any more, or is removed.
const KEPT_OPEN: Duration = Duration::from_secs(3600);
/// Requests of one tenant at a time, over all its endpoints. Each has a socket, and all tenants and
/// the rest of the host share those of the process.
const TENANT_REQUESTS_MAX: usize = 200;

/// A tenant's key, and the name of one of its endpoints.
type EndpointKey = (i32, String);

/// The endpoints of a process.
pub(crate) struct Endpoints {
    host: Arc<dyn RelayHost>,
    known: Mutex<HashMap<EndpointKey, KnownEndpoint>>,
    states: Mutex<HashMap<EndpointKey, Arc<EndpointState>>>,
    /// Places for requests, by tenant.
    places: Mutex<HashMap<i32, Arc<Semaphore>>>,
    /// Number of transitions of breakers so far.
    transitions: Arc<AtomicU64>,
}

/// Settings, and the time of the question for them.
struct KnownEndpoint {
    at: Instant,
    settings: Arc<RelayEndpoint>,
}

/// What this host knows of an endpoint.
pub(crate) struct EndpointState {
    tenant: String,
    endpoint: String,
    breaker: Mutex<Breaker>,
    bucket: Mutex<TokenBucket>,
    used: Mutex<Instant>,
    transitions: Arc<AtomicU64>,
}

/// An endpoint with what this host knows of it, for the messages of a lease.
#[derive(Clone)]
pub(crate) struct EndpointUse {
    /// Its settings.
    pub(crate) settings: Arc<RelayEndpoint>,
    /// Its breaker and its rate.
    pub(crate) state: Arc<EndpointState>,
}

impl Endpoints {
    /// Creates the endpoints of a host.
    pub(crate) fn new(host: Arc<dyn RelayHost>) -> Self {
        Self {
            host,
            known: Mutex::default(),
            states: Mutex::default(),
            places: Mutex::default(),
            transitions: Arc::default(),
        }
    }

    /// Returns an endpoint as it was at most a second ago; none where there is none now. One that
    /// the lists of hosts do not have is read again: they may have it by now.
    ///
    /// # Errors
    ///
    /// `Sealed` or `Invalid` where it cannot be used, or an error of the host's database.
    pub(crate) async fn get(
        &self,
        tenant_id: i32,
        tenant: &str,
        name: &str,
    ) -> Result<Option<EndpointUse>, InboxError> {
        let key = (tenant_id, name.to_owned());
        let settings = match self.fresh(&key).filter(|settings| self.is_allowed(settings)) {
            Some(settings) => settings,
            None => match self.read(&key).await? {
                Some(settings) => settings,
                None => return Ok(None),
            },
        };
        let state = self.state(key, tenant);
        Ok(Some(EndpointUse { settings, state }))
    }

    /// Returns the settings that were read less than a second ago.
    fn fresh(&self, key: &EndpointKey) -> Option<Arc<RelayEndpoint>> {
        let known = lock(&self.known);
        let fresh = known.get(key).filter(|known| known.at.elapsed() < FRESH);
        fresh.map(|known| known.settings.clone())
    }

    async fn read(&self, key: &EndpointKey) -> Result<Option<Arc<RelayEndpoint>>, InboxError> {
        let at = Instant::now();
        let settings = self.host.endpoint(key.0, &key.1).await?.map(Arc::new);
        let mut known = lock(&self.known);
        known.retain(|_, known| known.at.elapsed() < KEPT);
        match settings.clone() {
            Some(settings) => known.insert(key.clone(), KnownEndpoint { at, settings }),
            None => known.remove(key),
        };
        Ok(settings)
    }

    fn is_allowed(&self, settings: &RelayEndpoint) -> bool {
        let sender = self.host.sender();
        sender.is_some_and(|sender| sender.check(&settings.endpoint).is_ok())
    }

    /// Waits until a tenant has fewer requests under way than it may have. The request ends before
    /// the place is dropped.
    pub(crate) async fn place(&self, tenant_id: i32) -> Option<OwnedSemaphorePermit> {
        let places = {
            let mut places = lock(&self.places);
            places.retain(|tenant, of| *tenant == tenant_id || Arc::strong_count(of) > 1);
            let new = || Arc::new(Semaphore::new(TENANT_REQUESTS_MAX));
            places.entry(tenant_id).or_insert_with(new).clone()
        };
        places.acquire_owned().await.ok() // nobody closes it
    }

    fn state(&self, key: EndpointKey, tenant: &str) -> Arc<EndpointState> {
        let mut states = lock(&self.states);
        states.retain(|known, state| {
            let is_kept = *known == key || Arc::strong_count(state) > 1 || !state.is_forgettable();
            if !is_kept {
                state.forget();
            }
            is_kept
        });
        let new = || EndpointState::new(tenant, &key.1, self.transitions.clone());
        let state = states.entry(key.clone()).or_insert_with(|| Arc::new(new())).clone();
        *lock(&state.used) = Instant::now();
        state
    }

    /// Returns the breakers that are not closed, where one turned since the given number of
    /// transitions, which is brought up to date.
    pub(crate) fn breakers_changed(
        &self,
        seen: &mut Option<u64>,
    ) -> Option<Vec<EndpointBreakerState>> {
        let transitions = self.transitions.load(Ordering::Acquire);
        if *seen == Some(transitions) {
            return None;
        }
        *seen = Some(transitions);
        let (states, now) = (lock(&self.states), Instant::now());
        let shown = states.iter().filter_map(|((tenant_id, endpoint), state)| {
            let breaker = lock(&state.breaker);
            let probes_in = match breaker.phase() {
                BreakerPhase::Closed => return None,
                BreakerPhase::Open { until } => Some(until.saturating_duration_since(now)),
                BreakerPhase::HalfOpen => None,
            };
            Some(EndpointBreakerState {
                tenant_id: *tenant_id,
                endpoint: endpoint.clone(),
                state: breaker.phase().name(),
                failures: breaker.failures(),
                probes_in,
            })
        });
        Some(shown.collect())
    }
}

impl EndpointState {
    fn new(tenant: &str, endpoint: &str, transitions: Arc<AtomicU64>) -> Self {
        Self {
            tenant: tenant.to_owned(),
            endpoint: endpoint.to_owned(),
            breaker: Mutex::default(),
            bucket: Mutex::default(),
            used: Mutex::new(Instant::now()),
            transitions,
        }
    }

    /// Returns what the breaker lets through now.
    pub(crate) fn admits(&self) -> Admission {
        self.turning(|breaker| breaker.admits(Instant::now()))
    }

    /// Notes an answer of the endpoint.
    pub(crate) fn succeeded(&self) {
        self.turning(Breaker::succeeded);
    }

    /// Notes that the endpoint failed.
    pub(crate) fn failed(&self, settings: &RelayEndpoint) {
        let (most, pause) = (settings.failures_max, settings.pause);
        self.turning(|breaker| breaker.failed(most, pause, Instant::now()));
    }

    /// Takes tokens for at most so many requests; none: the time until there is one.
    pub(crate) fn take(&self, settings: &RelayEndpoint, most: usize) -> Result<usize, Duration> {
        let Some(per_second) = settings.requests_per_second else { return Ok(most) };
        let mut bucket = lock(&self.bucket);
        match bucket.take(per_second, most, Instant::now()) {
            0 => Err(bucket.next_in(per_second)),
            taken => Ok(taken),
        }
    }

    /// Gives back tokens for requests that were not made.
    pub(crate) fn give_back(&self, settings: &RelayEndpoint, tokens: usize) {
        if settings.requests_per_second.is_some() && tokens > 0 {
            lock(&self.bucket).give_back(tokens);
        }
    }

    /// Counts a request by its outcome.
    pub(crate) fn count(&self, outcome: &'static str) {
        metric::endpoint_request(&self.tenant, &self.endpoint, outcome);
    }

    /// Counts a request that was repeated although the one before it may have arrived.
    pub(crate) fn count_repeated(&self, receiver_deduplicates: bool, is_refused: bool) {
        metric::endpoint_repeated(&self.tenant, &self.endpoint, receiver_deduplicates);
        if is_refused {
            metric::endpoint_repeat_refused(&self.tenant, &self.endpoint);
        }
    }

    /// Changes the breaker, and logs and counts a transition.
    fn turning<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = lock(&self.breaker);
        let before = breaker.phase();
        let answer = change(&mut breaker);
        let (after, failures) = (breaker.phase(), breaker.failures());
        drop(breaker);
        if after.name() == before.name() {
            return answer;
        }
        self.transitions.fetch_add(1, Ordering::Release);
        let (tenant, endpoint) = (&self.tenant, &self.endpoint);
        metric::endpoint_breaker(tenant, endpoint, after);
        match after {
            BreakerPhase::Open { until } => {
                let pause_ms = until.saturating_duration_since(Instant::now()).as_millis() as u64;
                tracing::warn!(
                    tenant,
                    endpoint,
                    failures,
                    pause_ms,
                    "an endpoint fails again and again; its messages wait"
                );
            }
            BreakerPhase::HalfOpen => {
                tracing::info!(tenant, endpoint, "one message tries an endpoint that failed");
            }
            BreakerPhase::Closed => {
                tracing::info!(tenant, endpoint, "an endpoint that failed answers again");
            }
        }
        answer
    }

    fn is_forgettable(&self) -> bool {
        let kept = if lock(&self.breaker).is_idle() { KEPT } else { KEPT_OPEN };
        lock(&self.used).elapsed() >= kept
    }

    /// Takes a breaker that nobody asks for any more out of the gauge and the reports.
    fn forget(&self) {
        if lock(&self.breaker).phase() != BreakerPhase::Closed {
            metric::endpoint_forgotten(&self.tenant, &self.endpoint);
            self.transitions.fetch_add(1, Ordering::Release);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, future::BoxFuture};
    use oncebox_kafka::ConsumerConfig;
    use oncebox_model::{payload_key::PayloadKey, policy::Policy};
    use sqlx::PgPool;

    use super::*;
    use crate::host::RelayDatabase;

    /// A host that these tests ask for nothing.
    struct SilentHost;

    impl RelayHost for SilentHost {
        fn directory(&self) -> PgPool {
            unreachable!("no test reads a database")
        }

        fn databases(&self) -> BoxFuture<'_, Result<Vec<RelayDatabase>, InboxError>> {
            unreachable!("no test reads a database")
        }

        fn payload_key<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<PayloadKey, InboxError>> {
            unreachable!("no test hashes a payload")
        }

        fn kafka(&self, _: &str, _: &str, _: &Policy) -> ConsumerConfig {
            unreachable!("no test sends to Kafka")
        }
    }

    // What could go wrong: a tenant with many endpoints takes all sockets of the host, or its bound
    // is that of another tenant too.
    #[tokio::test]
    async fn each_tenant_has_places_of_its_own() {
        let endpoints = Endpoints::new(Arc::new(SilentHost));
        let mut held = Vec::new();
        for _ in 0..TENANT_REQUESTS_MAX {
            held.push(endpoints.place(1).await);
        }
        tokio::task::yield_now().await; // Tokio would not let one task acquire so much at once
        assert!(endpoints.place(1).now_or_never().is_none());
        assert!(endpoints.place(2).now_or_never().flatten().is_some());
        held.pop();
        assert!(endpoints.place(1).now_or_never().flatten().is_some());
        drop(held);
        assert!(endpoints.place(2).now_or_never().flatten().is_some());
        assert_eq!(lock(&endpoints.places).len(), 1, "a tenant that sends nothing is forgotten");
    }

    // What could go wrong: operators read for ever that the breaker of a removed endpoint is open.
    #[test]
    fn a_report_follows_each_transition_and_what_is_forgotten() {
        let endpoints = Endpoints::new(Arc::new(SilentHost));
        let state = endpoints.state((1, "pay".to_owned()), "acme");
        let mut seen = None;
        assert_eq!(endpoints.breakers_changed(&mut seen), Some(Vec::new()), "after a start");
        state.turning(|breaker| breaker.failed(1, KEPT, Instant::now()));
        let shown = endpoints.breakers_changed(&mut seen).unwrap();
        let shown: Vec<_> = shown.iter().map(|of| (of.endpoint.as_str(), of.state)).collect();
        assert_eq!(shown, [("pay", "open")]);
        assert_eq!(endpoints.breakers_changed(&mut seen), None);
        assert!(!state.is_forgettable());
        state.forget();
        assert!(endpoints.breakers_changed(&mut seen).is_some());
    }
}
