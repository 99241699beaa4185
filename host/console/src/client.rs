//! The API in this process, as a visitor may use it.

use axum::{
    Router,
    body::Body,
    http::{Method, Request, StatusCode, header::CONTENT_TYPE},
};
use bytes::Bytes;
use oncebox_api::{Principal, ProblemDetails, Refresh};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tower::ServiceExt;

use crate::refusal::Refusal;

/// Largest answer that is read, bytes.
const ANSWER_MAX: usize = 16 << 20;

/// The API, in the name of a principal.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) routes: Router,
    pub(crate) principal: Principal,
    /// Whether an open page repeats its requests by itself.
    pub(crate) is_refresh: bool,
}

impl Client {
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Refusal> {
        read(&self.answer(Method::GET, path, None, Body::empty()).await?)
    }

    pub(crate) async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<T, Refusal> {
        let body = Body::from(body.to_string());
        read(&self.answer(method, path, Some("application/json"), body).await?)
    }

    pub(crate) async fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Bytes,
    ) -> Result<T, Refusal> {
        read(&self.answer(Method::PUT, path, Some("application/wasm"), Body::from(body)).await?)
    }

    /// Returns the body of an answer that is no refusal. It is the same code for every type.
    async fn answer(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&str>,
        body: Body,
    ) -> Result<Bytes, Refusal> {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(content_type) = content_type {
            request = request.header(CONTENT_TYPE, content_type);
        }
        let request = request.extension(self.principal.clone()).body(body);
        let mut request = request.map_err(|error| Refusal::invalid(error.to_string()))?;
        if self.is_refresh {
            request.extensions_mut().insert(Refresh);
        }
        let response = match self.routes.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status();
        let body = axum::body::to_bytes(response.into_body(), ANSWER_MAX).await.map_err(broken)?;
        if !status.is_success() {
            return Err(serde_json::from_slice::<ProblemDetails>(&body).map_err(broken)?.into());
        }
        Ok(if status == StatusCode::NO_CONTENT { Bytes::from_static(b"null") } else { body })
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(broken)
}

fn broken(error: impl std::fmt::Display) -> Refusal {
    tracing::error!(%error, "console could not read the API's answer");
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the host's answer could not be read")
}
