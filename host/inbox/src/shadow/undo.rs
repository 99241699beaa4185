//! Undo of a live run: every row that it changed becomes what it was before, whatever later
//! messages have made of it since.

use std::collections::BTreeMap;

use oncebox_model::{
    error::InboxError,
    tx::{Tx, bounded},
};
use sqlx::AssertSqlSafe;

use crate::batch::statements::{host_statement, refused};

use super::{
    net::{Key, Net, NetTable, Row},
    table::{ShadowTable, TableRefs, quoted},
};

/// One row that is to be restored.
enum UndoStep<'a> {
    /// Row with a primary key, which gets this state or is deleted.
    To { table: &'a ShadowTable, key: Key, row: Option<&'a Row> },
    /// Row without a primary key: an equal one is deleted.
    Remove(&'a ShadowTable, &'a Row),
    /// Row without a primary key, which is inserted again.
    Add(&'a ShadowTable, &'a Row),
}

/// Undoes the changes, the last first.
pub(super) async fn undo(tx: &Tx, net: &Net, places: &TableRefs) -> Result<(), InboxError> {
    let mut steps = Vec::new();
    for NetTable { table, rows, removed, added } in net.values() {
        let changed = rows.iter().filter(|(_, row)| row.before != row.after);
        steps.extend(changed.map(|(key, row)| {
            (row.last, UndoStep::To { table, key: key.clone(), row: row.before.as_ref() })
        }));
        steps.extend(added.iter().map(|(at, row)| (*at, UndoStep::Remove(table, row))));
        steps.extend(removed.iter().map(|(at, row)| (*at, UndoStep::Add(table, row))));
    }
    // Of a key that moved, the new row goes before the old one comes back.
    steps.sort_by_key(|(at, step)| {
        (
            std::cmp::Reverse(*at),
            matches!(step, UndoStep::To { row: Some(_), .. } | UndoStep::Add(..)),
        )
    });
    let steps: Vec<_> = steps.into_iter().map(|(_, step)| step).collect();
    host_statement(tx, "SAVEPOINT undo").await?;
    for step in &steps {
        match step.apply(tx, places).await {
            Err(error) if is_in_the_way(&error) => {
                host_statement(tx, "ROLLBACK TO SAVEPOINT undo").await?;
                tx.recovered().await;
                return in_any_order(tx, steps, places).await;
            }
            done => done?,
        }
    }
    Ok(())
}

/// Applies the steps in any order, each again until it fits. Triggers see the action of a foreign
/// key after the change that caused it. So in the order of changes, rows that others refer to may
/// come back too late.
async fn in_any_order(
    tx: &Tx,
    mut open: Vec<UndoStep<'_>>,
    places: &TableRefs,
) -> Result<(), InboxError> {
    loop {
        let (mut left, mut trouble) = (Vec::new(), None);
        let before = open.len();
        for step in open {
            host_statement(tx, "SAVEPOINT undo_step").await?;
            match step.apply(tx, places).await {
                Ok(()) => host_statement(tx, "RELEASE SAVEPOINT undo_step").await?,
                Err(error) if is_in_the_way(&error) => {
                    host_statement(tx, "ROLLBACK TO SAVEPOINT undo_step").await?;
                    tx.recovered().await;
                    trouble = Some(error);
                    left.push(step);
                }
                Err(error) => return Err(error),
            }
        }
        match trouble {
            None => return Ok(()),
            Some(error) if left.len() == before => return Err(error),
            Some(_) => open = left,
        }
    }
}

/// Returns whether a constraint refuses a step: another row has to go first, or to come back.
fn is_in_the_way(error: &InboxError) -> bool {
    refused(error).is_some_and(|answer| answer.sqlstate.starts_with("23"))
}

impl UndoStep<'_> {
    async fn apply(&self, tx: &Tx, places: &TableRefs) -> Result<(), InboxError> {
        match self {
            UndoStep::To { table, key, row: None } => execute(
                tx,
                &format!("DELETE FROM {} AS x WHERE {}", table.sql, by_key(table, 1)),
                key,
            )
            .await
            .map(drop),
            UndoStep::To { table, key, row: Some(row) } => {
                restore(tx, table, key, row, places).await
            }
            UndoStep::Remove(table, row) => remove(tx, table, row, places).await,
            UndoStep::Add(table, row) => insert(tx, table, row, places).await,
        }
    }
}

