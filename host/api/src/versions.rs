//! Versions of a handler: uploads, each known by its digest.

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
};
use chrono::{DateTime, Utc};
use oncebox_control::{NewVersion, check_name};
use oncebox_model::InboxError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    Api,
    auth::Caller,
    components::{Checked, Unchecked},
    error::{ApiError, Code, ProblemBody},
    extract::{Path, check_media_type},
    upload,
};

/// A version with the state of its component.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Version)]
pub struct VersionBody {
    /// Key.
    pub version_id: i32,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the component.
    pub digest: String,
    /// SHA-256 of the upload, where it was a core module.
    pub source_digest: Option<String>,
    /// Bytes of the component.
    pub size: i64,
    /// `queued`, `compiling`, `ready` or `failed`.
    pub state: String,
    /// Problems that keep it from running.
    pub problems: Vec<ProblemBody>,
    /// Properties of the component: imports, languages, sizes. Null where it was never inspected.
    pub report: Option<Value>,
    /// Duration of its compilation, milliseconds.
    pub compile_ms: Option<i64>,
    /// Time of the upload.
    pub created_at: DateTime<Utc>,
    /// Name of the token or user that uploaded it.
    pub created_by: String,
}

impl From<oncebox_control::Version> for VersionBody {
    fn from(version: oncebox_control::Version) -> Self {
        Self {
            version_id: version.version_id,
            handler: version.handler,
            digest: hex::encode(version.digest),
            source_digest: version.source_digest,
            size: version.size.into(),
            state: version.state,
            problems: serde_json::from_value(version.problems).unwrap_or_default(),
            report: version.report,
            compile_ms: version.compile_ms,
            created_at: version.created_at,
            created_by: version.created_by,
        }
    }
}

/// List versions, newest first
#[utoipa::path(get, path = "/v1/tenants/{tenant}/handlers/{handler}/versions", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path)), responses((status = 200, body = Vec<VersionBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path((tenant, handler)): Path<(String, String)>,
) -> Result<Json<Vec<VersionBody>>, ApiError> {
    Ok(Json(
        caller
            .control
            .versions()
            .list(&tenant, &handler)
            .await?
            .into_iter()
            .map(Into::into)
            .collect(),
    ))
}

/// Show a version
#[utoipa::path(get, path = "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path),
        ("digest" = String, Path, description = "SHA-256 of the component or of its core module, \
            or 6 or more of its first digits")),
    responses((status = 200, body = VersionBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path((tenant, handler, digest)): Path<(String, String, String)>,
) -> Result<Json<VersionBody>, ApiError> {
    Ok(Json(caller.control.versions().get(&tenant, &handler, &digest).await?.into()))
}

/// Upload a version
///
/// The body is a component, or a core module with the type of a component in it. The host inspects
/// it, and compiles it after the answer: ask for the version until its state is `ready` or
/// `failed`. Equal bytes are one version.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path),
        ("digest" = String, Path, description = "SHA-256 of the body, 64 hexadecimal digits")),
    request_body(content = Vec<u8>, content_type = "application/wasm"),
    responses((status = 201, body = VersionBody), (status = 200, body = VersionBody, description = "It was \
        there already")),
    extensions(("x-role" = json!("deployer"))))]
pub(crate) async fn upload(
    State(api): State<Api>,
    caller: Caller,
    Path((tenant, handler, digest)): Path<(String, String, String)>,
    request: Request<Body>,
) -> Result<(StatusCode, Json<VersionBody>), ApiError> {
    let digest = parse_digest(&digest)?;
    check_name("handler", &handler)?;
    caller.control.tenants().get(&tenant).await?;
    check_media_type(request.headers(), &["application/wasm", "application/octet-stream"])?;
    // The permit is held until the component is stored: it bounds the memory that uploads take.
    let (_turn, bytes) = upload::receive(&api, request, &digest).await?;
    let is_known =
        match caller.control.versions().get(&tenant, &handler, &hex::encode(digest)).await {
            Ok(_) => true,
            Err(InboxError::NotFound(_)) => false,
            Err(error) => return Err(error.into()),
        };
    let checked = api.components().check(bytes).await.map_err(|unchecked| match unchecked {
        Unchecked::Refused(problems) => ApiError::refused(problems),
        Unchecked::Busy(why) => ApiError::new(Code::Unavailable, why),
    })?;
    let Checked { component, source_digest, report, is_compiled, .. } = &checked;
    let new =
        NewVersion { component, source_digest: *source_digest, report, is_compiled: *is_compiled };
    let version = caller.control.versions().add(&tenant, &handler, new).await?;
    if version.state == "queued" {
        api.components().submit(checked.digest);
    }
    Ok((if is_known { StatusCode::OK } else { StatusCode::CREATED }, Json(version.into())))
}

