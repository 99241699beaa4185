//! The host, as the relay needs it.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use oncebox_kafka::ConsumerConfig;
use oncebox_model::{
    error::InboxError, outgoing::AnswerMode, payload_key::PayloadKey, policy::Policy,
};
use oncebox_sender::{Endpoint, Sender};
use sqlx::PgPool;

/// A database with outgoing messages.
#[derive(Debug, Clone)]
pub struct RelayDatabase {
    /// Its name in the rows of its tenants; none for the host's.
    pub name: Option<String>,
    /// Connections of the host's login there.
    pub pool: PgPool,
}

/// An endpoint of a tenant, as the relay sends to it.
#[derive(Debug, Clone)]
pub struct RelayEndpoint {
    /// The place to which requests go, with the hosts that the tenant's limits allow.
    pub endpoint: Endpoint,
    /// Longest time for all of a request.
    pub timeout: Duration,
    /// Requests a second of this host; none for no bound.
    pub requests_per_second: Option<u32>,
    /// Requests of this host at a time.
    pub requests_max: usize,
    /// Failures in a row after which the circuit breaker opens.
    pub failures_max: u32,
    /// First pause of an open breaker.
    pub pause: Duration,
    /// What becomes of answers.
    pub answer: AnswerMode,
    /// Consumer that gets delivered answers; none for the one that emitted.
    pub answer_to: Option<String>,
    /// Event type of delivered answers; none for that of the message with `.answered` behind it.
    pub answer_event_type: Option<String>,
    /// Whether the receiver recognises a repeated request by its key.
    pub receiver_deduplicates: bool,
}

/// The circuit breaker of an endpoint, where it is not closed on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointBreakerState {
    /// Key of the tenant.
    pub tenant_id: i32,
    /// Name of the endpoint.
    pub endpoint: String,
    /// `open` or `half_open`.
    pub state: &'static str,
    /// Failures in a row so far.
    pub failures: u32,
    /// Time until the next probe; none where a message probes.
    pub probes_in: Option<Duration>,
}

/// The host, as the relay needs it.
pub trait RelayHost: Send + Sync + 'static {
    /// Returns connections to the host's database, the source of tenants and consumers.
    fn directory(&self) -> PgPool;

    /// Lists the databases with an inbox.
    fn databases(&self) -> BoxFuture<'_, Result<Vec<RelayDatabase>, InboxError>>;

    /// Returns the key of a tenant's payload hashes.
    fn payload_key<'a>(&'a self, tenant: &'a str) -> BoxFuture<'a, Result<PayloadKey, InboxError>>;

    /// Returns the settings of a consumer's connection to the brokers.
    fn kafka(&self, tenant: &str, consumer: &str, policy: &Policy) -> ConsumerConfig;

    /// Returns the sender to endpoints; none for a host that sends to none.
    fn sender(&self) -> Option<Arc<Sender>> {
        None
    }

    /// Returns an endpoint of a tenant as it is now; none where there is no such endpoint.
    fn endpoint<'a>(
        &'a self,
        _tenant_id: i32,
        _name: &'a str,
    ) -> BoxFuture<'a, Result<Option<RelayEndpoint>, InboxError>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Hears that a message has come to the inbox of a consumer and is committed there. A host
    /// whose workers poll needs to do nothing.
    fn delivered(&self, _consumer_id: i32) {}
}
