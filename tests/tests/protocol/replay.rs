//! A replay runs completed messages once more, each exactly once, and sends nothing.

use std::{os::unix::process::ExitStatusExt, time::Duration};

use oncebox_control::{ReplayAction, ReplayFilter, ReplayJob, ReplayStart};
use oncebox_inbox::{SessionSettings, replay};
use oncebox_model::{
    InboxError,
    handler::DeliveryKind,
    hooks::REPLAY_POINTS,
    policy::{Policy, Replay, ReplayKind},
    record::Record,
};
use oncebox_tests::{
    inbox::{InboxFixture, PlainHandlers, Script, TestConsumer, deliver, record, records},
    outgoing::{emitting, emitting_host, outgoing},
    replay::{PROJECTION, begin, end_leases, job, reset, run_worker, start_of, work_off},
    telemetry::Telemetry,
    wait::DEADLINE,
};
use sqlx::AssertSqlSafe;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

const QUICK: &str = "retry = { attempts_max = 3, backoff_min_ms = 1, backoff_max_ms = 1 }";

fn all() -> ReplayFilter {
    ReplayFilter::default()
}

/// Replayed, failed, without a payload, changed, suppressed.
fn counts(job: &ReplayJob) -> (i64, i64, i64, i64, i64) {
    (job.replayed, job.failed, job.without_payload, job.changed, job.suppressed)
}

/// The messages that were replayed, in order, by their histories.
async fn replayed(fixture: &InboxFixture) -> Vec<String> {
    const REPLAYED: &str = "SELECT message_id FROM oncebox.inbox_history WHERE event = 'replayed' \
        ORDER BY history_id";
    sqlx::query_scalar(REPLAYED).fetch_all(&fixture.pool).await.unwrap()
}

/// What could go wrong: a replayed message runs twice or not at all, its row counts an attempt or
/// loses its result, its history does not name the replay, or its handler is not told. S1-056,
/// S1-057.
#[tokio::test(flavor = "multi_thread")]
async fn completed_messages_run_once_more_and_their_rows_stay() {
    for batches in [false, true] {
        let mut fixture = InboxFixture::new().await;
        if batches {
            fixture.batches();
        }
        let consumer = fixture.simple("", &format!("{PROJECTION}\n{QUICK}")).await;
        let host = fixture.host(&consumer);
        let log = [
            record(0, "a", "result 1"),
            record(1, "b", ""),
            record(2, "dead", "reject"),
            record(3, "c", ""),
        ];
        deliver(&host, &log).await;
        let before = fixture.rows().await;
        reset(&fixture, &consumer).await;
        let begun = begin(&fixture, &consumer, &all()).await;
        assert_eq!((begun.found, &*begun.state, &*begun.kind), (3, "running", "projection"));
        work_off(&host).await;
        assert_eq!(fixture.rows().await, before, "a replay changed a row");
        assert_eq!(replayed(&fixture).await, ["a", "b", "c"]);
        let done = job(&fixture, &consumer, begun.replay_id).await;
        assert_eq!((&*done.state, counts(&done)), ("done", (3, 0, 0, 0, 0)));
        assert!(done.ended_at.is_some() && done.host.is_none());
        let entry = format!(
            "SELECT count(*) FROM oncebox.inbox_history WHERE event = 'replayed' AND actor = 'test' \
                AND reason = 'replay {}: a test' AND attempt IS NULL AND version_id = 1",
            begun.replay_id
        );
        assert_eq!(fixture.number(entry).await, 3);
        let runs = fixture.script.runs("b");
        let kinds: Vec<_> = runs.iter().map(|ran| (ran.kind, ran.attempt)).collect();
        // S1-057.
        assert_eq!(kinds.last(), Some(&(DeliveryKind::Replay, 1)));
        // Nothing is left to replay, and a redelivery is a duplicate as ever.
        assert!(!replay::work_off(&host, &CancellationToken::new()).await.unwrap());
        deliver(&host, &log).await;
        fixture.finish().await;
    }
}

