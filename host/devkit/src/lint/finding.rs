//! A finding: one defect or risk of a handler, with its place and advice.

use std::fmt::Write as _;

/// Severity of a finding, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// A lost, doubled or changed effect.
    Error,
    /// A defect that shows as soon as a second event occurs that is not rare.
    Warning,
    /// A fact worth knowing.
    Hint,
}

impl Level {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Hint => "hint",
        }
    }
}

/// A defect or risk, with its place and the advice about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LintFinding {
    pub(crate) level: Level,
    /// Stable name of the kind of finding.
    pub(crate) rule: &'static str,
    /// Description of the problem, in one line.
    pub(crate) text: String,
    /// Line of SQL that the finding is about, if it is about one.
    pub(crate) place: Option<SqlPlace>,
    /// Remedy, for the handler's author.
    pub(crate) advice: String,
}

/// A line of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SqlPlace {
    /// Number of the handler's statement, from 1.
    pub(crate) statement: usize,
    /// Number of the line in the statement, from 1.
    pub(crate) line: usize,
}

impl SqlPlace {
    /// Returns the line that holds the byte `at` of a statement.
    pub(crate) fn of(statement: usize, text: &str, at: usize) -> Self {
        Self { statement, line: 1 + text[..at].matches('\n').count() }
    }
}

impl LintFinding {
    /// Formats the finding for a terminal: its text, the statement with the line marked, the
    /// advice.
    pub(crate) fn block(&self, statements: &[String]) -> String {
        let mut block = format!("{}: {} ({})\n", self.level.name(), self.text, self.rule);
        if let Some((place, text)) =
            self.place.and_then(|place| Some((place, statements.get(place.statement - 1)?)))
        {
            let _ = writeln!(block, "  statement {}", place.statement); // writing to a string cannot fail
            for (number, line) in (1..).zip(text.lines()) {
                let mark = if number == place.line { '>' } else { ' ' };
                let _ = writeln!(block, "  {mark} {number:>2} | {}", line.trim_end());
            }
        }
        let _ = writeln!(block, "  {}", self.advice);
        block
    }
}
