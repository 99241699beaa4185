//! The check that the databases keep tenants apart, with the remedies where they do not.

use axum::{Json, extract::State};
use oncebox_control::HostLimits;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Api, auth::Caller, error::ApiError};

/// The findings on the live databases.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DoctorReport {
    /// Number of promises that do not hold.
    pub errors: usize,
    /// Number of promises that hold with one safeguard less than they should.
    pub warnings: usize,
    /// Number of checks without a result.
    pub unknown: usize,
    /// Findings of all checks, errors first.
    pub findings: Vec<FindingBody>,
}

/// The finding of a check.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Finding)]
pub struct FindingBody {
    /// The database, as `host:port/name`.
    pub place: String,
    /// Name of the check.
    pub check: String,
    /// `error`, `warning`, `unknown` or `ok`.
    pub severity: String,
    /// Description of the finding.
    pub found: String,
    /// Statements that repair it, for a superuser in that database.
    pub sql: Option<String>,
    /// Further advice.
    pub advice: Option<String>,
}

impl From<oncebox_control::Finding> for FindingBody {
    fn from(finding: oncebox_control::Finding) -> Self {
        let oncebox_control::Finding { place, check, severity, found, sql, advice } = finding;
        Self {
            place,
            check: check.to_owned(),
            severity: severity.as_str().to_owned(),
            found,
            sql,
            advice,
        }
    }
}

/// Check that the live databases keep tenants apart
///
/// Changes nothing. The answer names logins and objects of every tenant, so that tokens of a tenant
/// do not reach it.
#[utoipa::path(get, path = "/v1/doctor", tag = "doctor", responses((status = 200, body = DoctorReport)),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn show(
    caller: Caller,
    State(api): State<Api>,
) -> Result<Json<DoctorReport>, ApiError> {
    let findings = caller
        .control
        .doctor()
        .run(HostLimits { connections_max: api.limits().connections_max })
        .await?;
    let findings: Vec<FindingBody> = findings.into_iter().map(Into::into).collect();
    let count =
        |severity: &str| findings.iter().filter(|finding| finding.severity == severity).count();
    Ok(Json(DoctorReport {
        errors: count("error"),
        warnings: count("warning"),
        unknown: count("unknown"),
        findings,
    }))
}
