//! A tenant's tables: their columns and constraints, their rows, and the changes of rows.
//!
//! Everything is read as the tenant, in a transaction of the tenant.

mod changes;
mod outgoing;
mod snapshot;

pub(crate) use changes::{ChangeKind, RowChange, changes};
pub(crate) use outgoing::{OUTGOING, outgoing_rows, outgoing_table};
pub(crate) use snapshot::{Rows, Snapshot};

use anyhow::{Context, Result};
use oncebox_model::tx::Tx;
use sqlx::{AssertSqlSafe, FromRow, postgres::PgRow};

/// A table with the columns, indexes and references that decide about its rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) columns: Vec<Column>,
    pub(crate) indexes: Vec<UniqueIndex>,
    pub(crate) references: Vec<ForeignKey>,
}

/// A column of a table.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Column {
    table: String,
    pub(crate) name: String,
    /// Type as PostgreSQL writes it: `timestamp with time zone`.
    pub(crate) r#type: String,
    /// Whether it is an identity column.
    pub(crate) is_identity: bool,
    /// The column's default, as SQL.
    pub(crate) default: Option<String>,
}

/// A unique index that holds for every row.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct UniqueIndex {
    table: String,
    pub(crate) name: String,
    pub(crate) is_primary: bool,
    /// The index's columns; an expression is an empty name.
    pub(crate) columns: Vec<String>,
}

/// A foreign key.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct ForeignKey {
    table: String,
    pub(crate) columns: Vec<String>,
    pub(crate) to_table: String,
    pub(crate) to_columns: Vec<String>,
}

const TABLES: &str = "SELECT c.relname::text FROM pg_catalog.pg_class c JOIN \
    pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER \
    BY 1";

const COLUMNS: &str = "SELECT c.relname::text AS \"table\", a.attname::text AS name, \
    format_type(a.atttypid, a.atttypmod) AS \"type\", \
    a.attidentity <> '' AS is_identity, pg_get_expr(d.adbin, d.adrelid) AS \"default\" \
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN \
    pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
    WHERE n.nspname = current_schema() AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN \
    ('r', 'p') ORDER BY c.relname, a.attnum";

const INDEXES: &str = "SELECT c.relname::text AS \"table\", x.relname::text AS name, \
    i.indisprimary AS is_primary, \
    ARRAY(SELECT coalesce(a.attname::text, '') FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS \
    k(attnum, n) \
        LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND \
        k.attnum > 0 \
        WHERE k.n <= i.indnkeyatts ORDER BY k.n) AS columns \
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid JOIN \
    pg_catalog.pg_class x ON x.oid = i.indexrelid \
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    WHERE n.nspname = current_schema() AND i.indisunique AND i.indpred IS NULL ORDER BY NOT \
    i.indisprimary, x.relname";

const REFERENCES: &str = "SELECT c.relname::text AS \"table\", f.relname::text AS to_table, \
    ARRAY(SELECT a.attname::text FROM unnest(k.conkey) WITH ORDINALITY AS u(attnum, n) \
        JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.attnum ORDER BY \
        u.n) AS columns, \
    ARRAY(SELECT a.attname::text FROM unnest(k.confkey) WITH ORDINALITY AS u(attnum, n) \
        JOIN pg_catalog.pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = u.attnum ORDER \
        BY u.n) AS to_columns \
    FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid JOIN \
    pg_catalog.pg_class f ON f.oid = k.confrelid \
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = current_schema() \
    AND k.contype = 'f'";

/// Reads the tables of the tenant's schema, ordered by name.
pub(crate) async fn read(tx: &Tx) -> Result<Vec<Table>> {
    let names: Vec<(String,)> = fetch(tx, TABLES).await?;
    let columns: Vec<Column> = fetch(tx, COLUMNS).await?;
    let indexes: Vec<UniqueIndex> = fetch(tx, INDEXES).await?;
    let references: Vec<ForeignKey> = fetch(tx, REFERENCES).await?;
    let table = |(name,): (String,)| Table {
        columns: columns.iter().filter(|column| column.table == name).cloned().collect(),
        indexes: indexes.iter().filter(|index| index.table == name).cloned().collect(),
        references: references
            .iter()
            .filter(|reference| reference.table == name)
            .cloned()
            .collect(),
        name,
    };
    Ok(names.into_iter().map(table).collect())
}

/// Fetches the rows of one of the host's statements, in a transaction of the tenant.
async fn fetch<T: for<'r> FromRow<'r, PgRow> + Send + Unpin>(tx: &Tx, sql: &str) -> Result<Vec<T>> {
    let mut statement = tx.statement().await;
    let rows =
        sqlx::query_as(AssertSqlSafe(sql.to_owned())).fetch_all(statement.connection()).await;
    statement.finish(rows.as_ref().err());
    rows.context("failed to read the tenant's tables")
}

impl Table {
    /// Returns the positions of the primary key's columns.
    pub(crate) fn key(&self) -> Option<Vec<usize>> {
        let index = self.indexes.iter().find(|index| index.is_primary)?;
        index.columns.iter().map(|name| self.position(name)).collect()
    }

    /// Returns the position of a column in the table.
    pub(crate) fn position(&self, column: &str) -> Option<usize> {
        self.columns.iter().position(|known| known.name == column)
    }
}

#[cfg(test)]
impl Table {
    /// Makes a table for tests from its columns, its unique indexes (the first is the primary key)
    /// and its defaults.
    pub(crate) fn sample(
        name: &str,
        columns: &[&str],
        indexes: &[&[&str]],
        defaults: &[(&str, &str)],
    ) -> Self {
        let default = |column: &str| {
            defaults
                .iter()
                .find(|(name, _)| *name == column)
                .map(|(_, default)| (*default).to_owned())
        };
        let column = |column: &&str| Column {
            table: name.to_owned(),
            name: (*column).to_owned(),
            r#type: "text".to_owned(),
            is_identity: false,
            default: default(column),
        };
        let index = |(number, columns): (usize, &&[&str])| UniqueIndex {
            table: name.to_owned(),
            name: format!("{name}_{number}"),
            is_primary: number == 0,
            columns: columns.iter().map(|column| (*column).to_owned()).collect(),
        };
        Self {
            name: name.to_owned(),
            columns: columns.iter().map(column).collect(),
            indexes: indexes.iter().enumerate().map(index).collect(),
            references: Vec::new(),
        }
    }
}

impl Column {
    /// Returns whether a sequence generates the column's values.
    pub(crate) fn is_counted(&self) -> bool {
        self.is_identity
            || self.default.as_deref().is_some_and(|default| default.contains("nextval("))
    }

    /// Returns a value as JSON: integers and booleans typed, any other as the text that PostgreSQL
    /// writes.
    pub(crate) fn json(&self, value: Option<&str>) -> serde_json::Value {
        let Some(text) = value else { return serde_json::Value::Null };
        let typed = match self.r#type.as_str() {
            "smallint" | "integer" | "bigint" => text.parse::<i64>().ok().map(Into::into),
            "boolean" => Some((text == "true").into()),
            _ => None,
        };
        typed.unwrap_or_else(|| text.into())
    }
}

/// Returns a name as a quoted SQL identifier.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