/// What could go wrong: a replay sends what its messages sent already, or cancels what is to be
/// sent, or nobody can tell what it did not send. S1-084, S1-089, S1-110.
#[tokio::test]
async fn what_a_replay_emits_is_dropped_counted_and_logged() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = emitting_host(&fixture, &consumer);
    let one = "emit kafka:out token=t after=3600000 type=paid";
    let log =
        [emitting(0, "a", &[one, one]), emitting(1, "b", &["cancel x"]), emitting(2, "c", &[])];
    deliver(&host, &log).await;
    // What `b` would cancel if it ran for the first time now.
    fixture.execute("UPDATE oncebox.outgoing SET cancel_token = 'x'").await;
    let before = outgoing(&fixture).await;
    assert_eq!(before.len(), 2);
    reset(&fixture, &consumer).await;
    let plan = fixture.control.replays().plan("acme", "orders", &all()).await.unwrap();
    assert_eq!((plan.sampled, plan.sampled_emitting, plan.sampled_outgoing), (3, 1, 2));
    let start = start_of(plan.token, plan.found);
    fixture.control.replays().start("acme", "orders", &start).await.unwrap();
    work_off(&host).await;
    // S1-110.
    assert_eq!(outgoing(&fixture).await, before, "a replay changed an outgoing message");
    let done = job(&fixture, &consumer, plan.replay_id).await;
    assert_eq!(counts(&done), (3, 0, 0, 0, 2));
    let labels = [("tenant", "acme"), ("consumer", "orders"), ("event_type", "paid")];
    let counted = telemetry.sum("oncebox_replay_suppressed_total", &labels);
    // S1-084.
    assert_eq!(counted, 2.0, "{}", telemetry.metrics());
    let replayed = [("consumer", "orders"), ("outcome", "replayed")];
    assert_eq!(telemetry.sum("oncebox_replay_messages_total", &replayed), 3.0);
    assert_eq!(telemetry.sum("oncebox_replay_running", &[("kind", "projection")]), 0.0);
    let events = telemetry.events("outgoing message suppressed: its cause is replayed");
    let ids: Vec<_> = events.iter().map(|event| event["outgoing_id"].as_str().unwrap()).collect();
    // S1-089.
    assert_eq!(ids, before.iter().map(|row| &*row.id).collect::<Vec<_>>());
    assert_eq!(events[0]["replay_id"], done.replay_id);
    fixture.finish().await;
}

