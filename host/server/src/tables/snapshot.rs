//! The content of a tenant's tables at one moment.

use std::collections::BTreeMap;

use anyhow::Result;
use oncebox_model::tx::Tx;

use super::{Table, fetch, quoted};

/// Rows of a table that are compared; a larger table is only said to be large.
const ROWS_MAX: usize = 10_000;

/// A row: each column as PostgreSQL writes it.
pub(crate) type Row = Vec<Option<String>>;

/// Every table's content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) tables: BTreeMap<String, Rows>,
}

/// The content of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All rows, in no order that means anything.
    All(Vec<Row>),
    /// More rows than are compared.
    TooMany,
}

impl Snapshot {
    /// Read every table. In a transaction, so what it did itself is seen.
    pub(crate) async fn take(tx: &Tx, tables: &[Table]) -> Result<Self> {
        let mut snapshot = Self::default();
        for table in tables {
            let columns: Vec<_> = table
                .columns
                .iter()
                .map(|column| format!("{}::text", quoted(&column.name)))
                .collect();
            let sql = format!(
                "SELECT ARRAY[{}]::text[] FROM {} LIMIT {}",
                columns.join(", "),
                quoted(&table.name),
                ROWS_MAX + 1
            );
            let rows: Vec<(Row,)> = fetch(tx, &sql).await?;
            let rows = if rows.len() > ROWS_MAX {
                Rows::TooMany
            } else {
                Rows::All(rows.into_iter().map(|(row,)| row).collect())
            };
            snapshot.tables.insert(table.name.clone(), rows);
        }
        Ok(snapshot)
    }

    /// Names of tables too large to compare.
    pub(crate) fn too_large(&self) -> impl Iterator<Item = &str> {
        self.tables
            .iter()
            .filter(|(_, rows)| **rows == Rows::TooMany)
            .map(|(name, _)| name.as_str())
    }
}
