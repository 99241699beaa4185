//! Recorder of a handler's statements, outgoing messages, log lines, memory and fuel, for the
//! commands that show them.
//! A handler without a recorder has no cost of it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use oncebox_model::outgoing::{Due, OutgoingMessage};

use crate::{
    host::sql::{Element, Error, SqlAnswer, SqlStop, Value},
    text::{bounded, printable},
};

/// Fuel of a store where fuel is counted: more than any run burns before its deadline.
pub(crate) const FUEL: u64 = u64::MAX >> 1;
/// Most bytes that are kept of a parameter.
const PARAM_BYTES: usize = 512;
/// Most bytes that are kept of the payload of an outgoing message.
const PAYLOAD_BYTES: usize = 4096;

/// A recorder of the runs of a handler. Clones share the records.
#[derive(Clone, Default)]
pub struct Recorder {
    runs: Arc<Mutex<Vec<RunRecord>>>,
    /// Pause after each statement.
    pause: Duration,
}

/// The record of one run of one message.
#[derive(Debug, Clone, Default)]
pub struct RunRecord {
    /// Id of the message.
    pub message_id: String,
    /// Number of this run among those of the message, from 1.
    pub attempt: u32,
    /// Statements in the order in which they were sent.
    pub statements: Vec<StatementRecord>,
    /// Messages that would be sent, in the order of their emits. A run that fails sends none.
    pub outgoing: Vec<OutgoingRecord>,
    /// Cancels in their order.
    pub cancels: Vec<CancelRecord>,
    /// Lines of the handler's log.
    pub lines: Vec<LineRecord>,
    /// Bytes of the instance's memory at the end, which never shrinks.
    pub memory_bytes: usize,
    /// Approximate number of the guest's instructions: the fuel that wasmtime counts. None where
    /// the engine does not count it, or the run was stopped from outside.
    pub fuel: Option<u64>,
    /// Wall-clock time of the run, the database's time included.
    pub elapsed: Duration,
}

/// The record of one call of `query`, `execute` or `enqueue`.
#[derive(Debug, Clone)]
pub struct StatementRecord {
    /// Text of the statement.
    pub text: String,
    /// Parameters as readable text, each cut to a bounded length.
    pub params: Vec<String>,
    /// Whether the handler asked for rows.
    pub is_query: bool,
    /// Number of rows returned or changed; none for a statement that failed, was stopped, or was not
    /// answered before the run ended.
    pub rows: Option<u64>,
    /// Error that the handler got instead of rows.
    pub error: Option<String>,
    /// Time from sending the statement to its answer.
    pub elapsed: Duration,
}

/// The record of an outgoing message that was neither undone nor withdrawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingRecord {
    /// Id of the message that caused it.
    pub cause: String,
    /// Number of the emit among those of its cause, from 0.
    pub ordinal: u32,
    /// Id of the outgoing message.
    pub id: String,
    /// Destination, such as `kafka:orders`.
    pub destination: String,
    /// Type of the event.
    pub event_type: String,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Key as readable text.
    pub key: Option<String>,
    /// Names and values of the headers, as readable text.
    pub headers: Vec<(String, String)>,
    /// Payload as readable text, cut to a bounded length; none for a tombstone.
    pub payload: Option<String>,
    /// Due time as readable text, such as `now` or `after 30000 ms`.
    pub due: String,
    /// Cancel token.
    pub cancel_token: Option<String>,
}

/// The record of a cancel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CancelRecord {
    /// Cancel token.
    pub token: String,
    /// Whether there was anything to withdraw.
    pub found: bool,
}

impl OutgoingRecord {
    /// Makes the record of a message that was caused by the message of this id.
    pub(crate) fn of(cause: &str, message: &OutgoingMessage) -> Self {
        let header =
            |(name, value): &(String, Vec<u8>)| (name.clone(), readable_bytes(value, PARAM_BYTES));
        Self {
            cause: cause.to_owned(),
            ordinal: message.ordinal,
            id: message.id.clone(),
            destination: message.destination.to_string(),
            event_type: message.event_type.clone(),
            content_type: message.content_type.clone(),
            key: message.key.as_deref().map(|key| readable_bytes(key, PARAM_BYTES)),
            headers: message.headers.iter().map(header).collect(),
            payload: message
                .payload
                .as_deref()
                .map(|payload| readable_bytes(payload, PAYLOAD_BYTES)),
            due: match message.due {
                Due::Now => "now".to_owned(),
                Due::After(delay) => format!("after {} ms", delay.as_millis()),
                Due::At(ms) => format!("at {ms} ms since 1970"),
            },
            cancel_token: message.cancel_token.clone(),
        }
    }
}

/// A line of the handler's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineRecord {
    /// Level: trace, debug, info, warn or error.
    pub level: &'static str,
    /// Text of the line.
    pub text: String,
}

impl Recorder {
    /// Makes a recorder that also makes a handler wait after each statement. Transactions then
    /// overlap that would otherwise be too short to meet.
    pub fn pausing(pause: Duration) -> Self {
        Self { pause, ..Self::default() }
    }

    /// Takes the records of the runs since the last call, in the order in which they ended.
    pub fn take(&self) -> Vec<RunRecord> {
        std::mem::take(&mut self.runs())
    }

    pub(crate) fn start(&self, message_id: &str, attempt: u32) -> Recording {
        let record =
            RunRecord { message_id: message_id.to_owned(), attempt, ..RunRecord::default() };
        Recording { recorder: self.clone(), record, started: Instant::now() }
    }