/// What could go wrong: a replay of a consumer with effects outside is not seen while it runs.
/// S1-100.
#[tokio::test]
async fn a_replay_of_outside_effects_shows_while_it_runs() {
    let telemetry = Telemetry::default();
    let fixture = InboxFixture::new().await;
    let policy = "payload = 'all'\nreplay = { kind = 'notification' }";
    let consumer = fixture.simple("", policy).await;
    let host = fixture.host(&consumer);
    fixture.script.gate("g").open();
    deliver(&host, &[record(0, "a", "gate g")]).await;
    reset(&fixture, &consumer).await;
    begin(&fixture, &consumer, &all()).await;
    let labels = [("tenant", "acme"), ("consumer", "orders"), ("kind", "notification")];
    let gauge = || telemetry.sum("oncebox_replay_running", &labels);
    let seen = async {
        while gauge() < 1.0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let (seen, ()) = tokio::join!(timeout(DEADLINE, seen), work_off(&host));
    seen.expect("the gauge rises while the replay runs");
    assert_eq!(gauge(), 0.0, "the gauge falls when it ends");
    let text = "a replay of a consumer with effects outside runs; nothing that it emits is sent";
    // S1-100.
    assert_eq!(telemetry.events(text).len(), 1);
    fixture.finish().await;
}

/// What could go wrong: a consumer is replayed without what makes that safe. S1-056, S1-058.
#[tokio::test(flavor = "multi_thread")]
async fn each_kind_is_replayed_as_its_policy_allows() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let replays = fixture.control.replays();
    let none = fixture.consumer(&tenant, "none", "payload = 'all'").await;
    let error = replays.plan("acme", "none", &all()).await.unwrap_err();
    assert!(error.to_string().contains("`replay.kind`"), "{error}");
    assert_eq!(none.policy.replay.kind, None);
    for (kind, lacks, part) in [
        ("audit", ReplayStart { confirm: Some(2), ..whole() }, "confirm"),
        ("analytics", ReplayStart { reset_done: false, ..whole() }, "reset_done"),
        ("notification", ReplayStart { effects_suppressed: false, ..whole() }, "suppressed"),
        ("workflow", ReplayStart { effects_suppressed: false, ..whole() }, "suppressed"),
    ] {
        let policy = format!("payload = 'all'\nreplay = {{ kind = '{kind}' }}");
        let consumer = fixture.consumer(&tenant, kind, &policy).await;
        let host = fixture.host(&consumer);
        deliver(&host, &records(["a"])).await;
        reset(&fixture, &consumer).await;
        if kind == "analytics" {
            // While it runs, no token begins it.
            let plan = replays.plan("acme", kind, &all()).await.unwrap();
            let start = ReplayStart { token: plan.token, ..whole() };
            let error = replays.start("acme", kind, &start).await.unwrap_err();
            assert!(error.to_string().contains("paused"), "{error}");
            fixture.control.consumers().pause("acme", kind).await.unwrap();
        }
        let plan = replays.plan("acme", kind, &all()).await.unwrap();
        let refused = ReplayStart { token: plan.token.clone(), ..lacks };
        let error = replays.start("acme", kind, &refused).await.unwrap_err();
        assert!(error.to_string().contains(part), "{kind}: {error}");
        let start = ReplayStart { token: plan.token, ..whole() };
        replays.start("acme", kind, &start).await.unwrap();
        work_off(&host).await;
        let done = job(&fixture, &consumer, plan.replay_id).await;
        // S1-056, S1-116.
        assert_eq!((&*done.state, done.replayed), ("done", 1), "{kind}");
    }
    fixture.finish().await;
}

/// A start of one message, with all that any kind asks for.
fn whole() -> ReplayStart {
    start_of(String::new(), 1)
}

/// What could go wrong: a token starts a plan twice, or one whose policy or deployments have changed
/// since, or another consumer's. S1-058.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_token_starts_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    reset(&fixture, &consumer).await;
    let replays = fixture.control.replays();
    let refused = async |token: &str, part: &str| {
        let start = ReplayStart { token: token.to_owned(), ..whole() };
        let error = replays.start("acme", "orders", &start).await.unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
    };
    let plan = async || replays.plan("acme", "orders", &all()).await.unwrap();
    refused("no token", "no token of a replay").await;
    refused("acme/other/1-ab", "not of consumer").await;
    let first = plan().await;
    refused(&format!("{}0", first.token), "starts nothing").await;
    for (change, part) in [
        ("generation = generation + 1", "deployments that were changed"),
        ("policy_revision = policy_revision + 1", "a policy that was changed"),
    ] {
        let stale = plan().await;
        fixture.execute(format!("UPDATE oncebox.consumer SET {change}")).await;
        refused(&stale.token, part).await;
    }
    let late = plan().await;
    fixture.execute("UPDATE oncebox.replay SET expires_at = now() - interval '1 s'").await;
    refused(&late.token, "15 minutes").await;
    fixture.execute("UPDATE oncebox.consumer SET generation = 0").await;
    let good = plan().await;
    let start = ReplayStart { token: good.token.clone(), ..whole() };
    replays.start("acme", "orders", &start).await.unwrap();
    refused(&good.token, "starts nothing").await;
    let other = plan().await;
    refused(&other.token, "another replay").await;
    work_off(&host).await;
    let kept = "SELECT count(*) FROM oncebox.audit WHERE action = 'replay.run'";
    // S1-058.
    assert_eq!(fixture.number(kept).await, 1, "the audit log has the one start");
    fixture.finish().await;
}

