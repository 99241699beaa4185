//! Storage: the size of inboxes, and their size to come.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use futures::StreamExt;
use oncebox_control::{
    BudgetExcess, Control, DatabaseLabel, InboxDatabase, StorageReport, Tenant, TenantStorage,
};
use oncebox_model::{InboxError, MessageStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    databases::DatabaseLabelBody,
    error::{ApiError, Code},
    extract::Path,
    shared_answers::{AnswerLost, SharedAnswers},
};

/// Longest wait for the measurement of one database, before the answer is given without it. The
/// measurement goes on, for the next request.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Databases that a request measures at a time.
const AT_ONCE: usize = 4;
/// Databases that are measured at a time for all requests. One that does not answer keeps its place
/// until its connection times out, so that there are more places than a request takes.
const AT_ONCE_OF_ALL: usize = 16;
/// Time for which a measurement is given to further requests. It reads some megabytes of each time
/// partition, so that callers cannot have one after the other.
const FRESH: Duration = Duration::from_secs(60);
/// The same for a measurement that failed.
const FRESH_FAILURE: Duration = Duration::from_secs(5);

/// The size of the inboxes of an installation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Storage)]
pub struct StorageBody {
    /// Tenants with consumers, by database and name. Those of a database that does not answer are
    /// not there.
    pub tenants: Vec<TenantStorageBody>,
    /// The databases: the host's first, then those that tenants named.
    pub databases: Vec<StorageDatabaseBody>,
}

/// The size of a tenant's inbox. The tenant's own tables and the history of messages do not count.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantStorage)]
pub struct TenantStorageBody {
    /// The tenant.
    pub tenant: String,
    /// Time of the measurement, at most a minute ago.
    pub measured_at: DateTime<Utc>,
    /// Sum of its consumers' messages.
    pub messages: i64,
    /// Sum of their bytes.
    pub bytes: i64,
    /// Sum of their bytes a day.
    pub bytes_per_day: i64,
    /// Sum of their bytes in 30 days.
    pub bytes_in_30_days: i64,
    /// Bytes that the inbox is meant to take at most: the tenant's limit `storage_budget_bytes`;
    /// null for no budget.
    pub budget_bytes: Option<u64>,
    /// Time at which the inbox is above the budget; null where it stays within it for 30 days.
    pub budget_exceeded: Option<BudgetExcessBody>,
    /// Its consumers, by name.
    pub consumers: Vec<ConsumerStorageBody>,
}

/// The size of a consumer's inbox, and its size to come with the present growth.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ConsumerStorage)]
pub struct ConsumerStorageBody {
    /// The consumer.
    pub consumer: String,
    /// Its retention class, as `retention` in its policy.
    pub class: String,
    /// Messages in the inbox.
    pub messages: i64,
    /// The same by status; one that no message has is missing.
    #[serde(default)] // a host of release 0.1.0 does not send it
    #[schema(value_type = BTreeMap<String, i64>)]
    pub messages_by_status: BTreeMap<MessageStatus, i64>,
    /// Bytes that they take: their share of the time partitions, with indexes.
    pub bytes: i64,
    /// Bytes a day that messages add: the mean of the last `growth_days`.
    pub bytes_per_day: i64,
    /// Days that the growth was measured over: 1, and 7 or 30 where a sample of a large inbox holds
    /// too little of one day.
    pub growth_days: i64,
    /// Bytes at which the inbox levels off; null for a consumer that remembers for ever.
    pub levels_off_at_bytes: Option<i64>,
    /// Bytes in 30 days.
    pub bytes_in_30_days: i64,
    /// Bytes in 365 days.
    pub bytes_in_365_days: i64,
    /// Whether the figures are estimates, from a sample of the time partitions.
    pub is_sampled: bool,
}

/// The time at which an inbox is above its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = BudgetExcess)]
#[serde(rename_all = "snake_case")]
pub enum BudgetExcessBody {
    /// Now.
    Now,
    /// In 30 days, with the present growth.
    #[serde(rename = "in_30_days")]
    In30Days,
}

