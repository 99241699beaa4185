//! Handlers and their versions: upload, comparison, deployment.

use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{ConsumerBody, HandlerBody, VersionBody, VersionDiff},
};

use super::tenant::tabs;
use crate::{
    actions, form,
    html::{bytes, digest, input, of_tenant, pretty, state, table, time, time_or_dash},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn list(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant");
    let handlers: Vec<HandlerBody> =
        visit.client.get(&path(&["tenants", tenant, "handlers"])).await?;
    let rows: Vec<_> = handlers
        .iter()
        .map(|handler| {
            html! {
                td { a href=(of_tenant(tenant, &["handlers", &handler.name])) { (handler.name) } }
                td.number { (handler.versions) }
                td { (time_or_dash(handler.latest_at)) }
            }
        })
        .collect();
    let empty = html! {
        "No handler was uploaded yet. " code { "oncebox new" } " writes the project of one; upload \
            what it builds below."
    };
    let body = html! {
        (tabs(tenant, "handlers"))
        (table("Handlers", &["Name", "Versions", "Newest"], &rows, empty))
    };
    let forms = upload(&visit, tenant, "");
    Ok(Page::new("Handlers", body).of_tenant(tenant).live().with_forms(forms))
}

/// Returns the form of an upload. A file can be dropped on its field.
fn upload(visit: &Visit, tenant: &str, handler: &str) -> Markup {
    let file =
        if handler.is_empty() { "<handler>.wasm".to_owned() } else { format!("{handler}.wasm") };
    let command = crate::command::line(["version", "upload", "--tenant", tenant, file.as_str()]);
    html! {
        h2 { "Upload a version" }
        @if visit.may(oncebox_api::wire::Role::Deployer, false) {
            form.action method="post" action="/console/upload" enctype="multipart/form-data" {
                (form::hidden(visit))
                input type="hidden" name="tenant" value=(tenant);
                (input("handler", "Handler; by default the file's name", handler, false))
                label.field { span { "Component, a .wasm file" } input type="file" name="file" accept=".wasm" required; }
                button { "Upload" }
            }
        } @else {
            p.note { "An upload needs the role deployer." }
        }
        p.command { code { (command) } }
    }
}

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, handler) = (visit.param("tenant"), visit.param("handler"));
    let versions = path(&["tenants", tenant, "handlers", handler, "versions"]);
    let versions: Vec<VersionBody> = visit.client.get(&versions).await?;
    let consumers: Vec<ConsumerBody> =
        visit.client.get(&path(&["tenants", tenant, "consumers"])).await?;
    let rows: Vec<_> = versions
        .iter()
        .enumerate()
        .map(|(index, version)| version_row(tenant, handler, version, versions.get(index + 1)))
        .collect();
    let columns = ["Version", "State", "Size", "Uploaded", "Compiled", "Problems", "Changes"];
    let body = table("Versions, newest first", &columns, &rows, html! { "There is no version." });
    let forms = html! {
        h2 { "Deploy" }
        (deploy(&visit, tenant, handler, &versions, &consumers))
        (upload(&visit, tenant, handler))
    };
    let page = Page::new(handler, body)
        .of_tenant(tenant)
        .below("handlers", &of_tenant(tenant, &["handlers"]))
        .live()
        .with_forms(forms);
    Ok(page.same_as(&["version", "list", "--tenant", tenant, "--handler", handler]))
}

fn version_row(
    tenant: &str,
    handler: &str,
    version: &VersionBody,
    before: Option<&VersionBody>,
) -> Markup {
    html! {
        td { (digest(&version.digest)) }
        td { (state(&version.state)) }
        td { (bytes(version.size)) }
        td { (time(version.created_at)) " by " (version.created_by) }
        td { @match version.compile_ms { Some(ms) => { (ms) " ms" }, None => (crate::html::dash()) } }
        td { @for problem in &version.problems { p { code { (problem.code) } " " (problem.text) } } }
        td {
            @match before {
                Some(before) => {
                    a href=(format!("{}?before={}&after={}", of_tenant(tenant, &["handlers", handler, "diff"]), before.digest, version.digest)) {
                        "against the one before"
                    }
                },
                None => "the first",
            }
        }
    }
}

fn deploy(
    visit: &Visit,
    tenant: &str,
    handler: &str,
    versions: &[VersionBody],
    consumers: &[ConsumerBody],
) -> Markup {
    let inputs = html! {
        label.field {
            span { "Version" }
            select name="version" {
                @for version in versions.iter().filter(|version| version.state == "ready") {
                    option value=(version.digest) { (version.digest.chars().take(12).collect::<String>()) }
                }
            }
        }
        label.field {
            span { "Consumer" }
            select name="consumer" { @for consumer in consumers { option { (consumer.name) } } }
        }
        (input("event_type", "Event type; * for all others", "", true))
        (input("event_versions", "Event versions, such as >=2, <4", "", false))
        label.check { input type="checkbox" name="emit"; span { "may emit messages" } }
    };
    let given = [("tenant", tenant), ("handler", handler)];
    html! {
        p.note {
            "The deployment gets no settings, caps and rights but those of this form, also where the \
                live one has others; the command takes them."
        }
        (form::form(visit, &actions::DEPLOY, &given, inputs))
    }
}

pub(crate) async fn diff(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, handler) = (visit.param("tenant"), visit.param("handler"));
    let (before, after) = (visit.query.need("before")?, visit.query.need("after")?);
    let at = ["tenants", tenant, "handlers", handler, "versions", before, "diff", after];
    let diff: VersionDiff = visit.client.get(&path(&at)).await?;
    let rows: Vec<_> = diff
        .changes
        .iter()
        .map(|change| {
            html! {
                td { (change.what) }
                td.minus { pre { (pretty(&change.before)) } }
                td.plus { pre { (pretty(&change.after)) } }
            }
        })
        .collect();
    let empty = html! { "The reports of the two are equal; the code may differ." };
    let columns = ["Property", "Before", "After"];
    let body = html! {
        p { (digest(&diff.before.digest)) " → " (digest(&diff.after.digest)) }
        (table("Changes", &columns, &rows, empty))
    };
    let page = Page::new("What changed", body)
        .of_tenant(tenant)
        .below("handlers", &of_tenant(tenant, &["handlers"]))
        .below(handler, &of_tenant(tenant, &["handlers", handler]));
    Ok(page.same_as(&["version", "diff", "--tenant", tenant, "--handler", handler, before, after]))
}
