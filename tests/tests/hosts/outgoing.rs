//! What handlers emit reaches its destinations, each message with one effect there, whichever host
//! dies at whatever step: over three hops of Kafka, and into an inbox of the same tenant.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use oncebox_control::{JobFilter, NewDeployment, OutgoingAction};
use oncebox_model::{hooks::OUTGOING_POINTS, policy::Policy};
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options, aside},
    job::outgoing_job,
    outgoing::derived_id,
    shop::{DEAD, LATE, Order, Publisher, ShopFixture, end_leases, read_topic},
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;
use tokio::time::sleep;

use crate::crash_recovery::run_seeds;

/// Scenarios side by side; each has up to two hosts.
const AT_ONCE: usize = 3;
/// Kills while orders come, before both hosts are killed.
const KILLS: usize = 3;
const HOSTS: [&str; 2] = ["a", "b"];

/// What could go wrong: a host dies between the commit and the mark, and its successor loses what
/// was emitted, sends it under another id, or sends what was cancelled; a receiver has an effect
/// twice. S0-001, S0-003, S0-025, S0-026, S1-037, S1-042, S3-020.
///
/// A point that no message comes by fails the test, so every name in the list is passed.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_at_any_step_of_sending_leaves_every_effect_once() {
    let died = stream::iter(OUTGOING_POINTS).map(|point| async move {
        let started = Instant::now();
        let died = aside(move || dies_at(point)).await;
        println!(
            "{point:<24} {:>5.1} s  {}",
            started.elapsed().as_secs_f64(),
            if died.is_ok() { "ok" } else { "FAILED" }
        );
        died.with_context(|| format!("at `{point}`"))
    });
    let outcomes: Vec<_> = died.buffer_unordered(AT_ONCE).collect().await;
    let failures: Vec<_> =
        outcomes.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Kills a host at a point, in the middle of its work, and lets two hosts finish that.
async fn dies_at(point: &'static str) -> Result<()> {
    let seed: u64 = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut shop = ShopFixture::new().await?;
    let orders = shop.orders(&mut rng, 30);
    shop.place(&orders).await?;
    // Not the first pass, so that something was done before.
    let armed = format!("{point}@2");
    let host = shop.base.start(HOSTS[0], &[("ONCEBOX_FAILPOINT", &armed)])?;
    if point == "outgoing:cancel:after" {
        shop.wait_placed().await?;
        shop.cancel_late("stop-1").await?;
        shop.cancel_late("stop-2").await?;
    }
    let status = host
        .wait_exit()
        .await
        .with_context(|| format!("`{armed}` was never reached; seed {seed}"))?;
    ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
    shop.base.check_whole().await?;
    end_leases(&shop.base).await?;
    let (one, other) = (shop.base.start(HOSTS[0], &[])?, shop.base.start(HOSTS[1], &[])?);
    let more = shop.orders(&mut rng, 10);
    shop.place(&more).await?;
    shop.place(&orders).await?; // what comes again emits nothing
    shop.cancel_late("stop").await?;
    shop.wait_done().await.with_context(|| format!("seed {seed}"))?;
    // S0-001, S0-003, S0-025, S0-026, S1-037, S1-042, S3-020.
    shop.check().await.with_context(|| format!("seed {seed}"))?;
    one.stop().await?;
    other.stop().await
}

/// What could go wrong: some mixture of kills of two hosts that no list of steps has: an effect is
/// lost or doubled, or messages of a key overtake each other. S0-025, S1-037, S3-020, S4-001.
///
/// `ONCEBOX_OUTGOING_SEEDS` says how many new seeds are run (5 by default), or, as a list with a
/// comma such as `17,`, which.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_is_sent_in_order_and_has_each_effect_once_whoever_dies() {
    run_seeds("ONCEBOX_OUTGOING_SEEDS", 5, AT_ONCE, survive).await;
}

