//! The erasure in the inbox: passes over the messages of a subject, and a vacuum at the end.
//!
//! A pass looks at the messages of one consumer after the other, in the order of their ids. An id
//! never changes, so that a pass misses no message that moves to another time partition meanwhile.
//! A message that a worker holds is tried again at the end of the pass. Each pass after the first
//! waits until the claims that are open have ended, since their messages are not visible before.
//! A pass also looks at the tables that retention has detached and not dropped yet (`removed`). The
//! last two passes find nothing: they prove that nothing is left.

use std::{collections::BTreeSet, fmt};

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks};
use sqlx::{Executor, PgConnection};

use super::{
    ErasureProgress, ErasureTarget,
    window::{self, BATCH, ErasureWindow},
};
use crate::{
    control::Control, database::tenant_database::TenantDatabase, retention::partitions::is_gone,
    tenants::Tenant,
};

/// An erasure under way in the database with a tenant's inbox.
pub(super) struct InboxErasure {
    pub(super) control: Control,
    pub(super) tenant: Tenant,
    pub(super) database: TenantDatabase,
    pub(super) target: ErasureTarget,
    /// Name of the only consumer; none for all.
    pub(super) consumer: Option<String>,
    /// Consumers whose messages are looked at, by number.
    pub(super) consumers: Vec<ErasedConsumer>,
    /// Hash of the target under a key of the tenant.
    pub(super) subject: [u8; 32],
    pub(super) erasure_id: i64,
}

/// A consumer whose messages are looked at.
#[derive(sqlx::FromRow)]
pub(super) struct ErasedConsumer {
    pub(super) consumer_id: i32,
    pub(super) name: String,
    pub(super) retention_class: i16,
    /// Deployments that tried candidates on its messages.
    shadows: Vec<i64>,
}

/// The row of an erasure that is under way.
#[derive(sqlx::FromRow)]
pub(super) struct ErasureRow {
    pub(super) actor: String,
    pub(super) reason: String,
    pub(super) began_at: DateTime<Utc>,
    pass: i32,
    at_consumer: i32,
    at_message: String,
    pub(super) removed_table: String,
    pub(super) removed_consumer: i32,
    pub(super) removed_message: String,
    pub(super) found: i64,
    empty_passes: i32,
    waits_for: Vec<String>,
    pub(super) already_erased: i64,
    pub(super) edits: i64,
    pub(super) errors: i64,
    pub(super) differences: i64,
    pub(super) archive_files: i64,
    pub(super) archived: i64,
    pub(super) vacuumed: Vec<String>,
    pub(super) not_vacuumed: Vec<String>,
}

/// The result of one step.
pub(super) enum ErasureStep {
    /// Something was done; more is left.
    Erased,
    /// Another transaction was in the way; nothing was done.
    Again,
    /// All that is left is held by others.
    Waits(ErasureWait),
    /// A whole pass found nothing.
    Done,
}

/// Work of others that an erasure waits for, with its number.
pub(super) enum ErasureWait {
    /// Messages that workers hold, or whose keys they hold.
    Messages(i64),
    /// Transactions with claims that were open when the pass began.
    Claims(i64),
    /// Time partitions that are being detached.
    Removals(i64),
    /// Files of the archive that were begun before the messages were erased.
    Files(i64),
}

/// The answer of an erasing statement, such as `oncebox.erase`, about a message.
#[derive(sqlx::FromRow)]
pub(super) struct ErasedRow {
    id: String,
    /// Status before; none where the message is held.
    status: Option<String>,
    edits: i64,
    errors: i64,
    partitions: Vec<String>,
}

impl ErasureWait {
    fn count(&self) -> i64 {
        let (Self::Messages(count)
        | Self::Claims(count)
        | Self::Removals(count)
        | Self::Files(count)) = self;
        *count
    }
}

impl fmt::Display for ErasureWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Messages(count) => write!(
                f,
                "messages that workers run, or whose ordering keys they hold: {count}; a lease \
                    that has run out ends when a host takes it over"
            ),
            Self::Claims(count) => write!(f, "transactions with open claims: {count}"),
            Self::Removals(count) => {
                write!(f, "time partitions that retention is detaching from the inbox: {count}")
            }
            Self::Files(count) => write!(
                f,
                "files that retention is writing to the archive: {count}; its next run ends one \
                    that was interrupted"
            ),
        }
    }
}

