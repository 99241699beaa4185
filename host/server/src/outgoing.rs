//! The relay's access to this host: its databases, the keys of its tenants, its brokers, and the
//! workers of its consumers.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use oncebox_control::{Control, EndpointBreakerReport, OpenEndpoint};
use oncebox_inbox::DuePoller;
use oncebox_kafka::ConsumerConfig;
use oncebox_model::{InboxError, PayloadKey, policy::Policy};
use oncebox_relay::{EndpointBreakerState, RelayDatabase, RelayEndpoint, RelayHost};
use oncebox_sender::Sender;
use sqlx::PgPool;
use tokio::sync::Mutex;

use crate::brokers::BrokerAccess;

/// The relay's access to this host.
pub(crate) struct RelayAccess {
    control: Control,
    kafka: BrokerAccess,
    /// Poller that knows the consumers which run here.
    due_poller: Arc<DuePoller>,
    /// Tenants with databases of their own: the replicated state for which each was read, and its
    /// connections; none for a tenant whose database cannot be used.
    dedicated: Mutex<HashMap<String, (String, Option<PgPool>)>>,
}

impl RelayAccess {
    /// Creates the access for this host.
    pub(crate) fn new(control: Control, kafka: BrokerAccess, due_poller: Arc<DuePoller>) -> Self {
        Self { control, kafka, due_poller, dedicated: Mutex::default() }
    }

    /// Lists the databases that tenants named. A tenant's row is read again after a change only.
    async fn dedicated(&self) -> Result<Vec<RelayDatabase>, InboxError> {
        let sources = self.control.tenant_databases().dedicated_tenants().await?;
        let mut known = self.dedicated.lock().await;
        known.retain(|tenant, _| sources.iter().any(|source| source.tenant == *tenant));
        for source in sources {
            if known.get(&source.tenant).is_none_or(|(state, _)| *state != source.state) {
                let pool = self.pool_of(&source.tenant).await?;
                known.insert(source.tenant, (source.state, pool));
            }
        }
        let usable = known.iter().filter_map(|(tenant, (_, pool))| {
            Some(RelayDatabase { tenant: Some(tenant.clone()), pool: pool.clone()? })
        });
        Ok(usable.collect())
    }

    /// Returns connections to the database that a tenant named; none where it is gone, is being
    /// deleted, or its address cannot be unsealed. `doctor` names such a tenant.
    async fn pool_of(&self, tenant: &str) -> Result<Option<PgPool>, InboxError> {
        let tenant = match self.control.tenants().get(tenant).await {
            Err(InboxError::NotFound(_)) => return Ok(None),
            tenant => tenant?,
        };
        if tenant.state.is_deleting() {
            return Ok(None);
        }
        match self.control.tenant_databases().get(&tenant) {
            Ok(database) => Ok(database.is_dedicated.then_some(database.pool)),
            Err(error) => {
                tracing::debug!(tenant = tenant.name, %error, "database not known");
                Ok(None)
            }
        }
    }
}

impl RelayHost for RelayAccess {
    fn directory(&self) -> PgPool {
        self.control.pool.clone()
    }

    fn databases(&self) -> BoxFuture<'_, Result<Vec<RelayDatabase>, InboxError>> {
        async move {
            let own = RelayDatabase { tenant: None, pool: self.control.pool.clone() };
            let mut all = vec![own];
            all.extend(self.dedicated().await?);
            Ok(all)
        }
        .boxed()
    }

    fn payload_key<'a>(&'a self, tenant: &'a str) -> BoxFuture<'a, Result<PayloadKey, InboxError>> {
        async move {
            let tenant = self.control.tenants().get(tenant).await?;
            Ok(self.control.tenant_databases().session_target(&tenant)?.payload_key)
        }
        .boxed()
    }

    fn kafka(&self, tenant: &str, consumer: &str, policy: &Policy) -> ConsumerConfig {
        self.kafka.config(tenant, consumer, policy)
    }

    fn sender(&self) -> Option<Arc<Sender>> {
        self.control.sender()
    }

    fn endpoint<'a>(
        &'a self,
        tenant_id: i32,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<RelayEndpoint>, InboxError>> {
        async move {
            let opened = self.control.endpoints().open(tenant_id, name).await?;
            Ok(opened.map(relay_endpoint))
        }
        .boxed()
    }

    fn delivered(&self, consumer_id: i32) {
        self.due_poller.wake(consumer_id);
    }
}

/// Returns an endpoint as the relay sends to it.
fn relay_endpoint(opened: OpenEndpoint) -> RelayEndpoint {
    let OpenEndpoint { endpoint, shown, answer } = opened;
    // The constraints of the row are narrower than these types.
    let number = |value: i32| u32::try_from(value).unwrap_or(1).max(1);
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

/// Returns the report of an endpoint's circuit breaker.
pub(crate) fn breaker_report(breaker: EndpointBreakerState) -> EndpointBreakerReport {
    EndpointBreakerReport {
        tenant_id: breaker.tenant_id,
        endpoint: breaker.endpoint,
        state: breaker.state,
        failures: breaker.failures,
        probes_in_ms: breaker.probes_in.map(|time| time.as_millis() as u64),
    }
}
