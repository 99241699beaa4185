//! The changes of a tenant's rows between two snapshots.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{
    Table,
    snapshot::{Row, Rows, Snapshot},
};

/// A row that was inserted, updated or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowChange {
    pub(crate) table: String,
    pub(crate) kind: ChangeKind,
    pub(crate) before: Option<Row>,
    pub(crate) after: Option<Row>,
}

/// The kind of a row's change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    Inserted,
    Updated,
    Deleted,
}

impl ChangeKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Inserted => "inserted",
            Self::Updated => "updated",
            Self::Deleted => "deleted",
        }
    }
}

/// Returns every change, table by table. Rows are matched by their primary keys. A table without
/// one has inserted and deleted rows, but none that are updated.
pub(crate) fn changes(tables: &[Table], before: &Snapshot, after: &Snapshot) -> Vec<RowChange> {
    tables.iter().flat_map(|table| table_changes(table, before, after)).collect()
}

fn table_changes(table: &Table, before: &Snapshot, after: &Snapshot) -> Vec<RowChange> {
    let (Some(Rows::All(before)), Some(Rows::All(after))) =
        (before.tables.get(&table.name), after.tables.get(&table.name))
    else {
        return Vec::new();
    };
    let key = table.key();
    let identity = |row: &Row| -> Row {
        match &key {
            Some(positions) => positions.iter().map(|position| row[*position].clone()).collect(),
            None => row.clone(),
        }
    };
    let mut was: BTreeMap<Row, Vec<&Row>> = BTreeMap::new();
    for row in before {
        was.entry(identity(row)).or_default().push(row);
    }
    let change = |kind, before: Option<&Row>, after: Option<&Row>| RowChange {
        table: table.name.clone(),
        kind,
        before: before.cloned(),
        after: after.cloned(),
    };
    let mut found = Vec::new();
    for row in after {
        match was.get_mut(&identity(row)).and_then(Vec::pop) {
            None => found.push(change(ChangeKind::Inserted, None, Some(row))),
            Some(old) if old != row => {
                found.push(change(ChangeKind::Updated, Some(old), Some(row)))
            }
            Some(_) => {}
        }
    }
    found.extend(
        was.into_values().flatten().map(|row| change(ChangeKind::Deleted, Some(row), None)),
    );
    found.sort_by(|a, b| (&a.before, &a.after).cmp(&(&b.before, &b.after)));
    found
}

impl RowChange {
    /// Returns the row in one line: for an update the key, and each changed column before and
    /// after.
    pub(crate) fn line(&self, table: &Table) -> String {
        let name = |position: usize| table.columns[position].name.as_str();
        let cells: Vec<String> = match (&self.before, &self.after) {
            (Some(before), Some(after)) => {
                let key = table.key().unwrap_or_default();
                let cell = |position: usize| match before[position] == after[position] {
                    true if key.contains(&position) => {
                        Some(format!("{}={}", name(position), shown(&after[position])))
                    }
                    true => None,
                    false => Some(format!(
                        "{} {} → {}",
                        name(position),
                        shown(&before[position]),
                        shown(&after[position])
                    )),
                };
                (0..after.len()).filter_map(cell).collect()
            }
            (Some(row), None) | (None, Some(row)) => row
                .iter()
                .enumerate()
                .map(|(position, value)| format!("{}={}", name(position), shown(value)))
                .collect(),
            (None, None) => Vec::new(),
        };
        cells.join("  ")
    }

    /// Returns the change as JSON, for programs.
    pub(crate) fn json(&self, table: &Table) -> Value {
        let object = |row: &Row| -> Value {
            let cells = table
                .columns
                .iter()
                .zip(row)
                .map(|(column, value)| (column.name.clone(), column.json(value.as_deref())));
            cells.collect::<Map<_, _>>().into()
        };
        json!({
            "table": self.table,
            "change": self.kind.name(),
            "before": self.before.as_ref().map(object),
            "after": self.after.as_ref().map(object),
        })
    }
}

/// Most characters of a value that are shown.
const SHOWN_MAX: usize = 60;

/// Returns a value for a line, quoted only where its end would not be seen.
pub(crate) fn shown(value: &Option<String>) -> String {
    let Some(text) = value else { return "null".to_owned() };
    let mut cut: String = text
        .chars()
        .take(SHOWN_MAX)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if text.chars().count() > SHOWN_MAX {
        cut.push('…');
    }
    if cut.is_empty() || cut.contains(char::is_whitespace) { format!("'{cut}'") } else { cut }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(has_key: bool) -> Table {
        let key: &[&[&str]] = if has_key { &[&["id"]] } else { &[] };
        Table::sample("t", &["id", "n"], key, &[])
    }

    fn snapshot(rows: &[[&str; 2]]) -> Snapshot {
        let rows = rows
            .iter()
            .map(|row| row.iter().map(|value| Some((*value).to_owned())).collect())
            .collect();
        Snapshot { tables: [("t".to_owned(), Rows::All(rows))].into() }
    }

    fn check(has_key: bool, before: &[[&str; 2]], after: &[[&str; 2]], expected: &[&str]) {
        let table = table(has_key);
        let found = changes(std::slice::from_ref(&table), &snapshot(before), &snapshot(after));
        let lines: Vec<_> = found
            .iter()
            .map(|change| format!("{} {}", change.kind.name(), change.line(&table)))
            .collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn rows_are_told_apart_by_their_key() {
        check(
            true,
            &[["a", "1"], ["b", "1"]],
            &[["b", "2"], ["c", "1 2"]],
            &["inserted id=c  n='1 2'", "deleted id=a  n=1", "updated id=b  n 1 → 2"],
        );
        check(true, &[["a", "1"]], &[["a", "1"]], &[]);
    }

    #[test]
    fn without_a_key_equal_rows_are_counted() {
        check(
            false,
            &[["a", "1"], ["a", "1"]],
            &[["a", "1"], ["a", "2"]],
            &["inserted id=a  n=2", "deleted id=a  n=1"],
        );
        check(false, &[["a", "1"]], &[["a", "1"], ["a", "1"]], &["inserted id=a  n=1"]);
    }
}
