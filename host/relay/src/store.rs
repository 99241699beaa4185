//! The statements of the relay. The functions are in `host/inbox/sql`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use oncebox_model::{
    error::InboxError,
    headers,
    hooks::{self, Defect},
    message::Message,
    outgoing::OutgoingStatus,
    tx::bounded,
};
use sqlx::{PgPool, Postgres, Transaction};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{directory::TenantFacts, outcome::Mark, reason::OutgoingReason, row::OutgoingRow};

/// Begin of each transaction of the relay. Its functions rest on a snapshot for each statement.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
/// Length of a lease.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// Kilobytes of payloads and headers after which a lease takes no further message.
pub(crate) const LEASE_KB: u32 = 8 << 10;
/// Expired leases that one look ends at most.
const RECLAIMED_MAX: i32 = 1_000;
/// Destinations of a consumer at which one look looks at most.
const STEPS_MAX: i32 = 1_000;
/// Open messages of a consumer that are counted at most, in each status.
const COUNTED_MAX: i64 = 10_000;
/// Failed attempts, and milliseconds past the due time, after which a failure parks a message.
const ATTEMPTS_MIN: i32 = 10;
const AGE_MAX_MS: i64 = 86_400_000;

/// Access to a database, for the relay as a whole or for what it does for one tenant.
pub(crate) struct Store {
    database: Arc<StoreDatabase>,
    /// Turns of the tenant.
    of_tenant: Option<Arc<Semaphore>>,
}

/// A database of the relay.
struct StoreDatabase {
    /// Its connections. A tenant's own database has others after a change of its address.
    pool: Mutex<PgPool>,
    turns: Semaphore,
    /// Turns of one tenant at a time: fewer than there are, so that one with very many destinations
    /// keeps no other waiting.
    tenant_turns: usize,
    tenants: Mutex<HashMap<i32, Arc<Semaphore>>>,
}

/// The permits of a transaction: of the database and, for a tenant, of that.
type Turn<'a> = (SemaphorePermit<'a>, Option<SemaphorePermit<'a>>);

/// The beginning of a look.
#[derive(Debug, Default)]
pub(crate) struct LookStart {
    /// Consumers with this key and lower ones are passed over.
    first: i32,
    /// Destinations behind which it begins, by consumer; of all others at the first.
    afters: HashMap<i32, String>,
}

/// A destination of a consumer that a look has found.
#[derive(Debug, sqlx::FromRow)]
struct FoundRow {
    consumer: i32,
    tenant: i32,
    target: Option<String>,
    is_due: bool,
    is_cut: bool,
}

/// The outcome of a delivery to an inbox.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Delivered {
    /// The inbox has the message, and the row is marked: so many seconds past the due time.
    Done(f64),
    /// The lease is another relay's.
    Lost,
    /// The database shows no such consumer.
    NoConsumer,
}

/// What the answer of an endpoint makes of the outgoing message that it answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AnswerMark {
    /// Status of the answer.
    pub(crate) status: u16,
    /// Text for readers where the endpoint refused the message; none where it took it.
    pub(crate) refusal: Option<String>,
}

/// A row that a mark has written.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct MarkedRow {
    /// Number of the mark, from 1.
    nth: i64,
    /// Status that the row has now.
    pub(crate) became: OutgoingStatus,
    /// Seconds from the due time to now.
    pub(crate) delay_s: f64,
}

impl MarkedRow {
    /// Returns the place of the mark, from 0.
    pub(crate) fn index(&self) -> usize {
        usize::try_from(self.nth - 1).unwrap_or(usize::MAX)
    }
}

/// The open messages of one consumer.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct OpenOutgoing {
    /// Name of the tenant.
    pub(crate) tenant: String,
    /// Name of the consumer.
    pub(crate) consumer: String,
    /// Open messages, up to a bound.
    pub(crate) messages: i64,
    /// Seconds that the oldest of them is past its due time.
    pub(crate) oldest_s: f64,
}

impl Store {
    /// Creates access to a database. The relay has half of its connections at a time, since they
    /// serve other work too, and one tenant has one less where there are more than two.
    pub(crate) fn new(pool: PgPool) -> Self {
        let most = (pool.options().get_max_connections() as usize).div_ceil(2);
        let tenant_turns = if most > 2 { most - 1 } else { most };
        let (pool, turns) = (Mutex::new(pool), Semaphore::new(most));
        let database = StoreDatabase { pool, turns, tenant_turns, tenants: Mutex::default() };
        Self { database: Arc::new(database), of_tenant: None }
    }

    /// Returns the access for what the relay does for one tenant.
    pub(crate) fn of_tenant(&self, tenant_id: i32) -> Self {
        let StoreDatabase { tenants, tenant_turns, .. } = &*self.database;
        let mut tenants = tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let turns =
            tenants.entry(tenant_id).or_insert_with(|| Semaphore::new(*tenant_turns).into());
        Self { database: self.database.clone(), of_tenant: Some(turns.clone()) }
    }

