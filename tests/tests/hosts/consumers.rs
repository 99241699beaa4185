//! Consumers at run time: paused, resumed, drained, sought, changed, deleted. What could go wrong:
//! a change is lost with the host that carries it out, is carried out while a host still runs the
//! consumer, costs a message or doubles one, or one consumer's trouble becomes another's.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use oncebox_control::{
    Consumer, ConsumerStatus, Control, DeletionStep, DesiredState, RunState, SeekOffset, SeekTurn,
};
use oncebox_model::{InboxError, policy::Policy};
use oncebox_tests::{
    cli::{Access, CliFixture},
    guests::{self, End},
    host::{HostFixture, Options},
    inbox::{InboxFixture, TestConsumer, deliver, record},
    load::{Load, Work},
    wait::DEADLINE,
};
use serde_json::{Value, json};
use tokio::time::sleep;

// Rows ------------------------------------------------------------------------------------------

async fn actions(control: &Control) -> Vec<String> {
    control
        .audit()
        .list(Some("acme"), 100)
        .await
        .unwrap()
        .into_iter()
        .map(|entry| entry.action)
        .collect()
}

/// What could go wrong: a change that is asked for twice is made twice, one that cannot be is half
/// made, or nobody can tell who made it.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_state_is_made_once_and_leaves_a_row() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let control = &fixture.control;
    let (tenant, name) = (consumer.tenant.name.as_str(), consumer.row.name.as_str());
    let refused = |answer: Result<Consumer, InboxError>, text: &str| {
        let error = answer.expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(control.consumers().drain(tenant, name).await, "has no deployment");
    fixture.execute("UPDATE oncebox.consumer SET generation = 1").await;
    for (change, state, revision) in [
        ("pause", "paused", 1),
        ("resume", "running", 2),
        ("drain", "draining", 3),
        ("pause", "paused", 4),
        ("drain", "draining", 5),
    ] {
        for again in [false, true] {
            let before = actions(control).await.len();
            let now = match change {
                "pause" => control.consumers().pause(tenant, name).await,
                "resume" => control.consumers().resume(tenant, name).await,
                _ => control.consumers().drain(tenant, name).await,
            };
            let now = now.unwrap();
            assert_eq!(
                (now.state.as_str(), now.revision),
                (state, revision),
                "{change}, again: {again}"
            );
            assert_eq!(
                actions(control).await.len() - before,
                usize::from(!again),
                "{change}, again: {again}"
            );
        }
        assert_eq!(actions(control).await[0], format!("consumer.{change}"));
    }
    control.consumers().delete(tenant, name).await.unwrap();
    assert_eq!(control.consumers().delete(tenant, name).await.unwrap().revision, 6);
    refused(control.consumers().resume(tenant, name).await, "is being deleted");
    let policy = Policy::parse("topics = ['t']\nack = 'after_commit'").unwrap();
    assert!(
        control
            .consumers()
            .set_policy(tenant, name, policy, true)
            .await
            .unwrap_err()
            .to_string()
            .contains("is being deleted")
    );
    refused(control.consumers().begin_seek(tenant, name, vec![], Value::Null).await, "is deleting");
    refused(control.consumers().pause(tenant, "nobody").await, "there is no consumer");
    fixture.finish().await;
}

/// What could go wrong: changes of one consumer that wait for one another take the connections that
/// the host says with that it lives, and others take over from it what it still runs.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_hold_up_nothing_of_the_host() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let requests = fixture.control.for_requests();
    let mut held = fixture.control.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM oncebox.consumer FOR UPDATE").execute(&mut *held).await.unwrap();
    let ask = |control: Control, (tenant, name): (String, String)| async move {
        control.consumers().pause(&tenant, &name).await
    };
    let name = || (consumer.tenant.name.clone(), consumer.row.name.clone());
    let asked: Vec<_> = (0..20).map(|_| tokio::spawn(ask(requests.clone(), name()))).collect();
    fixture
        .until(
            "SELECT count(*) >= 4 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND \
        datname = current_database()",
        )
        .await;
    // The requests give up after 20 seconds: a host that waits for them starts later.
    let host = tokio::time::timeout(Duration::from_secs(15), fixture.control.hosts().start("a"))
        .await
        .expect("the host waits")
        .unwrap();
    assert!(fixture.control.hosts().beat(host).await.unwrap());
    held.rollback().await.unwrap();
    for asked in asked {
        assert_eq!(asked.await.unwrap().unwrap().state.as_str(), "paused");
    }
    fixture.finish().await;
}

