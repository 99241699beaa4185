//! The functions of the host's schemas: one file each in `host/inbox/sql`, with the current text
//! only, applied after the numbered migrations.
//!
//! The table `oncebox.function` records the text of each applied function, and the schema number of
//! the program that applied it. A text is applied where the record, or the function in PostgreSQL,
//! differs from the file. A function without a file is dropped.
//!
//! A program with a lower number than the record's changes nothing. So an older host that starts
//! later never puts an older text back. Everything happens in one transaction, record and
//! privileges included. A host that dies in the middle leaves the earlier state, and the next host
//! repeats the work.

use std::{borrow::Cow, collections::HashMap};

use oncebox_model::{error::InboxError, sqlstate, tx::answered};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use super::schema::GRANTS;

/// The number of this program's schema. A release whose migrations or functions differ from those
/// of the release before has a higher one. Of two programs with one number, the one that starts
/// last leaves its texts.
pub const SCHEMA_NUMBER: i32 = 2;

macro_rules! texts {
    ($($file:literal),+ $(,)?) => {
        &[$(include_str!(concat!("../../../inbox/sql/", $file, ".sql"))),+]
    };
}

/// Texts of the functions, in the order in which they are applied. A function in the language SQL
/// follows those that it calls: PostgreSQL resolves them when it creates the function.
static TEXTS: &[&str] = texts![
    // The check of the caller, and the path of a message.
    "authorize",
    "claim",
    "restore_records",
    "complete",
    "settle_unrouted",
    "take_partition",
    "position_of",
    "partition_cleared",
    // Retries.
    "lease",
    "resume",
    "release",
    "lease_ends",
    "renew_lease",
    "lease_interrupted",
    "interruptions_of",
    // Order.
    "has_earlier_open",
    "next_of_key",
    "release_key",
    "release_unblocked",
    "sequence_of",
    "move_sequence",
    "version_of",
    // Outgoing messages.
    "outgoing_lane",
    "insert_outgoing",
    "write_outgoing",
    "cancel_outgoing",
    "outgoing_due",
    "lease_these_outgoing",
    "lease_outgoing",
    "receive",
    "deliver_outgoing",
    "mark_outgoing",
    "reclaim_outgoing",
    "outgoing_figures",
    // Replays.
    "page_of_replay",
    "begin_replayed",
    "complete_replayed",
    // Shadows.
    "capture",
    "capture_failed",
    "capture_row",
    "capture_missing",
    "captured",
    // Actions of operators and tenants.
    "act_on_messages",
    "edit",
    "erase_outgoing",
    "erase",
    "migration_applied",
    // Questions about a tenant and about a row.
    "is_here",
    "bucket_at",
    "changed_since",
    "has_lost_record",
    "is_unordered",
    "was_restored",
];

/// SQLSTATEs that PostgreSQL returns when it cannot replace a function. Its result or the names of
/// its parameters differ, or it was made by hand and belongs to another role. The owner of the
/// schema may nevertheless drop such a function.
const NOT_REPLACEABLE: [&str; 2] =
    [sqlstate::INVALID_FUNCTION_DEFINITION, sqlstate::INSUFFICIENT_PRIVILEGE];

/// Query for each function's hash in PostgreSQL: text, rights, settings and number of arguments. A
/// second function of one name changes the hash.
const DEFINITIONS: &str = "SELECT n.nspname || '.' || p.proname AS name, \
        sha256(convert_to(string_agg(row(p.prosrc, p.prosecdef, p.proconfig, p.pronargs)::text, '' \
        ORDER BY p.oid), 'UTF8')) AS hash \
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
    WHERE n.nspname IN ('oncebox', 'oncebox_host') GROUP BY 1";

/// The functions of a program, and the number of its schema.
#[derive(Debug, Clone)]
pub struct Functions {
    /// The schema's number.
    pub schema_number: i32,
    /// One `CREATE OR REPLACE FUNCTION` statement each, in the order in which they are applied.
    pub texts: Vec<Cow<'static, str>>,
}

