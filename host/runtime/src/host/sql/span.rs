//! The span of a statement.

use oncebox_model::trace::{self, NewSpan, Span};
use opentelemetry::trace::{SpanContext, SpanKind};

use super::{run::SqlAnswer, stop::SqlStop};
use crate::bindings::oncebox::handler::sql::Error;

/// Words that begin a statement and name its operation.
const OPERATIONS: [&str; 7] = ["SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "WITH", "VALUES"];

/// Begins the span of a statement, below the handler's own span or that of the run. None where
/// statements have no spans. The span has the text of the statement, and never its parameters.
pub(super) fn begin(text: &str, own: Option<SpanContext>) -> Option<Span> {
    let of_run = trace::of_statements()?;
    let parent = own.unwrap_or(of_run);
    let operation = operation_of(text);
    NewSpan::new(operation.unwrap_or("statement"), SpanKind::Client)
        .with("db.system.name", "postgresql")
        .with_some("db.operation.name", operation)
        .with("db.query.text", trace::bounded(text).to_owned())
        .begin_below(&parent)
}

/// Ends the span of a statement with its result.
pub(super) fn end(span: Option<Span>, result: &Result<SqlAnswer, SqlStop>) {
    let Some(span) = span else { return };
    match result {
        Ok(answer) => span.set("db.response.returned_rows", answer.rows.len() as i64),
        Err(SqlStop::Guest(Error::Database(error))) => {
            span.set("db.response.status_code", error.sqlstate.clone());
            span.fail(error.sqlstate.clone());
        }
        Err(SqlStop::Guest(_)) => span.fail("refused"),
        Err(SqlStop::Host(_)) => span.fail("connection_lost"),
    }
    span.end();
}

fn operation_of(text: &str) -> Option<&'static str> {
    let word = text.split_whitespace().next()?;
    OPERATIONS.into_iter().find(|operation| operation.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: the name of a span is the text of a statement, of which there is any
    // number.
    #[test]
    fn an_operation_is_one_of_few_words() {
        assert_eq!(operation_of("  insert\ninto t VALUES ($1)"), Some("INSERT"));
        assert_eq!(operation_of("SELECT 1"), Some("SELECT"));
        assert_eq!(operation_of("/* mine */ SELECT 1"), None);
        assert_eq!(operation_of("selection"), None);
        assert_eq!(operation_of(" "), None);
    }
}
