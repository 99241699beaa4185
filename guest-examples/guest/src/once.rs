//! Statements that are safe to run twice, and how to tell what they did.
//!
//! A message's effect is committed once, so a handler may add to a balance without a thought.
//! What the host cannot know is that two *different* messages mean the same, that one is older
//! than what is there already, or that a state has moved on. These functions take your own
//! statement, check that it is of the kind they stand for, and turn its row count into words.
//!
//! | the statement | run twice | for another message of the same meaning |
//! | --- | --- | --- |
//! | `UPDATE … SET state = 'paid' WHERE id = $1` | the same | the last one wins: [`transition`], [`upsert_newer`] |
//! | `UPDATE … SET balance = balance + $2` | adds twice | adds twice: insert a row under a business key first, [`insert_once`] |
//! | `INSERT … ON CONFLICT DO NOTHING` | the same | the first one wins |
//! | `INSERT …` | a second row, or a unique violation | the same |
//! | `UPDATE … WHERE id = $1` to the same values | the same | the same |
//! | `DELETE … WHERE id = $1` | the same | the same |
//!
//! Where you may choose, let messages carry the final state rather than a delta.

use crate::{SqlError, Value, execute};

/// What became of an insert under a business key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "when it is `AlreadyThere`, what belongs to the row was done by another message"]
pub enum Inserted {
    /// The row is new.
    New,
    /// A row with this key was there already, and is as it was.
    AlreadyThere,
}

impl Inserted {
    /// Whether the row is new.
    pub fn is_new(self) -> bool {
        self == Self::New
    }
}

/// What became of an upsert by version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "when it is `Outdated`, nothing was written"]
pub enum Upserted {
    /// The row was inserted, or an older version of it was replaced.
    Written,
    /// A version as new or newer was there already, and is as it was.
    Outdated,
}

impl Upserted {
    /// Whether the row was written.
    pub fn is_written(self) -> bool {
        self == Self::Written
    }
}

/// What became of a state transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "when it is `NotMoved`, the row is in another state, or is not there"]
pub enum Transition {
    /// The row was in the expected state, and is in the next.
    Moved,
    /// The row was in another state, or is not there; nothing was written.
    NotMoved,
}

impl Transition {
    /// Whether the row has moved.
    pub fn is_moved(self) -> bool {
        self == Self::Moved
    }
}

/// Inserts a row, unless its business key is there already, which counts as done.
///
/// Wants `INSERT … ON CONFLICT … DO NOTHING` of one row. The key is a unique constraint of
/// yours, such as the order's number: it guards against two messages that mean the same. Two
/// transactions with the same key wait for each other, so exactly one finds it new.
///
/// ```no_run
/// # use oncebox_guest::{Result, params, once::insert_once};
/// # fn ship(order_id: &str) -> Result<()> {
/// let shipment = insert_once(
///     "INSERT INTO shipments (order_id) VALUES ($1) ON CONFLICT DO NOTHING",
///     params![order_id],
/// )?;
/// if shipment.is_new() { /* what belongs to a new shipment */ }
/// # Ok(()) }
/// ```
pub fn insert_once(statement: &str, params: &[Value]) -> Result<Inserted, SqlError> {
    let wanted = ["INSERT", "ON CONFLICT", "DO NOTHING"];
    let is_new = one_row(
        "insert_once",
        "INSERT … ON CONFLICT … DO NOTHING",
        &wanted,
        statement,
        params,
    )?;
    Ok(if is_new {
        Inserted::New
    } else {
        Inserted::AlreadyThere
    })
}

