//! What could go wrong: `oncebox verify` passes a handler that loses or doubles effects, or finds
//! fault with a sound one. The sound ones are the examples; the bad ones are planted here, each
//! with one bug, and the verification must say which line of SQL it is. S4-004, S4-005, S4-019,
//! S1-014, S1-128.

use std::path::Path;

use oncebox_tests::{
    cli::{Access, CliFixture},
    guests::{self, End, Step},
    program::{CommandOutput, WorkingDir},
};
use serde_json::{Value, json};

/// A file of the repository's examples.
fn example(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples").join(path);
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

async fn verify(folder: &WorkingDir, arguments: &[&str]) -> CommandOutput {
    folder.run(&[&["verify"], arguments].concat(), "").await.unwrap()
}

/// An example with its own messages: every window is sound, and these are its warnings.
async fn passes(name: &str, schema: &[&str], warnings: &[&str]) -> Value {
    let folder = WorkingDir::new().unwrap();
    let (component, messages) =
        (example(&format!("components/{name}.wasm")), example(&format!("{name}/messages.jsonl")));
    let schema: Vec<_> = schema.iter().map(|path| example(path)).collect();
    let mut arguments = vec![component.as_str(), "--message", &messages, "--json"];
    arguments.extend(schema.iter().flat_map(|path| ["--schema", path]));
    let said = verify(&folder, &arguments).await;
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "`{name}`: {}", said.stdout);
    let report = said.json().unwrap();
    let windows = report["windows"].as_array().unwrap();
    assert!(windows.iter().all(|window| window["is_failure"] == false), "`{name}`: {windows:#?}");
    // One process died in each crash window; a point that nobody passes is a window that was not
    // tested.
    let killed = windows.iter().filter(|window| window["killed"] == 1).count();
    // S1-126.
    assert!(
        killed >= 10 && windows.iter().all(|window| window["verdict"] != "not reached"),
        "`{name}`: {windows:#?}"
    );
    let found: Vec<_> = findings(&report)
        .filter(|finding| finding["level"] == "warning")
        .map(|finding| finding["rule"].as_str().unwrap())
        .collect();
    assert_eq!(found, warnings, "`{name}`: {:#}", report["findings"]);
    report
}

/// A handler of whole batches: all messages of a transaction in one call, killed in the middle of
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_of_batches_passes() {
    let mut folder = WorkingDir::new().unwrap();
    let cache = folder.dir().join("cache");
    folder.set("ONCEBOX_RUNTIME_CACHE_DIR", cache.to_str().unwrap());
    let order = |number: i64| {
        let payload = json!({ "order_id": format!("o-{number}"), "account": number % 2, "amount": 100 * number, "note": "n" });
        format!(
            "{}\n",
            json!({ "id": format!("m-{number}"), "event_type": "order.placed", "payload": payload })
        )
    };
    folder.write("messages.jsonl", (1..=5).map(order).collect::<String>()).unwrap();
    folder.write("rows.sql", "INSERT INTO account (id) VALUES (0), (1);").unwrap();
    let (component, schema) =
        (example("components/order-batch.wasm"), example("order-batch/schema.sql"));
    let said = verify(
        &folder,
        &[
            &component,
            "--message",
            "messages.jsonl",
            "--schema",
            &schema,
            "--schema",
            "rows.sql",
            "--json",
        ],
    )
    .await;
    assert_eq!(said.code, Some(0), "{}{}", said.stderr, said.stdout);
    let report = said.json().unwrap();
    let windows = report["windows"].as_array().unwrap();
    assert!(
        windows.iter().any(|window| window["window"] == "killed after SQL call 1 of the handler"),
        "{windows:#?}"
    );
    let odd: Vec<_> = windows
        .iter()
        .filter(|window| {
            !["once", "changes nothing"].contains(&window["verdict"].as_str().unwrap())
        })
        .collect();
    assert!(odd.is_empty(), "{odd:#?}");
    // The code is where the host keeps its own, for the next `verify`.
    let compiled: Vec<_> =
        std::fs::read_dir(cache).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(
        matches!(&compiled[..], [file] if file.extension().unwrap() == "compiled"),
        "{compiled:?}"
    );
}

fn findings(report: &Value) -> impl Iterator<Item = &Value> {
    report["findings"].as_array().unwrap().iter()
}

