//! Results of trials, summed up in memory and written at intervals.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::PgPool;

use super::compare::Difference;

/// Most differences of one shadow that are kept; the newest stay.
const DIFFERENCES_MAX: i64 = 200;
/// Most differences of one message that are kept.
const OF_MESSAGE_MAX: usize = 20;
/// Number of ways in which messages of one shadow differ after which a write adds no new ones.
const SUMS_MAX: i64 = 500;
/// Most bytes of a value that are kept.
const VALUE_BYTES: usize = 1_024;

/// Result of one trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TrialVerdict {
    /// Equal effects and results of both runs.
    Same(Cost),
    /// Differences between the two runs.
    Differ(Cost, Vec<Difference>),
    /// Failure of the candidate, as a difference of the outcome.
    Failed(Difference),
    /// Reason why the trial came to no comparison.
    Skipped(&'static str),
}

/// Cost of two runs that are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) live: Duration,
    pub(super) candidate: Duration,
    pub(super) live_statements: u64,
    pub(super) candidate_statements: u64,
}

/// Results that are not written yet, by deployment.
#[derive(Default)]
pub(super) struct Tally {
    open: Mutex<BTreeMap<i64, Sums>>,
}

/// Results of one shadow that are not written yet.
#[derive(Default)]
struct Sums {
    same: i64,
    differ: i64,
    failed: i64,
    skipped: BTreeMap<&'static str, i64>,
    live_us: i64,
    candidate_us: i64,
    live_statements: i64,
    candidate_statements: i64,
    /// Number of messages in which something differs, by table, kind of change and column.
    ways: BTreeMap<(String, &'static str, String), i64>,
    kept: Vec<(String, Difference)>,
}

impl Tally {
    /// Adds one trial. `with_values` allows values of the tenant's tables to be kept.
    pub(super) fn add(
        &self,
        deployment_id: i64,
        message_id: &str,
        verdict: TrialVerdict,
        with_values: bool,
    ) {
        let mut open = self.open();
        let sums = open.entry(deployment_id).or_default();
        match verdict {
            TrialVerdict::Same(cost) => {
                sums.same += 1;
                sums.took(cost);
            }
            TrialVerdict::Differ(cost, differences) => {
                sums.differ += 1;
                sums.took(cost);
                sums.keep(message_id, differences, with_values);
            }
            TrialVerdict::Failed(difference) => {
                sums.failed += 1;
                sums.keep(message_id, vec![difference], with_values);
            }
            TrialVerdict::Skipped(reason) => *sums.skipped.entry(reason).or_default() += 1,
        }
    }

