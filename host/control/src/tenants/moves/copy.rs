//! The copy of a tenant. Its own tables come first, in one transaction of their owner. The last
//! transaction has the tenant's rows of the host's tables and the replica of its row, which says that
//! the copy is whole; what a process that died before it has left is removed. What is there is shut
//! out like what is left behind, until the switch.

use oncebox_model::{error::InboxError, hooks};
use sqlx::{Connection, PgConnection};

use super::{
    carry::{Mover, Side},
    own_tables::{self, set_text},
    partitions::{self, PastTimes},
    rows::{CopyProgress, OWNED, OwnedKeys, OwnedTable, joined},
};
use crate::{database::schema, tenants::shut_out::end_sessions};

/// Part of the numbers of `oncebox.ordering_place` that a copy leaves out behind those that it
/// brings: the other sessions of the database go on to take numbers.
const PLACES_AHEAD: i64 = 1 << 20;

impl Mover<'_> {
    /// Copies the tenant, unless a host that had the move before has done so.
    pub(super) async fn copy(&self) -> Result<(), InboxError> {
        if self.is_copied().await? {
            return Ok(());
        }
        // What a process that died, or another move, has left there.
        Box::pin(self.clean(Side::To)).await?;
        let keys = OwnedKeys::of(self).await?;
        let classes = self.control.tenant_databases().classes_of(self.tenant.tenant_id).await?;
        schema::ensure_partitions_for(&self.to.pool, &classes).await?;
        let past = partitions::make(self, &keys.consumers).await?;
        own_tables::make_roles(self).await?;
        hooks::point("tenant:move:roles");
        let mut progress = CopyProgress::new(self);
        Box::pin(own_tables::copy(self, &mut progress)).await?;
        hooks::point("tenant:move:tables");

        let mut from = self.from.connect_for_long().await?;
        let mut to = self.to.connect_for_long().await?;
        let mut read = from.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let mut write = to.begin().await?;
        self.guard.hold(&mut write).await?;
        self.control.tenant_databases().write_replica(&mut write, &self.tenant).await?;
        set_text(&mut read).await?;
        set_text(&mut write).await?;
        copy_removals(&keys, &mut read, &mut write).await?;
        for table in OWNED {
            copy_owned(table, &keys, &past, &mut read, &mut write, &mut progress).await?;
        }
        raise_places(&mut read, &mut write).await?;
        hooks::point("tenant:move:copy:before_commit");
        self.note_copied(progress.bytes()).await?;
        write.commit().await?;
        read.rollback().await?; // it only read
        from.close().await;
        to.close().await;
        Ok(())
    }

    /// Returns whether the copy of this move is there.
    async fn is_copied(&self) -> Result<bool, InboxError> {
        const COPIED: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant WHERE tenant_id = $1 AND \
            schema_name = $2 AND revision = $3)";
        let mut connection = self.to.connect_for_long().await?;
        let mut tx = connection.begin().await?;
        // A host that had the move before may be about to commit, or goes on without its lock.
        self.guard.hold(&mut tx).await?;
        end_sessions(&self.to.pool, &self.tenant).await?;
        let is_copied = sqlx::query_scalar(COPIED)
            .bind(self.tenant.tenant_id)
            .bind(&self.tenant.schema_name)
            .bind(self.row.revision)
            .fetch_one(&mut *tx)
            .await?;
        tx.rollback().await?; // it was begun for its lock
        connection.close().await;
        Ok(is_copied)
    }
}

/// Copies the removals of the time partitions whose archived files are the tenant's, by which the
/// files are listed. Those that the other database has by itself stay as they are.
async fn copy_removals(
    keys: &OwnedKeys,
    read: &mut PgConnection,
    write: &mut PgConnection,
) -> Result<(), InboxError> {
    const READ: &str = "SELECT to_jsonb(m) FROM oncebox.removal m WHERE m.state = 'dropped' AND \
        m.partition_name IN (SELECT f.partition_name FROM oncebox.archive_file f WHERE f.tenant_id \
        = $1)";
    const WRITE: &str = "INSERT INTO oncebox.removal SELECT r.* FROM unnest($1::jsonb[]) AS j(row), \
        jsonb_populate_record(NULL::oncebox.removal, j.row) r ON CONFLICT DO NOTHING";
    let removals: Vec<serde_json::Value> =
        sqlx::query_scalar(READ).bind(keys.tenant_id).fetch_all(read).await?;
    sqlx::query(WRITE).bind(removals).execute(write).await?;
    Ok(())
}