async fn desired(control: &Control, consumer: &TestConsumer) -> DesiredState {
    control
        .reconciliation()
        .desired_states()
        .await
        .unwrap()
        .into_iter()
        .find(|s| s.consumer_id == consumer.row.consumer_id)
        .unwrap()
}

fn stopped(desired: &DesiredState) -> ConsumerStatus {
    let DesiredState { consumer_id, revision, .. } = *desired;
    ConsumerStatus {
        consumer_id,
        state: RunState::Stopped,
        revision,
        error: None,
        stopped_generation: Some(0),
    }
}

/// What could go wrong: offsets are set while a host still reads, by two hosts at once, or never,
/// because the host that was about to has died.
#[tokio::test(flavor = "multi_thread")]
async fn a_seek_is_one_hosts_turn_once_all_have_stopped() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let (control, id) = (&fixture.control, consumer.row.consumer_id);
    let (tenant, name) = (consumer.tenant.name.as_str(), consumer.row.name.as_str());
    let to = |offset| vec![SeekOffset { topic: "t".to_owned(), partition: 0, offset }];
    let (one, two) =
        (control.hosts().start("one").await.unwrap(), control.hosts().start("two").await.unwrap());
    let died = control.hosts().start("died").await.unwrap();
    fixture
        .execute(format!(
            "UPDATE oncebox.host SET seen_at = now() - interval '11 s' WHERE host_id = {died}"
        ))
        .await;

    assert!(matches!(control.reconciliation().seek_turn(id).await.unwrap(), SeekTurn::None));
    control.consumers().begin_seek(tenant, name, to(5), Value::Null).await.unwrap();
    let revision =
        control.consumers().begin_seek(tenant, name, to(5), Value::Null).await.unwrap().revision;
    assert_eq!(revision, 1, "the same again changes nothing");
    assert!(
        control
            .consumers()
            .begin_seek(tenant, name, to(6), Value::Null)
            .await
            .unwrap_err()
            .to_string()
            .contains("sought already")
    );
    // A request that was refused lets go of the consumer's row a little after its answer.
    let late = async || {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match control.reconciliation().seek_turn(id).await.unwrap() {
                SeekTurn::Waits(hosts) => return hosts,
                SeekTurn::None => assert!(Instant::now() < deadline, "it does not wait"),
                SeekTurn::Ours(_) => panic!("it does not wait"),
            }
        }
    };
    assert_eq!(late().await, ["one", "two"]);
    let asked = desired(control, &consumer).await;
    assert!(asked.is_sought && asked.run_mode() == oncebox_control::RunMode::Stopped);
    control.hosts().report_statuses(one, &[stopped(&asked)]).await.unwrap();
    control
        .hosts()
        .report_statuses(two, &[ConsumerStatus { revision: 0, ..stopped(&asked) }])
        .await
        .unwrap();
    assert_eq!(late().await, ["two"], "it stopped for an older reason");
    control
        .hosts()
        .report_statuses(two, &[ConsumerStatus { state: RunState::Running, ..stopped(&asked) }])
        .await
        .unwrap();
    assert_eq!(late().await, ["two"]);
    control.hosts().report_statuses(two, &[stopped(&asked)]).await.unwrap();

    let SeekTurn::Ours(hand) = control.reconciliation().seek_turn(id).await.unwrap() else {
        panic!("all have stopped")
    };
    assert!(
        matches!(control.reconciliation().seek_turn(id).await.unwrap(), SeekTurn::None),
        "another host has it in hand"
    );
    // The host dies.
    drop(hand);
    let deadline = Instant::now() + DEADLINE;
    let hand = loop {
        match control.reconciliation().seek_turn(id).await.unwrap() {
            SeekTurn::Ours(hand) => break hand,
            _ => assert!(Instant::now() < deadline, "nobody can take it over"),
        }
    };
    assert_eq!(hand.offsets, to(5));
    hand.done().await.unwrap();
    let after = control.consumers().get(tenant, name).await.unwrap();
    assert_eq!((after.seek, after.state.as_str(), after.revision), (None, "running", 2));
    assert!(matches!(control.reconciliation().seek_turn(id).await.unwrap(), SeekTurn::None));

    control.consumers().begin_seek(tenant, name, to(7), Value::Null).await.unwrap();
    control.consumers().cancel_seek(tenant, name).await.unwrap();
    assert_eq!(control.consumers().cancel_seek(tenant, name).await.unwrap().revision, 4);
    assert_eq!(
        actions(control).await[..3],
        ["consumer.seek.cancel", "consumer.seek", "consumer.seek.done"]
    );
    fixture.finish().await;
}

