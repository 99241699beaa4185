//! Host processes whose messages refer to their payloads, with a store as an operator and a tenant
//! set it.

use std::{os::unix::process::ExitStatusExt, time::Duration};

use anyhow::{Context, Result, ensure};
use oncebox_model::hooks::REFERENCE_POINTS;
use oncebox_tests::{
    host::{HostFixture, Options},
    load::{Load, Work},
    s3::{ACCESS_KEY_ID, BUCKET, S3Server, SECRET_ACCESS_KEY},
    wait::{self, DEADLINE},
};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use serde_json::json;

/// Gives the tenant of the fixture access to the store, by commands.
async fn allow(fixture: &HostFixture, server: &S3Server) -> Result<()> {
    let mut folder = fixture.folder()?;
    folder.write("host.toml", server.store_config())?;
    let config = folder.dir().join("host.toml");
    folder.set("ONCEBOX_CONFIG", config.to_str().context("a path")?);
    folder.set("ONCEBOX_STORE_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY);
    let tenant = fixture.tenant.name.as_str();
    let set = ["tenant", "store", "set", tenant, "docs", "--access-key-id", ACCESS_KEY_ID];
    let set = [&set[..], &["--bucket", BUCKET, "--prefix", "/in/"]].concat();
    let said = folder.run(&set, "").await?;
    let expected =
        format!("tenant `{tenant}` has access to the store `docs`, below `s3://{BUCKET}/in/`\n");
    assert_eq!((said.code, said.stdout), (Some(0), expected), "{}", said.stderr);
    let said = folder.run(&["tenant", "store", "list", tenant, "--json"], "").await?;
    let listed = said.json()?;
    assert_eq!((&listed[0]["store"], &listed[0]["prefix"]), (&json!("docs"), &json!("in")));
    ensure!(!said.stdout.contains(SECRET_ACCESS_KEY) && !said.stdout.contains(ACCESS_KEY_ID));
    let unknown = set.iter().map(|word| if *word == "docs" { "other" } else { *word });
    let said = folder.run(&unknown.collect::<Vec<_>>(), "").await?;
    let fault = "the settings of this host name no store `other`; they name `docs`";
    ensure!(said.code != Some(0) && said.stderr.contains(fault), "{said:?}");
    Ok(())
}

/// Puts the payloads of a load into the store, and sends references to them.
async fn send(fixture: &HostFixture, server: &S3Server, load: &Load) -> Result<()> {
    fixture.open_accounts(load).await?;
    fixture.sent().deliveries.extend(load.deliveries.iter().cloned());
    let producer: FutureProducer =
        ClientConfig::new().set("bootstrap.servers", fixture.kafka().bootstrap()).create()?;
    for message in &load.deliveries {
        let key = format!("in/{}.json", message.id);
        server.put_key(&key, Some(&message.payload()));
        let reference = format!("s3://{BUCKET}/{key}");
        let headers = OwnedHeaders::new()
            .insert(Header { key: "type", value: Some(message.event_type()) })
            .insert(Header { key: "id", value: Some(&message.id) })
            .insert(Header { key: "ref", value: Some(&reference) });
        let record =
            FutureRecord::<(), _>::to(&fixture.topic).partition(0).payload("{}").headers(headers);
        let sent = producer.send(record, Duration::from_secs(10)).await;
        sent.map_err(|(error, _)| error)?;
    }
    Ok(())
}

/// What could go wrong: a host dies between the fetch and the commit, and its successor loses a
/// message, repeats an effect, counts an attempt that never ran or runs by the reference. S0-051.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_after_a_fetch_leaves_every_effect_once() -> Result<()> {
    let server = S3Server::start().await;
    let options = Options {
        partitions: 1,
        policy: "reference = { store = 'docs', source = { header = 'ref' } }",
        config: server.store_config(),
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await?;
    allow(&fixture, &server).await?;
    let load = Load::of([Work::Pay, Work::Pay, Work::Fails(2), Work::Pay, Work::Reject, Work::Pay]);
    send(&fixture, &server, &load).await?;
    for point in REFERENCE_POINTS {
        let armed = format!("{point}@3");
        let host = fixture.start("a", &[("ONCEBOX_FAILPOINT", &armed)])?;
        let status = host.wait_exit().await;
        let status = status.with_context(|| format!("`{armed}` was never reached"))?;
        ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
        fixture.check_whole().await?;
    }
    let host = fixture.start("a", &[])?;
    send(&fixture, &server, &load).await?;
    fixture.wait_settled().await?;
    // S0-051.
    fixture.check().await?;
    let fetched = ["outcome=\"fetched\""];
    host.until_metric_reaches("oncebox_reference_fetches_total", &fetched, 1.0).await?;
    ensure!(host.log_lines(SECRET_ACCESS_KEY) == 0, "the log has the access key");
    host.stop().await
}

/// What could go wrong: a host that gives up a partition waits for a store that does not go on, or
/// its successor loses or repeats what was behind. S0-051.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_is_given_up_while_an_object_is_held() -> Result<()> {
    let server = S3Server::start().await;
    let options = Options {
        partitions: 1,
        policy: "reference = { store = 'docs', source = { header = 'ref' }, timeout_ms = 600000 }",
        config: format!("[references]\nstall_ms = 600000\n{}", server.store_config()),
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await?;
    allow(&fixture, &server).await?;
    let load = Load::of([Work::Pay; 12]);
    let held = format!("in/{}.json", load.deliveries[5].id);
    server.hold(&held);
    send(&fixture, &server, &load).await?;
    let host = fixture.start("a", &[])?;
    let is_held = async || Ok(server.asked(&held) == 1);
    let said = async || format!("it was asked for {:?}", server.gets());
    wait::until(DEADLINE, Duration::from_millis(20), is_held, said).await?;
    // Those before it are done: what runs next waits for it, with a backlog behind.
    host.until_metric_reaches("oncebox_reference_fetches_total", &["outcome=\"fetched\""], 5.0)
        .await?;
    host.stop().await?;
    ensure!(host.log_lines("did not end in time") == 0, "the partition waited for the store");
    server.release(&held);
    let host = fixture.start("b", &[])?;
    fixture.wait_settled().await?;
    // S0-051.
    fixture.check().await?;
    host.stop().await
}
