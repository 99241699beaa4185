//! Names and values that a browser sends.

use crate::refusal::Refusal;

/// Largest number of fields that are read; no page has more.
const FIELDS_MAX: usize = 64;

/// Names and values of a form, a query or a path, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields(pub(crate) Vec<(String, String)>);

impl Fields {
    /// Parses a query, or the body of a form.
    pub(crate) fn parse(text: &[u8]) -> Self {
        Self(form_urlencoded::parse(text).into_owned().take(FIELDS_MAX).collect())
    }

    /// Returns a value that is not empty.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(given, value)| given == name && !value.is_empty()).map(|(_, v)| &**v)
    }

    /// Returns a value, which must be there.
    pub(crate) fn need(&self, name: &str) -> Result<&str, Refusal> {
        self.get(name).ok_or_else(|| Refusal::invalid(format!("`{name}` is empty; fill it in")))
    }
}
