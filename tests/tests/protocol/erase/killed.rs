//! Processes that die at any step of an erasure.

use std::{os::unix::process::ExitStatusExt, process::Output};

use oncebox_model::hooks::ERASE_POINTS;
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