/// A function as it was applied.
struct Applied {
    hash: Vec<u8>,
    schema_number: i32,
    /// Whether the function in PostgreSQL is as it was applied.
    is_intact: bool,
}

impl Functions {
    /// Returns the functions of this program.
    pub fn of_this_program() -> Self {
        let texts = TEXTS.iter().copied().map(Cow::Borrowed).collect();
        Self { schema_number: SCHEMA_NUMBER, texts }
    }

    /// Returns whether a program with a higher schema number has brought the database up to date.
    pub(crate) async fn are_superseded(
        &self,
        connection: &mut PgConnection,
    ) -> Result<bool, InboxError> {
        const NEWEST: &str = "SELECT max(schema_number) FROM oncebox.function";
        if !has_record(connection).await? {
            return Ok(false);
        }
        let newest: Option<i32> = sqlx::query_scalar(NEWEST).fetch_one(connection).await?;
        Ok(newest > Some(self.schema_number))
    }

    /// Records the schema number of this program, also before its migrations. Where an update ends
    /// half-way, hosts of the release before leave the database as it is: they do not know its
    /// migrations, and the next host of this release goes on.
    pub(crate) async fn supersede(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        const RAISE: &str =
            "UPDATE oncebox.function SET schema_number = $1 WHERE schema_number < $1";
        if has_record(connection).await? {
            sqlx::query(RAISE).bind(self.schema_number).execute(connection).await?;
        }
        Ok(())
    }

    /// Returns whether the record or a function differs from the state that [`apply`](Self::apply)
    /// leaves.
    pub(crate) async fn are_behind(
        &self,
        connection: &mut PgConnection,
    ) -> Result<bool, InboxError> {
        if !has_record(connection).await? {
            return Ok(true);
        }
        let applied = applied(connection).await?;
        let is_lower = applied.values().any(|function| function.schema_number < self.schema_number);
        let is_gone = !self.gone(&applied).is_empty();
        Ok(is_lower || is_gone || self.texts.iter().any(|text| differs(text, &applied)))
    }

    /// Returns the names of the functions that [`apply`](Self::apply) would make, replace or drop.
    pub(crate) async fn pending(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Vec<String>, InboxError> {
        let applied = match has_record(connection).await? {
            true => applied(connection).await?,
            false => HashMap::new(),
        };
        let differing = self.texts.iter().filter(|text| differs(text, &applied));
        let mut names: Vec<_> = differing.map(|text| name_of(text).to_owned()).collect();
        names.extend(self.gone(&applied).into_iter().map(str::to_owned));
        names.sort();
        Ok(names)
    }

    /// Brings the functions of a database to the texts of this program, and grants their
    /// privileges. Changes nothing where a program with a higher schema number was there before.
    ///
    /// # Errors
    /// `Refused` where PostgreSQL refuses a text, or refuses to drop a function that others depend
    /// on. Nothing is changed then.
    pub async fn apply(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        let mut tx = connection.begin().await?;
        // Two programs take turns, even where one has lost the lock of the migrations together with
        // its connection. The record is read after this lock.
        tx.execute("LOCK TABLE oncebox.function IN SHARE ROW EXCLUSIVE MODE").await?;
        if self.are_superseded(&mut tx).await? {
            return Ok(tx.rollback().await?);
        }
        let applied = applied(&mut tx).await?;
        for name in self.gone(&applied) {
            drop_all(&mut tx, name).await?;
            sqlx::query("DELETE FROM oncebox.function WHERE name = $1")
                .bind(name)
                .execute(&mut *tx)
                .await?;
        }
        for text in self.texts.iter().filter(|text| differs(text, &applied)) {
            replace(&mut tx, text).await?;
            record(&mut tx, text, self.schema_number).await?;
        }
        // Includes functions that stay: a program that only drops one supersedes the others too.
        self.supersede(&mut tx).await?;
        tx.execute(sqlx::raw_sql(GRANTS)).await?;
        Ok(tx.commit().await?)
    }

    /// Returns the names of applied functions that have no text in this program.
    fn gone<'a>(&self, applied: &'a HashMap<String, Applied>) -> Vec<&'a str> {
        let is_gone = |name: &&str| !self.texts.iter().any(|text| name_of(text) == *name);
        applied.keys().map(String::as_str).filter(is_gone).collect()
    }
}

