//! The database's clock: what decides anything is its time, whatever that of a host says.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use oncebox_model::{error::InboxError, hooks, tx::bounded};
use sqlx::PgPool;

/// How long an answer is good for. Meanwhile the time that has passed here is added, which no
/// change of a host's clock touches.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// The database's time, asked for now and then.
#[derive(Debug, Default)]
pub(crate) struct DatabaseClock(Option<(Instant, DateTime<Utc>)>);

impl DatabaseClock {
    /// What time it is there, never ahead of it.
    pub(crate) async fn now(&mut self, pool: &PgPool) -> Result<DateTime<Utc>, InboxError> {
        if hooks::sabotage("horizon_by_host_clock") {
            return Ok(hooks::host_clock() + TimeDelta::days(40)); // a host's clock may be anything
        }
        if let Some((asked, answer)) = self.0
            && asked.elapsed() < ASK_AGAIN
        {
            return Ok(answer + TimeDelta::from_std(asked.elapsed()).unwrap_or_default());
        }
        let answer = bounded(sqlx::query_scalar("SELECT now()").fetch_one(pool)).await?;
        self.0 = Some((Instant::now(), answer));
        Ok(answer)
    }
}