/// What could go wrong: a host that dies replays a message twice, or not at all, or the next host
/// begins again. S1-110.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_at_any_step_leaves_every_effect_once() {
    const WORKER: &str = env!("CARGO_BIN_EXE_replay_worker");
    for point in REPLAY_POINTS {
        let fixture = InboxFixture::new().await;
        let consumer = fixture.simple("", PROJECTION).await;
        let host = emitting_host(&fixture, &consumer);
        let ids: Vec<_> = (0..8).map(|n| format!("m{n}")).collect();
        let log: Vec<_> =
            (0..).zip(&ids).map(|(at, id)| emitting(at, id, &["emit kafka:out"])).collect();
        deliver(&host, &log).await;
        reset(&fixture, &consumer).await;
        let begun = begin(&fixture, &consumer, &all()).await;
        let is_once = point.contains(":lease:") || point.contains(":end:");
        let armed = format!("{point}@{}", if is_once { 1 } else { 3 });
        let died = run_worker(WORKER, &fixture, Some(&armed)).await;
        assert_eq!(died.status.signal(), Some(9), "`{armed}` was never reached: {died:?}");
        end_leases(&fixture).await;
        let ended = run_worker(WORKER, &fixture, None).await;
        assert!(ended.status.success(), "{point}: {ended:?}");
        let done = job(&fixture, &consumer, begun.replay_id).await;
        assert_eq!((&*done.state, counts(&done)), ("done", (8, 0, 0, 0, 8)), "{point}");
        // S1-110.
        assert_eq!(replayed(&fixture).await, ids, "{point}");
        assert_eq!(outgoing(&fixture).await.len(), 8, "{point}: a replay sent something");
        fixture.finish().await;
    }
}

/// What could go wrong: a replay that ends every host that has it ends them all. After the third it
/// waits for an operator.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_ends_its_hosts_pauses_the_replay() {
    const WORKER: &str = env!("CARGO_BIN_EXE_replay_worker");
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b"])).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    for _ in 0..3 {
        let died = run_worker(WORKER, &fixture, Some("replay:handle:after@1")).await;
        assert_eq!(died.status.signal(), Some(9), "{died:?}");
        end_leases(&fixture).await;
    }
    work_off(&host).await;
    let paused = job(&fixture, &consumer, begun.replay_id).await;
    let note = paused.note.clone().unwrap_or_default();
    assert_eq!((&*paused.state, paused.replayed), ("paused", 0));
    assert!(note.contains("3 hosts ended"), "{note}");
    act(&fixture, begun.replay_id, ReplayAction::Resume).await.unwrap();
    work_off(&host).await;
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.replayed, 2);
    fixture.finish().await;
}

async fn act(
    fixture: &InboxFixture,
    replay_id: i64,
    action: ReplayAction,
) -> Result<ReplayJob, InboxError> {
    fixture.control.replays().act("acme", "orders", replay_id, action).await
}

/// What could go wrong: a message that fails in a replay keeps half an effect or stops being
/// completed; a replay that fails from end to end goes on for ever, or cannot be ended.
#[tokio::test(flavor = "multi_thread")]
async fn failures_are_rolled_back_counted_and_pause_the_replay() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("CREATE TABLE working (n int);", PROJECTION).await;
    let schema = &consumer.tenant.schema_name;
    fixture.execute(format!("INSERT INTO {schema}.working VALUES (1)")).await;
    let host = fixture.host(&consumer);
    let log: Vec<_> = (0..12)
        .map(|n| record(n, &format!("m{n:02}"), "sql SELECT 1 / (SELECT count(*) FROM working)"))
        .collect();
    deliver(&host, &log).await;
    let before = fixture.rows().await;
    reset(&fixture, &consumer).await;
    fixture.execute(format!("DELETE FROM {schema}.working")).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    work_off(&host).await;
    let detail = fixture.control.replays().show("acme", "orders", begun.replay_id).await.unwrap();
    assert_eq!((&*detail.job.state, counts(&detail.job)), ("paused", (0, 10, 0, 0, 0)));
    assert!(detail.job.note.unwrap_or_default().contains("10 messages in a row"));
    assert_eq!(detail.failures.len(), 10);
    assert_eq!(detail.failures[0].reason, "sql_error:22012");
    assert_eq!(fixture.rows().await, before, "a failed replay changed a row");
    assert_eq!(fixture.effects(&consumer, "m00").await, 0, "half an effect stayed");
    // The handler works again: the replay goes on behind what failed, and those run in another.
    fixture.execute(format!("INSERT INTO {schema}.working VALUES (1)")).await;
    act(&fixture, begun.replay_id, ReplayAction::Resume).await.unwrap();
    work_off(&host).await;
    let done = job(&fixture, &consumer, begun.replay_id).await;
    assert_eq!((&*done.state, counts(&done)), ("done", (2, 10, 0, 0, 0)));
    let error = act(&fixture, begun.replay_id, ReplayAction::Cancel).await.unwrap_err();
    assert!(error.to_string().contains("is done"), "{error}");
    let ids = Some((0..10).map(|n| format!("m{n:02}")).collect());
    begin(&fixture, &consumer, &ReplayFilter { ids, ..all() }).await;
    work_off(&host).await;
    fixture.finish().await;
}

