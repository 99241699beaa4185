//! One thing that a person should look at.

use std::fmt::Write as _;

/// How bad it is, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// An effect was lost, doubled or changed.
    Error,
    /// It will happen when something else does that is not rare.
    Warning,
    /// Worth knowing.
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

/// What was found, where, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// Stable name of the kind of finding.
    pub(crate) rule: &'static str,
    /// What is the matter, in one line.
    pub(crate) text: String,
    /// The line of SQL, where it is one.
    pub(crate) place: Option<Place>,
    /// What to do.
    pub(crate) advice: String,
}

/// A line of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// Which of the handler's statements, from 1.
    pub(crate) statement: usize,
    /// Which line of it, from 1.
    pub(crate) line: usize,
}

impl Place {
    /// The line that holds a byte of a statement.
    pub(crate) fn of(statement: usize, text: &str, at: usize) -> Self {
        Self { statement, line: 1 + text[..at].matches('\n').count() }
    }
}

impl Finding {
    /// A block for people: the finding, the statement with the line marked, the advice.
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