/// Inserts a row or replaces an older version of it; a newer one stays. So the row ends the
/// same in whatever order messages arrive.
///
/// Wants `INSERT … ON CONFLICT (key) DO UPDATE SET … WHERE old.version < excluded.version` of
/// one row, with a version, sequence number or time that grows with each change at the
/// source. With equal versions the first one stays.
///
/// ```no_run
/// # use oncebox_guest::{Result, params, once::upsert_newer};
/// # fn keep(sku: &str, price: i64, version: i64) -> Result<()> {
/// let _ = upsert_newer(
///     "INSERT INTO price AS old (sku, price, version) VALUES ($1, $2, $3)
///      ON CONFLICT (sku) DO UPDATE SET price = excluded.price, version = excluded.version
///      WHERE old.version < excluded.version",
///     params![sku, price, version],
/// )?;
/// # Ok(()) }
/// ```
pub fn upsert_newer(statement: &str, params: &[Value]) -> Result<Upserted, SqlError> {
    let kind = "INSERT … ON CONFLICT … DO UPDATE SET … WHERE …";
    let wanted = ["INSERT", "ON CONFLICT", "DO UPDATE SET", "WHERE"];
    let is_written = one_row("upsert_newer", kind, &wanted, statement, params)?;
    Ok(if is_written {
        Upserted::Written
    } else {
        Upserted::Outdated
    })
}

/// Moves a row from the state it is expected in to the next: compare and set.
///
/// Wants `UPDATE … SET state = … WHERE key = … AND state = …` of one row. With a version
/// instead of a state it is the guard of an aggregate: `SET version = $2 … WHERE id = $1 AND
/// version = $2 - 1` applies each change in its turn. Another transaction that has moved the
/// row is waited for, and its outcome is what counts.
///
/// What `NotMoved` means is yours to say: a duplicate, when the row is in the next state or
/// further; too early, when it is not there yet, which [`retry_after`](crate::retry_after) fits.
pub fn transition(statement: &str, params: &[Value]) -> Result<Transition, SqlError> {
    let kind = "UPDATE … SET … WHERE …";
    let is_moved = one_row(
        "transition",
        kind,
        &["UPDATE", "SET", "WHERE"],
        statement,
        params,
    )?;
    Ok(if is_moved {
        Transition::Moved
    } else {
        Transition::NotMoved
    })
}

/// Whether a statement of the wanted kind touched its row. One that touches more fails the
/// message: it does not name a row by its key.
fn one_row(
    helper: &str,
    kind: &str,
    wanted: &[&str],
    statement: &str,
    params: &[Value],
) -> Result<bool, SqlError> {
    if !is_kind(statement, wanted) {
        return Err(SqlError::Refused(format!("`{helper}` takes `{kind}`")));
    }
    match execute(statement, params)? {
        0 => Ok(false),
        1 => Ok(true),
        rows => Err(SqlError::Row(format!(
            "`{helper}` is for one row, and the statement touched {rows}"
        ))),
    }
}

/// Whether the words stand in the statement one after the other, the first at its beginning.
fn is_kind(statement: &str, wanted: &[&str]) -> bool {
    let is_between = |c: char| c.is_whitespace() || c == '(' || c == ')';
    let words = statement.split(is_between).filter(|word| !word.is_empty());
    let text = words
        .map(str::to_ascii_uppercase)
        .collect::<Vec<_>>()
        .join(" ");
    let text = format!(" {text} ");
    let mut from = 0;
    wanted.iter().enumerate().all(|(nth, words)| {
        let Some(at) = text[from..].find(&format!(" {words} ")) else {
            return false;
        };
        from += at + 1 + words.len();
        nth > 0 || at == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_helper_knows_its_kind_of_statement() {
        let insert = ["INSERT", "ON CONFLICT", "DO NOTHING"];
        for statement in [
            "INSERT INTO t VALUES ($1) ON CONFLICT DO NOTHING",
            "insert into t values ($1)\n  on conflict(id) do\n nothing returning id",
        ] {
            assert!(is_kind(statement, &insert), "{statement}");
        }
        for statement in [
            "INSERT INTO t VALUES ($1)",
            "INSERT INTO t VALUES ($1) ON CONFLICT (id) DO UPDATE SET a = 1",
            "UPDATE t SET a = 1",
            "",
        ] {
            assert!(!is_kind(statement, &insert), "{statement}");
        }
        let update = ["UPDATE", "SET", "WHERE"];
        assert!(is_kind("UPDATE t SET a = 2 WHERE a = 1", &update));
        assert!(!is_kind("UPDATE t SET a = 2", &update));
        let upsert = ["INSERT", "ON CONFLICT", "DO UPDATE SET", "WHERE"];
        assert!(!is_kind(
            "INSERT INTO t SELECT 1 WHERE true ON CONFLICT (a) DO UPDATE SET a = 2",
            &upsert
        ));
    }
}
