//! The quantities that a soak watches: what could grow without end.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use crate::{
    measure::{resident_bytes, shared_out_bytes},
    servers::Database,
    trend::{fifths, is_flat, slope},
};

const MIB: f64 = 1_048_576.0;

/// A quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Size of the database without the tenant's own tables.
    Database,
    /// Size of the inbox with its indexes.
    Inbox,
    /// Time partitions of the inbox.
    Partitions,
    /// Messages that are neither completed nor skipped nor discarded.
    Open,
    /// Size of the history of failed messages.
    History,
    /// Size of the payloads that edits replaced.
    Edits,
    /// Dead rows of the table of open claims.
    DeadGuard,
    /// Dead rows of the marks of what was forgotten.
    DeadForgotten,
    /// Dead rows of the removals.
    DeadRemoval,
    /// Dead rows of the counts of duplicates.
    DeadDuplicates,
    /// Connections to the database.
    Connections,
    /// Locks that are held or waited for in the database.
    Locks,
    /// Resident memory of the host.
    Host,
    /// Memory of all processes of PostgreSQL, what they share counted once.
    Postgres,
    /// Messages that complete, a second.
    Completed,
}

use Quantity::{
    Completed, Connections, Database as DatabaseSize, DeadDuplicates, DeadForgotten, DeadGuard,
    DeadRemoval, Edits, History, Host, Inbox, Locks, Open, Partitions, Postgres,
};

impl Quantity {
    /// All quantities, in the order of tables and plots.
    pub const ALL: [Self; 15] = [
        DatabaseSize,
        Inbox,
        Partitions,
        Open,
        History,
        Edits,
        DeadGuard,
        DeadForgotten,
        DeadRemoval,
        DeadDuplicates,
        Connections,
        Locks,
        Host,
        Postgres,
        Completed,
    ];

    /// Returns the name that tables and plots show.
    pub fn title(self) -> &'static str {
        match self {
            DatabaseSize => "database, MiB",
            Inbox => "inbox, MiB",
            Partitions => "time partitions",
            Open => "open messages",
            History => "`inbox_history`, MiB",
            Edits => "`inbox_edit`, MiB",
            DeadGuard => "dead rows of `guard`",
            DeadForgotten => "dead rows of `forgotten`",
            DeadRemoval => "dead rows of `removal`",
            DeadDuplicates => "dead rows of `duplicates_refused`",
            Connections => "connections",
            Locks => "locks",
            Host => "host's memory, MiB",
            Postgres => "PostgreSQL's memory, MiB",
            Completed => "completed messages a second",
        }
    }

    /// Returns the growth beyond the second fifth's mean that is flat, whatever that mean is: of a
    /// quantity that is small, or that rises and falls between two vacuums.
    pub fn allowance(self) -> f64 {
        match self {
            DatabaseSize | Host => 16.0,
            Postgres => 32.0,
            Inbox => 8.0,
            History | Edits => 1.0,
            Partitions => 1.0,
            Connections => 2.0,
            Locks => 50.0,
            Open => 50.0,
            // Vacuums begin at these numbers of dead rows.
            DeadGuard => 10_000.0,
            DeadForgotten | DeadRemoval | DeadDuplicates => 100.0,
            Completed => 0.0,
        }
    }
}

/// A quantity over time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Series {
    /// The quantity.
    pub quantity: Quantity,
    /// Minutes since the load began, with the values.
    pub points: Vec<(f64, f64)>,
}

/// The trend of a quantity after a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trend {
    /// Mean of each fifth of the time.
    pub fifths: [f64; 5],
    /// Slope of the line of least squares, value per hour.
    pub per_hour: f64,
    /// Whether the last fifth's mean is not above the second fifth's, but for a tenth or the
    /// quantity's allowance. Of what completes: whether it is not below it by more than a tenth.
    pub is_flat: bool,
}