#[tokio::test(flavor = "multi_thread")]
async fn examples_that_are_guarded_pass_without_a_warning() {
    let report = passes(
        "inventory-reservation",
        &["inventory-reservation/schema.sql", "inventory-reservation/rows.sql"],
        &[],
    )
    .await;
    assert_eq!(
        report["readiness"]["natural idempotency"],
        "yes: a fact under a second message id changes nothing"
    );
    assert_eq!(
        report["readiness"]["replay"],
        "under the same ids changes nothing, under other ids changes nothing"
    );
    assert_eq!(report["not_compared"][0]["column"], "created_at");
    attested(&report).await;
    passes("fulfilment", &["fulfilment/schema.sql"], &[]).await;
}

/// What could go wrong: a report is stored with another version than the one that was verified, or
/// one that shows nothing counts as passed.
async fn attested(report: &Value) {
    let cli = CliFixture::open(Access::Database).await;
    let component = example("components/inventory-reservation.wasm");
    let of = ["--tenant", "acme", "--handler", "stock"];
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&[&["version", "upload", component.as_str()], &of[..]].concat()).await;
    cli.file("report.json", report.to_string());
    let attest = [&["version", "attest", "report.json"], &of[..]].concat();
    let stored = cli.json(&attest).await;
    let windows = report["windows"].as_array().unwrap().len();
    assert_eq!((&stored["is_passed"], &stored["windows"]), (&json!(true), &json!(windows)));
    let audit = cli.json(&["audit", "--tenant", "acme", "--limit", "1"]).await;
    let entry = (&audit[0]["action"], &audit[0]["details"]["digest"]);
    assert_eq!(entry, (&json!("version.attest"), &report["digest"]));

    let line = "a verification has a message, a window and a killed worker at least, and no count \
        below zero";
    for (is_passed, windows) in [
        (true, json!([{ "is_failure": false, "killed": 0 }])),
        (false, json!([{ "is_failure": true, "killed": 0 }])),
        (false, json!([])),
    ] {
        let mut nothing = report.clone();
        nothing["is_passed"] = json!(is_passed);
        nothing["windows"] = windows;
        cli.file("report.json", nothing.to_string());
        cli.fails(&attest, line).await;
    }
    let mut other = report.clone();
    other["digest"] = json!("0".repeat(64));
    cli.file("report.json", other.to_string());
    let said = cli.run(&attest).await;
    assert!(said.code == Some(1) && said.stderr.contains("has no version"), "{said:?}");
    cli.file("report.json", "{}");
    let said = cli.run(&attest).await;
    assert!(said.stderr.contains("`report.json` is no report of this release"), "{said:?}");
}

/// They do nothing to guard themselves, which is safe here: redelivery has no effect, a second id
/// has.
#[tokio::test(flavor = "multi_thread")]
async fn examples_that_rely_on_the_claim_pass_with_warnings() {
    let report = passes("ledger", &["ledger/schema.sql"], &["unguarded-insert", "delta"]).await;
    assert_eq!(
        report["readiness"]["natural idempotency"],
        "no: a fact under a second message id changes `account`, `ledger_entry`"
    );
    // What adds is as safe as the ids are, and it is not called more than that.
    let replay =
        "under the same ids changes nothing, under other ids changes `account`, `ledger_entry`";
    assert_eq!(
        (&report["readiness"]["replay"], &report["readiness"]["replay safe"]),
        (&json!(replay), &Value::Null)
    );
    assert_eq!(report["readiness"]["another run"], "leaves the same, but for what is not compared");
    let report =
        passes("github-issues", &["github-schema.sql"], &["unguarded-insert", "delta"]).await;
    assert_eq!(report["readiness"]["order"], "did not matter in 3 other orders");
}

/// A bad handler: what it does with each message, and the messages.
struct Bad {
    schema: &'static str,
    steps: Vec<Step>,
    payloads: Vec<Value>,
}

impl Bad {
    async fn verify(self, more: &[&str]) -> CommandOutput {
        self.verify_in(&WorkingDir::new().unwrap(), more).await
    }

    async fn verify_in(self, folder: &WorkingDir, more: &[&str]) -> CommandOutput {
        folder.write("bad.wasm", guests::component(&self.steps, &End::Ok)).unwrap();
        folder.write("schema.sql", self.schema).unwrap();
        let message = |(number, payload): (usize, &Value)| {
            format!(
                "{}\n",
                json!({ "id": format!("m-{number}"), "event_type": "t", "payload": payload })
            )
        };
        folder
            .write("messages.jsonl", (1..).zip(&self.payloads).map(message).collect::<String>())
            .unwrap();
        verify(
            folder,
            &[&["bad.wasm", "--message", "messages.jsonl", "--schema", "schema.sql"], more]
                .concat(),
        )
        .await
    }

