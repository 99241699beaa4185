//! The report of `oncebox test`, as text and as JSON.

use std::time::Duration;

use anyhow::{Result, bail};
use oncebox_inbox::Rehearsed;
use oncebox_model::MessageStatus;
use oncebox_runtime::{CancelRecord, OutgoingRecord, RunRecord, StatementRecord};
use serde_json::{Value, json, value::RawValue};

use super::Tried;
use crate::tables::{RowChange, Table};

/// Results of all messages, with the expected outcome.
pub(super) struct TestReport<'a> {
    pub(super) tables: &'a [Table],
    pub(super) tried: &'a [Tried<'a>],
    pub(super) expect: &'a str,
    pub(super) too_large: &'a [String],
}

impl TestReport<'_> {
    /// Prints a block for each message, then the summary.
    pub(super) fn print(&self, place: &str) {
        for tried in self.tried {
            self.print_message(tried);
        }
        for table in self.too_large {
            println!("note: `{table}` has more than 10,000 rows; what changed in it is not shown");
        }
        let count = self.tried.len();
        let as_expected = self.tried.iter().filter(|tried| self.is_as_expected(tried)).count();
        println!(
            "{count} message{} in {place}, {as_expected} as expected ({}); everything was rolled \
                back",
            if count == 1 { "" } else { "s" },
            self.expect
        );
    }

    fn print_message(&self, tried: &Tried<'_>) {
        let Tried { message, first, run, changes, second } = tried;
        let (outcome, text) = described(first);
        println!(
            "{}  {}  {outcome}{}",
            message.id,
            message.event_type,
            if text.is_empty() { String::new() } else { format!("  {text}") }
        );
        if let Rehearsed::Failed { status, is_transaction_lost, .. } = first {
            println!("  its row would be `{status}`; what it wrote is undone");
            if *is_transaction_lost {
                println!(
                    "  its transaction did not survive it: what earlier messages wrote is gone for \
                        later ones"
                );
            }
        }
        self.print_changes(changes, "  ");
        for sent in would_send(tried) {
            println!("  {}", outgoing_line(sent));
        }
        for cancel in &run.cancels {
            println!("  {}", cancel_line(cancel));
        }
        for (number, statement) in (1..).zip(&run.statements) {
            println!("  {}", statement_line(number, statement));
        }
        for line in &run.lines {
            println!("  log {}: {}", line.level, line.text);
        }
        println!("  {}", cost(run));
        if let Some((answer, changes)) = second {
            println!("  delivered again: {}", second_line(answer, changes));
            self.print_changes(changes, "    ");
        }
        println!();
    }

    fn print_changes(&self, changes: &[RowChange], indent: &str) {
        for change in changes {
            println!(
                "{indent}{} {}  {}",
                change.kind.name(),
                change.table,
                change.line(self.table(change))
            );
        }
        if changes.is_empty() && indent.len() == 2 {
            println!("{indent}no row changed");
        }
    }

    fn table(&self, change: &RowChange) -> &Table {
        self.tables
            .iter()
            .find(|table| table.name == change.table)
            .expect("changes are found in these tables")
    }

    /// Returns the report as one JSON document.
    pub(super) fn json(&self, place: &str, imports: &[String]) -> Value {
        let messages: Vec<_> = self.tried.iter().map(|tried| self.json_message(tried)).collect();
        json!({ "place": place, "imports": imports, "expect": self.expect, "messages": messages, "tables_too_large": self.too_large })
    }

    fn json_message(&self, tried: &Tried<'_>) -> Value {
        let Tried { message, first, run, second, .. } = tried;
        let changes = |changes: &[RowChange]| {
            changes.iter().map(|change| change.json(self.table(change))).collect::<Vec<_>>()
        };
        let second = second.as_ref().map(|(answer, changed)| json!({ "outcome": described(answer).0, "changes": changes(changed) }));
        let mut value = json!({
            "id": message.id,
            "event_type": message.event_type,
            "is_as_expected": self.is_as_expected(tried),
            "changes": changes(&tried.changes),
            "outgoing": would_send(tried).iter().map(json_outgoing).collect::<Vec<_>>(),
            "cancels": run.cancels.iter().map(|cancel| json!({ "token": cancel.token, "found": cancel.found })).collect::<Vec<_>>(),
            "statements": run.statements.iter().map(json_statement).collect::<Vec<_>>(),
            "log": run.lines.iter().map(|line| json!({ "level": line.level, "text": line.text })).collect::<Vec<_>>(),
            "memory_bytes": run.memory_bytes,
            "fuel": run.fuel,
            "elapsed_ms": millis(run.elapsed),
            "second": second,
        });
        if let (Value::Object(members), Value::Object(outcome)) = (&mut value, json_outcome(first))
        {
            members.extend(outcome);
        }
        value
    }

    /// Returns whether a message ended as expected, and its second delivery was refused.
    fn is_as_expected(&self, tried: &Tried<'_>) -> bool {
        let refused = |(answer, changes): &(Rehearsed, Vec<RowChange>)| {
            matches!(answer, Rehearsed::Duplicate { .. }) && changes.is_empty()
        };
        outcome(&tried.first) == self.expect && tried.second.as_ref().is_none_or(refused)
    }

    /// Returns an error that says what differed, unless every message ended as expected.
    pub(super) fn verdict(&self) -> Result<()> {
        let differing: Vec<_> =
            self.tried.iter().filter(|tried| !self.is_as_expected(tried)).collect();
        let Some(first) = differing.first() else { return Ok(()) };
        let what = match outcome(&first.first) {
            same if same == self.expect => "was not refused when it was delivered again".to_owned(),
            other => format!("ended as `{other}`, not as `{}`", self.expect),
        };
        let count = match differing.len() {
            1 => String::new(),
            many => format!(", and {} more differ", many - 1),
        };
        bail!("message `{}` {what}{count}", first.message.id)
    }
}

