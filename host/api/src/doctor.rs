//! The check that the databases keep tenants apart, with the remedies where they do not.

use std::{sync::Arc, time::Duration};

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use oncebox_control::{Control, Finding, HostLimits};
use oncebox_model::InboxError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    error::{ApiError, Code},
    extract::Query,
    shared_answers::SharedAnswers,
};

/// Time for which a report is given again to those who take one.
const FRESH: Duration = Duration::from_secs(300);

/// Time for which a failure is.
const FRESH_FAILURE: Duration = Duration::from_secs(5);

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
    /// Time at which the last check ended.
    pub checked_at: DateTime<Utc>,
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

impl DoctorReport {
    fn of(findings: Vec<Finding>) -> Self {
        let findings: Vec<FindingBody> = findings.into_iter().map(Into::into).collect();
        let count =
            |severity: &str| findings.iter().filter(|finding| finding.severity == severity).count();
        Self {
            errors: count("error"),
            warnings: count("warning"),
            unknown: count("unknown"),
            findings,
            checked_at: Utc::now(),
        }
    }
}

/// The last report of those that requests share.
pub(crate) type DoctorReports = SharedAnswers<(), DoctorReport, Arc<InboxError>>;

/// Creates the store of the report.
pub(crate) fn reports() -> DoctorReports {
    SharedAnswers::new(1, FRESH, FRESH_FAILURE)
}

async fn check(control: Control, limits: HostLimits) -> Result<DoctorReport, InboxError> {
    control.doctor().run(limits).await.map(DoctorReport::of)
}

/// Check that the live databases keep tenants apart
///
/// Changes nothing. The answer names logins and objects of every tenant, so that tokens of a tenant
/// do not reach it. With many tenants the checks take long; they go on without a request that takes
/// a `shared` report.
#[utoipa::path(get, path = "/v1/doctor", tag = "doctor",
    params(("shared" = Option<bool>, Query, description = "Also a report of the last five minutes, or \
        one that others wait for")),
    responses((status = 200, body = DoctorReport)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn show(
    caller: Caller,
    State(api): State<Api>,
    mut query: Query,
) -> Result<Json<DoctorReport>, ApiError> {
    let is_shared = query.flag("shared")?;
    query.end()?;
    let limits = HostLimits { connections_max: api.limits().connections_max };
    let checking = check(caller.control, limits);
    if !is_shared {
        return Ok(Json(checking.await?));
    }
    let checking = async { checking.await.map_err(Arc::new) };
    let failed = |error: &dyn std::fmt::Display| {
        ApiError::host(Code::Unavailable, "the checks failed; try again later", error)
    };
    let report = api.doctor_reports().get(api.tasks(), (), checking).await;
    Ok(Json(report.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?))
}
