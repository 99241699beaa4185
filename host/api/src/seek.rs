//! Seeking: first a plan of its consequences, then the seek.

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use oncebox_control::{Control, SeekOffset};
use oncebox_model::policy::{Dedup, PastHorizon, Policy};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    brokers::{GroupPosition, NO_BROKERS, SeekTo, SeekToOffset},
    consumers::{ConsumerBody, may_not_read, shown},
    error::{ApiError, Code},
    extract::{Json as Body, Path},
    horizon,
};

/// The request to move the group of a consumer: one of `to`, `time` and `offsets`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSeek {
    /// `beginning`: the first record that the brokers still have. `end`: the end, after the last
    /// record.
    #[serde(default)]
    pub to: Option<SeekEdge>,
    /// Time; each partition continues at its first record of this time or a later one.
    #[serde(default)]
    pub time: Option<DateTime<Utc>>,
    /// Offsets to continue at; other partitions keep theirs.
    #[serde(default)]
    pub offsets: Option<Vec<NewOffset>>,
    /// Whether to carry the seek out. Without it the answer is only a plan.
    #[serde(default)]
    pub accept: bool,
}

/// An end of every partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SeekEdge {
    /// The first record.
    Beginning,
    /// The end, after the last record.
    End,
}

/// The offset at which a partition continues.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewOffset {
    /// The topic; optional where the consumer reads only one.
    #[serde(default)]
    pub topic: Option<String>,
    /// The partition.
    pub partition: i32,
    /// Offset of the record that is read next.
    pub offset: i64,
}

/// The consequences of a seek. Numbers of records are upper bounds: they are differences of
/// offsets, which may have gaps.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SeekPlan {
    /// Every partition of the consumer's topics.
    pub partitions: Vec<SeekPartition>,
    /// Number of records that are read again. Records that the inbox knows are duplicates without
    /// effect.
    pub read_again: i64,
    /// Number of these that the inbox may have forgotten, by their age. `replay.past_horizon` says
    /// whether they have their effect again or are parked.
    pub run_again: i64,
    /// Number of records that are skipped: they never run.
    pub skipped: i64,
    /// Age limit: the inbox may have forgotten older records. Null where it forgets nothing, or
    /// where it knows nothing, with `dedup = "off"`.
    pub horizon: Option<DateTime<Utc>>,
    /// Consequences, as texts for a reader.
    pub consequences: Vec<String>,
    /// Whether the seek is carried out.
    pub is_accepted: bool,
    /// The consumer after the request.
    pub consumer: ConsumerBody,
}

/// The consequences of a seek in one partition.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SeekPartition {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The group's present offset. Null where the group never committed one, and begins at the
    /// first record.
    pub committed: Option<i64>,
    /// The group's offset after the seek; null where it stays.
    pub target: Option<i64>,
    /// The first offset that the brokers still have.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// Number of records that are read again, at most.
    pub read_again: i64,
    /// Number of these that have their effect again, at most.
    pub run_again: i64,
    /// Number of records that never run, at most.
    pub skipped: i64,
}

