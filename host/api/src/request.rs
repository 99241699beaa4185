//! Around every request: an id, a deadline, one line in the log, and the form of refusals.

use std::time::Duration;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::time::Instant;

use crate::{
    Api,
    auth::Principal,
    error::{ApiError, Code},
};

/// The mark, as an extension, of a request that an open page repeats by itself. The log has a line
/// of it only where it fails.
#[derive(Debug, Clone, Copy)]
pub struct Refresh;

/// Wraps a request, as the outermost middleware: id, deadline, log line, and the form of a refusal.
pub(crate) async fn around(State(api): State<Api>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    // An id from outside is not used: a client could write into the log with it.
    let request_id = hex::encode(rand::random::<[u8; 8]>());
    let method = request.method().clone();
    let is_refresh = request.extensions().get::<Refresh>().is_some();
    let path =
        request.extensions().get::<MatchedPath>().map_or("-", MatchedPath::as_str).to_owned();
    let within = if method == Method::PUT {
        api.limits().upload_timeout
    } else {
        api.limits().request_timeout
    };
    let mut response = run(&api, request, next, within).await;
    let principal = response.extensions_mut().remove::<Principal>();
    let error = response.extensions_mut().remove::<ApiError>();
    if !is_refresh || error.is_some() {
        log(&request_id, &method, &path, started, &response, principal.as_ref(), error.as_ref());
    }
    if let Some(error) = error {
        response =
            error.answer(&request_id, principal.is_some_and(|principal| principal.is_local()));
    }
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&request_id) {
        headers.insert("x-request-id", id);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Runs a request in a task of its own, so that neither a lost client nor the deadline interrupts a
/// transaction. The deadlines of the body and of the database bound the task.
async fn run(api: &Api, request: Request, next: Next, within: Duration) -> Response {
    let task = api.tasks().spawn(next.run(request));
    let error = match tokio::time::timeout(within, task).await {
        Ok(Ok(response)) => return response,
        Ok(Err(error)) => ApiError::host(
            Code::Internal,
            "the host failed to do this; its log says why, under the id of this request",
            error,
        ),
        Err(_) => ApiError::new(
            Code::Timeout,
            format!(
                "this took more than {} ms and may still be done; look before you repeat it",
                within.as_millis()
            ),
        ),
    };
    error.into_response()
}

fn log(
    request_id: &str,
    method: &Method,
    path: &str,
    started: Instant,
    response: &Response,
    principal: Option<&Principal>,
    error: Option<&ApiError>,
) {
    let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
    let principal = principal.map_or("-", Principal::name);
    // The method is the client's text, of any length.
    let method = if method.as_str().len() > 10 { "-" } else { method.as_str() };
    match error.and_then(ApiError::cause) {
        Some(cause) => tracing::error!(
            request_id,
            method,
            path,
            status,
            ms,
            principal,
            error = cause,
            "request failed"
        ),
        None => tracing::info!(
            request_id,
            method,
            path,
            status,
            ms,
            principal,
            code = error.map(|error| error.code().name()),
            "request"
        ),
    }
}
