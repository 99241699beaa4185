//! What could go wrong: what a real registry hands out is not what we think it is: its answers, its
//! ids, what refers to what.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use oncebox_registry::{Decoded, Decoder, Fault, HttpRegistry, HttpRegistryOptions};
use oncebox_tests::{
    host::{HostFixture, Options},
    load::{Load, Work},
    registry::Registry,
    services::target_dir,
    wait::{self, DEADLINE},
};
use rdkafka::{
    ClientConfig,
    producer::{FutureProducer, FutureRecord},
};
use serde_json::{Value, json};
use tokio::time::sleep;

fn decoder(registry: &Registry) -> Result<Decoder> {
    let options = HttpRegistryOptions { url: registry.url(), ..HttpRegistryOptions::default() };
    Ok(Decoder::new(Arc::new(HttpRegistry::new(&options)?)))
}

async fn start() -> Result<Arc<Registry>> {
    tokio::task::spawn_blocking(Registry::start).await?
}

fn payload(id: u32, body: &[u8]) -> Vec<u8> {
    [&[0][..], &id.to_be_bytes(), body].concat()
}

async fn decode(decoder: &Decoder, id: u32, body: &[u8]) -> Result<(Value, Decoded)> {
    let payload = payload(id, body);
    decoder.prepare(&payload).await?;
    let decoded =
        decoder.decode(&payload).with_context(|| format!("the payload of schema {id}"))?;
    Ok((serde_json::from_slice(&decoded.json)?, decoded))
}

#[tokio::test(flavor = "multi_thread")]
async fn avro_with_references_is_decoded() -> Result<()> {
    let registry = start().await?;
    let money = r#"{"type":"record","name":"Money","namespace":"avro.money","fields":[
        {"name":"amount","type":{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}}]}"#;
    let item = r#"{"type":"record","name":"Item","namespace":"avro.shop","fields":[
        {"name":"name","type":"string"},{"name":"price","type":"avro.money.Money"}]}"#;
    let order = r#"{"type":"record","name":"Order","namespace":"avro.shop","fields":[{"name":"id","type":"long"},
        {"name":"items","type":{"type":"array","items":"avro.shop.Item"}},{"name":"note","type":["null","string"],"default":null}]}"#;
    registry.register("avro.money.Money", money, "AVRO", &[])?;
    registry.register(
        "avro.shop.Item",
        item,
        "AVRO",
        &[("avro.money.Money", "avro.money.Money", 1)],
    )?;
    let id = registry.register(
        "avro-orders-value",
        order,
        "AVRO",
        &[("avro.shop.Item", "avro.shop.Item", 1)],
    )?;
    let decoder = decoder(&registry)?;
    let (json, decoded) = decode(&decoder, id, b"\x0e\x02\x06pen\x04\xfb\x32\x00\x00").await?;
    assert_eq!(
        json,
        json!({ "id": 7, "items": [{ "name": "pen", "price": { "amount": "-12.30" } }], "note": null })
    );
    assert_eq!((decoded.schema_id, decoded.name.as_deref()), (id, Some("avro.shop.Order")));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn protobuf_with_an_import_and_a_nested_message_is_decoded() -> Result<()> {
    let registry = start().await?;
    let money = "syntax = \"proto3\"; package money; message Money { int64 units = 1; string \
        currency = 2; }";
    let order = "syntax = \"proto3\"; package shop; import \"money/money.proto\"; import \
        \"google/protobuf/timestamp.proto\";
        message Order { map<string, int32> counts = 1; message Item { string name = 1; money.Money \
        price = 2; }
        repeated Item items = 2; google.protobuf.Timestamp at = 3; }
        message Cancelled { string why = 1; }";
    registry.register("protobuf-money", money, "PROTOBUF", &[])?;
    let id = registry.register(
        "protobuf-orders-value",
        order,
        "PROTOBUF",
        &[("money/money.proto", "protobuf-money", 1)],
    )?;
    let decoder = decoder(&registry)?;
    let (json, decoded) =
        decode(&decoder, id, b"\x00\x12\x09\x0a\x03pen\x12\x02\x08\x07\x1a\x02\x08\x3c").await?;
    let items = json!([{ "name": "pen", "price": { "units": "7", "currency": "" } }]);
    assert_eq!(json, json!({ "counts": {}, "items": items, "at": "1970-01-01T00:01:00Z" }));
    assert_eq!(decoded.name.as_deref(), Some("shop.Order"));
    // The message within the first, then the second.
    let (json, decoded) = decode(&decoder, id, b"\x04\x00\x00\x0a\x03pen").await?;
    assert_eq!(
        (json, decoded.name.as_deref()),
        (json!({ "name": "pen" }), Some("shop.Order.Item"))
    );
    let (json, decoded) = decode(&decoder, id, b"\x02\x02\x0a\x03why").await?;
    assert_eq!((json, decoded.name.as_deref()), (json!({ "why": "why" }), Some("shop.Cancelled")));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn json_is_passed_on() -> Result<()> {
    let registry = start().await?;
    let schema = r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}"#;
    let id = registry.register("json-orders-value", schema, "JSON", &[])?;
    let decoder = decoder(&registry)?;
    let (_, decoded) = decode(&decoder, id, b"{ \"id\": 12345678901234567890 }").await?;
    assert_eq!(decoded.json, b"{ \"id\": 12345678901234567890 }");
    let fault = decoder.decode(&payload(id, b"{")).expect_err("no JSON");
    assert_eq!(
        fault.to_string(),
        format!("it does not decode by schema {id}: it is no JSON, in line 1 at 1")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_a_fault_and_a_wrong_path_is_trouble() -> Result<()> {
    let registry = start().await?;
    let unknown = payload(999_999, b"");
    let decoder = decoder(&registry)?;
    decoder.prepare(&unknown).await?;
    assert_eq!(decoder.decode(&unknown), Err(Fault::UnknownSchema { schema_id: 999_999 }));
    // Payloads are not blamed for a URL that leads elsewhere.
    for url in [registry.url().replace("/ccompat/v7", ""), registry.url() + "/x"] {
        let elsewhere =
            HttpRegistry::new(&HttpRegistryOptions { url, ..HttpRegistryOptions::default() })?;
        let error = Decoder::new(Arc::new(elsewhere))
            .prepare(&unknown)
            .await
            .expect_err("no registry is there");
        assert!(error.to_string().contains("is no schema registry; check its URL"), "{error}");
    }
    Ok(())
}

/// A payment by this schema, in Avro.
const PAYMENT: &str = r#"{"type":"record","name":"captured","namespace":"payment","fields":[{"name":"id","type":"string"},
    {"name":"account","type":"string"},{"name":"amount","type":"string"},{"name":"open_account","type":"boolean"}]}"#;