/// What could go wrong: a replay takes the place of a live message, so that the message waits for
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn live_messages_come_first() {
    let fixture = InboxFixture::new().await;
    let policy = format!("{PROJECTION}\nlimits = {{ transactions_max = 1 }}");
    let consumer = fixture.simple("", &policy).await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b"])).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    let live = host.clone();
    let live = tokio::spawn(async move { deliver(&live, &[record(9, "live", "gate g")]).await });
    fixture.script.gate("g").reached(1).await;
    let replaying = host.clone();
    let replaying = tokio::spawn(async move { work_off(&replaying).await });
    sleep(Duration::from_millis(500)).await;
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.replayed, 0, "it did not wait");
    fixture.script.gate("g").open();
    live.await.unwrap();
    timeout(DEADLINE, replaying).await.expect("it goes on").unwrap();
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.replayed, 2);
    fixture.finish().await;
}

/// What could go wrong: a live and a replayed message of one key run at once.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_key_never_run_at_once() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", &format!("{PROJECTION}\norder = 'key'")).await;
    let host = fixture.host(&consumer);
    let keyed = |offset, id, script: &str| Record {
        key: Some(b"k".to_vec()),
        ..record(offset, id, script)
    };
    deliver(&host, &[keyed(0, "a", "")]).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    let live = host.clone();
    let running = keyed(1, "live", "gate g");
    let live = tokio::spawn(async move { deliver(&live, &[running]).await });
    fixture.script.gate("g").reached(1).await;
    let replaying = host.clone();
    let replaying = tokio::spawn(async move { work_off(&replaying).await });
    sleep(Duration::from_millis(500)).await;
    assert!(fixture.script.runs("a").iter().all(|ran| ran.kind != DeliveryKind::Replay));
    fixture.script.gate("g").open();
    live.await.unwrap();
    timeout(DEADLINE, replaying).await.expect("it goes on").unwrap();
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.replayed, 1);
    fixture.finish().await;
}

/// What could go wrong: a replay runs the version that it is there to replace, on a host that has
/// not loaded the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_generation_replays_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    fixture.execute("UPDATE oncebox.consumer SET generation = 1").await;
    let error = replay::work_off(&host, &CancellationToken::new()).await.unwrap_err();
    assert!(matches!(error, InboxError::StaleDeployments), "{error}");
    assert_eq!(fixture.effects(&consumer, "a").await, 0, "an old version ran");
    let script = Script::version(fixture.script.clone(), 2);
    let newer = PlainHandlers::resolving(1, move |_| Some(script.clone()));
    let newer = fixture.host_with(&consumer, newer, &SessionSettings::default());
    work_off(&newer).await;
    let done = job(&fixture, &consumer, begun.replay_id).await;
    assert_eq!((done.replayed, done.generation, done.generation_last), (1, 0, Some(1)));
    let by_new = "SELECT count(*) FROM oncebox.inbox_history WHERE version_id = 2";
    assert_eq!(fixture.number(by_new).await, 1);
    fixture.finish().await;
}

