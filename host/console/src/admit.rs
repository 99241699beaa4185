//! The admission of a request to a page: its session, and the answer where there is none.

use axum::{
    extract::{FromRequestParts, RawPathParams},
    http::{StatusCode, request::Parts},
    response::{Html, IntoResponse, Redirect, Response},
};
use maud::{DOCTYPE, html};
use oncebox_api::{Mode, link::with_query};

use crate::{
    client::Client,
    cookie,
    fields::Fields,
    html::MARK,
    layout::refused,
    live,
    refusal::Refusal,
    state::Console,
    visit::{Visit, form_token},
};

/// Name of the session's cookie.
pub(crate) const COOKIE: &str = "oncebox_session";

impl FromRequestParts<Console> for Visit {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, console: &Console) -> Result<Self, Response> {
        let session = cookie::value(parts, COOKIE);
        let found = console.0.api.of_session(parts, session.as_deref()).await;
        let principal = found.map_err(|error| refused(None, &error.into()))?;
        let target = parts.uri.path_and_query().map_or("/console", |target| target.as_str());
        let target = target.to_owned();
        let principal = principal.ok_or_else(|| unknown(parts, &target, session.is_some()))?;
        let params = RawPathParams::from_request_parts(parts, &()).await;
        let params = params.map_err(|_| {
            refused(None, &Refusal::invalid("the path is not UTF-8 after percent-decoding"))
        })?;
        let params = params.iter().map(|(name, value)| {
            (name.to_owned(), value.strip_prefix(MARK).unwrap_or(value).to_owned())
        });
        let params = Fields(params.collect());
        let secret = session.as_deref().filter(|_| console.0.api.mode() == Mode::Tokens);
        Ok(Self {
            form_token: form_token(secret.unwrap_or(&console.0.form_key)),
            client: Client { routes: console.0.routes.clone(), principal, is_refresh: false },
            console: console.clone(),
            target,
            params,
            query: Fields::parse(parts.uri.query().unwrap_or_default().as_bytes()),
            session,
            parts: parts.clone(),
        })
    }
}

/// Returns the answer to a visitor without a valid session.
fn unknown(parts: &Parts, target: &str, had_session: bool) -> Response {
    let is = |value: &str| {
        parts.headers.get("sec-fetch-site").is_some_and(|site| site.as_bytes() == value.as_bytes())
    };
    if parts.method != "GET" {
        let detail = "the session is over; sign in, and load the page of the form again";
        return refused(None, &Refusal::new(StatusCode::UNAUTHORIZED, detail));
    }
    if live::is_asked(&parts.headers) {
        return live::over();
    }
    // A browser that follows a link of another site leaves the cookie out. The next request, from
    // this page, has it: it reads a page, as a visitor does who follows a link.
    if is("cross-site") && !had_session {
        return onward(target).into_response();
    }
    let next = (target != "/console").then(|| target.to_owned());
    Redirect::to(&with_query("/console/login", &[("next", next)])).into_response()
}

/// Returns a page that leads on to another, by a request that has the session's cookie.
pub(crate) fn onward(target: &str) -> Html<String> {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="refresh" content=(format!("0; url={target}"));
                title { "Oncebox" }
            }
            body { p { a href=(target) { "Go on to the console" } } }
        }
    };
    Html(page.into_string())
}
