//! Open messages in the inboxes of a host's consumers, counted for metrics and alerts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use oncebox_model::{
    MessageStatus,
    backlog::{ALERTS, Alert, Backlog, OpenMessages},
    error::InboxError,
    policy::WATCHED_MAX,
};
use sqlx::{Executor, PgPool};

use crate::consumer::ConsumerInbox;

/// Longest time that PostgreSQL works on one count.
const WITHIN: &str = "SET LOCAL statement_timeout = 8000";

/// Settings that make PostgreSQL plan a statement by key.
pub const SETTINGS: &str = include_str!("plan_by_key.sql");

/// Statement that counts open messages; public so that a test can check its plan.
pub const OPEN: &str = include_str!("open_messages.sql");

/// Returns the open messages of consumers. They are given with their retention classes, in the
/// order of their keys. Each state is read by index from its oldest message on, up to `counted_max`
/// messages.
///
/// # Errors
///
/// Returns an error where the database does not answer in time.
pub async fn backlogs(
    pool: &PgPool,
    consumers: &[(i32, i16)],
    counted_max: i64,
) -> Result<Vec<Backlog>, InboxError> {
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(SETTINGS)).await?;
    tx.execute(sqlx::raw_sql(WITHIN)).await?;
    let query = sqlx::query_as::<_, OpenMessages>(OPEN).bind(&ids).bind(classes).bind(counted_max);
    let found = query.fetch_all(&mut *tx).await?;
    tx.commit().await?;
    let mut backlogs = vec![Backlog::default(); ids.len()];
    for open in found {
        if let Ok(nth) = ids.binary_search(&open.consumer_id) {
            backlogs[nth].open.push(open);
        }
    }
    Ok(backlogs)
}

/// Last report about each inbox of one database, by consumer, for as long as this host runs the
/// consumer.
#[derive(Default)]
pub(crate) struct ReportedBacklogs(BTreeMap<i32, ReportedBacklog>);

/// Last report about one inbox.
struct ReportedBacklog {
    tenant: String,
    consumer: String,
    /// Alerts whose bounds are reached.
    alerts: BTreeSet<&'static str>,
}

/// Counts open messages, and updates metrics and alerts.
pub(crate) async fn watch(
    pool: &PgPool,
    consumers: &[Arc<ConsumerInbox>],
    reported: &Mutex<ReportedBacklogs>,
) -> Result<(), InboxError> {
    let asked: Vec<_> = consumers
        .iter()
        .map(|consumer| (consumer.consumer_id, consumer.policy.retention.class()))
        .collect();
    let found = backlogs(pool, &asked, WATCHED_MAX).await?;
    let mut reported = reported.lock().unwrap_or_else(PoisonError::into_inner);
    reported.keep_only(consumers);
    for (consumer, backlog) in consumers.iter().zip(found) {
        let report = reported.0.entry(consumer.consumer_id).or_insert_with(|| ReportedBacklog {
            tenant: consumer.tenant.clone(),
            consumer: consumer.name.clone(),
            alerts: BTreeSet::new(),
        });
        report.update(&backlog, &backlog.alerts(&consumer.policy.alerts));
    }
    Ok(())
}

impl ReportedBacklogs {
    /// Keeps the reports of these consumers. The metrics of all others are set to zero, since this
    /// host does not run them.
    pub(crate) fn keep_only(&mut self, consumers: &[Arc<ConsumerInbox>]) {
        self.0.retain(|id, report| {
            let runs = consumers.iter().any(|consumer| consumer.consumer_id == *id);
            if !runs {
                report.alerts.clear();
                report.update(&Backlog::default(), &[]);
            }
            runs
        });
    }
}

impl ReportedBacklog {
    /// Updates the metrics of one inbox, and logs alerts that begin or end.
    fn update(&mut self, backlog: &Backlog, reached: &[Alert]) {
        self.gauge(backlog);
        let Self { tenant, consumer, alerts: before } = self;
        for Alert { name, value, bound } in
            reached.iter().filter(|alert| !before.contains(alert.name))
        {
            tracing::warn!(tenant, consumer, alert = name, value, bound, "alert");
        }
        let now: BTreeSet<_> = reached.iter().map(|alert| alert.name).collect();
        for alert in before.difference(&now) {
            tracing::info!(tenant, consumer, alert, "alert over");
        }
        for name in ALERTS {
            metrics::gauge!("oncebox_alert", "tenant" => tenant.clone(), "consumer" => consumer.clone(), "alert" => name)
                .set(if now.contains(name) { 1.0 } else { 0.0 });
        }
        *before = now;
    }

    /// Sets the gauges of one inbox.
    fn gauge(&self, backlog: &Backlog) {
        let Self { tenant, consumer, .. } = self;
        for status in MessageStatus::PENDING.into_iter().chain(MessageStatus::DEAD) {
            metrics::gauge!("oncebox_inbox_messages", "tenant" => tenant.clone(), "consumer" => consumer.clone(), "status" => status.as_str())
                .set(backlog.messages(status) as f64);
        }
        metrics::gauge!("oncebox_inbox_pending_messages", "tenant" => tenant.clone(), "consumer" => consumer.clone())
            .set(backlog.pending() as f64);
        metrics::gauge!("oncebox_inbox_oldest_pending_age_seconds", "tenant" => tenant.clone(), "consumer" => consumer.clone())
            .set(backlog.oldest_pending_age_s().unwrap_or_default());
    }
}
