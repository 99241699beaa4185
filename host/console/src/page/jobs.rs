//! Jobs: actions on many messages, which hosts carry out.

use axum::http::Method;
use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{JobBody, JobEstimateBody, Role},
};

use super::tenant::tabs;
use crate::{
    actions,
    fields::Fields,
    form,
    html::{
        facts, input, number, of_consumer, of_tenant, pretty, state, table, text_or_dash, time,
        time_or_dash,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn list(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant");
    let jobs: Vec<JobBody> = visit.client.get(&path(&["tenants", tenant, "jobs"])).await?;
    let rows: Vec<_> = jobs
        .iter()
        .map(|job| {
            html! {
                td { a href=(of_tenant(tenant, &["jobs", &job.job_id.to_string()])) { (job.job_id) } }
                td { (job.action) }
                td { (text_or_dash(job.consumer.as_deref())) }
                td { (state(&job.state)) }
                td.number { (number(job.changed)) " of " (estimate(job)) }
                td { (job.actor) }
                td { (text_or_dash(Some(&job.reason))) }
                td { (time(job.began_at)) }
            }
        })
        .collect();
    let columns = ["Job", "Action", "Consumer", "State", "Changed", "By", "Because", "Began"];
    let empty = html! {
        "No job ran yet. The page of a consumer's messages starts one on everything that matches a \
            filter."
    };
    let body =
        html! { (tabs(tenant, "jobs")) (table("Jobs, newest first", &columns, &rows, empty)) };
    let page = Page::new("Jobs", body).of_tenant(tenant).live();
    Ok(page.same_as(&["job", "list", "--tenant", tenant]))
}

/// Returns the number of messages that a job was to change.
fn estimate(job: &JobBody) -> Markup {
    html! { @if !job.is_counted_whole { "at least " } (number(job.estimate)) }
}

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, id) = (visit.param("tenant"), visit.param("job_id"));
    let job: JobBody = visit.client.get(&path(&["tenants", tenant, "jobs", id])).await?;
    let left_out: Vec<_> = job
        .left_out
        .iter()
        .map(|(reason, count)| html! { td { (reason) } td.number { (number(*count)) } })
        .collect();
    let consumer = match &job.consumer {
        Some(consumer) => html! { a href=(of_consumer(tenant, consumer, &[])) { (consumer) } },
        None => html! { "every consumer" },
    };
    let rate = match job.rate {
        Some(rate) => html! { "at most " (number(rate.into())) " a second" },
        None => html! { "no limit" },
    };
    let body = html! {
        @if let Some(note) = &job.note { p.refusal role="alert" { (note) } }
        @if job.ended_at.is_none() && job.estimate > 0 {
            progress max=(job.estimate) value=(job.changed.min(job.estimate)) aria-label="Changed of those that were counted" {}
        }
        (facts(&[
            ("State", state(&job.state)),
            ("Changed", html! { (number(job.changed)) " of " (estimate(&job)) }),
            ("Consumer", consumer),
            ("Rate", rate),
            ("By", html! { (job.actor) }),
            ("Because", html! { (job.reason) }),
            ("Began", time(job.began_at)),
            ("Ended", time_or_dash(job.ended_at)),
            ("Pass", html! { (job.pass) }),
            ("Host", text_or_dash(job.host.as_deref())),
        ]))
        h2 { "Left out by the last pass" }
        (table("Left out", &["Reason", "Messages"], &left_out, html! { "Nothing was left out." }))
        details { summary { "Filter" } pre { (filter(&job)) } }
    };
    let given = [("tenant", tenant), ("job_id", id)];
    let forms = html! {
        @if job.ended_at.is_none() {
            h2 { "Steer" }
            div.actions {
                @if job.state == "paused" { div { (form::form(&visit, &actions::JOB_RESUME, &given, html! {})) } }
                @else { div { (form::form(&visit, &actions::JOB_PAUSE, &given, html! {})) } }
                div { (form::form(&visit, &actions::JOB_CANCEL, &given, html! {})) }
            }
        }
    };
    let title = format!("{} {id}", job.action);
    let page =
        Page::new(title, body).of_tenant(tenant).below("jobs", &of_tenant(tenant, &["jobs"]));
    Ok(page.live().with_forms(forms).same_as(&["job", "show", "--tenant", tenant, id]))
}

/// Returns the filter of a job, without what it does not ask for.
fn filter(job: &JobBody) -> String {
    let mut filter = serde_json::to_value(&job.filter).unwrap_or_default();
    if let Some(members) = filter.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    pretty(&filter)
}

/// Counts what matches, and asks why.
pub(crate) async fn new(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant").to_owned();
    let mut fields = Fields(vec![("tenant".to_owned(), tenant.clone())]);
    for name in ["action", "consumer"].into_iter().chain(actions::JOB_FILTER) {
        if let Some(value) = visit.query.get(name) {
            fields.0.push((name.to_owned(), value.to_owned()));
        }
    }
    let action = fields.need("action")?.to_owned();
    let estimate = estimated(&visit, &tenant, &fields).await?;
    let filters: Vec<_> = fields
        .0
        .iter()
        .filter(|(name, _)| actions::JOB_FILTER.contains(&name.as_str()))
        .map(|(name, value)| html! { td { (name) } td { (value) } })
        .collect();
    let body = html! {
        (estimate)
        h2 { "Filter" }
        (table("Filter", &["Field", "Value"], &filters, html! { "Everything that the action can be done with." }))
    };
    let given: Vec<_> = fields.0.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    let inputs = html! {
        (input("because", "Why; kept with each message and in the audit log", "", true))
        (input("rate", "Messages a second at most", "", false))
    };
    let forms = form::form(&visit, &actions::JOB_START, &given, inputs);
    let title = match fields.get("consumer") {
        Some(consumer) => format!("{} messages of {consumer}", action.replace('_', " ")),
        None => format!("{} messages", action.replace('_', " ")),
    };
    let page =
        Page::new(title, body).of_tenant(&tenant).below("jobs", &of_tenant(&tenant, &["jobs"]));
    Ok(page.with_forms(forms))
}

/// Returns the number of messages that match, where the visitor may know and it can be counted.
async fn estimated(visit: &Visit, tenant: &str, fields: &Fields) -> Result<Markup, Refusal> {
    let mut counted = fields.clone();
    // An estimate changes nothing, so that nobody keeps its reason.
    counted.0.push(("because".to_owned(), "estimate".to_owned()));
    let body = actions::new_job(&counted)?;
    let path = path(&["tenants", tenant, "jobs", "estimate"]);
    let is_of_tenant = visit.principal().tenant().is_none_or(|own| own == tenant);
    let is_viewer = is_of_tenant && !visit.may(Role::Operator, false);
    match visit.client.send::<JobEstimateBody>(Method::POST, &path, &body).await {
        Ok(estimate) => Ok(html! {
            p.callout {
                @if !estimate.is_counted_whole { "At least " }
                (number(estimate.messages)) " messages match at present. The job acts on those that match when it comes to them."
            }
        }),
        // A job works without an estimate, and a viewer may look at its form.
        Err(refusal) if refusal.status.is_server_error() || is_viewer => {
            Ok(html! { p.callout { "Not counted: " (refusal.detail) } })
        }
        Err(refusal) => Err(refusal),
    }
}
