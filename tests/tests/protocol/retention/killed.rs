//! Processes that die at any step of an archived removal, two of them at a time.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Output,
};

use oncebox_model::hooks::RETENTION_POINTS;
use oncebox_tests::{
    cli::{Access, CliFixture},
    host::program,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::process::Command;

/// What could go wrong: a process dies in the middle of a removal; the next one counts what went
/// twice, never ends the removal, drops what must stay, forgets without a mark, or archives a
/// message twice or not at all. S1-099.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_was_killed_at_any_step_goes_on() {
    let mut cli = CliFixture::open(Access::Database).await;
    cli.file(
        "policy.toml",
        "topics = ['t']\nack = 'after_commit'\nidentity = { id = [{ header = 'id' }], event_type = \
            ['topic'] }\n",
    );
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"]).await;
    let url: PgConnectOptions = cli.folder().get("ONCEBOX_DATABASE_URL").unwrap().parse().unwrap();
    let mut database = PgConnection::connect_with(&url).await.unwrap();
    let mut rounds: i64 = 0;
    for point in RETENTION_POINTS {
        rounds += 1;
        fill(&mut database, rounds).await;
        // Both are told to die at the step; one of them reaches it, or each in its turn.
        let (first, second) = (command(&mut cli), command(&mut cli));
        let (one, other) = tokio::join!(run(first, Some(point)), run(second, Some(point)));
        let died = [&one, &other].iter().filter(|output| output.status.signal() == Some(9)).count();
        assert!(died > 0, "`{point}` was never reached: {one:?} {other:?}");
        let (first, second) = (command(&mut cli), command(&mut cli));
        let (one, other) = tokio::join!(run(first, None), run(second, None));
        assert!(one.status.success() && other.status.success(), "{point}: {one:?} {other:?}");
        let counts: (i64, i64, i64, i64, i64, i64, i64) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM oncebox.removal WHERE state = 'dropped'), \
                (SELECT count(*) FROM oncebox.removal WHERE state <> 'dropped'), \
                (SELECT count(*) FROM oncebox.inbox), \
                (SELECT completed FROM oncebox.forgotten), \
                (SELECT count(*) FROM oncebox.inbox_history), \
                (SELECT count(*) FROM oncebox.archive_file), \
                (SELECT coalesce(sum(rows), 0)::bigint FROM oncebox.archive_file)",
        )
        .fetch_one(&mut database)
        .await
        .unwrap();
        // Each round: 100 go, 10 stay with their history. S0-029: those that go are in one file.
        assert_eq!(
            counts,
            (rounds, 0, rounds * 10, rounds * 100, rounds * 10, rounds, rounds * 100),
            "{point}: dropped, unfinished, rows, forgotten, history, files, archived"
        );
        println!("{point}: {died} killed, then brought to its end");
    }
    let files: Vec<(String, i64)> = sqlx::query_as("SELECT path, bytes FROM oncebox.archive_file")
        .fetch_all(&mut database)
        .await
        .unwrap();
    let folder = cli.dir().join("archive");
    for (path, bytes) in &files {
        let file = folder.join(path);
        assert_eq!(file.metadata().unwrap().len() as i64, *bytes, "{}", file.display());
    }
    // S0-029: nothing of a message is in a file that no row names. That of an attempt which was
    // interrupted is deleted once more when no put of it can be under way.
    const ATTEMPTS: &str = "SELECT count(*) FROM oncebox.archive_attempt";
    const RUNNING: &str = "SELECT count(*) FROM oncebox.archive_attempt WHERE put_ends_at IS NULL";
    assert_eq!(number(&mut database, RUNNING).await, 0, "an attempt is taken for one at work");
    assert!(number(&mut database, ATTEMPTS).await > 0, "some were killed while they wrote");
    let hour = "UPDATE oncebox.archive_attempt SET put_ends_at = now()";
    database.execute(hour).await.unwrap();
    let last = run(command(&mut cli), None).await;
    assert!(last.status.success(), "{last:?}");
    assert_eq!(number(&mut database, ATTEMPTS).await, 0, "an attempt is left");
    let mut known: Vec<_> = files.iter().map(|(path, _)| folder.join(path)).collect();
    known.sort_unstable();
    assert_eq!(parquet_files(&folder), known, "a file without a row");
    database.close().await.unwrap();
}

async fn number(database: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(database).await.unwrap()
}

/// The files of Parquet below a folder, those of puts that did not end included, in order.
fn parquet_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(parquet_files(&path));
        } else if path.to_string_lossy().contains(".parquet") {
            found.push(path);
        }
    }
    found.sort_unstable();
    found
}

/// A partition of its own for each round, with messages that go and messages that stay.
async fn fill(database: &mut PgConnection, round: i64) {
    let days = 20 + 3 * round;
    let fill = format!(
        "DO $$ DECLARE v_from timestamptz; v_name text; BEGIN \
            v_from := oncebox.bucket_at(1::smallint, now() - interval '{days} days'); \
            v_name := 'inbox_7d' || to_char(v_from AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS'); \
            EXECUTE format('CREATE TABLE oncebox.%I PARTITION OF oncebox.inbox_7d FOR VALUES FROM \
                (%L) TO (%L)', v_name, v_from, v_from + interval '56 hours'); \
            EXECUTE format('ALTER TABLE oncebox.%I OWNER TO %I', v_name, (SELECT \
                pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'oncebox.inbox'::regclass)); \
            INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, reason, processed_at, payload) \
            SELECT c.consumer_id, 'm{round}-' || n, 1, v_from, 't', 0, {round} * 1000 + n, 1, \
                CASE WHEN n % 11 = 0 THEN 'parked' ELSE 'completed' END, \
                CASE WHEN n % 11 = 0 THEN 'park' END, v_from, 'x' \
            FROM generate_series(1, 110) n, oncebox.consumer c; \
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, at) \
            SELECT c.consumer_id, 'm{round}-' || n, 'failed', v_from \
            FROM generate_series(1, 110) n, oncebox.consumer c WHERE n % 11 < 2; END $$"
    );
    database.execute(sqlx::raw_sql(AssertSqlSafe(fill))).await.unwrap();
}

/// The program, as an operator runs it.
fn command(cli: &mut CliFixture) -> Command {
    let mut command = Command::new(program().unwrap());
    for name in ["ONCEBOX_DATABASE_URL", "ONCEBOX_MASTER_KEY"] {
        command.env(name, cli.folder().get(name).unwrap());
    }
    let location = format!("file://{}", cli.dir().join("archive").display());
    command.env("ONCEBOX_ARCHIVE_LOCATION", location).args(["retention", "run"]);
    command
}

/// Runs the program, which dies at a step of a removal.
async fn run(mut command: Command, point: Option<&str>) -> Output {
    if let Some(point) = point {
        command.env("ONCEBOX_FAILPOINT", point);
    }
    command.output().await.unwrap()
}
