//! The endpoints of a tenant: places outside to which its handlers send, by name.

use std::collections::BTreeMap;

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{
    DuplicateDecision, EndpointBreaker, EndpointChange, EndpointTest, NewEndpoint, SecretRotation,
    TenantEndpoint, generate_signing_secret,
};
use oncebox_model::outgoing::AnswerMode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path, Query},
    tenant_changes::Nothing,
};

/// The circuit breaker of an endpoint, where it is not closed on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = EndpointBreaker)]
pub struct EndpointBreakerBody {
    /// Name of the host.
    pub host: String,
    /// `open` or `half_open`.
    pub state: String,
    /// Failures in a row so far.
    pub failures: i32,
    /// Time of the next probe; null where a message probes.
    pub probes_at: Option<DateTime<Utc>>,
}

/// An endpoint. URL, values of headers and signing secrets are never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantEndpoint)]
pub struct EndpointBody {
    /// Name, as destinations have it behind `http:`.
    pub name: String,
    /// Number of the latest change, from 1.
    pub revision: i64,
    /// Scheme, host and port of its URL.
    pub origin: String,
    /// Method.
    pub method: String,
    /// Names of the headers that each request has.
    pub header_names: Vec<String>,
    /// Number of signing secrets: 0 for requests without a signature, 2 during a rotation.
    pub signing_secrets: i32,
    /// Longest time for DNS, connection and TLS, milliseconds.
    pub connect_timeout_ms: i32,
    /// Longest time for all of a request, milliseconds.
    pub timeout_ms: i32,
    /// Requests a second of one host; null for no bound.
    pub requests_per_second: Option<i32>,
    /// Requests of one host at a time.
    pub requests_max: i32,
    /// Failures in a row after which a host's circuit breaker opens.
    pub failures_max: i32,
    /// First pause of an open breaker, milliseconds.
    pub pause_ms: i32,
    /// What becomes of answers: `none`, `stored` or `delivered`.
    pub answer: String,
    /// Consumer that gets delivered answers; null for the one that emitted.
    pub answer_to: Option<String>,
    /// Event type of delivered answers; null for that of the message with `.answered` behind it.
    pub answer_event_type: Option<String>,
    /// Whether the receiver recognises a repeated request by its `Idempotency-Key`.
    pub receiver_deduplicates: bool,
    /// Who accepts that the receiver may act twice.
    pub duplicates_accepted_by: Option<String>,
    /// Why that does no harm.
    pub duplicates_because: Option<String>,
    /// Time of the last change.
    pub set_at: DateTime<Utc>,
    /// Author of the last change.
    pub set_by: String,
    /// Circuit breakers that are not closed, by host.
    #[serde(default)]
    pub breakers: Vec<EndpointBreakerBody>,
}

/// The settings of an endpoint. What is absent has its default.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewEndpoint)]
pub struct NewEndpointBody {
    /// URL. It is kept sealed, and never shown.
    #[schema(write_only)]
    pub url: String,
    /// Method: `POST` (the default), `PUT`, `PATCH` or `DELETE`.
    #[serde(default = "post")]
    pub method: String,
    /// Headers that each request has, by name. They are kept sealed, and their values are never
    /// shown.
    #[serde(default)]
    #[schema(write_only)]
    pub headers: BTreeMap<String, String>,
    /// Secret with which requests are signed: `whsec_` and 24 to 64 bytes in base64. Absent: those
    /// that the endpoint has stay. Empty: requests have no signature. It is kept sealed, and never
    /// shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(write_only)]
    pub signing_secret: Option<String>,
    /// Longest time for DNS, connection and TLS, milliseconds.
    #[serde(default = "connect_timeout_ms")]
    pub connect_timeout_ms: u32,
    /// Longest time for all of a request, milliseconds, at most 300,000.
    #[serde(default = "timeout_ms")]
    pub timeout_ms: u32,
    /// Requests a second of one host, 1 to 10,000; null for no bound.
    #[serde(default)]
    pub requests_per_second: Option<u32>,
    /// Requests of one host at a time, 1 to 100.
    #[serde(default = "requests_max")]
    pub requests_max: u32,
    /// Failures in a row after which a host's circuit breaker opens, 1 to 1,000.
    #[serde(default = "failures_max")]
    pub failures_max: u32,
    /// First pause of an open breaker, milliseconds, 100 to 300,000.
    #[serde(default = "pause_ms")]
    pub pause_ms: u32,
    /// What becomes of answers: `none` (the default), `stored` or `delivered`.
    #[serde(default = "no_answer")]
    pub answer: String,
    /// Consumer that gets delivered answers; null for the one that emitted.
    #[serde(default)]
    pub answer_to: Option<String>,
    /// Event type of delivered answers; null for that of the message with `.answered` behind it.
    #[serde(default)]
    pub answer_event_type: Option<String>,
    /// Whether the receiver recognises a repeated request by its `Idempotency-Key`. Otherwise the
    /// next two members say who accepts that it may act twice, and why.
    #[serde(default)]
    pub receiver_deduplicates: bool,
    /// Who accepts that the receiver may act twice.
    #[serde(default)]
    pub duplicates_accepted_by: Option<String>,
    /// Why that does no harm.
    #[serde(default)]
    pub duplicates_because: Option<String>,
}

