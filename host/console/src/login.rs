//! Signing in with a token, and out.

use axum::{
    body::Bytes,
    extract::{FromRequestParts, Request, State},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Redirect, Response},
};
use maud::html;
use oncebox_api::{Mode, link::with_query, session::SESSION_HOURS, session::check_site};

use crate::{
    admit::COOKIE,
    cookie::Cookie,
    fields::Fields,
    form::check,
    layout::{document, refused},
    oidc::Provider,
    state::Console,
    visit::{Visit, local_target},
};

/// Largest body of the form, bytes.
const FORM_BYTES_MAX: usize = 8_192;

/// Shows the form, or the first page where no token is needed.
pub(crate) async fn show(State(console): State<Console>, parts: Parts) -> Response {
    let query = Fields::parse(parts.uri.query().unwrap_or_default().as_bytes());
    let next = local_target(query.get("next"));
    if console.0.api.mode() == Mode::Open {
        return Redirect::to(next).into_response();
    }
    form(&console, StatusCode::OK, next, None)
}

/// Returns the page to sign in, with the reason for which the visitor is there again.
pub(crate) fn form(
    console: &Console,
    status: StatusCode,
    next: &str,
    error: Option<&str>,
) -> Response {
    let provider = console.0.provider.as_ref().map(Provider::name);
    let elsewhere = with_query("/console/login/provider", &[("next", Some(next.to_owned()))]);
    let body = html! {
        form.sign-in method="post" action="/console/login" {
            @if let Some(error) = error { p.refusal role="alert" { (error) } }
            @if let Some(provider) = provider {
                p { a href=(elsewhere) { "Sign in with " (provider) } }
            }
            input type="hidden" name="next" value=(next);
            label for="token" { "Token" }
            input id="token" name="token" type="password" required autocomplete="current-password"
                aria-describedby="token-help" autofocus;
            p.note id="token-help" {
                "As " code { "oncebox token create" } " prints it. The session lasts "
                (SESSION_HOURS) " hours and has the rights of the token."
            }
            button { "Sign in" }
        }
    };
    (status, document(None, "Sign in", &[], None, &body)).into_response()
}

/// Checks the token and starts a session.
pub(crate) async fn sign_in(State(console): State<Console>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    if let Err(error) = check_site(&parts) {
        return refused(None, &error.into());
    }
    // A proxy may end TLS before this host.
    let is_encrypted = console.0.is_encrypted
        || parts.headers.get(header::ORIGIN).is_some_and(|it| it.as_bytes().starts_with(b"https:"));
    let Ok(body) = axum::body::to_bytes(body, FORM_BYTES_MAX).await else {
        return form(
            &console,
            StatusCode::PAYLOAD_TOO_LARGE,
            "/console",
            Some("the form is too large"),
        );
    };
    let fields = Fields::parse(&body);
    let next = local_target(fields.get("next"));
    match console.0.api.start_session(fields.get("token").unwrap_or_default()).await {
        Ok(secret) => {
            let cookie = session_cookie(is_encrypted, &secret);
            ([(header::SET_COOKIE, cookie)], Redirect::to(next)).into_response()
        }
        Err(error) => {
            tracing::info!(code = error.code().name(), "console sign-in refused");
            form(&console, error.status(), next, Some(error.detail()))
        }
    }
}

/// Ends the session.
pub(crate) async fn sign_out(State(console): State<Console>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let visit = match Visit::from_request_parts(&mut parts, &console).await {
        Ok(visit) => visit,
        Err(_) => return Redirect::to("/console/login").into_response(),
    };
    let body = axum::body::to_bytes(body, FORM_BYTES_MAX).await.unwrap_or_else(|_| Bytes::new());
    if let Err(refusal) = check(&visit, &parts, &Fields::parse(&body)) {
        return refused(Some(&visit), &refusal);
    }
    if let Some(session) = &visit.session
        && let Err(error) = console.0.api.end_session(session).await
    {
        return refused(Some(&visit), &error.into());
    }
    let cookie = cookie(console.0.is_encrypted, "", 0);
    ([(header::SET_COOKIE, cookie)], Redirect::to("/console/login")).into_response()
}

/// Returns the cookie of a session that begins.
pub(crate) fn session_cookie(is_encrypted: bool, secret: &str) -> HeaderValue {
    cookie(is_encrypted, secret, SESSION_HOURS * 3_600)
}

/// Returns the cookie of a session. A browser sends it with no request that a page of another site
/// makes.
fn cookie(is_encrypted: bool, secret: &str, age_s: i32) -> HeaderValue {
    let session = Cookie {
        name: COOKIE,
        value: secret,
        path: "/console",
        same_site: "Strict",
        age_s,
        is_encrypted,
    };
    session.header()
}
