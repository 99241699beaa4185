//! The poller of due messages, for all consumers of a host together.
//!
//! It makes one query to each database every second. So the retry workers of a consumer with
//! nothing to do hold no connection and send no query.
//!
//! The host wakes its workers at once for messages that it makes due itself. The poller finds the
//! rest: messages that other hosts left, leases that ran out, messages that an operator or the end
//! of a canary made due.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

use oncebox_model::{error::InboxError, inbox::ServerRun};
use sqlx::{AssertSqlSafe, Executor, PgPool, Row};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    consumer::ConsumerInbox,
    replay,
    retry::{
        backlog::{self, SETTINGS},
        wakeup::EVERY,
    },
    session::SERVER_RUN,
};

/// Longest time that a database may take to answer a poll; other databases do not wait for it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of polls from one sweep for forgotten messages to the next.
const POLLS_PER_SWEEP: u32 = 10;
/// Keys of a consumer that one sweep releases at most; each takes a lock.
const KEYS_PER_SWEEP: i32 = 100;
/// Rest after a count of open messages, as a multiple of the time that the count took.
const REST: u32 = 30;

/// Consumers of one database, by key of their rows.
type Consumers = BTreeMap<i32, Weak<ConsumerInbox>>;

/// A database, its consumers, and the last reports about their inboxes.
struct PolledDatabase {
    pool: PgPool,
    consumers: Consumers,
    reported: Arc<Mutex<backlog::ReportedBacklogs>>,
}

/// A database with those of its consumers that still run.
struct ActiveConsumers {
    database: String,
    pool: PgPool,
    consumers: Vec<Arc<ConsumerInbox>>,
    reported: Arc<Mutex<backlog::ReportedBacklogs>>,
}

/// Poller of due messages, in every database that holds an inbox of a consumer of this host.
#[derive(Default)]
pub struct DuePoller {
    /// Databases, by login, host, port and name.
    databases: Mutex<HashMap<String, PolledDatabase>>,
}

impl DuePoller {
    /// Adds a consumer to the poll, for as long as it lives. Its workers then wait until they are
    /// woken.
    pub fn watch_consumer(&self, consumer: &Arc<ConsumerInbox>) {
        let pool = consumer.sessions.host_pool();
        let options = pool.connect_options();
        let (login, database) =
            (options.get_username(), options.get_database().unwrap_or_default());
        let database = format!("{login}@{}:{}/{database}", options.get_host(), options.get_port());
        let mut databases = self.databases.lock().unwrap_or_else(PoisonError::into_inner);
        let database = databases.entry(database).or_insert_with(|| PolledDatabase {
            pool: pool.clone(),
            consumers: Consumers::new(),
            reported: Arc::default(),
        });
        // After a change of its password, a tenant's own database has a new pool.
        database.pool = pool.clone();
        database.consumers.insert(consumer.consumer_id, Arc::downgrade(consumer));
        consumer.wakeup.is_polled.store(true, Ordering::Release);
        // The first poll finds messages that an earlier process left.
    }

    /// Wakes a worker of a consumer that runs here, for a message that has just become due. Does
    /// nothing for any other consumer: the hosts that run it poll.
    pub fn wake(&self, consumer_id: i32) {
        let databases = self.databases.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known =
            databases.values().filter_map(|database| database.consumers.get(&consumer_id));
        if let Some(consumer) = known.find_map(Weak::upgrade) {
            consumer.wake_worker();
        }
    }

    /// Polls until `stop` is cancelled. A database that does not answer holds up no other.
    pub async fn run(&self, stop: CancellationToken) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut polls: JoinSet<String> = JoinSet::new();
        let mut under_way = BTreeSet::new();
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(ended) = polls.join_next() => drop(ended.map(|database| under_way.remove(&database))),
                _ = every.tick() => {
                    let sweeps = ticks.is_multiple_of(POLLS_PER_SWEEP);
                    ticks = ticks.wrapping_add(1);
                    for ActiveConsumers { database, pool, consumers, reported } in self.active() {
                        let counts = format!("{database} counts");
                        if sweeps && under_way.insert(counts.clone()) {
                            let (pool, consumers) = (pool.clone(), consumers.clone());
                            polls.spawn(async move {
                                count(&pool, consumers, &reported).await;
                                counts
                            });
                        }
                        if under_way.insert(database.clone()) {
                            polls.spawn(async move {
                                if sweeps {
                                    sweep(&pool, &consumers).await;
                                }
                                poll(&pool, &consumers).await;
                                database
                            });
                        }
                    }
                }
            }
        }
    }

    /// Returns each database with those of its consumers that still run, and forgets the others.
    fn active(&self) -> Vec<ActiveConsumers> {
        let mut databases = self.databases.lock().unwrap_or_else(PoisonError::into_inner);
        let mut active = Vec::new();
        databases.retain(|name, database| {
            database.consumers.retain(|_, consumer| consumer.strong_count() > 0);
            let consumers: Vec<_> = database.consumers.values().filter_map(Weak::upgrade).collect();
            if consumers.is_empty() {
                database.reported.lock().unwrap_or_else(PoisonError::into_inner).keep_only(&[]);
                return false;
            }
            active.push(ActiveConsumers {
                database: name.clone(),
                pool: database.pool.clone(),
                consumers,
                reported: database.reported.clone(),
            });
            true
        });
        active
    }
}