/// URL, headers and signing secret are secrets.
impl std::fmt::Debug for NewEndpointBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewEndpointBody").field("method", &self.method).finish_non_exhaustive()
    }
}

fn post() -> String {
    "POST".to_owned()
}

fn connect_timeout_ms() -> u32 {
    5_000
}

fn timeout_ms() -> u32 {
    15_000
}

fn requests_max() -> u32 {
    8
}

fn failures_max() -> u32 {
    5
}

fn pause_ms() -> u32 {
    5_000
}

fn no_answer() -> String {
    AnswerMode::None.as_str().to_owned()
}

/// The result of setting an endpoint.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EndpointChange)]
pub struct EndpointChangeBody {
    /// The endpoint as it is now or, of a dry run, would be.
    #[serde(flatten)]
    pub endpoint: EndpointBody,
    /// Whether it was not there before.
    pub is_new: bool,
    /// Settings that differ from what was there before.
    pub changed: Vec<String>,
}

/// A step of the rotation of an endpoint's signing secret.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = EndpointRotation)]
pub struct NewRotation {
    /// Another secret, which signs first from now on; absent for one that the host makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(write_only)]
    pub signing_secret: Option<String>,
    /// Whether the secret before the present one signs no more. Then no other secret is begun.
    #[serde(default)]
    pub finish: bool,
}

/// An endpoint after a step of the rotation.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EndpointRotated)]
pub struct EndpointRotationBody {
    /// The endpoint.
    #[serde(flatten)]
    pub endpoint: EndpointBody,
    /// The secret that the host made, which no other answer shows; null where the request had one,
    /// or finished.
    pub signing_secret: Option<String>,
}

/// The result of a test of an endpoint.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EndpointTest)]
pub struct EndpointTestBody {
    /// Status of the answer; null where there was none.
    pub status: Option<u16>,
    /// What a host would make of it: `delivered`, `refused`, `again` or `rate_limited`.
    pub verdict: String,
    /// Why there was no answer.
    pub error: Option<String>,
    /// Milliseconds that the request took.
    pub took_ms: u64,
}

impl EndpointBody {
    fn new(endpoint: TenantEndpoint, breakers: &[EndpointBreaker]) -> Self {
        let own = breakers.iter().filter(|breaker| breaker.endpoint == endpoint.name);
        let shown = own.map(|breaker| EndpointBreakerBody {
            host: breaker.host.clone(),
            state: breaker.state.clone(),
            failures: breaker.failures,
            probes_at: breaker.probes_at,
        });
        Self {
            breakers: shown.collect(),
            name: endpoint.name,
            revision: endpoint.revision,
            origin: endpoint.origin,
            method: endpoint.method,
            header_names: endpoint.header_names,
            signing_secrets: endpoint.signing_secrets,
            connect_timeout_ms: endpoint.connect_timeout_ms,
            timeout_ms: endpoint.timeout_ms,
            requests_per_second: endpoint.requests_per_second,
            requests_max: endpoint.requests_max,
            failures_max: endpoint.failures_max,
            pause_ms: endpoint.pause_ms,
            answer: endpoint.answer,
            answer_to: endpoint.answer_to,
            answer_event_type: endpoint.answer_event_type,
            receiver_deduplicates: endpoint.receiver_deduplicates,
            duplicates_accepted_by: endpoint.duplicates_accepted_by,
            duplicates_because: endpoint.duplicates_because,
            set_at: endpoint.set_at,
            set_by: endpoint.set_by,
        }
    }
}

impl NewEndpointBody {
    /// Returns the settings. Refuses a body that decides nothing about duplicates, or too much.
    fn settings(self, name: String) -> Result<NewEndpoint, ApiError> {
        let accepted = (self.duplicates_accepted_by, self.duplicates_because);
        let duplicates = match (self.receiver_deduplicates, accepted) {
            (true, (None, None)) => DuplicateDecision::ReceiverDeduplicates,
            (false, (Some(by), Some(because))) => DuplicateDecision::Accepted { by, because },
            _ => {
                return Err(ApiError::invalid(
                    "a request may be sent twice: set either `receiver_deduplicates`, or \
                        `duplicates_accepted_by` together with `duplicates_because`",
                ));
            }
        };
        let answer = self.answer.parse::<AnswerMode>();
        Ok(NewEndpoint {
            name,
            url: self.url,
            method: self.method,
            headers: self.headers.into_iter().collect(),
            signing_secret: self.signing_secret,
            connect_timeout_ms: self.connect_timeout_ms,
            timeout_ms: self.timeout_ms,
            requests_per_second: self.requests_per_second,
            requests_max: self.requests_max,
            failures_max: self.failures_max,
            pause_ms: self.pause_ms,
            answer: answer.map_err(|fault| ApiError::invalid(fault.to_string()))?,
            answer_to: self.answer_to,
            answer_event_type: self.answer_event_type,
            duplicates,
        })
    }
}

