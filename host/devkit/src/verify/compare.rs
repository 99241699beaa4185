//! Comparison of what a run left behind with what a clean run leaves.

use std::collections::{BTreeMap, BTreeSet};

use oncebox_model::MessageStatus;

use crate::tables::{ChangeKind, RowChange, Rows, Snapshot, Table, changes};

/// Tables and inbox after a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Found {
    pub(crate) tables: Snapshot,
    /// Statuses of inbox rows, by message id.
    pub(crate) statuses: BTreeMap<String, MessageStatus>,
}

/// Columns that are not compared, with the reason.
#[derive(Debug, Clone, Default)]
pub(crate) struct Excluded {
    columns: BTreeMap<(String, String), String>,
}

/// Verdict on the effects of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Each effect present once.
    Once,
    /// A missing effect.
    Lost,
    /// A repeated effect.
    Doubled,
    /// Another effect than expected.
    Differs,
    /// Another effect than expected, as with any other order of the messages.
    OrderDependent,
    /// A step that the process did not pass.
    NotReached,
}

impl Verdict {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Lost => "lost",
            Self::Doubled => "doubled",
            Self::Differs => "differs",
            Self::OrderDependent => "depends on order",
            Self::NotReached => "not reached",
        }
    }

    /// Returns whether the verdict fails the handler.
    pub(crate) fn is_failure(self) -> bool {
        !matches!(self, Self::Once | Self::OrderDependent)
    }
}

/// A verdict and its evidence.
#[derive(Debug, Clone)]
pub(crate) struct Judgement {
    pub(crate) verdict: Verdict,
    /// Rows and messages that differ, one line each.
    pub(crate) details: Vec<String>,
    /// Tables that differ.
    pub(crate) tables: BTreeSet<String>,
}

/// Lines of detail that a judgement keeps.
const DETAILS_MAX: usize = 6;

impl Excluded {
    /// Finds columns that no two runs agree on: counted by a sequence, different after two clean
    /// runs, or referring to such a column.
    pub(crate) fn find(tables: &[Table], first: &Snapshot, second: &Snapshot) -> Self {
        let mut excluded = Self::default();
        for table in tables {
            for (position, column) in table.columns.iter().enumerate() {
                let why = if column.is_counted() {
                    "counted by a sequence"
                } else if values(first, table, position) != values(second, table, position) {
                    match column.default.is_some() {
                        true => "its default differs from run to run",
                        false => "differs after two clean runs",
                    }
                } else {
                    continue;
                };
                excluded.columns.insert((table.name.clone(), column.name.clone()), why.to_owned());
            }
        }
        while excluded.follow_references(tables) {}
        excluded
    }

    /// Excludes columns that refer to an excluded column. Returns whether it excluded any.
    fn follow_references(&mut self, tables: &[Table]) -> bool {
        let before = self.columns.len();
        for table in tables {
            for reference in &table.references {
                for (column, to) in reference.columns.iter().zip(&reference.to_columns) {
                    if self.columns.contains_key(&(reference.to_table.clone(), to.clone())) {
                        let why = format!("refers to `{}.{to}`", reference.to_table);
                        self.columns.entry((table.name.clone(), column.clone())).or_insert(why);
                    }
                }
            }
        }
        self.columns.len() > before
    }

    /// Returns the table, column and reason of each excluded column.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.columns
            .iter()
            .map(|((table, column), why)| (table.as_str(), column.as_str(), why.as_str()))
    }

    fn holds(&self, table: &str, column: &str) -> bool {
        self.columns.contains_key(&(table.to_owned(), column.to_owned()))
    }

    /// Returns the tables with only the columns and indexes that can be compared. A key of which a
    /// part is excluded tells no rows apart.
    fn comparable(&self, tables: &[Table]) -> Vec<Table> {
        let mut tables = tables.to_vec();
        for table in &mut tables {
            let name = &table.name;
            table.columns.retain(|column| !self.holds(name, &column.name));
            table
                .indexes
                .retain(|index| !index.columns.iter().any(|column| self.holds(name, column)));
        }
        tables
    }

    /// Returns a snapshot without the excluded columns.
    fn without(&self, tables: &[Table], snapshot: &Snapshot) -> Snapshot {
        let mut snapshot = snapshot.clone();
        for table in tables {
            let Some(Rows::All(rows)) = snapshot.tables.get_mut(&table.name) else { continue };
            for row in rows {
                let mut columns = table.columns.iter();
                row.retain(|_| {
                    columns.next().is_none_or(|column| !self.holds(&table.name, &column.name))
                });
            }
        }
        snapshot
    }
}

