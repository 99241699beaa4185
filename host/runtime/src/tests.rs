//! Hostile and clumsy components, written as text, so that no toolchain is needed.

mod emit;
mod guests;
mod inspection;
mod loading;
mod outcomes;
mod probing;
mod wasi;

use std::{sync::Arc, time::Duration};

use oncebox_model::{
    handler::{DeliveryKind, Handler, Run},
    message::Message,
    outcome::Failure,
    outgoing::{Outbox, Output},
    policy::Limits,
    record::Record,
    tx::Tx,
};
use sqlx::{Connection, PgConnection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::Instant,
};

use crate::{ComponentHandler, HandlerSettings, RuntimeConfig, WasmRuntime, encode_component};

/// Makes a runtime that is small enough for many side by side.
fn runtime() -> WasmRuntime {
    WasmRuntime::new(config()).expect("an engine")
}

fn config() -> RuntimeConfig {
    RuntimeConfig { instances_max: 2, ..RuntimeConfig::default() }
}

/// Makes a component of the text of a core module.
fn component(core: &str) -> Vec<u8> {
    encode_component(&wat::parse_str(core).expect("WebAssembly text")).expect("a component")
}

async fn handler(core: &str, limits: Limits) -> ComponentHandler {
    let runtime = runtime();
    let loaded = runtime.load(&component(core)).await.expect("a sound component");
    let config = vec![("colour".to_owned(), "green".to_owned())];
    runtime.handler(&loaded, settings(limits, config))
}

/// Settings of a deployment with the grant `emit`.
fn settings(limits: Limits, config: Vec<(String, String)>) -> HandlerSettings {
    HandlerSettings { version: 7, limits, config, random_key: [1; 32], may_emit: true }
}

/// Runs a guest once on a message, without a database.
async fn run(core: &str, limits: Limits) -> Result<Option<String>, Failure> {
    let tx = Tx::on(connection_to_nowhere().await);
    let handler = handler(core, limits).await;
    handle(&handler, &tx, &message()).await
}

/// Runs a handler that sends nothing.
async fn handle(
    handler: &ComponentHandler,
    tx: &Tx,
    message: &Message,
) -> Result<Option<String>, Failure> {
    let output = handle_with(handler, tx, message, &Outbox::closed()).await?;
    assert!(output.outgoing.is_empty(), "it sends nothing");
    Ok(output.result)
}

/// Runs a handler with these rights to send messages.
async fn handle_with(
    handler: &ComponentHandler,
    tx: &Tx,
    message: &Message,
    outbox: &Outbox,
) -> Result<Output, Failure> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let run = Run {
        tenant: "acme",
        consumer: "orders",
        message,
        attempt: 1,
        kind: DeliveryKind::Live,
        deadline,
        outbox,
        may_run_ahead: false,
    };
    handler.handle(tx, &run).await
}

fn message() -> Message {
    Message {
        id: "m-1".to_owned(),
        source: "orders".to_owned(),
        event_type: "order.placed".to_owned(),
        event_version: None,
        ordering_key: None,
        sequence: None,
        content_type: None,
        trace_parent: None,
        decoded: None,
        fetched: None,
        payload_hash: None,
        record: Record {
            topic: Arc::from("orders"),
            topic_id: None,
            partition: 3,
            offset: 42,
            timestamp_ms: 1_700_000_000_000,
            key: None,
            headers: vec![("a".to_owned(), vec![1, 2, 3])],
            payload: Some(b"{}".to_vec()),
        },
    }
}

/// Connects to a server that only greets, for guests that send nothing.
async fn connection_to_nowhere() -> PgConnection {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let server = async {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let mut startup = [0; 1024];
        assert!(stream.read(&mut startup).await.expect("a startup message") > 0);
        // AuthenticationOk, ReadyForQuery in a transaction.
        stream.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05T").await.expect("an open connection");
        stream
    };
    let url = format!("postgres://nobody@127.0.0.1:{port}/nowhere?sslmode=disable");
    let (stream, connection) = tokio::join!(server, PgConnection::connect(&url));
    drop(stream);
    connection.expect("a greeting")
}
