//! Consumers of a tenant.

use axum::{Json, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_model::policy::{Policy, Retention, WireFormat, apart, is_pattern};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::{ApiError, Code},
    extract::{self, Path},
    horizon::{self, HorizonCheck},
};

/// A consumer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Consumer)]
pub struct ConsumerBody {
    /// Key.
    pub consumer_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name.
    pub name: String,
    /// Its policy. Values of `kafka.properties` are not shown.
    pub policy: Value,
    /// Requested state: `running`, `paused`, `draining` or `deleting`.
    pub state: String,
    /// State of its tenant. Consumers run only where it is `active`.
    pub tenant_state: String,
    /// Revision; it grows with every change of the policy or state.
    pub revision: i64,
    /// Offsets of a seek that is not finished; null where there is none.
    pub seek: Option<Vec<SeekOffsetBody>>,
    /// Quarantine, which keeps hosts from starting the consumer; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<QuarantineBody>,
    /// Messages in its inbox that are still to be run, up to 10,001. Only in the answer for one
    /// consumer, and only where its database answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_messages: Option<i64>,
    /// Deliveries that hosts refused as duplicates. Only in the answer for one consumer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<DuplicatesBody>,
    /// State of the consumer on each running host.
    pub hosts: Vec<HostConsumerStatusBody>,
    /// Generation; it grows with every change of the deployments.
    pub generation: i64,
    /// Time of creation.
    pub created_at: DateTime<Utc>,
    /// Warnings for the owner. Only in the answer to its creation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Deliveries that hosts refused because their message is done already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Duplicates)]
pub struct DuplicatesBody {
    /// Lower bound of their number. Each host adds its refusals every two seconds, and a host that
    /// dies loses its last ones.
    pub refused: i64,
    /// Start of the count.
    pub since: DateTime<Utc>,
    /// Time at which a host last added refusals; null before the first.
    pub last_at: Option<DateTime<Utc>>,
}

/// The quarantine of a consumer. No host starts the consumer, because a host ended while starting
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Quarantine)]
pub struct QuarantineBody {
    /// Start of the quarantine.
    pub at: DateTime<Utc>,
    /// The host that ended: name of the machine and id of the process.
    pub host: String,
    /// Number of hosts that have ended while starting the consumer.
    pub deaths: i32,
    /// Cause and remedy, as text for a reader.
    pub text: String,
}

/// The next offset of a partition.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = SeekOffset)]
pub struct SeekOffsetBody {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset of the record that is read next.
    pub offset: i64,
}

/// State of a consumer on a running host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = HostRun)]
pub struct HostConsumerStatusBody {
    /// The host.
    pub host_id: i64,
    /// Name of the host.
    pub host: String,
    /// `starting`, `idle`, `running`, `stopped` or `failing`.
    pub state: String,
    /// Revision of the consumer that `state` belongs to; -1 before the host's first report.
    pub revision: i64,
    /// Error, or the reason why a change waits.
    pub error: Option<String>,
    /// Circuit breakers of its versions that are not closed on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub breakers: Vec<VersionBreakerBody>,
}

/// A circuit breaker that is not closed: messages for the version wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = VersionBreaker)]
pub struct VersionBreakerBody {
    /// Name of the handler.
    pub handler: String,
    /// Digest of the version, in hex.
    pub digest: String,
    /// `open` or `half_open`.
    pub state: String,
    /// Milliseconds, from the host's report on, until a message tries the version again; null while
    /// one does.
    pub probes_in_ms: Option<u64>,
}

impl ConsumerBody {
    /// Creates the wire type of a consumer, with those of the hosts' reports that are about it.
    pub(crate) fn new(
        consumer: oncebox_control::Consumer,
        runs: &[oncebox_control::HostConsumerStatus],
    ) -> Self {
        let policy = consumer.policy_shown();
        let quarantine = consumer.quarantine.as_ref().map(|quarantine| {
            let text = quarantine.text(&consumer.tenant, &consumer.name);
            QuarantineBody {
                at: quarantine.at,
                host: quarantine.host.clone(),
                deaths: quarantine.deaths,
                text,
            }
        });
        let oncebox_control::Consumer {
            consumer_id,
            tenant,
            name,
            generation,
            created_at,
            state,
            tenant_state,
            revision,
            seek,
            ..
        } = consumer;
        let offset = |to: oncebox_control::SeekOffset| SeekOffsetBody {
            topic: to.topic,
            partition: to.partition,
            offset: to.offset,
        };
        let seek = seek.map(|seek| seek.offsets.into_iter().map(offset).collect());
        let hosts =
            runs.iter().filter(|run| run.consumer_id == consumer_id).map(host_run).collect();
        Self {
            consumer_id,
            tenant,
            name,
            policy,
            state: state.to_string(),
            tenant_state: tenant_state.to_string(),
            revision,
            seek,
            quarantine,
            open_messages: None,
            duplicates: None,
            hosts,
            generation,
            created_at,
            warnings: Vec::new(),
        }
    }
}

