//! How much of an inbox is open, and whether that is more than its policy allows.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use chrono::{DateTime, Utc};
use sqlx::{Executor, PgPool};

use crate::{admin::Admin, consumer::ConsumerInbox, due, error::InboxError, policy::Alerts};

/// States of what is still to be run, or runs.
const PENDING: [&str; 4] = ["received", "in_progress", "failed_retryable", "waiting"];
/// States of what waits for a person.
const STUCK: [&str; 2] = ["failed_terminal", "parked"];

/// Messages of one state that are counted when somebody asks; more are not told apart.
const COUNTED_MAX: i64 = 100_000;
/// Messages of one state that are counted again and again, for all consumers of a host.
pub const WATCHED_MAX: i64 = 10_000;
/// How long PostgreSQL works on one count at most.
const WITHIN: &str = "SET LOCAL statement_timeout = 8000";

/// Messages of a consumer that are in one state for one reason.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Open {
    #[sqlx(rename = "id")]
    consumer_id: i32,
    /// The state: any but `completed`, `skipped` and `discarded`.
    pub status: String,
    /// Why, without what it says after a colon.
    pub reason: Option<String>,
    /// How many; those of one state are counted up to a bound.
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
        self.open
            .iter()
            .filter(|open| open.reason.as_deref() == Some("collision"))
            .map(|open| open.messages)
            .sum()
    }

    /// What is more than a policy allows.
    pub fn alerts(&self, policy: &Alerts) -> Vec<Alert> {
        let values = [
            (
                "pending_age_s",
                self.oldest_pending_age_s().unwrap_or_default(),
                policy.pending_age_s,
            ),
            ("parked", self.messages("parked") as f64, policy.parked),
            ("dead_letters", self.messages("failed_terminal") as f64, policy.dead_letters),
            ("collisions", self.collisions() as f64, policy.collisions),
        ];
        let reached =
            values.into_iter().filter(|(_, value, bound)| *bound > 0 && *value >= *bound as f64);
        reached.map(|(name, value, bound)| Alert { name, value, bound }).collect()
    }
}

/// The statement; public so that a test can look at its plan.
pub const OPEN: &str = "SELECT c.id, s.status, x.reason, count(*) AS messages, min(x.received_at) \
    AS oldest, \
        extract(epoch FROM now() - min(x.received_at))::float8 AS oldest_age_s \
    FROM unnest($1::int[], $2::smallint[]) AS c(id, class), \
        unnest(ARRAY['received', 'in_progress', 'failed_retryable', 'waiting', 'failed_terminal', \
        'parked']) AS s(status), \
        LATERAL (SELECT split_part(i.reason, ':', 1) AS reason, i.received_at FROM oncebox.inbox i \
            WHERE i.consumer_id = c.id AND i.retention_class = c.class AND i.status = s.status AND \
            i.status <> 'completed' \
            ORDER BY i.received_at LIMIT $3) x \
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3";

/// Of consumers, given with their retention classes and in the order of their keys, what is open.
/// Each state is read from its oldest message on, by index, up to so many.
pub async fn backlogs(
    pool: &PgPool,
    consumers: &[(i32, i16)],
    counted_max: i64,
) -> Result<Vec<Backlog>, InboxError> {
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    let mut tx = pool.begin().await?;
    tx.execute(sqlx::raw_sql(due::SETTINGS)).await?;
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

impl Admin {
    /// What is open in the inbox of a consumer, and which bounds of its policy that reaches.
    pub async fn backlog(
        &self,
        tenant: &str,
        consumer: &str,
    ) -> Result<(Backlog, Vec<Alert>), InboxError> {
        let (tenant, consumer) =
            (self.tenant(tenant).await?, self.consumer(tenant, consumer).await?);
        let policy = consumer.policy()?;
        let pool = self.place(&tenant)?.pool;
        let backlog =
            backlogs(&pool, &[(consumer.consumer_id, policy.retention.class())], COUNTED_MAX)
                .await?
                .pop()
                .unwrap_or_default();
        let alerts = backlog.alerts(&policy.alerts);
        Ok((backlog, alerts))
    }
}

/// Bounds that a policy can set.
const ALERTS: [&str; 4] = ["pending_age_s", "parked", "dead_letters", "collisions"];

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

#[cfg(test)]
mod tests {
    use super::*;

    fn open(status: &str, reason: Option<&str>, messages: i64, oldest_age_s: f64) -> Open {
        let reason = reason.map(str::to_owned);
        Open {
            consumer_id: 1,
            status: status.to_owned(),
            reason,
            messages,
            oldest: Utc::now(),
            oldest_age_s,
        }
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
        let names = |policy: Alerts| {
            backlog.alerts(&policy).into_iter().map(|alert| alert.name).collect::<Vec<_>>()
        };
        let off = Alerts { pending_age_s: 0, parked: 0, dead_letters: 0, collisions: 0 };
        assert_eq!(names(off.clone()), [""; 0]);
        assert_eq!(names(Alerts { pending_age_s: 300, ..off.clone() }), ["pending_age_s"]);
        assert_eq!(
            names(Alerts { pending_age_s: 301, parked: 4, dead_letters: 5, collisions: 3 }),
            [""; 0]
        );
        // S0-041, S1-116, S1-117, S2-014.
        assert_eq!(
            names(Alerts { parked: 3, dead_letters: 4, collisions: 2, ..off }),
            ["parked", "dead_letters", "collisions"]
        );
        assert!(
            Backlog::default()
                .alerts(&Alerts { pending_age_s: 1, parked: 1, dead_letters: 1, collisions: 1 })
                .is_empty()
        );
    }
}
