//! The content of a tenant's tables at one moment.

use std::collections::BTreeMap;

use anyhow::Result;
use oncebox_model::tx::Tx;

use super::{Table, fetch, quoted};

/// Most rows of a table that are compared; a larger table is only reported as too large.
pub(super) const ROWS_MAX: usize = 10_000;

/// A row: each column as PostgreSQL writes it.
pub(crate) type Row = Vec<Option<String>>;

/// The content of every table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) tables: BTreeMap<String, Rows>,
}

/// The content of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All rows, in no particular order.
    All(Vec<Row>),
    /// More rows than the limit for a comparison.
    TooMany,
}

impl Snapshot {
    /// Reads every table in a transaction, so it sees the transaction's own changes.
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

    /// Returns the names of tables that are too large to compare.
    pub(crate) fn too_large(&self) -> impl Iterator<Item = &str> {
        self.tables
            .iter()
            .filter(|(_, rows)| **rows == Rows::TooMany)
            .map(|(name, _)| name.as_str())
    }
}
