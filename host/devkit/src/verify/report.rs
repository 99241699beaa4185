//! The report of `oncebox verify`, as text and as JSON.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use oncebox_model::MessageStatus;
use serde_json::{Value, json};

use super::{
    compare::{Excluded, Verdict},
    findings::{is_failure, order_dependent},
    windows::{WindowKind, WindowResult},
    worst,
};
use crate::{
    lint::{Level, LintFinding},
    output::table,
    tables::Table,
};

/// All results of a verification.
pub struct VerifyReport {
    /// SHA-256 of the component, in hexadecimal digits.
    pub(super) digest: String,
    pub(super) seed: u64,
    pub(super) messages: usize,
    /// Status of each message after a clean run, by message id.
    pub(super) outcomes: BTreeMap<String, MessageStatus>,
    pub(super) tables: Vec<Table>,
    pub(super) excluded: Excluded,
    /// Tables with more rows than are compared.
    pub(super) too_large: Vec<String>,
    pub(super) rows: Vec<WindowResult>,
    pub(super) statements: Vec<String>,
    /// Whether the clean run emitted outgoing messages.
    pub(super) emits: bool,
    pub(super) findings: Vec<LintFinding>,
}

impl VerifyReport {
    /// Prints verdicts, findings, readiness and the summary.
    pub fn print(&self) {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                vec![
                    row.window.name.clone(),
                    row.delivered.to_string(),
                    row.killed.to_string(),
                    verdict(row).to_owned(),
                ]
            })
            .collect();
        table(&["WINDOW", "DELIVERED", "KILLED", "VERDICT"], &rows);
        for row in self.rows.iter().filter(|row| row.judgement.verdict != Verdict::Once) {
            println!("\n{}: {}", row.window.name, verdict(row));
            row.judgement.details.iter().for_each(|detail| println!("  {detail}"));
        }
        println!();
        for (id, status) in
            self.outcomes.iter().filter(|(_, status)| **status != MessageStatus::Completed)
        {
            println!("not completed by a clean run: `{id}` is `{status}`");
        }
        for table in &self.too_large {
            println!("not compared: `{table}`, which has more than 10,000 rows");
        }
        for (table, column, why) in self.excluded.iter() {
            println!("not compared: `{table}.{column}`, {why}");
        }
        for finding in &self.findings {
            println!();
            print!("{}", finding.block(&self.statements));
        }
        println!();
        let readiness: Vec<_> = self
            .readiness()
            .into_iter()
            .map(|(question, answer)| vec![question.to_owned(), answer])
            .collect();
        table(&["READINESS", ""], &readiness);
        println!("\n{}", self.sum());
    }

    /// Returns the report as one JSON document.
    pub fn json(&self, is_strict: bool) -> Value {
        let window = |row: &WindowResult| {
            json!({
                "window": row.window.name,
                "verdict": verdict(row),
                "is_failure": is_failure(row),
                "delivered": row.delivered,
                "killed": row.killed,
                "details": row.judgement.details,
            })
        };
        let finding = |finding: &LintFinding| {
            json!({
                "level": finding.level.name(),
                "rule": finding.rule,
                "text": finding.text,
                "statement": finding.place.map(|place| place.statement),
                "line": finding.place.map(|place| place.line),
                "sql": finding.place.and_then(|place| self.statements.get(place.statement - 1)),
                "advice": finding.advice,
            })
        };
        let readiness: serde_json::Map<_, _> = self
            .readiness()
            .into_iter()
            .map(|(question, answer)| (question.to_owned(), answer.into()))
            .collect();
        json!({
            "digest": self.digest,
            "program_version": env!("CARGO_PKG_VERSION"),
            "seed": self.seed,
            "messages": self.outcomes,
            "windows": self.rows.iter().map(window).collect::<Vec<_>>(),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "statements": self.statements,
            "not_compared": self.excluded.iter().map(|(table, column, why)| json!({ "table": table, "column": column, "why": why })).collect::<Vec<_>>(),
            "tables_too_large": self.too_large,
            "readiness": readiness,
            "is_passed": self.is_passed(is_strict),
        })
    }

    /// Returns an error if a finding is an error or, with `is_strict`, a warning.
    pub fn verdict(&self, is_strict: bool) -> Result<()> {
        if self.is_passed(is_strict) {
            return Ok(());
        }
        match self.findings.first() {
            Some(first) => bail!("{}: {}", first.rule, first.text),
            None => bail!("the handler did not pass"),
        }
    }

    fn is_passed(&self, is_strict: bool) -> bool {
        match worst(&self.findings) {
            Some(Level::Error) => false,
            Some(Level::Warning) => !is_strict,
            _ => true,
        }
    }

    fn sum(&self) -> String {
        let count = |level| self.findings.iter().filter(|finding| finding.level == level).count();
        let kills: usize = self.rows.iter().map(|row| row.killed).sum();
        let outcome = match count(Level::Error) {
            0 => "every effect is there exactly once".to_owned(),
            many => format!("{} failed", counted(many, "window")),
        };
        format!(
            "{}, {}, {} killed, seed {}: {outcome}; {}, {}",
            counted(self.messages, "message"),
            counted(self.rows.len(), "window"),
            counted(kills, "worker"),
            self.seed,
            counted(count(Level::Warning), "warning"),
            counted(count(Level::Hint), "hint")
        )
    }

    /// Answers the questions of a pre-ship checklist that a handler by itself can answer. S1-128.
    fn readiness(&self) -> Vec<(&'static str, String)> {
        vec![
            ("duplicates tested", self.answer(|kind| matches!(kind, WindowKind::Duplicates))),
            (
                "crash windows tested",
                self.answer(|kind| {
                    matches!(
                        kind,
                        WindowKind::Crash { .. }
                            | WindowKind::LeasedCrash { .. }
                            | WindowKind::CausedCrash { .. }
                    )
                }),
            ),
            ("two workers tested", self.answer(|kind| matches!(kind, WindowKind::TwoWorkers))),
            (
                "effect in the transaction",
                match self.emits {
                    true => {
                        "yes: a handler reaches nothing but SQL and outgoing messages, both in the \
                            host's transaction"
                    }
                    false => "yes: a handler reaches nothing but SQL in the host's transaction",
                }
                .to_owned(),
            ),
            ("natural idempotency", self.natural_idempotency()),
            ("business key", self.business_keys()),
            ("order", self.order()),
            ("another run", self.another_run()),
            ("replay", self.replay()),
        ]
    }

    fn answer(&self, of: impl Fn(&WindowKind) -> bool) -> String {
        let rows: Vec<_> = self.rows.iter().filter(|row| of(&row.window.kind)).collect();
        let sound = rows.iter().filter(|row| !is_failure(row)).count();
        match rows.len() {
            1 => format!("{}: {}", if sound == 1 { "yes" } else { "failed" }, verdict(rows[0])),
            all if sound == all => format!("yes: {all} of {all}"),
            all => format!("failed: {} of {all}", all - sound),
        }
    }

    fn natural_idempotency(&self) -> String {
        match self.rows.iter().find(|row| matches!(row.window.kind, WindowKind::SecondIds)) {
            Some(row) if row.judgement.verdict == Verdict::Once => {
                "yes: a fact under a second message id changes nothing".to_owned()
            }
            Some(row) => format!(
                "no: a fact under a second message id changes {}",
                quoted(&row.judgement.tables)
            ),
            None => "not tested".to_owned(),
        }
    }

    fn business_keys(&self) -> String {
        let is_unguarded = |name: &str| {
            self.findings.iter().any(|it| {
                it.rule == "unguarded-insert" && it.text.contains(&format!("into `{name}`"))
            })
        };
        let written = self
            .tables
            .iter()
            .filter(|table| crate::lint::inserts_into(&self.statements, &table.name));
        let (without, with): (Vec<_>, Vec<_>) =
            written.map(|table| table.name.clone()).partition(|name| is_unguarded(name));
        match (with.is_empty(), without.is_empty()) {
            (true, true) => "nothing is inserted".to_owned(),
            (_, true) => format!("yes: {}", quoted(&with.into_iter().collect())),
            (..) => format!("no: {}", quoted(&without.into_iter().collect())),
        }
    }

    fn order(&self) -> String {
        let shuffled: Vec<_> = self
            .rows
            .iter()
            .filter(|row| matches!(row.window.kind, WindowKind::Shuffled))
            .collect();
        let tables = order_dependent(&self.rows);
        match shuffled.iter().any(|row| row.judgement.verdict == Verdict::OrderDependent) {
            true if tables.is_empty() => "matters: for the messages' own outcomes".to_owned(),
            true => format!("matters: for {}", quoted(&tables)),
            false if shuffled.is_empty() => "not tested: there is no other order".to_owned(),
            false => format!("did not matter in {} other orders", shuffled.len()),
        }
    }

    /// Describes the difference between two clean runs of the messages.
    fn another_run(&self) -> String {
        let differs = |finding: &&LintFinding| {
            finding.level <= Level::Warning
                && matches!(finding.rule, "session-value" | "two-runs-differ")
        };
        match self.findings.iter().find(differs) {
            Some(finding) => format!("differs: {}", finding.text),
            None if self.excluded.iter().next().is_none() && self.too_large.is_empty() => {
                "leaves the same".to_owned()
            }
            None => "leaves the same, but for what is not compared".to_owned(),
        }
    }

    /// Describes the effects of messages that came again: under their ids, and under others.
    fn replay(&self) -> String {
        let mut duplicates =
            self.rows.iter().filter(|row| matches!(row.window.kind, WindowKind::Duplicates));
        let same = if duplicates.any(is_failure) { "failed" } else { "changes nothing" };
        let other =
            match self.rows.iter().find(|row| matches!(row.window.kind, WindowKind::SecondIds)) {
                Some(row) if row.judgement.verdict == Verdict::Once => "changes nothing".to_owned(),
                Some(row) => format!("changes {}", quoted(&row.judgement.tables)),
                None => "was not tested".to_owned(),
            };
        format!("under the same ids {same}, under other ids {other}")
    }
}

/// Returns the word for the verdict of a row.
fn verdict(row: &WindowResult) -> &'static str {
    match (&row.window.kind, row.judgement.verdict) {
        (WindowKind::SecondIds, Verdict::Once) => "changes nothing",
        (WindowKind::SecondIds, Verdict::NotReached) => Verdict::NotReached.name(),
        (WindowKind::SecondIds, _) => "applied again",
        (_, verdict) => verdict.name(),
    }
}

fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

fn quoted(names: &BTreeSet<String>) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