impl Series {
    /// Returns the trend from a minute on; none where there are too few values.
    pub fn trend(&self, from_minute: f64) -> Option<Trend> {
        let points: Vec<_> =
            self.points.iter().copied().filter(|(minute, _)| *minute >= from_minute).collect();
        let fifths = fifths(&points)?;
        let is_flat = match self.quantity {
            // Here less is worse.
            Completed => is_flat([0.0, fifths[4], 0.0, 0.0, fifths[1]], Completed.allowance()),
            quantity => is_flat(fifths, quantity.allowance()),
        };
        Some(Trend { fifths, per_hour: slope(&points)? * 60.0, is_flat })
    }
}

/// What a query finds at once.
#[derive(sqlx::FromRow)]
struct Found {
    database: f64,
    inbox: f64,
    partitions: f64,
    open: f64,
    history: f64,
    edits: f64,
    dead_guard: f64,
    dead_forgotten: f64,
    dead_removal: f64,
    dead_duplicates: f64,
    connections: f64,
    locks: f64,
    /// Messages that have their effect: each adds one to an account.
    completed: f64,
}

/// Samples of all quantities.
pub struct Sampling {
    database: Database,
    /// Process of the host.
    host: libc::pid_t,
    /// Process of the database server.
    postmaster: libc::pid_t,
    /// Messages that had completed at the last sample, and its minute.
    last: Option<(f64, f64)>,
    series: Vec<Series>,
}

impl Sampling {
    /// Creates a sampling without samples.
    pub fn new(database: &Database, host: libc::pid_t, postmaster: libc::pid_t) -> Self {
        let of = |quantity| Series { quantity, points: Vec::new() };
        Self {
            database: database.clone(),
            host,
            postmaster,
            last: None,
            series: Quantity::ALL.into_iter().map(of).collect(),
        }
    }

    /// Takes a sample.
    pub async fn take(&mut self, minute: f64) -> Result<()> {
        let found = self.found().await?;
        let per_second = self.last.map(|(last, completed)| {
            (found.completed - completed) / ((minute - last) * 60.0).max(0.001)
        });
        self.last = Some((minute, found.completed));
        for series in &mut self.series {
            let value = match series.quantity {
                DatabaseSize => Some(found.database / MIB),
                Inbox => Some(found.inbox / MIB),
                Partitions => Some(found.partitions),
                Open => Some(found.open),
                History => Some(found.history / MIB),
                Edits => Some(found.edits / MIB),
                DeadGuard => Some(found.dead_guard),
                DeadForgotten => Some(found.dead_forgotten),
                DeadRemoval => Some(found.dead_removal),
                DeadDuplicates => Some(found.dead_duplicates),
                Connections => Some(found.connections),
                Locks => Some(found.locks),
                Host => Some(resident_bytes(self.host) / MIB),
                Postgres => Some(shared_out_bytes(self.postmaster) / MIB),
                Completed => per_second,
            };
            series.points.extend(value.map(|value| (minute, value)));
        }
        Ok(())
    }

    /// Returns the series.
    pub fn finish(self) -> Vec<Series> {
        self.series
    }

    async fn found(&self) -> Result<Found> {
        let schema = &self.database.schema;
        let dead = |table: &str| {
            format!(
                "(SELECT n_dead_tup FROM pg_stat_all_tables \
                    WHERE relid = 'oncebox.{table}'::regclass)::float8"
            )
        };
        let sql = format!(
            "SELECT (pg_database_size(current_database()) \
                - coalesce((SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c \
                    WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r'), 0) \
                )::float8 AS database, \
             coalesce((SELECT sum(pg_total_relation_size(t.relid)) \
                FROM pg_partition_tree('oncebox.inbox') t WHERE t.isleaf), 0)::float8 AS inbox, \
             (SELECT count(*) FROM pg_partition_tree('oncebox.inbox') t WHERE t.isleaf)::float8 \
                AS partitions, \
             (SELECT count(*) FROM oncebox.inbox WHERE status <> 'completed' \
                AND status NOT IN ('skipped', 'discarded'))::float8 AS open, \
             pg_total_relation_size('oncebox.inbox_history')::float8 AS history, \
             pg_total_relation_size('oncebox.inbox_edit')::float8 AS edits, \
             {} AS dead_guard, {} AS dead_forgotten, {} AS dead_removal, {} AS dead_duplicates, \
             (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                AND backend_type = 'client backend' AND pid <> pg_backend_pid())::float8 \
                AS connections, \
             (SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                WHERE d.datname = current_database() AND l.pid <> pg_backend_pid())::float8 \
                AS locks, \
             (SELECT sum(n) FROM {schema}.account)::float8 AS completed",
            dead("guard"),
            dead("forgotten"),
            dead("removal"),
            dead("duplicates_refused"),
        );
        let mut connection = self.database.connect().await?;
        Ok(sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&mut connection).await?)
    }
}

