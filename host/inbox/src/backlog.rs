//! How much of an inbox is open, and whether that is more than its policy allows.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use chrono::{DateTime, Utc};
use sqlx::{Executor, PgPool};

use crate::{admin::Admin, consumer::ConsumerInbox, due, error::InboxError, policy::Alerts};

/// States of what is still to be run, or runs.
const PENDING: [&str; 4] = ["received", "in_progress", "failed_retryable", "waiting"];
/// States of what waits for a person.
const STUCK: [&str; 2] = ["failed_terminal", "parked"];

/// Messages of one state that are counted; more are not told apart.
pub const COUNTED_MAX: i64 = 100_000;

/// Messages of a consumer that are in one state for one reason.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Open {
    #[sqlx(rename = "id")]
    consumer_id: i32,
    /// The state: any but `completed`, `skipped` and `discarded`.
    pub status: String,
    /// Why, without what it says after a colon.
    pub reason: Option<String>,
    /// How many, counted up to [`COUNTED_MAX`].
    pub messages: i64,
    /// When the first of them was received.
    pub oldest: DateTime<Utc>,
    /// Seconds since then, by the database's clock.
    pub oldest_age_s: f64,
}

/// What is open in one inbox.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Backlog {
    /// By state and reason.
    pub open: Vec<Open>,
}

/// A bound of the policy that is reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Alert {
    /// Its key in `[alerts]`.
    pub name: &'static str,
    /// What is.
    pub value: f64,
    /// From where on it is too much.
    pub bound: u64,
}

impl Backlog {
    /// Messages in this state.
    pub fn messages(&self, status: &str) -> i64 {
        self.open.iter().filter(|open| open.status == status).map(|open| open.messages).sum()
    }

    /// Messages that are still to be run, or run.
    pub fn pending(&self) -> i64 {
        PENDING.iter().map(|status| self.messages(status)).sum()
    }

    /// Seconds since the oldest of them was received.
    pub fn oldest_pending_age_s(&self) -> Option<f64> {
        let pending = self.open.iter().filter(|open| PENDING.contains(&open.status.as_str()));
        pending.map(|open| open.oldest_age_s).reduce(f64::max)
    }

    fn collisions(&self) -> i64 {
        self.open.iter().filter(|open| open.reason.as_deref() == Some("collision")).map(|open| open.messages).sum()
    }

    /// What is more than a policy allows.
    pub fn alerts(&self, policy: &Alerts) -> Vec<Alert> {
        let values = [
            ("pending_age_s", self.oldest_pending_age_s().unwrap_or_default(), policy.pending_age_s),
            ("parked", self.messages("parked") as f64, policy.parked),
            ("dead_letters", self.messages("failed_terminal") as f64, policy.dead_letters),
            ("collisions", self.collisions() as f64, policy.collisions),
        ];
        let reached = values.into_iter().filter(|(_, value, bound)| *bound > 0 && *value >= *bound as f64);
        reached.map(|(name, value, bound)| Alert { name, value, bound }).collect()
    }
}

/// The statement; public so that a test can look at its plan.
pub const OPEN: &str = "SELECT c.id, s.status, x.reason, count(*) AS messages, min(x.received_at) AS oldest, \
        extract(epoch FROM now() - min(x.received_at))::float8 AS oldest_age_s \
    FROM unnest($1::int[], $2::smallint[]) AS c(id, class), \
        unnest(ARRAY['received', 'in_progress', 'failed_retryable', 'waiting', 'failed_terminal', 'parked']) AS s(status), \
        LATERAL (SELECT split_part(i.reason, ':', 1) AS reason, i.received_at FROM oncebox.inbox i \
            WHERE i.consumer_id = c.id AND i.retention_class = c.class AND i.status = s.status AND i.status <> 'completed' \
            ORDER BY i.received_at LIMIT $3) x \
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3";

/// Of consumers, given with their retention classes and in the order of their keys, what is open. Each state is read
/// from its oldest message on, by index.
pub async fn backlogs(pool: &PgPool, consumers: &[(i32, i16)]) -> Result<Vec<Backlog>, InboxError> {
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(due::SETTINGS)).await?;
    let query = sqlx::query_as::<_, Open>(OPEN).bind(&ids).bind(classes).bind(COUNTED_MAX);
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

impl Admin {
    /// What is open in the inbox of a consumer, and which bounds of its policy that reaches.
    pub async fn backlog(&self, tenant: &str, consumer: &str) -> Result<(Backlog, Vec<Alert>), InboxError> {
        let (tenant, consumer) = (self.tenant(tenant).await?, self.consumer(tenant, consumer).await?);
        let policy = consumer.policy()?;
        let pool = self.place(&tenant)?.pool;
        let backlog = backlogs(&pool, &[(consumer.consumer_id, policy.retention.class())]).await?.pop().unwrap_or_default();
        let alerts = backlog.alerts(&policy.alerts);
        Ok((backlog, alerts))
    }
}