/// What could go wrong: messages are replayed in another order than they completed in, a filter is
/// not kept to, or what was not planned runs.
#[tokio::test(flavor = "multi_thread")]
async fn messages_run_in_the_order_of_their_completion() {
    let fixture = InboxFixture::new().await;
    let policy = format!("{PROJECTION}\n{QUICK}\nbatch = {{ messages_max = 1 }}");
    let consumer = fixture.simple("", &policy).await;
    let host = fixture.host(&consumer);
    let typed = |offset, id, script: &str, event_type: &str| {
        let mut typed = record(offset, id, script);
        typed.headers.push(("type".to_owned(), event_type.as_bytes().to_vec()));
        typed
    };
    // It fails until another one has had its effect.
    let behind_y = "sql SELECT 1 / count(*) FROM effect WHERE message_id = 'y'";
    let log = [
        typed(0, "late", behind_y, "paid"),
        typed(1, "x", "", "paid"),
        typed(2, "y", "", "shipped"),
    ];
    deliver(&host, &log).await;
    fixture.retry_until_settled(&host).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    // It completes after the plan.
    deliver(&host, &[typed(3, "after", "", "paid")]).await;
    work_off(&host).await;
    assert_eq!(replayed(&fixture).await, ["x", "y", "late"]);
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.found, 3);
    for (filter, expected) in [
        (ReplayFilter { event_type: Some("shipped".to_owned()), ..all() }, 1),
        (ReplayFilter { ids: Some(vec!["x".to_owned(), "none".to_owned()]), ..all() }, 1),
        (ReplayFilter { to: Some(begun.planned_at), ..all() }, 3),
        (ReplayFilter { from: Some(begun.planned_at), ..all() }, 1),
    ] {
        let plan = fixture.control.replays().plan("acme", "orders", &filter).await.unwrap();
        assert_eq!((plan.found, plan.is_counted_whole), (expected, true), "{filter:?}");
    }
    fixture.finish().await;
}

/// What could go wrong: a page of many messages that completed in one transaction, or that are on
/// the border of two pages, leaves one out or has one twice.
#[tokio::test(flavor = "multi_thread")]
async fn no_message_falls_between_two_pages() {
    let fixture = InboxFixture::new().await.unhurried();
    let consumer = fixture.simple("", PROJECTION).await;
    let consumer_id = consumer.row.consumer_id;
    let ids: Vec<_> = (0..60).map(|n| format!("m{n:02}")).collect();
    deliver(&fixture.host(&consumer), &records(ids.iter().map(String::as_str))).await;
    // Every third completed later than it came, some at one time.
    fixture
        .execute(
            "UPDATE oncebox.inbox SET received_at = received_at - interval '1 minute' WHERE \
                \"offset\" % 3 = 0; \
             UPDATE oncebox.inbox SET received_at = now() - interval '1 hour' + \"offset\" / 4 * \
                interval '1 second', processed_at = now() - interval '1 hour' + \"offset\" / 4 * \
                interval '1 second' WHERE \"offset\" % 3 = 1",
        )
        .await;
    let expected: Vec<String> = sqlx::query_scalar(
        "SELECT message_id FROM oncebox.inbox ORDER BY processed_at, message_id COLLATE \"C\"",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    for limit in [1, 2, 7, 59, 60, 61] {
        let (mut found, mut at) = (Vec::new(), Some(("1970-01-01".to_owned(), String::new())));
        while let Some((after, after_id)) = at {
            let page = format!(
                "SELECT coalesce(ids, '{{}}'), end_at::text, end_id FROM \
                    oncebox.page_of_replay({consumer_id}, 1::smallint, '{after}', '{after_id}', \
                    now(), NULL, NULL, {limit})"
            );
            let (ids, end_at, end_id): (Vec<String>, Option<String>, Option<String>) =
                sqlx::query_as(AssertSqlSafe(page)).fetch_one(&fixture.pool).await.unwrap();
            assert!(ids.len() <= 2 * limit, "a page of {limit} has {} messages", ids.len());
            found.extend(ids);
            at = end_at.zip(end_id);
        }
        assert_eq!(found, expected, "pages of {limit}");
    }
    fixture.finish().await;
}

/// What could go wrong: a message without a stored payload fails the replay, or one that was erased
/// since the plan runs.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_is_counted_apart() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    let log = [record(0, "a", ""), record(1, "b", "sleep 500"), record(2, "c", "")];
    deliver(&host, &log).await;
    fixture
        .execute("UPDATE oncebox.inbox SET payload = NULL, headers = NULL WHERE message_id = 'a'")
        .await;
    reset(&fixture, &consumer).await;
    let plan = fixture.control.replays().plan("acme", "orders", &all()).await.unwrap();
    assert_eq!((plan.found, plan.without_payload), (2, 1));
    let start = start_of(plan.token, plan.found);
    fixture.control.replays().start("acme", "orders", &start).await.unwrap();
    let replaying = host.clone();
    let replaying = tokio::spawn(async move { work_off(&replaying).await });
    until_replaying(&fixture, "b").await;
    // It is on the page of the host by now.
    const ERASE: &str = "UPDATE oncebox.inbox SET payload = NULL, headers = NULL, payload_hash = \
        NULL, erased_at = now() WHERE message_id = 'c'";
    fixture.execute(ERASE).await;
    replaying.await.unwrap();
    let done = job(&fixture, &consumer, plan.replay_id).await;
    assert_eq!((&*done.state, counts(&done)), ("done", (1, 0, 1, 1, 0)));
    assert_eq!(replayed(&fixture).await, ["b"]);
    // Two have no effect any more, which the final check would find.
    fixture.execute("DELETE FROM oncebox.inbox WHERE message_id IN ('a', 'c')").await;
    fixture.finish().await;
}