impl InboxErasure {
    /// Does one step in a transaction.
    pub(super) async fn step(&self) -> Result<ErasureStep, InboxError> {
        let mut tx = self.database.pool.begin().await?;
        let step = match self.step_in(&mut tx).await {
            Err(error) if is_passing(&error) => {
                tx.rollback().await?;
                return Ok(ErasureStep::Again);
            }
            step => step?,
        };
        hooks::point("erase:batch:before");
        tx.commit().await?;
        hooks::point("erase:batch:after");
        Ok(step)
    }

    async fn step_in(&self, connection: &mut PgConnection) -> Result<ErasureStep, InboxError> {
        // A new time partition has no statistics, and a plan for an empty table would read all of
        // it.
        const BY_KEY: &str =
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; SET LOCAL jit = off";
        connection.execute(sqlx::raw_sql(BY_KEY)).await?;
        let row = self.lock(connection).await?;
        if !row.waits_for.is_empty() {
            let open = self.open_claims(connection).await?;
            let left = row.waits_for.iter().filter(|claim| open.contains(claim)).count();
            if left > 0 {
                return Ok(ErasureStep::Waits(ErasureWait::Claims(left as i64)));
            }
        }
        let next = self.consumers.iter().find(|consumer| consumer.consumer_id >= row.at_consumer);
        match next {
            Some(consumer) => self.look_on(connection, &row, consumer).await,
            None => self.end_pass(connection, &row).await,
        }
    }

    /// Locks the erasure's row, and reads it.
    pub(super) async fn lock(
        &self,
        connection: &mut PgConnection,
    ) -> Result<ErasureRow, InboxError> {
        const LOCK: &str = "SELECT * FROM oncebox.erasure WHERE erasure_id = $1 FOR UPDATE";
        let query = sqlx::query_as(LOCK).bind(self.erasure_id);
        query.fetch_optional(connection).await?.ok_or_else(|| self.ended())
    }

    pub(super) fn ended(&self) -> InboxError {
        InboxError::conflict(format!(
            "another command has just ended this erasure of tenant `{}`, and the audit log has \
                its figures; repeat the command for a proof of its own",
            self.tenant.name
        ))
    }

    /// Lists the transactions that hold locks of messages of these consumers: those with open
    /// claims.
    async fn open_claims(&self, connection: &mut PgConnection) -> Result<Vec<String>, InboxError> {
        const OPEN: &str = "SELECT DISTINCT l.virtualtransaction FROM pg_locks l \
            WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 \
              AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
              AND l.classid = ANY ($1::bigint[]::oid[])";
        let consumers: Vec<_> =
            self.consumers.iter().map(|consumer| i64::from(consumer.consumer_id)).collect();
        Ok(sqlx::query_scalar(OPEN).bind(consumers).fetch_all(connection).await?)
    }

    /// Looks at the next messages of a consumer, and erases those that the target selects.
    async fn look_on(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
        consumer: &ErasedConsumer,
    ) -> Result<ErasureStep, InboxError> {
        const ADVANCE: &str = "UPDATE oncebox.erasure SET at_consumer = $2, at_message = $3, \
            found = found + $4, looked_at = looked_at + $5, \
            already_erased = already_erased + CASE pass WHEN 1 THEN $6 ELSE 0 END, \
            differences = differences + $7, waits_for = '{}' WHERE erasure_id = $1";
        let after = if row.at_consumer == consumer.consumer_id { &*row.at_message } else { "" };
        let seen = window::look(connection, "inbox", consumer, &self.target, after).await?;
        let window = ErasureWindow::of(seen);
        if !window.found.is_empty() {
            let erased = self.erase(connection, row, consumer, &window.found).await?;
            self.record(connection, consumer.consumer_id, &erased).await?;
        }
        // With `dedup = "off"` a message may have no row, and what its handler sent has.
        if let ErasureTarget::MessageId(id) = &self.target
            && !window.found.contains(id)
        {
            let free = self.erase_sent(connection, consumer, std::slice::from_ref(id)).await?;
            if free.is_empty() {
                return Ok(ErasureStep::Waits(ErasureWait::Messages(1)));
            }
        }
        // Differences outlast the row of their message.
        let trials = match &self.target {
            ErasureTarget::MessageId(id) => std::slice::from_ref(id),
            ErasureTarget::Key(_) => &window.matching[..],
        };
        let differences = self.forget_trials(connection, consumer, trials).await?;
        let (at_consumer, at_message) = match window.last {
            Some(last) => (consumer.consumer_id, last),
            None => (consumer.consumer_id + 1, String::new()),
        };
        let query = sqlx::query(ADVANCE)
            .bind(self.erasure_id)
            .bind(at_consumer)
            .bind(at_message)
            .bind(window.found.len() as i64)
            .bind(window.looked_at)
            .bind(window.already_erased)
            .bind(differences);
        query.execute(connection).await?;
        Ok(ErasureStep::Erased)
    }

