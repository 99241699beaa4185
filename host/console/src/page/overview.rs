//! All tenants, and what is wrong on the hosts at present.

use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{HostBody, TenantBody},
};

use crate::{
    html::{cut, of_consumer, of_tenant, state, table, time},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// Largest number of tenants on a page.
const TENANTS_MAX: usize = 100;

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    if let Some(tenant) = visit.principal().tenant() {
        let tenant = tenant.to_owned();
        return super::tenant::of(visit, &tenant).await;
    }
    let tenants: Vec<TenantBody> = visit.client.get(&path(&["tenants"])).await?;
    let hosts: Vec<HostBody> = visit.client.get(&path(&["hosts"])).await?;
    let wanted = visit.query.get("name").unwrap_or_default();
    let found: Vec<_> = tenants.iter().filter(|tenant| tenant.name.contains(wanted)).collect();
    let rows: Vec<_> = found.iter().take(TENANTS_MAX).map(|tenant| row(tenant)).collect();
    let body = html! {
        (failing(&hosts))
        h2 { "Tenants" }
        (table("Tenants", &["Name", "State", "Database", "Messages a second", "Since"], &rows, empty(wanted)))
        @if found.len() > rows.len() {
            p.note { (rows.len()) " of " (found.len()) " are shown; filter by name to see the others." }
        }
    };
    let forms = html! {
        form.filter method="get" action="/console" role="search" {
            (crate::html::input("name", "Name contains", wanted, false))
            button.quiet { "Filter" }
        }
    };
    Ok(Page::new("Tenants", body).live().with_forms(forms).same_as(&["tenant", "list"]))
}

fn empty(wanted: &str) -> Markup {
    html! {
        @if wanted.is_empty() {
            "There is no tenant yet. Create one with " code { "oncebox tenant create <name>" }
            ", or write all that you need into a file for " code { "oncebox apply -f" } "."
        } @else {
            "No tenant has “" (wanted) "” in its name."
        }
    }
}

fn row(tenant: &TenantBody) -> Markup {
    html! {
        td { a href=(of_tenant(&tenant.name, &[])) { (tenant.name) } }
        td { (state(&tenant.state)) }
        td { @match &tenant.database { Some(database) => (database), None => "the host's" } }
        td {
            @match tenant.limits.messages_per_second {
                Some(limit) => { "at most " (limit) },
                None => "no limit",
            }
        }
        td { (time(tenant.created_at)) }
    }
}

/// Returns the hosts, and the consumers that fail on them.
fn failing(hosts: &[HostBody]) -> Markup {
    let failing = hosts.iter().flat_map(|host| host.failing.iter().map(move |it| (host, it)));
    let rows: Vec<_> = failing
        .map(|(host, it)| {
            html! {
                td { a href=(of_consumer(&it.tenant, &it.consumer, &[])) { (it.tenant) " / " (it.consumer) } }
                td { (host.name) }
                td { (cut(it.error.as_deref().unwrap_or("no reason was given"))) }
            }
        })
        .collect();
    html! {
        @if hosts.is_empty() {
            p.refusal role="alert" {
                "No host runs: messages wait at the broker. Start one with "
                code { "oncebox serve" } "."
            }
        } @else {
            p { a href="/console/hosts" { (hosts.len()) @if hosts.len() == 1 { " host runs" } @else { " hosts run" } } "." }
        }
        @if !rows.is_empty() {
            h2 { "Consumers that fail" }
            (table("Consumers that fail", &["Consumer", "Host", "Error"], &rows, html! {}))
        }
    }
}
