//! Counts a repository's stars up and down: a sum of deltas does not care about their
//! order, only that each is added once. It handles two event types, `star` and `watch`.

use oncebox_github_webhook::{Repository, audit};
use oncebox_guest::{Message, Result, enqueue, handler, params, park};

#[handler]
fn starred(message: &Message) -> Result<()> {
    let webhook = audit(message)?;
    let delta = match webhook.action.as_deref() {
        Some("created" | "started") => 1,
        Some("deleted") => -1,
        other => park!("unknown action {other:?}"),
    };
    count(webhook.repository()?, delta)
}

fn count(repository: Repository, stars: i64) -> Result<()> {
    enqueue(
        "INSERT INTO repository_activity AS activity (repository, full_name, stars)
         VALUES ($1, $2, $3)
         ON CONFLICT (repository) DO UPDATE SET stars = activity.stars + excluded.stars",
        params![repository.id, repository.full_name, stars],
    )?;
    Ok(())
}