/// Kills two hosts in turns that are drawn, while orders come. Returns what happened, for readers.
async fn survive(seed: u64) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let own_database = rng.random_bool(0.5);
    let mut shop = if own_database {
        ShopFixture::with_own_database().await?
    } else {
        ShopFixture::new().await?
    };
    let batches: Vec<_> = (0..KILLS).map(|_| shop.orders(&mut rng, 40)).collect();
    let trouble = async {
        let mut hosts: Vec<HostProcess> = Vec::new();
        for name in HOSTS {
            hosts.push(shop.base.start(name, &[])?);
        }
        for host in &hosts {
            host.wait_ready().await?;
        }
        for orders in &batches {
            shop.place(orders).await?;
            sleep(Duration::from_millis(rng.random_range(0..400))).await;
            let struck = rng.random_range(0..HOSTS.len());
            hosts[struck].kill().await?;
            hosts[struck] = shop.base.start_ready(HOSTS[struck], &[]).await?;
        }
        for host in &hosts {
            host.kill().await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        made = trouble => made?,
        failed = shop.keep_releasing() => failed?,
    }
    // Nobody lives, so that every lease is one of the dead.
    end_leases(&shop.base).await?;
    let (one, other) = (shop.base.start(HOSTS[0], &[])?, shop.base.start(HOSTS[1], &[])?);
    shop.wait_done().await?;
    // S0-025, S1-037, S3-020, S4-001.
    shop.check().await?;
    one.stop().await?;
    other.stop().await?;
    shop.check().await?;
    let repeated = shop.read(&shop.events).await?.len() - shop.placed().len();
    let orders = shop.placed().len();
    Ok(format!("{orders} orders, {repeated} events repeated, own database: {own_database}"))
}

/// What could go wrong: a receiver cannot tell a repeated message, cannot follow it to its cause,
/// or gets less than was emitted. S0-026, S1-017, S1-039.
#[tokio::test(flavor = "multi_thread")]
async fn three_hops_carry_ids_causes_and_correlation() {
    let mut shop = ShopFixture::new().await.unwrap();
    let orders = shop.orders(&mut StdRng::seed_from_u64(7), 5);
    shop.place(&orders).await.unwrap();
    let host = shop.base.start("a", &[]).unwrap();
    shop.wait_done().await.unwrap();
    shop.check().await.unwrap();
    let tenant = shop.base.tenant.name.clone();
    let events = shop.read(&shop.events).await.unwrap();
    let last = shop.read(&shop.last).await.unwrap();
    for Order { id, key } in &orders {
        let first = derived_id(&tenant, "orders", id, 0);
        let second = derived_id(&tenant, "shipping", &first, 0);
        for (sent, hop, cause, source, event_type) in [
            (&events, &first, id, "orders", "order.placed"),
            (&last, &second, &first, "shipping", "order.shipped"),
        ] {
            let found: Vec<_> = sent.iter().filter(|record| record.id() == *hop).collect();
            assert_eq!(found.len(), 1, "nobody died, so nothing is sent twice: {found:?}");
            let header = |name: &str| found[0].header(name);
            // S0-026, S1-017, S1-039.
            assert_eq!(header("ce_id"), *hop);
            assert_eq!(header("ce_source"), format!("oncebox:{tenant}/{source}"));
            assert_eq!(header("ce_type"), event_type);
            assert_eq!(header("ce_specversion"), "1.0");
            assert_eq!(header("ce_causationid"), *cause);
            assert_eq!(header("ce_correlationid"), *id, "the first message of the chain");
            assert!(header("ce_time").starts_with("20"), "{}", header("ce_time"));
            assert_eq!(found[0].key.as_deref(), Some(key.as_bytes()));
            assert_eq!(found[0].payload.as_deref(), Some(format!("order {id}").as_bytes()));
        }
    }
    for (consumer, kind) in [("orders", "kafka"), ("orders", "inbox"), ("shipping", "kafka")] {
        let labels = [format!("consumer=\"{consumer}\""), format!("destination_kind=\"{kind}\"")];
        let labels = labels.each_ref().map(String::as_str);
        for metric in ["oncebox_outgoing_sent_total", "oncebox_outgoing_delay_seconds_count"] {
            host.until_metric(metric, &labels, orders.len() as f64).await.unwrap();
        }
    }
    host.stop().await.unwrap();
}

