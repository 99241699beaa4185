//! The messages of an inbox, by any filter, and actions on all that match.

use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::InboxRowBody,
};
use oncebox_model::MessageStatus;

use crate::{
    command::option,
    fields::Fields,
    html::{
        choice, digest, input, message_status, of_consumer, of_tenant, table, text_or_dash, time,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// Number of messages on a page.
const ROWS: usize = 50;

/// Fields of the filter, with their labels.
const FILTER: [(&str, &str); 7] = [
    ("reason", "Reason"),
    ("event_type", "Event type"),
    ("key", "Ordering key"),
    ("error", "Error contains"),
    ("version", "Version begins with"),
    ("since", "Received since (RFC 3339)"),
    ("until", "Received before"),
];

/// Returns the filter of a query, as parameters.
fn filter(query: &Fields) -> Vec<(&'static str, Option<String>)> {
    let names = FILTER.iter().map(|(name, _)| *name);
    ["status"].into_iter().chain(names).map(|n| (n, query.get(n).map(str::to_owned))).collect()
}

pub(crate) async fn list(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let filter = filter(&visit.query);
    let mut query = filter.clone();
    query.push(("after", visit.query.get("after").map(str::to_owned)));
    query.push(("limit", Some(ROWS.to_string())));
    let inbox = path(&["tenants", tenant, "consumers", consumer, "inbox"]);
    let messages: Vec<InboxRowBody> = visit.client.get(&with_query(&inbox, &query)).await?;
    let rows: Vec<_> = messages.iter().map(|row| message(tenant, consumer, row)).collect();
    let columns = ["Message", "Status", "Event type", "Runs", "Received", "Version", "Last error"];
    let is_filtered = filter.iter().any(|(_, value)| value.is_some());
    let body = html! {
        (table("Messages, newest first", &columns, &rows, empty(is_filtered)))
        @if messages.len() == ROWS { (next(tenant, consumer, &filter, messages.last())) }
    };
    let words = command(tenant, consumer, &filter);
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let page = Page::new("Messages", body).of_consumer(tenant, consumer).same_as(&words);
    // A page that is not the first would move under the reader.
    let page = if visit.query.get("after").is_none() { page.live() } else { page };
    Ok(page.with_forms(forms(&visit, tenant, consumer, &filter)))
}

fn empty(is_filtered: bool) -> Markup {
    html! {
        @if is_filtered { "No message matches the filter." }
        @else {
            "No message came yet. " code { "oncebox send" }
            " publishes the messages of a file; the page of the consumer says whether a host runs it."
        }
    }
}

fn message(tenant: &str, consumer: &str, row: &InboxRowBody) -> Markup {
    html! {
        td { a href=(of_consumer(tenant, consumer, &["messages", &row.message_id])) { (crate::html::cut(&row.message_id)) } }
        td {
            (message_status(row.status))
            @if let Some(reason) = &row.reason { " " (reason) }
        }
        td { (text_or_dash(row.event_type.as_deref())) }
        td.number { (row.attempts) }
        td { (time(row.received_at)) }
        td { @match &row.version { Some(version) => (digest(version)), None => (crate::html::dash()) } }
        td { (text_or_dash(row.last_error.as_deref())) }
    }
}

fn next(
    tenant: &str,
    consumer: &str,
    filter: &[(&'static str, Option<String>)],
    last: Option<&InboxRowBody>,
) -> Markup {
    let Some(last) = last else { return html! {} };
    let at = last.received_at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
    let mut query = filter.to_vec();
    query.push(("after", Some(format!("{at},{}", last.message_id))));
    let page = with_query(&of_consumer(tenant, consumer, &["messages"]), &query);
    html! { p { a href=(page) rel="next" { "Older messages" } } }
}

fn command(tenant: &str, consumer: &str, filter: &[(&'static str, Option<String>)]) -> Vec<String> {
    let mut words: Vec<_> =
        ["inbox", "list", "--tenant", tenant, "--consumer", consumer].map(str::to_owned).into();
    for (name, value) in filter {
        if let Some(value) = value {
            words.extend(option(name, value));
        }
    }
    words
}

fn forms(
    visit: &Visit,
    tenant: &str,
    consumer: &str,
    filter: &[(&'static str, Option<String>)],
) -> Markup {
    let given = |name: &str| visit.query.get(name).unwrap_or_default();
    html! {
        h2 { "Filter" }
        form.filter method="get" action=(of_consumer(tenant, consumer, &["messages"])) role="search" {
            (choice("status", "Status", &MessageStatus::NAMES, given("status")))
            @for (name, label) in FILTER { (input(name, label, given(name), false)) }
            button { "Filter" }
        }
        h2 { "Act on everything that matches" }
        p {
            @for (action, label) in [("redrive", "Redrive…"), ("retry", "Retry now…"), ("discard", "Discard…")] {
                @let query = [&[("action", Some(action.to_owned())), ("consumer", Some(consumer.to_owned()))], filter].concat();
                a href=(with_query(&of_tenant(tenant, &["jobs", "new"]), &query)) { (label) } " "
            }
        }
        p.note { "The next page counts what matches and asks why. A job actions, page by page, on the hosts." }
    }
}