/// What could go wrong: a host that nobody can reach completes messages of a consumer that is gone,
/// the rows go while one still runs, or a removal that broke off leaves something for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_ends_is_denied_and_leaves_the_audit_log_alone() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let (consumer, other) = (
        fixture.consumer(&tenant, "orders", "").await,
        fixture.consumer(&tenant, "other", "").await,
    );
    let (host, neighbour) = (fixture.host(&consumer), fixture.host(&other));
    let log: Vec<_> = (0..10).map(|n| record(n, &format!("m{n}"), "")).collect();
    deliver(&host, &log).await;
    deliver(&neighbour, &log).await;
    let control = &fixture.control;
    let alive = control.hosts().start("alive").await.unwrap();
    control.consumers().delete("acme", "orders").await.unwrap();
    let asked = desired(control, &consumer).await;
    assert!(matches!(
        control.reconciliation().delete_some(&asked).await.unwrap(),
        DeletionStep::Waits(_)
    ));

    // A zombie: it has not heard of it.
    let mut inbox = oncebox_inbox::PartitionInbox::open(host.clone(), "t", 1, 0).await;
    let answer = match &mut inbox {
        Ok(inbox) => inbox.process(&[record(99, "late", "")]).await.map(drop),
        Err(error) => Err(InboxError::Invalid(error.to_string())),
    };
    let error = answer.expect_err("it is denied").to_string();
    assert!(error.contains("denied"), "{error}");

    control.hosts().report_statuses(alive, &[stopped(&asked)]).await.unwrap();
    assert!(matches!(
        control.reconciliation().delete_some(&asked).await.unwrap(),
        DeletionStep::Removed(10)
    ));
    match control.reconciliation().delete_some(&asked).await.unwrap() {
        DeletionStep::Last(last) => drop(last), // the host dies
        _ => panic!("the inbox is empty"),
    }
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < deadline, "nobody can take it over");
        if let DeletionStep::Last(last) =
            control.reconciliation().delete_some(&asked).await.unwrap()
        {
            break last.remove(json!({ "kafka_group": "none" })).await.unwrap();
        }
    }
    assert!(matches!(
        control.reconciliation().delete_some(&asked).await.unwrap(),
        DeletionStep::None
    ));
    assert!(control.consumers().get("acme", "orders").await.is_err());
    let left = format!(
        "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {}",
        consumer.row.consumer_id
    );
    assert_eq!(fixture.number(left).await, 0);
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox").await,
        10,
        "those of its neighbour stay"
    );
    assert_eq!(actions(control).await[..2], ["consumer.deleted", "consumer.delete"]);
    // One that is made again under the same name is another. What the first did stays.
    assert_eq!(
        fixture
            .number(format!(
                "SELECT count(*) FROM {}.effect WHERE consumer = 'orders'",
                tenant.schema_name
            ))
            .await,
        10
    );
    fixture
        .execute(format!("DELETE FROM {}.effect WHERE consumer = 'orders'", tenant.schema_name))
        .await;
    let again = fixture.consumer(&tenant, "orders", "").await;
    assert_ne!(again.row.consumer_id, consumer.row.consumer_id);
    fixture.finish().await;
}

