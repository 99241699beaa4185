//! The hosts, and the checks of their databases.

use std::time::Duration;

use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::{DoctorReport, HostBody},
};
use tokio::time::timeout;

use crate::{
    html::{state, table, time},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let hosts: Vec<HostBody> = visit.client.get(&path(&["hosts"])).await?;
    let rows: Vec<_> = hosts
        .iter()
        .map(|host| {
            html! {
                td { (host.name) }
                td { (host.version.as_deref().unwrap_or("–")) }
                td { (time(host.started_at)) }
                td { (time(host.seen_at)) }
                td { @for (name, count) in &host.consumers { (state(name)) " " (count) " " } }
            }
        })
        .collect();
    let empty = html! { "No host runs. Start one with " code { "oncebox serve" } "." };
    let columns = ["Host", "Version", "Started", "Last heartbeat", "Consumers"];
    let body = table("Hosts", &columns, &rows, empty);
    Ok(Page::new("Hosts", body).live().same_as(&["hosts"]))
}

/// Longest wait for a report. The checks go on without their page.
const REPORT_WAIT: Duration = Duration::from_millis(50);

pub(crate) async fn doctor(visit: Visit) -> Result<Page, Refusal> {
    let shared = with_query(&path(&["doctor"]), &[("shared", Some("true".to_owned()))]);
    let body = match timeout(REPORT_WAIT, visit.client.get(&shared)).await {
        Ok(report) => findings(&report?),
        Err(_) => html! {
            p { "The host checks its databases, which takes a while with many tenants. This page shows the findings when they are there." }
            p { a href="/console/doctor" { "Look again" } }
        },
    };
    Ok(Page::new("Doctor", body).live().same_as(&["doctor"]))
}

fn findings(report: &DoctorReport) -> Markup {
    let rows: Vec<_> = report
        .findings
        .iter()
        .map(|finding| {
            html! {
                td { (state(&finding.severity)) }
                td { (finding.check) }
                td { (finding.place) }
                td {
                    (finding.found)
                    @if let Some(advice) = &finding.advice { p.note { (advice) } }
                    @if let Some(sql) = &finding.sql { pre { (sql) } }
                }
            }
        })
        .collect();
    html! {
        p { (report.errors) " errors, " (report.warnings) " warnings, " (report.unknown) " without a result." }
        p.note { "Checked " (time(report.checked_at)) "; the page has new findings after five minutes, the command at once." }
        (table("Findings", &["Severity", "Check", "Database", "Found"], &rows, html! { "No check ran." }))
    }
}
