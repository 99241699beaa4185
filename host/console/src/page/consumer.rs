//! A consumer: its state on the hosts, its open messages, its deployments and its policy.

use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::{ConsumerBody, DeploymentBody, InboxStats, ReplayBody},
};
use oncebox_model::policy::Policy;

use crate::{
    actions, form,
    html::{
        Tone, badge, dash, digest, duration, facts, message_status, number, of_consumer, pretty,
        state, table, text_or_dash, time,
    },
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, name) = (visit.param("tenant"), visit.param("consumer"));
    let at = |rest: &[&str]| path(&[&["tenants", tenant, "consumers", name], rest].concat());
    let consumer: ConsumerBody = visit.client.get(&at(&[])).await?;
    // What is in the tenant's database is missing while that is away; the rest says why.
    let stats = Refusal::unless_away(visit.client.get(&at(&["backlog"])).await)?;
    let stats: Option<&InboxStats> = stats.as_ref();
    let deployments: Vec<DeploymentBody> = visit.client.get(&at(&["deployments"])).await?;
    let replays =
        with_query(&path(&["tenants", tenant, "replays"]), &[("consumer", Some(name.to_owned()))]);
    let replays = Refusal::unless_away(visit.client.get(&replays).await)?;
    let replays: Vec<ReplayBody> = replays.unwrap_or_default();
    let body = html! {
        (warnings(&consumer, stats))
        (figures(&consumer, stats))
        p {
            a href=(of_consumer(tenant, name, &["messages"])) { "All messages" } " · "
            a href=(of_consumer(tenant, name, &["failures"])) { "Failures by their cause" } " · "
            a href=(of_consumer(tenant, name, &["lag"])) { "Lag by partition" }
        }
        h2 { "Open messages" }
        @match stats {
            Some(stats) => (open(tenant, name, stats)),
            None => p.refusal role="alert" {
                "The database of its inbox does not answer, so that nothing of it runs. It goes on by itself when the database is back."
            },
        }
        h2 { "Deployments" }
        (deployed(tenant, name, &deployments))
        h2 { "On the hosts" }
        (on_hosts(&consumer))
        @if !replays.is_empty() {
            h2 { "Replays" }
            (replayed(&replays))
        }
    };
    let page = Page::new(name, body).of_tenant(tenant).live();
    let page = page.with_forms(forms(&visit, &consumer, &replays));
    Ok(page.same_as(&["consumer", "show", "--tenant", tenant, name]))
}

fn warnings(consumer: &ConsumerBody, stats: Option<&InboxStats>) -> Markup {
    html! {
        @if consumer.tenant_state != "active" {
            p.refusal role="alert" { "The tenant is " (consumer.tenant_state) "; its consumers do not run." }
        }
        @if let Some(quarantine) = &consumer.quarantine {
            p.refusal role="alert" { (quarantine.text) }
        }
        @for alert in stats.into_iter().flat_map(|stats| &stats.alerts) {
            p.refusal role="alert" {
                (alert.alert) ": " (alert.value) ", and the policy's bound is " (alert.bound) "."
            }
        }
    }
}

fn figures(consumer: &ConsumerBody, stats: Option<&InboxStats>) -> Markup {
    let oldest = match stats.and_then(|stats| stats.oldest_pending_age_s) {
        Some(age) => html! { (duration(age)) },
        None => dash(),
    };
    let duplicates = match &consumer.duplicates {
        Some(duplicates) => html! {
            @for (name, count) in counts(duplicates) { (name) ": " (number(count)) " " }
        },
        None => dash(),
    };
    facts(&[
        ("State", html! { (state(&consumer.state)) }),
        ("To run", stats.map_or_else(dash, |stats| html! { (number(stats.pending)) })),
        ("Oldest of them", oldest),
        ("Refused as duplicates", duplicates),
        ("Collapses", policy(consumer).map_or_else(dash, |policy| html! { (policy.collapses()) })),
        ("Generation of deployments", html! { (consumer.generation) }),
        ("Since", time(consumer.created_at)),
    ])
}

/// Returns the policy; none where this host cannot read it.
fn policy(consumer: &ConsumerBody) -> Option<Policy> {
    serde_json::from_value(consumer.policy.clone()).ok()
}

/// Returns the members of an object that are numbers.
fn counts(object: &impl serde::Serialize) -> Vec<(String, i64)> {
    let object = serde_json::to_value(object).unwrap_or_default();
    let members = object.as_object().into_iter().flatten();
    members.filter_map(|(name, value)| Some((name.replace('_', " "), value.as_i64()?))).collect()
}

fn open(tenant: &str, name: &str, stats: &InboxStats) -> Markup {
    let rows: Vec<_> = stats
        .open
        .iter()
        .map(|open| {
            let query =
                [("status", Some(open.status.to_string())), ("reason", open.reason.clone())];
            let page = with_query(&of_consumer(tenant, name, &["messages"]), &query);
            html! {
                td { (message_status(open.status)) }
                td { (text_or_dash(open.reason.as_deref())) }
                td.number { a href=(page) { (number(open.messages)) } }
                td { (time(open.oldest)) }
            }
        })
        .collect();
    let columns = ["Status", "Reason", "Messages", "Oldest"];
    table("Open messages", &columns, &rows, html! { "Nothing is open: every message completed." })
}

