//! A refusal of the API (RFC 9457), as operators read it.

use serde::Deserialize;
use serde_json::Value;

/// Refusal of a request.
#[derive(Debug, Clone, Deserialize)]
pub struct Refused {
    /// HTTP status code.
    pub status: u16,
    /// Code, stable for programs; empty in an answer without one.
    #[serde(default)]
    pub code: String,
    /// Text for the operator.
    pub detail: String,
    /// All problems of a component.
    #[serde(default)]
    problems: Vec<Value>,
}

impl Refused {
    /// Parses the body of an answer, if it is such a refusal.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        serde_json::from_slice(body).ok()
    }

    /// Returns the problems of a component, one line each.
    pub fn problems(&self) -> Vec<String> {
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