/// What could go wrong: a policy is changed although somebody had to be asked, a change says less
/// than it does, or what cannot be is done half.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_changes_when_what_follows_is_accepted() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    fixture.consumer(&consumer.tenant, "other", "").await;
    let control = &fixture.control;
    let set = async |more: &str, accept: bool| {
        let policy = format!(
            "topics = ['t']\nidentity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = \
                'type' }}, 'topic'] }}\n{more}"
        );
        control
            .consumers()
            .set_policy("acme", "orders", Policy::parse(&policy).unwrap(), accept)
            .await
    };
    let base = serde_json::to_value(&consumer.policy).unwrap();
    let same = control
        .consumers()
        .set_policy("acme", "orders", serde_json::from_value(base).unwrap(), false)
        .await
        .unwrap();
    assert!(same.is_made && same.differences.is_empty() && same.consumer.revision == 0);
    let changed = set("ack = 'after_commit'\nbatch.messages_max = 7", false).await.unwrap();
    assert!(changed.is_made && changed.consumer.revision == 1, "{changed:?}");
    assert!(
        changed
            .differences
            .iter()
            .any(|d| d.key == "batch.messages_max" && d.after == Some(json!(7)))
    );
    let asked = set("ack = 'after_insert'", false).await.unwrap();
    assert!(
        !asked.is_made && asked.consumer.revision == 1 && asked.consequences[0].key == "ack",
        "{asked:?}"
    );
    assert!(set("ack = 'after_insert'", true).await.unwrap().is_made);
    let error = set("ack = 'after_insert'\nretention = '30d'", true).await.unwrap_err().to_string();
    assert!(error.contains("create another consumer"), "{error}");
    let error = set("ack = 'after_insert'\nkafka.group = 'oncebox.acme.other'", true)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("another consumer's"), "{error}");
    let row = control.consumers().get("acme", "orders").await.unwrap();
    assert_eq!(
        (row.revision, row.policy().unwrap().ack),
        (2, oncebox_model::policy::Ack::AfterInsert)
    );
    fixture.finish().await;
}

// Commands --------------------------------------------------------------------------------------

