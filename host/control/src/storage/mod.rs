//! Storage: the size of each inbox by consumer, its growth, and its size to come.
//!
//! The sizes of time partitions are exact. Exact sizes by consumer would need a read of the whole
//! inbox. So some pages of each partition are read ([`sample`](self::sample)), and each consumer
//! gets its share of the partition's size. Growth and forecast come of the same sample
//! ([`forecast`](self::forecast)). Nothing is written, so that any process measures at any time.

// Growth per day, and the size to come.
mod forecast;
// The sample of a time partition.
mod sample;

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use oncebox_model::{MessageStatus, error::InboxError};
use sqlx::{Connection, PgConnection};

use self::{
    forecast::{Forecast, GrowthWindow, SampledSpan},
    sample::PartitionSample,
};
use crate::{
    database::tenant_database::{DatabaseLabel, InboxDatabase, open::answered_within},
    handles::Storage,
    retention::partitions::{self, TimePartition},
};

/// Longest measurement of a database.
const LONGEST: Duration = Duration::from_secs(120);
/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest statement, milliseconds. One reads the pages of one sample.
const STATEMENT_TIMEOUT_MS: &str = "20000";
/// Longest wait for a lock on a partition, milliseconds.
const LOCK_TIMEOUT_MS: &str = "5000";

/// The storage of one database with an inbox.
#[derive(Debug, Clone)]
pub struct StorageReport {
    /// The database.
    pub label: DatabaseLabel,
    /// Time of the measurement, by the database's clock.
    pub measured_at: DateTime<Utc>,
    /// The time partitions, each with its exact size.
    pub partitions: Vec<TimePartition>,
    /// The tenants that have consumers and their inbox in the database, by name.
    pub tenants: Vec<TenantStorage>,
}

/// The storage of a tenant's inbox. It holds neither the tenant's own tables nor the history of
/// messages.
#[derive(Debug, Clone)]
pub struct TenantStorage {
    /// Name of the tenant.
    pub tenant: String,
    /// Its consumers, by name.
    pub consumers: Vec<ConsumerStorage>,
}

/// The storage of a consumer's messages. Bytes are the consumer's share of tables and indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerStorage {
    /// Name of the consumer.
    pub consumer: String,
    /// Name of its retention class.
    pub class: String,
    /// Messages in the inbox.
    pub messages: i64,
    /// The same by status; one that no message has is missing.
    pub messages_by_status: BTreeMap<MessageStatus, i64>,
    /// Bytes that they take.
    pub bytes: i64,
    /// Bytes a day that messages add, over the last `growth_days`.
    pub bytes_per_day: i64,
    /// Days that the growth was measured over.
    pub growth_days: i64,
    /// Size at which the inbox levels off with this growth; none for a consumer that remembers for
    /// ever.
    pub levels_off_at_bytes: Option<i64>,
    /// Size in 30 days.
    pub bytes_in_30_days: i64,
    /// Size in 365 days.
    pub bytes_in_365_days: i64,
    /// Whether a partition of its class was too large to be read whole, so that the figures are
    /// estimates.
    pub is_sampled: bool,
}

/// The time at which a tenant's inbox is above its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BudgetExcess {
    /// Now.
    Now,
    /// In 30 days, with the present growth.
    In30Days,
}

impl TenantStorage {
    /// Returns the storage of a tenant without consumers.
    pub fn empty(tenant: &str) -> Self {
        Self { tenant: tenant.to_owned(), consumers: Vec::new() }
    }

    /// Returns the sum of a figure over the consumers.
    pub fn sum(&self, of: impl Fn(&ConsumerStorage) -> i64) -> i64 {
        self.consumers.iter().map(of).sum()
    }

    /// Returns when the inbox is above a budget; none where it stays within it for 30 days, or
    /// where there is no budget.
    pub fn excess(&self, budget_bytes: Option<u64>) -> Option<BudgetExcess> {
        let is_above = |bytes: i64| bytes.max(0) as u64 > budget_bytes.unwrap_or(u64::MAX);
        if is_above(self.sum(|consumer| consumer.bytes)) {
            Some(BudgetExcess::Now)
        } else if is_above(self.sum(|consumer| consumer.bytes_in_30_days)) {
            Some(BudgetExcess::In30Days)
        } else {
            None
        }
    }
}

/// A consumer whose inbox is measured.
#[derive(Debug, sqlx::FromRow)]
struct MeasuredConsumer {
    consumer_id: i32,
    tenant: String,
    consumer: String,
    retention_class: i16,
    class: String,
    /// Longest time that its finished messages stay, days: retention and bucket; none for ever.
    kept_days: Option<f64>,
    /// Age of the consumer, days.
    age_days: f64,
}

/// The parts of all samples that belong to one consumer.
#[derive(Debug, Default)]
struct ConsumerSums {
    messages: BTreeMap<MessageStatus, f64>,
    bytes: f64,
    /// Bytes of the messages received within each growth window.
    added: [f64; GrowthWindow::ALL.len()],
}

