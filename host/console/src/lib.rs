//! The console: pages for a browser, over the HTTP API of the same process. A page asks the API in
//! the name of its visitor, so that the console can do nothing that the API refuses. All pages and
//! actions work without JavaScript; with it, a page follows what changes.

// The state of the console.
mod state;
// Files within the program.
mod assets;
// What a browser sends.
mod cookie;
mod fields;
mod refusal;
// The API, as a visitor may use it.
mod client;
mod visit;
// Parts of pages.
mod command;
mod html;
mod action;
mod form;
mod layout;
// Sessions.
mod admit;
mod login;
mod oidc;
// The pages, and how they follow what changes.
mod live;
mod page;
// The actions.
mod actions;
mod submit;
mod upload;

pub use actions::{ACTIONS, ActionInfo};
pub use oidc::{Grant, OidcOptions};
pub use page::templates;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, Request},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{Redirect, Response},
    routing::{any, get, post},
};
use oncebox_api::Api;
use refusal::Refusal;
use state::{Console, Shared};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Largest number of looks at what has changed at a time, so that open pages leave most connections
/// of the database to requests.
const REFRESHES_MAX: usize = 2;

/// Largest number of uploads in memory at a time.
const UPLOADS_MAX: usize = 2;

/// Longest time for a request: its form must have arrived, and its page must be there.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest time for an upload.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// Path of the form with a component.
const UPLOAD: &str = "/console/upload";

/// Returns the pages of the console, for the address of the API. Pages that follow changes end when
/// `stop` is cancelled.
///
/// # Errors
/// An option of the identity provider cannot work.
pub fn router(
    api: Api,
    is_encrypted: bool,
    oidc: Option<OidcOptions>,
    stop: CancellationToken,
) -> anyhow::Result<Router> {
    let console = Console(Arc::new(Shared {
        routes: oncebox_api::router(api.clone()),
        api,
        is_encrypted,
        provider: oidc.map(oidc::Provider::new).transpose()?,
        form_key: hex::encode(rand::random::<[u8; 32]>()),
        streams: Arc::default(),
        refreshes: Semaphore::new(REFRESHES_MAX),
        uploads: Semaphore::new(UPLOADS_MAX),
        stop,
    }));
    Ok(Router::new()
        .route("/", get(async || Redirect::to("/console")))
        .route("/console/login", get(login::show).post(login::sign_in))
        .route("/console/login/provider", get(oidc::begin))
        .route("/console/login/return", get(oidc::finish))
        .route("/console/logout", post(login::sign_out))
        .route("/console/assets/{file}", get(assets::serve))
        .route("/console/actions/{action}", post(submit::carry_out))
        .route(UPLOAD, post(upload::receive).layer(DefaultBodyLimit::disable()))
        .merge(page::routes())
        .route("/console/{*rest}", any(page::not_found))
        .layer(middleware::from_fn(around))
        .with_state(console))
}

/// What a page may load and where it may send forms: files of this host, and this host.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; \
    frame-ancestors 'none'";

/// Bounds the time of a request, and adds what every answer says to the browser.
async fn around(request: Request, next: Next) -> Response {
    let is_upload = request.uri().path() == UPLOAD;
    let limit = if is_upload { UPLOAD_TIMEOUT } else { REQUEST_TIMEOUT };
    let takes_gzip = assets::takes_gzip(request.headers());
    let mut response = match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail = "this took too long, and may still be done; look before you repeat it";
            layout::refused(None, &Refusal::new(StatusCode::SERVICE_UNAVAILABLE, detail))
        }
    };
    let headers = response.headers_mut();
    let mut set = |name: HeaderName, value: &'static str| {
        headers.insert(name, HeaderValue::from_static(value));
    };
    set(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY);
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    // With `no-referrer`, browsers would say `origin: null` of the forms of these pages.
    set(header::REFERRER_POLICY, "same-origin");
    set(HeaderName::from_static("cross-origin-opener-policy"), "same-origin");
    set(HeaderName::from_static("cross-origin-resource-policy"), "same-origin");
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    let is_page =
        headers.get(header::CONTENT_TYPE).is_some_and(|it| it == "text/html; charset=utf-8");
    if takes_gzip && is_page { compressed(response).await } else { response }
}

/// Compresses a page. Its only secret, the token of its forms, is another text each time.
async fn compressed(response: Response) -> Response {
    let (mut head, body) = response.into_parts();
    // A page is in memory already.
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    head.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, Body::from(assets::compressed(&body)))
}