/// Returns a column's values, sorted.
fn values(snapshot: &Snapshot, table: &Table, position: usize) -> Vec<Option<String>> {
    let Some(Rows::All(rows)) = snapshot.tables.get(&table.name) else { return Vec::new() };
    let mut values: Vec<_> = rows.iter().map(|row| row[position].clone()).collect();
    values.sort();
    values
}

/// Results of the clean runs, by which other runs are judged.
pub(crate) struct Reference {
    pub(crate) tables: Vec<Table>,
    pub(crate) initial: Snapshot,
    pub(crate) found: Found,
    pub(crate) excluded: Excluded,
}

impl Reference {
    /// Compares a run with the clean one. `compares_inbox` is false where other messages were
    /// delivered.
    pub(crate) fn judge(&self, found: &Found, compares_inbox: bool) -> Judgement {
        let expected = self.excluded.without(&self.tables, &self.found.tables);
        let actual = self.excluded.without(&self.tables, &found.tables);
        let initial = self.excluded.without(&self.tables, &self.initial);
        let tables = self.excluded.comparable(&self.tables);
        let differences = changes(&tables, &expected, &actual);
        let mut votes: Vec<_> =
            differences.iter().map(|change| vote(&tables, change, &initial)).collect();
        let mut details: Vec<_> =
            differences.iter().map(|change| detail(&tables, change)).collect();
        if compares_inbox {
            for (id, status) in &self.found.statuses {
                match found.statuses.get(id) {
                    Some(same) if same == status => {}
                    Some(other) => {
                        votes.push(Verdict::Differs);
                        details.push(format!("message `{id}` is `{other}`, not `{status}`"));
                    }
                    None => {
                        votes.push(Verdict::Lost);
                        details.push(format!("message `{id}` is not in the inbox"));
                    }
                }
            }
        }
        if details.len() > DETAILS_MAX {
            let more = details.len() - DETAILS_MAX;
            details.truncate(DETAILS_MAX);
            details.push(format!("and {more} more"));
        }
        let tables = differences.into_iter().map(|change| change.table).collect();
        Judgement { verdict: sum(&votes), details, tables }
    }
}

/// Returns the verdict on one row that differs. A number that went further than it should is a
/// repeated effect; one that did not go far enough is a lost one.
fn vote(tables: &[Table], change: &RowChange, initial: &Snapshot) -> Verdict {
    let Some(table) = tables.iter().find(|table| table.name == change.table) else {
        return Verdict::Differs;
    };
    match (change.kind, &change.before, &change.after) {
        (ChangeKind::Inserted, ..) => Verdict::Doubled,
        (ChangeKind::Deleted, ..) => Verdict::Lost,
        (ChangeKind::Updated, Some(expected), Some(actual)) => {
            let start = first_values(table, initial, expected);
            let votes: Vec<_> = (0..expected.len())
                .filter(|position| expected[*position] != actual[*position])
                .map(|position| {
                    let number = |value: &Option<String>| {
                        value.as_deref().and_then(|text| text.parse::<f64>().ok())
                    };
                    let start = start.as_ref().map_or(Some(0.0), |row| number(&row[position]));
                    match (start, number(&expected[position]), number(&actual[position])) {
                        (Some(start), Some(expected), Some(actual))
                            if (actual - expected) * (expected - start) > 0.0 =>
                        {
                            Verdict::Doubled
                        }
                        (Some(start), Some(expected), Some(actual))
                            if (actual - expected) * (expected - start) < 0.0 =>
                        {
                            Verdict::Lost
                        }
                        _ => Verdict::Differs,
                    }
                })
                .collect();
            sum(&votes)
        }
        _ => Verdict::Differs,
    }
}

