//! Checks the SQL that a handler really sent against the tables it went to. Reports what would go
//! wrong with it although every message has its effect once.

mod finding;
mod rules;
mod shape;
mod token;

use std::collections::BTreeSet;

use oncebox_runtime::RunRecord;

pub(crate) use finding::{Level, LintFinding, SqlPlace};

use crate::tables::Table;

/// Input of the linter.
pub(crate) struct LintSubject<'a> {
    /// The tenant's tables.
    pub(crate) tables: &'a [Table],
    /// Recorded runs, with the statements that each message sent.
    pub(crate) runs: &'a [RunRecord],
    /// Ids of messages that ended ok.
    pub(crate) completed: &'a BTreeSet<String>,
    /// Observed effects of deliveries.
    pub(crate) shown: ShownStatement,
}

/// Observed effects of deliveries, by table.
#[derive(Debug, Clone, Default)]
pub(crate) struct ShownStatement {
    /// Tables that one fact under a second message id changed again; `None` if that was not tried.
    pub(crate) changed_by_second_id: Option<BTreeSet<String>>,
    /// Tables that another order of the messages left different.
    pub(crate) changed_by_order: BTreeSet<String>,
}

/// Returns the distinct statements of all runs, in the order in which they were first sent. A
/// finding names them by their number, from 1.
pub(crate) fn statements(runs: &[RunRecord]) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    for statement in runs.iter().flat_map(|run| &run.statements) {
        if !texts.contains(&statement.text) {
            texts.push(statement.text.clone());
        }
    }
    texts
}

/// Returns all findings, worst first.
pub(crate) fn lint(subject: &LintSubject<'_>) -> Vec<LintFinding> {
    let texts = statements(subject.runs);
    let mut findings = Vec::new();
    for (number, text) in (1..).zip(&texts) {
        let source = rules::LintedStatement {
            subject,
            number,
            text,
            parts: shape::parts(text),
            tokens: token::tokens(text),
        };
        findings.extend(source.deltas());
        findings.extend(source.inserts());
        findings.extend(source.session_values());
        findings.extend(source.last_writes());
        findings.extend(source.untouched());
    }
    findings.extend(rules::reads_then_writes(subject, &texts));
    findings.sort_by_key(|finding| finding.level);
    findings
}

/// Returns the line of the first statement that writes `column` of a table. Without a column,
/// returns the first one that writes the table at all.
pub(crate) fn writer_of(
    statements: &[String],
    table: &str,
    column: Option<&str>,
) -> Option<SqlPlace> {
    (1..).zip(statements).find_map(|(number, text)| {
        shape::parts(text)
            .into_iter()
            .filter(|part| part.verb != shape::Verb::Select && part.table == table)
            .find_map(|part| {
                let Some(column) = column else { return Some(SqlPlace::of(number, text, part.at)) };
                let assignment = part
                    .assignments
                    .iter()
                    .find(|assignment| assignment.column == column)
                    .map(|assignment| assignment.at);
                let is_inserted = part.verb == shape::Verb::Insert
                    && (part.columns.is_empty() || part.columns.iter().any(|it| it == column));
                Some(SqlPlace::of(number, text, assignment.or(is_inserted.then_some(part.at))?))
            })
    })
}

/// Returns whether one of the statements inserts into a table.
pub(crate) fn inserts_into(statements: &[String], table: &str) -> bool {
    let inserts = |part: shape::Part<'_>| part.verb == shape::Verb::Insert && part.table == table;
    statements.iter().any(|text| shape::parts(text).into_iter().any(inserts))
}

#[cfg(test)]
mod tests;
