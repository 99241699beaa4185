//! Counts pushes and commits per repository: a delta on a row that many messages share.
//!
//! The shared row is touched last, so that it stays locked for as short as possible.

use oncebox_github_webhook::{Repository, audit};
use oncebox_guest::{Message, Result, enqueue, handler, params};
use serde::Deserialize;
use serde::de::IgnoredAny;

#[derive(Deserialize)]
struct Push {
    commits: Vec<IgnoredAny>,
}

#[handler]
fn pushed(push: Push, message: &Message) -> Result<()> {
    let repository = audit(message)?.repository()?;
    count(repository, push.commits.len() as i64)
}

fn count(repository: Repository, commits: i64) -> Result<()> {
    enqueue(
        "INSERT INTO repository_activity AS activity (repository, full_name, commits, pushes)
         VALUES ($1, $2, $3, 1)
         ON CONFLICT (repository) DO UPDATE SET
             commits = activity.commits + excluded.commits,
             pushes = activity.pushes + 1",
        params![repository.id, repository.full_name, commits],
    )?;
    Ok(())
}
