//! The frame of every page: head, navigation, and the place in it.

use axum::response::{Html, IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};

use crate::{
    assets::ASSETS,
    form::hidden,
    html::{link, of_tenant},
    refusal::Refusal,
    visit::Visit,
};

/// Settings of htmx: it adds no styles, which the content security policy would refuse, and evaluates
/// nothing.
const HTMX_CONFIG: &str = r#"{"includeIndicatorCSS":false,"sse":{"pauseOnBackground":true}}"#;

/// A page.
pub(crate) struct Page {
    pub(crate) title: String,
    /// Names and paths of the pages above.
    pub(crate) above: Vec<(String, String)>,
    /// Part that changes by itself.
    pub(crate) body: Markup,
    /// Forms and other parts that must not change under the visitor's hands.
    pub(crate) forms: Markup,
    /// Whether the page follows what changes.
    pub(crate) is_live: bool,
    /// Command that shows the same.
    pub(crate) command: Option<String>,
}

impl Page {
    pub(crate) fn new(title: impl Into<String>, body: Markup) -> Self {
        Self {
            title: title.into(),
            above: Vec::new(),
            body,
            forms: html! {},
            is_live: false,
            command: None,
        }
    }

    /// Puts the page below those of a tenant.
    pub(crate) fn of_tenant(mut self, tenant: &str) -> Self {
        self.above.push((tenant.to_owned(), of_tenant(tenant, &[])));
        self
    }

    /// Puts the page below those of a consumer.
    pub(crate) fn of_consumer(self, tenant: &str, consumer: &str) -> Self {
        self.of_tenant(tenant).below(consumer, &crate::html::of_consumer(tenant, consumer, &[]))
    }

    /// Puts the page below another one.
    pub(crate) fn below(mut self, name: &str, path: &str) -> Self {
        self.above.push((name.to_owned(), path.to_owned()));
        self
    }

    pub(crate) fn with_forms(self, forms: Markup) -> Self {
        Self { forms, ..self }
    }

    /// Lets the page follow what changes.
    pub(crate) fn live(self) -> Self {
        Self { is_live: true, ..self }
    }

    /// Names the command that shows the same.
    pub(crate) fn same_as(self, words: &[&str]) -> Self {
        Self { command: Some(crate::command::line(words.iter().copied())), ..self }
    }

    /// Returns the whole page.
    pub(crate) fn document(&self, visit: &Visit) -> Html<String> {
        let body = html! {
            @if self.is_live { div #live data-follow=(visit.target) hx-sse:close="end" hx-swap="innerMorph" { (self.body) } } @else { (self.body) }
            (self.forms)
        };
        document(Some(visit), &self.title, &self.above, self.command.as_deref(), &body)
    }
}

/// Returns the page of a refusal. Without a visitor it has no navigation.
pub(crate) fn refused(visit: Option<&Visit>, refusal: &Refusal) -> Response {
    let title = refusal.status.canonical_reason().unwrap_or("Refused");
    let body = html! {
        div.refusal role="alert" {
            p { (refusal.detail) }
            @if !refusal.problems.is_empty() {
                ul { @for problem in &refusal.problems { li { code { (problem.code) } " " (problem.text) } } }
            }
            @if let Some(id) = &refusal.request_id {
                p { "Request " code { (id) } " in the host's log." }
            }
        }
        @if visit.is_none() { p { a href="/console/login" { "Sign in" } } }
    };
    (refusal.status, document(visit, title, &[], None, &body)).into_response()
}

/// Returns a whole page.
pub(crate) fn document(
    visit: Option<&Visit>,
    title: &str,
    above: &[(String, String)],
    command: Option<&str>,
    body: &Markup,
) -> Html<String> {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head(title))
            body {
                a.skip href="#content" { "Skip to the content" }
                header {
                    a.home href="/console" { "Oncebox" }
                    @if let Some(visit) = visit { (navigation(visit)) }
                }
                main id="content" tabindex="-1" {
                    @if !above.is_empty() {
                        nav.above aria-label="Above" {
                            @for (name, path) in above { a href=(path) { (name) } " / " }
                        }
                    }
                    h1 { (title) }
                    @if let Some(command) = command {
                        p.command { code { (command) } }
                    }
                    (body)
                }
                (keys())
            }
        }
    };
    Html(page.into_string())
}

fn head(title: &str) -> Markup {
    let assets = &*ASSETS;
    let path = |name: &str| format!("/console/assets/{name}");
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            meta name="htmx-config" content=(HTMX_CONFIG);
            title { (title) " · Oncebox" }
            link rel="icon" href=(path(&assets.icon.name));
            link rel="stylesheet" href=(path(&assets.style.name)) integrity=(assets.style.integrity);
            @for script in [&assets.htmx, &assets.sse, &assets.script] {
                script src=(path(&script.name)) integrity=(script.integrity) defer {}
            }
        }
    }
}

fn navigation(visit: &Visit) -> Markup {
    let principal = visit.principal();
    let pages: Vec<(String, &str, &str)> = match principal.tenant() {
        Some(tenant) => vec![
            (of_tenant(tenant, &[]), "Consumers", "g o"),
            (of_tenant(tenant, &["handlers"]), "Handlers", "g h"),
            (of_tenant(tenant, &["outgoing"]), "Outgoing", "g u"),
            (of_tenant(tenant, &["jobs"]), "Jobs", "g j"),
            (of_tenant(tenant, &["audit"]), "Audit", "g a"),
        ],
        None => vec![
            (link(&[]), "Tenants", "g o"),
            (link(&["hosts"]), "Hosts", "g s"),
            (link(&["retention"]), "Retention", "g r"),
            (link(&["doctor"]), "Doctor", "g d"),
            (link(&["audit"]), "Audit", "g a"),
            (link(&["tokens"]), "Tokens", "g t"),
        ],
    };
    let here = visit.target.split('?').next().unwrap_or_default();
    html! {
        nav aria-label="Pages" {
            @for (path, name, key) in &pages {
                a href=(path) data-key=(key) aria-current=[(path == here).then_some("page")] {
                    (name)
                }
            }
        }
        div.visitor {
            span { (principal.name()) " · " (principal.role()) }
            @if visit.session.is_some() && principal.token_id().is_some() {
                form method="post" action="/console/logout" { (hidden(visit)) button.quiet { "Sign out" } }
            }
        }
    }
}

/// Returns the list of keys, which a script shows.
fn keys() -> Markup {
    html! {
        dialog #keys aria-labelledby="keys-title" {
            h2 #keys-title { "Keys" }
            dl {
                div { dt { kbd { "?" } } dd { "this list" } }
                div { dt { kbd { "/" } } dd { "to the first field of the page" } }
                div { dt { kbd { "j" } " " kbd { "k" } } dd { "to the next and the previous row" } }
                div { dt { kbd { "Enter" } } dd { "open the row" } }
                div { dt { kbd { "u" } } dd { "to the page above" } }
                div { dt { kbd { "g" } " and a letter" } dd { "to a page of the navigation" } }
            }
            label.check { input #use-keys type="checkbox" checked; span { "use these keys" } }
            form method="dialog" { button { "Close" } }
        }
    }
}