    async fn erase(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
        consumer: &ErasedConsumer,
        ids: &[String],
    ) -> Result<Vec<ErasedRow>, InboxError> {
        const ERASE: &str = "SELECT id, status, edits, errors, partitions FROM \
            oncebox.erase($1, $2, $3, $4, $5)";
        let query = sqlx::query_as(ERASE)
            .bind(consumer.consumer_id)
            .bind(consumer.retention_class)
            .bind(ids)
            .bind(&row.actor)
            .bind(&row.reason);
        Ok(query.fetch_all(connection).await?)
    }

    /// Writes which messages were erased and which are held, and which tables are to be vacuumed.
    pub(super) async fn record(
        &self,
        connection: &mut PgConnection,
        consumer_id: i32,
        erased: &[ErasedRow],
    ) -> Result<(), InboxError> {
        const MESSAGES: &str = "INSERT INTO oncebox.erased_message (erasure_id, consumer_id, \
            message_id, status) SELECT $1, $2, u.id, u.status \
            FROM unnest($3::text[], $4::text[]) AS u(id, status) \
            ON CONFLICT (erasure_id, consumer_id, message_id) \
            DO UPDATE SET status = excluded.status";
        const FIGURES: &str = "UPDATE oncebox.erasure SET edits = edits + $2, \
            errors = errors + $3 WHERE erasure_id = $1";
        let messages = sqlx::query(MESSAGES)
            .bind(self.erasure_id)
            .bind(consumer_id)
            .bind(erased.iter().map(|erased| erased.id.as_str()).collect::<Vec<_>>())
            .bind(erased.iter().map(|erased| erased.status.as_deref()).collect::<Vec<_>>());
        messages.execute(&mut *connection).await?;
        let edits: i64 = erased.iter().map(|erased| erased.edits).sum();
        let errors: i64 = erased.iter().map(|erased| erased.errors).sum();
        let figures = sqlx::query(FIGURES).bind(self.erasure_id).bind(edits).bind(errors);
        figures.execute(&mut *connection).await?;
        let mut tables: BTreeSet<&str> =
            erased.iter().flat_map(|erased| &erased.partitions).map(String::as_str).collect();
        tables.extend((edits > 0).then_some("oncebox.inbox_edit"));
        tables.extend((errors > 0).then_some("oncebox.inbox_history"));
        self.vacuum_later(connection, &tables).await
    }

    pub(super) async fn vacuum_later(
        &self,
        connection: &mut PgConnection,
        tables: &BTreeSet<&str>,
    ) -> Result<(), InboxError> {
        const LATER: &str = "UPDATE oncebox.erasure e SET to_vacuum = ARRAY(SELECT DISTINCT t \
            FROM unnest(e.to_vacuum || $2::text[]) AS t ORDER BY t) WHERE erasure_id = $1";
        if !tables.is_empty() {
            let tables: Vec<_> = tables.iter().copied().collect();
            let query = sqlx::query(LATER).bind(self.erasure_id).bind(tables);
            query.execute(connection).await?;
        }
        Ok(())
    }

    /// Deletes what trials of candidates kept of these messages: values of rows that they wrote.
    pub(super) async fn forget_trials(
        &self,
        connection: &mut PgConnection,
        consumer: &ErasedConsumer,
        ids: &[String],
    ) -> Result<i64, InboxError> {
        const FORGET: &str = "DELETE FROM oncebox.shadow_difference \
            WHERE deployment_id = ANY ($1) AND message_id = ANY ($2)";
        if consumer.shadows.is_empty() || ids.is_empty() {
            return Ok(0);
        }
        let query = sqlx::query(FORGET).bind(&consumer.shadows).bind(ids);
        let forgotten = query.execute(&mut *connection).await?.rows_affected() as i64;
        if forgotten > 0 {
            let table = BTreeSet::from(["oncebox.shadow_difference"]);
            self.vacuum_later(connection, &table).await?;
        }
        Ok(forgotten)
    }

