//! The records that a consumer's group has not acked, beside what its inbox has still to run.

use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{InboxStats, LagBody},
};

use crate::{
    html::{dash, facts, number, table, time},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let at = |rest: &str| path(&["tenants", tenant, "consumers", consumer, rest]);
    let stats = Refusal::unless_away(visit.client.get(&at("backlog")).await)?;
    let to_run = stats.map_or_else(dash, |stats: InboxStats| html! { (number(stats.pending)) });
    // Where the brokers do not answer, the page says so, and shows the backlog none the less.
    let body = match visit.client.get(&at("lag")).await {
        Ok(lag) => shown(&lag, to_run),
        Err(refusal) => html! {
            p.refusal role="alert" { (refusal.detail) }
            (facts(&[("To run, in the inbox", to_run)]))
        },
    };
    let page = Page::new("Lag", body).of_consumer(tenant, consumer).live();
    Ok(page.same_as(&["consumer", "lag", "--tenant", tenant, consumer]))
}

fn shown(lag: &LagBody, to_run: Markup) -> Markup {
    let rows: Vec<_> = lag
        .partitions
        .iter()
        .map(|partition| {
            html! {
                td { (partition.topic) }
                td.number { (partition.partition) }
                td.number {
                    @match partition.committed {
                        Some(committed) => (number(committed)),
                        None => (dash()),
                    }
                }
                td.number { (number(partition.high)) }
                td.number { (number(partition.records)) }
            }
        })
        .collect();
    let columns = ["Topic", "Partition", "Acked up to", "End", "Lag"];
    html! {
        (facts(&[
            ("Not acked, on the brokers", html! { (number(lag.records)) }),
            ("To run, in the inbox", to_run),
            ("Brokers asked", time(lag.measured_at)),
        ]))
        p.note {
            "One partition that is far behind has a record key that sends more than the others, or a message that takes long; the "
            "messages of the consumer say which. A limit of the tenant holds back all of them."
        }
        (table("Lag by partition", &columns, &rows, html! { "Its topics have no partition." }))
    }
}