    /// Replaces the connections, for transactions that begin from now on.
    pub(crate) fn set_pool(&self, pool: PgPool) {
        *self.database.pool.lock().unwrap_or_else(PoisonError::into_inner) = pool;
    }

    /// Ends leases that have run out, and returns the tenants and destinations with something due,
    /// each once, and the beginning of the next look.
    pub(crate) async fn due(
        &self,
        start: &LookStart,
    ) -> Result<(Vec<(i32, String)>, LookStart), InboxError> {
        const DUE: &str = "SELECT consumer, tenant, target, is_due, is_cut \
            FROM oncebox.outgoing_due($1, $2, $3, $4)";
        self.reclaim().await?;
        let consumers: Vec<i32> = start.afters.keys().copied().collect();
        let afters: Vec<&str> = start.afters.values().map(String::as_str).collect();
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(DUE).bind(STEPS_MAX).bind(start.first);
        let query = query.bind(consumers).bind(afters);
        let found: Vec<FoundRow> = bounded(query.fetch_all(&mut *tx)).await?;
        bounded(tx.commit()).await?;
        let (mut due, mut next) = (Vec::new(), LookStart::default());
        for row in found {
            let Some(target) = row.target else {
                next.first = row.consumer;
                continue;
            };
            if row.is_cut {
                next.afters.insert(row.consumer, target.clone());
            }
            if row.is_due {
                due.push((row.tenant, target));
            }
        }
        // Several consumers of a tenant may have something due for one destination.
        due.sort_unstable();
        due.dedup();
        Ok((due, next))
    }

    /// Ends leases that have run out.
    async fn reclaim(&self) -> Result<(), InboxError> {
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_scalar("SELECT oncebox.reclaim_outgoing($1)").bind(RECLAIMED_MAX);
        let ended: i32 = bounded(query.fetch_one(&mut *tx)).await?;
        bounded(tx.commit()).await?;
        if ended > 0 {
            tracing::warn!(
                messages = ended,
                "outgoing messages are sent again: the relay that had leased them did not report"
            );
        }
        Ok(())
    }

    /// Leases at most so many messages of a tenant for a destination, for so long, and commits.
    pub(crate) async fn lease(
        &self,
        tenant: &TenantFacts,
        destination: &str,
        (most, lease): (usize, Duration),
        owner: &str,
    ) -> Result<Vec<OutgoingRow>, InboxError> {
        const LEASE_ROWS: &str = "SELECT l.consumer_id, l.message_id, l.ordinal, l.bucket, \
            l.position, l.id, l.key, l.event_type, l.content_type, l.trace_parent, \
            l.correlation_id, l.headers, l.payload, l.attempts, l.epoch, l.cancel_token, \
            l.may_have_arrived, l.created_at \
            FROM oncebox.lease_outgoing($1, $2, $3, $4, $5, $6, $7, $8, $9) l";
        if hooks::sabotage(Defect::OutgoingSentWithoutLease) {
            return self.due_without_lease(tenant, destination, most).await;
        }
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(LEASE_ROWS)
            .bind(tenant.tenant_id)
            .bind(tenant.sending())
            .bind(tenant.stopping())
            .bind(destination)
            .bind(i32::try_from(most).unwrap_or(i32::MAX))
            .bind(i64::from(LEASE_KB) << 10)
            .bind(lease.as_millis() as i64)
            .bind(owner)
            .bind(!hooks::sabotage(Defect::OutgoingLaneIgnored));
        let rows: Vec<OutgoingRow> = bounded(query.fetch_all(&mut *tx)).await?;
        bounded(tx.commit()).await?;
        if !rows.is_empty() {
            hooks::point("outgoing:lease:after");
        }
        Ok(rows)
    }