fn payment(schema: u32, id: &str, account: &str, amount: &str) -> Vec<u8> {
    let text = |text: &str| [&[(text.len() * 2) as u8], text.as_bytes()].concat();
    payload(schema, &[text(id), text(account), text(amount), vec![0]].concat())
}

/// What could go wrong: what a policy looks for in a payload is looked for in its bytes; a retry, a
/// redelivery or an edited payload is decoded otherwise, or not at all; a registry that is away is
/// the message's fault.
#[tokio::test(flavor = "multi_thread")]
async fn payloads_are_decoded_on_their_way() -> Result<()> {
    let registry = tokio::task::spawn_blocking(Registry::start_private).await??;
    let schema = registry.register("payments-value", PAYMENT, "AVRO", &[])?;
    let newer =
        PAYMENT.replace("]}", r#",{"name":"note","type":["null","string"],"default":null}]}"#);
    let newer = registry.register("payments-value", &newer, "AVRO", &[])?;
    let options = Options {
        registry: Some(registry.url()),
        id: "[{ json_pointer = '/id' }]",
        partitions: 1,
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await?;
    let producer: FutureProducer =
        ClientConfig::new().set("bootstrap.servers", fixture.kafka().bootstrap()).create()?;
    let publish = async |payload: &[u8]| {
        let record = FutureRecord::<(), _>::to(&fixture.topic).payload(payload);
        producer.send(record, Duration::from_secs(10)).await.map_err(|(error, _)| error)
    };
    fixture
        .execute("INSERT INTO {schema}.account (account) VALUES ('mine'), ('fails-3-times')")
        .await?;
    let host = fixture.start("a", &[])?;
    for n in 0..5 {
        publish(&payment(schema, &format!("p{n}"), "mine", "10")).await?;
    }
    publish(&payment(schema, "p0", "mine", "10")).await?;
    publish(&payment(schema, "later", "fails-3-times", "1")).await?;
    publish(&payment(schema, "letter", "mine", "all")).await?;
    publish(&payment(999_999, "x", "mine", "1")).await?;
    publish(&payment(schema, "x", "mine", "1")[..9]).await?;
    publish(br#"{"id":"x","account":"mine","amount":"1"}"#).await?;
    fixture
        .until(
            "SELECT count(*) FROM oncebox.inbox WHERE status IN ('completed', 'parked', \
        'failed_terminal')",
            10,
        )
        .await?;
    const EFFECTS: &str =
        "SELECT count(*) FROM {schema}.ledger_entry WHERE message_id ~ '^(p[0-9]|later)$'";
    assert_eq!(
        fixture.number(EFFECTS).await?,
        6,
        "each once, also what failed twice before and what came twice"
    );
    assert_eq!(
        fixture
            .number("SELECT count(*) FROM oncebox.inbox WHERE event_type = 'payment.captured'")
            .await?,
        7
    );
    assert_eq!(
        fixture
            .number("SELECT attempts::bigint FROM oncebox.inbox WHERE message_id = 'later'")
            .await?,
        3
    );
    let reasons: Vec<String> = sqlx::query_scalar(
        "SELECT reason FROM oncebox.inbox WHERE status = 'parked' ORDER BY \"offset\"",
    )
    .fetch_all(&fixture.pool)
    .await?;
    let undecodable = [
        "undecodable: schema 999999 is not in the registry".to_owned(),
        format!(
            "undecodable: it does not decode by schema {schema}: it ends too early at `/account`"
        ),
        "undecodable: its first byte is not 0, so it is not in the schema registry's wire format"
            .to_owned(),
    ];
    assert_eq!(reasons, undecodable);

    // A person mends a letter, in JSON.
    let (tenant, file) = (
        fixture.tenant.name.clone(),
        target_dir().join("test-hosts").join(format!("{}.json", fixture.topic)),
    );
    std::fs::write(&file, r#"{"id":"other","account":"mine","amount":"12"}"#)?;
    let edit = [
        "inbox",
        "edit",
        "letter",
        "--tenant",
        &tenant,
        "--consumer",
        "payments",
        "--because",
        "a typo",
        "--payload",
    ];
    fixture.ok(&[&edit[..], &[file.to_str().context("a path")?]].concat()).await?;
    fixture
        .until(
            "SELECT count(*) FROM {schema}.ledger_entry WHERE message_id = 'letter' AND \
        amount = 12",
            1,
        )
        .await?;

    // Schemas that are not at hand, and a registry that does not answer: what is new waits at its
    // place, what is run again in its row, and nobody is blamed.
    publish(&payment(schema, "again", "mine", "none")).await?;
    fixture
        .until(
            "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'again' AND status = \
        'failed_terminal'",
            1,
        )
        .await?;
    host.stop().await?;
    registry.pause();
    let host = fixture.start("a", &[])?;
    fixture
        .ok(&[
            "inbox",
            "redrive",
            "again",
            "--tenant",
            &tenant,
            "--consumer",
            "payments",
            "--because",
            "a test",
        ])
        .await?;
    let mut with_note = payment(newer, "new", "mine", "3");
    with_note.push(0);
    publish(&with_note).await?;
    publish(&payment(schema, "behind", "mine", "4")).await?;
    host.until_metric("oncebox_kafka_inbox_errors_total", &[], 1.0).await?;
    let log = std::fs::read_to_string(host.log())?;
    assert!(log.contains("the schema registry"), "{log}");
    assert_eq!(
        fixture
            .number("SELECT count(*) FROM oncebox.inbox WHERE message_id IN ('new', 'behind')")
            .await?,
        0
    );
    const WAITS: &str = "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'again' AND status \
        IN ('received', 'in_progress') AND crashes = 0";
    assert_eq!(fixture.number(WAITS).await?, 1);
    registry.wake();
    fixture
        .until(
            "SELECT count(*) FROM {schema}.ledger_entry WHERE message_id IN ('new', 'behind')",
            2,
        )
        .await?;
    const ENDED: &str = "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'again' AND status \
        = 'failed_terminal' AND attempts = 1";
    fixture.until(ENDED, 1).await?;
    assert_eq!(fixture.number("SELECT sum(crashes)::bigint FROM oncebox.inbox").await?, 0);
    // It stops at once also while it waits for a schema.
    registry.pause();
    publish(&payment(schema + 1_000, "x", "mine", "1")).await?;
    sleep(Duration::from_secs(1)).await;
    host.stop().await
}

/// What could go wrong: a host without a registry reads what it cannot decode.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_needs_a_registry_does_not_start_without_one() -> Result<()> {
    let fixture =
        HostFixture::with(Options { registry: Some(String::new()), ..Options::default() }).await?;
    fixture.send(&Load::of([Work::Pay])).await?;
    let host = fixture.start("a", &[])?;
    let said = async || {
        std::fs::read_to_string(host.log())
            .is_ok_and(|log| log.contains("knows no schema registry"))
    };
    wait::until(
        DEADLINE,
        Duration::from_millis(100),
        async || Ok(said().await),
        async || "it does not say so".to_owned(),
    )
    .await?;
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await?, 0);
    for (variables, expected) in [
        (
            [
                ("ONCEBOX_SCHEMA_REGISTRY_URL", "http://me:hunter2@localhost"),
                ("ONCEBOX_SCHEMA_REGISTRY_USERNAME", ""),
            ],
            "must not hold user",
        ),
        (
            [
                ("ONCEBOX_SCHEMA_REGISTRY_URL", "http://localhost"),
                ("ONCEBOX_SCHEMA_REGISTRY_USERNAME", "me"),
            ],
            "PASSWORD",
        ),
    ] {
        let ended = fixture.command(&["serve"], &variables)?;
        let said = String::from_utf8_lossy(&ended.stderr).into_owned()
            + &String::from_utf8_lossy(&ended.stdout);
        assert!(
            !ended.status.success() && said.contains(expected) && !said.contains("hunter2"),
            "{said}"
        );
    }
    host.stop().await
}