/// What one consumer's metrics say about its backlog, for as long as a host runs it.
#[derive(Default)]
pub(crate) struct Watched {
    /// Bounds that were reached when it was last looked at; none before that.
    alerts: Mutex<Option<BTreeSet<&'static str>>>,
}

/// Count what is open, for metrics and alerts.
pub(crate) async fn watch(pool: &PgPool, consumers: &[Arc<ConsumerInbox>]) -> Result<(), InboxError> {
    let asked: Vec<_> = consumers.iter().map(|consumer| (consumer.consumer_id, consumer.policy.retention.class())).collect();
    for (consumer, backlog) in consumers.iter().zip(backlogs(pool, &asked).await?) {
        consumer.tell(&backlog);
    }
    Ok(())
}

/// Every bound that a policy can set.
const ALERTS: [&str; 4] = ["pending_age_s", "parked", "dead_letters", "collisions"];

impl ConsumerInbox {
    fn tell(&self, backlog: &Backlog) {
        self.gauge(backlog);
        let reached = backlog.alerts(&self.policy.alerts);
        let mut last = self.watched.alerts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.take().unwrap_or_default();
        for alert in reached.iter().filter(|alert| !before.contains(alert.name)) {
            let (name, value, bound) = (alert.name, alert.value, alert.bound);
            tracing::warn!(tenant = self.tenant, consumer = self.name, alert = name, value, bound, "alert");
        }
        let now: BTreeSet<_> = reached.iter().map(|alert| alert.name).collect();
        for name in before.difference(&now) {
            tracing::info!(tenant = self.tenant, consumer = self.name, alert = name, "alert over");
        }
        for name in ALERTS {
            metrics::gauge!("oncebox_alert", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(), "alert" => name)
                .set(if now.contains(name) { 1.0 } else { 0.0 });
        }
        *last = Some(now);
    }

    fn gauge(&self, backlog: &Backlog) {
        for status in PENDING.into_iter().chain(STUCK) {
            metrics::gauge!("oncebox_inbox_messages", "tenant" => self.tenant.clone(), "consumer" => self.name.clone(), "status" => status)
                .set(backlog.messages(status) as f64);
        }
        metrics::gauge!("oncebox_inbox_pending_messages", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
            .set(backlog.pending() as f64);
        metrics::gauge!("oncebox_inbox_oldest_pending_age_seconds", "tenant" => self.tenant.clone(), "consumer" => self.name.clone())
            .set(backlog.oldest_pending_age_s().unwrap_or_default());
    }
}

impl Drop for ConsumerInbox {
    /// What this host no longer looks at it does not speak of.
    fn drop(&mut self) {
        let told = std::mem::take(&mut self.watched.alerts).into_inner().unwrap_or_else(PoisonError::into_inner);
        if told.is_some() {
            self.tell(&Backlog::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(status: &str, reason: Option<&str>, messages: i64, oldest_age_s: f64) -> Open {
        let reason = reason.map(str::to_owned);
        Open { consumer_id: 1, status: status.to_owned(), reason, messages, oldest: Utc::now(), oldest_age_s }
    }

    // S1-116, S1-117, S0-041, S0-048, S2-014: each bound by itself, and none where it is 0.
    #[test]
    fn an_alert_is_a_bound_that_is_reached() {
        let backlog = Backlog {
            open: vec![
                open("received", None, 5, 61.0),
                open("waiting", Some("gap"), 2, 300.0),
                open("parked", Some("collision"), 2, 900.0),
                open("parked", Some("crashed"), 1, 10.0),
                open("failed_terminal", Some("reject"), 4, 9_000.0),
            ],
        };
        assert_eq!((backlog.pending(), backlog.oldest_pending_age_s()), (7, Some(300.0)));
        let names = |policy: Alerts| backlog.alerts(&policy).into_iter().map(|alert| alert.name).collect::<Vec<_>>();
        let off = Alerts { pending_age_s: 0, parked: 0, dead_letters: 0, collisions: 0 };
        assert_eq!(names(off.clone()), [""; 0]);
        assert_eq!(names(Alerts { pending_age_s: 300, ..off.clone() }), ["pending_age_s"]);
        assert_eq!(names(Alerts { pending_age_s: 301, parked: 4, dead_letters: 5, collisions: 3 }), [""; 0]);
        assert_eq!(names(Alerts { parked: 3, dead_letters: 4, collisions: 2, ..off }), ["parked", "dead_letters", "collisions"]);
        assert!(Backlog::default().alerts(&Alerts { pending_age_s: 1, parked: 1, dead_letters: 1, collisions: 1 }).is_empty());
    }
}