/// Counts open messages, then rests, so that the database has most of its time for other work.
async fn count(
    pool: &PgPool,
    consumers: Vec<Arc<ConsumerInbox>>,
    reported: &Mutex<backlog::ReportedBacklogs>,
) {
    let began = Instant::now();
    match timeout(PATIENCE, backlog::watch(pool, &consumers, reported)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(%error, "failed to count what is open; metrics and alerts are those of \
                before")
        }
        Err(_) => tracing::warn!(
            "the database does not say how much is open; metrics and alerts are those of before"
        ),
    }
    drop(consumers); // consumers that stop during the rest are not kept alive
    sleep(began.elapsed() * REST).await;
}

/// Makes messages due that wait behind nothing. Sweeps all consumers, since any of them may have
/// run in order before.
async fn sweep(pool: &PgPool, consumers: &[Arc<ConsumerInbox>]) {
    match timeout(PATIENCE, release_unblocked(pool, &asked(consumers))).await {
        Ok(Ok(0)) => {}
        Ok(Ok(released)) => tracing::warn!(
            released,
            "messages need not wait any longer, since nothing is before them or their gap lasted \
                too long; they are due now"
        ),
        Ok(Err(error)) => {
            tracing::warn!(%error, "failed to look for messages that wait behind nothing")
        }
        Err(_) => tracing::warn!("the database does not say which messages wait behind nothing"),
    }
}

/// Returns the key and the retention class of each consumer.
fn asked(consumers: &[Arc<ConsumerInbox>]) -> Vec<(i32, i16)> {
    consumers
        .iter()
        .map(|consumer| (consumer.consumer_id, consumer.policy.retention.class()))
        .collect()
}

/// Makes messages due that wait for their turn behind nothing, and returns how many. The consumers
/// are given with their retention classes.
///
/// # Errors
///
/// Returns an error where the database does not answer.
pub async fn release_unblocked(pool: &PgPool, consumers: &[(i32, i16)]) -> Result<i64, InboxError> {
    const RELEASE: &str = "SELECT coalesce(sum(oncebox.release_unblocked(c.id, c.class, $3)), \
        0)::bigint \
        FROM unnest($1::int[], $2::smallint[]) AS c(id, class)";
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    Ok(sqlx::query_scalar(RELEASE)
        .bind(ids)
        .bind(classes)
        .bind(KEYS_PER_SWEEP)
        .fetch_one(pool)
        .await?)
}

/// Polls a database once, and wakes the workers of consumers with due messages or a replay.
async fn poll(pool: &PgPool, consumers: &[Arc<ConsumerInbox>]) {
    let found = match timeout(PATIENCE, due(pool, &asked(consumers))).await {
        Ok(Ok((found, server))) => {
            consumers.iter().for_each(|consumer| consumer.sessions.saw_server(&server));
            found
        }
        Ok(Err(error)) => {
            return tracing::warn!(%error, "failed to look for what is due; retries wait");
        }
        Err(_) => return tracing::warn!("the database does not say what is due; retries wait"),
    };
    for (consumer_id, in_ms) in found {
        if let Ok(found) =
            consumers.binary_search_by_key(&consumer_id, |consumer| consumer.consumer_id)
        {
            consumers[found].wakeup.after(Duration::from_millis(in_ms.max(0) as u64));
        }
    }
    match timeout(PATIENCE, replay::wake(pool, consumers)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "failed to look for replays; they wait"),
        Err(_) => tracing::warn!("the database does not say which replays wait"),
    }
}

/// Returns the consumers with a message that is due within one polling interval, and in how many
/// milliseconds, with the run of the server that says so. The consumers are given with their retention classes. Each is the head of two
/// indexes in the live partitions of its class, however many rows there are.
///
/// # Errors
///
/// Returns an error where the database does not answer.
pub async fn due(
    pool: &PgPool,
    consumers: &[(i32, i16)],
) -> Result<(Vec<(i32, i64)>, ServerRun), InboxError> {
    static BEGIN: LazyLock<String> = LazyLock::new(|| format!("{SETTINGS}SELECT {SERVER_RUN}"));
    let (ids, classes): (Vec<i32>, Vec<i16>) = consumers.iter().copied().unzip();
    let mut tx = pool.begin().await?;
    let server = tx.fetch_one(sqlx::raw_sql(AssertSqlSafe(BEGIN.as_str()))).await?;
    let server: String = server.try_get(0)?;
    let found = sqlx::query_as(DUE)
        .bind(ids)
        .bind(classes)
        .bind(EVERY.as_millis() as i64)
        .fetch_all(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok((found, Some(server.into())))
}

/// Statement that finds due messages; public so that a test can check its plan.
pub const DUE: &str = "SELECT c.id, greatest(0, ceil(extract(epoch FROM least(d.at, l.at) - now()) \
    * 1000))::bigint \
    FROM unnest($1::int[], $2::smallint[]) AS c(id, class) \
    LEFT JOIN LATERAL (SELECT i.next_attempt_at AS at FROM oncebox.inbox i \
        WHERE i.consumer_id = c.id AND i.retention_class = c.class AND i.status IN ('received', \
        'failed_retryable') \
        ORDER BY i.next_attempt_at, i.\"offset\" LIMIT 1) d ON true \
    LEFT JOIN LATERAL (SELECT i.locked_until AS at FROM oncebox.inbox i \
        WHERE i.consumer_id = c.id AND i.retention_class = c.class AND i.status = 'in_progress' \
        ORDER BY i.locked_until, i.\"offset\" LIMIT 1) l ON true \
    WHERE least(d.at, l.at) <= now() + $3 * interval '1 millisecond'";
