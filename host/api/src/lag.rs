//! The records that the group of a consumer has not acked, as the brokers count them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex as Lock, PoisonError},
    time::{Duration, Instant},
};

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use oncebox_control::Consumer;
use oncebox_model::policy::Policy;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Semaphore};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    brokers::{BrokerError, Brokers, GroupPosition, NO_BROKERS, SeekTo},
    error::{ApiError, Code},
    extract::Path,
};

/// Age up to which an answer of the brokers is given again.
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

/// The last answers of the brokers, by consumer.
pub(crate) struct LagAnswers {
    last: Lock<HashMap<i32, Arc<LastAnswer>>>,
    asking: Semaphore,
}

/// The last answer about one consumer. The task that asks holds it locked, so that requests wait
/// for one answer together.
type LastAnswer = Mutex<Option<Answered>>;

#[derive(Clone)]
struct Answered {
    at: Instant,
    /// Revision of the consumer that was asked about.
    revision: i64,
    answer: Result<LagBody, BrokerError>,
}

impl Answered {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < FRESH
    }
}

impl Default for LagAnswers {
    fn default() -> Self {
        Self { last: Lock::default(), asking: Semaphore::new(AT_ONCE) }
    }
}

impl LagAnswers {
    /// Returns the answer about a consumer, and forgets those that are no longer fresh.
    fn of(&self, consumer_id: i32) -> Arc<LastAnswer> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|_, answer| {
            let is_fresh =
                || answer.try_lock().is_ok_and(|it| it.as_ref().is_some_and(Answered::is_fresh));
            Arc::strong_count(answer) > 1 || is_fresh()
        });
        last.entry(consumer_id).or_default().clone()
    }

    /// Returns the brokers' answer about a consumer, a new one where the last is not fresh.
    async fn fresh(
        &self,
        brokers: &dyn Brokers,
        consumer: &Consumer,
        policy: &Policy,
    ) -> Result<LagBody, BrokerError> {
        let answer = self.of(consumer.consumer_id);
        let mut last = answer.lock().await;
        if let Some(answered) = &*last
            && answered.is_fresh()
            && answered.revision == consumer.revision
        {
            return answered.answer.clone();
        }
        let _place = self.asking.acquire().await;
        let (tenant, name) = (&consumer.tenant, &consumer.name);
        let positions = brokers.positions(tenant, name, policy, SeekTo::End, None).await;
        let answer = positions.map(|positions| LagBody::of(positions, Utc::now()));
        let at = Instant::now();
        *last = Some(Answered { at, revision: consumer.revision, answer: answer.clone() });
        answer
    }
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
    // The task goes on without its caller, and keeps its place until the brokers have answered.
    let task = api.tasks().spawn({
        let api = api.clone();
        async move {
            let brokers =
                api.brokers().ok_or_else(|| BrokerError::Unavailable(NO_BROKERS.to_owned()))?;
            api.lag_answers().fresh(brokers, &consumer, &policy).await
        }
    });
    let answer = task.await.map_err(|error| ApiError::new(Code::Internal, error.to_string()))?;
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
