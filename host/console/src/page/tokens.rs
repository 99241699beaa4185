//! Tokens, without themselves, and the end of one that somebody else has.

use chrono::Utc;
use maud::{Markup, html};
use oncebox_api::{link::path, wire::TokenBody};

use crate::{
    actions, form,
    html::{Tone, badge, of_tenant as tenant_page, table, time, time_or_dash},
    layout::Page,
    page::tenant::tabs,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let tokens: Vec<TokenBody> = visit.client.get(&path(&["tokens"])).await?;
    let body = html! { (list(&visit, &tokens)) };
    Ok(Page::new("Tokens", body).same_as(&["token", "list"]))
}

pub(crate) async fn of_tenant(visit: Visit) -> Result<Page, Refusal> {
    let tenant = visit.param("tenant");
    let tokens: Vec<TokenBody> = visit.client.get(&path(&["tenants", tenant, "tokens"])).await?;
    let body = html! { (tabs(tenant, "tokens")) (list(&visit, &tokens)) };
    let page = Page::new("Tokens", body).of_tenant(tenant);
    Ok(page.same_as(&["token", "list", "--tenant", tenant]))
}

fn list(visit: &Visit, tokens: &[TokenBody]) -> Markup {
    let rows: Vec<_> = tokens.iter().map(|token| row(visit, token)).collect();
    let columns = ["Id", "Name", "Role", "Tenant", "Created", "By", "Expires", "State"];
    let empty = html! {
        "There is no token. Create one with "
        code { "oncebox token create <name> --role <role>" } "; it is shown once."
    };
    table("Tokens, with the sessions of the console that began with them", &columns, &rows, empty)
}

fn row(visit: &Visit, token: &TokenBody) -> Markup {
    let id = token.token_id.to_string();
    let mut given = vec![("token_id", id.as_str())];
    given.extend(token.tenant.iter().map(|tenant| ("tenant", tenant.as_str())));
    let is_expired = token.expires_at.is_some_and(|at| at <= Utc::now());
    html! {
        td { (id) }
        td { (token.name) }
        td { (token.role) }
        td {
            @match &token.tenant {
                Some(tenant) => a href=(tenant_page(tenant, &[])) { (tenant) },
                None => "all",
            }
        }
        td { (time(token.created_at)) }
        td { (token.created_by) }
        td { (time_or_dash(token.expires_at)) }
        td {
            @if let Some(at) = token.revoked_at { (badge(Tone::Plain, "revoked")) " " (time(at)) }
            @else if is_expired { (badge(Tone::Plain, "expired")) }
            @else { (form::form(visit, &actions::TOKEN_REVOKE, &given, html! {})) }
        }
    }
}