    /// Its one finding of this rule, and the line of SQL that it names; how many windows fail.
    async fn check(self, rule: &str, sql: &str, text: &str, failures: &[(&str, &str)]) {
        let said = self.verify(&["--json"]).await;
        let report = said.json().unwrap();
        let finding = findings(&report)
            .find(|finding| finding["rule"] == rule)
            .unwrap_or_else(|| panic!("no `{rule}` in {report:#}"));
        let statement = finding["sql"].as_str().unwrap();
        let line = statement.lines().nth(finding["line"].as_u64().unwrap() as usize - 1).unwrap();
        assert_eq!((line.trim(), finding["text"].as_str().unwrap()), (sql, text));
        let windows = report["windows"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|window| window["is_failure"] == true);
        let failed: Vec<_> = windows
            .map(|window| (window["window"].as_str().unwrap(), window["verdict"].as_str().unwrap()))
            .collect();
        assert_eq!(failed, failures, "{:#}", report["windows"]);
        assert_eq!(said.code, Some(i32::from(!failures.is_empty())), "{}", said.stderr);
    }
}

const ACCOUNT: &str = "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT \
    0); INSERT INTO account VALUES (1, 100);";

fn payments() -> Vec<Value> {
    (1..=4)
        .map(|number| json!({ "account": 1, "amount": 250, "order_id": format!("o-{number}") }))
        .collect()
}

fn delta() -> Bad {
    let update = "UPDATE account\n   SET balance = balance + ($1::json->>'amount')::bigint\n WHERE \
        id = ($1::json->>'account')::int";
    Bad {
        schema: ACCOUNT,
        steps: vec![Step::ExecuteWithPayload(update.into())],
        payloads: payments(),
    }
}

/// 1: the claim guards a message, not the fact in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_delta_without_a_guard_is_found() {
    delta()
        .check(
            "delta",
            "SET balance = balance + ($1::json->>'amount')::bigint",
            "`account.balance` is a delta, and the same fact under a second message id is added \
                twice",
            &[],
        )
        .await;
    // For people, and with `--strict` fatal.
    let said = delta().verify(&["--strict"]).await;
    assert_eq!(said.code, Some(1));
    assert!(
        said.stdout
            .contains("\n  >  2 |    SET balance = balance + ($1::json->>'amount')::bigint\n"),
        "{}",
        said.stdout
    );
    assert_eq!(
        said.stderr,
        "error: delta: `account.balance` is a delta, and the same fact under a second message id \
            is added twice\n"
    );
}

/// 2: nothing unique but a number that is counted up.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_without_a_business_key_is_found() {
    let insert = "INSERT INTO booking (order_id, amount)\nVALUES ($1::json->>'order_id', \
        ($1::json->>'amount')::bigint)";
    Bad {
        schema: "CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
            order_id text, amount bigint);",
        steps: vec![Step::ExecuteWithPayload(insert.into())],
        payloads: payments(),
    }
    .check(
        "unguarded-insert",
        "INSERT INTO booking (order_id, amount)",
        "nothing keeps one fact from being inserted twice into `booking`: its unique indexes are \
            only `booking_pkey` (id), which this \
         statement fills with generated values; the same fact under a second message id was \
         inserted twice",
        &[],
    )
    .await;
}

/// 3: another run of the same message writes something else.
#[tokio::test(flavor = "multi_thread")]
async fn values_of_the_session_in_the_effect_are_found() {
    let bad = || Bad {
        schema: "CREATE TABLE receipt (order_id text PRIMARY KEY, number uuid, due timestamptz);",
        steps: vec![Step::ExecuteWithPayload(
            "INSERT INTO receipt (order_id, number, due)\nVALUES ($1::json->>'order_id',\n        \
                gen_random_uuid(),\n        now() + interval '14 days')"
                .into(),
        )],
        payloads: payments(),
    };
    let text =
        "`gen_random_uuid` goes into the effect: another run of the same message has another value";
    bad().check("session-value", "gen_random_uuid(),", text, &[]).await;
    let text = "`receipt.due` is another after two clean runs of the same messages";
    bad().check("two-runs-differ", "INSERT INTO receipt (order_id, number, due)", text, &[]).await;
}

