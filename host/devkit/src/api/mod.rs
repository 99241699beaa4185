//! The API as commands use it: a server answers its requests, or this process does, over the
//! database. Both give equal answers, and a command does not know which one it uses.

mod local;
mod problem;
mod remote;

pub use local::local_api;
pub use oncebox_api::link::{path, with_query};
pub use problem::Refused;
pub use remote::{Remote, RemoteOptions};

use std::time::Duration;

use anyhow::{Context, Result};
use axum::{
    Router,
    body::{Body, Bytes},
    http::{Method, Request, Response, StatusCode, header::CONTENT_TYPE},
};
use oncebox_api::Principal;
use oncebox_control::Control;
use oncebox_server::compile::Compilations;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// Largest answer that is read, bytes.
const ANSWER_MAX: usize = 64 << 20;
/// Longest time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
/// Longest time for an upload, on a slow line.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(900);

/// The side that answers requests.
#[derive(Clone)]
pub enum Api {
    /// This process, over the database.
    Here(Box<LocalApi>),
    /// A server.
    There(Remote),
}

/// The API in this process.
#[derive(Clone)]
pub struct LocalApi {
    routes: Router,
    /// A principal that may do everything.
    principal: Principal,
    /// The compilations for the routes.
    components: Compilations,
    /// The database.
    control: Control,
}

impl Api {
    /// Compiles an awaited version, if this process does the compiling and no other process is at
    /// it: the one that began may have ended. A server finds such versions by itself.
    pub fn compile(&self, digest: &str) {
        if let (Self::Here(here), Ok(digest)) = (self, hex::decode(digest)) {
            // With too many versions before it, this one is refused, and the waiting command asks
            // again.
            let _ = here.components.submit(&digest);
        }
    }

    /// Gives back the versions that this process compiles, so that the next process begins at once
    /// and without a mark on them.
    pub async fn give_back(&self) {
        if let Self::Here(here) = self {
            let ended = CancellationToken::new();
            ended.cancel();
            here.components.run(ended).await;
        }
    }

    /// Works on a job for a turn, if this process has the database and no other process is at it. A
    /// server finds jobs by itself.
    ///
    /// # Errors
    /// An error of the database.
    pub async fn carry_on(&self, tenant: &str, job_id: i64) -> Result<()> {
        let Self::Here(here) = self else { return Ok(()) };
        let jobs = here.control.jobs();
        let tenant = here.control.tenants().get(tenant).await?;
        let database = here.control.tenant_databases().get(&tenant)?;
        let owner = format!("oncebox/{}", std::process::id());
        if let Some(job) = jobs.lease(&database, &owner, Some(job_id)).await? {
            jobs.work(job, &CancellationToken::new()).await;
        }
        Ok(())
    }

    /// Carries out the move of a tenant, as a host would, where this process is its own host. It
    /// has none that does so beside it.
    ///
    /// # Errors
    /// An error of one of the databases.
    pub async fn carry_move(&self, tenant: &str) -> Result<()> {
        let Self::Here(here) = self else { return Ok(()) };
        let tenants = here.control.tenants();
        let tenant = tenants.get(tenant).await?;
        tenants.carry_move(&tenant).await?;
        Ok(())
    }

    /// Sends a GET request and returns the answer.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::GET, path, Body::empty(), None).await
    }

    /// Sends a POST request with a JSON body and returns the answer.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.json(
            Method::POST,
            path,
            Body::from(serde_json::to_vec(body)?),
            Some("application/json"),
        )
        .await
    }

    /// Sends a PATCH request with a JSON body and returns the answer.
    pub async fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.json(
            Method::PATCH,
            path,
            Body::from(serde_json::to_vec(body)?),
            Some("application/json"),
        )
        .await
    }

    /// Sends a PUT request with a JSON body and returns the answer.
    pub async fn put_json<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        self.json(
            Method::PUT,
            path,
            Body::from(serde_json::to_vec(body)?),
            Some("application/json"),
        )
        .await
    }

    /// Sends a DELETE request and returns the answer.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::DELETE, path, Body::empty(), None).await
    }

    /// Sends a DELETE request with a JSON body and returns the answer.
    pub async fn delete_with<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        self.json(
            Method::DELETE,
            path,
            Body::from(serde_json::to_vec(body)?),
            Some("application/json"),
        )
        .await
    }

    /// Uploads bytes by a PUT request. The body may be a stream that counts them.
    pub async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        length: usize,
        body: Body,
    ) -> Result<T> {
        let request = Request::put(path)
            .header(CONTENT_TYPE, "application/wasm")
            .header("content-length", length)
            .body(body)?;
        self.answer(request, UPLOAD_TIMEOUT).await
    }

    async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Body,
        content_type: Option<&str>,
    ) -> Result<T> {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(content_type) = content_type {
            request = request.header(CONTENT_TYPE, content_type);
        }
        self.answer(request.body(body)?, ANSWER_TIMEOUT).await
    }

    async fn answer<T: DeserializeOwned>(
        &self,
        mut request: Request<Body>,
        within: Duration,
    ) -> Result<T> {
        // A request in this process ends by itself, and a large migration may take its time.
        let within = if matches!(self, Self::Here(..)) { HOUR } else { within };
        let answering = async {
            let response = match self {
                Self::Here(here) => {
                    request.extensions_mut().insert(here.principal.clone());
                    here.routes.clone().oneshot(request).await?
                }
                Self::There(server) => server.send(request).await?,
            };
            let (head, body) = response.into_parts();
            let body = axum::body::to_bytes(body, ANSWER_MAX)
                .await
                .with_context(|| format!("the answer of {self} broke off"))?;
            self.read(&Response::from_parts(head, body))
        };
        let answer = tokio::time::timeout(within, answering).await;
        answer
            .map_err(|_| anyhow::anyhow!("{self} did not answer within {} s", within.as_secs()))?
    }

    fn read<T: DeserializeOwned>(&self, response: &Response<Bytes>) -> Result<T> {
        let status = response.status();
        // No content reads as `()`.
        let body: &[u8] = if status == StatusCode::NO_CONTENT { b"null" } else { response.body() };
        if status.is_success() {
            return serde_json::from_slice(body).with_context(|| self.foreign(status));
        }
        match Refused::parse(body) {
            Some(refused) => Err(refused.into()),
            None => Err(anyhow::anyhow!("{}", self.foreign(status))),
        }
    }

    /// Returns the error text for an answer that is not one of this version's API.
    fn foreign(&self, status: StatusCode) -> String {
        format!(
            "{self} answered {} in a way that this program does not understand; check `--server` \
                (ONCEBOX_SERVER)",
            status.as_u16()
        )
    }
}

impl std::fmt::Display for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(..) => f.write_str("the API of this process"),
            Self::There(server) => write!(f, "the server at `{}`", server.base()),
        }
    }
}
