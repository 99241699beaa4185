//! Counts of the scheduler and of its tenants, and their metrics.

use std::{collections::BTreeMap, time::Duration};

use oncebox_model::meter::{Stopped, Usage};

/// Counts of the scheduler, for tests and displays.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Transactions that were admitted.
    pub granted: u64,
    /// Transactions that run.
    pub running: usize,
    /// Most transactions that ran at once.
    pub running_peak: usize,
    /// Bytes of guests' memory that are held.
    pub memory_bytes: u64,
    /// Most bytes that were held.
    pub memory_bytes_peak: u64,
    /// Transactions that wait.
    pub waiting: usize,
    /// Counts of each tenant, by its id.
    pub tenants: BTreeMap<i32, TenantCounts>,
}

/// Counts of one tenant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TenantCounts {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: u32,
    /// Transactions that were admitted.
    pub granted: u64,
    /// Messages that they settled.
    pub messages: u64,
    /// Transactions that run.
    pub running: usize,
    /// Most transactions that ran at once.
    pub running_peak: usize,
    /// Bytes of guests' memory that are held.
    pub memory_bytes: u64,
    /// Most bytes that were held.
    pub memory_bytes_peak: u64,
    /// Transactions that wait.
    pub waiting: usize,
    /// Longest wait of a transaction, in transactions that other tenants began in that time.
    pub overtaken_max: u64,
    /// Transactions that were told to stop.
    pub stopped: u64,
    /// Processor time of its handlers.
    pub cpu: Duration,
    /// Time of its statements.
    pub database: Duration,
}

/// A tenant's metrics. Labels are tenants alone, so there are no more of them than rows.
pub(super) struct TenantMeters {
    granted: metrics::Counter,
    messages: metrics::Counter,
    /// Seconds, in gauges: counters of the exporter hold whole numbers.
    cpu: metrics::Gauge,
    database: metrics::Gauge,
    waiting: metrics::Gauge,
    /// Most transactions that other tenants began while one of it waited.
    pub(super) overtaken: metrics::Gauge,
    gave_way: metrics::Counter,
    withdrawn: metrics::Counter,
}

impl TenantMeters {
    /// Makes the metrics of the tenant of this name.
    pub(super) fn new(name: &str) -> Self {
        let tenant = || name.to_owned();
        Self {
            granted: metrics::counter!("oncebox_tenant_transactions_total", "tenant" => tenant()),
            messages: metrics::counter!("oncebox_tenant_messages_total", "tenant" => tenant()),
            cpu: metrics::gauge!("oncebox_tenant_cpu_seconds_total", "tenant" => tenant()),
            database: metrics::gauge!("oncebox_tenant_database_seconds_total", "tenant" => tenant()),
            waiting: metrics::gauge!("oncebox_scheduler_waiting", "tenant" => tenant()),
            overtaken: metrics::gauge!("oncebox_scheduler_overtaken_max", "tenant" => tenant()),
            gave_way: metrics::counter!("oncebox_transactions_stopped_total", "tenant" => tenant(), "reason" => "gave_way"),
            withdrawn: metrics::counter!("oncebox_transactions_stopped_total", "tenant" => tenant(), "reason" => "withdrawn"),
        }
    }

    /// Counts a transaction that has ended.
    pub(super) fn ended(&self, usage: Usage, settled: u32) {
        self.granted.increment(1);
        self.messages.increment(settled.into());
        self.cpu.increment(usage.cpu.as_secs_f64());
        self.database.increment(usage.database.as_secs_f64());
    }

    /// Counts a transaction that was told to stop.
    pub(super) fn stopped(&self, why: Stopped) {
        match why {
            Stopped::GaveWay => self.gave_way.increment(1),
            Stopped::Withdrawn => self.withdrawn.increment(1),
        }
    }

    /// Counts one more waiting transaction of it, or one less.
    pub(super) fn waits(&self, one_more: bool) {
        self.waiting.increment(if one_more { 1.0 } else { -1.0 });
    }
}
