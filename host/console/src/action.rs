//! Actions: what a form can change. An action is a request to the API, and shows the command that
//! does the same.

use axum::http::Method;
use oncebox_api::wire::Role;
use serde_json::Value;

use crate::{fields::Fields, refusal::Refusal};

/// An action, with the request that it is.
pub(crate) struct Action {
    /// Name in URLs.
    pub(crate) name: &'static str,
    /// Text of the button.
    pub(crate) label: &'static str,
    /// Role that the API asks for. The button is not offered to others; the API decides.
    pub(crate) role: Role,
    /// Whether the API asks for a token that is of no tenant.
    pub(crate) is_platform: bool,
    /// Fields that the form sends, with those that it fills in for the visitor.
    pub(crate) fields: &'static [&'static str],
    pub(crate) call: fn(&Fields) -> Result<Call, Refusal>,
    /// Words of the command that does the same, without the program's name.
    pub(crate) command: fn(&Fields) -> Vec<String>,
}

/// A request to the API.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
}

impl Call {
    pub(crate) fn post(path: &[&str], body: Value) -> Self {
        Self { method: Method::POST, path: oncebox_api::link::path(path), body }
    }
}