/// 4: whatever came last stays, also when it is older.
#[tokio::test(flavor = "multi_thread")]
async fn last_write_wins_is_found() {
    Bad {
        schema: "CREATE TABLE price (sku text PRIMARY KEY, amount bigint);",
        steps: vec![Step::ExecuteWithPayload(
            "INSERT INTO price (sku, amount)\nVALUES ('a', ($1::json->>'amount')::bigint)\nON \
                CONFLICT (sku) DO\n  UPDATE SET amount = excluded.amount"
                .into(),
        )],
        payloads: [10, 20, 30].map(|amount| json!({ "amount": amount })).into(),
    }
    .check(
        "last-write-wins",
        "UPDATE SET amount = excluded.amount",
        "`price.amount` keeps whatever message came last, and another order left another value",
        &[],
    )
    .await;
}

/// 5: of two messages at once, one is lost. That is not only read in the SQL: it is seen to happen.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_update_is_found_and_provoked() {
    Bad {
        schema: ACCOUNT,
        steps: vec![
            Step::QueryWithPayload(
                "SELECT balance FROM account WHERE id = \
                ($1::json->>'account')::int"
                    .into(),
            ),
            Step::ExecuteWithSum(
                "UPDATE account\n   SET balance = $1\n WHERE id = \
                ($2::json->>'account')::int"
                    .into(),
                250,
            ),
        ],
        payloads: payments(),
    }
    .check(
        "read-then-write",
        "SET balance = $1",
        "`account.balance` is read without a lock and then set to a value made of it: of two \
            messages at once, one is lost",
        &[("two workers at once", "lost")],
    )
    .await;
}

/// What could go wrong: the verification itself is blind. With a host that runs duplicates, effects
/// are doubled wherever a message comes twice, and it says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_runs_duplicates_is_noticed() {
    let folder = WorkingDir::new().unwrap().sabotaged("duplicates_run");
    let said = delta().verify_in(&folder, &["--json"]).await;
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    let report = said.json().unwrap();
    let verdict = |name: &str| {
        report["windows"]
            .as_array()
            .unwrap()
            .iter()
            .find(|window| window["window"] == name)
            .unwrap()["verdict"]
            .clone()
    };
    for window in ["each message two or three times", "killed after COMMIT, before the ack"] {
        assert_eq!(verdict(window), "doubled", "{report:#}");
    }
    assert_eq!(verdict("killed before COMMIT"), "once");
}

/// Bad input gets one clear line.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_verified_is_named() {
    let folder = WorkingDir::new().unwrap();
    folder.write("guest.wasm", guests::component(&[], &End::Ok)).unwrap();
    folder.write("rubbish.wasm", "rubbish").unwrap();
    folder
        .write(
            "twice.jsonl",
            "{\"id\":\"a\",\"event_type\":\"t\"}{\"id\":\"a\",\"event_type\":\"t\"}",
        )
        .unwrap();
    folder.write("one.json", "{\"id\":\"a\",\"event_type\":\"t\"}").unwrap();
    for (arguments, line) in [
        (
            ["guest.wasm", "--message", "twice.jsonl"],
            "message id `a` is in the file twice; repetitions are made by `verify` itself",
        ),
        (
            ["rubbish.wasm", "--message", "one.json"],
            "`rubbish.wasm` cannot be run: this is not a WebAssembly file",
        ),
        (
            ["guest.wasm", "--message", "none.json"],
            "failed to read the messages `none.json`: No such file or directory (os error 2)",
        ),
    ] {
        let said = verify(&folder, &arguments).await;
        assert_eq!(
            (said.code, said.stderr.as_str()),
            (Some(1), format!("error: {line}\n").as_str()),
            "{arguments:?}"
        );
    }
    // Nothing was shown where nothing has an effect.
    folder.write("rejects.wasm", guests::component(&[], &End::Reject("no".into()))).unwrap();
    let said = verify(&folder, &["rejects.wasm", "--message", "one.json"]).await;
    let line = "no message is completed by a clean run, so there is nothing to verify: `a` is \
        `failed_terminal`; `oncebox test` shows why";
    assert_eq!((said.code, said.stderr.as_str()), (Some(1), format!("error: {line}\n").as_str()));
}
