//! A deployment: its version, its progress on the hosts, and what a shadow would have done.

use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{DeploymentBody, ShadowDifferenceBody, ShadowReportBody},
};

use crate::{
    actions, form,
    html::{
        dash, digest, facts, input, number, of_consumer, of_tenant, pretty, state, table,
        text_or_dash, time,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let id = visit.param("deployment_id");
    let at = ["tenants", tenant, "consumers", consumer, "deployments", id];
    let deployment: DeploymentBody = visit.client.get(&path(&at)).await?;
    let report: Option<ShadowReportBody> = match deployment.role == "shadow" {
        true => Some(visit.client.get(&path(&[&at[..], &["differences"]].concat())).await?),
        false => None,
    };
    let body = html! {
        (about(tenant, &deployment))
        h2 { "On the hosts" }
        (on_hosts(&deployment))
        @if let Some(report) = &report { (compared(tenant, consumer, report)) }
        details { summary { "Settings and caps" } pre { (pretty(&serde_json::json!({
            "settings": deployment.settings, "limits": deployment.limits,
            "grants": deployment.grants, "retries": deployment.retries,
        }))) } }
    };
    let title = format!("{} of {}", deployment.role, deployment.event_type);
    let page = Page::new(title, body).of_consumer(tenant, consumer).live();
    let forms = forms(&visit, tenant, consumer, &deployment);
    let words = ["deployments", "--tenant", tenant, "--consumer", consumer];
    Ok(page.with_forms(forms).same_as(&words))
}

fn about(tenant: &str, deployment: &DeploymentBody) -> Markup {
    let handler = of_tenant(tenant, &["handlers", &deployment.handler]);
    let ended = match deployment.ended_at {
        Some(at) => html! {
            (time(at)) " " (deployment.ended_how.as_deref().unwrap_or_default())
            @if let Some(reason) = &deployment.ended_reason { ": " (reason) }
        },
        None => html! { (state("live")) },
    };
    facts(&[
        ("Event versions", text_or_dash(deployment.event_versions.as_deref())),
        ("Handler", html! { a href=(handler) { (deployment.handler) } }),
        ("Version", digest(&deployment.digest)),
        ("Share", html! { @match deployment.percent { Some(it) => { (it) " %" }, None => "all" } }),
        ("Live since", html! { (time(deployment.created_at)) " by " (deployment.created_by) }),
        ("Ended", ended),
    ])
}

fn on_hosts(deployment: &DeploymentBody) -> Markup {
    let rows: Vec<_> = deployment
        .hosts
        .iter()
        .map(|host| {
            html! {
                td { (host.host) }
                td { (state(&host.state)) }
                td { @if host.generation >= deployment.generation { "runs it" } @else { "not yet" } }
                td { (text_or_dash(host.error.as_deref())) }
                td { (time(host.at)) }
            }
        })
        .collect();
    let columns = ["Host", "State", "This deployment", "Error", "Reported"];
    table("Hosts", &columns, &rows, html! { "No host runs it: it has ended, or none is up." })
}

fn compared(tenant: &str, consumer: &str, report: &ShadowReportBody) -> Markup {
    let rows: Vec<_> =
        report.differences.iter().map(|it| difference(tenant, consumer, it)).collect();
    html! {
        h2 { "What it would have done" }
        (facts(&[
            ("Messages", html! { (number(report.messages)) }),
            ("The same", html! { (number(report.same)) }),
            ("Different", html! { (number(report.differ)) }),
            ("Failed alone", html! { (number(report.failed)) }),
        ]))
        @if !report.uncaptured_tables.is_empty() {
            p.callout { "Nothing is compared before these tables are captured: " (report.uncaptured_tables.join(", ")) }
        }
        (table(
            "Differences, newest first",
            &["Message", "Where", "Live", "Candidate"],
            &rows,
            html! { "No difference was found." },
        ))
    }
}

fn difference(tenant: &str, consumer: &str, it: &ShadowDifferenceBody) -> Markup {
    html! {
        td { a href=(of_consumer(tenant, consumer, &["messages", &it.message_id])) { (it.message_id) } }
        td {
            (it.change) " " (it.table) " " (it.column)
            @if let Some(key) = &it.row_key { " " code { (key) } }
            @if let Some(before) = &it.before { p.note { "before: " code { (before) } } }
        }
        td.minus { @match &it.live { Some(value) => code { (value) }, None => (dash()) } }
        td.plus { @match &it.candidate { Some(value) => code { (value) }, None => (dash()) } }
    }
}

fn forms(visit: &Visit, tenant: &str, consumer: &str, deployment: &DeploymentBody) -> Markup {
    if deployment.ended_at.is_some() {
        return html! {};
    }
    let id = deployment.deployment_id.to_string();
    let mut given = vec![
        ("tenant", tenant),
        ("consumer", consumer),
        ("event_type", deployment.event_type.as_str()),
    ];
    if let Some(versions) = &deployment.event_versions {
        given.push(("event_versions", versions));
    }
    let because = input("reason", "Why; kept with the deployment", "", false);
    let redrive = html! {
        label.check { input type="checkbox" name="redrive"; span { "run again what it failed" } }
    };
    html! {
        h2 { "Change" }
        div.actions {
            @if deployment.role == "stable" {
                div { (form::form(visit, &actions::ROLLBACK, &given, html! { (because) (redrive) })) }
            } @else {
                @let with_id = [&given[..], &[("deployment_id", &*id), ("role", &*deployment.role)]].concat();
                div { (form::form(visit, &actions::DEPLOYMENT_END, &with_id, because)) }
                @if deployment.role == "canary" {
                    @let percent = deployment.percent.map(|it| it.to_string()).unwrap_or_default();
                    div { (form::form(visit, &actions::CANARY_GROW, &with_id, input("percent", "Share, %", &percent, true))) }
                    div { (form::form(visit, &actions::CANARY_PROMOTE, &with_id, html! {})) }
                }
            }
        }
    }
}
