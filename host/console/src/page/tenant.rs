//! A tenant: its consumers with their backlogs, and its limits.

use futures::{StreamExt, stream};
use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{ConsumerBody, InboxStats, TenantBody},
};
use oncebox_model::MessageStatus;

use crate::{
    actions, form,
    html::{
        Tone, badge, dash, duration, facts, input, link, number, of_consumer, of_tenant, state,
        table, text_or_dash, time,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// Largest number of consumers whose open messages a page counts.
const COUNTED_MAX: usize = 50;

/// Number of these counts at a time.
const COUNTS_AT_A_TIME: usize = 4;

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant").to_owned();
    of(visit, &tenant).await
}

/// Returns the page of a tenant.
pub(crate) async fn of(visit: Visit, name: &str) -> Result<Page, Refusal> {
    let tenant: TenantBody = visit.client.get(&path(&["tenants", name])).await?;
    let consumers: Vec<ConsumerBody> =
        visit.client.get(&path(&["tenants", name, "consumers"])).await?;
    let mut counts = Vec::new();
    for consumer in consumers.iter().take(COUNTED_MAX) {
        let path = path(&["tenants", name, "consumers", &consumer.name, "backlog"]);
        let client = visit.client.clone();
        counts.push(async move { client.get::<InboxStats>(&path).await });
    }
    // An open page that looks again takes one connection of the database.
    let at_a_time = if visit.client.is_refresh { 1 } else { COUNTS_AT_A_TIME };
    let counted: Vec<_> = stream::iter(counts).buffered(at_a_time).collect().await;
    let rows: Vec<_> = consumers
        .iter()
        .enumerate()
        .map(|(index, consumer)| consumer_row(name, consumer, counted.get(index)))
        .collect();
    let columns =
        ["Name", "State", "On hosts", "To run", "Oldest", "Dead letters", "Parked", "Alerts"];
    let empty = html! {
        "There is no consumer yet. Write its policy, then "
        code { "oncebox consumer create --tenant " (name) " <name> --policy <file>" } "."
    };
    let body = html! {
        (tabs(name, "consumers"))
        (facts(&[
            ("State", state(&tenant.state)),
            ("Database", html! { @match &tenant.database { Some(it) => (it), None => "the host's" } }),
            ("Schema", html! { (tenant.schema_name) }),
            ("Since", time(tenant.created_at)),
        ]))
        h2 { "Consumers" }
        (table("Consumers", &columns, &rows, empty))
    };
    let switch = if tenant.state == "suspended" {
        &actions::TENANT_RESUME
    } else {
        &actions::TENANT_SUSPEND
    };
    let forms = html! {
        h2 { "Tenant" }
        div.actions {
            div { (form::form(&visit, switch, &[("tenant", name)], html! {})) }
            div { (form::form(&visit, &actions::TENANT_ROTATE, &[("tenant", name)], html! {})) }
        }
    };
    let mut page = Page::new(name, body).live().with_forms(forms);
    if visit.principal().tenant().is_none() {
        page = page.below("Tenants", &link(&[]));
    }
    Ok(page.same_as(&["consumer", "list", "--tenant", name]))
}

/// Returns the links to the pages of a tenant.
pub(crate) fn tabs(tenant: &str, here: &str) -> Markup {
    let tabs = [
        ("consumers", "Consumers", of_tenant(tenant, &[])),
        ("handlers", "Handlers", of_tenant(tenant, &["handlers"])),
        ("outgoing", "Outgoing", of_tenant(tenant, &["outgoing"])),
        ("jobs", "Jobs", of_tenant(tenant, &["jobs"])),
        ("limits", "Limits", of_tenant(tenant, &["limits"])),
        ("audit", "Audit", of_tenant(tenant, &["audit"])),
        ("tokens", "Tokens", of_tenant(tenant, &["tokens"])),
    ];
    html! {
        nav aria-label="Pages of the tenant" {
            ul.tabs {
                @for (name, label, path) in tabs {
                    li { a href=(path) aria-current=[(name == here).then_some("page")] { (label) } }
                }
            }
        }
    }
}

fn consumer_row(
    tenant: &str,
    consumer: &ConsumerBody,
    counted: Option<&Result<InboxStats, Refusal>>,
) -> Markup {
    let stats = counted.and_then(|counted| counted.as_ref().ok());
    let of_status = |status: MessageStatus| -> Option<i64> {
        let open = &stats?.open;
        Some(open.iter().filter(|it| it.status == status).map(|it| it.messages).sum())
    };
    let messages = |status: MessageStatus| {
        let page = of_consumer(tenant, &consumer.name, &["messages"]);
        html! {
            td.number {
                @match of_status(status) {
                    Some(0) => "0",
                    Some(count) => a href=(format!("{page}?status={status}")) { (number(count)) },
                    None => (dash()),
                }
            }
        }
    };
    html! {
        td { a href=(of_consumer(tenant, &consumer.name, &[])) { (consumer.name) } }
        td {
            (state(&consumer.state))
            @if consumer.quarantine.is_some() { " " (badge(Tone::Bad, "quarantined")) }
            @if consumer.seek.is_some() { " " (badge(Tone::Wait, "seeking")) }
        }
        td { @for host in &consumer.hosts { (state(&host.state)) " " } }
        td.number { @match stats { Some(stats) => (number(stats.pending)), None => (dash()) } }
        td {
            @match stats.and_then(|stats| stats.oldest_pending_age_s) {
                Some(age) => (duration(age)),
                None => (dash()),
            }
        }
        (messages(MessageStatus::FailedTerminal))
        (messages(MessageStatus::Parked))
        td {
            @match counted {
                Some(Ok(stats)) if stats.alerts.is_empty() => (dash()),
                Some(Ok(stats)) => { @for alert in &stats.alerts { (badge(Tone::Bad, &alert.alert)) " " } },
                Some(Err(refusal)) => (badge(Tone::Bad, &refusal.detail)),
                None => (text_or_dash(None)),
            }
        }
    }
}

pub(crate) async fn limits(visit: Visit) -> Result<Page, Refusal> {
    let name = visit.param("tenant");
    let tenant: TenantBody = visit.client.get(&path(&["tenants", name])).await?;
    let limits = serde_json::to_value(&tenant.limits).unwrap_or_default();
    let fields = html! {
        @for limit in actions::LIMITS {
            (input(limit, &limit.replace('_', " "), &limits[limit].as_u64().map(|n| n.to_string()).unwrap_or_default(), limit == "weight"))
        }
    };
    let list = |items: &Option<Vec<String>>, none: &str| {
        let text = items.as_ref().map(|items| items.join(", "));
        html! { (text.as_deref().unwrap_or(none)) }
    };
    let body = html! {
        (tabs(name, "limits"))
        (facts(&[
            ("Topics", list(&tenant.limits.topics_allowed, &format!("oncebox.{name}.*"))),
            ("Destinations", list(&tenant.limits.destinations_allowed, "none")),
            ("Hosts of endpoints", list(&tenant.limits.endpoint_hosts_allowed, "none")),
            ("Longest retention", text_or_dash(tenant.limits.retention_max.as_deref())),
        ]))
    };
    let forms = html! {
        h2 { "What each host gives the tenant" }
        p.note { "An empty field stands for the host's own bound." }
        (form::form(&visit, &actions::TENANT_LIMITS, &[("tenant", name)], fields))
    };
    let page = Page::new("Limits", body).of_tenant(name).with_forms(forms);
    Ok(page.same_as(&["tenant", "limits", name]))
}
