//! Changes of a run, row by row, as the triggers on the tenant's tables saw them.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    tx::{Tx, bounded},
};
use sqlx::Row;
use tokio::time::Instant;

use crate::{batch::statements::host_statement, session::Transaction};

/// Most row changes of one message that are captured; a message with more is not compared.
#[cfg(test)]
const CHANGES_MAX: usize = 200;

/// Statement that begins a capture, with the number `CHANGES_MAX`.
const CAPTURE: &str = "SET LOCAL oncebox.captured = ''; SET LOCAL oncebox.capture = '200'";

/// A run whose changes are being captured.
pub(crate) struct Watch {
    started: Instant,
    statements: u64,
}

/// Effects and cost of a run, without its result.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    /// Changes in the order in which the triggers saw them; or the reason why they are unknown.
    pub(super) changes: Result<Vec<Change>, &'static str>,
    /// Range of times that the transaction's clocks can have shown.
    pub(super) clock: Clock,
    /// Duration of the run by the wall clock.
    pub(super) took: Duration,
    /// Number of the handler's statements.
    pub(super) statements: u64,
}

/// One row before and after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    /// Oid of the table or partition.
    pub(super) table: i64,
    /// Row as PostgreSQL writes it; none where it did not exist.
    pub(super) before: Option<String>,
    /// Row as PostgreSQL writes it; none where it is gone.
    pub(super) after: Option<String>,
}

/// Time from the beginning of a transaction to the end of a run, microseconds since the epoch.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Clock {
    pub(super) began_us: i64,
    pub(super) ended_us: i64,
    /// Offset that the session's time zone adds to UTC, seconds.
    pub(super) zone_s: i32,
}

/// Begins to capture the changes in this transaction. A rollback takes the capture back, even one
/// to an earlier savepoint.
pub(super) async fn begin(tx: &Tx) -> Result<Watch, InboxError> {
    host_statement(tx, CAPTURE).await?;
    Ok(Watch { started: Instant::now(), statements: tx.statements().await })
}

impl Watch {
    /// Ends the capture and returns the changes since its beginning.
    pub(crate) async fn end(self, transaction: &Transaction<'_>) -> Result<Trace, InboxError> {
        let took = self.started.elapsed();
        let mut statement = transaction.tx().statement().await;
        let query =
            sqlx::query("SELECT * FROM oncebox_host.captured($1)").bind(transaction.secret());
        let row = bounded(query.fetch_one(statement.connection())).await;
        statement.finish(row.as_ref().err());
        let row = row?;
        let captured: Option<String> = row.try_get("captured")?;
        let changes = if row.try_get("is_complete")? {
            parse(captured.as_deref().unwrap_or_default())
        } else {
            Err("not_installed")
        };
        let clock = Clock {
            began_us: row.try_get("began_us")?,
            ended_us: row.try_get("ended_us")?,
            zone_s: row.try_get("zone_s")?,
        };
        // The statement that was counted last is the one above.
        let statements = transaction.tx().statements().await - self.statements - 1;
        Ok(Trace { changes, clock, took, statements })
    }
}

/// Parses the captured changes, one on each line, as `oncebox_host.capture` writes them.
fn parse(captured: &str) -> Result<Vec<Change>, &'static str> {
    if let Some(reason) = captured.strip_prefix('!') {
        return Err(if reason == "too_many_changes" { "too_many_changes" } else { "not_captured" });
    }
    let change = |line| {
        let (table, before, after) = serde_json::from_str(line).map_err(|_| "not_captured")?;
        Ok(Change { table, before, after })
    };
    captured.lines().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statement_says_how_many_changes_are_kept() {
        assert!(CAPTURE.ends_with(&format!("'{CHANGES_MAX}'")));
    }

    #[test]
    fn lines_become_changes_and_anything_else_is_not_compared() {
        let change = |before: Option<&str>, after: Option<&str>| Change {
            table: 7,
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
        };
        assert_eq!(
            parse("[7, null, \"(1,\\\"a\\n\\\")\"]\n[7, \"(1)\", null]\n"),
            Ok(vec![change(None, Some("(1,\"a\n\")")), change(Some("(1)"), None)])
        );
        assert_eq!(parse(""), Ok(Vec::new()));
        assert_eq!(parse("!too_many_changes"), Err("too_many_changes"));
        assert_eq!(parse("!whatever"), Err("not_captured"));
        assert_eq!(parse("[7, 1, 2]"), Err("not_captured"));
    }
}