/// Returns the outcome's name, as `--expect` takes it.
fn outcome(rehearsed: &Rehearsed) -> &str {
    match rehearsed {
        Rehearsed::Duplicate { .. } => "duplicate",
        Rehearsed::Completed { .. } => "ok",
        Rehearsed::Failed { failure, .. } => failure.kind.name(),
        Rehearsed::Parked { .. } => "parked",
    }
}

/// Returns the outcome as the inbox would record it, and the text that belongs to it.
fn described(rehearsed: &Rehearsed) -> (String, String) {
    match rehearsed {
        Rehearsed::Duplicate { status } => {
            (format!("duplicate of a `{status}` message"), String::new())
        }
        Rehearsed::Completed { result } => ("ok".to_owned(), result.clone().unwrap_or_default()),
        Rehearsed::Failed { failure, .. } => (failure.kind.reason(), failure.text.clone()),
        Rehearsed::Parked { reason } => ("parked".to_owned(), reason.clone()),
    }
}

fn json_outcome(rehearsed: &Rehearsed) -> Value {
    match rehearsed {
        Rehearsed::Duplicate { status } => json!({ "outcome": "duplicate", "status": status }),
        Rehearsed::Completed { result } => {
            let result = result.clone().and_then(|text| RawValue::from_string(text).ok());
            json!({ "outcome": "ok", "status": MessageStatus::Completed, "result": result })
        }
        Rehearsed::Failed { failure, status, is_transaction_lost } => json!({
            "outcome": failure.kind.name(),
            "status": status,
            "reason": failure.kind.reason(),
            "text": failure.text,
            "is_transaction_lost": is_transaction_lost,
        }),
        Rehearsed::Parked { reason } => {
            json!({ "outcome": "parked", "status": MessageStatus::Parked, "reason": reason })
        }
    }
}

fn second_line(answer: &Rehearsed, changes: &[RowChange]) -> String {
    match (answer, changes.is_empty()) {
        (Rehearsed::Duplicate { status }, true) => {
            format!(
                "refused as a duplicate, since its row is `{status}`; nothing ran, no row changed"
            )
        }
        (answer, true) => format!("{}; no row changed", described(answer).0),
        (answer, false) => format!("{}, and rows changed:", described(answer).0),
    }
}