/// What could go wrong: a command says that hosts have done what they have not, or one consumer's
/// failure is the host's.
#[tokio::test(flavor = "multi_thread")]
async fn every_command_waits_for_the_hosts() {
    let cli = CliFixture::open(Access::Server).await;
    cli.file("policy.toml", "topics = ['orders']\nack = 'after_commit'\n");
    cli.file("other.toml", "topics = ['others']\nack = 'after_commit'\n");
    cli.file("ok.wasm", guests::component(&[], &End::Ok));
    cli.ok(&["tenant", "create", "acme"]).await;
    for (name, policy) in [("orders", "policy.toml"), ("other", "other.toml")] {
        cli.ok(&["consumer", "create", name, "--tenant", "acme", "--policy", policy]).await;
        cli.ok(&[
            "deploy",
            "ok.wasm",
            "--tenant",
            "acme",
            "--consumer",
            name,
            "--event-type",
            "x",
            "--wait",
        ])
        .await;
    }
    let of: &[&str] = &["orders", "--tenant", "acme"];
    let show = async || cli.json(&[&["consumer", "show"], of].concat()).await;
    let hosts = |consumer: &Value| {
        (
            consumer["hosts"][0]["state"].clone(),
            consumer["hosts"][0]["revision"] == consumer["revision"],
        )
    };

    assert_eq!(
        cli.ok(&[&["consumer", "pause"], of].concat()).await,
        "consumer `acme/orders` is paused\n"
    );
    assert_eq!(hosts(&show().await), (json!("stopped"), true));
    assert_eq!(
        cli.ok(&[&["consumer", "pause"], of].concat()).await,
        "consumer `acme/orders` is paused\n"
    );
    assert_eq!(show().await["revision"], 1, "it was paused already");
    assert_eq!(
        cli.ok(&[&["consumer", "resume"], of].concat()).await,
        "consumer `acme/orders` is running\n"
    );
    let (state, is_current) = hosts(&show().await);
    assert!(["running", "idle"].contains(&state.as_str().unwrap()) && is_current, "{state}");
    assert_eq!(
        cli.ok(&[&["consumer", "drain"], of].concat()).await,
        "consumer `acme/orders` is paused\n"
    );

    cli.file("new.toml", "topics = ['orders']\nack = 'after_commit'\nretry.workers = 3\n");
    let set: &[&str] =
        &["consumer", "policy", "set", "orders", "--tenant", "acme", "--policy", "new.toml"];
    assert_eq!(
        cli.ok(set).await,
        "  retry.workers: 2 -> 3\nthe policy of consumer `acme/orders` is changed\n"
    );
    assert_eq!(cli.ok(set).await, "the policy of consumer `acme/orders` is that already\n");
    cli.file("new.toml", "topics = ['orders']\nack = 'after_insert'\nretry.workers = 3\n");
    let said = cli.run(set).await;
    assert!(
        said.code == Some(1) && said.stdout.contains("ack: messages are acked before they run"),
        "{said:?}"
    );
    assert_eq!(
        said.stderr,
        "error: nothing was changed; repeat it with `--yes` to accept what follows\n"
    );
    cli.ok(&[set, &["--yes"]].concat()).await;
    let policy = cli.ok(&["consumer", "policy", "show", "orders", "--tenant", "acme"]).await;
    assert!(policy.contains("ack = \"after_insert\"\n"), "{policy}");
    cli.file("shown.toml", &policy);
    let shown = cli
        .ok(&["consumer", "policy", "set", "orders", "--tenant", "acme", "--policy", "shown.toml"])
        .await;
    assert_eq!(shown, "the policy of consumer `acme/orders` is that already\n");

    let seek: &[&str] = &["consumer", "seek", "orders", "--tenant", "acme"];
    for (more, line) in [
        (&[][..], "say where to: `--to beginning`, `--to end`, `--to` a time, or `--offset`"),
        (
            &["--to", "yesterday"],
            "`--to yesterday` is neither `beginning`, `end` nor a time like 2026-01-31T12:00:00Z",
        ),
        (&["--offset", "x"], "`--offset x` is not like `orders:0=500`"),
        (&["--offset", "0=0"], "the brokers know no topic `orders`"),
    ] {
        cli.fails(&[seek, more].concat(), line).await;
    }

    // A policy that nobody can read: its consumer fails, and nothing else.
    let consumers = async || cli.json(&["consumer", "list", "--tenant", "acme"]).await;
    cli.rows(
        "WITH u AS (UPDATE oncebox.consumer SET policy = policy - 'topics', revision = revision + \
            1 WHERE name = 'other' RETURNING 1) \
        SELECT to_jsonb(1) FROM u",
    )
    .await;
    let deadline = Instant::now() + DEADLINE;
    let failing = loop {
        let all = consumers().await;
        if all[1]["hosts"][0]["state"] == "failing" {
            break all;
        }
        assert!(Instant::now() < deadline, "{all}");
        sleep(Duration::from_millis(50)).await;
    };
    assert!(
        failing[1]["hosts"][0]["error"].as_str().unwrap().contains("missing field `topics`"),
        "{failing}"
    );
    assert!(
        cli.ok(&["hosts"]).await.contains("consumer `acme/other` fails on host"),
        "it is listed"
    );
    assert!(cli.is_ready().await, "one consumer's failure is not the host's");
    assert_eq!(
        cli.ok(&[&["consumer", "resume"], of].concat()).await,
        "consumer `acme/orders` is running\n"
    );
    // Whoever mends it does not wait for the pause after a failure.
    cli.ok(&["consumer", "policy", "set", "other", "--tenant", "acme", "--policy", "other.toml"])
        .await;

    cli.fails(
        &["consumer", "delete", "orders", "--tenant", "acme", "--confirm", "order"],
        "query parameter `confirm` must be the consumer's name: its inbox is deleted, for good",
    )
    .await;
    let said =
        cli.ok(&["consumer", "delete", "orders", "--tenant", "acme", "--confirm", "orders"]).await;
    assert_eq!(
        said,
        "consumer `acme/orders` is deleted; `oncebox audit --tenant acme` says what became of its \
            group\n"
    );
    assert_eq!(consumers().await.as_array().unwrap().len(), 1);
    cli.fails(
        &[&["consumer", "show"], of].concat(),
        "there is no consumer `acme/orders`; `oncebox consumer list` shows those there are",
    )
    .await;
}

// Real hosts, a real broker ---------------------------------------------------------------------

const OF: [&str; 2] = ["payments", "--tenant"];

async fn consumer(fixture: &HostFixture, verb: &[&str], more: &[&str]) -> Result<String> {
    let tenant = fixture.tenant.name.clone();
    fixture.ok(&[&["consumer"], verb, &OF, &[tenant.as_str()], more].concat()).await
}

fn plain() -> Options {
    Options { static_members: false, ..Options::default() }
}

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";

