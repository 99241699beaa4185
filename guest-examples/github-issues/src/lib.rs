//! Keeps each issue's newest state, although messages may arrive in any order.
//!
//! The newest is the greatest (`updated_at`, `state`), so whatever order events arrive in,
//! the row ends the same. An event that names no state counts, and leaves the state alone.

use oncebox_github_webhook::audit;
use oncebox_guest::{Message, Result, enqueue, handler, params};
use serde::Deserialize;

#[derive(Deserialize)]
struct Event {
    issue: Issue,
}

#[derive(Deserialize)]
struct Issue {
    number: i64,
    state: Option<String>,
    updated_at: String,
}

#[handler]
fn changed(Event { issue }: Event, message: &Message) -> Result<()> {
    let repository = audit(message)?.repository()?;
    let updated_at = issue.state.is_some().then_some(issue.updated_at);
    enqueue(
        "INSERT INTO issue AS old (repository, number, state, updated_at, events)
         VALUES ($1, $2, $3, $4::text::timestamptz, 1)
         ON CONFLICT (repository, number) DO UPDATE SET
             events = old.events + 1,
             (state, updated_at) = (
                 SELECT seen.state, seen.updated_at
                 FROM (VALUES (old.state, old.updated_at), (excluded.state, excluded.updated_at))
                     AS seen (state, updated_at)
                 WHERE seen.state IS NOT NULL
                 ORDER BY seen.updated_at DESC, seen.state DESC
                 LIMIT 1)",
        params![repository.id, issue.number, issue.state, updated_at],
    )?;
    Ok(())
}
