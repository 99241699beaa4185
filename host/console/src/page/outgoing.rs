//! Outgoing messages and endpoints.

use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::{EndpointBody, OutgoingCountBody, OutgoingDetailBody, OutgoingRowBody},
};

use super::tenant::tabs;
use crate::{
    action, actions, form,
    html::{
        bytes, dash, facts, input, number, of_consumer, of_tenant, outgoing_status, state, table,
        text_or_dash, time, time_or_dash,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// Number of messages on a page.
const ROWS: usize = 50;

/// Fields of the filter, with their labels.
const FILTER: [(&str, &str); 4] = [
    ("consumer", "Consumer"),
    ("status", "Status"),
    ("destination", "Destination"),
    ("cause", "Caused by message"),
];

pub(crate) async fn list(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant");
    let at = |rest: &[&str]| path(&[&["tenants", tenant], rest].concat());
    let counts: Vec<OutgoingCountBody> = visit.client.get(&at(&["outgoing", "stats"])).await?;
    let endpoints: Vec<EndpointBody> = visit.client.get(&at(&["endpoints"])).await?;
    let filter: Vec<_> =
        FILTER.iter().map(|(name, _)| (*name, visit.query.get(name).map(str::to_owned))).collect();
    let mut query = filter.clone();
    query.push(("after", visit.query.get("after").map(str::to_owned)));
    query.push(("limit", Some(ROWS.to_string())));
    let messages: Vec<OutgoingRowBody> =
        visit.client.get(&with_query(&at(&["outgoing"]), &query)).await?;
    let next = messages.last().filter(|_| messages.len() == ROWS).map(|last| {
        let query = [&filter[..], &[("after", Some(last.position.to_string()))]].concat();
        with_query(&of_tenant(tenant, &["outgoing"]), &query)
    });
    let body = html! {
        (tabs(tenant, "outgoing"))
        h2 { "Still to be sent, or parked" }
        (counted(tenant, &counts))
        @if !endpoints.is_empty() { h2 { "Endpoints" } (listed(&endpoints)) }
        h2 { "Messages" }
        (rows(tenant, &messages, html! { "No handler emitted a message that matches." }))
        @if let Some(next) = next { p { a href=(next) rel="next" { "Older messages" } } }
    };
    let forms = forms(&visit, tenant, &filter, &endpoints);
    let page = Page::new("Outgoing", body).of_tenant(tenant).live().with_forms(forms);
    Ok(page.same_as(&["outgoing", "stats", "--tenant", tenant]))
}

fn counted(tenant: &str, counts: &[OutgoingCountBody]) -> Markup {
    let rows: Vec<_> = counts
        .iter()
        .map(|count| {
            let query = [
                ("consumer", Some(count.consumer.clone())),
                ("status", Some(count.status.to_string())),
                ("destination", Some(count.destination.clone())),
            ];
            let page = with_query(&of_tenant(tenant, &["outgoing"]), &query);
            html! {
                td { (count.destination) @if let Some(breaker) = &count.breaker { " " (state(breaker)) } }
                td { (count.consumer) }
                td { (outgoing_status(count.status)) " " (count.reason.as_deref().unwrap_or_default()) }
                td.number { a href=(page) { (number(count.messages)) } }
                td.number { (number(count.due)) }
                td { (time(count.oldest_due_at)) }
            }
        })
        .collect();
    let columns = ["Destination", "Consumer", "Status", "Messages", "Due", "Earliest due"];
    table("Counts by destination", &columns, &rows, html! { "Everything was sent." })
}

fn listed(endpoints: &[EndpointBody]) -> Markup {
    let rows: Vec<_> = endpoints
        .iter()
        .map(|endpoint| {
            html! {
                td { (endpoint.name) }
                td { (endpoint.method) " " (endpoint.origin) }
                td { (endpoint.answer) }
                td {
                    @if endpoint.breakers.is_empty() { (state("ok")) }
                    @for breaker in &endpoint.breakers {
                        (state(&breaker.state)) " on " (breaker.host) ", " (breaker.failures) " failures "
                    }
                }
                td { (time(endpoint.set_at)) " by " (endpoint.set_by) }
            }
        })
        .collect();
    table("Endpoints", &["Name", "Origin", "Answers", "Breakers", "Set"], &rows, html! {})
}

/// Returns a table of outgoing messages.
pub(crate) fn rows(tenant: &str, messages: &[OutgoingRowBody], empty: Markup) -> Markup {
    let rows: Vec<_> = messages
        .iter()
        .map(|row| {
            html! {
                td { a href=(page_of(tenant, row)) { (crate::html::cut(&row.id)) } }
                td { (row.destination) }
                td { (row.event_type) }
                td { (outgoing_status(row.status)) " " (row.reason.as_deref().unwrap_or_default()) }
                td.number { (row.attempts) }
                td { (time(row.due_at)) }
                td { (text_or_dash(row.last_error.as_deref())) }
            }
        })
        .collect();
    let columns = ["Message", "Destination", "Type", "Status", "Attempts", "Due", "Last error"];
    table("Outgoing messages, newest first", &columns, &rows, empty)
}

/// Returns the page of an outgoing message. With consumer and cause it is found by key.
fn page_of(tenant: &str, row: &OutgoingRowBody) -> String {
    let query = [("consumer", Some(row.consumer.clone())), ("cause", Some(row.cause.clone()))];
    with_query(&of_tenant(tenant, &["outgoing", &row.id]), &query)
}

fn forms(
    visit: &Visit,
    tenant: &str,
    filter: &[(&str, Option<String>)],
    endpoints: &[EndpointBody],
) -> Markup {
    html! {
        h2 { "Filter" }
        form.filter method="get" action=(of_tenant(tenant, &["outgoing"])) role="search" {
            @for (name, label) in FILTER {
                (input(name, label, visit.query.get(name).unwrap_or_default(), false))
            }
            button { "Filter" }
        }
        h2 { "Act on everything that matches" }
        p {
            @for (action, label) in [("outgoing_redrive", "Send now…"), ("outgoing_discard", "Discard…")] {
                @let query = [&[("action", Some(action.to_owned()))], filter].concat();
                a href=(with_query(&of_tenant(tenant, &["jobs", "new"]), &query)) { (label) } " "
            }
        }
        @for endpoint in endpoints {
            h3 { "Endpoint " (endpoint.name) }
            (form::form(visit, &actions::ENDPOINT_TEST, &[("tenant", tenant), ("endpoint", &endpoint.name)], html! {}))
        }
    }
}

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, id) = (visit.param("tenant"), visit.param("id"));
    let given = |name: &'static str| (name, visit.query.get(name).map(str::to_owned));
    let query = [given("consumer"), given("cause"), given("payload")];
    let at = with_query(&path(&["tenants", tenant, "outgoing", "messages", id]), &query);
    let detail: OutgoingDetailBody = visit.client.get(&at).await?;
    let row = &detail.row;
    let cause = of_consumer(tenant, &row.consumer, &["messages", &row.cause]);
    let body = html! {
        (facts(&[
            ("Status", html! { (outgoing_status(row.status)) " " (row.reason.as_deref().unwrap_or_default()) }),
            ("Destination", html! { (row.destination) }),
            ("Caused by", html! { a href=(cause) { (row.cause) } " of " (row.consumer) }),
            ("Attempts", html! { (row.attempts) @if row.may_have_arrived { ", may have arrived" } }),
            ("Due", time(row.due_at)),
            ("Next attempt", time_or_dash(row.next_attempt_at)),
            ("Settled", time_or_dash(row.settled_at)),
            ("Payload", html! { @match row.payload_bytes { Some(it) => (bytes(it.into())), None => "not kept" } }),
            ("Correlation", html! { (row.correlation_id) }),
            ("Answer", html! { @match row.answer_status { Some(it) => (it), None => (dash()) } }),
        ]))
        @if let Some(error) = &row.last_error { h2 { "Last error" } pre { (error) } }
        @if detail.masked { p.note { "The policy of the consumer masks parts of this." } }
        @if let Some(payload) = &detail.payload { h2 { "Payload" } pre { (payload) } }
        @if let Some(answer) = &detail.answer { h2 { "Answer of the endpoint" } pre { (answer) } }
    };
    let because = || input("because", "Why; kept in the audit log", "", true);
    let job = |action: &'static str, label: &'static str| {
        let given =
            [("tenant", tenant), ("consumer", &*row.consumer), ("action", action), ("id", id)];
        form::form(&visit, &action::Action { label, ..actions::JOB_START }, &given, because())
    };
    let forms = html! {
        @if row.settled_at.is_none() {
            h2 { "Act on it" }
            div.actions {
                div { (job("outgoing_redrive", "Send now")) }
                div { (job("outgoing_discard", "Discard")) }
            }
        }
        @if detail.payload.is_none() {
            p { a href=(format!("{}&payload=true", page_of(tenant, row))) { "Show key, headers and payload" } }
        }
    };
    let page =
        Page::new(id, body).of_tenant(tenant).below("outgoing", &of_tenant(tenant, &["outgoing"]));
    Ok(page.live().with_forms(forms).same_as(&["outgoing", "show", "--tenant", tenant, "--", id]))
}