    /// Writes the results that came since the last call. Results that cannot be written are kept
    /// for the next call.
    pub(super) async fn write(&self, pool: &PgPool) -> Result<(), InboxError> {
        loop {
            let Some((deployment_id, sums)) = self.open().pop_first() else { return Ok(()) };
            if let Err(error) = sums.write(pool, deployment_id).await {
                self.open().entry(deployment_id).or_default().take_in(sums);
                return Err(error);
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<i64, Sums>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sums {
    fn took(&mut self, cost: Cost) {
        self.live_us += cost.live.as_micros() as i64;
        self.candidate_us += cost.candidate.as_micros() as i64;
        self.live_statements += cost.live_statements as i64;
        self.candidate_statements += cost.candidate_statements as i64;
    }

    fn keep(&mut self, message_id: &str, differences: Vec<Difference>, with_values: bool) {
        let mut ways: Vec<_> =
            differences.iter().map(|d| (d.table.clone(), d.change, d.column.clone())).collect();
        ways.sort();
        ways.dedup();
        for way in ways {
            *self.ways.entry(way).or_default() += 1;
        }
        let cut = |difference: Difference| {
            if with_values { difference.cut() } else { difference.without_values() }
        };
        let differences = differences
            .into_iter()
            .take(OF_MESSAGE_MAX)
            .map(|difference| (message_id.to_owned(), cut(difference)));
        self.kept.extend(differences);
        let over = self.kept.len().saturating_sub(DIFFERENCES_MAX as usize);
        self.kept.drain(..over);
    }

    /// Puts back results that could not be written; they are older than those that came since.
    fn take_in(&mut self, older: Self) {
        self.same += older.same;
        self.differ += older.differ;
        self.failed += older.failed;
        self.live_us += older.live_us;
        self.candidate_us += older.candidate_us;
        self.live_statements += older.live_statements;
        self.candidate_statements += older.candidate_statements;
        for (reason, count) in older.skipped {
            *self.skipped.entry(reason).or_default() += count;
        }
        for (way, count) in older.ways {
            *self.ways.entry(way).or_default() += count;
        }
        self.kept.splice(..0, older.kept);
        let over = self.kept.len().saturating_sub(DIFFERENCES_MAX as usize);
        self.kept.drain(..over);
    }

    fn messages(&self) -> i64 {
        self.same + self.differ + self.failed + self.skipped.values().sum::<i64>()
    }

    async fn write(&self, pool: &PgPool, deployment_id: i64) -> Result<(), InboxError> {
        const TOTAL: &str = "INSERT INTO oncebox.shadow_total AS t (deployment_id, messages, same, \
            differ, failed, skipped, \
                live_us, candidate_us, live_statements, candidate_statements) VALUES ($1, $2, $3, \
                $4, $5, $6, $7, $8, $9, $10) \
            ON CONFLICT (deployment_id) DO UPDATE SET messages = t.messages + excluded.messages, \
            same = t.same + excluded.same, \
                differ = t.differ + excluded.differ, failed = t.failed + excluded.failed, \
                skipped = (SELECT coalesce(jsonb_object_agg(k, coalesce((t.skipped->>k)::bigint, \
                0) + coalesce((excluded.skipped->>k)::bigint, 0)), '{}') \
                    FROM jsonb_object_keys(t.skipped || excluded.skipped) AS k), \
                live_us = t.live_us + excluded.live_us, candidate_us = t.candidate_us + \
                excluded.candidate_us, \
                live_statements = t.live_statements + excluded.live_statements, \
                candidate_statements = t.candidate_statements + excluded.candidate_statements, \
                last_at = now()";
        let mut tx = pool.begin().await?;
        sqlx::query(TOTAL)
            .bind(deployment_id)
            .bind(self.messages())
            .bind(self.same)
            .bind(self.differ)
            .bind(self.failed)
            .bind(json!(self.skipped))
            .bind(self.live_us)
            .bind(self.candidate_us)
            .bind(self.live_statements)
            .bind(self.candidate_statements)
            .execute(&mut *tx)
            .await?;
        self.write_ways(&mut tx, deployment_id).await?;
        self.write_kept(&mut tx, deployment_id).await?;
        Ok(tx.commit().await?)
    }

    async fn write_ways(
        &self,
        connection: &mut sqlx::PgConnection,
        deployment_id: i64,
    ) -> Result<(), InboxError> {
        // The row of totals is locked, so no other host adds ways of this shadow in the meantime.
        const WAYS: &str = "INSERT INTO oncebox.shadow_sum AS s (deployment_id, \"table\", change, \
            \"column\", messages) \
            SELECT $1, u.* FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[]) AS \
            u(\"table\", change, \"column\", messages) \
            WHERE (SELECT count(*) FROM oncebox.shadow_sum k WHERE k.deployment_id = $1) < $6 \
                OR EXISTS (SELECT FROM oncebox.shadow_sum k WHERE k.deployment_id = $1 \
                    AND (k.\"table\", k.change, k.\"column\") = (u.\"table\", u.change, \
                    u.\"column\")) \
            ON CONFLICT ON CONSTRAINT shadow_sum_pkey DO UPDATE SET messages = s.messages + \
            excluded.messages";
        if self.ways.is_empty() {
            return Ok(());
        }
        let ways = || self.ways.keys();
        sqlx::query(WAYS)
            .bind(deployment_id)
            .bind(ways().map(|(table, _, _)| storable(table)).collect::<Vec<_>>())
            .bind(ways().map(|(_, change, _)| *change).collect::<Vec<_>>())
            .bind(ways().map(|(_, _, column)| storable(column)).collect::<Vec<_>>())
            .bind(self.ways.values().copied().collect::<Vec<_>>())
            .bind(SUMS_MAX)
            .execute(connection)
            .await?;
        Ok(())
    }

    async fn write_kept(
        &self,
        connection: &mut sqlx::PgConnection,
        deployment_id: i64,
    ) -> Result<(), InboxError> {
        const KEEP: &str = "INSERT INTO oncebox.shadow_difference \
                (deployment_id, message_id, \"table\", change, \"column\", row_key, before, live, \
                candidate) \
            SELECT $1, u.* FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], \
            $7::text[], $8::text[], $9::text[]) AS u";
        const PRUNE: &str = "DELETE FROM oncebox.shadow_difference WHERE deployment_id = $1 AND \
            difference_id <= \
            (SELECT difference_id FROM oncebox.shadow_difference WHERE deployment_id = $1 ORDER BY \
            difference_id DESC OFFSET $2 LIMIT 1)";
        if self.kept.is_empty() {
            return Ok(());
        }
        let kept = || self.kept.iter().map(|(_, difference)| difference);
        sqlx::query(KEEP)
            .bind(deployment_id)
            .bind(self.kept.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>())
            .bind(kept().map(|d| storable(&d.table)).collect::<Vec<_>>())
            .bind(kept().map(|d| d.change).collect::<Vec<_>>())
            .bind(kept().map(|d| storable(&d.column)).collect::<Vec<_>>())
            .bind(kept().map(|d| d.key.as_deref().map(storable)).collect::<Vec<_>>())
            .bind(kept().map(|d| d.before.as_deref().map(storable)).collect::<Vec<_>>())
            .bind(kept().map(|d| d.live.as_deref().map(storable)).collect::<Vec<_>>())
            .bind(kept().map(|d| d.candidate.as_deref().map(storable)).collect::<Vec<_>>())
            .execute(&mut *connection)
            .await?;
        sqlx::query(PRUNE).bind(deployment_id).bind(DIFFERENCES_MAX).execute(connection).await?;
        Ok(())
    }
}

impl Difference {
    /// Cuts each value to at most `VALUE_BYTES`, and marks the cut.
    fn cut(mut self) -> Self {
        for value in [&mut self.key, &mut self.before, &mut self.live, &mut self.candidate]
            .into_iter()
            .flatten()
        {
            let mut end = value.len().min(VALUE_BYTES);
            while !value.is_char_boundary(end) {
                end -= 1;
            }
            if end < value.len() {
                value.truncate(end);
                value.push('…');
            }
        }
        self
    }

    /// Removes key and values, for a consumer that keeps no payloads. Table, kind of change and
    /// column stay.
    fn without_values(self) -> Self {
        Self { key: None, before: None, live: None, candidate: None, ..self }
    }
}

/// Returns a text that PostgreSQL accepts: zero bytes are replaced.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
