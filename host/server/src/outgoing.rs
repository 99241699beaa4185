//! The relay's access to this host: its databases, the keys of its tenants, its brokers, and the
//! workers of its consumers.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use oncebox_control::{Control, EndpointBreakerReport, OpenEndpoint};
use oncebox_inbox::DuePoller;
use oncebox_kafka::ConsumerConfig;
use oncebox_model::{InboxError, PayloadKey, policy::Policy};
use oncebox_relay::{EndpointBreakerState, RelayDatabase, RelayEndpoint, RelayHost};
use oncebox_sender::Sender;
use sqlx::PgPool;

use crate::brokers::BrokerAccess;

/// The relay's access to this host.
pub(crate) struct RelayAccess {
    control: Control,
    kafka: BrokerAccess,
    /// Poller that knows the consumers which run here.
    due_poller: Arc<DuePoller>,
}

impl RelayAccess {
    /// Creates the access for this host.
    pub(crate) fn new(control: Control, kafka: BrokerAccess, due_poller: Arc<DuePoller>) -> Self {
        Self { control, kafka, due_poller }
    }
}

impl RelayHost for RelayAccess {
    fn directory(&self) -> PgPool {
        self.control.pool.clone()
    }

    fn databases(&self) -> BoxFuture<'_, Result<Vec<RelayDatabase>, InboxError>> {
        async move {
            let databases = self.control.tenant_databases().all().await?.into_iter();
            let of_relay = databases.map(|database| RelayDatabase {
                pool: database.pool().clone(),
                name: database.label.database,
            });
            Ok(of_relay.collect())
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