fn host_run(run: &oncebox_control::HostConsumerStatus) -> HostConsumerStatusBody {
    let oncebox_control::HostConsumerStatus {
        host_id, host, state, revision, error, breakers, ..
    } = run.clone();
    let breakers = breakers.0.into_iter().map(VersionBreakerBody::from).collect();
    HostConsumerStatusBody { host_id, host, state, revision, error, breakers }
}

impl From<oncebox_control::VersionBreaker> for VersionBreakerBody {
    fn from(breaker: oncebox_control::VersionBreaker) -> Self {
        let oncebox_control::VersionBreaker { handler, digest, state, probes_in_ms } = breaker;
        Self { handler, digest, state, probes_in_ms }
    }
}

/// Reads a consumer with the hosts' reports about it.
pub(crate) async fn shown(
    control: &oncebox_control::Control,
    tenant: &str,
    name: &str,
) -> Result<ConsumerBody, ApiError> {
    let consumer = control.consumers().get(tenant, name).await?;
    let runs = control.hosts().statuses(Some(tenant), Some(name)).await?;
    Ok(ConsumerBody::new(consumer, &runs))
}

/// A consumer to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewConsumer {
    /// A lower-case letter, then up to 62 of a-z, 0-9 and `-`.
    pub name: String,
    /// The policy, with the keys of a policy's file.
    #[schema(value_type = Object)]
    pub policy: Map<String, Value>,
}

/// List consumers
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers", tag = "consumers", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<ConsumerBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<ConsumerBody>>, ApiError> {
    let tenant = caller.control.tenants().get(&tenant).await?.name;
    let (all, runs) = (
        caller.control.consumers().list().await?,
        caller.control.hosts().statuses(Some(&tenant), None).await?,
    );
    let of_tenant = all.into_iter().filter(|consumer| consumer.tenant == tenant);
    Ok(Json(of_tenant.map(|consumer| ConsumerBody::new(consumer, &runs)).collect()))
}