    /// Ends a pass: tries what was held, and begins the next pass unless two in a row found nothing.
    /// One is not enough: a claim that rolls back and is made again in another transaction is in
    /// none of those that the pass waited for.
    async fn end_pass(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
    ) -> Result<ErasureStep, InboxError> {
        const NEXT_PASS: &str = "UPDATE oncebox.erasure SET pass = pass + 1, at_consumer = 0, \
            at_message = '', removed_table = '', removed_consumer = 0, removed_message = '', \
            found = 0, waits_for = $2, empty_passes = $3 WHERE erasure_id = $1";
        if let Some(step) = self.try_held(connection, row).await? {
            return Ok(step);
        }
        if let Some(step) = self.look_at_removed(connection, row).await? {
            return Ok(step);
        }
        let is_empty = row.pass > 1 && row.found == 0;
        if is_empty && row.empty_passes > 0 {
            return Ok(ErasureStep::Done);
        }
        let open = self.open_claims(connection).await?;
        let query = sqlx::query(NEXT_PASS).bind(self.erasure_id).bind(open);
        query.bind(i32::from(is_empty)).execute(connection).await?;
        Ok(ErasureStep::Erased)
    }

    /// Tries to erase messages that were held; returns none where none was.
    async fn try_held(
        &self,
        connection: &mut PgConnection,
        row: &ErasureRow,
    ) -> Result<Option<ErasureStep>, InboxError> {
        const HELD: &str = "SELECT consumer_id, message_id FROM oncebox.erased_message \
            WHERE erasure_id = $1 AND status IS NULL ORDER BY consumer_id, message_id LIMIT $2";
        // Erased by another erasure, or removed with their consumer.
        const GONE: &str = "DELETE FROM oncebox.erased_message WHERE erasure_id = $1 AND \
            consumer_id = $2 AND message_id = ANY ($3) AND status IS NULL \
            AND message_id <> ALL ($4)";
        const LEFT: &str = "SELECT count(*) FROM oncebox.erased_message \
            WHERE erasure_id = $1 AND status IS NULL";
        let held = sqlx::query_as(HELD).bind(self.erasure_id).bind(BATCH as i64);
        let held: Vec<(i32, String)> = held.fetch_all(&mut *connection).await?;
        if held.is_empty() {
            return Ok(None);
        }
        for of_one in held.chunk_by(|(one, _), (other, _)| one == other) {
            let consumer_id = of_one[0].0;
            let ids: Vec<_> = of_one.iter().map(|(_, id)| id.clone()).collect();
            let consumer = self.consumers.iter().find(|known| known.consumer_id == consumer_id);
            let erased = match consumer {
                Some(consumer) => self.erase(connection, row, consumer, &ids).await?,
                None => Vec::new(),
            };
            self.record(connection, consumer_id, &erased).await?;
            let answered: Vec<_> = erased.iter().map(|erased| erased.id.as_str()).collect();
            let gone = sqlx::query(GONE).bind(self.erasure_id).bind(consumer_id);
            gone.bind(&ids).bind(answered).execute(&mut *connection).await?;
        }
        let left = sqlx::query_scalar(LEFT).bind(self.erasure_id).fetch_one(connection).await?;
        Ok(Some(match left {
            0 => ErasureStep::Erased,
            left => ErasureStep::Waits(ErasureWait::Messages(left)),
        }))
    }

    /// Returns the progress for the caller.
    pub(super) async fn progress(
        &self,
        waits_for: Option<ErasureWait>,
    ) -> Result<ErasureProgress, InboxError> {
        const PROGRESS: &str = "SELECT e.looked_at, (SELECT count(*) FROM oncebox.erased_message m \
            WHERE m.erasure_id = e.erasure_id AND m.status IS NOT NULL) \
            FROM oncebox.erasure e WHERE e.erasure_id = $1";
        let query = sqlx::query_as(PROGRESS).bind(self.erasure_id);
        let found: Option<(i64, i64)> = query.fetch_optional(&self.database.pool).await?;
        let (looked_at, erased) = found.ok_or_else(|| self.ended())?;
        Ok(ErasureProgress {
            erased,
            looked_at,
            in_flight: waits_for.as_ref().map_or(0, ErasureWait::count),
            waits_for: waits_for.map(|wait| wait.to_string()),
            proof: None,
        })
    }
}

/// Returns whether a step that failed succeeds when it is tried again: another transaction was in
/// the way, or a time partition was dropped meanwhile.
fn is_passing(error: &InboxError) -> bool {
    matches!(error, InboxError::InFlightElsewhere) || is_gone(error)
}
