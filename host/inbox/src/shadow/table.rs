//! The tables that a message touched, as the catalogs describe them to the tenant's own session.

use std::{collections::BTreeMap, sync::Arc};

use oncebox_model::{
    error::InboxError,
    tx::{Tx, bounded},
};
use sqlx::{FromRow, postgres::types::Oid};

/// A table; for a partition, the table that it is a partition of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ShadowTable {
    pub(super) oid: i64,
    /// Name without its schema.
    pub(super) name: String,
    /// Name in a statement.
    pub(super) sql: String,
    pub(super) columns: Vec<ShadowColumn>,
    /// Positions of the primary key's columns; empty where there is none.
    pub(super) key: Vec<usize>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ShadowColumn {
    pub(super) name: String,
    /// Type as PostgreSQL writes it: `timestamp with time zone`.
    pub(super) r#type: String,
    /// True where a sequence or a random default fills it, so that no two runs agree.
    pub(super) is_counted: bool,
    /// True where it is computed from other columns and cannot be written.
    pub(super) is_generated: bool,
    /// True for `GENERATED ALWAYS AS IDENTITY`: an update cannot write it.
    pub(super) is_always: bool,
    /// Table and column that it refers to.
    pub(super) refers_to: Option<(i64, String)>,
}

/// The table or partition that stores rows. The columns of a partition may stand in another order
/// than those of its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TableRef {
    pub(super) table: Arc<ShadowTable>,
    /// Name in a statement, which is also that of its row type.
    pub(super) sql: String,
    /// Position here of each column of the table.
    pub(super) order: Vec<usize>,
}

/// Tables by oid.
pub(super) type TableRefs = BTreeMap<i64, TableRef>;

const PLACES: &str = "SELECT c.oid::int8 AS place, coalesce(pg_partition_root(c.oid)::oid, \
    c.oid)::int8 AS \"table\", \
    format('%I.%I', n.nspname, c.relname) AS sql, \
    ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND \
    a.attnum > 0 AND NOT a.attisdropped \
        ORDER BY a.attnum) AS columns \
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE \
    c.oid = ANY($1)";

const COLUMNS: &str = "SELECT c.oid::int8 AS \"table\", c.relname::text AS table_name, \
    format('%I.%I', n.nspname, c.relname) AS sql, \
    a.attname::text AS name, format_type(a.atttypid, a.atttypmod) AS \"type\", a.attidentity <> '' \
    AS is_identity, \
    a.attidentity = 'a' AS is_always, a.attgenerated <> '' AS is_generated, \
    CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END AS \"default\", \
    array_position(i.indkey::int2[], a.attnum) AS key_position, f.confrelid::int8 AS \
    refers_to_table, f.attname AS refers_to_column \
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN \
    pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
    LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary \
    LEFT JOIN LATERAL (SELECT k.confrelid, t.attname::text FROM pg_catalog.pg_constraint k \
        CROSS JOIN LATERAL unnest(k.conkey, k.confkey) AS u(from_attnum, to_attnum) \
        JOIN pg_catalog.pg_attribute t ON t.attrelid = k.confrelid AND t.attnum = u.to_attnum \
        WHERE k.contype = 'f' AND k.conrelid = a.attrelid AND u.from_attnum = a.attnum ORDER BY \
        k.oid LIMIT 1) f ON true \
    WHERE c.oid = ANY($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY c.oid, a.attnum";

#[derive(FromRow)]
struct PlaceRow {
    place: i64,
    table: i64,
    sql: String,
    columns: Vec<String>,
}

#[derive(FromRow)]
struct ColumnRow {
    table: i64,
    table_name: String,
    sql: String,
    name: String,
    r#type: String,
    is_identity: bool,
    is_always: bool,
    is_generated: bool,
    default: Option<String>,
    key_position: Option<i32>,
    refers_to_table: Option<i64>,
    refers_to_column: Option<String>,
}

/// Reads the places of these oids; leaves out those that are gone.
pub(super) async fn read(
    tx: &Tx,
    oids: impl IntoIterator<Item = i64>,
) -> Result<TableRefs, InboxError> {
    let places: Vec<PlaceRow> = fetch(tx, PLACES, oids).await?;
    let columns: Vec<ColumnRow> =
        fetch(tx, COLUMNS, places.iter().map(|place| place.table)).await?;
    let mut tables: BTreeMap<i64, (ShadowTable, Vec<(i32, usize)>)> = BTreeMap::new();
    for row in columns {
        let (table, key) = tables.entry(row.table).or_default();
        key.extend(row.key_position.map(|position| (position, table.columns.len())));
        (table.oid, table.name, table.sql) = (row.table, row.table_name.clone(), row.sql.clone());
        table.columns.push(row.column());
    }
    let tables: BTreeMap<i64, Arc<ShadowTable>> = tables
        .into_iter()
        .map(|(oid, (table, key))| (oid, Arc::new(with_key(table, key))))
        .collect();
    let place = |row: PlaceRow| {
        let table = tables.get(&row.table)?.clone();
        let position =
            |column: &ShadowColumn| row.columns.iter().position(|name| *name == column.name);
        let order = table.columns.iter().map(position).collect::<Option<Vec<_>>>()?;
        (order.len() == row.columns.len())
            .then_some((row.place, TableRef { table, sql: row.sql, order }))
    };
    Ok(places.into_iter().filter_map(place).collect())
}

fn with_key(mut table: ShadowTable, mut key: Vec<(i32, usize)>) -> ShadowTable {
    key.sort_unstable();
    table.key = key.into_iter().map(|(_, position)| position).collect();
    table
}

async fn fetch<T: for<'r> FromRow<'r, sqlx::postgres::PgRow> + Send + Unpin>(
    tx: &Tx,
    sql: &'static str,
    oids: impl IntoIterator<Item = i64>,
) -> Result<Vec<T>, InboxError> {
    let oids: Vec<_> =
        oids.into_iter().filter_map(|oid| u32::try_from(oid).ok()).map(Oid).collect();
    let mut statement = tx.statement().await;
    let rows = bounded(sqlx::query_as(sql).bind(oids).fetch_all(statement.connection())).await;
    statement.finish(rows.as_ref().err());
    Ok(rows?)
}

impl ColumnRow {
    fn column(self) -> ShadowColumn {
        let counts = ["nextval(", "gen_random_uuid(", "uuid_generate_", "random("];
        let is_counted = self.is_identity
            || self
                .default
                .is_some_and(|default| counts.iter().any(|count| default.contains(count)));
        ShadowColumn {
            name: self.name,
            r#type: self.r#type,
            is_counted,
            is_generated: self.is_generated,
            is_always: self.is_always,
            refers_to: self.refers_to_table.zip(self.refers_to_column),
        }
    }
}

/// Returns a name quoted for SQL.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