fn statement_line(number: usize, statement: &StatementRecord) -> String {
    let text = statement.text.split_whitespace().collect::<Vec<_>>().join(" ");
    let params = if statement.params.is_empty() {
        String::new()
    } else {
        format!("  [{}]", statement.params.join(", "))
    };
    let answer = match (&statement.error, statement.rows) {
        (Some(error), _) => format!("failed: {error}"),
        (None, Some(1)) => "1 row".to_owned(),
        (None, Some(rows)) => format!("{rows} rows"),
        (None, None) => "not answered".to_owned(),
    };
    format!("statement {number}  {:.1} ms  {answer}  {text}{params}", millis(statement.elapsed))
}

/// Returns the messages that would be sent: those of a run that succeeded.
fn would_send<'a>(tried: &'a Tried<'_>) -> &'a [OutgoingRecord] {
    match tried.first {
        Rehearsed::Completed { .. } => &tried.run.outgoing,
        _ => &[],
    }
}

/// Returns an outgoing message as one line.
fn outgoing_line(sent: &OutgoingRecord) -> String {
    let optional = |name: &str, value: Option<&str>| {
        value.map(|value| format!("  {name} {value}")).unwrap_or_default()
    };
    let headers: String =
        sent.headers.iter().map(|(name, value)| format!("  {name}: {value}")).collect();
    format!(
        "sends {}  {}  {}{}{}{headers}  {}",
        sent.destination,
        sent.event_type,
        sent.due,
        optional("key", sent.key.as_deref()),
        optional("token", sent.cancel_token.as_deref()),
        sent.payload.as_deref().unwrap_or("no payload")
    )
}

fn cancel_line(cancel: &CancelRecord) -> String {
    let found = if cancel.found { "something was withdrawn" } else { "there was nothing" };
    format!("cancels {}  {found}", cancel.token)
}

fn json_outgoing(sent: &OutgoingRecord) -> Value {
    let header = |(name, value): &(String, String)| json!({ "name": name, "value": value });
    json!({
        "id": sent.id,
        "ordinal": sent.ordinal,
        "destination": sent.destination,
        "event_type": sent.event_type,
        "content_type": sent.content_type,
        "key": sent.key,
        "headers": sent.headers.iter().map(header).collect::<Vec<_>>(),
        "payload": sent.payload,
        "due": sent.due,
        "cancel_token": sent.cancel_token,
    })
}

fn json_statement(statement: &StatementRecord) -> Value {
    json!({
        "text": statement.text,
        "params": statement.params,
        "rows": statement.rows,
        "error": statement.error,
        "elapsed_ms": millis(statement.elapsed),
    })
}

fn cost(run: &RunRecord) -> String {
    let fuel = run.fuel.map(|fuel| format!(", {fuel} instructions")).unwrap_or_default();
    format!(
        "{:.1} ms, {} KiB of memory{fuel}",
        millis(run.elapsed),
        run.memory_bytes.div_ceil(1024)
    )
}

/// Returns a duration in milliseconds, to the microsecond.
fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a part of what is sent is left out, so that two messages look alike.
    #[test]
    fn a_line_names_every_part_of_a_message() {
        let sent = OutgoingRecord {
            cause: "m-1".to_owned(),
            ordinal: 0,
            id: "id".to_owned(),
            destination: "kafka:orders".to_owned(),
            event_type: "order.confirmed".to_owned(),
            content_type: None,
            key: Some("o-1".to_owned()),
            headers: vec![("region".to_owned(), "north".to_owned())],
            payload: Some("{}".to_owned()),
            due: "after 500 ms".to_owned(),
            cancel_token: Some("reminder".to_owned()),
        };
        assert_eq!(
            outgoing_line(&sent),
            "sends kafka:orders  order.confirmed  after 500 ms  key o-1  token reminder  region: \
                north  {}"
        );
        let bare = OutgoingRecord {
            key: None,
            headers: Vec::new(),
            payload: None,
            cancel_token: None,
            ..sent
        };
        assert_eq!(
            outgoing_line(&bare),
            "sends kafka:orders  order.confirmed  after 500 ms  no payload"
        );
    }
}