/// What could go wrong: a seek doubles an effect, loses a message that it does not say it skips, or
/// sets offsets under a host that still reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_seek_does_what_it_says_it_would() {
    sought().await.unwrap();
}

async fn sought() -> Result<()> {
    let fixture = HostFixture::with(plain()).await?;
    let (one, two) = (fixture.start_ready("a", &[]).await?, fixture.start_ready("b", &[]).await?);
    fixture.send(&Load::of([Work::Pay; 60])).await?;
    fixture.wait_settled().await?;
    // Back to the beginning: everything is a duplicate.
    let said = consumer(&fixture, &["seek"], &["--to", "beginning", "--yes"]).await?;
    println!("{said}");
    ensure!(
        said.contains("60 records are read again; up to 60 of them are in the inbox"),
        "{said}"
    );
    ensure!(said.contains("goes on from there"), "{said}");
    fixture.wait_settled().await?;
    fixture.check().await?;
    let refused = async |offset: &str| {
        consumer(&fixture, &["seek"], &["--offset", offset]).await.unwrap_err().to_string()
    };
    ensure!(refused("99=0").await.contains("reads no partition"));
    ensure!(refused("0=7777").await.contains("is not there; the brokers have 0 to"));
    ensure!(refused("nothing:0=0").await.contains("reads no partition"));
    // Without a yes, nothing.
    let before = fixture.positions().await?;
    ensure!(consumer(&fixture, &["seek"], &["--to", "beginning"]).await.is_err());
    ensure!(fixture.positions().await? == before);
    // Over what came while it was paused: that never runs, and it says so.
    consumer(&fixture, &["pause"], &[]).await?;
    let skipped = Load::of([Work::Pay; 10]).named("skipped");
    fixture.open_accounts(&skipped).await?;
    fixture.publish(&skipped.deliveries).await?;
    let lag: Value = serde_json::from_str(&consumer(&fixture, &["lag"], &["--json"]).await?)?;
    let partitions = lag["partitions"].as_array().context("partitions")?;
    let behind = |partition: &&Value| {
        let offset = |name: &str| partition[name].as_i64();
        let at = offset("committed").or(offset("low"));
        offset("records") == offset("high").zip(at).map(|(end, at)| end - at)
    };
    ensure!(lag["records"] == 10 && partitions.iter().all(|it| behind(&it)), "{lag}");
    let said = consumer(&fixture, &["lag"], &[]).await?;
    ensure!(said.contains("\n10 records are not acked, at "), "{said}");
    let said = consumer(&fixture, &["seek"], &["--to", "end", "--yes", "--json"]).await?;
    let plan: Value = serde_json::from_str(&said)?;
    ensure!(
        plan["skipped"] == 10 && plan["read_again"] == 0 && plan["consumer"]["state"] == "paused",
        "{plan}"
    );
    consumer(&fixture, &["resume"], &[]).await?;
    fixture.send(&Load::of([Work::Pay; 20]).named("after")).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    // Where the policy says that nothing is to be replayed, offsets go forward only.
    let forbid = r#"UPDATE oncebox.consumer SET policy = policy || '{"replay": {"allowed": false}}' WHERE consumer_id = {consumer}"#;
    fixture.execute(forbid).await?;
    let before = fixture.positions().await?;
    let refused = consumer(&fixture, &["seek"], &["--to", "beginning", "--yes"])
        .await
        .unwrap_err()
        .to_string();
    // S1-116, S1-117.
    ensure!(
        refused.contains("records would be read again")
            && refused.contains("`replay.allowed = false`; nothing was changed"),
        "{refused}"
    );
    ensure!(fixture.positions().await? == before);
    consumer(&fixture, &["seek"], &["--to", "end", "--yes"]).await?;
    one.stop().await?;
    two.stop().await
}

/// What could go wrong: the host that carries a change out dies on the way, and the change with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_dies_in_the_middle_of_a_change_leaves_the_rest_to_another() {
    for point in ["consumer:seek:before", "consumer:seek:committed"] {
        killed_while_seeking(point).await.with_context(|| point).unwrap();
    }
    for point in ["consumer:delete:batch", "consumer:delete:last"] {
        killed_while_deleting(point).await.with_context(|| point).unwrap();
    }
    killed_while_draining().await.unwrap();
}

