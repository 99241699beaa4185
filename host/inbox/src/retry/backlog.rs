//! What is open in the inboxes of a host's consumers, counted for metrics and alerts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use oncebox_model::{
    backlog::{ALERTS, Alert, Backlog, Open, PENDING, STUCK},
    error::InboxError,
    policy::WATCHED_MAX,
};
use sqlx::{Executor, PgPool};

use crate::{consumer::ConsumerInbox, retry::poller};

/// How long PostgreSQL works on one count at most.
const WITHIN: &str = "SET LOCAL statement_timeout = 8000";

/// The statement; public so that a test can look at its plan.
pub const OPEN: &str = include_str!("open_messages.sql");

/// Of consumers, given with their retention classes and in the order of their keys, what is open.
/// Each state is read from its oldest message on, by index, up to so many.
pub async fn backlogs(
    pool: &PgPool,
    consumers: &[(i32, i16)],
    counted_max: i64,
) -> Result<Vec<Backlog>, InboxError> {
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(poller::SETTINGS)).await?;
    tx.execute(sqlx::raw_sql(WITHIN)).await?;
    let query = sqlx::query_as::<_, Open>(OPEN).bind(&ids).bind(classes).bind(counted_max);
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

/// What metrics say about the inboxes of one database, by consumer: for as long as this host runs
/// it.
#[derive(Default)]
pub(crate) struct Told(BTreeMap<i32, Said>);

/// What was last said about one inbox.
struct Said {
    tenant: String,
    consumer: String,
    /// Bounds that are reached.
    alerts: BTreeSet<&'static str>,
}

/// Count what is open, for metrics and alerts.
pub(crate) async fn watch(
    pool: &PgPool,
    consumers: &[Arc<ConsumerInbox>],
    told: &Mutex<Told>,
) -> Result<(), InboxError> {
    let asked: Vec<_> = consumers
        .iter()
        .map(|consumer| (consumer.consumer_id, consumer.policy.retention.class()))
        .collect();
    let found = backlogs(pool, &asked, WATCHED_MAX).await?;
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
    told.keep_only(consumers);
    for (consumer, backlog) in consumers.iter().zip(found) {
        let said = told.0.entry(consumer.consumer_id).or_insert_with(|| Said {
            tenant: consumer.tenant.clone(),
            consumer: consumer.name.clone(),
            alerts: BTreeSet::new(),
        });
        said.say(&backlog, &backlog.alerts(&consumer.policy.alerts));
    }
    Ok(())
}

impl Told {
    /// What this host runs no more it does not speak of.
    pub(crate) fn keep_only(&mut self, consumers: &[Arc<ConsumerInbox>]) {
        self.0.retain(|id, said| {
            let runs = consumers.iter().any(|consumer| consumer.consumer_id == *id);
            if !runs {
                said.alerts.clear();
                said.say(&Backlog::default(), &[]);
            }
            runs
        });
    }
}

impl Said {
    fn say(&mut self, backlog: &Backlog, reached: &[Alert]) {
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

    fn gauge(&self, backlog: &Backlog) {
        let Self { tenant, consumer, .. } = self;
        for status in PENDING.into_iter().chain(STUCK) {
            metrics::gauge!("oncebox_inbox_messages", "tenant" => tenant.clone(), "consumer" => consumer.clone(), "status" => status)
                .set(backlog.messages(status) as f64);
        }
        metrics::gauge!("oncebox_inbox_pending_messages", "tenant" => tenant.clone(), "consumer" => consumer.clone())
            .set(backlog.pending() as f64);
        metrics::gauge!("oncebox_inbox_oldest_pending_age_seconds", "tenant" => tenant.clone(), "consumer" => consumer.clone())
            .set(backlog.oldest_pending_age_s().unwrap_or_default());
    }
}