#[cfg(test)]
mod tests {
    use oncebox_tests::inbox::InboxFixture;

    use super::*;

    fn series(quantity: Quantity, value: impl Fn(f64) -> f64) -> Series {
        let points = (0..180).map(|nth| f64::from(nth) / 6.0);
        Series { quantity, points: points.map(|minute| (minute, value(minute))).collect() }
    }

    #[test]
    fn what_grows_is_not_flat_and_what_completes_must_not_fall() {
        fn trend(quantity: Quantity, value: impl Fn(f64) -> f64) -> Trend {
            series(quantity, value).trend(5.0).expect("a trend")
        }
        let growing = trend(DatabaseSize, |minute| 100.0 + 2.0 * minute);
        assert!(!growing.is_flat && (growing.per_hour - 120.0).abs() < 1e-6, "{growing:?}");
        assert!(trend(DatabaseSize, |minute| 100.0 + minute.min(5.0)).is_flat);
        assert!(trend(DeadGuard, |minute| 9_000.0 * (minute % 2.0)).is_flat);
        assert!(trend(Completed, |_| 500.0).is_flat);
        assert!(trend(Completed, |minute| 500.0 + minute).is_flat);
        assert!(!trend(Completed, |minute| 500.0 - 10.0 * minute).is_flat);
        assert!(series(Inbox, |_| 1.0).trend(29.6).is_none(), "too little time is no trend");
    }

    // What could go wrong: a table or a column has another name, and only a soak would tell.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_sample_has_a_value_of_every_quantity() {
        let fixture = InboxFixture::new().await;
        let schema_sql = "CREATE TABLE account (id int PRIMARY KEY, n bigint NOT NULL); \
            INSERT INTO account VALUES (1, 5), (2, 7);";
        let consumer = fixture.simple(schema_sql, "").await;
        let database = Database::at(fixture.url(), consumer.tenant.schema_name.clone());
        let pid = std::process::id() as libc::pid_t;
        let mut sampling = Sampling::new(&database, pid, pid);
        sampling.take(0.0).await.expect("a sample");
        fixture
            .execute(format!("UPDATE {}.account SET n = n + 30", consumer.tenant.schema_name))
            .await;
        sampling.take(1.0).await.expect("a second sample");
        let found = sampling.finish();
        let last = |quantity| {
            let of = found.iter().find(|series| series.quantity == quantity);
            of.and_then(|series| series.points.last()).map(|(_, value)| *value)
        };
        assert_eq!(last(Completed), Some(1.0), "60 more in a minute");
        assert_eq!(last(Open), Some(0.0));
        assert!(last(Partitions).is_some_and(|count| count >= 3.0), "{found:?}");
        for quantity in [DatabaseSize, Inbox, History, Edits, Connections, Host, Postgres] {
            assert!(last(quantity).is_some_and(|value| value > 0.0), "{quantity:?}: {found:?}");
        }
        for quantity in Quantity::ALL {
            assert!(last(quantity).is_some(), "{quantity:?}");
        }
        fixture.finish().await;
    }
}