/// Seek: move the group of a consumer to other offsets
///
/// Without `accept` the answer is a plan, and nothing changes. With it, hosts stop the consumer.
/// One of them sets the offsets once the group is empty, and the consumer continues in its former
/// state.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/seek", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), request_body = NewSeek,
    responses((status = 200, body = SeekPlan)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn seek(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
    Body(new): Body<NewSeek>,
) -> Result<Json<SeekPlan>, ApiError> {
    let accept = new.accept;
    let to = wanted(new)?;
    let row = caller.control.consumers().get(&tenant, &consumer).await?;
    let policy = row.policy()?;
    check_named(&caller, &tenant, &policy, &to).await?;
    let horizon = horizon(&caller.control, &policy).await?;
    let brokers = api.brokers().ok_or_else(|| ApiError::new(Code::Unavailable, NO_BROKERS))?;
    let found = brokers.positions(&tenant, &consumer, &policy, to, horizon).await?;
    let partitions: Vec<_> =
        found.into_iter().map(|position| partition(position, &policy)).collect();
    let sum = |count: fn(&SeekPartition) -> i64| partitions.iter().map(count).sum::<i64>();
    let (read_again, run_again, skipped) =
        (sum(|p| p.read_again), sum(|p| p.run_again), sum(|p| p.skipped));
    if accept && read_again > 0 && !policy.replay.allowed {
        return Err(ApiError::new(
            Code::Conflict,
            format!(
                "{read_again} records would be read again, and the policy of `{tenant}/{consumer}` \
                    says `replay.allowed = false`; nothing was changed"
            ),
        ));
    }
    if accept {
        let offsets: Vec<_> = partitions
            .iter()
            .filter_map(|p| {
                Some(SeekOffset {
                    topic: p.topic.clone(),
                    partition: p.partition,
                    offset: p.target?,
                })
            })
            .collect();
        let details = serde_json::json!({ "read_again": read_again, "run_again": run_again, "skipped": skipped });
        caller.control.consumers().begin_seek(&tenant, &consumer, offsets, details).await?;
    }
    let mut consequences = consequences(&policy, horizon, read_again, run_again, skipped);
    if read_again > 0 {
        consequences.extend(horizon::warnings_of(&api, &caller, &row, &policy).await);
    }
    let consumer = shown(&caller.control, &tenant, &consumer).await?;
    Ok(Json(SeekPlan {
        partitions,
        read_again,
        run_again,
        skipped,
        horizon,
        consequences,
        is_accepted: accept,
        consumer,
    }))
}

/// Refuses offsets of a topic that a token of a tenant may not read. A policy with a regular
/// expression does not list its topics.
async fn check_named(
    caller: &Caller,
    tenant: &str,
    policy: &Policy,
    to: &SeekTo,
) -> Result<(), ApiError> {
    let SeekTo::Offsets(named) = to else { return Ok(()) };
    if caller.principal.tenant().is_none() {
        return Ok(());
    }
    let limits = caller.control.tenants().get(tenant).await?.limits;
    let mut named = named.iter().filter_map(|to| to.topic.as_ref());
    match named.find(|topic| !policy.topics.contains(topic) && !limits.allows_topic(tenant, topic))
    {
        Some(topic) => Err(ApiError::new(Code::Forbidden, may_not_read(tenant, topic))),
        None => Ok(()),
    }
}

/// Cancel a seek that is not finished
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/consumers/{consumer}/seek", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = ConsumerBody)),
    extensions(("x-role" = json!("operator"))))]