/// A database with an inbox, and the size of its time partitions.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = StorageDatabase)]
pub struct StorageDatabaseBody {
    /// The database.
    #[serde(flatten)]
    pub label: DatabaseLabelBody,
    /// Cause where the database does not answer. Then the list is empty.
    pub error: Option<String>,
    /// Time partitions of the inbox.
    pub partitions: Vec<StoragePartitionBody>,
}

/// The size of a time partition.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = StoragePartition)]
pub struct StoragePartitionBody {
    /// Name of its table.
    pub name: String,
    /// Name of its retention class, as `retention` in a policy.
    pub class: String,
    /// Size with its indexes, bytes. Exact, unlike the sizes of consumers.
    pub bytes: i64,
}

impl From<BudgetExcess> for BudgetExcessBody {
    fn from(excess: BudgetExcess) -> Self {
        match excess {
            BudgetExcess::Now => Self::Now,
            BudgetExcess::In30Days => Self::In30Days,
        }
    }
}

impl From<oncebox_control::ConsumerStorage> for ConsumerStorageBody {
    fn from(storage: oncebox_control::ConsumerStorage) -> Self {
        let oncebox_control::ConsumerStorage {
            consumer,
            class,
            messages,
            messages_by_status,
            bytes,
            bytes_per_day,
            growth_days,
            levels_off_at_bytes,
            bytes_in_30_days,
            bytes_in_365_days,
            is_sampled,
        } = storage;
        Self {
            consumer,
            class,
            messages,
            messages_by_status,
            bytes,
            bytes_per_day,
            growth_days,
            levels_off_at_bytes,
            bytes_in_30_days,
            bytes_in_365_days,
            is_sampled,
        }
    }
}

impl TenantStorageBody {
    fn new(storage: &TenantStorage, budget: Option<u64>, measured_at: DateTime<Utc>) -> Self {
        Self {
            tenant: storage.tenant.clone(),
            measured_at,
            messages: storage.sum(|consumer| consumer.messages),
            bytes: storage.sum(|consumer| consumer.bytes),
            bytes_per_day: storage.sum(|consumer| consumer.bytes_per_day),
            bytes_in_30_days: storage.sum(|consumer| consumer.bytes_in_30_days),
            budget_bytes: budget,
            budget_exceeded: storage.excess(budget).map(Into::into),
            consumers: storage.consumers.iter().cloned().map(Into::into).collect(),
        }
    }
}

/// The last measurement of each database.
pub(crate) type StorageReports = SharedAnswers<DatabaseLabel, Arc<StorageReport>, Arc<InboxError>>;

/// Creates the store of measurements.
pub(crate) fn reports() -> StorageReports {
    SharedAnswers::new(AT_ONCE_OF_ALL, FRESH, FRESH_FAILURE)
}