fn detail(tables: &[Table], change: &RowChange) -> String {
    let line = tables
        .iter()
        .find(|table| table.name == change.table)
        .map(|table| change.line(table))
        .unwrap_or_default();
    match change.kind {
        ChangeKind::Inserted => format!("`{}` has a row too many: {line}", change.table),
        ChangeKind::Deleted => format!("`{}` lacks a row: {line}", change.table),
        ChangeKind::Updated => {
            format!("`{}` has another row, expected → found: {line}", change.table)
        }
    }
}

/// Returns the row as it was before any message, found by its key.
fn first_values<'a>(
    table: &Table,
    initial: &'a Snapshot,
    row: &[Option<String>],
) -> Option<&'a Vec<Option<String>>> {
    let key = table.key()?;
    let Some(Rows::All(rows)) = initial.tables.get(&table.name) else { return None };
    rows.iter().find(|old| key.iter().all(|position| old[*position] == row[*position]))
}

/// Returns the verdict that all votes agree on, else [`Verdict::Differs`]. Without a vote, the
/// verdict is [`Verdict::Once`].
fn sum(votes: &[Verdict]) -> Verdict {
    match votes.split_first() {
        None => Verdict::Once,
        Some((first, rest)) if rest.iter().all(|vote| vote == first) => *first,
        Some(_) => Verdict::Differs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Content<'a> = &'a [(&'a str, &'a [&'a str])];

    fn snapshot(content: Content<'_>) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (table, row) in content {
            let rows = snapshot.tables.entry((*table).to_owned()).or_insert(Rows::All(Vec::new()));
            let Rows::All(rows) = rows else { continue };
            rows.push(row.iter().map(|value| Some((*value).to_owned())).collect());
        }
        snapshot
    }

    fn check(found: Content<'_>, expected: Verdict) {
        let tables = vec![
            Table::sample("account", &["id", "balance"], &[&["id"]], &[]),
            Table::sample("entry", &["entry", "fact"], &[&["entry"]], &[("entry", "nextval('s')")]),
        ];
        let clean =
            snapshot(&[("account", &["a", "150"]), ("entry", &["1", "x"]), ("entry", &["2", "y"])]);
        let reference = Reference {
            initial: snapshot(&[("account", &["a", "100"])]),
            excluded: Excluded::find(&tables, &clean, &clean),
            found: Found { tables: clean, statuses: BTreeMap::new() },
            tables,
        };
        let judged =
            reference.judge(&Found { tables: snapshot(found), statuses: BTreeMap::new() }, true);
        assert_eq!(judged.verdict, expected, "{judged:?}");
    }

    #[test]
    fn a_run_is_judged_by_rows_and_by_how_far_numbers_went() {
        check(
            &[("account", &["a", "150"]), ("entry", &["1", "x"]), ("entry", &["2", "y"])],
            Verdict::Once,
        );
        // A sequence jumps over values of a transaction that was rolled back.
        check(
            &[("account", &["a", "150"]), ("entry", &["7", "y"]), ("entry", &["8", "x"])],
            Verdict::Once,
        );
        check(
            &[
                ("account", &["a", "200"]),
                ("entry", &["1", "x"]),
                ("entry", &["2", "y"]),
                ("entry", &["3", "y"]),
            ],
            Verdict::Doubled,
        );
        check(&[("account", &["a", "125"]), ("entry", &["1", "x"])], Verdict::Lost);
        check(&[("account", &["a", "200"]), ("entry", &["1", "x"])], Verdict::Differs);
        check(
            &[("account", &["a", "ninety"]), ("entry", &["1", "x"]), ("entry", &["2", "y"])],
            Verdict::Differs,
        );
    }
}
