//! Net effect of a run's changes, row by row.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    capture::Change,
    composite,
    table::{ShadowTable, TableRefs},
};

/// A row before or after a run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Row {
    /// Values of its columns, in the order of its table.
    pub(super) values: Vec<Option<String>>,
    /// Text as PostgreSQL wrote it.
    pub(super) text: String,
    /// Oid of the table or partition that holds it.
    pub(super) place: i64,
}

/// Values of the primary key.
pub(super) type Key = Vec<Option<String>>;

/// One row before the first and after the last change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NetRow {
    pub(super) before: Option<Row>,
    pub(super) after: Option<Row>,
    /// Position of its last change, counted in changes.
    pub(super) last: usize,
}

/// Net effect of the changes of one table.
#[derive(Debug, Clone, Default)]
pub(super) struct NetTable {
    pub(super) table: Arc<ShadowTable>,
    /// Rows of a table with a primary key, by key, including those that ended as they began.
    pub(super) rows: BTreeMap<Key, NetRow>,
    /// Rows of a table without a primary key: those that are gone, and below those that came.
    pub(super) removed: Vec<(usize, Row)>,
    pub(super) added: Vec<(usize, Row)>,
}

/// Net effects by the table's oid.
pub(super) type Net = BTreeMap<i64, NetTable>;

/// One step of one row, with its place in the order of changes.
struct Step {
    at: usize,
    before: Option<Row>,
    after: Option<Row>,
}

/// Returns the net effect of the changes. None where they do not fit together, or do not fit the
/// tables as the catalogs describe them.
///
/// The order in which triggers saw the changes is not always that in which they were made. Where a
/// trigger of the tenant changes another row of a statement, that change is seen first. So nothing
/// here depends on the order. A row began in the state that no change ended in, and ended in the
/// state that no change began in.
pub(super) fn net(changes: &[Change], places: &TableRefs) -> Option<Net> {
    let mut net = Net::new();
    let mut steps: BTreeMap<(i64, Key), Vec<Step>> = BTreeMap::new();
    for (at, change) in changes.iter().enumerate() {
        let before = row(change.table, change.before.as_deref(), places)?;
        let after = row(change.table, change.after.as_deref(), places)?;
        let table = &places.get(&change.table)?.table;
        net.entry(table.oid)
            .or_insert_with(|| NetTable { table: table.clone(), ..NetTable::default() });
        let (from, to) = (
            before.as_ref().map(|row| table.key_of(row)),
            after.as_ref().map(|row| table.key_of(row)),
        );
        match (from, to) {
            (Some(from), Some(to)) if from != to => {
                steps.entry((table.oid, from)).or_default().push(Step { at, before, after: None });
                steps.entry((table.oid, to)).or_default().push(Step { at, before: None, after });
            }
            (Some(key), _) | (None, Some(key)) => {
                steps.entry((table.oid, key)).or_default().push(Step { at, before, after })
            }
            (None, None) => return None,
        }
    }
    for ((table, key), steps) in steps {
        let found = net.get_mut(&table)?;
        if found.table.key.is_empty() {
            found.bag(steps);
        } else {
            found.rows.insert(key, link(steps)?);
        }
    }
    Some(net)
}

impl ShadowTable {
    /// Returns the key of a row; an empty one for each row of a table without a primary key.
    pub(super) fn key_of(&self, row: &Row) -> Key {
        self.key.iter().map(|position| row.values[*position].clone()).collect()
    }
}

impl NetTable {
    /// Sums up rows without a key. They are told apart by all their values; equal ones are counted.
    fn bag(&mut self, steps: Vec<Step>) {
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        for step in steps {
            removed.extend(step.before.map(|row| (step.at, row)));
            added.extend(step.after.map(|row| (step.at, row)));
        }
        cancel(&mut removed, &mut added);
        (self.removed, self.added) = (removed, added);
    }
}

fn row(place: i64, text: Option<&str>, places: &TableRefs) -> Option<Option<Row>> {
    let Some(text) = text else { return Some(None) };
    let order = &places.get(&place)?.order;
    let columns = composite::parse(text)?;
    let values = (columns.len() == order.len())
        .then(|| order.iter().map(|position| columns[*position].clone()).collect())?;
    Some(Some(Row { values, text: text.to_owned(), place }))
}

/// Returns the first and the last state of a row that went through these steps; none where the
/// steps do not fit together.
fn link(steps: Vec<Step>) -> Option<NetRow> {
    let last = steps.iter().map(|step| step.at).max()?;
    let final_step = steps.last()?.after.clone();
    let (mut begins, mut ends): (Vec<_>, Vec<_>) =
        steps.into_iter().map(|step| ((step.at, step.before), (step.at, step.after))).unzip();
    cancel(&mut begins, &mut ends);
    match (begins.len(), ends.len()) {
        (0, 0) => Some(NetRow { before: final_step.clone(), after: final_step, last }),
        (1, 1) => Some(NetRow { before: begins.pop()?.1, after: ends.pop()?.1, last }),
        _ => None,
    }
}