    /// Reads due messages and leases none, as a relay with a defect does.
    async fn due_without_lease(
        &self,
        tenant: &TenantFacts,
        destination: &str,
        most: usize,
    ) -> Result<Vec<OutgoingRow>, InboxError> {
        const DUE: &str = "SELECT o.* FROM oncebox.outgoing o \
            WHERE o.consumer_id = ANY ($1) AND o.destination = $2 \
              AND o.status IN ('received', 'failed_retryable') AND o.next_attempt_at <= now() \
            ORDER BY o.next_attempt_at, o.position LIMIT $3";
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(DUE).bind(tenant.sending()).bind(destination);
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let rows = query.bind(most).fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// Writes marks, and returns those that found their row as the lease left it.
    pub(crate) async fn mark(
        &self,
        marks: &[(OutgoingRow, Mark)],
    ) -> Result<Vec<MarkedRow>, InboxError> {
        const MARK: &str = "SELECT nth, became, delay_s FROM oncebox.mark_outgoing($1, $2, $3, $4, \
            $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)";
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(MARK)
            .bind(column(marks, |(row, _)| row.consumer_id))
            .bind(column(marks, |(row, _)| row.message_id.as_str()))
            .bind(column(marks, |(row, _)| row.ordinal))
            .bind(column(marks, |(row, _)| row.bucket))
            .bind(column(marks, |(row, _)| row.epoch))
            .bind(column(marks, |(_, mark)| mark.status.as_str()))
            .bind(column(marks, |(_, mark)| mark.reason.map(|reason| reason.as_str())))
            .bind(column(marks, |(_, mark)| mark.error.as_deref()))
            .bind(column(marks, |(_, mark)| mark.delay.as_millis() as i64))
            .bind(column(marks, |(_, mark)| mark.counts))
            .bind(ATTEMPTS_MIN)
            .bind(AGE_MAX_MS)
            .bind(column(marks, |(_, mark)| mark.answer.as_ref().map(|it| i32::from(it.status))))
            .bind(column(marks, |(_, mark)| {
                mark.answer.as_ref().and_then(|it| it.content_type.as_deref())
            }))
            .bind(column(marks, |(_, mark)| mark.answer.as_ref().map(|it| it.body.as_slice())))
            .bind(column(marks, |(_, mark)| mark.answer.as_ref().map(|it| it.is_whole)));
        let marked = bounded(query.fetch_all(&mut *tx)).await?;
        bounded(tx.commit()).await?;
        Ok(marked)
    }

    /// Delivers a message into the inbox of a consumer and marks its row, in one transaction. With
    /// `answer` the message is the answer to that of the row.
    pub(crate) async fn deliver(
        &self,
        row: &OutgoingRow,
        target: i32,
        message: &Message,
        ordering: Option<i64>,
        answer: Option<&AnswerMark>,
    ) -> Result<Delivered, InboxError> {
        const DELIVER: &str = "SELECT outcome, delay_s FROM oncebox.deliver_outgoing($1, $2, $3, \
            $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, \
            $22, $23, $24, $25, $26)";
        let refusal = answer.and_then(|answer| answer.refusal.as_deref());
        let record = &message.record;
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(DELIVER)
            .bind(row.consumer_id)
            .bind(&row.message_id)
            .bind(row.ordinal)
            .bind(row.bucket)
            .bind(row.epoch)
            .bind(target)
            .bind(&message.id)
            .bind(&*record.topic)
            .bind(record.partition)
            .bind(record.offset)
            .bind(record.timestamp_ms)
            .bind(record.key.as_deref())
            .bind(message.ordering_key.as_deref())
            .bind(&message.source)
            .bind(&message.event_type)
            .bind(message.event_version.as_deref())
            .bind(message.content_type.as_deref())
            .bind(message.trace_parent.as_deref())
            .bind(message.payload_hash.as_ref().map(|hash| hash.as_slice()))
            .bind(headers::encode(&record.headers))
            .bind(record.payload.as_deref())
            .bind(ordering)
            .bind(message.sequence.filter(|_| ordering.is_some()))
            .bind(answer.map(|answer| i32::from(answer.status)))
            .bind(refusal.map(|_| OutgoingReason::Refused.as_str()))
            .bind(refusal);
        let (outcome, delay_s): (String, Option<f64>) = bounded(query.fetch_one(&mut *tx)).await?;
        hooks::point("outgoing:send:after");
        bounded(tx.commit()).await?;
        Ok(match outcome.as_str() {
            "new" | "known" => Delivered::Done(delay_s.unwrap_or_default()),
            "no_consumer" => Delivered::NoConsumer,
            _ => Delivered::Lost,
        })
    }

    /// Counts the open messages of each consumer that has any that is not completed.
    pub(crate) async fn figures(&self) -> Result<Vec<OpenOutgoing>, InboxError> {
        const FIGURES: &str =
            "SELECT tenant, consumer, messages, oldest_s FROM oncebox.outgoing_figures($1)";
        let (mut tx, _turn) = self.begin().await?;
        let query = sqlx::query_as(FIGURES).bind(COUNTED_MAX);
        let figures = bounded(query.fetch_all(&mut *tx)).await?;
        bounded(tx.commit()).await?;
        Ok(figures)
    }

    /// Begins a transaction, once fewer than the greatest number are open. The permits go with the
    /// transaction.
    async fn begin(&self) -> Result<(Transaction<'static, Postgres>, Turn<'_>), InboxError> {
        // Nobody closes the semaphores.
        let closed = |_| sqlx::Error::PoolClosed;
        let of_tenant = match &self.of_tenant {
            Some(turns) => Some(turns.acquire().await.map_err(closed)?),
            None => None,
        };
        let turn = self.database.turns.acquire().await.map_err(closed)?;
        let pool = self.database.pool.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok((bounded(pool.begin_with(BEGIN)).await?, (turn, of_tenant)))
    }
}

/// Returns one column of the marks.
fn column<'a, T>(
    marks: &'a [(OutgoingRow, Mark)],
    of: impl Fn(&'a (OutgoingRow, Mark)) -> T,
) -> Vec<T> {
    marks.iter().map(of).collect()
}