fn parse_digest(text: &str) -> Result<[u8; 32], ApiError> {
    let mut digest = [0; 32];
    let wrong = |_| {
        ApiError::invalid(
            "the digest in the path must be the SHA-256 of the body, 64 hexadecimal digits",
        )
    };
    hex::decode_to_slice(text, &mut digest).map_err(wrong)?;
    Ok(digest)
}

/// Two versions, side by side.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VersionDiff {
    /// The first version.
    pub before: VersionBody,
    /// The second version.
    pub after: VersionBody,
    /// Differences of their reports.
    pub changes: Vec<ChangeBody>,
}

/// A member of two reports that differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Change)]
pub struct ChangeBody {
    /// Path of the member, such as `imports` or `memory.bytes`.
    pub what: String,
    /// Value in the first version; of a list, the items that only it has.
    pub before: Value,
    /// Value in the second version; of a list, the items that only it has.
    pub after: Value,
}

/// Compare two versions
#[utoipa::path(get, path = "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/diff/{other}", tag = "versions",
    params(("tenant" = String, Path), ("handler" = String, Path), ("digest" = String, Path), ("other" = String, Path)),
    responses((status = 200, body = VersionDiff)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn diff(
    caller: Caller,
    Path((tenant, handler, digest, other)): Path<(String, String, String, String)>,
) -> Result<Json<VersionDiff>, ApiError> {
    let before: VersionBody =
        caller.control.versions().get(&tenant, &handler, &digest).await?.into();
    let after: VersionBody = caller.control.versions().get(&tenant, &handler, &other).await?.into();
    if let Some(blind) = [&before, &after].into_iter().find(|version| version.report.is_none()) {
        let detail = format!(
            "nobody looked into version `{}` when it was deployed; upload it again to compare it",
            &blind.digest[..12]
        );
        return Err(ApiError::new(Code::Conflict, detail));
    }
    let mut changes = Vec::new();
    compare(
        "",
        before.report.as_ref().unwrap_or(&Value::Null),
        after.report.as_ref().unwrap_or(&Value::Null),
        &mut changes,
    );
    Ok(Json(VersionDiff { before, after, changes }))
}

fn compare(what: &str, before: &Value, after: &Value, changes: &mut Vec<ChangeBody>) {
    match (before, after) {
        _ if before == after => {}
        (Value::Object(b), Value::Object(a)) => {
            let mut names: Vec<_> = b.keys().chain(a.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let inner = if what.is_empty() { name.clone() } else { format!("{what}.{name}") };
                compare(
                    &inner,
                    b.get(name).unwrap_or(&Value::Null),
                    a.get(name).unwrap_or(&Value::Null),
                    changes,
                );
            }
        }
        (Value::Array(b), Value::Array(a)) => {
            let only = |of: &[Value], not: &[Value]| {
                of.iter().filter(|item| !not.contains(item)).cloned().collect::<Vec<_>>()
            };
            changes.push(ChangeBody {
                what: what.to_owned(),
                before: only(b, a).into(),
                after: only(a, b).into(),
            });
        }
        _ => changes.push(ChangeBody {
            what: what.to_owned(),
            before: before.clone(),
            after: after.clone(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_differs_is_told() {
        let before = json!({ "imports": ["sql", "log"], "memory": { "bytes": 1 }, "size": 7 });
        let after = json!({ "imports": ["sql", "config"], "memory": { "bytes": 2 }, "size": 7, "tool": "x" });
        let mut changes = Vec::new();
        compare("", &before, &after, &mut changes);
        let told = json!(changes);
        let expected = json!([{ "what": "imports", "before": ["log"], "after": ["config"] },
            { "what": "memory.bytes", "before": 1, "after": 2 }, { "what": "tool", "before": null, "after": "x" }]);
        assert_eq!(told, expected);
    }
}