/// Removes the items that are in both lists, one for one.
fn cancel<T: PartialEq>(one: &mut Vec<(usize, T)>, other: &mut Vec<(usize, T)>) {
    one.retain(|(_, item)| match other.iter().position(|(_, known)| known == item) {
        Some(found) => {
            other.remove(found);
            false
        }
        None => true,
    });
}

#[cfg(test)]
pub(super) mod tests {
    use super::{
        super::table::{ShadowColumn, TableRef},
        *,
    };

    /// Returns a table with the oid 7 and these columns; a name that ends in `#` is counted.
    pub(in super::super) fn places(columns: &[&str], key: &[usize]) -> TableRefs {
        let column = |name: &&str| ShadowColumn {
            name: name.trim_end_matches('#').to_owned(),
            r#type: if name.ends_with("_at") { "timestamp with time zone" } else { "text" }
                .to_owned(),
            is_counted: name.ends_with('#'),
            ..ShadowColumn::default()
        };
        let table = ShadowTable {
            oid: 7,
            name: "t".into(),
            sql: "t".into(),
            columns: columns.iter().map(column).collect(),
            key: key.to_vec(),
        };
        let order = (0..columns.len()).collect();
        [(7, TableRef { table: Arc::new(table), sql: "t".into(), order })].into()
    }

    pub(in super::super) fn changes(changes: &[(&str, &str)]) -> Vec<Change> {
        let side = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        changes
            .iter()
            .map(|(before, after)| Change { table: 7, before: side(before), after: side(after) })
            .collect()
    }

    fn check(has_key: bool, given: &[(&str, &str)], expected: &[(&str, &str)]) {
        let places = places(&["id", "n"], if has_key { &[0] } else { &[] });
        let text = |row: &Option<Row>| row.as_ref().map(|row| row.text.clone()).unwrap_or_default();
        // In any order.
        for reversed in [false, true] {
            let mut given = changes(given);
            if reversed {
                given.reverse();
            }
            let net =
                net(&given, &places).expect("they fit together").remove(&7).expect("the table");
            let rows = net
                .rows
                .values()
                .filter(|row| row.before != row.after)
                .map(|row| (text(&row.before), text(&row.after)));
            let removed = net.removed.iter().map(|(_, row)| (row.text.clone(), String::new()));
            let added = net.added.iter().map(|(_, row)| (String::new(), row.text.clone()));
            let mut found: Vec<_> = rows.chain(removed).chain(added).collect();
            found.sort();
            let expected: Vec<_> =
                expected.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn steps_of_a_row_are_linked_whatever_their_order() {
        check(
            true,
            &[("(1,0)", "(1,1)"), ("(1,1)", "(1,2)"), ("(1,2)", "(1,5)")],
            &[("(1,0)", "(1,5)")],
        );
        check(true, &[("", "(1,0)"), ("(1,0)", "(1,1)")], &[("", "(1,1)")]);
        check(true, &[("", "(1,0)"), ("(1,0)", "")], &[]);
        check(true, &[("(1,0)", ""), ("", "(1,0)")], &[]);
        check(true, &[("(1,0)", ""), ("", "(1,1)")], &[("(1,0)", "(1,1)")]);
    }

    #[test]
    fn keys_that_move_up_are_rows_that_end_elsewhere() {
        check(
            true,
            &[("(1,a)", "(2,a)"), ("(2,b)", "(3,b)")],
            &[("", "(3,b)"), ("(1,a)", ""), ("(2,b)", "(2,a)")],
        );
    }

    #[test]
    fn rows_without_a_key_are_counted() {
        check(false, &[("", "(1,a)"), ("", "(1,a)"), ("(1,a)", "")], &[("", "(1,a)")]);
        check(false, &[("(1,a)", "(1,b)"), ("(1,b)", "(1,c)")], &[("", "(1,c)"), ("(1,a)", "")]);
    }

    #[test]
    fn what_does_not_fit_together_is_not_guessed_at() {
        let places = places(&["id", "n"], &[0]);
        for broken in [
            &[("(1,0)", "(1,1)"), ("(1,7)", "(1,2)")][..],
            &[("(1)", "(1)")],
            &[("", "")],
            &[("1,0", "")],
        ] {
            assert!(net(&changes(broken), &places).is_none(), "{broken:?}");
        }
        assert!(
            net(&[Change { table: 8, before: None, after: Some("(1)".into()) }], &places).is_none()
        );
    }
}
