//! The outgoing messages of a database, in the form of a table, so that commands compare what a
//! handler would send as they compare its rows.

use anyhow::{Context, Result};
use sqlx::PgPool;

use super::{
    Column, Table, UniqueIndex,
    snapshot::{ROWS_MAX, Row, Rows},
};

/// Name of the table, which no tenant's table has.
pub(crate) const OUTGOING: &str = "outgoing messages";

/// Columns of the table, those of its key first.
const COLUMNS: [&str; 11] = [
    "cause",
    "ordinal",
    "destination",
    "key",
    "event_type",
    "content_type",
    "headers",
    "payload",
    "due",
    "cancel_token",
    "status",
];
/// Number of the columns that tell its rows apart.
const KEY_COLUMNS: usize = 2;

/// Reads the columns. A due time is compared by whether it lies behind the transaction's time,
/// since two runs have different times.
const ROWS: &str = "SELECT ARRAY[message_id, ordinal::text, destination, encode(key, 'escape'), \
    event_type, content_type, encode(headers, 'escape'), encode(payload, 'escape'), CASE WHEN \
    due_at <= created_at THEN 'now' ELSE 'later' END, cancel_token, status]::text[] \
    FROM oncebox.outgoing LIMIT $1";

/// Returns the table.
pub(crate) fn outgoing_table() -> Table {
    let column = |name: &str| Column {
        table: OUTGOING.to_owned(),
        name: name.to_owned(),
        r#type: "text".to_owned(),
        is_identity: false,
        default: None,
    };
    let key = UniqueIndex {
        table: OUTGOING.to_owned(),
        name: "key".to_owned(),
        is_primary: true,
        columns: COLUMNS[..KEY_COLUMNS].iter().map(|name| (*name).to_owned()).collect(),
    };
    Table {
        name: OUTGOING.to_owned(),
        columns: COLUMNS.into_iter().map(column).collect(),
        indexes: vec![key],
        references: Vec::new(),
    }
}

/// Reads the outgoing messages of a database, which holds those of one tenant.
pub(crate) async fn outgoing_rows(pool: &PgPool) -> Result<Rows> {
    let rows: Vec<(Row,)> = sqlx::query_as(ROWS)
        .bind(ROWS_MAX as i64 + 1)
        .fetch_all(pool)
        .await
        .context("failed to read the outgoing messages")?;
    Ok(match rows.len() > ROWS_MAX {
        true => Rows::TooMany,
        false => Rows::All(rows.into_iter().map(|(row,)| row).collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::{ChangeKind, Snapshot, changes};

    fn sent(rows: &[(&str, &str, &str)]) -> Snapshot {
        let row = |(cause, ordinal, payload): &(&str, &str, &str)| {
            let before = [*cause, *ordinal, "kafka:a", "k", "e", "text/plain", ""];
            let after = [*payload, "now", "t", "received"];
            before.iter().chain(&after).map(|value| Some((*value).to_owned())).collect()
        };
        let rows = Rows::All(rows.iter().map(row).collect());
        Snapshot { tables: [(OUTGOING.to_owned(), rows)].into() }
    }

    // What could go wrong: a message that is sent twice, or with another payload, is not told.
    #[test]
    fn messages_are_told_apart_by_cause_and_ordinal() {
        let table = outgoing_table();
        assert_eq!((table.columns.len(), table.key()), (11, Some(vec![0, 1])));
        let kinds = |before: &Snapshot, after: &Snapshot| -> Vec<ChangeKind> {
            let found = changes(std::slice::from_ref(&table), before, after);
            found.into_iter().map(|change| change.kind).collect()
        };
        let clean = sent(&[("m", "0", "a"), ("m", "1", "a")]);
        assert!(kinds(&clean, &clean).is_empty());
        let twice = sent(&[("m", "0", "a"), ("m", "1", "a"), ("m", "2", "a")]);
        assert_eq!(kinds(&clean, &twice), [ChangeKind::Inserted]);
        let other = sent(&[("m", "0", "b"), ("m", "1", "a")]);
        assert_eq!(kinds(&clean, &other), [ChangeKind::Updated]);
    }
}