/// Create a consumer
///
/// The consumer starts with its first deployment. A token of a tenant cannot set
/// `kafka.properties`: with them a consumer could log in to the brokers under another identity. It
/// can name only groups that begin with `oncebox.<tenant>.`. It can name only topics of its
/// tenant's `topics_allowed`, which are `oncebox.<tenant>.*` until an operator changes them. It can
/// never set a pattern. Where the brokers keep records for longer than `retention` covers, a policy
/// with `replay.past_horizon = "run"` is refused, and another gets a warning. With
/// `replay.horizon = "raise"` the consumer gets the longer `retention` that it needs, with a
/// warning, and is refused where `replay.raise_max` forbids that. A policy whose `factors`
/// contradict the longest redelivery is refused. A token of a tenant cannot choose a `retention`
/// above the tenant's limit `retention_max`, and cannot let a raise choose `permanent`.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers", tag = "consumers", params(("tenant" = String, Path)),
    request_body = NewConsumer, responses((status = 201, body = ConsumerBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn create(
    State(api): State<Api>,
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(new): extract::Json<NewConsumer>,
) -> Result<(StatusCode, Json<ConsumerBody>), ApiError> {
    let mut policy = parse(new.policy).await?;
    check_tenants_policy(&caller, &tenant, &new.name, &mut policy, None).await?;
    api.components().check_policy(&tenant, &new.name, &policy).map_err(ApiError::invalid)?;
    let HorizonCheck { raise, warnings } =
        horizon::check_new(&api, &caller, &tenant, &new.name, &mut policy).await?;
    let raise = raise.as_ref();
    caller.control.consumers().create_raised(&tenant, &new.name, &policy, raise).await?;
    if let Some(raise) = raise {
        horizon::log_raise(&tenant, &new.name, raise);
    }
    let shown = shown(&caller.control, &tenant, &new.name).await?;
    Ok((StatusCode::CREATED, Json(ConsumerBody { warnings, ..shown })))
}

/// Refuses a policy that a token of a tenant may not set. Brokers know nothing of tenants. A policy
/// that is not refused here can read another tenant's topic, or take partitions and offsets of
/// another tenant's group. Tokens that are of no tenant are not restricted. A tenant may keep
/// settings that an operator gave its consumer.
pub(crate) async fn check_tenants_policy(
    caller: &Caller,
    tenant: &str,
    consumer: &str,
    policy: &mut Policy,
    before: Option<&oncebox_control::Consumer>,
) -> Result<(), ApiError> {
    if caller.principal.tenant().is_none() {
        return Ok(());
    }
    let before = before.and_then(|before| before.policy().ok());
    let forbidden = |detail: String| Err(ApiError::new(Code::Forbidden, detail));
    match &before {
        Some(before) => policy.kafka.properties = before.kafka.properties.clone(),
        None if !policy.kafka.properties.is_empty() => {
            return forbidden(
                "a token of a tenant cannot set `policy.kafka.properties`; ask \
                whoever runs the host"
                    .to_owned(),
            );
        }
        None => {}
    }
    // Schemas have no check per tenant: messages are decoded with the host's access to the
    // registry.
    if policy.wire_format != WireFormat::Plain
        && before.as_ref().is_none_or(|before| before.wire_format != policy.wire_format)
    {
        return forbidden(
            "a token of a tenant cannot set `policy.wire_format`; ask whoever runs the host"
                .to_owned(),
        );
    }
    let (group, own) = (policy.group(tenant, consumer), format!("oncebox.{tenant}."));
    if !group.starts_with(&own)
        && before.as_ref().is_none_or(|before| before.group(tenant, consumer) != group)
    {
        return forbidden(format!(
            "a token of a tenant can set `policy.kafka.group` only to what begins with `{own}`"
        ));
    }
    let copies = &policy.dead_letters.topic;
    let may_write = |topic: &String| {
        topic.starts_with(&own)
            || before
                .as_ref()
                .is_some_and(|before| before.dead_letters.topic.as_ref() == Some(topic))
    };
    if !copies.as_ref().is_none_or(may_write) {
        return forbidden(format!(
            "a token of a tenant can set `policy.dead_letters.topic` only to what begins with \
                `{own}`"
        ));
    }
    let limits = caller.control.tenants().get(tenant).await?.limits;
    if let Some(refusal) = memory_refusal(&limits, policy, before.as_ref()) {
        return forbidden(refusal);
    }
    let known = before.map(|before| before.topics).unwrap_or_default();
    match policy
        .topics
        .iter()
        .find(|topic| !known.contains(topic) && !limits.allows_topic(tenant, topic))
    {
        Some(topic) => forbidden(may_not_read(tenant, topic)),
        None => Ok(()),
    }
}

/// Returns the refusal of a memory that a tenant's token may not choose. The class of an existing
/// consumer cannot change, so only a new one is held against the limit.
fn memory_refusal(
    limits: &oncebox_model::TenantLimits,
    policy: &Policy,
    before: Option<&Policy>,
) -> Option<String> {
    let (class, raise_max) = (policy.retention, policy.replay.raise_max);
    let is_raised_for_ever = raise_max == Some(Retention::Permanent)
        && before.is_none_or(|before| before.replay.raise_max != raise_max);
    if is_raised_for_ever {
        return Some(
            "a token of a tenant cannot set `policy.replay.raise_max` to `permanent`; name a \
                shorter class, or ask whoever runs the host"
                .to_owned(),
        );
    }
    let most = limits.retention_max.filter(|most| before.is_none() && class > *most)?;
    Some(format!(
        "`policy.retention` is `{}`, above the tenant's limit `retention_max`, `{}`; choose a \
            shorter class, or ask whoever runs the host for a higher limit",
        class.name(),
        most.name()
    ))
}

/// Returns the refusal of a topic that a tenant's token may not read.
pub(crate) fn may_not_read(tenant: &str, topic: &str) -> String {
    let why =
        if is_pattern(topic) { "; a pattern is for whoever runs the host to set" } else { "" };
    format!(
        "tenant `{tenant}` may not read topic `{topic}`{why}; ask whoever runs the host for it \
            (`oncebox tenant limits {tenant}`)"
    )
}

pub(crate) async fn parse(policy: Map<String, Value>) -> Result<Policy, ApiError> {
    Ok(apart(move || Policy::of(Value::Object(policy))).await??)
}

/// Show a consumer
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = ConsumerBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<ConsumerBody>, ApiError> {
    let row = caller.control.consumers().get(&tenant, &consumer).await?;
    // What hosts report of it is in the host's database, and shows why the tenant's does not answer.
    let counted = caller.control.reconciliation().open_messages(&row).await;
    let open_messages = match counted.map_err(ApiError::from) {
        Err(error) if error.status() == StatusCode::SERVICE_UNAVAILABLE => None,
        counted => Some(counted?),
    };
    let oncebox_control::Duplicates { refused, since, last_at } =
        caller.control.hosts().duplicates(row.consumer_id).await?;
    let duplicates = Some(DuplicatesBody { refused, since, last_at });
    Ok(Json(ConsumerBody {
        open_messages,
        duplicates,
        ..shown(&caller.control, &tenant, &consumer).await?
    }))
}
