//! The relay of a host, in process, on the database of a fixture.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use oncebox_control::{Control, OpenEndpoint};
use oncebox_kafka::{ConsumerConfig, Timing};
use oncebox_model::{InboxError, PayloadKey, policy::Policy};
use oncebox_relay::{EndpointBreakerState, Relay, RelayDatabase, RelayEndpoint, RelayHost};
use oncebox_sender::Sender;
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::{runtime::Runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::inbox::InboxFixture;

/// A host of the relay with one database, and without brokers.
struct FixtureHost {
    pool: PgPool,
    /// Access to endpoints, with connections of its own.
    control: Control,
    /// Keys of the payload hashes, by tenant.
    payload_keys: HashMap<String, PayloadKey>,
}

impl RelayHost for FixtureHost {
    fn directory(&self) -> PgPool {
        self.pool.clone()
    }

    fn databases(&self) -> BoxFuture<'_, Result<Vec<RelayDatabase>, InboxError>> {
        let databases = vec![RelayDatabase { name: None, pool: self.pool.clone() }];
        Box::pin(std::future::ready(Ok(databases)))
    }

    fn payload_key<'a>(&'a self, tenant: &'a str) -> BoxFuture<'a, Result<PayloadKey, InboxError>> {
        let key = self.payload_keys.get(tenant).cloned();
        let key = key.ok_or_else(|| InboxError::NotFound(format!("there is no tenant `{tenant}`")));
        Box::pin(std::future::ready(key))
    }

    fn sender(&self) -> Option<Arc<Sender>> {
        self.control.sender()
    }

    fn endpoint<'a>(
        &'a self,
        tenant_id: i32,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<RelayEndpoint>, InboxError>> {
        Box::pin(async move {
            Ok(self.control.endpoints().open(tenant_id, name).await?.map(relay_endpoint))
        })
    }

    fn kafka(&self, tenant: &str, consumer: &str, policy: &Policy) -> ConsumerConfig {
        let nowhere = ("bootstrap.servers".to_owned(), "127.0.0.1:1".to_owned());
        ConsumerConfig {
            tenant: tenant.to_owned(),
            consumer: consumer.to_owned(),
            topics: policy.topics.clone(),
            kafka: policy.reading(),
            host_properties: BTreeMap::from([nowhere]),
            timing: Timing::default(),
        }
    }
}

/// An endpoint as a host's relay gets it.
fn relay_endpoint(opened: OpenEndpoint) -> RelayEndpoint {
    let OpenEndpoint { endpoint, shown, answer } = opened;
    let number = |value: i32| u32::try_from(value).expect("a positive setting");
    let millis = |value: i32| Duration::from_millis(number(value).into());
    RelayEndpoint {
        endpoint,
        timeout: millis(shown.timeout_ms),
        requests_per_second: shown.requests_per_second.map(number),
        requests_max: number(shown.requests_max) as usize,
        failures_max: number(shown.failures_max),
        pause: millis(shown.pause_ms),
        answer,
        answer_to: shown.answer_to,
        answer_event_type: shown.answer_event_type,
        receiver_deduplicates: shown.receiver_deduplicates,
    }
}

/// A relay at work, with threads and connections of its own, so that it can be killed.
pub struct TestRelay {
    relay: Arc<Relay>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    /// None once it has ended.
    runtime: Option<Runtime>,
    /// Its host's name in the rows and in the connections.
    owner: String,
}

impl TestRelay {
    /// Starts a relay for the tenants that there are by now.
    pub async fn start(fixture: &InboxFixture, owner: &str) -> Self {
        let mut payload_keys = HashMap::new();
        for tenant in fixture.control.tenants().list().await.expect("tenants") {
            let credentials = fixture.control.tenant_databases().credentials(&tenant);
            let key = credentials.expect("credentials").payload_key();
            payload_keys.insert(tenant.name, key);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let stop = CancellationToken::new();
        let (relay, task) = {
            let _entered = runtime.enter();
            let options = fixture.superuser_options().application_name(owner);
            let pool = PgPoolOptions::new().max_connections(4).connect_lazy_with(options);
            let control = fixture.control.for_requests();
            let host = Arc::new(FixtureHost { pool, control, payload_keys });
            let relay = Relay::new(host, owner.to_owned());
            let task = runtime.spawn(relay.clone().run(stop.clone()));
            (relay, task)
        };
        Self { relay, stop, task, runtime: Some(runtime), owner: owner.to_owned() }
    }

    /// Tells it that there is something to send, as the host does after a commit.
    pub fn wake(&self, tenant_id: i32, destination: &str) {
        self.relay.wakeup(None).notify(tenant_id, [destination.to_owned()]);
    }

    /// The circuit breakers of endpoints that are not closed.
    pub fn breakers(&self) -> Vec<EndpointBreakerState> {
        self.relay.breakers_changed(&mut None).unwrap_or_default()
    }

    /// Ends it in order, as a host that is told to stop.
    pub async fn stop(mut self) {
        self.stop.cancel();
        (&mut self.task).await.expect("the relay ends by itself");
    }

    /// Ends it wherever it is; then its leases run out, as they do with the time.
    pub async fn kill(mut self, fixture: &InboxFixture) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let owner = &self.owner;
        // Whatever it had sent to the database by then is done or undone.
        let gone = format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = \
                current_database() AND application_name = '{owner}'"
        );
        fixture.execute(gone).await;
        let no_more = format!(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND \
                application_name = '{owner}'"
        );
        fixture.until(&no_more).await;
        let run_out = format!(
            "UPDATE oncebox.outgoing SET locked_until = now() - interval '1 s' WHERE status = \
                'in_progress' AND locked_by = '{owner}'"
        );
        fixture.execute(run_out).await;
    }
}

impl Drop for TestRelay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