/// What could go wrong: a topic that is not there holds up what goes elsewhere, its messages are
/// lost, or they come out of order once it is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_destination_delays_no_other_and_loses_nothing() {
    let mut shop = ShopFixture::with_dead_destination().await.unwrap();
    let host = shop.base.start("a", &[]).unwrap();
    let mut rng = StdRng::seed_from_u64(11);
    let mut all = Vec::new();
    for _ in 0..4 {
        let orders = shop.orders(&mut rng, 50);
        shop.place(&orders).await.unwrap();
        all.extend(orders);
    }
    // Everything else arrives while nothing does there.
    shop.wait_done().await.unwrap();
    shop.check().await.unwrap();
    let at_rest = format!(
        "SELECT count(*) FROM oncebox.outgoing WHERE destination = 'kafka:{}' AND status IN \
            ('received', 'in_progress', 'failed_retryable')",
        shop.dead
    );
    assert_eq!(shop.base.number(&at_rest).await.unwrap(), all.len() as i64);
    let longest = "SELECT coalesce(max(attempts), 0)::bigint FROM oncebox.outgoing WHERE \
        destination NOT LIKE '%{dead}'";
    let longest = longest.replace("{dead}", DEAD);
    assert_eq!(shop.base.number(&longest).await.unwrap(), 1, "attempts of what was deliverable");

    shop.base.kafka().create_topic(&shop.dead, 2, &[]).await.unwrap();
    let redrive = outgoing_job(OutgoingAction::Redrive, JobFilter::default());
    let left = format!("SELECT 1 - least(1, count(*)) FROM ({at_rest}) n WHERE n.count > 0");
    let deadline = Instant::now() + DEADLINE;
    while shop.base.number(&left).await.unwrap() == 0 {
        assert!(Instant::now() < deadline, "messages to the topic are not sent");
        shop.base.job(&redrive).await.unwrap();
        sleep(Duration::from_millis(500)).await;
    }
    let arrived = shop.read(&shop.dead).await.unwrap();
    let tenant = &shop.base.tenant.name;
    let expected: BTreeSet<_> =
        all.iter().map(|order| derived_id(tenant, "orders", &order.id, 3)).collect();
    let ids: BTreeSet<_> = arrived.iter().map(|record| record.id()).collect();
    assert_eq!(ids, expected, "messages are lost");
    shop.check_order(&arrived, 3).unwrap();
    host.stop().await.unwrap();
}

/// What could go wrong: messages that were cancelled are sent, or a cancel takes others along; or
/// what a killed host cancelled is as if it had not.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_cancelled_in_time_is_never_sent() {
    let mut shop = ShopFixture::new().await.unwrap();
    let orders = shop.orders(&mut StdRng::seed_from_u64(3), 20);
    shop.place(&orders).await.unwrap();
    let host = shop.base.start("a", &[]).unwrap();
    shop.wait_done().await.unwrap();
    let mut statuses = BTreeMap::new();
    for status in ["received", "cancelled"] {
        statuses.insert(status, shop.count(&shop.late, status).await.unwrap());
    }
    assert_eq!(statuses, BTreeMap::from([("received", 20), ("cancelled", 0)]));
    shop.cancel_late("stop").await.unwrap();
    shop.base.until(&shop.late_in("cancelled"), 20).await.unwrap();
    // Whatever was not cancelled would be due now.
    shop.base
        .execute("UPDATE oncebox.outgoing SET next_attempt_at = now() WHERE status = 'received'")
        .await
        .unwrap();
    let more = shop.orders(&mut StdRng::seed_from_u64(4), 5);
    shop.place(&more).await.unwrap();
    shop.wait_done().await.unwrap();
    assert!(shop.read(&shop.late).await.unwrap().is_empty(), "a cancelled message was sent");
    assert_eq!(shop.count(&shop.late, "received").await.unwrap(), 5, "those of {LATE} since");
    shop.check().await.unwrap();
    host.stop().await.unwrap();
}

const PURCHASES: &str = include_str!("../../../guest-examples/order-events/schema.sql");