/// Returns schema and name of the function that a text makes.
fn name_of(text: &str) -> &str {
    let (_, head) = text.split_once("CREATE OR REPLACE FUNCTION ").expect("a function's text");
    head.split_once('(').expect("a function has parameters").0.trim()
}

fn hash_of(text: &str) -> Vec<u8> {
    Sha256::digest(text).to_vec()
}

/// Returns whether a function must be applied: it is missing, altered, or of another text.
fn differs(text: &str, applied: &HashMap<String, Applied>) -> bool {
    applied
        .get(name_of(text))
        .is_none_or(|function| !function.is_intact || function.hash != hash_of(text))
}

/// Returns whether the database has the record of its functions. A new database lacks it.
async fn has_record(connection: &mut PgConnection) -> Result<bool, InboxError> {
    const RECORD: &str = "SELECT to_regclass('oncebox.function') IS NOT NULL";
    Ok(sqlx::query_scalar(RECORD).fetch_one(connection).await?)
}

/// Reads the record of applied functions, by name.
async fn applied(connection: &mut PgConnection) -> Result<HashMap<String, Applied>, InboxError> {
    let query = format!(
        "SELECT f.name, f.hash, f.schema_number, coalesce(d.hash = f.definition_hash, false) FROM \
            oncebox.function f LEFT JOIN ({DEFINITIONS}) d USING (name)"
    );
    let rows: Vec<(String, Vec<u8>, i32, bool)> =
        sqlx::query_as(AssertSqlSafe(query)).fetch_all(connection).await?;
    let applied = rows.into_iter().map(|(name, hash, schema_number, is_intact)| {
        (name, Applied { hash, schema_number, is_intact })
    });
    Ok(applied.collect())
}

/// Replaces a function. Where its signature changed, drops all functions of its name and creates
/// it, so that no second one remains.
async fn replace(connection: &mut PgConnection, text: &str) -> Result<(), InboxError> {
    const HOW_MANY: &str = "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = \
        p.pronamespace WHERE n.nspname || '.' || p.proname = $1";
    let mut savepoint = connection.begin().await?;
    match savepoint.execute(sqlx::raw_sql(AssertSqlSafe(text.to_owned()))).await {
        Ok(_) => savepoint.commit().await?,
        Err(error)
            if answered(&error)
                .is_some_and(|answer| NOT_REPLACEABLE.contains(&&*answer.sqlstate)) =>
        {
            savepoint.rollback().await?;
            return make_anew(connection, text).await;
        }
        Err(error) => return Err(error.into()),
    }
    let how_many: i64 =
        sqlx::query_scalar(HOW_MANY).bind(name_of(text)).fetch_one(&mut *connection).await?;
    if how_many > 1 { make_anew(connection, text).await } else { Ok(()) }
}

async fn make_anew(connection: &mut PgConnection, text: &str) -> Result<(), InboxError> {
    drop_all(connection, name_of(text)).await?;
    connection.execute(sqlx::raw_sql(AssertSqlSafe(text.to_owned()))).await?;
    Ok(())
}

/// Drops every function of a name. Fails where another object depends on one.
async fn drop_all(connection: &mut PgConnection, name: &str) -> Result<(), InboxError> {
    const DROPS: &str = "SELECT format('DROP ROUTINE %s', p.oid::regprocedure) FROM pg_proc p JOIN \
        pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname || '.' || p.proname = $1";
    let drops: Vec<String> =
        sqlx::query_scalar(DROPS).bind(name).fetch_all(&mut *connection).await?;
    for drop in drops {
        connection.execute(sqlx::raw_sql(AssertSqlSafe(drop))).await?;
    }
    Ok(())
}

