//! The pages, each by its path.

mod audit;
mod consumer;
mod deployments;
mod edit;
mod failures;
mod handlers;
mod hosts;
mod jobs;
mod lag;
mod message;
mod messages;
mod outgoing;
mod overview;
mod retention;
mod tenant;
mod tokens;

use std::{future::Future, sync::Arc};

use axum::{
    Router,
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};

use crate::{
    layout::{Page, refused},
    live::{self, Render},
    refusal::Refusal,
    state::Console,
    visit::Visit,
};

const TENANT: &str = "/console/tenants/{tenant}";
const CONSUMER: &str = "/console/tenants/{tenant}/consumers/{consumer}";

/// Returns all pages, by the templates of their paths.
fn pages() -> Vec<(String, MethodRouter<Console>)> {
    let at = |path: &str| path.to_owned();
    let tenant = |rest: &str| format!("{TENANT}{rest}");
    let consumer = |rest: &str| format!("{CONSUMER}{rest}");
    let edit = page(edit::edit).post(edit::preview);
    let message = page(message::show).post(message::unmask);
    vec![
        (at("/console"), page(overview::show)),
        (at("/console/hosts"), page(hosts::show)),
        (at("/console/doctor"), page(hosts::doctor)),
        (at("/console/retention"), page(retention::show)),
        (at("/console/audit"), page(audit::show)),
        (at("/console/tokens"), page(tokens::show)),
        (tenant(""), page(tenant::show)),
        (tenant("/limits"), page(tenant::limits)),
        (tenant("/audit"), page(audit::of_tenant)),
        (tenant("/tokens"), page(tokens::of_tenant)),
        (tenant("/handlers"), page(handlers::list)),
        (tenant("/handlers/{handler}"), page(handlers::show)),
        (tenant("/handlers/{handler}/diff"), page(handlers::diff)),
        (tenant("/outgoing"), page(outgoing::list)),
        (tenant("/outgoing/{id}"), page(outgoing::show)),
        (tenant("/jobs"), page(jobs::list)),
        (tenant("/jobs/new"), page(jobs::new)),
        (tenant("/jobs/{job_id}"), page(jobs::show)),
        (consumer(""), page(consumer::show)),
        (consumer("/deployments/{deployment_id}"), page(deployments::show)),
        (consumer("/failures"), page(failures::show)),
        (consumer("/lag"), page(lag::show)),
        (consumer("/messages"), page(messages::list)),
        (consumer("/messages/{id}"), message),
        (consumer("/messages/{id}/edit"), edit),
    ]
}

/// Returns the templates of the paths of all pages.
pub fn templates() -> Vec<String> {
    pages().into_iter().map(|(template, _)| template).collect()
}

/// Returns the routes of all pages.
pub(crate) fn routes() -> Router<Console> {
    pages().into_iter().fold(Router::new(), |all, (path, page)| all.route(&path, page))
}

/// Returns the route of a page: the page itself, or its changes where these are asked for.
fn page<F, Fut>(render: F) -> MethodRouter<Console>
where
    F: Fn(Visit) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Page, Refusal>> + Send + 'static,
{
    route(Arc::new(move |visit| Box::pin(render(visit))))
}

fn route(render: Render) -> MethodRouter<Console> {
    get(move |visit: Visit, headers: HeaderMap| answer(visit, headers, render.clone()))
}

async fn answer(visit: Visit, headers: HeaderMap, render: Render) -> Response {
    if live::is_asked(&headers) {
        return live::follow(visit, render);
    }
    match render(visit.clone()).await {
        Ok(page) => page.document(&visit).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
    }
}

/// Says that there is no such page.
pub(crate) async fn not_found(visit: Visit, _: Request) -> Response {
    let detail = "there is no such page; the links above lead on";
    refused(Some(&visit), &Refusal::new(StatusCode::NOT_FOUND, detail))
}