async fn killed_while_seeking(point: &str) -> Result<()> {
    let fixture = HostFixture::with(plain()).await?;
    let victim = fixture.start_ready("a", &[("ONCEBOX_FAILPOINT", point)]).await?;
    fixture.send(&Load::of([Work::Pay; 30])).await?;
    fixture.wait_settled().await?;
    consumer(&fixture, &["seek"], &["--to", "beginning", "--yes", "--wait", "0"]).await?;
    victim.wait_exit().await?;
    ensure!(
        fixture.number("SELECT count(*) FROM oncebox.consumer WHERE seek IS NOT NULL").await? == 1,
        "it is not done"
    );
    let heir = fixture.start_ready("b", &[]).await?;
    fixture.until("SELECT count(*) FROM oncebox.consumer WHERE seek IS NULL", 1).await?;
    fixture.send(&Load::of([Work::Pay; 10]).named("after")).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    heir.stop().await
}

async fn killed_while_deleting(point: &str) -> Result<()> {
    let fixture = HostFixture::with(plain()).await?;
    let victim = fixture.start_ready("a", &[("ONCEBOX_FAILPOINT", point)]).await?;
    fixture.send(&Load::of([Work::Pay; 30])).await?;
    fixture.wait_settled().await?;
    consumer(&fixture, &["delete"], &["--confirm", "payments", "--wait", "0"]).await?;
    victim.wait_exit().await?;
    ensure!(fixture.number("SELECT count(*) FROM oncebox.consumer").await? == 1, "it is not done");
    let heir = fixture.start_ready("b", &[]).await?;
    fixture.until("SELECT 1 - count(*) FROM oncebox.consumer", 1).await?;
    ensure!(fixture.number("SELECT count(*) FROM oncebox.inbox").await? == 0);
    ensure!(fixture.number(EFFECTS).await? == 30, "what it did stays");
    let last = &fixture.control.audit().list(Some(&fixture.tenant.name), 1).await?[0];
    ensure!(
        last.action == "consumer.deleted"
            && last.details["more"]["kafka_group"]["gone"] == true
            && last.actor == "oncebox",
        "{last:?}"
    );
    heir.stop().await
}

async fn killed_while_draining() -> Result<()> {
    let fixture = HostFixture::with(plain()).await?;
    let victim =
        fixture.start_ready("a", &[("ONCEBOX_FAILPOINT", "consumer:drained:before")]).await?;
    fixture.send(&Load::of([Work::Fails(3); 10])).await?;
    fixture.wait_settled().await?;
    consumer(&fixture, &["drain"], &["--wait", "0"]).await?;
    victim.wait_exit().await?;
    let heir = fixture.start_ready("b", &[]).await?;
    fixture.until("SELECT count(*) FROM oncebox.consumer WHERE state = 'paused'", 1).await?;
    fixture.check().await?;
    heir.stop().await
}

/// What could go wrong: a drain reads on, or rests before everything in the inbox is finished.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_is_open_and_reads_nothing() {
    drained().await.unwrap();
}

async fn drained() -> Result<()> {
    let fixture = HostFixture::with(plain()).await?;
    let (one, two) = (fixture.start_ready("a", &[]).await?, fixture.start_ready("b", &[]).await?);
    let first = Load::of([Work::Fails(8); 20]);
    fixture.send(&first).await?;
    fixture.until("SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer}", 20).await?;
    let said = consumer(&fixture, &["drain"], &[]).await?;
    ensure!(said.contains("is paused"), "{said}");
    fixture.check().await.context("everything that was read is finished")?;
    fixture.send(&Load::of([Work::Pay; 10]).named("later")).await?;
    sleep(Duration::from_secs(2)).await;
    ensure!(fixture.number(EFFECTS).await? == 20, "a drained consumer reads nothing");
    // Its tenant rests with it.
    let tenant = "UPDATE oncebox.tenant SET revision = revision + 1, state = ";
    fixture.execute(&format!("{tenant} 'suspended'")).await?;
    consumer(&fixture, &["resume"], &["--wait", "0"]).await?;
    sleep(Duration::from_secs(2)).await;
    ensure!(fixture.number(EFFECTS).await? == 20, "nothing of a suspended tenant runs");
    fixture.execute(&format!("{tenant} 'active'")).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    one.stop().await?;
    two.stop().await
}