/// The example `order-events` as a consumer that sends to a topic and to itself.
async fn deploy_example(base: &HostFixture) -> Result<()> {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-examples/components/order-events.wasm");
    let component = std::fs::read(path)
        .with_context(|| format!("`{path}` is missing; run `guest-examples/build.sh build`"))?;
    let (tenant, topic) = (&base.tenant.name, &base.topic);
    let limits = json!({ "destinations_allowed": [format!("kafka:{topic}.*"), "inbox:purchases"] });
    let limits = limits.as_object().context("an object")?;
    base.control.tenants().set_limits(tenant, limits).await?;
    base.control.tenant_databases().apply_migration(&base.tenant, "purchases", PURCHASES).await?;
    let policy = format!(
        "topics = ['{topic}.orders']\nack = 'after_commit'\norder = 'key'\n\
         identity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = 'type' }}] }}\n\
         retry = {{ attempts_max = 20, backoff_min_ms = 50, backoff_max_ms = 200, lease_ms = 4000 \
         }}\nlimits = {{ deadline_ms = 1400 }}"
    );
    base.control.consumers().create(tenant, "purchases", &Policy::parse(&policy)?).await?;
    let settings = json!({
        "confirm_to": format!("kafka:{topic}.confirmed"),
        "remind_to": "inbox:purchases",
        "remind_after_s": "3600",
    });
    let new = NewDeployment {
        grants: vec!["emit".to_owned()],
        settings: settings.as_object().context("an object")?.clone(),
        ..NewDeployment::stable("*", "order-events", "")
    };
    base.control.versions().deploy_compiled(tenant, "purchases", new, &component).await?;
    Ok(())
}

/// What could go wrong: a handler in Rust that emits, cancels and sends to its own consumer
/// confirms an order twice or never, or reminds of one that is paid, when its host dies after a
/// send. S0-025, S1-039, S3-020.
#[tokio::test(flavor = "multi_thread")]
async fn the_example_confirms_and_reminds_once_although_its_host_dies() {
    const ORDERS: usize = 12;
    let base = HostFixture::with(Options::default()).await.unwrap();
    let (orders, confirmed) =
        (format!("{}.orders", base.topic), format!("{}.confirmed", base.topic));
    for topic in [&orders, &confirmed] {
        base.kafka().create_topic(topic, 2, &[]).await.unwrap();
    }
    deploy_example(&base).await.unwrap();
    let brokers = base.kafka().bootstrap().to_owned();
    let publisher = Publisher::new(&brokers).unwrap();
    let publish = async |event: &str, number: usize| {
        let (id, key) = (format!("{event}-{number}"), format!("o-{number}"));
        let payload = json!({ "order_id": key, "amount": 250 }).to_string();
        let event_type = format!("order.{event}");
        publisher.publish(&orders, (&id, &event_type, &key), &payload).await.unwrap();
    };
    for number in 0..ORDERS {
        publish("placed", number).await;
    }
    let host = base.start("a", &[("ONCEBOX_FAILPOINT", "outgoing:send:after@5")]).unwrap();
    let status = host.wait_exit().await.unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    end_leases(&base).await.unwrap();
    let hosts = HOSTS.map(|name| base.start(name, &[]).unwrap());
    let sent = "SELECT count(*) FROM oncebox.outgoing WHERE destination LIKE 'kafka:%' AND status \
        = 'completed'";
    base.until(sent, ORDERS as i64).await.unwrap();
    for number in 0..ORDERS / 2 {
        publish("paid", number).await;
    }
    let cancelled = "SELECT count(*) FROM oncebox.outgoing WHERE status = 'cancelled'";
    base.until(cancelled, ORDERS as i64 / 2).await.unwrap();
    // An hour passes.
    base.execute("UPDATE oncebox.outgoing SET next_attempt_at = now() WHERE status = 'received'")
        .await
        .unwrap();
    let reminded = "SELECT coalesce(sum(reminders), 0)::bigint FROM {schema}.purchases";
    base.until(reminded, ORDERS as i64 / 2).await.unwrap();
    let open = "SELECT count(*) FROM oncebox.outgoing WHERE status NOT IN ('completed', \
        'cancelled')";
    // S0-025, S3-020.
    assert_eq!(base.number(open).await.unwrap(), 0);
    let wrong = "SELECT count(*) FROM {schema}.purchases WHERE reminders <> (NOT is_paid)::int";
    assert_eq!(
        base.number(wrong).await.unwrap(),
        0,
        "an order has not the reminder that it should"
    );
    let tenant = &base.tenant.name;
    let expected: BTreeSet<_> = (0..ORDERS)
        .map(|number| derived_id(tenant, "purchases", &format!("placed-{number}"), 0))
        .collect();
    let arrived = read_topic(&brokers, &confirmed).await.unwrap();
    // S1-039: the receiver knows a confirmation by its id.
    assert_eq!(arrived.iter().map(|record| record.id()).collect::<BTreeSet<_>>(), expected);
    for host in &hosts {
        host.stop().await.unwrap();
    }
}
