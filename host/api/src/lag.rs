//! The records that the group of a consumer has not acked, as the brokers count them.

use std::time::Duration;

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use oncebox_control::Consumer;
use oncebox_model::policy::Policy;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    brokers::{BrokerError, GroupPosition, NO_BROKERS, SeekTo},
    error::{ApiError, Code},
    extract::Path,
    shared_answers::SharedAnswers,
};

/// Age up to which an answer of the brokers, or a failure, is given again.
const FRESH: Duration = Duration::from_secs(5);

/// Largest number of consumers about which brokers are asked at a time. Each takes a client.
const AT_ONCE: usize = 4;

/// The records that the group of a consumer has not acked. Numbers of records are upper bounds:
/// they are differences of offsets, which may have gaps.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Lag)]
pub struct LagBody {
    /// Number of records in all partitions that are not acked.
    pub records: i64,
    /// Every partition of the consumer's topics, with the largest lag first.
    pub partitions: Vec<PartitionLagBody>,
    /// Time of the brokers' answer.
    pub measured_at: DateTime<Utc>,
}

/// The lag in one partition.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = PartitionLag)]
pub struct PartitionLagBody {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// Offset at which the group continues. Null where it never committed one, and begins at the
    /// first record.
    pub committed: Option<i64>,
    /// The first offset that the brokers still have.
    pub low: i64,
    /// The offset after the last record.
    pub high: i64,
    /// Number of records that are not acked.
    pub records: i64,
}

impl LagBody {
    fn of(positions: Vec<GroupPosition>, measured_at: DateTime<Utc>) -> Self {
        let mut partitions: Vec<_> = positions.into_iter().map(PartitionLagBody::of).collect();
        partitions.sort_by(|a, b| {
            let place = |lag: &PartitionLagBody| (lag.topic.clone(), lag.partition);
            b.records.cmp(&a.records).then_with(|| place(a).cmp(&place(b)))
        });
        let records = partitions.iter().map(|partition| partition.records).sum();
        Self { records, partitions, measured_at }
    }
}

impl PartitionLagBody {
    fn of(position: GroupPosition) -> Self {
        let records = position.high.saturating_sub(position.next()).max(0);
        let GroupPosition { topic, partition, committed, low, high, .. } = position;
        Self { topic, partition, committed, low, high, records }
    }
}

/// The brokers' last answers, by the key of a consumer and its revision.
pub(crate) type LagAnswers = SharedAnswers<(i32, i64), LagBody, BrokerError>;

/// Creates the store of the brokers' answers.
pub(crate) fn answers() -> LagAnswers {
    SharedAnswers::new(AT_ONCE, FRESH, FRESH)
}

/// Asks the brokers about a consumer.
async fn ask(api: Api, consumer: Consumer, policy: Policy) -> Result<LagBody, BrokerError> {
    let brokers = api.brokers().ok_or_else(|| BrokerError::Unavailable(NO_BROKERS.to_owned()))?;
    let (tenant, name) = (&consumer.tenant, &consumer.name);
    let positions = brokers.positions(tenant, name, &policy, SeekTo::End, None).await?;
    Ok(LagBody::of(positions, Utc::now()))
}

/// Show the records that a consumer's group has not acked, by partition
///
/// Asks the brokers, whether a host runs the consumer or not. An answer is given again for five
/// seconds. With `ack = "after_insert"` a record is acked before it runs, and the backlog of the
/// inbox has the rest.
#[utoipa::path(get, path = "/v1/tenants/{tenant}/consumers/{consumer}/lag", tag = "consumers",
    params(("tenant" = String, Path), ("consumer" = String, Path)), responses((status = 200, body = LagBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, consumer)): Path<(String, String)>,
) -> Result<Json<LagBody>, ApiError> {
    let consumer = caller.control.consumers().get(&tenant, &consumer).await?;
    let policy = consumer.policy()?;
    if let Some(pattern) = policy.topics.iter().find(|topic| topic.starts_with('^')) {
        return Err(ApiError::new(
            Code::Conflict,
            format!(
                "`{pattern}` stands for any number of topics, whose lag the brokers are not asked \
                for; `oncebox_kafka_lag_records` of the hosts has it"
            ),
        ));
    }
    let key = (consumer.consumer_id, consumer.revision);
    let asking = ask(api.clone(), consumer, policy);
    let answer = api.lag_answers().get(api.tasks(), key, asking).await.map_err(|error| {
        let text = "the host failed to ask the brokers; its log says why";
        ApiError::host(Code::Internal, text, error)
    })?;
    Ok(Json(answer?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(partition: i32, committed: Option<i64>, low: i64, high: i64) -> GroupPosition {
        let (topic, target, horizon) = ("t".to_owned(), None, None);
        GroupPosition { topic, partition, committed, target, low, high, horizon }
    }

    #[test]
    fn what_is_not_acked_is_counted() {
        let lag = LagBody::of(
            vec![
                at(0, Some(90), 10, 100),
                at(1, None, 10, 100),
                at(2, Some(100), 10, 100),
                at(3, Some(5), 10, 100),
                // A topic that was truncated.
                at(4, Some(200), 0, 100),
                at(5, Some(0), 0, 0),
            ],
            DateTime::UNIX_EPOCH,
        );
        let found: Vec<_> = lag.partitions.iter().map(|it| (it.partition, it.records)).collect();
        assert_eq!(found, [(1, 90), (3, 90), (0, 10), (2, 0), (4, 0), (5, 0)]);
        assert_eq!(lag.records, 190);
    }
}
