//! Findings of a verification, from its windows and from the linter.

use std::collections::BTreeSet;

use super::{
    compare::{Reference, Verdict},
    windows::{WindowKind, WindowResult},
};
use crate::lint::{self, Level, LintFinding, ShownStatement};

/// Changes the verdict of failed windows to order-dependent, if another order of the messages was
/// seen to matter. It does so where two workers or a lease that waited may have changed the order.
/// Such a handler must not be reported to have lost an effect.
pub(super) fn excuse_order(mut rows: Vec<WindowResult>) -> Vec<WindowResult> {
    let depends = rows.iter().any(|row| row.judgement.verdict == Verdict::OrderDependent);
    for row in rows.iter_mut().filter(|_| depends) {
        let may_change_order =
            matches!(row.window.kind, WindowKind::TwoWorkers | WindowKind::LeasedCrash { .. });
        let verdict = &mut row.judgement.verdict;
        if may_change_order && verdict.is_failure() && *verdict != Verdict::NotReached {
            *verdict = Verdict::OrderDependent;
        }
    }
    rows
}

/// Returns what the linter needs to know about deliveries.
pub(super) fn shown(rows: &[WindowResult]) -> ShownStatement {
    let second = rows.iter().find(|row| matches!(row.window.kind, WindowKind::SecondIds));
    ShownStatement {
        changed_by_second_id: second.map(|row| row.judgement.tables.clone()),
        changed_by_order: order_dependent(rows),
    }
}

/// Returns the tables that another order of the messages left different.
pub(super) fn order_dependent(rows: &[WindowResult]) -> BTreeSet<String> {
    let shuffled = rows.iter().filter(|row| matches!(row.window.kind, WindowKind::Shuffled));
    shuffled.flat_map(|row| row.judgement.tables.iter().cloned()).collect()
}

/// Returns all findings, worst first.
pub(super) fn find(
    subject: &lint::LintSubject<'_>,
    rows: &[WindowResult],
    reference: &Reference,
    statements: &[String],
) -> Vec<LintFinding> {
    let mut findings: Vec<LintFinding> =
        rows.iter().filter(|row| is_failure(row)).map(failed_window).collect();
    let linted = lint::lint(subject);
    findings.extend(order(rows, &linted, statements));
    findings.extend(second_ids(rows, &linted, statements));
    findings.extend(two_runs(reference, statements));
    findings.extend(linted);
    findings.sort_by_key(|finding| finding.level);
    findings
}

/// Returns whether a window fails the handler. That one fact under two ids has its effect twice is
/// the handler's choice, and only worth a warning.
pub(super) fn is_failure(row: &WindowResult) -> bool {
    row.judgement.verdict.is_failure() && !matches!(row.window.kind, WindowKind::SecondIds)
        || row.judgement.verdict == Verdict::NotReached
}

fn failed_window(row: &WindowResult) -> LintFinding {
    let what =
        row.judgement.details.first().map(|detail| format!(": {detail}")).unwrap_or_default();
    let advice = match row.window.kind {
        WindowKind::LeasedCrash { .. } | WindowKind::CausedCrash { .. } => {
            "the effect must not depend on the attempt or on how the message came: `attempt()` and \
                `delivery()` are for logs"
        }
        WindowKind::TwoWorkers => {
            "two messages at once meet in a row: change it in one statement, or lock it with `FOR \
                UPDATE` before it is read"
        }
        _ => {
            "the effect must follow from the message and the tables alone, so that a run that was \
                rolled back leaves no trace"
        }
    };
    LintFinding {
        level: Level::Error,
        rule: "window",
        text: format!("{}: {}{what}", row.window.name, row.judgement.verdict.name()),
        place: None,
        advice: advice.to_owned(),
    }
}

/// Returns a finding if another order of the messages leaves another state. S1-014, S4-004.
fn order(
    rows: &[WindowResult],
    linted: &[LintFinding],
    statements: &[String],
) -> Option<LintFinding> {
    let row = rows.iter().find(|row| row.judgement.verdict == Verdict::OrderDependent)?;
    let tables = order_dependent(rows);
    let named: Vec<_> = tables.iter().map(|table| format!("`{table}`")).collect();
    let where_it_shows =
        if named.is_empty() { "the messages' own outcomes".to_owned() } else { named.join(", ") };
    let place = linted
        .iter()
        .find(|finding| finding.rule == "last-write-wins")
        .and_then(|finding| finding.place);
    Some(LintFinding {
        level: Level::Warning,
        rule: "depends-on-order",
        text: format!(
            "another order of the messages changes {where_it_shows}{}",
            row.judgement.details.first().map(|detail| format!(": {detail}")).unwrap_or_default()
        ),
        place: place
            .or_else(|| tables.iter().find_map(|table| lint::writer_of(statements, table, None))),
        advice: "messages of one key stay in order until one of them is retried; compare versions \
            or timestamps in the statement, or make \
                 the statements commute"
            .to_owned(),
    })
}

/// Returns a finding for each table that a second id changed again and that no statement is blamed
/// for.
fn second_ids(
    rows: &[WindowResult],
    linted: &[LintFinding],
    statements: &[String],
) -> Vec<LintFinding> {
    let Some(row) = rows.iter().find(|row| matches!(row.window.kind, WindowKind::SecondIds)) else {
        return Vec::new();
    };
    let is_blamed = |table: &str| {
        let blames = |finding: &LintFinding| {
            let names = finding.text.contains(&format!("`{table}`"))
                || finding.text.contains(&format!("`{table}."));
            names
                && finding.level <= Level::Warning
                && matches!(finding.rule, "delta" | "unguarded-insert")
        };
        linted.iter().any(blames)
    };
    let unblamed = row.judgement.tables.iter().filter(|table| !is_blamed(table));
    let finding = |table: &String| LintFinding {
        level: Level::Warning,
        rule: "second-id",
        text: format!("the same fact under a second message id changes `{table}` again"),
        place: lint::writer_of(statements, table, None),
        advice: "where a producer may send one fact under two ids, let a unique key of the \
            business refuse the second one"
            .to_owned(),
    };
    unblamed.map(finding).collect()
}

/// Returns a finding for each column that two clean runs did not agree on, unless its default
/// explains the difference.
fn two_runs(reference: &Reference, statements: &[String]) -> Vec<LintFinding> {
    let unexplained = reference.excluded.iter().filter(|(_, _, why)| why.starts_with("differs"));
    let finding = |(table, column, _): (&str, &str, &str)| LintFinding {
        level: Level::Warning,
        rule: "two-runs-differ",
        text: format!("`{table}.{column}` is another after two clean runs of the same messages"),
        place: lint::writer_of(statements, table, Some(column)),
        advice: "write values that follow from the message; a retry or a replay would change what \
            is there"
            .to_owned(),
    };
    unexplained.map(finding).collect()
}
