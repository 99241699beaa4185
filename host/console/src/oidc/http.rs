//! Requests to the provider, with bounds: their time, their length, and no redirect.

use std::{error::Error, fmt, time::Duration};

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use openidconnect::{AsyncHttpClient, HttpRequest, HttpResponse};
use reqwest::{Certificate, Client, Request, redirect::Policy};

/// Longest request, with its answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Largest answer, bytes. Documents of keys have some kilobytes.
const BYTES_MAX: usize = 1 << 20;

/// The client of all requests.
pub(super) struct Http(Client);

impl Http {
    /// Creates the client. With `is_encrypted` it sends nothing over connections that are not,
    /// whatever addresses the provider names.
    pub(super) fn new(authorities: Option<&[u8]>, is_encrypted: bool) -> Result<Self> {
        // A redirect could lead to an address that nobody configured.
        let builder = Client::builder().timeout(TIMEOUT).redirect(Policy::none());
        let mut builder = builder.https_only(is_encrypted);
        if let Some(pem) = authorities {
            let certificates =
                Certificate::from_pem_bundle(pem).context("no certificates (PEM)")?;
            for authority in certificates {
                builder = builder.add_root_certificate(authority);
            }
        }
        Ok(Self(builder.build()?))
    }

    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpFailure> {
        let mut answer = self.0.execute(Request::try_from(request)?).await?;
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await? {
            if body.len() + chunk.len() > BYTES_MAX {
                return Err(HttpFailure::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        let mut response = HttpResponse::new(body);
        *response.status_mut() = answer.status();
        *response.headers_mut() = answer.headers().clone();
        Ok(response)
    }
}

impl<'c> AsyncHttpClient<'c> for Http {
    type Error = HttpFailure;
    type Future = BoxFuture<'c, Result<HttpResponse, HttpFailure>>;

    fn call(&'c self, request: HttpRequest) -> Self::Future {
        self.send(request).boxed()
    }
}

/// A request without a usable answer.
#[derive(Debug)]
pub(super) enum HttpFailure {
    /// The request could not be sent, or its answer not be read.
    Failed(reqwest::Error),
    /// The answer is larger than any that a provider has.
    TooLarge,
}

impl From<reqwest::Error> for HttpFailure {
    /// The URL of a request may hold a code.
    fn from(error: reqwest::Error) -> Self {
        Self::Failed(error.without_url())
    }
}

impl fmt::Display for HttpFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::TooLarge => write!(f, "the answer has more than {BYTES_MAX} bytes"),
        }
    }
}

impl Error for HttpFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Failed(error) => error.source(),
            Self::TooLarge => None,
        }
    }
}
