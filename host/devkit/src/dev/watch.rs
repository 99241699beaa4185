//! A line for each message that was handled, so that a user who tries a handler sees it work.

use std::{collections::HashMap, time::Duration};

use oncebox_control::{Control, Filter, InboxRow};
use oncebox_model::MessageStatus;

/// Pause between two looks at the inbox.
const POLL: Duration = Duration::from_millis(250);
/// Most messages that are read at a look; a flood is not printed one by one.
const ROWS_MAX: i64 = 100;

/// Prints the results of messages, for ever.
pub(super) async fn watch(control: Control) {
    let filter = Filter { limit: ROWS_MAX, ..Filter::default() };
    let mut known: Option<HashMap<String, String>> = None;
    loop {
        // An inbox that cannot be read at this moment is reported by the host itself.
        if let Ok(rows) = control.messages().inbox_list(&filter).await {
            let states = rows.iter().map(|row| (key(row), state(row))).collect();
            if let Some(known) = &known {
                tell(&rows, known);
            }
            known = Some(states);
        }
        tokio::time::sleep(POLL).await;
    }
}

fn tell(rows: &[InboxRow], known: &HashMap<String, String>) {
    let mut news: Vec<_> = rows
        .iter()
        .filter(|row| is_settled(row) && known.get(&key(row)) != Some(&state(row)))
        .collect();
    news.sort_by(|a, b| (a.received_at, &a.message_id).cmp(&(b.received_at, &b.message_id)));
    for row in &news {
        println!("{}", line(row));
    }
    if news.len() == rows.len() && rows.len() as i64 == ROWS_MAX {
        println!("handled   and perhaps more; `oncebox inbox list` shows them");
    }
}

/// Returns whether a row is settled. Rows that wait for a worker or are held by one change again
/// soon.
fn is_settled(row: &InboxRow) -> bool {
    !matches!(row.status, MessageStatus::Received | MessageStatus::InProgress)
}

fn key(row: &InboxRow) -> String {
    format!("{}/{}/{}", row.tenant, row.consumer, row.message_id)
}

fn state(row: &InboxRow) -> String {
    format!("{} {}", row.status, row.attempts)
}

fn line(row: &InboxRow) -> String {
    let event_type = row.event_type.as_deref().unwrap_or("of no type");
    let mut line = format!("handled   {} ({event_type}): {}", row.message_id, row.status);
    let why = [row.reason.as_deref(), row.last_error.as_deref()]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(": ");
    if row.status != MessageStatus::Completed && !why.is_empty() {
        line.push_str(&format!(", {why}"));
    }
    if let Some(result) = row.result.as_ref().filter(|_| row.status == MessageStatus::Completed) {
        line.push_str(&format!(", {result}"));
    }
    // A producer chose the id, which must not control the terminal.
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
