//! What is removed when.

use maud::{Markup, html};
use oncebox_api::{
    link::path,
    wire::{RemovalBody, RetentionBody, RetentionDatabaseBody, TimePartitionBody},
};

use crate::{
    actions, form,
    html::{bytes, dash, number, state, table, text_or_dash, time, time_or_dash},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let retention: RetentionBody = visit.client.get(&path(&["retention"])).await?;
    let body = html! {
        @if let Some(run) = &retention.run {
            p.callout {
                "The last run by hand was begun by " (run.by) " at " (time(run.began_at))
                @match run.ended_at {
                    Some(at) => { ", ended at " (time(at)) ", and removed " (run.removed) " partitions." },
                    None => " and goes on.",
                }
            }
            @for failure in &run.failed {
                p.refusal { (failure.partition.as_deref().unwrap_or("the database")) ": " (failure.error) }
            }
        }
        @for database in &retention.databases { (of_database(database)) }
    };
    let forms = html! {
        h2 { "Now" }
        p { "Every host looks by itself; this removes what is due at once." }
        (form::form(&visit, &actions::RETENTION_RUN, &[], html! {}))
    };
    Ok(Page::new("Retention", body).live().with_forms(forms).same_as(&["retention", "plan"]))
}

fn of_database(database: &RetentionDatabaseBody) -> Markup {
    let name = match (&database.label.tenant, &database.label.database) {
        (Some(tenant), _) => format!("Database of {tenant}"),
        (None, Some(database)) => format!("Database {database}"),
        (None, None) => "The host's database".to_owned(),
    };
    let partitions: Vec<_> = database.partitions.iter().map(partition).collect();
    let removals: Vec<_> = database.removals.iter().map(removal).collect();
    html! {
        h2 { (name) }
        @if let Some(error) = &database.error { p.refusal role="alert" { (error) } }
        (table(
            &format!("{name}: time partitions"),
            &["Partition", "Class", "Due", "Messages", "Staying", "Size"],
            &partitions,
            html! { "There are no time partitions: no consumer has received a message." },
        ))
        @if !removals.is_empty() {
            h3 { "Removals" }
            (table(
                &format!("{name}: removals"),
                &["Partition", "State", "Moved", "Removed", "Ended", "By", "Error"],
                &removals,
                html! {},
            ))
        }
    }
}

fn partition(partition: &TimePartitionBody) -> Markup {
    html! {
        td { (partition.name) @if !partition.is_ours { " (not of Oncebox; never removed)" } }
        td { (partition.class) }
        td {
            @match partition.due_at { Some(at) => (time(at)), None => "never" }
            @if partition.is_due { " " (crate::html::badge(crate::html::Tone::Wait, "due")) }
        }
        td { @match partition.messages { Some(count) => { "about " (number(count)) }, None => (dash()) } }
        td { @match partition.staying { Some(count) => (number(count)), None => (dash()) } }
        td { (bytes(partition.bytes)) }
    }
}

fn removal(removal: &RemovalBody) -> Markup {
    html! {
        td { (removal.partition) }
        td { (state(&removal.state)) }
        td { (number(removal.moved)) }
        td { @match removal.removed { Some(count) => (number(count)), None => (dash()) } }
        td { (time_or_dash(removal.dropped_at)) }
        td { (removal.host) }
        td { (text_or_dash(removal.error.as_deref())) }
    }
}
