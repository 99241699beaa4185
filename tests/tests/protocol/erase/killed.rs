//! Processes that die at any step of an erasure.

use std::{fs, os::unix::process::ExitStatusExt, path::Path, process::Output};

use oncebox_model::hooks::{ARCHIVE_ERASE_POINTS, ERASE_POINTS};
use oncebox_tests::{
    cli::{Access, CliFixture},
    host::program,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::process::Command;

/// What could go wrong: a process dies in the middle of an erasure, and the repeated command leaves
/// something readable, erases a message twice, or begins to count from the beginning.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_that_was_killed_at_any_step_goes_on() {
    let mut cli = CliFixture::open(Access::Database).await;
    cli.file("policy.toml", "topics = ['t']\nack = 'after_commit'\n");
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"]).await;
    let url: PgConnectOptions = cli.folder().get("ONCEBOX_DATABASE_URL").unwrap().parse().unwrap();
    let mut database = PgConnection::connect_with(&url).await.unwrap();
    for (round, point) in ERASE_POINTS.iter().enumerate() {
        fill(&mut database, round).await;
        let died = run(command(&mut cli, round), Some(point)).await;
        assert_eq!(died.status.signal(), Some(9), "`{point}` was never reached: {died:?}");
        let left: i64 = number(&mut database, LEFT).await;
        // A transaction erases 200 of the 250: the first one was committed before this point.
        let expected = match *point {
            "erase:begin:after" | "erase:batch:before" => 250,
            "erase:batch:after" => 50,
            _ => 0,
        };
        assert_eq!(left, expected, "{point}: messages that are left");
        let ended = run(command(&mut cli, round), None).await;
        assert!(ended.status.success(), "{point}: {ended:?}");
        assert_eq!(number(&mut database, LEFT).await, 0, "{point}: something is readable");
        let proof: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
        let erased = &proof["erased"][0]["messages"];
        // Only an erasure that has ended is another one when it is repeated.
        let counts = match *point {
            "erase:end:after" => (None, Some(250)),
            _ => (Some(250), Some(0)),
        };
        assert_eq!((erased.as_i64(), proof["already_erased"].as_i64()), counts, "{point}: {proof}");
    }
    let rounds = ERASE_POINTS.len() as i64;
    assert_eq!(number(&mut database, ERASED).await, rounds * 250, "each message once");
    assert_eq!(
        number(&mut database, ENDED).await,
        rounds + 1,
        "one end of each, and one of nothing"
    );
    assert_eq!(number(&mut database, "SELECT count(*) FROM oncebox.erasure").await, 0);
    database.close().await.unwrap();
}

/// What could go wrong: a process dies while it replaces a file of the archive, and a message is
/// lost, stays readable, or stays in a file that nobody knows.
#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_in_the_archive_that_was_killed_at_any_step_goes_on() {
    let mut cli = CliFixture::open(Access::Database).await;
    cli.file("policy.toml", "topics = ['t']\nack = 'after_commit'\n");
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"]).await;
    let url: PgConnectOptions = cli.folder().get("ONCEBOX_DATABASE_URL").unwrap().parse().unwrap();
    let mut database = PgConnection::connect_with(&url).await.unwrap();
    for (round, point) in ARCHIVE_ERASE_POINTS.iter().enumerate() {
        fill_old(&mut database, round).await;
        let mut retention = archiving(&mut cli);
        retention.args(["retention", "run"]);
        let removed = run(retention, None).await;
        assert!(removed.status.success(), "{removed:?}");
        let erase = |cli: &mut CliFixture| {
            let (mut command, key) = (archiving(cli), format!("k{round}"));
            command.args(["erase", "--tenant", "acme", "--key", &key, "--reason", "r", "--yes"]);
            command
        };
        let died = run(erase(&mut cli), Some(point)).await;
        assert_eq!(died.status.signal(), Some(9), "`{point}` was never reached: {died:?}");
        let ended = run(erase(&mut cli), None).await;
        assert!(ended.status.success(), "{point}: {ended:?}");
        let proof: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
        let counts = (proof["archive_files"].as_i64(), proof["archived"].as_i64());
        assert_eq!(counts, (Some(1), Some(3)), "{point}: {proof}");
        let files = round as i64 + 1;
        assert_eq!(parquet_files(&cli.dir().join("archive")), files, "{point}");
        assert_eq!(number(&mut database, "SELECT count(*) FROM oncebox.archive_file").await, files);
        // The file of a put that may have gone on is deleted, and keeps its row for an hour.
        let attempts = "SELECT count(*) FROM oncebox.archive_attempt \
            WHERE is_left OR put_ends_at IS NULL OR put_ends_at <= now()";
        assert_eq!(number(&mut database, attempts).await, 0, "{point}");
        let mut find = archiving(&mut cli);
        let id = format!("old{round}-2");
        find.args(["archive", "find", &id, "--tenant", "acme", "--payload", "--json"]);
        let found = run(find, None).await;
        assert!(found.status.success(), "{found:?}");
        let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
        assert!(found[0]["erased_at"].is_string() && found[0]["payload"].is_null(), "{found}");
    }
    database.close().await.unwrap();
}

