//! What keeps an upload from being deployed, in words for whoever uploaded it.

use serde::{Deserialize, Serialize};

/// One reason. The code is stable, for programs; the text is one line that says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Such as `import_not_given`.
    pub code: String,
    /// What is wrong, and what to do about it.
    pub text: String,
}

impl Problem {
    /// A problem of this code.
    pub fn new(code: &str, text: impl Into<String>) -> Self {
        Self { code: code.to_owned(), text: text.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}
