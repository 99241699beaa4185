//! The hosts, and the checks of their databases.

use maud::html;
use oncebox_api::{
    link::path,
    wire::{DoctorReport, HostBody},
};

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
                td { (time(host.started_at)) }
                td { (time(host.seen_at)) }
                td { @for (name, count) in &host.consumers { (state(name)) " " (count) " " } }
            }
        })
        .collect();
    let empty = html! { "No host runs. Start one with " code { "oncebox serve" } "." };
    let columns = ["Host", "Started", "Last heartbeat", "Consumers"];
    let body = table("Hosts", &columns, &rows, empty);
    Ok(Page::new("Hosts", body).live().same_as(&["hosts"]))
}

pub(crate) async fn doctor(visit: Visit) -> Result<Page, Refusal> {
    let report: DoctorReport = visit.client.get(&path(&["doctor"])).await?;
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
    let body = html! {
        p { (report.errors) " errors, " (report.warnings) " warnings, " (report.unknown) " without a result." }
        (table("Findings", &["Severity", "Check", "Database", "Found"], &rows, html! { "No check ran." }))
    };
    Ok(Page::new("Doctor", body).same_as(&["doctor"]))
}
