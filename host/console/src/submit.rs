//! Forms that were sent: the action of each is a request to the API.

use axum::{
    extract::{FromRequestParts, Path, Request, State},
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Redirect, Response},
};
use serde_json::Value;

use crate::{
    actions,
    fields::Fields,
    form,
    html::link,
    layout::refused,
    refusal::Refusal,
    state::Console,
    visit::{Visit, local_target},
};

/// Largest body of a form, bytes.
const FORM_BYTES_MAX: usize = 2 << 20;

/// Carries out the action of a form, then shows the page that it came from, or the job that it
/// started.
pub(crate) async fn carry_out(
    State(console): State<Console>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let visit = match Visit::from_request_parts(&mut parts, &console).await {
        Ok(visit) => visit,
        Err(response) => return response,
    };
    let Ok(body) = axum::body::to_bytes(body, FORM_BYTES_MAX).await else {
        let detail = format!("the form has more than {FORM_BYTES_MAX} bytes, or broke off");
        return refused(Some(&visit), &Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    };
    let fields = Fields::parse(&body);
    match acted(&visit, &parts, &name, &fields).await {
        Ok(target) => Redirect::to(&target).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
    }
}

async fn acted(
    visit: &Visit,
    parts: &Parts,
    name: &str,
    fields: &Fields,
) -> Result<String, Refusal> {
    form::check(visit, parts, fields)?;
    let action = actions::ALL.iter().find(|action| action.name == name).ok_or_else(|| {
        Refusal::new(StatusCode::NOT_FOUND, "there is no such action; load the page again")
    })?;
    let call = (action.call)(fields)?;
    let answer: Value = visit.client.send(call.method, &call.path, &call.body).await?;
    let job = answer["tenant"].as_str().zip(answer["job_id"].as_i64());
    Ok(match job {
        Some((tenant, job_id)) => link(&["tenants", tenant, "jobs", &job_id.to_string()]),
        None => local_target(fields.get("back")).to_owned(),
    })
}
