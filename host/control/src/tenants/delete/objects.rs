//! Removal of the objects in a tenant's schema, a few in a transaction. Each object takes locks
//! until the transaction ends, and the server has room for some thousands of all sessions together.

use oncebox_model::{error::InboxError, hooks};
use sqlx::{Executor, PgPool};

use crate::tenants::moves::guard::MoveGuard;

/// Objects in one transaction. Each is a table with its indexes at most.
const BATCH: i64 = 20;

/// Objects that stand in the schema by themselves. Parent tables of an inheritance come after their
/// children.
const OBJECTS: &str = "FROM pg_depend d LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass \
    AND c.oid = d.objid \
    WHERE d.refclassid = 'pg_namespace'::regclass AND d.refobjid = to_regnamespace($1) AND \
    d.deptype = 'n' \
        AND d.classid IN ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)";

/// Drops a schema with everything in it. A missing schema is no error. Where a move removes it,
/// each transaction checks that this host still has the move.
pub(crate) async fn drop_all(
    pool: &PgPool,
    schema: &str,
    guard: Option<&MoveGuard>,
) -> Result<(), InboxError> {
    let mut size = BATCH;
    loop {
        let drops = drops(pool, schema, size).await?;
        if drops.is_empty() {
            break;
        }
        match drop_batch(pool, &drops, guard).await {
            Ok(()) if guard.is_some() => hooks::point("tenant:move:objects"),
            Ok(()) => hooks::point("tenant:delete:objects"),
            // The batch may have needed more locks than the server has room for.
            Err(_) if size > 1 => size = 1,
            Err(error @ InboxError::Refused(_)) => {
                tracing::debug!(%error, object = drops[0], "an object goes with its schema");
                break;
            }
            // Another session holds the object, or the connection broke: the next removal continues
            // here.
            Err(error) => return Err(error),
        }
    }
    drop_batch(pool, &[format!("DROP SCHEMA IF EXISTS {schema} CASCADE")], guard).await
}

/// Counts the objects in a schema.
pub(super) async fn count(pool: &PgPool, schema: &str) -> Result<i64, InboxError> {
    let count = format!("SELECT count(*) {OBJECTS}");
    Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(count)).bind(schema).fetch_one(pool).await?)
}

/// Returns statements that drop the next objects. Names come quoted from PostgreSQL.
async fn drops(pool: &PgPool, schema: &str, limit: i64) -> Result<Vec<String>, InboxError> {
    let list = format!(
        "SELECT format('DROP %s IF EXISTS %s CASCADE', i.type, i.identity) \
         FROM (SELECT d.classid, d.objid, CASE WHEN c.relkind IN ('r', 'p', 'f') THEN (EXISTS \
         (SELECT FROM pg_inherits WHERE inhparent = c.oid))::int \
                   WHEN c.relkind IN ('v', 'm') THEN 2 WHEN c.oid IS NOT NULL THEN 3 WHEN \
                   d.classid = 'pg_proc'::regclass THEN 4 ELSE 5 END AS rank \
               {OBJECTS} ORDER BY rank, d.objid LIMIT $2) o, pg_identify_object(o.classid, \
               o.objid, 0) i \
         WHERE i.identity IS NOT NULL ORDER BY o.rank, o.objid"
    );
    Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(list))
        .bind(schema)
        .bind(limit)
        .fetch_all(pool)
        .await?)
}

async fn drop_batch(
    pool: &PgPool,
    drops: &[String],
    guard: Option<&MoveGuard>,
) -> Result<(), InboxError> {
    let mut tx = pool.begin().await?;
    tx.execute("SET LOCAL idle_in_transaction_session_timeout = '60s'").await?;
    if let Some(guard) = guard {
        guard.hold_left(&mut tx).await?;
    }
    tx.execute("SET LOCAL lock_timeout = '30s'; SET LOCAL client_min_messages = 'warning'").await?;
    tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(drops.join("; ")))).await?;
    Ok(tx.commit().await?)
}