/// List the endpoints of the tenant
#[utoipa::path(get, path = "/v1/tenants/{tenant}/endpoints", tag = "endpoints", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<EndpointBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<EndpointBody>>, ApiError> {
    let endpoints = caller.control.endpoints();
    let (all, breakers) = (endpoints.list(&tenant).await?, endpoints.breakers(&tenant).await?);
    Ok(Json(all.into_iter().map(|endpoint| EndpointBody::new(endpoint, &breakers)).collect()))
}

/// Show an endpoint of the tenant
#[utoipa::path(get, path = "/v1/tenants/{tenant}/endpoints/{endpoint}", tag = "endpoints",
    params(("tenant" = String, Path), ("endpoint" = String, Path)),
    responses((status = 200, body = EndpointBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, endpoint)): Path<(String, String)>,
) -> Result<Json<EndpointBody>, ApiError> {
    let endpoints = caller.control.endpoints();
    let found = endpoints.get(&tenant, &endpoint).await?;
    Ok(Json(EndpointBody::new(found, &endpoints.breakers(&tenant).await?)))
}

/// Give the tenant an endpoint, or change it
///
/// The settings of hosts and the limits of the tenant say which hosts are allowed; both are
/// compared again before each request. Requests that begin some seconds later use the new settings.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/endpoints/{endpoint}", tag = "endpoints",
    params(("tenant" = String, Path), ("endpoint" = String, Path),
        ("dry_run" = Option<bool>, Query, description = "Only say what would change")),
    request_body = NewEndpointBody,
    responses((status = 200, body = EndpointChangeBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn set(
    caller: Caller,
    Path((tenant, endpoint)): Path<(String, String)>,
    mut query: Query,
    extract::Json(new): extract::Json<NewEndpointBody>,
) -> Result<Json<EndpointChangeBody>, ApiError> {
    let is_dry = query.flag("dry_run")?;
    query.end()?;
    let new = new.settings(endpoint)?;
    let EndpointChange { endpoint, is_new, changed } =
        caller.control.endpoints().set(&tenant, &new, is_dry).await?;
    let changed = changed.into_iter().map(str::to_owned).collect();
    Ok(Json(EndpointChangeBody { endpoint: EndpointBody::new(endpoint, &[]), is_new, changed }))
}

/// Remove an endpoint of the tenant, with its secrets
///
/// Messages that are still to be sent to it are parked.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/endpoints/{endpoint}", tag = "endpoints",
    params(("tenant" = String, Path), ("endpoint" = String, Path)),
    responses((status = 200, body = EndpointBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn remove(
    caller: Caller,
    Path((tenant, endpoint)): Path<(String, String)>,
) -> Result<Json<EndpointBody>, ApiError> {
    let removed = caller.control.endpoints().remove(&tenant, &endpoint).await?;
    Ok(Json(EndpointBody::new(removed, &[])))
}

/// Rotate the signing secret of an endpoint
///
/// Until the rotation is finished, requests are signed with both secrets. A secret that the host
/// makes is in this answer and in no other.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/endpoints/{endpoint}/rotate", tag = "endpoints",
    params(("tenant" = String, Path), ("endpoint" = String, Path)), request_body = NewRotation,
    responses((status = 200, body = EndpointRotationBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn rotate(
    caller: Caller,
    Path((tenant, endpoint)): Path<(String, String)>,
    extract::Json(new): extract::Json<NewRotation>,
) -> Result<Json<EndpointRotationBody>, ApiError> {
    let (step, made) = match (new.finish, new.signing_secret) {
        (true, None) => (SecretRotation::Finish, None),
        (true, Some(_)) => {
            return Err(ApiError::invalid("`finish` begins no other `signing_secret`"));
        }
        (false, Some(secret)) => (SecretRotation::Begin(secret), None),
        (false, None) => {
            let secret = generate_signing_secret();
            (SecretRotation::Begin(secret.clone()), Some(secret))
        }
    };
    let rotated = caller.control.endpoints().rotate(&tenant, &endpoint, &step).await?;
    let endpoint = EndpointBody::new(rotated, &[]);
    Ok(Json(EndpointRotationBody { endpoint, signing_secret: made }))
}

/// Send a test message to an endpoint, once
///
/// Its event type is `oncebox.test`, and its payload says that it is a test. The host that answers
/// this request sends it.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/endpoints/{endpoint}/test", tag = "endpoints",
    params(("tenant" = String, Path), ("endpoint" = String, Path)), request_body = Nothing,
    responses((status = 200, body = EndpointTestBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn test(
    caller: Caller,
    Path((tenant, endpoint)): Path<(String, String)>,
    extract::Json(Nothing {}): extract::Json<Nothing>,
) -> Result<Json<EndpointTestBody>, ApiError> {
    let EndpointTest { status, verdict, error, took_ms } =
        caller.control.endpoints().test(&tenant, &endpoint).await?;
    Ok(Json(EndpointTestBody { status, verdict: verdict.to_owned(), error, took_ms }))
}
