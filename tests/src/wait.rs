//! Waiting for a condition.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

/// How long anything may take that has to come, on a machine that does other things as well. Where
/// the time itself is promised, a test compares it.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Waits until `is_true` returns true, and looks every `pause`. Fails after `limit` with the text
/// that `late` returns.
pub async fn until(
    limit: Duration,
    pause: Duration,
    mut is_true: impl AsyncFnMut() -> Result<bool>,
    late: impl AsyncFnOnce() -> String,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !is_true().await? {
        if Instant::now() >= deadline {
            bail!(late().await);
        }
        sleep(pause).await;
    }
    Ok(())
}