pub(crate) async fn cancel(
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<ConsumerBody>, ApiError> {
    caller.control.consumers().cancel_seek(&tenant, &consumer).await?;
    Ok(Json(shown(&caller.control, &tenant, &consumer).await?))
}

fn wanted(new: NewSeek) -> Result<SeekTo, ApiError> {
    let offset = |NewOffset { topic, partition, offset }| SeekToOffset { topic, partition, offset };
    match (new.to, new.time, new.offsets) {
        (Some(SeekEdge::Beginning), None, None) => Ok(SeekTo::Beginning),
        (Some(SeekEdge::End), None, None) => Ok(SeekTo::End),
        (None, Some(time), None) => Ok(SeekTo::Time(time)),
        (None, None, Some(offsets)) if offsets.is_empty() => {
            Err(ApiError::invalid("`offsets` names no partition"))
        }
        (None, None, Some(offsets)) => {
            Ok(SeekTo::Offsets(offsets.into_iter().map(offset).collect()))
        }
        _ => Err(ApiError::invalid("a seek needs exactly one of `to`, `time` and `offsets`")),
    }
}

/// Returns the time before which the inbox may have forgotten messages, by the database's clock.
async fn horizon(control: &Control, policy: &Policy) -> Result<Option<DateTime<Utc>>, ApiError> {
    match policy.retention.days() {
        Some(days) if policy.dedup == Dedup::Inbox => {
            Ok(Some(control.now().await? - chrono::Duration::days(days)))
        }
        _ => Ok(None),
    }
}

fn partition(position: GroupPosition, policy: &Policy) -> SeekPartition {
    let now = position.next();
    let GroupPosition { topic, partition, committed, target, low, high, horizon } = position;
    let to = target.unwrap_or(now);
    let read_again = (now - to).max(0);
    let run_again = match policy.dedup {
        Dedup::Off => read_again,
        Dedup::Inbox => horizon.map_or(0, |horizon| (horizon.min(now) - to).max(0)),
    };
    SeekPartition {
        topic,
        partition,
        committed,
        target,
        low,
        high,
        read_again,
        run_again,
        skipped: (to - now).max(0),
    }
}

fn consequences(
    policy: &Policy,
    horizon: Option<DateTime<Utc>>,
    read_again: i64,
    run_again: i64,
    skipped: i64,
) -> Vec<String> {
    let mut all = Vec::new();
    if read_again > 0 && !policy.replay.allowed {
        all.push("the policy says `replay.allowed = false`: this will be refused".to_owned());
    }
    if read_again > 0 && policy.dedup == Dedup::Inbox {
        let duplicates = read_again - run_again;
        all.push(format!(
            "{read_again} records are read again; up to {duplicates} of them are in the inbox if \
                they were read before, and have no second effect"
        ));
    }
    if run_again > 0 {
        all.push(match horizon {
            Some(horizon) => format!(
                "{run_again} records are older than the inbox remembers (before {}): {}",
                horizon.format("%F %T UTC"),
                match policy.replay.past_horizon {
                    PastHorizon::Run => "they WOULD RUN AGAIN, with their effect",
                    PastHorizon::Park => "those that it has forgotten are parked",
                    PastHorizon::ParkByTime => "those that it does not know are parked",
                }
            ),
            None => format!(
                "{run_again} records WOULD RUN AGAIN, with their effect: `dedup` is \
                off"
            ),
        });
    }
    if skipped > 0 {
        all.push(format!(
            "{skipped} records are skipped: they NEVER RUN, unless the consumer is sought back"
        ));
    }
    if read_again == 0 && skipped == 0 {
        all.push("nothing: the group goes on where it stands".to_owned());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(
        policy: &str,
        (committed, target, horizon): (Option<i64>, Option<i64>, Option<i64>),
        counts: (i64, i64, i64),
    ) {
        let policy = Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{policy}"))
            .expect("a policy");
        let position = GroupPosition {
            topic: "t".to_owned(),
            partition: 0,
            committed,
            target,
            low: 10,
            high: 100,
            horizon,
        };
        let found = partition(position, &policy);
        assert_eq!((found.read_again, found.run_again, found.skipped), counts);
    }

    #[test]
    fn what_a_seek_means_is_counted() {
        check("", (Some(60), Some(60), Some(10)), (0, 0, 0));
        check("", (Some(60), None, Some(10)), (0, 0, 0));
        check("", (Some(60), Some(20), Some(10)), (40, 0, 0));
        check("", (Some(60), Some(20), Some(30)), (40, 10, 0));
        check("", (Some(60), Some(20), Some(100)), (40, 40, 0));
        check("", (Some(60), Some(100), Some(100)), (0, 0, 40));
        check("", (None, Some(50), Some(10)), (0, 0, 40));
        check("", (None, Some(10), Some(10)), (0, 0, 0));
        check("", (Some(3), Some(10), Some(100)), (0, 0, 0));
        check("retention = 'permanent'", (Some(60), Some(20), None), (40, 0, 0));
        check("dedup = 'off'", (Some(60), Some(20), None), (40, 40, 0));
    }
}
