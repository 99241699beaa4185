//! The database's clock. Every decision about time uses it, never the clock of a host.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    tx::bounded,
};
use sqlx::PgPool;

/// Time for which an answer of the database is used. The time since the answer is added to it by
/// the host's monotonic clock, which no change of the host's wall clock affects.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// The database's time at the last question, and the moment of the answer on this host.
#[derive(Debug, Default)]
pub(crate) struct DatabaseClock(Option<(Instant, DateTime<Utc>)>);

impl DatabaseClock {
    /// Returns the database's time, never ahead of it. Asks the database where the last answer is
    /// too old.
    pub(crate) async fn now(&mut self, pool: &PgPool) -> Result<DateTime<Utc>, InboxError> {
        if hooks::sabotage(Defect::HorizonByHostClock) {
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
