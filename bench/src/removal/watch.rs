//! A removal, watched from outside: its stages, and what the database says of it in the end.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sqlx::PgConnection;
use tokio::time::{Instant, sleep};

use super::figures::Stage;
use crate::{
    filling::{self, Period},
    measure::now_us,
    servers::Database,
};

/// Pause between two looks at the removal: how exact the durations of its steps are.
const LOOK: Duration = Duration::from_millis(50);
/// Longest duration of a removal.
const DEADLINE: Duration = Duration::from_secs(900);

/// The state of a removal, as the database shows it.
#[derive(sqlx::FromRow)]
struct Look {
    /// State of the row in `oncebox.removal`; none before the first step.
    state: Option<String>,
    /// Whether the table is gone.
    is_gone: bool,
    /// Whether the table is a partition, also while it is being detached.
    is_attached: bool,
    /// Begin of the statement that the removal runs.
    statement: Option<String>,
}

/// Watches the removal of a partition until a time, and until the partition is gone.
pub async fn watch(
    database: &Database,
    period: &Period,
    until: Instant,
) -> Result<Vec<(f64, Stage)>> {
    let mut connection = database.connect().await?;
    let mut looks = vec![(now_us(), Stage::Waiting)];
    loop {
        let before = looks.last().map_or(Stage::Waiting, |(_, stage)| *stage);
        let stage = look(&mut connection, period).await?.stage(before);
        if stage != before {
            looks.push((now_us(), stage));
        }
        if stage == Stage::Gone && Instant::now() > until {
            return Ok(looks);
        }
        ensure!(
            Instant::now() < until + DEADLINE,
            "the host has not removed `{}`; it is at the step `{}`",
            period.name,
            stage.title()
        );
        sleep(LOOK).await;
    }
}

async fn look(connection: &mut PgConnection, period: &Period) -> Result<Look> {
    const STATE: &str = "SELECT \
        (SELECT m.state FROM oncebox.removal m WHERE m.partition_name = $1) AS state, \
        to_regclass('oncebox.' || $1) IS NULL AS is_gone, \
        EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = to_regclass('oncebox.' || $1)) \
            AS is_attached, \
        (SELECT left(a.query, 12) FROM pg_stat_activity a \
            WHERE a.datname = current_database() AND a.application_name = 'oncebox retention' \
              AND a.state = 'active' LIMIT 1) AS statement";
    Ok(sqlx::query_as(STATE).bind(&period.name).fetch_one(connection).await?)
}

impl Look {
    /// Returns the stage of the removal. `before` is the stage of the last look: between two
    /// statements of a stage there is none to be seen.
    fn stage(&self, before: Stage) -> Stage {
        let statement = self.statement.as_deref().unwrap_or_default();
        match self.state.as_deref() {
            None => Stage::Waiting,
            Some("dropped") => Stage::Gone,
            // It pauses between the slices of the table.
            Some("moving") if before == Stage::Count => Stage::Count,
            Some("moving") if statement.starts_with("SELECT i.con") => Stage::Count,
            Some("moving") => Stage::Move,
            _ if self.is_attached => Stage::Detach,
            _ if self.is_gone => Stage::Drop,
            _ if statement.starts_with("DELETE") => Stage::History,
            _ if before == Stage::Drop => Stage::Drop,
            _ if statement.is_empty() => Stage::History,
            _ if before == Stage::History => Stage::Drop,
            _ => Stage::History,
        }
    }
}

/// What the database says of a removal.
#[derive(sqlx::FromRow)]
pub struct Removed {
    /// Messages that moved to the present partition.
    pub moved: i64,
    /// Messages that were removed.
    removed: i64,
    /// Size of the partition with its indexes, bytes.
    pub bytes: i64,
    /// Begin of the first step, microseconds since the Unix epoch.
    pub began_us: f64,
    /// End of the last step.
    pub dropped_us: f64,
}

/// Checks that a partition is gone, and that each of its messages was removed or moved.
pub async fn removed(database: &Database, period: &Period, rows: i64) -> Result<Removed> {
    const REMOVED: &str = "SELECT m.moved, m.removed, m.bytes, \
            extract(epoch FROM m.began_at)::float8 * 1e6 AS began_us, \
            extract(epoch FROM m.dropped_at)::float8 * 1e6 AS dropped_us \
        FROM oncebox.removal m WHERE m.partition_name = $1 AND m.state = 'dropped' \
          AND to_regclass('oncebox.' || $1) IS NULL";
    const MOVED: &str = "SELECT count(*) FROM oncebox.inbox WHERE topic = $1";
    let mut connection = database.connect().await?;
    let found: Option<Removed> =
        sqlx::query_as(REMOVED).bind(&period.name).fetch_optional(&mut connection).await?;
    let found = found.with_context(|| format!("`{}` was not removed", period.name))?;
    let moved: i64 =
        sqlx::query_scalar(MOVED).bind(filling::TOPIC).fetch_one(&mut connection).await?;
    ensure!(
        moved == found.moved && moved + found.removed == rows,
        "of {rows} messages {} were removed and {} moved, and {moved} of them are in the inbox",
        found.removed,
        found.moved
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_is_told_from_what_the_database_shows() {
        let look = |state: Option<&str>, is_attached, is_gone, statement: Option<&str>| Look {
            state: state.map(str::to_owned),
            is_gone,
            is_attached,
            statement: statement.map(str::to_owned),
        };
        let looks = [
            (look(None, true, false, None), Stage::Waiting),
            (look(Some("moving"), true, false, Some("WITH kept AS")), Stage::Move),
            (look(Some("moving"), true, false, Some("SELECT count")), Stage::Move),
            (look(Some("moving"), true, false, Some("SELECT i.con")), Stage::Count),
            (look(Some("moving"), true, false, None), Stage::Count),
            (look(Some("counted"), true, false, Some("ALTER TABLE ")), Stage::Detach),
            (look(Some("counted"), false, false, None), Stage::History),
            (look(Some("counted"), false, false, Some("DELETE FROM ")), Stage::History),
            (look(Some("counted"), false, false, Some("DROP TABLE o")), Stage::Drop),
            (look(Some("counted"), false, false, None), Stage::Drop),
            (look(Some("dropped"), false, true, None), Stage::Gone),
        ];
        let mut before = Stage::Waiting;
        for (look, expected) in looks {
            before = look.stage(before);
            assert_eq!(before, expected);
        }
    }
}