fn deployed(tenant: &str, name: &str, deployments: &[DeploymentBody]) -> Markup {
    let rows: Vec<_> = deployments
        .iter()
        .map(|deployment| {
            let id = deployment.deployment_id.to_string();
            html! {
                td {
                    a href=(of_consumer(tenant, name, &["deployments", &id])) { (deployment.event_type) }
                    @if let Some(versions) = &deployment.event_versions { " " (versions) }
                }
                td {
                    (badge(if deployment.role == "stable" { Tone::Good } else { Tone::Wait }, &deployment.role))
                    @if let Some(percent) = deployment.percent { " " (percent) " %" }
                }
                td { (deployment.handler) }
                td { (digest(&deployment.digest)) }
                td { (time(deployment.created_at)) " by " (deployment.created_by) }
                td {
                    @for host in &deployment.hosts {
                        @if host.generation >= deployment.generation { (badge(Tone::Good, &host.host)) }
                        @else { (badge(Tone::Wait, &format!("{}: {}", host.host, host.state))) }
                        " "
                    }
                }
            }
        })
        .collect();
    let columns = ["Event type", "Role", "Handler", "Version", "Live since", "Hosts that run it"];
    let empty = html! {
        "No version is deployed, so that messages are parked. "
        code { "oncebox deploy --tenant " (tenant) " --consumer " (name) " --event-type <type> <file>" }
        " deploys one, or choose an uploaded version under Handlers."
    };
    table("Deployments", &columns, &rows, empty)
}

fn on_hosts(consumer: &ConsumerBody) -> Markup {
    let rows: Vec<_> = consumer
        .hosts
        .iter()
        .map(|host| {
            html! {
                td { (host.host) }
                td { (state(&host.state)) }
                td { @if host.revision == consumer.revision { "this revision" } @else { "an earlier revision" } }
                td {
                    (text_or_dash(host.error.as_deref()))
                    @for breaker in &host.breakers {
                        p.note {
                            (badge(Tone::Bad, &format!("breaker {}", breaker.state.replace('_', " "))))
                            " Messages for version " (digest(&breaker.digest)) " of " (breaker.handler)
                            " wait: it fails on most of them. Deploy one that does not, or roll back."
                        }
                    }
                }
            }
        })
        .collect();
    let empty = html! { "No host has the consumer: none runs." };
    table("Hosts", &["Host", "State", "Applied", "Error"], &rows, empty)
}

fn replayed(replays: &[ReplayBody]) -> Markup {
    let rows: Vec<_> = replays
        .iter()
        .map(|replay| {
            html! {
                td { (replay.replay_id) }
                td { (state(&replay.state)) }
                td { (number(replay.replayed)) " of " (number(replay.found)) }
                td { (number(replay.failed)) }
                td { (replay.actor.as_deref().unwrap_or(&replay.planned_by)) }
                td { (text_or_dash(replay.note.as_deref().or(replay.reason.as_deref()))) }
            }
        })
        .collect();
    table("Replays", &["Id", "State", "Replayed", "Failed", "By", "Because"], &rows, html! {})
}

fn forms(visit: &Visit, consumer: &ConsumerBody, replays: &[ReplayBody]) -> Markup {
    let given = [("tenant", consumer.tenant.as_str()), ("consumer", consumer.name.as_str())];
    let is_running = consumer.state == "running";
    html! {
        h2 { "Consumer" }
        div.actions {
            @if is_running {
                div { (form::form(visit, &actions::CONSUMER_PAUSE, &given, html! {})) }
                div { (form::form(visit, &actions::CONSUMER_DRAIN, &given, html! {})) }
            } @else {
                div { (form::form(visit, &actions::CONSUMER_RESUME, &given, html! {})) }
            }
            @if consumer.seek.is_some() {
                div { (form::form(visit, &actions::SEEK_CANCEL, &given, html! {})) }
            }
        }
        @for replay in replays.iter().filter(|replay| replay.ended_at.is_none() && replay.began_at.is_some()) {
            @let id = replay.replay_id.to_string();
            @let given = [given[0], given[1], ("replay_id", id.as_str())];
            h3 { "Replay " (id) }
            div.actions {
                @let switch = if replay.state == "paused" { &actions::REPLAY_RESUME } else { &actions::REPLAY_PAUSE };
                div { (form::form(visit, switch, &given, html! {})) }
                div { (form::form(visit, &actions::REPLAY_CANCEL, &given, html! {})) }
            }
        }
        h2 { "Policy" }
        @if let Some(policy) = policy(consumer) {
            details {
                summary { "What it means" }
                @for part in policy.explain() { p { (part) } }
            }
        }
        details { summary { "Show the policy" } pre { (pretty(&consumer.policy)) } }
    }
}
