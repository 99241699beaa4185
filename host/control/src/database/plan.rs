//! The plan of an update: which migrations and functions a database lacks, and which of its tables
//! the migrations lock.
//!
//! Each migration after the first names the tables that it locks against hosts in lines of its
//! text, `-- Locks: oncebox.inbox, one read`. A test runs the migrations and compares.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, tx::bounded};
use serde::Serialize;
use sqlx::{PgConnection, migrate::Migration};

use super::{
    functions::Functions,
    schema::{self, MIGRATIONS},
    tenant_database::{DatabaseLabel, InboxDatabase},
};
use crate::handles::TenantDatabases;

/// What an update would do to a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MigrationPlan {
    /// Whether a newer release has brought the database up to date, so that this one changes
    /// nothing.
    pub is_newer: bool,
    /// Migrations that would be applied, in order.
    pub migrations: Vec<PlannedMigration>,
    /// Functions that would be made, replaced or dropped. That locks no table.
    pub functions: Vec<String>,
}

/// A migration that a database lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedMigration {
    /// Its number.
    pub version: i64,
    /// Its name.
    pub name: String,
    /// The tables that it locks, of those that are there already.
    pub locks: Vec<PlannedLock>,
}

/// A table that a migration locks: until it commits, hosts wait that use the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedLock {
    /// The table, with its schema.
    pub table: String,
    /// Time for which it is locked.
    pub time: LockTime,
    /// Bytes of the table with its partitions, indexes excluded.
    pub bytes: i64,
    /// Transactions that use the table now. The migration waits for them, and hosts wait behind it.
    pub transactions: i64,
    /// Start of the oldest of those that the host's login may look at.
    pub oldest_since: Option<DateTime<Utc>>,
}

/// Time for which a migration locks a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LockTime {
    /// That of a change of the catalog, however large the table is.
    Instant,
    /// That of one read of the whole table.
    OneRead,
}

impl MigrationPlan {
    /// Returns whether the database has everything of this release.
    pub fn is_empty(&self) -> bool {
        self.migrations.is_empty() && self.functions.is_empty()
    }
}

impl LockTime {
    /// Returns the words of a migration's text.
    pub fn words(self) -> &'static str {
        match self {
            Self::Instant => "an instant",
            Self::OneRead => "one read",
        }
    }

    fn parse(words: &str) -> Option<Self> {
        [Self::Instant, Self::OneRead].into_iter().find(|time| time.words() == words)
    }
}

impl TenantDatabases<'_> {
    /// Returns the plans for the host's database and for the others with an inbox, in this order. A
    /// database that cannot be read has its error. Changes nothing.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn migration_plans(
        &self,
    ) -> Result<Vec<(DatabaseLabel, Result<MigrationPlan, InboxError>)>, InboxError> {
        let mut connection = self.own().connect().await?;
        let mut plans = vec![(DatabaseLabel::default(), Ok(plan(&mut connection).await?))];
        if schema::newest_migration(&mut connection).await?.is_none() {
            return Ok(plans); // there is no tenant yet
        }
        for database in self.all().await?.into_iter().skip(1) {
            let planned = self.plan_of(&database).await;
            plans.push((database.label, planned));
        }
        Ok(plans)
    }

    async fn plan_of(&self, database: &InboxDatabase) -> Result<MigrationPlan, InboxError> {
        let mut connection = database.database.connect().await?;
        self.check_is_ours(&mut connection, &database.label).await?;
        plan(&mut connection).await
    }
}

async fn plan(connection: &mut PgConnection) -> Result<MigrationPlan, InboxError> {
    let functions = Functions::of_this_program();
    let mut plan = MigrationPlan { is_newer: false, migrations: Vec::new(), functions: Vec::new() };
    if functions.are_superseded(connection).await? {
        plan.is_newer = true;
        return Ok(plan);
    }
    let newest = schema::newest_migration(connection).await?;
    for migration in MIGRATIONS.iter().filter(|migration| Some(migration.version) > newest) {
        let mut locks = Vec::new();
        for (table, time) in declared_locks(migration) {
            locks.extend(lock(connection, table, time).await?);
        }
        let name = migration.description.replace(' ', "_");
        plan.migrations.push(PlannedMigration { version: migration.version, name, locks });
    }
    plan.functions = functions.pending(connection).await?;
    Ok(plan)
}

/// Returns the tables that a migration's text says it locks.
fn declared_locks(migration: &Migration) -> Vec<(&str, LockTime)> {
    let lines = migration.sql.as_str().lines().filter_map(|line| line.strip_prefix("-- Locks: "));
    lines
        .map(|line| {
            let (table, time) = line.split_once(", ").expect("a test parses each migration");
            (table, LockTime::parse(time).expect("a test parses each migration"))
        })
        .collect()
}

/// Returns the state of a table that a migration locks; none where there is no such table yet.
async fn lock(
    connection: &mut PgConnection,
    table: &str,
    time: LockTime,
) -> Result<Option<PlannedLock>, InboxError> {
    const STATE: &str = "WITH parts AS (SELECT to_regclass($1)::oid AS oid UNION SELECT relid FROM \
            pg_partition_tree(to_regclass($1))), \
            used AS (SELECT DISTINCT l.pid, l.virtualtransaction FROM pg_locks l JOIN parts p ON \
            p.oid = l.relation WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid() AND \
            l.database = (SELECT oid FROM pg_database WHERE datname = current_database())) \
        SELECT (SELECT sum(pg_table_size(oid))::bigint FROM parts), (SELECT count(*) FROM used), \
            (SELECT min(a.xact_start) FROM used JOIN pg_stat_activity a USING (pid))";
    let (bytes, transactions, oldest_since): (Option<i64>, i64, Option<DateTime<Utc>>) =
        bounded(sqlx::query_as(STATE).bind(table).fetch_one(connection)).await?;
    Ok(bytes.map(|bytes| PlannedLock {
        table: table.to_owned(),
        time,
        bytes,
        transactions,
        oldest_since,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: the text of a migration names its locks in words that the plan does not
    // know, and an operator learns that from a panic.
    #[test]
    fn each_migration_names_its_locks_in_known_words() {
        for migration in MIGRATIONS.iter() {
            let lines = migration.sql.as_str().matches("Locks:").count();
            assert_eq!(declared_locks(migration).len(), lines, "{}", migration.description);
        }
    }
}
