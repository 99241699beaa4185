//! A refusal of the API (RFC 9457), as a person reads it.

use serde::Deserialize;
use serde_json::Value;

/// Why a request was refused.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Refused {
    /// The status, as a number.
    pub(crate) status: u16,
    /// What a person is told.
    pub(crate) detail: String,
    /// Everything that is wrong with a component.
    #[serde(default)]
    problems: Vec<Value>,
}

impl Refused {
    /// The body of an answer, where it is such a refusal.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        serde_json::from_slice(body).ok()
    }

    /// What is wrong with a component, a line each.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.problems.iter().filter_map(text).collect()
    }
}

fn text(problem: &Value) -> Option<String> {
    problem.as_str().or_else(|| problem.get("text")?.as_str()).map(str::to_owned)
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Refused {}