/// Returns whether the undo changed these rows back, and no others. A trigger of the tenant, or a
/// later row that refers to one of these, can make it do more.
pub(super) fn is_exact(live: &Net, undone: &Net) -> bool {
    let no_rows = BTreeMap::new();
    live.iter().all(|(oid, live)| {
        let undone_rows = undone.get(oid).map_or(&no_rows, |undone| &undone.rows);
        live.rows.iter().filter(|(_, row)| row.before != row.after).all(|(key, row)| {
            match undone_rows.get(key) {
                Some(undone) => undone.after == row.before,
                None => row.before.is_none(),
            }
        })
    }) && undone.iter().all(|(oid, undone)| {
        let Some(live) = live.get(oid) else { return undone.is_empty() };
        let known = |key: &Key| live.rows.get(key).is_some_and(|row| row.before != row.after);
        undone.rows.iter().all(|(key, row)| row.before == row.after || known(key))
            && same_rows(&undone.removed, &live.added)
            && same_rows(&undone.added, &live.removed)
    }) && live.iter().all(|(oid, live)| {
        live.removed.is_empty() && live.added.is_empty() || undone.contains_key(oid)
    })
}

impl NetTable {
    fn is_empty(&self) -> bool {
        self.rows.values().all(|row| row.before == row.after)
            && self.removed.is_empty()
            && self.added.is_empty()
    }
}

fn same_rows(one: &[(usize, Row)], other: &[(usize, Row)]) -> bool {
    let sorted = |rows: &[(usize, Row)]| {
        let mut rows: Vec<_> = rows.iter().map(|(_, row)| row.clone()).collect();
        rows.sort();
        rows
    };
    sorted(one) == sorted(other)
}

/// Restores a row: updates what has become of it, or inserts it where it is gone.
async fn restore(
    tx: &Tx,
    table: &ShadowTable,
    key: &Key,
    row: &Row,
    places: &TableRefs,
) -> Result<(), InboxError> {
    let set: Vec<_> = table
        .columns
        .iter()
        .filter(|column| !column.is_generated && !column.is_always)
        .map(|c| quoted(&c.name))
        .collect();
    if !set.is_empty() {
        let set: Vec<_> = set.iter().map(|name| format!("{name} = (s.r).{name}")).collect();
        let sql = format!(
            "UPDATE {} AS x SET {} FROM (SELECT $1::text::{} AS r OFFSET 0) AS s WHERE {}",
            table.sql,
            set.join(", "),
            places[&row.place].sql,
            by_key(table, 2)
        );
        let values = [Some(row.text.clone())].into_iter().chain(key.iter().cloned()).collect();
        if execute(tx, &sql, &values).await? > 0 {
            return Ok(());
        }
    }
    insert(tx, table, row, places).await
}

async fn insert(
    tx: &Tx,
    table: &ShadowTable,
    row: &Row,
    places: &TableRefs,
) -> Result<(), InboxError> {
    let names: Vec<_> = table
        .columns
        .iter()
        .filter(|column| !column.is_generated)
        .map(|column| quoted(&column.name))
        .collect();
    let values: Vec<_> = names.iter().map(|name| format!("(s.r).{name}")).collect();
    let sql = format!(
        "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM (SELECT $1::text::{} AS r \
            OFFSET 0) AS s",
        table.sql,
        names.join(", "),
        values.join(", "),
        places[&row.place].sql
    );
    execute(tx, &sql, &vec![Some(row.text.clone())]).await.map(drop)
}

/// Deletes one row that is equal to the last byte.
async fn remove(
    tx: &Tx,
    table: &ShadowTable,
    row: &Row,
    places: &TableRefs,
) -> Result<(), InboxError> {
    let place = &places[&row.place].sql;
    let sql = format!(
        "DELETE FROM {} AS x WHERE (x.tableoid, x.ctid) = \
         (SELECT y.tableoid, y.ctid FROM {place} AS y WHERE y OPERATOR(pg_catalog.*=) \
         $1::text::{place} LIMIT 1)",
        table.sql
    );
    execute(tx, &sql, &vec![Some(row.text.clone())]).await.map(drop)
}

/// Returns the condition that a row `x` has this key, with parameters from `first`.
fn by_key(table: &ShadowTable, first: usize) -> String {
    let is = |(number, position): (usize, &usize)| {
        let column = &table.columns[*position];
        format!("x.{} = ${}::text::{}", quoted(&column.name), first + number, column.r#type)
    };
    table.key.iter().enumerate().map(is).collect::<Vec<_>>().join(" AND ")
}

/// Executes a statement and returns the number of rows that it touched. The names in the text come
/// from the catalogs, quoted; values are bound.
async fn execute(tx: &Tx, sql: &str, values: &Vec<Option<String>>) -> Result<u64, InboxError> {
    let mut query = sqlx::query(AssertSqlSafe(sql.to_owned()));
    for value in values {
        query = query.bind(value);
    }
    let mut statement = tx.statement().await;
    let done = bounded(query.execute(statement.connection())).await;
    statement.finish(done.as_ref().err());
    Ok(done?.rows_affected())
}
