//! A message as a story: its runs, what it waits for, what it sent, and what can be done.

use axum::{
    extract::{FromRequestParts, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::{HistoryEventBody, InboxDetailBody, MessageHistoryBody, Role},
};
use oncebox_model::MessageStatus;
use similar::{ChangeTag, TextDiff};

use super::outgoing;
use crate::{
    action, actions,
    fields::Fields,
    form,
    html::{
        bytes, digest, facts, input, message_status, of_consumer, pretty, table, text_or_dash,
        time, time_or_dash,
    },
    layout::{Page, refused},
    refusal::Refusal,
    state::Console,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let id = visit.param("id");
    let at = ["tenants", tenant, "consumers", consumer, "inbox", id];
    let story: MessageHistoryBody =
        visit.client.get(&path(&[&at[..], &["history"]].concat())).await?;
    // The record is in the part of the page that does not change.
    let with_payload = visit.query.get("payload").is_some() && !visit.client.is_refresh;
    let detail: Option<InboxDetailBody> = match with_payload {
        true => Some(visit.client.get(&with_payload_path(&at)).await?),
        false => None,
    };
    let body = html! {
        div.callout {
            p { (message_status(story.message.status)) " " (story.next) }
            @for command in &story.commands { p.command { code { (command) } } }
        }
        (about(&story))
        h2 { "What became of it" }
        (events(&story))
        @if story.outgoing_total > 0 {
            h2 { "What it sent" }
            (outgoing::rows(tenant, &story.outgoing, html! {}))
            @if story.outgoing_total > story.outgoing.len() as i64 {
                p.note { "The first " (story.outgoing.len()) " of " (story.outgoing_total) "." }
            }
        }
        @if let Some(result) = &story.message.result {
            h2 { "Result of the handler" }
            pre { (pretty(result)) }
        }
    };
    let page = Page::new(id, body)
        .of_consumer(tenant, consumer)
        .below("messages", &of_consumer(tenant, consumer, &["messages"]))
        .live()
        .with_forms(forms(&visit, tenant, consumer, &story, detail.as_ref()));
    Ok(page.same_as(&["why", "--tenant", tenant, "--consumer", consumer, "--", id]))
}

fn with_payload_path(at: &[&str]) -> String {
    with_query(&path(at), &[("payload", Some("true".to_owned()))])
}

fn about(story: &MessageHistoryBody) -> Markup {
    let row = &story.message;
    let kept = match row.payload_bytes {
        Some(size) => html! { (bytes(size.into())) },
        None => html! { "not kept" },
    };
    facts(&[
        (
            "Event",
            html! { (text_or_dash(row.event_type.as_deref())) " " (row.event_version.as_deref().unwrap_or_default()) },
        ),
        ("Source", text_or_dash(row.source.as_deref())),
        ("Record", html! { (row.topic) " / " (row.partition) " @ " (row.offset) }),
        ("Ordering key", text_or_dash(story.ordering_key.as_deref())),
        ("Reason", text_or_dash(row.reason.as_deref())),
        (
            "Runs",
            html! { (row.attempts) @if row.crashes > 0 { ", " (row.crashes) " without an answer" } },
        ),
        (
            "Version",
            html! { @match &row.version { Some(it) => (digest(it)), None => (crate::html::dash()) } },
        ),
        ("Payload", kept),
        ("Trace", text_or_dash(row.trace_parent.as_deref())),
        ("Erased", time_or_dash(row.erased_at)),
    ])
}

fn events(story: &MessageHistoryBody) -> Markup {
    let row = &story.message;
    html! {
        ol.story {
            li { p { (time(row.received_at)) " received" } }
            @for event in &story.history { li { (event_line(event)) } }
            @if let Some(blocked_by) = &story.blocked_by {
                li {
                    p {
                        "waits behind "
                        a href=(of_consumer(&row.tenant, &row.consumer, &["messages", &blocked_by.message_id])) {
                            (blocked_by.message_id)
                        }
                        " " (message_status(blocked_by.status))
                    }
                }
            }
            @if let (Some(version), at) = (story.aggregate_version, story.aggregate_at) {
                li {
                    p {
                        "creates version " (version) " of its aggregate, which is at "
                        @match at { Some(at) => (at), None => "none" }
                        @if let Some(until) = story.waits_until { "; waits until " (time(until)) }
                    }
                }
            }
            @if let Some(at) = row.next_attempt_at { li { p { (time(at)) " next run" } } }
            @if let Some(at) = row.processed_at { li { p { (time(at)) " " (message_status(row.status)) } } }
        }
    }
}

fn event_line(event: &HistoryEventBody) -> Markup {
    html! {
        p {
            (time(event.at)) " " (event.event)
            @if let Some(attempt) = event.attempt { ", run " (attempt) }
            @if let Some(version) = &event.version { " on " (digest(version)) }
            @if let Some(actor) = &event.actor { " by " (actor) }
            @if let Some(reason) = &event.reason { ": " (reason) }
        }
        @if let Some(error) = &event.error { p { code { (error) } } }
    }
}

fn forms(
    visit: &Visit,
    tenant: &str,
    consumer: &str,
    story: &MessageHistoryBody,
    detail: Option<&InboxDetailBody>,
) -> Markup {
    let row = &story.message;
    let page = of_consumer(tenant, consumer, &["messages", &row.message_id]);
    let because = || input("because", "Why; kept with the message", "", true);
    let job = |action: &'static str, label: &'static str| {
        let given = [
            ("tenant", tenant),
            ("consumer", consumer),
            ("action", action),
            ("id", &*row.message_id),
        ];
        form::form(visit, &action::Action { label, ..actions::JOB_START }, &given, because())
    };
    let is_dead = matches!(row.status, MessageStatus::FailedTerminal | MessageStatus::Parked);
    let is_over = matches!(
        row.status,
        MessageStatus::Completed | MessageStatus::Skipped | MessageStatus::Discarded
    );
    html! {
        @if !is_over {
            h2 { "Act on it" }
            div.actions {
                @if is_dead { div { (job("redrive", "Run again")) } }
                @if row.status == MessageStatus::FailedRetryable { div { (job("retry", "Run now")) } }
                div { (job("discard", "Discard")) }
            }
            @if is_dead && row.payload_bytes.is_some() && visit.may(Role::Operator, false) {
                p { a href=(format!("{page}/edit")) { "Edit the payload and run it again" } }
            }
        }
        h2 { "Record" }
        @match detail {
            Some(detail) => (record(detail)),
            None => p { a href=(format!("{page}?payload=true")) { "Show key, headers and payload" } },
        }
    }
}

fn record(detail: &InboxDetailBody) -> Markup {
    let headers: Vec<_> = detail
        .headers
        .iter()
        .flatten()
        .map(|(name, value)| html! { td { (name) } td { code { (value) } } })
        .collect();
    html! {
        (facts(&[("Key", text_or_dash(detail.key.as_deref()))]))
        (table("Headers", &["Header", "Value"], &headers, html! { "The record has no headers, or none are kept." }))
        @match &detail.payload {
            Some(payload) => pre { (readable(payload)) },
            None => p.empty { "The payload is not kept." },
        }
    }
}

/// Returns a payload over several lines, where it is JSON.
fn readable(payload: &str) -> String {
    serde_json::from_str(payload).map_or_else(|_| payload.to_owned(), |value| pretty(&value))
}

/// Largest payload that can be edited in a page, bytes.
const EDITED_BYTES_MAX: usize = 512 << 10;

/// Largest number of lines of a comparison.
const LINES_MAX: usize = 10_000;

/// A dead letter that is edited.
struct Edited {
    /// The payload as it is kept.
    before: String,
    after: String,
    /// Reason that the visitor gave.
    because: String,
    /// Time at which the message became a dead letter, as the page showed it first. An edit does not
    /// change a message that has failed again since.
    as_of: String,
}

pub(crate) async fn edit(visit: Visit) -> Result<Page, Refusal> {
    let (before, as_of) = payload(&visit).await?;
    let edited = Edited { after: before.clone(), before, because: String::new(), as_of };
    Ok(editor(&visit, &edited))
}

/// Returns the payload of a dead letter as it is kept, and the time at which it became one.
async fn payload(visit: &Visit) -> Result<(String, String), Refusal> {
    if !visit.may(Role::Operator, false) {
        let detail = "an edit needs the role operator";
        return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
    }
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let at = ["tenants", tenant, "consumers", consumer, "inbox", visit.param("id")];
    let detail: InboxDetailBody = visit.client.get(&with_payload_path(&at)).await?;
    let kept = detail.row.payload_bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let as_of = detail.row.processed_at.map(|at| at.to_rfc3339()).unwrap_or_default();
    match detail.payload {
        // Bytes that are no text are shown as more characters than they are.
        Some(payload) if kept != Some(payload.len()) => Err(Refusal::invalid(
            "the payload is not text; edit it with `oncebox inbox edit --payload <file>`",
        )),
        Some(payload) if payload.len() > EDITED_BYTES_MAX => Err(Refusal::invalid(format!(
            "the payload has more than {EDITED_BYTES_MAX} bytes; edit it with `oncebox inbox edit \
                --payload <file>`"
        ))),
        Some(payload) => Ok((payload, as_of)),
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
        let body = axum::body::to_bytes(body, 4 * EDITED_BYTES_MAX).await;
        let body = body.map_err(|_| Refusal::invalid("the form is too large, or broke off"))?;
        let fields = Fields::parse(&body);
        form::check(&visit, &parts, &fields)?;
        let (before, _) = payload(&visit).await?;
        // A browser sends every end of a line as CR and LF.
        let mut after = fields.need("payload")?.replace("\r\n", "\n");
        if before.contains("\r\n") {
            after = after.replace('\n', "\r\n");
        }
        let given = |name: &str| fields.get(name).unwrap_or_default().to_owned();
        let edited = Edited { before, after, because: given("because"), as_of: given("as_of") };
        Ok(editor(&visit, &edited))
    };
    match previewed.await {
        Ok(page) => page.document(&visit).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
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
    let body = html! {
        form method="post" action=(format!("{page}/edit")) {
            (form::hidden(visit))
            input type="hidden" name="as_of" value=(edited.as_of);
            label.field {
                span { "Payload" }
                textarea name="payload" spellcheck="false" { "\n" (edited.after) }
            }
            p { button.quiet { "Show what changes" } }
        }
        @if edited.before != edited.after {
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

    #[test]
    fn a_difference_is_shown_whatever_it_is_in() {
        check_one(r#"{"a":1,"b":2}"#, r#"{"a":1,"b":3}"#, "+   &quot;b&quot;: 3");
        // Equal as JSON is read here, and different bytes.
        check_one("123456789012345678901234567890", "123456789012345678901234567891", "+ 12");
        check_one(r#"{"a":1,"a":2}"#, r#"{"a":2}"#, "- {");
        check_one("a\nb", "a\nc", "+ c");
        check_one("a", &"x\n".repeat(LINES_MAX), "too many lines");
    }
}