impl Storage<'_> {
    /// Measures the inbox in a database. Reads at most about 1,000 pages of each time partition,
    /// and changes nothing.
    ///
    /// # Errors
    /// An error of the database or of the host's, or a partition that others lock for too long.
    pub async fn report(&self, database: &InboxDatabase) -> Result<StorageReport, InboxError> {
        let consumers = self.consumers(database).await?;
        let mut connection = connect(database).await?;
        // An error, and a measurement that is given up, drop the connection as it is.
        let measured = answered_within(LONGEST, measure(&mut connection)).await?;
        let (measured_at, partitions, samples) = measured.map_err(explained)?;
        let _ = connection.close().await; // it holds nothing
        let tenants = by_tenant(&consumers, &samples, measured_at);
        Ok(StorageReport { label: database.label.clone(), measured_at, partitions, tenants })
    }

    /// Lists the consumers whose inbox is in a database, by tenant and name. The host's database
    /// is the source of truth about them.
    async fn consumers(
        &self,
        database: &InboxDatabase,
    ) -> Result<Vec<MeasuredConsumer>, InboxError> {
        const CONSUMERS: &str = "SELECT c.consumer_id, t.name AS tenant, c.name AS consumer, \
                c.retention_class, r.name AS class, \
                extract(epoch FROM r.retention + r.bucket)::float8 / 86400 AS kept_days, \
                extract(epoch FROM now() - c.created_at)::float8 / 86400 AS age_days \
            FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) \
            JOIN oncebox.retention_class r USING (retention_class) \
            WHERE t.database IS NOT DISTINCT FROM $1 ORDER BY t.name, c.name";
        let query = sqlx::query_as(CONSUMERS).bind(database.name());
        Ok(query.fetch_all(&self.0.pool).await?)
    }
}

/// Opens a connection of its own. A measurement that is given up closes it, and holds none of the
/// pool while it lasts.
async fn connect(database: &InboxDatabase) -> Result<PgConnection, InboxError> {
    let options = database.database.options.clone().application_name("oncebox storage").options([
        ("statement_timeout", STATEMENT_TIMEOUT_MS),
        ("lock_timeout", LOCK_TIMEOUT_MS),
        ("default_transaction_read_only", "on"),
        ("timezone", "UTC"),
    ]);
    Ok(answered_within(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await??)
}

/// Reads the time partitions, and a sample of each that is attached. One that goes away meanwhile
/// is left out.
async fn measure(
    connection: &mut PgConnection,
) -> Result<(DateTime<Utc>, Vec<TimePartition>, Vec<PartitionSample>), InboxError> {
    let now = sqlx::query_scalar("SELECT now()").fetch_one(&mut *connection).await?;
    let (mut present, mut samples) = (Vec::new(), Vec::new());
    for partition in partitions::find(connection).await? {
        if partition.is_attached && !partition.is_pending {
            match sample::take(connection, &partition).await {
                Ok(Some(sample)) => samples.push(sample),
                Ok(None) => continue,
                Err(error) if partitions::is_gone(&error) => continue,
                Err(error) => return Err(error),
            }
        }
        present.push(partition);
    }
    Ok((now, present, samples))
}

/// Adds the samples up, by tenant and consumer.
fn by_tenant(
    consumers: &[MeasuredConsumer],
    samples: &[PartitionSample],
    now: DateTime<Utc>,
) -> Vec<TenantStorage> {
    let mut sums: BTreeMap<i32, ConsumerSums> = BTreeMap::new();
    for sample in samples {
        for share in sample.shares() {
            let of_consumer = sums.entry(share.consumer_id).or_default();
            *of_consumer.messages.entry(share.status).or_default() += share.messages;
            of_consumer.bytes += share.bytes;
            // What was received within a window was received within each longer one.
            for added in of_consumer.added.iter_mut().skip(share.window) {
                *added += share.bytes;
            }
        }
    }
    let mut tenants: Vec<TenantStorage> = Vec::new();
    for consumer in consumers {
        let of_class: Vec<_> = samples
            .iter()
            .filter(|sample| sample.retention_class == consumer.retention_class)
            .map(|sample| sample.span(now))
            .collect();
        let none = ConsumerSums::default();
        let storage = consumer.storage(sums.get(&consumer.consumer_id).unwrap_or(&none), &of_class);
        match tenants.last_mut().filter(|tenant| tenant.tenant == consumer.tenant) {
            Some(tenant) => tenant.consumers.push(storage),
            None => tenants
                .push(TenantStorage { tenant: consumer.tenant.clone(), consumers: vec![storage] }),
        }
    }
    tenants
}

impl MeasuredConsumer {
    /// Returns the storage of the consumer, from its part of the samples and from the extent of
    /// those of its class.
    fn storage(&self, sums: &ConsumerSums, of_class: &[SampledSpan]) -> ConsumerStorage {
        let window = GrowthWindow::of(of_class);
        let bytes_per_day = sums.added[window.index()] / window.days_of(self.age_days);
        let messages_by_status: BTreeMap<_, _> =
            sums.messages.iter().map(|(status, messages)| (*status, whole(*messages))).collect();
        let forecast = Forecast { bytes: sums.bytes, bytes_per_day, kept_days: self.kept_days };
        ConsumerStorage {
            consumer: self.consumer.clone(),
            class: self.class.clone(),
            messages: messages_by_status.values().sum(),
            messages_by_status,
            bytes: whole(sums.bytes),
            bytes_per_day: whole(bytes_per_day),
            growth_days: window.days(),
            levels_off_at_bytes: forecast.level().map(whole),
            bytes_in_30_days: whole(forecast.in_days(30.0)),
            bytes_in_365_days: whole(forecast.in_days(365.0)),
            is_sampled: of_class.iter().any(|span| !span.is_whole),
        }
    }
}

fn whole(figure: f64) -> i64 {
    figure.round() as i64
}

/// Names the cause of an error for operators.
fn explained(error: InboxError) -> InboxError {
    match error {
        // A lock timeout, which elsewhere is about a message.
        InboxError::InFlightElsewhere => InboxError::conflict(format!(
            "a time partition of the inbox was locked for more than {LOCK_TIMEOUT_MS} ms, so that \
                its size is not known; try again"
        )),
        error => error,
    }
}
