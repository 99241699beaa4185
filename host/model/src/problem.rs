//! A problem that keeps an upload from being deployed, in words for its author.

use serde::{Deserialize, Serialize};

/// One problem of an upload, a policy or a text of SQL. The code is stable, for programs; the text
/// is one line that says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Stable code, such as `import_not_given`.
    pub code: String,
    /// Description of the fault, and of what to do about it.
    pub text: String,
}

impl Problem {
    /// Creates a problem of a code.
    pub fn new(code: &str, text: impl Into<String>) -> Self {
        Self { code: code.to_owned(), text: text.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}
