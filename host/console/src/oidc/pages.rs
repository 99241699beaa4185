//! The begin and the end of a sign-in at the provider.

use axum::{
    extract::State,
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Redirect, Response},
};
use futures::FutureExt;
use oncebox_api::{Code, Mode, session::Person};

use super::provider::{Pending, Provider};
use crate::{
    admit::onward,
    cookie::{self, Cookie},
    fields::Fields,
    layout::refused,
    login::{form, session_cookie},
    refusal::Refusal,
    state::Console,
    visit::local_target,
};

/// Name of the cookie of a sign-in on its way. Over encrypted connections no other host of the same
/// domain can set it.
fn cookie_name(is_encrypted: bool) -> &'static str {
    if is_encrypted { "__Host-oncebox_sign_in" } else { "oncebox_sign_in" }
}

/// Seconds that a visitor has at the provider.
const SECONDS: i32 = 600;

/// Longest path to return to; a longer one leads to the first page.
const NEXT_MAX: usize = 1_024;

/// Sends a visitor to the provider.
pub(crate) async fn begin(State(console): State<Console>, parts: Parts) -> Response {
    let Some(provider) = provider(&console) else { return missing() };
    let query = Fields::parse(parts.uri.query().unwrap_or_default().as_bytes());
    let next = local_target(query.get("next").filter(|next| next.len() <= NEXT_MAX));
    match provider.begin(next).await {
        Ok((url, pending)) => {
            let is_encrypted = provider.is_encrypted() || console.0.is_encrypted;
            let cookie = sign_in_cookie(is_encrypted, &pending.encode(), SECONDS);
            ([(header::SET_COOKIE, cookie)], Redirect::to(&url)).into_response()
        }
        Err(error) => {
            tracing::warn!(error = %error, "identity provider does not answer");
            let name = provider.name();
            let text =
                format!("`{name}` does not answer ({error}); sign in with a token, or later");
            form(&console, StatusCode::BAD_GATEWAY, next, Some(&text))
        }
    }
}

/// Receives a visitor whom the provider sent back, and starts the session.
pub(crate) async fn finish(State(console): State<Console>, parts: Parts) -> Response {
    let Some(provider) = provider(&console) else { return missing() };
    let query = Fields::parse(parts.uri.query().unwrap_or_default().as_bytes());
    let is_encrypted = provider.is_encrypted() || console.0.is_encrypted;
    let pending = cookie::value(&parts, cookie_name(is_encrypted));
    let pending = pending.as_deref().and_then(Pending::decode);
    // Another site could send a visitor here with a code of its own.
    let pending = pending.filter(|pending| query.get("state") == Some(pending.state.as_str()));
    let Some(pending) = pending else {
        let text =
            "this is not the end of a sign-in of this browser within ten minutes; begin again";
        return form(&console, StatusCode::BAD_REQUEST, "/console", Some(text));
    };
    let next = pending.next.clone();
    let signed_in = match (query.get("code"), query.get("error")) {
        (Some(code), None) => sign_in(&console, provider, code.to_owned(), pending).await,
        (_, Some(error)) => Err(forbidden(format!("`{}` says `{error}`", provider.name()))),
        (None, None) => Err(forbidden(format!("`{}` sent no code", provider.name()))),
    };
    let mut answer = match signed_in {
        Ok(secret) => {
            let cookies = [(header::SET_COOKIE, session_cookie(is_encrypted, &secret))];
            (cookies, onward(local_target(Some(&next)))).into_response()
        }
        Err((status, why)) => {
            tracing::info!(reason = why, "console sign-in refused");
            let answer = form(&console, status, local_target(Some(&next)), Some(&why));
            // The code is as it was, for the next request of the same page.
            if status == StatusCode::SERVICE_UNAVAILABLE {
                return answer;
            }
            answer
        }
    };
    answer.headers_mut().append(header::SET_COOKIE, sign_in_cookie(is_encrypted, "", 0));
    answer
}

fn forbidden(why: String) -> (StatusCode, String) {
    (StatusCode::FORBIDDEN, why)
}

async fn sign_in(
    console: &Console,
    provider: &Provider,
    code: String,
    pending: Pending,
) -> Result<String, (StatusCode, String)> {
    let claims = {
        let Some(_turn) = provider.turn().await else {
            let why = "too many visitors sign in at present; load this page again";
            return Err((StatusCode::SERVICE_UNAVAILABLE, why.to_owned()));
        };
        provider.finish(code, pending).await
    };
    let claims = claims.map_err(|error| forbidden(format!("`{}`: {error}", provider.name())))?;
    let (name, grant) = provider.options.admit(&claims).map_err(forbidden)?;
    let issuer = format!("oidc:{}", provider.name());
    let person = Person {
        name: &name,
        provider: &issuer,
        role: grant.role,
        tenant: grant.tenant.as_deref(),
    };
    let started = console.0.api.start_session_of(&person).boxed().await;
    started.map_err(|error| {
        forbidden(match error.code() {
            Code::Invalid | Code::Conflict => format!("{} (`oidc.name_claim`)", error.detail()),
            _ => error.detail().to_owned(),
        })
    })
}

/// Returns the provider of a host that asks for tokens.
fn provider(console: &Console) -> Option<&Provider> {
    console.0.provider.as_ref().filter(|_| console.0.api.mode() == Mode::Tokens)
}

fn missing() -> Response {
    let detail = "this host has no identity provider; sign in with a token";
    refused(None, &Refusal::new(StatusCode::NOT_FOUND, detail))
}

/// Returns the cookie of a sign-in on its way. A browser sends it also where the provider sends a
/// visitor back.
fn sign_in_cookie(is_encrypted: bool, value: &str, age_s: i32) -> HeaderValue {
    let sign_in = Cookie {
        name: cookie_name(is_encrypted),
        value,
        path: "/",
        same_site: "Lax",
        age_s,
        is_encrypted,
    };
    sign_in.header()
}