/// Waits until a replay runs a message.
async fn until_replaying(fixture: &InboxFixture, id: &str) {
    let is_replay = |ran: &oncebox_tests::inbox::Ran| ran.kind == DeliveryKind::Replay;
    let waiting = async {
        while !fixture.script.runs(id).iter().any(is_replay) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(DEADLINE, waiting).await.expect("the replay runs it");
}

/// What could go wrong: an operator's pause or cancel is not obeyed by a message that runs, or a
/// changed policy is not noticed.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_is_stopped_commits_nothing_more() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "sleep 500"), record(1, "b", "")]).await;
    reset(&fixture, &consumer).await;
    let begun = begin(&fixture, &consumer, &all()).await;
    let replaying = host.clone();
    let stop = CancellationToken::new();
    let replaying = tokio::spawn(async move { replay::work_off(&replaying, &stop).await });
    until_replaying(&fixture, "a").await;
    act(&fixture, begun.replay_id, ReplayAction::Pause).await.unwrap();
    // Its completion is refused, since the replay is not this host's any more. That is no fault.
    assert!(replaying.await.unwrap().is_ok(), "a pause is a fault of the host");
    let paused = job(&fixture, &consumer, begun.replay_id).await;
    assert_eq!((&*paused.state, counts(&paused)), ("paused", (0, 0, 0, 0, 0)));
    assert_eq!(fixture.effects(&consumer, "a").await, 0, "a paused replay took effect");
    assert!(!replay::work_off(&host, &CancellationToken::new()).await.unwrap());
    // Paused already: nothing is done, and nothing is logged.
    act(&fixture, begun.replay_id, ReplayAction::Pause).await.unwrap();
    let audited = "SELECT count(*) FROM oncebox.audit WHERE action = 'replay.pause'";
    assert_eq!(fixture.number(audited).await, 1);
    act(&fixture, begun.replay_id, ReplayAction::Resume).await.unwrap();
    let other = TestConsumer {
        policy: Policy {
            replay: Replay { kind: Some(ReplayKind::Workflow), ..consumer.policy.replay.clone() },
            ..consumer.policy.clone()
        },
        ..consumer.clone()
    };
    work_off(&fixture.host(&other)).await;
    let paused = job(&fixture, &consumer, begun.replay_id).await;
    assert_eq!((&*paused.state, paused.replayed), ("paused", 0));
    assert!(paused.note.unwrap_or_default().contains("`replay` table"));
    act(&fixture, begun.replay_id, ReplayAction::Resume).await.unwrap();
    work_off(&host).await;
    assert_eq!(job(&fixture, &consumer, begun.replay_id).await.replayed, 2);
    fixture.finish().await;
}
