//! `oncebox erase` through the API of a server. What could go wrong: a command that was
//! misunderstood erases something, a proof is lost or written over, or an operator is not told that
//! nothing was found, or that something is left.

use oncebox_tests::cli::{Access, CliFixture};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const SUBJECT: &str = "customer-4711";

#[tokio::test(flavor = "multi_thread")]
async fn an_erasure_proves_what_it_did_and_refuses_what_is_unclear() {
    let cli = CliFixture::open(Access::Server).await;
    cli.file("policy.toml", "topics = ['t']\nack = 'after_commit'\npayload = 'all'\n");
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"]).await;
    // The view of all messages is not what is written to.
    const ROWS: &str = "WITH made AS (INSERT INTO oncebox.inbox (consumer_id, message_id, \
        retention_class, bucket, topic, partition, \"offset\", record_timestamp_ms, key, status, \
        processed_at, payload, headers, payload_hash) \
        SELECT c.consumer_id, 'm' || n, 1, oncebox.bucket_at(1::smallint, now()), 't', 0, n, 1, \
        CASE WHEN n < 3 THEN convert_to('customer-4711', 'UTF8') ELSE '\\xff00'::bytea END, \
        'completed', now(), 'x', '', 'x' FROM generate_series(1, 4) n, oncebox.consumer c \
        RETURNING 1) SELECT to_jsonb(count(*)) FROM made";
    assert_eq!(cli.rows(ROWS).await, [json!(4)]);
    let of = |more: &[&'static str]| -> Vec<&'static str> {
        [&["erase", "--tenant", "acme", "--reason", "a test"][..], more].concat()
    };
    cli.file("there.json", "an earlier proof");

    // Nothing of this erases anything.
    let selectors = "say which messages: by one of `--id`, `--key` and `--key-hex`";
    cli.fails(&of(&["--yes"]), selectors).await;
    cli.fails(&of(&["--yes", "--id", "m1", "--key", SUBJECT]), selectors).await;
    let empty = "is empty, and would select no message or those of no subject";
    cli.fails(&of(&["--yes", "--key", ""]), &format!("`key` {empty}")).await;
    cli.fails(&of(&["--yes", "--id", ""]), &format!("`message_id` {empty}")).await;
    let said = cli.run(&of(&["--yes", "--key-hex", "customer"])).await;
    assert!(said.stderr.contains("`key_hex` is not in hexadecimal digits"), "{}", said.stderr);
    cli.fails(
        &of(&["--id", "m1"]),
        "the payloads of these messages of tenant `acme` would be erased for good; say `--yes` if \
            that is meant",
    )
    .await;
    cli.fails(
        &of(&["--yes", "--id", "m1", "--proof", "there.json"]),
        "failed to make the file of the proof, `there.json`: File exists (os error 17)",
    )
    .await;
    let unknown = ["erase", "--tenant", "nobody", "--reason", "a test", "--yes", "--id", "m1"];
    let said = cli.run(&[&unknown[..], &["--proof", "never.json"]].concat()).await;
    assert!(said.stderr.contains("there is no tenant `nobody`"), "{}", said.stderr);
    assert_eq!(said.code, Some(1));
    assert!(!cli.dir().join("never.json").exists(), "a file of a proof that there is not");
    let said = cli.run(&of(&["--yes", "--id", "m1", "--consumer", "order"])).await;
    assert!(said.stderr.contains("there is no consumer `acme/order`"), "{}", said.stderr);
    const LEFT: &str = "SELECT to_jsonb(message_id) FROM oncebox.inbox WHERE payload IS NOT NULL \
        ORDER BY message_id";
    assert_eq!(cli.rows(LEFT).await, ["m1", "m2", "m3", "m4"].map(Value::from));

    let said = cli.run(&of(&["--yes", "--id", "unknown"])).await;
    assert_eq!((said.code, said.stderr.lines().last()), (Some(0), Some(NOTHING)), "{said:?}");
    let said = cli.ok(&of(&["--yes", "--key", SUBJECT, "--proof", "proof.json"])).await;
    assert_eq!(said, "2 messages erased; the proof is in `proof.json`\n");
    let proof = std::fs::read(cli.dir().join("proof.json")).unwrap();
    let proof: Value = serde_json::from_slice(&proof).unwrap();
    let digest = hex::encode(Sha256::digest("orders/m1\norders/m2\n"));
    assert_eq!((&proof["tenant"], &proof["digest"]), (&json!("acme"), &json!(digest)));
    assert_eq!(
        proof["erased"],
        json!([{ "consumer": "orders", "status": "completed", "messages": 2 }])
    );
    assert_eq!((&proof["readable"], &proof["message_id"]), (&json!(0), &Value::Null));
    assert!(!proof["not_covered"].as_array().unwrap().is_empty());
    assert!(!proof.to_string().contains(SUBJECT), "the proof names the subject");
    assert_eq!(cli.rows(LEFT).await, ["m3", "m4"].map(Value::from));
    let audit = cli.json(&["audit", "--tenant", "acme", "--limit", "5"]).await;
    let entry = &audit[0];
    assert_eq!((&entry["action"], &entry["audit_id"]), (&json!("erase"), &proof["audit_id"]));
    assert_eq!(entry["details"]["digest"], proof["digest"]);

    let proof = cli.json(&of(&["--yes", "--key-hex", "ff00"])).await;
    assert_eq!(proof["erased"][0]["messages"], json!(2));
    assert_eq!(cli.rows(LEFT).await, Vec::<Value>::new());
    let shown =
        cli.json(&["inbox", "show", "m1", "--tenant", "acme", "--consumer", "orders"]).await;
    assert!(shown["erased_at"].is_string(), "{shown}");
    cli.fails(
        &of(&["--yes", "--id", "m1", "--proof", "proof.json"]),
        "failed to make the file of the proof, `proof.json`: File exists (os error 17)",
    )
    .await;

    // A message that a worker holds: the command says so, and fails.
    const HOLD: &str = "WITH held AS (UPDATE oncebox.inbox SET status = 'in_progress', erased_at = \
        NULL, processed_at = NULL, locked_until = now() + interval '1 hour', payload = 'x' \
        WHERE message_id = 'm4' RETURNING 1) SELECT to_jsonb(count(*)) FROM held";
    assert_eq!(cli.rows(HOLD).await, [json!(1)]);
    let said = cli.run(&of(&["--yes", "--id", "m4", "--wait", "0", "--proof", "held.json"])).await;
    assert!(
        said.code == Some(1)
            && said.stderr.contains("the erasure is not finished: 0 messages erased")
            && said.stderr.contains("repeat the command"),
        "{said:?}"
    );
    assert!(!cli.dir().join("held.json").exists());
}

const NOTHING: &str = "no message matches; nothing was erased";
