//! Refusals and failures of pages and actions.

use axum::http::StatusCode;
use oncebox_api::{ApiError, ProblemBody, ProblemDetails};

/// The refusal or failure of a page or an action.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) detail: String,
    pub(crate) problems: Vec<ProblemBody>,
    /// Id of the request in the host's log.
    pub(crate) request_id: Option<String>,
}

impl Refusal {
    /// Creates the refusal of a form or a link that cannot work.
    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Returns what was asked for; none where its database does not answer.
    pub(crate) fn unless_away<T>(asked: Result<T, Self>) -> Result<Option<T>, Self> {
        match asked {
            Err(refusal) if refusal.status == StatusCode::SERVICE_UNAVAILABLE => Ok(None),
            asked => asked.map(Some),
        }
    }

    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), problems: Vec::new(), request_id: None }
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::new(error.status(), error.detail())
    }
}

impl From<ProblemDetails> for Refusal {
    fn from(details: ProblemDetails) -> Self {
        Self {
            status: StatusCode::from_u16(details.status).unwrap_or(StatusCode::BAD_GATEWAY),
            detail: details.detail,
            problems: details.problems,
            request_id: Some(details.request_id),
        }
    }
}