fn parquet_files(folder: &Path) -> i64 {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| match path.is_dir() {
            true => parquet_files(&path),
            false => i64::from(path.extension().is_some_and(|extension| extension == "parquet")),
        })
        .sum()
}

/// Completed messages of a key of its own for each round, in a time partition that is due.
async fn fill_old(database: &mut PgConnection, round: usize) {
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
                partition, \"offset\", record_timestamp_ms, key, status, processed_at, payload) \
            SELECT c.consumer_id, 'old{round}-' || n, 1, v_from, 't', 0, {round} * 10 + n, 1, \
                'k{round}', 'completed', v_from, 'x' FROM generate_series(1, 3) n, \
                oncebox.consumer c; END $$"
    );
    database.execute(sqlx::raw_sql(AssertSqlSafe(fill))).await.unwrap();
}

/// The program with an archive, without a command.
fn archiving(cli: &mut CliFixture) -> Command {
    let mut command = Command::new(program().unwrap());
    for name in ["ONCEBOX_DATABASE_URL", "ONCEBOX_MASTER_KEY"] {
        command.env(name, cli.folder().get(name).unwrap());
    }
    let location = format!("file://{}", cli.dir().join("archive").display());
    command.env("ONCEBOX_ARCHIVE_LOCATION", location);
    command
}

const LEFT: &str = "SELECT count(*) FROM oncebox.inbox WHERE erased_at IS NULL OR payload IS NOT \
    NULL OR payload_hash IS NOT NULL OR last_error IS NOT NULL";
const ERASED: &str = "SELECT count(*) FROM oncebox.inbox_history WHERE event = 'erased'";
const ENDED: &str = "SELECT count(*) FROM oncebox.audit WHERE action = 'erase'";

async fn number(database: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(database).await.unwrap()
}

/// Dead letters of a key of its own for each round: more than one transaction erases.
async fn fill(database: &mut PgConnection, round: usize) {
    let fill = format!(
        "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
            partition, \"offset\", record_timestamp_ms, key, status, reason, last_error, \
            processed_at, payload, headers, payload_hash) \
         SELECT c.consumer_id, 'm{round}-' || n, 1, oncebox.bucket_at(1::smallint, now()), 't', 0, \
            {round} * 1000 + n, 1, 'k{round}', 'failed_terminal', 'reject', 'x', now(), 'x', '', \
            'x' \
         FROM generate_series(1, 250) n, oncebox.consumer c"
    );
    database.execute(sqlx::raw_sql(AssertSqlSafe(fill))).await.unwrap();
}

/// The program, as an operator runs it.
fn command(cli: &mut CliFixture, round: usize) -> Command {
    let mut command = Command::new(program().unwrap());
    for name in ["ONCEBOX_DATABASE_URL", "ONCEBOX_MASTER_KEY"] {
        command.env(name, cli.folder().get(name).unwrap());
    }
    let key = format!("k{round}");
    command.args(["erase", "--tenant", "acme", "--key", &key, "--reason", "a test", "--yes"]);
    command
}

/// Runs the program, which dies at a step of an erasure.
async fn run(mut command: Command, point: Option<&str>) -> Output {
    if let Some(point) = point {
        command.env("ONCEBOX_FAILPOINT", point);
    }
    command.output().await.unwrap()
}
