//! A message as a story: its runs, what it waits for, what it sent, and what can be done.

use axum::{
    extract::{FromRequestParts, Request, State},
    http::Method,
    response::{IntoResponse, Response},
};
use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{ConsumerBody, HistoryEventBody, InboxDetailBody, MessageHistoryBody, Role},
};
use oncebox_model::MessageStatus;
use serde_json::json;

use super::{
    edit::{as_of, editable, payload_form, readable, with_payload_path},
    outgoing,
};
use crate::{
    action, actions, command, form,
    html::{
        bytes, digest, facts, input, message_status, of_consumer, pretty, table, text_or_dash,
        time, time_or_dash,
    },
    layout::{Page, refused},
    refusal::Refusal,
    state::Console,
    visit::Visit,
};

/// Largest form with a reason, bytes.
const REASON_BYTES_MAX: usize = 16 << 10;

/// The record of a message, as the visitor asked for it.
enum RecordView {
    /// It is not asked for.
    Absent,
    /// It is shown as far as the policy lets it be. Where that masks something, this is the least
    /// role that sees it unmasked.
    Shown(Box<InboxDetailBody>, Option<Role>),
    /// It is shown once as it is stored.
    Unmasked(Box<InboxDetailBody>),
}

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    // The record is in the part of the page that does not change.
    if visit.query.get("payload").is_none() || visit.client.is_refresh {
        return page(&visit, &RecordView::Absent).await;
    }
    let detail: Box<InboxDetailBody> = visit.client.get(&with_payload_path(&visit)).await?;
    let role = match detail.masked {
        true => Some(unmask_role(&visit).await?),
        false => None,
    };
    page(&visit, &RecordView::Shown(detail, role)).await
}

/// Shows a message once as it is stored, for the reason that the form has.
pub(crate) async fn unmask(State(console): State<Console>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let visit = match Visit::from_request_parts(&mut parts, &console).await {
        Ok(visit) => visit,
        Err(response) => return response,
    };
    let unmasked = async {
        let fields = form::read(&visit, &parts, body, REASON_BYTES_MAX).await?;
        let reason = json!({ "reason": fields.need("because")? });
        let path = path(&[&segments(&visit)[..], &["unmask"]].concat());
        let detail = visit.client.send(Method::POST, &path, &reason).await?;
        page(&visit, &RecordView::Unmasked(detail)).await
    };
    match unmasked.await {
        Ok(page) => page.document(&visit).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
    }
}

/// Returns the segments of the message's path in the API.
pub(super) fn segments(visit: &Visit) -> [&str; 6] {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    ["tenants", tenant, "consumers", consumer, "inbox", visit.param("id")]
}

/// Returns the least role that sees messages of the consumer unmasked.
async fn unmask_role(visit: &Visit) -> Result<Role, Refusal> {
    let consumer: ConsumerBody = visit.client.get(&path(&segments(visit)[..4])).await?;
    let role = consumer.policy["masking"]["role"].as_str().and_then(Role::parse);
    Ok(role.unwrap_or(Role::Admin))
}

async fn page(visit: &Visit, record: &RecordView) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let id = visit.param("id");
    let history = path(&[&segments(visit)[..], &["history"]].concat());
    let story: MessageHistoryBody = visit.client.get(&history).await?;
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
        .with_forms(forms(visit, tenant, consumer, &story, record));
    Ok(page.same_as(&["why", "--tenant", tenant, "--consumer", consumer, "--", id]))
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
    record: &RecordView,
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
    let edited = match record {
        RecordView::Unmasked(detail) if is_dead && visit.may(Role::Operator, false) => {
            editable(detail).ok()
        }
        _ => None,
    };
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
        @match record {
            RecordView::Absent => p {
                a href=(format!("{page}?payload=true")) { "Show key, headers and payload" }
            },
            RecordView::Shown(detail, role) => {
                (record_parts(detail))
                @if let Some(role) = role { (unmask_form(visit, &page, *role)) }
            },
            RecordView::Unmasked(detail) => {
                p.note { "This is shown once. The audit log has the reason." }
                (record_parts(detail))
                @if let Some(payload) = edited {
                    h2 { "Edit the payload and run it again" }
                    (payload_form(visit, &page, payload, &as_of(row.processed_at)))
                }
            },
        }
    }
}

/// Returns the form that shows a masked record unmasked.
fn unmask_form(visit: &Visit, page: &str, role: Role) -> Markup {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let words = ["inbox", "unmask", "--tenant", tenant, "--consumer", consumer];
    let words = [&words[..], &["--because", "…", "--", visit.param("id")]].concat();
    html! {
        p.note { "The policy of the consumer masks parts of the record." }
        @if visit.may(role, false) {
            form.action method="post" action=(page) {
                (form::hidden(visit))
                (input("because", "Why; kept in the audit log", "", true))
                button { "Show unmasked" }
            }
        } @else {
            p.note { "“Show unmasked” needs the role " (role) "." }
        }
        p.command { code { (command::line(words)) } }
    }
}

fn record_parts(detail: &InboxDetailBody) -> Markup {
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