/// Copies the tenant's rows of one table.
async fn copy_owned(
    table: &OwnedTable,
    keys: &OwnedKeys,
    past: &PastTimes,
    read: &mut PgConnection,
    write: &mut PgConnection,
    progress: &mut CopyProgress<'_>,
) -> Result<(), InboxError> {
    let name = table.name;
    let columns = columns(write, table).await?;
    let replays = if columns.iter().any(|column| column == "replay_id") {
        new_replays(keys, read, write).await?
    } else {
        String::new()
    };
    let values: Vec<_> = columns
        .iter()
        .map(|column| match &**column {
            "bucket" => past.bucket(name),
            "replay_id" => "n.new".to_owned(),
            // Nobody is at work on a file: retention and erasures rest.
            "is_left" if name == "archive_attempt" => "true".to_owned(),
            "put_ends_at" => "coalesce(r.put_ends_at, now() + interval '1 hour')".to_owned(),
            column => format!("r.{column}"),
        })
        .collect();
    let order = table.given.map(|given| format!(" ORDER BY r.{given}")).unwrap_or_default();
    let query = format!(
        "SELECT {} FROM oncebox.{name} r{replays} WHERE {}{order}",
        values.join(", "),
        keys.condition(table.owner)
    );
    let into = format!("oncebox.{name} ({})", columns.join(", "));
    progress.copy(read, &query, write, &into).await
}

/// Lists the columns of a table that are copied.
async fn columns(
    connection: &mut PgConnection,
    table: &OwnedTable,
) -> Result<Vec<String>, InboxError> {
    const COLUMNS: &str = "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = \
        ('oncebox.' || $1)::regclass AND attnum > 0 AND NOT attisdropped AND attname IS DISTINCT \
        FROM $2 ORDER BY attnum";
    let query = sqlx::query_scalar(COLUMNS).bind(table.name).bind(table.given);
    Ok(query.fetch_all(connection).await?)
}

/// Gives the replays that have begun new keys, which their failures refer to. Returns a join of
/// rows `r` with them. Plans that nobody started stay behind.
async fn new_replays(
    keys: &OwnedKeys,
    read: &mut PgConnection,
    write: &mut PgConnection,
) -> Result<String, InboxError> {
    const OLD: &str = "SELECT replay_id FROM oncebox.replay WHERE consumer_id = ANY ($1) AND state \
        <> 'planned' ORDER BY 1";
    // The keys of this transaction, in the order in which they were given.
    const NEW: &str = "SELECT nextval(pg_get_serial_sequence('oncebox.replay', 'replay_id')) FROM \
        generate_series(1, $1)";
    const KNOWN: &str = "SELECT replay_id FROM oncebox.replay WHERE consumer_id = ANY ($1) ORDER \
        BY 1";
    let old: Vec<i64> = sqlx::query_scalar(OLD).bind(&keys.consumers).fetch_all(read).await?;
    let mut new: Vec<i64> =
        sqlx::query_scalar(KNOWN).bind(&keys.consumers).fetch_all(&mut *write).await?;
    if new.is_empty() {
        new = sqlx::query_scalar(NEW).bind(old.len() as i32).fetch_all(write).await?;
    }
    Ok(format!(
        " JOIN unnest('{{{}}}'::bigint[], '{{{}}}'::bigint[]) AS n(old, new) ON n.old = \
            r.replay_id",
        joined(&old),
        joined(&new)
    ))
}

/// Raises the numbers that give messages their places in their keys over those that were copied.
async fn raise_places(read: &mut PgConnection, write: &mut PgConnection) -> Result<(), InboxError> {
    const LAST: &str = "SELECT last_value FROM oncebox.ordering_place";
    let last: i64 = sqlx::query_scalar(LAST).fetch_one(read).await?;
    let there: i64 = sqlx::query_scalar(LAST).fetch_one(&mut *write).await?;
    if there < last + PLACES_AHEAD {
        sqlx::query("SELECT setval('oncebox.ordering_place', $1)")
            .bind(last + 2 * PLACES_AHEAD)
            .execute(write)
            .await?;
    }
    Ok(())
}
