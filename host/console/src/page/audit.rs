//! The audit log.

use maud::html;
use oncebox_api::{
    link::{path, with_query},
    wire::AuditEntryBody,
};

use crate::{
    html::{dash, of_tenant as tenant_page, pretty, table, time},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// Number of entries on the page.
const ENTRIES: &str = "100";

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let body = entries(&visit, path(&["audit"])).await?;
    Ok(Page::new("Audit", body).live().same_as(&["audit", "--limit", ENTRIES]))
}

pub(crate) async fn of_tenant(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant");
    let body = entries(&visit, path(&["tenants", tenant, "audit"])).await?;
    let page = Page::new("Audit", body).of_tenant(tenant).live();
    Ok(page.same_as(&["audit", "--tenant", tenant, "--limit", ENTRIES]))
}

async fn entries(visit: &Visit, path: String) -> Result<maud::Markup, Refusal> {
    let path = with_query(&path, &[("limit", Some(ENTRIES.to_owned()))]);
    let entries: Vec<AuditEntryBody> = visit.client.get(&path).await?;
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            html! {
                td { (time(entry.at)) }
                td { (entry.actor) }
                td { (entry.action) }
                td {
                    @match &entry.tenant {
                        Some(tenant) => a href=(tenant_page(tenant, &[])) { (tenant) },
                        None => (dash()),
                    }
                }
                td { (entry.subject) }
                td { details { summary { "details" } pre { (pretty(&entry.details)) } } }
            }
        })
        .collect();
    let columns = ["Time", "Who", "Did what", "Tenant", "Subject", "Details"];
    Ok(table("Changes, newest first", &columns, &rows, html! { "Nothing was changed yet." }))
}