/// Show the size of all inboxes, by tenant and consumer, and their size to come
///
/// A database that does not answer is in the answer with its error.
#[utoipa::path(get, path = "/v1/storage", tag = "storage", responses((status = 200, body = StorageBody)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    State(api): State<Api>,
) -> Result<Json<StorageBody>, ApiError> {
    let tenants = caller.control.tenants().list().await?;
    let budgets: HashMap<_, _> = tenants.into_iter().map(budget).collect();
    let read = |database: InboxDatabase| {
        let (api, control) = (api.clone(), caller.control.clone());
        async move { (database.label.clone(), measured(&api, control, database).await) }
    };
    let databases = caller.control.tenant_databases().all().await?;
    let reads: Vec<_> = databases.into_iter().map(read).collect();
    let reports: Vec<_> = futures::stream::iter(reads).buffered(AT_ONCE).collect().await;
    let mut body = StorageBody { tenants: Vec::new(), databases: Vec::new() };
    for (label, report) in reports {
        let (partitions, error) = match report {
            Ok(report) => {
                body.tenants.extend(report.tenants.iter().map(|storage| {
                    let budget = budgets.get(&storage.tenant).copied().flatten();
                    TenantStorageBody::new(storage, budget, report.measured_at)
                }));
                (partitions(&report), None)
            }
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        body.databases.push(StorageDatabaseBody { label: label.into(), error, partitions });
    }
    Ok(Json(body))
}

/// Show the size of a tenant's inbox, by consumer, and its size to come
#[utoipa::path(get, path = "/v1/tenants/{tenant}/storage", tag = "storage", params(("tenant" = String, Path)),
    responses((status = 200, body = TenantStorageBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show_of_tenant(
    caller: Caller,
    State(api): State<Api>,
    Path(tenant): Path<String>,
) -> Result<Json<TenantStorageBody>, ApiError> {
    let tenant = caller.control.tenants().get(&tenant).await?;
    let database = caller.control.tenant_databases().inbox_of(&tenant)?;
    let report = measured(&api, caller.control, database).await?;
    let found = report.tenants.iter().find(|storage| storage.tenant == tenant.name).cloned();
    let storage = found.unwrap_or_else(|| TenantStorage::empty(&tenant.name));
    let budget = tenant.limits.storage_budget_bytes;
    Ok(Json(TenantStorageBody::new(&storage, budget, report.measured_at)))
}

/// Returns the bytes a day that a consumer's messages add; none where that is not known now.
pub(crate) async fn bytes_per_day(
    api: &Api,
    control: &Control,
    tenant: &str,
    consumer: &str,
) -> Option<u64> {
    let row = control.tenants().get(tenant).await.ok()?;
    let database = control.tenant_databases().inbox_of(&row).ok()?;
    let report = measured(api, control.clone(), database).await.ok()?;
    let storage = report.tenants.iter().find(|storage| storage.tenant == tenant)?;
    let found = storage.consumers.iter().find(|storage| storage.consumer == consumer)?;
    u64::try_from(found.bytes_per_day).ok()
}

/// Returns the measurement of a database, of at most a minute ago. One that takes too long goes on
/// without the request.
async fn measured(
    api: &Api,
    control: Control,
    database: InboxDatabase,
) -> Result<Arc<StorageReport>, MeasureError> {
    let label = database.label.clone();
    let measuring =
        async move { control.storage().report(&database).await.map(Arc::new).map_err(Arc::new) };
    let report = api.storage_reports().get(api.tasks(), label, measuring);
    match tokio::time::timeout(ANSWER_MAX, report).await {
        Ok(Ok(report)) => report.map_err(MeasureError::Inbox),
        Ok(Err(error)) => Err(MeasureError::Lost(error)),
        Err(_) => Err(MeasureError::Late),
    }
}

/// The reason why a database has no measurement.
#[derive(Debug, thiserror::Error)]
enum MeasureError {
    #[error("{0}")]
    Inbox(Arc<InboxError>),
    #[error("the host failed to measure the database; its log says why")]
    Lost(AnswerLost),
    #[error("the measurement took more than {} s; ask again for its result", ANSWER_MAX.as_secs())]
    Late,
}

impl From<MeasureError> for ApiError {
    fn from(error: MeasureError) -> Self {
        let text = error.to_string();
        match error {
            MeasureError::Inbox(error) => {
                let text = "the size of the inbox is not known at present; try again later";
                Self::host(Code::Unavailable, text, error)
            }
            MeasureError::Lost(error) => Self::host(Code::Internal, text, error),
            MeasureError::Late => Self::new(Code::Timeout, text),
        }
    }
}

/// Returns the name of a tenant with its budget.
fn budget(tenant: Tenant) -> (String, Option<u64>) {
    (tenant.name, tenant.limits.storage_budget_bytes)
}

fn partitions(report: &StorageReport) -> Vec<StoragePartitionBody> {
    let partition = |partition: &oncebox_control::TimePartition| StoragePartitionBody {
        name: partition.name.clone(),
        class: partition.class.clone(),
        bytes: partition.bytes,
    };
    report.partitions.iter().map(partition).collect()
}