async fn record(
    connection: &mut PgConnection,
    text: &str,
    schema_number: i32,
) -> Result<(), InboxError> {
    let record = format!(
        "INSERT INTO oncebox.function (name, hash, definition_hash, schema_number) \
         SELECT d.name, $2, d.hash, $3 FROM ({DEFINITIONS}) d WHERE d.name = $1 \
         ON CONFLICT (name) DO UPDATE SET hash = excluded.hash, \
            definition_hash = excluded.definition_hash, schema_number = excluded.schema_number, \
            applied_at = excluded.applied_at"
    );
    sqlx::query(AssertSqlSafe(record))
        .bind(name_of(text))
        .bind(hash_of(text))
        .bind(schema_number)
        .execute(connection)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_file_is_a_function_of_its_name() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../inbox/sql");
        let files: BTreeSet<_> = std::fs::read_dir(folder)
            .expect("the folder of the functions")
            .map(|file| file.expect("a file").file_name().into_string().expect("a name"))
            .collect();
        let named = |text: &&str| {
            let (schema, name) = name_of(text).split_once('.').expect("a schema");
            assert!(["oncebox", "oncebox_host"].contains(&schema), "{schema}");
            format!("{name}.sql")
        };
        assert_eq!(files, TEXTS.iter().map(named).collect::<BTreeSet<_>>());
        assert_eq!(files.len(), TEXTS.len());
    }

    #[test]
    fn a_text_is_one_statement() {
        for text in TEXTS {
            assert_eq!(text.matches("$$").count(), 2, "{text}");
            assert!(text.trim_end().ends_with("$$;"), "{text}");
            assert_eq!(text.matches(" FUNCTION oncebox").count(), 1, "{text}");
        }
    }

    // What could go wrong: to avoid a plan, PostgreSQL adds ten billion to its cost. Where it finds
    // no other, it then compiles this costly plan for half a second, at each call.
    #[test]
    fn a_function_that_avoids_plans_compiles_none() {
        for text in TEXTS {
            assert_eq!(text.contains("SET enable_"), text.contains("SET jit = off"), "{text}");
        }
    }

    /// Hashes of released texts, by schema number: each release adds its line.
    const RELEASED: &[(i32, &str)] =
        &[(1, "48933e033b968884faf3888fe8ab03a87c3e9a8c04d63c81a68ab8521cda2c63")];

    /// Hashes of released migrations, by number: each release adds its own.
    const RELEASED_MIGRATIONS: &[(i64, &str)] =
        &[(1, "a5adcab3768562e89517692dacf49f3ed98f60fb95643e11e35192424af22929")];

    // Danger: a migration is changed after a release, and each database that has it is refused.
    #[test]
    fn released_migrations_stay_as_they_are() {
        for (number, released) in RELEASED_MIGRATIONS {
            let mut migrations = super::super::schema::MIGRATIONS.iter();
            let migration = migrations.find(|migration| migration.version == *number);
            let text = &migration.expect("a released migration").sql;
            assert_eq!(hex::encode(Sha256::digest(text.as_str())), *released, "{number}");
        }
    }

    // Danger: a release changes a text under the number of the one before, whose hosts then put the
    // older text back.
    #[test]
    fn released_texts_have_a_number_of_their_own() {
        let mut all = Sha256::new();
        super::super::schema::MIGRATIONS
            .iter()
            .for_each(|migration| all.update(migration.sql.as_str()));
        TEXTS.iter().for_each(|text| all.update(text));
        let texts = hex::encode(all.finalize());
        let newest = RELEASED.iter().map(|(number, _)| *number).max().unwrap_or_default();
        assert!(SCHEMA_NUMBER >= newest, "the number only grows");
        for (number, released) in RELEASED {
            assert!(
                *number != SCHEMA_NUMBER || *released == texts,
                "these texts are not those that were released as {number}: raise SCHEMA_NUMBER"
            );
        }
    }
}
