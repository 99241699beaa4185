//! What could go wrong: `oncebox test` shows something else than a host would do, keeps some of it,
//! or leaves its reader alone with a file that cannot be used.

use std::path::Path;

use futures::StreamExt;
use oncebox_control::MasterKey;
use oncebox_tests::{
    guests::{self, End, Step, execute},
    postgres::TestDatabase,
    program::{CommandOutput, WorkingDir},
};
use serde_json::{Value, json};

/// A file of the repository's examples.
fn example(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples").join(path);
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// Arguments for an example with its own messages and schema.
fn arguments(name: &str, more: &[&str]) -> Vec<String> {
    let mut arguments = vec!["test".to_owned(), example(&format!("components/{name}.wasm"))];
    arguments.extend(["--message".to_owned(), example(&format!("{name}/messages.jsonl"))]);
    arguments.extend(["--schema".to_owned(), example(&format!("{name}/schema.sql"))]);
    if name == "inventory-reservation" {
        arguments.extend(["--schema".to_owned(), example("inventory-reservation/rows.sql")]);
    }
    arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
    arguments
}

async fn run(folder: &WorkingDir, arguments: &[String]) -> CommandOutput {
    folder.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), "").await.unwrap()
}

/// Times, sizes and counts of instructions differ from run to run.
fn steady(text: &str) -> String {
    let mut words = Vec::new();
    for line in text.lines() {
        let mut line = line.to_owned();
        for unit in [" ms", " KiB", " instructions"] {
            while let Some(end) =
                line.find(unit).filter(|end| line[..*end].ends_with(|c: char| c.is_ascii_digit()))
            {
                let start = line[..end]
                    .rfind(|c: char| !c.is_ascii_digit() && c != '.')
                    .map_or(0, |at| at + 1);
                line.replace_range(start..end, "N");
            }
        }
        if let Some(at) = line.find("created_at='") {
            let end = line[at + 12..].find('\'').unwrap() + at + 12;
            line.replace_range(at + 12..end, "T");
        }
        words.push(line);
    }
    words.join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_a_handler_does_is_shown_and_a_second_delivery_does_nothing() {
    let folder = WorkingDir::new().unwrap();
    let said = run(&folder, &arguments("inventory-reservation", &["--twice"])).await;
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "{}", said.stdout);
    let expected = "\
m-1  inventory.reserve  ok  {\"status\":\"reserved\"}
  inserted inventory_reservations  reservation_id=r-1  order_id=o-1  sku=apple  quantity=3  \
        created_at='T'
  updated stock  sku=apple  available 10 → 7
  statement 1  N ms  1 row  UPDATE stock SET available = available - $2 WHERE sku = $1 AND \
        available >= $2  ['apple', 3]
  statement 2  N ms  1 row  INSERT INTO inventory_reservations (reservation_id, order_id, sku, \
        quantity) VALUES ($1, $2, $3, $4)  ['r-1', 'o-1', 'apple', 3]
  N ms, N KiB of memory, N instructions
  delivered again: refused as a duplicate, since its row is `completed`; nothing ran, no row changed

m-2  inventory.reserve  ok  {\"status\":\"insufficient_stock\"}
  no row changed
  statement 1  N ms  0 rows  UPDATE stock SET available = available - $2 WHERE sku = $1 AND \
        available >= $2  ['pear', 20]
  N ms, N KiB of memory, N instructions
  delivered again: refused as a duplicate, since its row is `completed`; nothing ran, no row changed

m-3  inventory.reserve  ok  {\"status\":\"reserved\"}
  inserted inventory_reservations  reservation_id=r-3  order_id=o-2  sku=apple  quantity=4  \
        created_at='T'
  updated stock  sku=apple  available 7 → 3
  statement 1  N ms  1 row  UPDATE stock SET available = available - $2 WHERE sku = $1 AND \
        available >= $2  ['apple', 4]
  statement 2  N ms  1 row  INSERT INTO inventory_reservations (reservation_id, order_id, sku, \
        quantity) VALUES ($1, $2, $3, $4)  ['r-3', 'o-2', 'apple', 4]
  N ms, N KiB of memory, N instructions
  delivered again: refused as a duplicate, since its row is `completed`; nothing ran, no row changed

3 messages in a scratch database, 3 as expected (ok); everything was rolled back";
    assert_eq!(steady(&said.stdout), expected);
}

/// The same for programs; a ledger, whose account is opened inside a savepoint.
#[tokio::test(flavor = "multi_thread")]
async fn json_holds_the_same() {
    let folder = WorkingDir::new().unwrap();
    let said = run(&folder, &arguments("ledger", &["--twice", "--json"])).await;
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let report = said.json().unwrap();
    let second = &report["messages"][1];
    assert_eq!(
        (&second["id"], &second["outcome"], &second["status"]),
        (&json!("p-2"), &json!("ok"), &json!("completed"))
    );
    assert_eq!(second["result"], json!({ "balance": "12.75" }));
    assert_eq!(
        second["changes"],
        json!([
            { "table": "account", "change": "updated", "before": { "account": "a-1", "balance": "12.50" }, "after": { "account": "a-1", "balance": "12.75" } },
            { "table": "ledger_entry", "change": "inserted", "before": null,
              "after": { "entry": 2, "message_id": "p-2", "account": "a-1", "amount": "0.25" } },
        ])
    );
    assert_eq!(
        second["second"],
        json!({ "outcome": "duplicate of a `completed` message", "changes": [] })
    );
    let statements = second["statements"].as_array().unwrap();
    assert_eq!(statements.len(), 3, "{statements:?}");
    assert!(statements[0]["error"].as_str().unwrap().starts_with("23505: "), "{}", statements[0]);
    assert!(
        second["fuel"].as_u64().unwrap() > 1_000
            && second["memory_bytes"].as_u64().unwrap() > 65_536,
        "{second}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_business_key_keeps_the_same_order_from_being_shipped_twice() {
    let folder = WorkingDir::new().unwrap();
    folder
        .write(
            "two.json",
            r#"{"id": "a", "event_type": "order.placed", "payload": {"order_id": "o-1", "warehouse": "north", "units": 3}}
               {"id": "b", "event_type": "order.placed", "payload": {"order_id": "o-1", "warehouse": "north", "units": 3}}"#,
        )
        .unwrap();
    let mut arguments = arguments("fulfilment", &["--json"]);
    arguments[3] = "two.json".to_owned();
    let report = run(&folder, &arguments).await.json().unwrap();
    let outcomes: Vec<_> = report["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| (&m["result"]["status"], m["changes"].as_array().unwrap().len()))
        .collect();
    assert_eq!(outcomes, [(&json!("shipped"), 2), (&json!("already_shipped"), 0)]);
}

/// A guest as text beside its messages, in a folder.
fn guest(folder: &WorkingDir, steps: &[Step], end: &End) {
    folder.write("guest.wasm", guests::component(steps, end)).unwrap();
    folder.write("one.json", r#"{"id": "m-1", "event_type": "t", "payload": {}}"#).unwrap();
    folder
        .write(
            "schema.sql",
            "CREATE TABLE t (id text PRIMARY KEY, parent text REFERENCES t \
        DEFERRABLE INITIALLY DEFERRED);",
        )
        .unwrap();
}

const GUEST: &[&str] = &["test", "guest.wasm", "--message", "one.json", "--schema", "schema.sql"];

/// Every way to end is told as the inbox would record it, undone, and matched with `--expect`.
#[tokio::test(flavor = "multi_thread")]
async fn failures_are_undone_and_named() {
    let insert = || execute("INSERT INTO t VALUES ('a')");
    let orphan = execute("INSERT INTO t VALUES ('b', 'nobody')");
    let cases = [
        (vec![insert()], End::Retry(Some(5)), "retry", "failed_retryable"),
        (vec![insert()], End::Reject("no".into()), "reject", "failed_terminal"),
        (vec![insert()], End::Park("look".into()), "park", "parked"),
        (vec![insert()], End::Other("broken".into()), "other", "failed_retryable"),
        (vec![insert(), guests::trap()], End::Ok, "trap", "failed_retryable"),
        (vec![insert(), guests::spin()], End::Ok, "deadline", "failed_retryable"),
        // Swallowed by the handler, and found by the host; and one that only COMMIT would find.
        (vec![insert(), insert()], End::Ok, "sql_error", "failed_retryable"),
        (vec![orphan], End::Ok, "sql_error", "failed_retryable"),
    ];
    let ends = |(steps, end, outcome, status): (Vec<Step>, End, &'static str, &'static str)| async move {
        let folder = WorkingDir::new().unwrap();
        guest(&folder, &steps, &end);
        let said =
            folder.run(&[GUEST, &["--expect", outcome, "--json"]].concat(), "").await.unwrap();
        assert_eq!(said.code, Some(0), "{outcome}: {}", said.stderr);
        let message = said.json().unwrap()["messages"][0].clone();
        assert_eq!(
            (&message["outcome"], &message["status"], &message["changes"]),
            (&json!(outcome), &json!(status), &json!([]))
        );
    };
    futures::stream::iter(cases).for_each_concurrent(3, ends).await;
    let folder = WorkingDir::new().unwrap();
    guest(&folder, &[insert()], &End::Reject("no".into()));
    let said = folder.run(GUEST, "").await.unwrap();
    assert_eq!(
        (said.code, said.stderr.as_str()),
        (Some(1), "error: message `m-1` ended as `reject`, not as `ok`\n")
    );
    let lines = "m-1  t  reject  no\n  its row would be `failed_terminal`; what it wrote is \
        undone\n  no row changed\n  statement 1  ";
    assert!(said.stdout.starts_with(lines), "{}", said.stdout);
}

/// A deadline in the middle of a statement takes the transaction with it; the next message begins
/// anew, and what earlier ones did is not called its doing.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_stopped_in_a_statement_is_told_from_one_that_only_failed() {
    let folder = WorkingDir::new().unwrap();
    let endless = execute("SELECT count(*) FROM (SELECT generate_series(1, 1000000000000)) AS x");
    guest(&folder, &[execute("INSERT INTO t VALUES ('a')"), endless], &End::Ok);
    // The database's own limit comes later than the handler's deadline.
    folder.write("oncebox.toml", "[database]\nstatement_timeout_ms = 60000\n").unwrap();
    let said = folder
        .run(&[GUEST, &["--config", "oncebox.toml", "--expect", "deadline", "--json"]].concat(), "")
        .await
        .unwrap();
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let message = said.json().unwrap()["messages"][0].clone();
    assert_eq!((&message["is_transaction_lost"], &message["changes"]), (&json!(true), &json!([])));
    let statements = message["statements"].as_array().unwrap();
    assert_eq!(
        (statements.len(), &statements[1]["rows"], &statements[1]["error"]),
        (2, &Value::Null, &Value::Null)
    );
}

/// What is logged is shown, and settings are read; the message comes from standard input.
#[tokio::test(flavor = "multi_thread")]
async fn log_lines_are_shown() {
    let folder = WorkingDir::new().unwrap();
    guest(&folder, &[Step::Log("hello".to_owned())], &End::Ok);
    let said = folder
        .run(
            &["test", "guest.wasm", "--message", "-", "--set", "a=b"],
            r#"{"id": "x", "event_type": "t"}"#,
        )
        .await
        .unwrap();
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.contains("\n  log info: hello\n"), "{}", said.stdout);
}

/// A database that is given is left as it was, row for row.
#[tokio::test(flavor = "multi_thread")]
async fn a_given_database_keeps_nothing() {
    let database = TestDatabase::create("empty", async |_: &str| Ok(())).await.unwrap();
    let folder = WorkingDir::new().unwrap();
    folder.write("master.key", MasterKey::generate()).unwrap();
    folder
        .write(
            "oncebox.toml",
            format!(
                "[database]\nurl = '{}'\n[keys]\nmaster_key_file = 'master.key'\n",
                database.url()
            ),
        )
        .unwrap();
    folder.write("policy.toml", "topics = ['t']\nack = 'after_commit'\n").unwrap();
    let schema = format!(
        "{}\nINSERT INTO stock VALUES ('apple', 10);",
        std::fs::read_to_string(example("inventory-reservation/schema.sql")).unwrap()
    );
    folder.write("schema.sql", schema).unwrap();
    for arguments in [
        &["migrate"][..],
        &["tenant", "create", "acme", "--schema", "schema.sql"],
        &["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"],
    ] {
        let said =
            folder.run(&[arguments, &["--config", "oncebox.toml"]].concat(), "").await.unwrap();
        assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.stderr);
    }
    let (component, messages) = (
        example("components/inventory-reservation.wasm"),
        example("inventory-reservation/messages.jsonl"),
    );
    let test = [
        "test",
        &component,
        "--message",
        &messages,
        "--tenant",
        "acme",
        "--database-url",
        database.url(),
        "--config",
        "oncebox.toml",
        "--json",
    ];
    for _ in 0..2 {
        let report = folder.run(&test, "").await.unwrap().json().unwrap();
        assert_eq!(report["place"], "the tables of tenant `acme`");
        assert_eq!(report["messages"][0]["outcome"], "ok");
        assert_eq!(report["messages"][2]["changes"][1]["before"]["available"], 7, "{report}");
    }
    let inbox =
        folder.run(&["inbox", "list", "--config", "oncebox.toml", "--json"], "").await.unwrap();
    assert_eq!(inbox.json().unwrap(), Value::Array(Vec::new()));
}

/// Bad input gets one clear line that names the thing.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_used_is_named() {
    let folder = WorkingDir::new().unwrap();
    guest(&folder, &[], &End::Ok);
    folder.write("rubbish.wasm", "rubbish").unwrap();
    folder
        .write(
            "bad.jsonl",
            "{\"id\": \"a\", \"event_type\": \"t\"}\n{\"id\": \"b\", \"event_tipe\": \"t\"}\n",
        )
        .unwrap();
    folder.write("bad.sql", "CREATE TABLE (").unwrap();
    folder.write("empty.json", "").unwrap();
    let guest = |more: &[&'static str]| [&["test", "guest.wasm"], more].concat();
    for (arguments, line) in [
        (
            guest(&["--message", "none.json"]),
            "failed to read the messages `none.json`: No such file or directory (os error 2)",
        ),
        (
            guest(&["--message", "bad.jsonl"]),
            "`bad.jsonl` cannot be used as messages: message 2: line 2: unknown field \
                `event_tipe`, expected one of `id`, `event_type`, `payload`, `payload_base64`, \
                `key`, `source`, `content_type`, `timestamp_ms`, `headers`",
        ),
        (
            guest(&["--message", "empty.json"]),
            "`empty.json` cannot be used as messages: there is no message; write objects such as \
                {\"id\": \"m-1\", \"event_type\": \"order.placed\"}",
        ),
        (
            vec!["test", "none.wasm", "--message", "one.json"],
            "failed to read the component `none.wasm`: No such file or directory (os error 2)",
        ),
        (
            vec!["test", "rubbish.wasm", "--message", "one.json"],
            "`rubbish.wasm` cannot be run: this is not a WebAssembly file",
        ),
        (
            guest(&["--message", "one.json", "--schema", "bad.sql"]),
            "the schema cannot be used: `bad.sql`: migration `bad` was not applied: line 1: syntax \
                error at or near \"(\"",
        ),
        (
            guest(&["--message", "one.json", "--schema", "none.sql"]),
            "failed to read the schema `none.sql`: No such file or directory (os error 2)",
        ),
    ] {
        let said = folder.run(&arguments, "").await.unwrap();
        assert_eq!(
            (said.code, said.stderr.as_str(), said.stdout.as_str()),
            (Some(1), format!("error: {line}\n").as_str(), ""),
            "{arguments:?}"
        );
    }
    for (arguments, line) in [
        (
            guest(&["--message", "one.json", "--expect", "maybe"]),
            "error: invalid value 'maybe' for '--expect <EXPECT>'",
        ),
        (
            guest(&["--message", "one.json", "--set", "a"]),
            "error: invalid value 'a' for '--set <KEY=VALUE>': a setting is `key=value`",
        ),
        (guest(&[]), "error: the following required arguments were not provided:"),
        (
            guest(&["--message", "one.json", "--database-url", "postgres://x"]),
            "error: the following required arguments were not provided:",
        ),
    ] {
        let said = folder.run(&arguments, "").await.unwrap();
        assert_eq!((said.code, said.stderr.lines().next()), (Some(2), Some(line)), "{arguments:?}");
    }
}
