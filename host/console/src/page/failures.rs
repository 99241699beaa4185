//! Failures, grouped by their reason and by the shape of their error.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use maud::{Markup, html};
use oncebox_api::{
    link::{path, with_query},
    wire::InboxRowBody,
};
use oncebox_model::MessageStatus;

use crate::{
    html::{message_status, number, of_consumer, table, text_or_dash, time},
    layout::Page,
    refusal::Refusal,
    visit::Visit,
};

/// States that a failure is in.
const STATES: [MessageStatus; 3] =
    [MessageStatus::FailedTerminal, MessageStatus::Parked, MessageStatus::FailedRetryable];

/// Number of messages of each state that are grouped, the newest.
const SAMPLE: usize = 500;

/// Longest shape of an error, characters.
const SHAPE_CHARS: usize = 200;

/// Messages with the same reason and shape of error.
struct Group {
    messages: i64,
    first_at: DateTime<Utc>,
    last_at: DateTime<Utc>,
    /// Id and error of the newest.
    example: (String, Option<String>),
}

pub(crate) async fn show(visit: Visit) -> Result<Page, Refusal> {
    let (tenant, consumer) = (visit.param("tenant"), visit.param("consumer"));
    let mut sections = Vec::new();
    for status in STATES {
        let query = [("status", Some(status.to_string())), ("limit", Some(SAMPLE.to_string()))];
        let inbox = path(&["tenants", tenant, "consumers", consumer, "inbox"]);
        let messages: Vec<InboxRowBody> = visit.client.get(&with_query(&inbox, &query)).await?;
        sections.push(section(tenant, consumer, status, &messages));
    }
    let body = html! { @for section in sections { (section) } };
    let page = Page::new("Failures", body).of_consumer(tenant, consumer).live();
    Ok(page.same_as(&["inbox", "stats", "--tenant", tenant, "--consumer", consumer]))
}

fn section(
    tenant: &str,
    consumer: &str,
    status: MessageStatus,
    messages: &[InboxRowBody],
) -> Markup {
    let mut groups: BTreeMap<(Option<String>, String), Group> = BTreeMap::new();
    for row in messages {
        let reason = row.reason.as_ref().map(|reason| plain(reason).to_owned());
        let key = (reason, row.last_error.as_deref().map(shape).unwrap_or_default());
        let group = groups.entry(key).or_insert_with(|| Group {
            messages: 0,
            first_at: row.received_at,
            last_at: row.received_at,
            example: (row.message_id.clone(), row.last_error.clone()),
        });
        group.messages += 1;
        group.first_at = group.first_at.min(row.received_at);
        group.last_at = group.last_at.max(row.received_at);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.messages));
    let rows: Vec<_> = groups
        .iter()
        .map(|((reason, shape), group)| {
            let query = [("status", Some(status.to_string())), ("reason", reason.clone())];
            let page = with_query(&of_consumer(tenant, consumer, &["messages"]), &query);
            html! {
                td.number { a href=(page) { (number(group.messages)) } }
                td { (text_or_dash(reason.as_deref())) }
                td { (text_or_dash(Some(shape))) }
                td { (time(group.first_at)) }
                td { (time(group.last_at)) }
                td { a href=(of_consumer(tenant, consumer, &["messages", &group.example.0])) { (group.example.0) } }
            }
        })
        .collect();
    let columns = ["Messages", "Reason", "Error", "First received", "Last received", "The newest"];
    html! {
        h2 { (message_status(status)) }
        (table(&format!("{status} by their cause"), &columns, &rows, html! { "There are none." }))
        @if messages.len() == SAMPLE {
            p.note { "Of the newest " (SAMPLE) "; the page of the consumer counts all." }
        }
    }
}

/// Returns a reason without the details after its colon.
fn plain(reason: &str) -> &str {
    reason.split(':').next().unwrap_or(reason)
}

/// Returns an error without what differs from message to message: numbers, ids and quoted values.
fn shape(error: &str) -> String {
    let (mut shape, mut word) = (String::new(), String::new());
    let mut quote = None;
    for c in error.chars().chain([' ']) {
        if let Some(end) = quote {
            if c == end {
                quote = None;
                shape.push('…');
                shape.push(c);
            }
        } else if c.is_alphanumeric() || c == '-' || c == '_' {
            word.push(c);
        } else {
            let is_variable = word.chars().any(|c| c.is_ascii_digit());
            shape.push_str(if is_variable { "#" } else { &word });
            word.clear();
            shape.push(c);
            quote = matches!(c, '"' | '`').then_some(c);
        }
    }
    let shape = shape.trim_end();
    match shape.char_indices().nth(SHAPE_CHARS) {
        Some((end, _)) => shape[..end].to_owned(),
        None => shape.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_one_cause_have_one_shape() {
        for (one, other) in [
            ("order 17 is unknown", "order 18 is unknown"),
            (
                "duplicate key value violates unique constraint \"orders_pkey\"",
                "duplicate key value violates unique constraint \"lines_pkey\"",
            ),
            (
                "no row for 0f2c1d9e-1111-4222-8333-444455556666",
                "no row for aaaa1d9e-1111-4222-8333-444455556666",
            ),
            ("value `a` is bad", "value `b c` is bad"),
        ] {
            assert_eq!(shape(one), shape(other));
        }
        assert_ne!(shape("order 17 is unknown"), shape("order 17 is closed"));
        assert_eq!(shape("an open \"quote"), "an open \"");
        assert_eq!(shape(""), "");
        assert_eq!(shape(&"ä ".repeat(400)).chars().count(), SHAPE_CHARS);
    }

    #[test]
    fn a_reason_is_without_its_details() {
        assert_eq!(plain("sql_error:23505"), "sql_error");
        assert_eq!(plain("reject"), "reject");
    }
}
