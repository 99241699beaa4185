//! Refusals: one envelope for all (RFC 9457), with a code that programs can rely on.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use oncebox_inbox::InboxError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was refused, as `application/problem+json`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProblemDetails {
    /// `urn:oncebox:problem:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// The code in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// Stable, for programs.
    pub code: Code,
    /// What is wrong with this very request, for people, and what to do next.
    pub detail: String,
    /// Finds the request in the host's log.
    pub request_id: String,
    /// Everything that is wrong with a component or a migration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Problem>,
}

/// One thing that is wrong with a component or a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Stable, for programs.
    pub code: String,
    /// For people.
    pub text: String,
}

/// What a refusal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// No token, or one that is not good.
    Unauthenticated,
    /// The token may not do this.
    Forbidden,
    /// There is nothing of this name.
    NotFound,
    /// This path does not take this method.
    MethodNotAllowed,
    /// The request cannot be understood, or says something that cannot work.
    Invalid,
    /// What is there already is in the way.
    Conflict,
    /// The body is larger than it may be.
    TooLarge,
    /// The body is of a type that this path does not take.
    UnsupportedMediaType,
    /// The component cannot run here; `problems` says why.
    ComponentRefused,
    /// The version is not compiled yet.
    VersionNotReady,
    /// The tenant's schema lacks the migration that the deployment needs.
    MigrationMissing,
    /// The tenant is suspended, or is being deleted.
    TenantNotActive,
    /// It took too long; what became of it is not known.
    Timeout,
    /// The host cannot do this now; the same request may succeed later.
    Unavailable,
    /// The host's fault.
    Internal,
}

impl Code {
    /// As it is written.
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

    /// The code of a conflict, by the name that the inbox gives it.
    fn of_conflict(name: &str) -> Self {
        [Self::VersionNotReady, Self::ComponentRefused, Self::MigrationMissing]
            .into_iter()
            .find(|code| code.name() == name)
            .unwrap_or(Self::Conflict)
    }
}

/// A request that is refused or failed. It becomes a [`ProblemDetails`] on its way out.
#[derive(Debug, Clone)]
pub struct ApiError {
    code: Code,
    detail: String,
    problems: Vec<Problem>,
    /// What the log and a caller in this process are told, and nobody else.
    cause: Option<String>,
    /// Methods that the path takes.
    allow: Option<String>,
}

impl ApiError {
    /// A refusal for the caller to read.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), problems: Vec::new(), cause: None, allow: None }
    }

    /// What was sent cannot work.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new(Code::Invalid, detail)
    }

    /// A component that cannot run here.
    pub fn refused(problems: Vec<Problem>) -> Self {
        let text =
            problems.iter().map(|problem| problem.text.as_str()).collect::<Vec<_>>().join("; ");
        Self {
            problems,
            ..Self::new(Code::ComponentRefused, format!("the component cannot be deployed: {text}"))
        }
    }

    /// A fault of the host. The cause is for its log.
    pub fn host(code: Code, detail: impl Into<String>, cause: impl std::fmt::Display) -> Self {
        Self { cause: Some(cause.to_string()), ..Self::new(code, detail) }
    }

    /// What follows from it comes first.
    pub(crate) fn because_of(self, what: &str) -> Self {
        let cause = self.cause.as_ref().map(|cause| format!("{what}: {cause}"));
        Self { detail: format!("{what}: {}", self.detail), cause, ..self }
    }

    /// What it is about.
    pub fn code(&self) -> Code {
        self.code
    }

    pub(crate) fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    pub(crate) fn allowing(self, methods: String) -> Self {
        Self { allow: Some(methods), ..self }
    }

    /// The answer. Who calls from within this process is told the cause of a fault.
    pub(crate) fn answer(self, request_id: &str, is_local: bool) -> Response {
        let detail = self.cause.filter(|_| is_local).unwrap_or(self.detail);
        let details = ProblemDetails {
            kind: format!("urn:oncebox:problem:{}", self.code.name()),
            title: self.code.name().replace('_', " "),
            status: self.code.status().as_u16(),
            code: self.code,
            // It repeats what the caller sent, which must not steer a terminal.
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

/// Without a body: that is written where the request's id is known.
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
                    .map(|problem| Problem {
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
            InboxError::PlaceAway { tenant, .. } => Self::host(
                Code::Unavailable,
                format!("the database of tenant `{tenant}` does not answer; try again later"),
                &error,
            ),
            InboxError::NotThereYet { text, .. } => Self::host(Code::Unavailable, text, &error),
            InboxError::HostLocked { purpose, .. } => Self::host(
                Code::Unavailable,
                format!("another process takes too long to {purpose}; try again later"),
                &error,
            ),
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
