//! The editor of a dead letter's payload, which shows what changes before anything does.

use axum::{
    extract::{FromRequestParts, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::{InboxDetailBody, Role},
};
use serde::de::IgnoredAny;
use similar::{ChangeTag, TextDiff};

use super::message::segments;
use crate::{
    actions, form,
    html::{input, of_consumer},
    layout::{Page, refused},
    refusal::Refusal,
    state::Console,
    visit::Visit,
};

/// Returns a payload over several lines, where it is JSON. Only the space between its values differs:
/// a value that was read and written again would lose digits of a long number, and of two fields
/// with one name the first.
pub(super) fn readable(payload: &str) -> String {
    match serde_json::from_str::<IgnoredAny>(payload) {
        Ok(_) => indented(payload),
        Err(_) => payload.to_owned(),
    }
}

/// Returns JSON with each field and each element in a line of its own.
fn indented(json: &str) -> String {
    let (mut lines, mut depth) = (String::with_capacity(2 * json.len()), 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for character in json.chars() {
        if in_string {
            lines.push(character);
            in_string = is_escaped || character != '"';
            is_escaped = !is_escaped && character == '\\';
            continue;
        }
        match character {
            '{' | '[' => {
                depth += 1;
                lines.push(character);
                end_line(&mut lines, depth);
            }
            '}' | ']' => {
                depth -= 1;
                lines.truncate(lines.trim_end().len());
                if !lines.ends_with(['{', '[']) {
                    end_line(&mut lines, depth);
                }
                lines.push(character);
            }
            ',' => {
                lines.push(character);
                end_line(&mut lines, depth);
            }
            ':' => lines.push_str(": "),
            _ if character.is_ascii_whitespace() => {}
            _ => {
                lines.push(character);
                in_string = character == '"';
            }
        }
    }
    lines
}

fn end_line(lines: &mut String, depth: usize) {
    lines.push('\n');
    lines.extend(std::iter::repeat_n("  ", depth.min(INDENTS_MAX)));
}

/// Largest payload that can be edited in a page, bytes.
const EDITED_BYTES_MAX: usize = 512 << 10;

/// Deepest level that is indented further than the one above: a payload that is all brackets and
/// commas would become hundreds of times as long.
const INDENTS_MAX: usize = 16;

/// Largest number of lines of a comparison.
const LINES_MAX: usize = 10_000;

/// A dead letter that is edited.
struct Edited {
    /// The payload as it is kept; masked where the policy masks it.
    before: String,
    is_masked: bool,
    /// The new payload; empty where the visitor has not written it yet.
    after: String,
    /// Reason that the visitor gave.
    because: String,
    /// Time at which the message became a dead letter, as the page showed it first. An edit does
    /// not change a message that has failed again since.
    as_of: String,
}

pub(crate) async fn edit(visit: Visit) -> Result<Page, Refusal> {
    let mut edited = dead_letter(&visit).await?;
    // What is masked would be stored as it is shown.
    if !edited.is_masked {
        edited.after = edited.before.clone();
    }
    Ok(editor(&visit, &edited))
}

pub(super) fn with_payload_path(visit: &Visit) -> String {
    with_query(&path(&segments(visit)), &[("payload", Some("true".to_owned()))])
}

/// Returns a dead letter with its payload, before anything of it is edited.
async fn dead_letter(visit: &Visit) -> Result<Edited, Refusal> {
    if !visit.may(Role::Operator, false) {
        let detail = "an edit needs the role operator";
        return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
    }
    let detail: InboxDetailBody = visit.client.get(&with_payload_path(visit)).await?;
    let before = match &detail.payload {
        Some(payload) if detail.masked => payload,
        _ => editable(&detail)?,
    };
    Ok(Edited {
        before: before.to_owned(),
        is_masked: detail.masked,
        after: String::new(),
        because: String::new(),
        as_of: as_of(detail.row.processed_at),
    })
}

/// Returns the time that an edit names: the message became a dead letter then.
pub(super) fn as_of(processed_at: Option<DateTime<Utc>>) -> String {
    processed_at.map(|at| at.to_rfc3339()).unwrap_or_default()
}

/// Returns the payload of a message that is not masked, where a page can edit it.
pub(super) fn editable(detail: &InboxDetailBody) -> Result<&str, Refusal> {
    let kept = detail.row.payload_bytes.and_then(|bytes| usize::try_from(bytes).ok());
    match &detail.payload {
        // Bytes that are no text are shown as more characters than they are.
        Some(payload) if kept != Some(payload.len()) => Err(Refusal::invalid(
            "the payload is not text; edit it with `oncebox inbox edit --payload <file>`",
        )),
        Some(payload) if payload.len() > EDITED_BYTES_MAX => Err(Refusal::invalid(format!(
            "the payload has more than {EDITED_BYTES_MAX} bytes; edit it with `oncebox inbox edit \
                --payload <file>`"
        ))),
        Some(payload) => Ok(payload),
        None => Err(Refusal::invalid("the payload is not kept, and nothing can be edited")),
    }
}

/// Shows the difference of an edited payload, before anything is changed.
pub(crate) async fn preview(State(console): State<Console>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let visit = match Visit::from_request_parts(&mut parts, &console).await {
        Ok(visit) => visit,
        Err(response) => return response,
    };
    let previewed = async {
        // Each byte may be three in a form.
        let fields = form::read(&visit, &parts, body, 4 * EDITED_BYTES_MAX).await?;
        let mut edited = dead_letter(&visit).await?;
        // A browser sends every end of a line as CR and LF.
        edited.after = fields.need("payload")?.replace("\r\n", "\n");
        if edited.before.contains("\r\n") {
            edited.after = edited.after.replace('\n', "\r\n");
        }
        let given = |name: &str| fields.get(name).unwrap_or_default().to_owned();
        (edited.because, edited.as_of) = (given("because"), given("as_of"));
        Ok(editor(&visit, &edited))
    };
    match previewed.await {
        Ok(page) => page.document(&visit).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
    }
}

/// Returns the form of a new payload, which leads to what changes.
pub(super) fn payload_form(visit: &Visit, page: &str, payload: &str, as_of: &str) -> Markup {
    html! {
        form method="post" action=(format!("{page}/edit")) {
            (form::hidden(visit))
            input type="hidden" name="as_of" value=(as_of);
            label.field {
                span { "Payload" }
                textarea name="payload" spellcheck="false" { "\n" (payload) }
            }
            p { button.quiet { "Show what changes" } }
        }
    }
}

fn editor(visit: &Visit, edited: &Edited) -> Page {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let id = visit.param("id");
    let page = of_consumer(tenant, consumer, &["messages", id]);
    // In base64, since a browser changes the ends of lines of a form.
    let payload = STANDARD.encode(&edited.after);
    let given = [
        ("tenant", tenant),
        ("consumer", consumer),
        ("id", id),
        ("payload_base64", &payload),
        ("as_of", &edited.as_of),
        ("back", &page),
    ];
    let because = input("because", "Why; kept with the message", &edited.because, true);
    let is_written = !edited.is_masked || !edited.after.is_empty();
    let body = html! {
        @if edited.is_masked {
            p.note {
                "The policy of the consumer masks parts of the record, so the payload is not filled "
                "in: write all of it, or "
                a href=(format!("{page}?payload=true")) { "show the message unmasked" }
                " and edit it there. Below, the present payload is masked."
            }
        }
        (payload_form(visit, &page, &edited.after, &edited.as_of))
        @if is_written && edited.before != edited.after {
            h2 { "What changes" }
            pre.diff { (difference(&edited.before, &edited.after)) }
            (form::form(visit, &actions::MESSAGE_EDIT, &given, because))
        } @else {
            p.note { "Nothing is changed yet." }
        }
    };
    Page::new("Edit", body)
        .of_consumer(tenant, consumer)
        .below("messages", &of_consumer(tenant, consumer, &["messages"]))
        .below(id, &page)
}

/// Returns the lines of two texts, with those that only one has marked. JSON is compared line by
/// line of its readable form, unless the texts differ and their readable forms do not.
fn difference(before: &str, after: &str) -> Markup {
    let (mut old, mut new) = (readable(before), readable(after));
    if old == new {
        (old, new) = (before.to_owned(), after.to_owned());
    }
    if old.lines().count() + new.lines().count() > LINES_MAX {
        return html! { "The payloads have too many lines to compare." };
    }
    let difference =
        TextDiff::configure().timeout(std::time::Duration::from_millis(200)).diff_lines(&old, &new);
    html! {
        @for change in difference.iter_all_changes() {
            @match change.tag() {
                ChangeTag::Delete => span.minus { "- " (change.value().trim_end_matches('\n')) },
                ChangeTag::Insert => span.plus { "+ " (change.value().trim_end_matches('\n')) },
                ChangeTag::Equal => span { "  " (change.value().trim_end_matches('\n')) },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(before: &str, after: &str, shown: &str) {
        let difference = difference(before, after).into_string();
        assert!(difference.contains(shown), "{before} and {after}: {difference}");
    }

    fn check_readable(payload: &str, expected: &str) {
        let readable = readable(payload);
        assert_eq!(readable, expected);
        assert_eq!(super::readable(&readable), readable, "it is readable already");
    }

    /// What could go wrong: a person reads another value than the handler.
    #[test]
    fn a_payload_is_shown_with_the_values_that_it_has() {
        check_readable(
            r#"{"n":12345678901234567890.10,"e":1E5,"n":1}"#,
            "{\n  \"n\": 12345678901234567890.10,\n  \"e\": 1E5,\n  \"n\": 1\n}",
        );
        check_readable(
            r#" {"a" : [ ] , "b":{},"c":[1,{"d":null}]}"#,
            "{\n  \"a\": [],\n  \"b\": {},\n  \"c\": [\n    1,\n    {\n      \"d\": null\n    }\n  ]\n}",
        );
        check_readable(
            r#"["a\\",",[:{\" }"," x "]"#,
            "[\n  \"a\\\\\",\n  \",[:{\\\" }\",\n  \" x \"\n]",
        );
        check_readable(r#""\u00e9 {""#, r#""\u00e9 {""#);
        check_readable("{ no JSON: 1", "{ no JSON: 1");
        let deep = format!("{}1{}", "[".repeat(5_000), ",1]".repeat(5_000));
        assert!(readable(&deep).len() < deep.len() * (2 + 2 * INDENTS_MAX));
    }

    #[test]
    fn a_difference_is_shown_whatever_it_is_in() {
        check_one(r#"{"a":1,"b":2}"#, r#"{"a":1,"b":3}"#, "+   &quot;b&quot;: 3");
        // Equal once a program has read them, beside something that is not.
        let before = r#"{"a":1,"n":123456789012345678901}"#;
        check_one(
            before,
            r#"{"a":2,"n":123456789012345678902}"#,
            "+   &quot;n&quot;: 123456789012345678902",
        );
        check_one(r#"{"a":1,"a":2,"b":1}"#, r#"{"a":2,"b":2}"#, "-   &quot;a&quot;: 1,");
        // Another space is all that differs.
        check_one(r#"{"a":1}"#, r#"{"a": 1}"#, "+ {&quot;a&quot;: 1}");
        check_one("a\nb", "a\nc", "+ c");
        check_one("a", &"x\n".repeat(LINES_MAX), "too many lines");
    }
}
