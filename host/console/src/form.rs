//! Forms of pages: their hidden fields, and the check that they are one of this host's pages.

use axum::{
    body::Body,
    http::{StatusCode, request::Parts},
};
use maud::{Markup, html};
use oncebox_api::session::check_site;

use crate::{action::Action, command, fields::Fields, refusal::Refusal, visit::Visit};

/// Returns the form of an action. `given` are fields that the page fills in, `inputs` is for those
/// that the visitor fills in.
pub(crate) fn form(
    visit: &Visit,
    action: &Action,
    given: &[(&str, &str)],
    inputs: Markup,
) -> Markup {
    let fields = Fields(given.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect());
    let words = (action.command)(&fields);
    let line = command::line(words.iter().map(String::as_str));
    html! {
        @if visit.may(action.role, action.is_platform) {
            form.action method="post" action=(format!("/console/actions/{}", action.name)) {
                @if given.iter().any(|(name, _)| *name == "back") { (token(visit)) } @else { (hidden(visit)) }
                @for (name, value) in given { input type="hidden" name=(name) value=(value); }
                (inputs)
                button { (action.label) }
            }
        } @else {
            p.note {
                "“" (action.label) "” needs the role " (action.role)
                @if action.is_platform { " and a token that is of no tenant" }
                "."
            }
        }
        p.command { code { (line) } }
    }
}

/// Returns the hidden fields of every form: the token, and the page that is shown afterwards.
pub(crate) fn hidden(visit: &Visit) -> Markup {
    html! { (token(visit)) input type="hidden" name="back" value=(visit.target); }
}

/// Returns the hidden field that tells the forms of one session from those of others.
fn token(visit: &Visit) -> Markup {
    html! { input type="hidden" name="form_token" value=(masked(visit.form_token)); }
}

/// Returns a token as a page has it: another text each time, so that the length of a compressed page
/// tells nothing of it.
fn masked(token: [u8; 16]) -> String {
    let mask: [u8; 16] = rand::random();
    let masked: Vec<_> = token.iter().zip(mask).map(|(byte, mask)| byte ^ mask).collect();
    hex::encode(mask) + &hex::encode(masked)
}

/// Returns the token of a page's text.
fn unmasked(text: &str) -> Option<[u8; 16]> {
    let bytes: [u8; 32] = hex::decode(text).ok()?.try_into().ok()?;
    Some(std::array::from_fn(|at| bytes[at] ^ bytes[at + 16]))
}

/// Reads a form that one of this host's pages sent, of this session.
pub(crate) async fn read(
    visit: &Visit,
    parts: &Parts,
    body: Body,
    bytes_max: usize,
) -> Result<Fields, Refusal> {
    let body = axum::body::to_bytes(body, bytes_max).await;
    let body = body.map_err(|_| Refusal::invalid("the form is too large, or broke off"))?;
    let fields = Fields::parse(&body);
    check(visit, parts, &fields)?;
    Ok(fields)
}

/// Checks that a form is one of this host's pages, of this session.
pub(crate) fn check(visit: &Visit, parts: &Parts, fields: &Fields) -> Result<(), Refusal> {
    check_site(parts)?;
    match fields.get("form_token").and_then(unmasked) == Some(visit.form_token) {
        true => Ok(()),
        false => Err(Refusal::new(
            StatusCode::FORBIDDEN,
            "the form is of another session; load its page again, then send it",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_same_under_every_mask() {
        let (one, other) = (masked([7; 16]), masked([7; 16]));
        assert_ne!(one, other);
        assert_eq!((unmasked(&one), unmasked(&other)), (Some([7; 16]), Some([7; 16])));
        assert_eq!((unmasked(""), unmasked(&one[2..]), unmasked("ü")), (None, None, None));
    }
}
