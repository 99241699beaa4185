//! What could go wrong: what a real registry hands out is not what we think it is: its answers, its ids, what refers
//! to what.

use std::sync::Arc;

use anyhow::{Context, Result};
use oncebox_registry::{Decoded, Decoder, Fault, HttpRegistry, HttpRegistryOptions};
use oncebox_tests::registry::Registry;
use serde_json::{Value, json};

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
    let decoded = decoder.decode(&payload).with_context(|| format!("the payload of schema {id}"))?;
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
    registry.register("avro.shop.Item", item, "AVRO", &[("avro.money.Money", "avro.money.Money", 1)])?;
    let id = registry.register("avro-orders-value", order, "AVRO", &[("avro.shop.Item", "avro.shop.Item", 1)])?;
    let decoder = decoder(&registry)?;
    let (json, decoded) = decode(&decoder, id, b"\x0e\x02\x06pen\x04\xfb\x32\x00\x00").await?;
    assert_eq!(json, json!({ "id": 7, "items": [{ "name": "pen", "price": { "amount": "-12.30" } }], "note": null }));
    assert_eq!((decoded.schema_id, decoded.name.as_deref()), (id, Some("avro.shop.Order")));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn protobuf_with_an_import_and_a_nested_message_is_decoded() -> Result<()> {
    let registry = start().await?;
    let money = "syntax = \"proto3\"; package money; message Money { int64 units = 1; string currency = 2; }";
    let order = "syntax = \"proto3\"; package shop; import \"money/money.proto\"; import \"google/protobuf/timestamp.proto\";
        message Order { map<string, int32> counts = 1; message Item { string name = 1; money.Money price = 2; }
        repeated Item items = 2; google.protobuf.Timestamp at = 3; }
        message Cancelled { string why = 1; }";
    registry.register("protobuf-money", money, "PROTOBUF", &[])?;
    let id = registry.register("protobuf-orders-value", order, "PROTOBUF", &[("money/money.proto", "protobuf-money", 1)])?;
    let decoder = decoder(&registry)?;
    let (json, decoded) = decode(&decoder, id, b"\x00\x12\x09\x0a\x03pen\x12\x02\x08\x07\x1a\x02\x08\x3c").await?;
    let items = json!([{ "name": "pen", "price": { "units": "7", "currency": "" } }]);
    assert_eq!(json, json!({ "counts": {}, "items": items, "at": "1970-01-01T00:01:00Z" }));
    assert_eq!(decoded.name.as_deref(), Some("shop.Order"));
    // The message within the first, then the second.
    let (json, decoded) = decode(&decoder, id, b"\x04\x00\x00\x0a\x03pen").await?;
    assert_eq!((json, decoded.name.as_deref()), (json!({ "name": "pen" }), Some("shop.Order.Item")));
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
    assert_eq!(fault.to_string(), format!("it does not decode by schema {id}: it is no JSON, in line 1 at 1"));
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
        let elsewhere = HttpRegistry::new(&HttpRegistryOptions { url, ..HttpRegistryOptions::default() })?;
        let error = Decoder::new(Arc::new(elsewhere)).prepare(&unknown).await.expect_err("no registry is there");
        assert!(error.to_string().contains("is no schema registry; check its URL"), "{error}");
    }
    Ok(())
}
