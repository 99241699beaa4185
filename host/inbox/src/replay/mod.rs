//! Replays: completed messages that run again because an operator said so.
//!
//! A host that runs the consumer leases the replay and works on it, one message after the other,
//! each in a transaction of its own. Live messages come first: a replayed message runs where no
//! transaction waits for what it takes. The cursor moves in the transaction of each message
//! (`batch/replayed.rs`), so that a message is replayed exactly once, whichever host dies when.

// A replay in the hands of this host: lease, pages and the cursor.
mod job;
// The messages of a replay, on their way to a run.
mod message;
// Metrics and logs of replays.
mod metrics;
// The worker: lease, run, complete, commit.
mod worker;

use std::sync::Arc;

use oncebox_model::error::InboxError;
use sqlx::PgPool;

use crate::consumer::ConsumerInbox;

pub use worker::{work, work_off};

/// Wakes the workers of consumers with a replay that no host works on.
pub(crate) async fn wake(
    pool: &PgPool,
    consumers: &[Arc<ConsumerInbox>],
) -> Result<(), InboxError> {
    const WAITING: &str = "SELECT r.consumer_id FROM oncebox.replay r \
        WHERE r.consumer_id = ANY ($1) AND r.state = 'running' \
          AND (r.locked_until IS NULL OR r.locked_until < now())";
    let ids: Vec<_> = consumers.iter().map(|consumer| consumer.consumer_id).collect();
    let waiting: Vec<i32> = sqlx::query_scalar(WAITING).bind(ids).fetch_all(pool).await?;
    for consumer in consumers.iter().filter(|it| waiting.contains(&it.consumer_id)) {
        consumer.replay_wakeup.notify_one();
    }
    Ok(())
}
