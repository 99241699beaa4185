//! Refusals: one envelope for all (RFC 9457), with a code that is stable for programs.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use oncebox_model::InboxError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The reason of a refusal, as `application/problem+json`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProblemDetails {
    /// `urn:oncebox:problem:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// The code in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// Code, stable for programs.
    pub code: Code,
    /// Error in this request and the next step, as text for a reader.
    pub detail: String,
    /// Id of the request in the host's log.
    pub request_id: String,
    /// All problems of a component, a migration or a policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemBody>,
}

/// A problem of a component, a migration or a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody {
    /// Code, stable for programs.
    pub code: String,
    /// Text for a reader.
    pub text: String,
}

/// The kind of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A missing or invalid token.
    Unauthenticated,
    /// A token without the right to do this.
    Forbidden,
    /// A name that does not exist.
    NotFound,
    /// A method that this path does not take.
    MethodNotAllowed,
    /// A request that cannot be parsed, or that cannot work.
    Invalid,
    /// A conflict with the present state.
    Conflict,
    /// A body above the limit.
    TooLarge,
    /// A body of a type that this path does not take.
    UnsupportedMediaType,
    /// A component that cannot run here, for the reasons in `problems`.
    ComponentRefused,
    /// A version that is not compiled yet.
    VersionNotReady,
    /// A migration that the deployment needs and the tenant's schema lacks.
    MigrationMissing,
    /// A tenant that is suspended or being deleted.
    TenantNotActive,
    /// A request that took too long; its result is not known.
    Timeout,
    /// A request that the host cannot serve at present; it may succeed later.
    Unavailable,
    /// A fault of the host.
    Internal,
}

impl Code {
    /// Returns the name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::Invalid => "invalid",
            Self::Conflict => "conflict",
            Self::TooLarge => "too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::ComponentRefused => "component_refused",
            Self::VersionNotReady => "version_not_ready",
            Self::MigrationMissing => "migration_missing",
            Self::TenantNotActive => "tenant_not_active",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::Conflict
            | Self::VersionNotReady
            | Self::MigrationMissing
            | Self::TenantNotActive => StatusCode::CONFLICT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::ComponentRefused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Timeout | Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the code of a conflict, by the name that the inbox gives it.
    fn of_conflict(name: &str) -> Self {
        [Self::VersionNotReady, Self::ComponentRefused, Self::MigrationMissing]
            .into_iter()
            .find(|code| code.name() == name)
            .unwrap_or(Self::Conflict)
    }
}

/// The refusal or failure of a request. It becomes a [`ProblemDetails`] in the answer.
#[derive(Debug, Clone)]
pub struct ApiError {
    code: Code,
    detail: String,
    problems: Vec<ProblemBody>,
    /// Cause of a fault, only for the log and for a caller in this process.
    cause: Option<String>,
    /// Methods that the path takes.
    allow: Option<String>,
}

impl ApiError {
    /// Creates a refusal with a text for the caller.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), problems: Vec::new(), cause: None, allow: None }
    }

    /// Creates the refusal of a request that cannot work.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(Code::Invalid, detail)
    }

    /// Creates the refusal of a component that cannot run here.
    pub fn refused(problems: Vec<ProblemBody>) -> Self {
        let text =
            problems.iter().map(|problem| problem.text.as_str()).collect::<Vec<_>>().join("; ");
        Self {
            problems,
            ..Self::new(Code::ComponentRefused, format!("the component cannot be deployed: {text}"))
        }
    }

    /// Creates a fault of the host. The cause is for its log.
    pub fn host(code: Code, detail: impl Into<String>, cause: impl std::fmt::Display) -> Self {
        Self { cause: Some(cause.to_string()), ..Self::new(code, detail) }
    }

    /// Puts the consequence of an error before its detail and cause.
    pub(crate) fn because_of(self, what: &str) -> Self {
        let cause = self.cause.as_ref().map(|cause| format!("{what}: {cause}"));
        Self { detail: format!("{what}: {}", self.detail), cause, ..self }
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        self.code.status()
    }

    /// Returns the text for the caller.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    pub(crate) fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    pub(crate) fn allowing(self, methods: String) -> Self {
        Self { allow: Some(methods), ..self }
    }

    /// Returns the answer. Only a caller in this process sees the cause of a fault.
    pub(crate) fn answer(self, request_id: &str, is_local: bool) -> Response {
        let detail = self.cause.filter(|_| is_local).unwrap_or(self.detail);
        let details = ProblemDetails {
            kind: format!("urn:oncebox:problem:{}", self.code.name()),
            title: self.code.name().replace('_', " "),
            status: self.code.status().as_u16(),
            code: self.code,
            // The detail repeats input of the caller, which must not control a terminal.
            detail: detail.chars().map(|c| if c.is_control() { ' ' } else { c }).collect(),
            request_id: request_id.to_owned(),
            problems: self.problems,
        };
        let body = serde_json::to_vec(&details).unwrap_or_default();
        let mut response =
            (self.code.status(), [(header::CONTENT_TYPE, "application/problem+json")], body)
                .into_response();
        let headers = response.headers_mut();
        if self.code == Code::Unauthenticated {
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static("Bearer realm=\"oncebox\""),
            );
        }
        if matches!(self.code, Code::Timeout | Code::Unavailable) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
        }
        if let Some(allow) = self.allow.and_then(|methods| HeaderValue::from_str(&methods).ok()) {
            headers.insert(header::ALLOW, allow);
        }
        response
    }
}

/// Writes no body: `ApiError::answer` writes it where the request's id is known.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.code.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<InboxError> for ApiError {
    fn from(error: InboxError) -> Self {
        match &error {
            InboxError::Invalid(text) => Self::invalid(text),
            InboxError::Policy(problems) | InboxError::Statements { problems, .. } => Self {
                problems: problems
                    .iter()
                    .map(|problem| ProblemBody {
                        code: problem.code.clone(),
                        text: problem.text.clone(),
                    })
                    .collect(),
                ..Self::invalid(error.to_string())
            },
            InboxError::NotFound(text) => Self::new(Code::NotFound, text),
            InboxError::Conflict { code, text } => Self::new(Code::of_conflict(code), text),
            InboxError::CommitUnknown(_) => Self::host(
                Code::Timeout,
                "the database's answer was lost; look whether the change was made before you \
                    repeat it",
                &error,
            ),
            InboxError::Unreachable(_) => Self::host(
                Code::Unavailable,
                "the database does not answer; try again later",
                &error,
            ),
            InboxError::TenantDatabaseUnavailable { tenant, .. } => Self::host(
                Code::Unavailable,
                format!("the database of tenant `{tenant}` does not answer; try again later"),
                &error,
            ),
            InboxError::NotPropagated { text, .. } => Self::host(Code::Unavailable, text, &error),
            InboxError::HostLocked { purpose, .. } => Self::host(
                Code::Unavailable,
                format!("another process takes too long to {purpose}; try again later"),
                &error,
            ),
            InboxError::Archive { text, .. } => Self::host(Code::Unavailable, text, &error),
            InboxError::InFlightElsewhere => Self::host(
                Code::Unavailable,
                "another change of the same thing is in the way; try again",
                &error,
            ),
            _ => Self::host(
                Code::Internal,
                "the host failed to do this; its log says why, under the id of this request",
                &error,
            ),
        }
    }
}