    fn runs(&self) -> MutexGuard<'_, Vec<RunRecord>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The record of a run under way.
pub(crate) struct Recording {
    recorder: Recorder,
    record: RunRecord,
    started: Instant,
}

impl Recording {
    /// Records a statement before it is sent, so that the record shows one that never ends.
    /// Returns its number.
    pub(crate) fn sent(&mut self, is_query: bool, text: &str, params: &[Value]) -> usize {
        self.record.statements.push(StatementRecord {
            text: text.to_owned(),
            params: params.iter().map(|value| bounded(&readable(value), PARAM_BYTES)).collect(),
            is_query,
            rows: None,
            error: None,
            elapsed: Duration::ZERO,
        });
        self.record.statements.len() - 1
    }

    /// Records the answer to a statement that was sent or enqueued at a time.
    pub(crate) fn answered(
        &mut self,
        number: usize,
        since: Instant,
        result: &Result<SqlAnswer, SqlStop>,
    ) {
        let Some(statement) = self.record.statements.get_mut(number) else { return };
        statement.elapsed = since.elapsed();
        match result {
            Ok(answer) => statement.rows = Some(answer.rows_affected),
            Err(SqlStop::Guest(error)) => statement.error = Some(error_text(error)),
            Err(SqlStop::Host(lost)) => statement.error = Some(lost.to_string()),
        }
    }

    /// Waits for as long as the recorder wants a handler to pause after a statement.
    pub(crate) async fn pause(&self) {
        if !self.recorder.pause.is_zero() {
            tokio::time::sleep(self.recorder.pause).await;
        }
    }

    /// Records what the run would send, and its cancels. A later call without any changes nothing.
    pub(crate) fn emitted(&mut self, outgoing: Vec<OutgoingRecord>, cancels: Vec<CancelRecord>) {
        if !outgoing.is_empty() {
            self.record.outgoing = outgoing;
        }
        if !cancels.is_empty() {
            self.record.cancels = cancels;
        }
    }

    pub(crate) fn end(
        mut self,
        lines: Vec<LineRecord>,
        memory_bytes: usize,
        fuel_left: Option<u64>,
    ) {
        self.record.lines = lines;
        self.record.memory_bytes = memory_bytes;
        self.record.fuel = fuel_left.map(|left| FUEL - left);
        self.record.elapsed = self.started.elapsed();
        self.recorder.runs().push(self.record);
    }
}

fn error_text(error: &Error) -> String {
    match error {
        Error::Database(error) => format!("{}: {}", error.sqlstate, error.message),
        Error::Refused(text) | Error::Limit(text) | Error::Unsupported(text) => text.clone(),
    }
}

/// Returns a parameter as readable text, much as psql writes it.
fn readable(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Boolean(it) => it.to_string(),
        Value::Int2(it) => it.to_string(),
        Value::Int4(it) => it.to_string(),
        Value::Int8(it) | Value::Time(it) | Value::Timestamp(it) | Value::Timestamptz(it) => {
            it.to_string()
        }
        Value::Float4(it) => it.to_string(),
        Value::Float8(it) => it.to_string(),
        Value::Date(it) => it.to_string(),
        Value::Numeric(text) => text.clone(),
        Value::Text(text) | Value::Uuid(text) | Value::Json(text) => quoted(text),
        Value::Bytea(bytes) => hexadecimal(bytes),
        Value::Interval(it) => {
            format!("{} months {} days {} µs", it.months, it.days, it.microseconds)
        }
        Value::Array(elements) => {
            format!("{{{}}}", elements.iter().map(element).collect::<Vec<_>>().join(", "))
        }
        Value::Other(other) => quoted(&other.text),
    }
}

fn element(value: &Element) -> String {
    match value {
        Element::Null => "null".to_owned(),
        Element::Boolean(it) => it.to_string(),
        Element::Int2(it) => it.to_string(),
        Element::Int4(it) => it.to_string(),
        Element::Int8(it)
        | Element::Time(it)
        | Element::Timestamp(it)
        | Element::Timestamptz(it) => it.to_string(),
        Element::Float4(it) => it.to_string(),
        Element::Float8(it) => it.to_string(),
        Element::Date(it) => it.to_string(),
        Element::Numeric(text) => text.clone(),
        Element::Text(text) | Element::Uuid(text) | Element::Json(text) => quoted(text),
        Element::Bytea(bytes) => hexadecimal(bytes),
        Element::Interval(it) => {
            format!("{} months {} days {} µs", it.months, it.days, it.microseconds)
        }
        Element::Other(other) => quoted(&other.text),
    }
}

fn quoted(text: &str) -> String {
    format!("'{}'", bounded(text, PARAM_BYTES).replace('\'', "''"))
}

/// Returns bytes as text where they are text, else as hexadecimal digits.
fn readable_bytes(bytes: &[u8], max: usize) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => printable(&bounded(text, max)),
        Err(_) => hexadecimal(bytes),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    format!("'\\x{}'", hex::encode(&bytes[..bytes.len().min(PARAM_BYTES / 2)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: bytes of a guest break a line of the terminal, or fill it.
    #[test]
    fn bytes_are_shown_as_one_bounded_line() {
        assert_eq!(readable_bytes(b"{\"a\":1}", 100), "{\"a\":1}");
        assert_eq!(readable_bytes(b"a\nb", 100), "a\\nb");
        assert_eq!(readable_bytes(b"\xff\x00", 100), "'\\xff00'");
        assert!(readable_bytes(&[b'x'; 10_000], 100).len() < 110);
        assert!(readable_bytes(&[0xff; 10_000], 100).len() < 2 * PARAM_BYTES);
    }
}
