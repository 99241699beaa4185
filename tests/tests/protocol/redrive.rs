//! What people do with messages that do not go on by themselves: each once, under its id, with its
//! history.

use std::{
    os::unix::process::ExitStatusExt,
    sync::{Arc, Mutex},
    time::Duration,
};

use oncebox_control::{Action, Edit, JobFilter, JobStep, NewJob};
use oncebox_inbox::SessionSettings;
use oncebox_model::{
    InboxError,
    handler::DeliveryKind,
    hooks::{ACTION_POINTS, JOB_POINTS},
    message::Message,
    record::Record,
};
use oncebox_tests::{
    host::{HostFixture, Options},
    inbox::{InboxFixture, PlainHandler, PlainHandlers, Script, deliver, record, step},
    job::{carry_out, inbox_job, of_reason, these},
    load::{Load, Work},
    wait::DEADLINE,
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

mod dead_letter_topic;
mod edit;
mod export;
mod records;

/// What fails is not run again while a test lasts.
const LATER: &str =
    "retry = { backoff_min_ms = 3600000, backoff_max_ms = 3600000, jitter = 'none' }";
const QUICK: &str = "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }";

/// A job on all messages of `orders`, or on those of the filter.
fn job(action: Action, filter: JobFilter) -> NewJob {
    NewJob { reason: "it was mended".to_owned(), ..inbox_job(action, "orders", filter) }
}

fn all(action: Action) -> NewJob {
    job(action, JobFilter::default())
}

async fn act(fixture: &InboxFixture, new: &NewJob) -> i64 {
    carry_out(&fixture.control, "acme", new).await.unwrap().changed
}

async fn count(fixture: &InboxFixture, new: &NewJob) -> i64 {
    let estimate = fixture.control.jobs().estimate("acme", new).await.unwrap();
    assert!(estimate.is_counted_whole);
    estimate.messages
}

/// Events of a message's history: event, attempt, reason, actor.
async fn history(
    fixture: &InboxFixture,
    id: &str,
) -> Vec<(String, Option<i32>, Option<String>, Option<String>)> {
    const HISTORY: &str = "SELECT event, attempt, reason, actor FROM oncebox.inbox_history WHERE \
        message_id = $1 ORDER BY history_id";
    sqlx::query_as(HISTORY).bind(id).fetch_all(&fixture.pool).await.unwrap()
}

/// What could go wrong: a redriven message has another id, lost its headers, its payload or its
/// past, is not recognised any more when it is delivered again, or does not get its runs back.
/// S1-059, S1-060, S1-109, S0-030.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_runs_again_as_what_it_is() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", QUICK).await;
    let host = fixture.host(&consumer);
    let mut letter = record(0, "a", "sql INSERT INTO late VALUES (1)\nresult 7");
    letter.headers.push(("causation".to_owned(), b"c-1".to_vec()));
    deliver(&host, std::slice::from_ref(&letter)).await;
    fixture.retry_until_settled(&host).await;
    let before = fixture.row(&consumer, "a").await;
    // S0-008.
    assert_eq!(before.state(), ("failed_terminal", Some("sql_error:42P01"), 2));

    // Not mended yet: it gets the runs of a new one, and is a dead letter again.
    let jobs = fixture.control.jobs();
    let database = fixture.control.tenant_databases().by_name("").await.unwrap();
    let job_id = jobs.start("acme", &all(Action::Redrive)).await.unwrap().job_id;
    let mut leased = jobs.lease(&database, "a test", Some(job_id)).await.unwrap().unwrap();
    jobs.step(&mut leased).await.unwrap();
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("received", None, 0));
    fixture.retry_until_settled(&host).await;
    jobs.work(leased, &CancellationToken::new()).await;
    let done = jobs.show("acme", job_id).await.unwrap();
    // S1-059: what failed again since is left alone.
    assert_eq!((&*done.state, done.changed, done.left_out.0.len()), ("done", 1, 0), "{done:?}");

    let tables = format!(
        "CREATE TABLE {0}.late (n int); GRANT ALL ON {0}.late TO {1}",
        consumer.tenant.schema_name, consumer.tenant.login
    );
    fixture.execute(tables).await;
    assert_eq!(act(&fixture, &job(Action::Redrive, these(&["a"]))).await, 1);
    fixture.retry_until_settled(&host).await;
    let row = fixture.row(&consumer, "a").await;
    assert_eq!((row.state(), &row.result), (("completed", None, 1), &Some(serde_json::json!(7))));
    assert_eq!(
        (&row.topic, row.partition, row.offset, &row.payload_hash),
        (&before.topic, 0, 0, &before.payload_hash)
    );
    deliver(&host, &[letter]).await;
    // S1-059, S1-060, S1-109.
    assert_eq!(
        (fixture.rows().await.len(), fixture.effects(&consumer, "a").await),
        (1, 1),
        "it is known"
    );
    let retries =
        fixture.script.runs("a").into_iter().filter(|ran| ran.kind == DeliveryKind::Retry);
    assert_eq!(retries.map(|ran| ran.attempt).collect::<Vec<_>>(), [2, 1, 2, 1]);

    let failed =
        |attempt| ("failed".to_owned(), Some(attempt), Some("sql_error:42P01".to_owned()), None);
    let redriven =
        ("redriven".to_owned(), Some(2), Some("it was mended".to_owned()), Some("test".to_owned()));
    // S0-042, S1-059, S3-024.
    assert_eq!(
        history(&fixture, "a").await,
        [failed(1), failed(2), redriven.clone(), failed(1), failed(2), redriven]
    );
    let audit = fixture.control.audit().list(Some("acme"), 10).await.unwrap();
    let entries = |action: &str| -> Vec<_> {
        let of = audit.iter().filter(|entry| entry.action == action);
        of.map(|entry| (entry.subject.clone(), entry.details.clone())).collect()
    };
    let (begun, done) = (entries("inbox.redrive"), entries("job.done"));
    assert_eq!((begun.len(), done.len()), (2, 2), "each job has its begin and its end");
    assert_eq!((&*begun[0].0, &*done[0].0), ("acme/orders", "acme/orders"));
    assert_eq!(begun[0].1["reason"], "it was mended");
    assert_eq!((&done[0].1["messages"], &done[0].1["job_id"]), (&json!(1), &begun[0].1["job_id"]));
    fixture.finish().await;
}

/// Scripted handlers, and each message as they are given it, run by run.
fn watched(fixture: &InboxFixture) -> (Arc<PlainHandlers>, Arc<Mutex<Vec<Message>>>) {
    let given = Arc::<Mutex<Vec<Message>>>::default();
    let (script, seen) = (Script::handler(fixture.script.clone()), given.clone());
    let handler = PlainHandler::new(1, move |tx, run| {
        seen.lock().unwrap().push(run.message.clone());
        let script = script.clone();
        Box::pin(async move { script.handle(tx, run).await })
    });
    (PlainHandlers::of(handler), given)
}

/// What could go wrong: a message that runs again, by itself or because a person says so, is given
/// to its handler under another id or key, at another place or time, without a header, or without
/// what names its cause; or with another payload than the last one that a person gave it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_is_given_is_what_came_however_often_it_runs() {
    for ack in ["after_commit", "after_insert"] {
        let fixture = InboxFixture::new().await;
        let policy = format!("ack = '{ack}'\norder = 'key'\n{QUICK}");
        let consumer = fixture.simple("", &policy).await;
        let (handlers, given) = watched(&fixture);
        let host = fixture.host_with(&consumer, handlers, &SessionSettings::default());
        let mut letter = Record {
            partition: 0,
            offset: 77,
            key: Some(vec![0, 0xff, b'k']),
            ..record(77, "a", "trap")
        };
        for (name, value) in [
            ("causation", &b"c-1"[..]),
            ("Correlation-Id", b"r-1"),
            ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("type", b"order.placed"),
            ("raw", &[0, 0xff]),
            ("empty", b""),
            ("twice", b"1"),
            ("twice", b"2"),
        ] {
            letter.headers.push((name.to_owned(), value.to_vec()));
        }
        deliver(&host, std::slice::from_ref(&letter)).await;
        fixture.retry_until_settled(&host).await;
        assert_eq!(act(&fixture, &all(Action::Redrive)).await, 1);
        fixture.retry_until_settled(&host).await;
        for payload in ["park", "result 7"] {
            let edit = Edit { payload: payload.into(), reason: "a typo".to_owned(), as_of: None };
            fixture.control.messages().edit_message("acme", "orders", "a", &edit).await.unwrap();
            let shown = fixture.control.messages().inbox_show("acme", "orders", "a").await.unwrap();
            assert_eq!(
                (shown.key, shown.headers),
                (letter.key.clone(), letter.headers.clone()),
                "an edit is of the payload alone"
            );
            fixture.retry_until_settled(&host).await;
        }
        assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 1), "{ack}");

        let given = std::mem::take(&mut *given.lock().unwrap());
        let mut payloads: Vec<_> =
            given.iter().map(|message| String::from_utf8_lossy(message.body().unwrap())).collect();
        // A first run may be undone with its batch and made again.
        payloads.dedup();
        assert_eq!(payloads, ["trap", "park", "result 7"], "{ack}");
        assert!(
            given.len() >= 6,
            "{ack}: twice from the broker, twice after the redrive, once after each edit: {}",
            given.len()
        );
        for message in given {
            let Message { id, source, event_type, ordering_key, trace_parent, record, .. } =
                message;
            let of_it = (
                id.as_str(),
                source.as_str(),
                event_type.as_str(),
                ordering_key.as_ref(),
                trace_parent.as_deref(),
            );
            let traced = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
            // S1-059, S1-060: the id, the key, and every header with the cause among them.
            assert_eq!(
                of_it,
                ("a", "t", "order.placed", letter.key.as_ref(), Some(traced)),
                "{ack}"
            );
            assert_eq!((&record.key, &record.headers), (&letter.key, &letter.headers), "{ack}");
            let place = (&*record.topic, record.partition, record.offset, record.timestamp_ms);
            assert_eq!(place, ("t", 0, 77, letter.timestamp_ms), "{ack}");
        }
        fixture.finish().await;
    }
}

/// What could go wrong: what is open is not counted, or what is done with is. S1-070,
/// S2-003.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_open_is_counted_by_state_and_reason() {
    let fixture = InboxFixture::new().await;
    let consumer =
        fixture.simple("", "alerts = { parked = 4, dead_letters = 2, pending_age_s = 3600 }").await;
    let count = async || fixture.control.messages().backlog("acme", "orders").await.unwrap();
    assert_eq!(count().await, Default::default());
    let mut no_id = record(5, "", "");
    no_id.headers.clear();
    let log = [
        record(0, "done", ""),
        record(1, "rejected", "reject"),
        record(2, "parked", "park"),
        record(3, "later", "sql SELECT 1/0"),
        record(4, "done", "# another payload"),
        no_id,
    ];
    deliver(&fixture.host(&consumer), &log).await;
    let (backlog, alerts) = count().await;
    let counted: Vec<_> = backlog
        .open
        .iter()
        .map(|open| {
            (open.status.as_str(), open.reason.as_deref().unwrap_or_default(), open.messages)
        })
        .collect();
    // S1-070.
    assert_eq!(
        counted,
        [
            ("failed_retryable", "sql_error", 1),
            ("failed_terminal", "reject", 1),
            ("parked", "collision", 1),
            ("parked", "park", 1),
            ("parked", "undecodable", 1),
        ]
    );
    assert_eq!(backlog.pending(), 1);
    assert!((0.0..60.0).contains(&backlog.oldest_pending_age_s().unwrap()), "{backlog:?}");
    // S0-048, S1-091.
    assert_eq!(
        alerts.iter().map(|alert| (alert.name, alert.value, alert.bound)).collect::<Vec<_>>(),
        [("collisions", 1.0, 1)]
    );
    let set_back = "UPDATE oncebox.inbox SET received_at = received_at - interval '2 hours' WHERE \
        message_id = 'later'";
    fixture.execute(set_back).await;
    let (_, alerts) = count().await;
    assert_eq!(
        alerts.iter().map(|alert| alert.name).collect::<Vec<_>>(),
        ["pending_age_s", "collisions"]
    );
    act(&fixture, &all(Action::Discard)).await;
    assert_eq!(count().await, Default::default());
    fixture.finish().await;
}

/// What could go wrong: an alert is not seen where it is looked for, or never ends. S0-041, S0-050,
/// S1-074 to S1-077, S1-082, S1-091, S2-014.
#[tokio::test(flavor = "multi_thread")]
async fn an_alert_begins_and_ends() {
    let fixture = HostFixture::new().await.unwrap();
    let load = [Work::Park, Work::Pay, Work::Park, Work::Pay, Work::Reject];
    fixture.send(&Load::of(load)).await.unwrap();
    let host = fixture.start("a", &[]).unwrap();
    let messages = async |status: &str, count| {
        host.until_metric("oncebox_inbox_messages", &[&format!("status=\"{status}\"")], count)
            .await
            .unwrap();
    };
    let alert = async |name: &str, value| {
        // S0-041, S0-050, S2-014.
        host.until_metric("oncebox_alert", &[&format!("alert=\"{name}\"")], value).await.unwrap()
    };
    messages("parked", 2.0).await;
    messages("failed_terminal", 1.0).await;
    for (name, value) in
        [("parked", 1.0), ("dead_letters", 1.0), ("collisions", 0.0), ("pending_age_s", 0.0)]
    {
        alert(name, value).await;
    }
    host.until_metric("oncebox_inbox_pending_messages", &[], 0.0).await.unwrap();
    assert_eq!(host.metric("oncebox_inbox_oldest_pending_age_seconds", &[]).await, Some(0.0));
    let runs = host.metric("oncebox_run_duration_seconds_count", &[]).await;
    // S1-082.
    assert!(
        runs >= Some(load.len() as f64),
        "{runs:?}: every run counts, also one that is repeated"
    );
    // As if the rejected one were to be tried again, later, since two hours.
    const LATER: &str = "UPDATE oncebox.inbox SET status = 'failed_retryable', next_attempt_at = \
        now() + interval '1 hour', \
        received_at = now() - interval '2 hours', processed_at = NULL WHERE status = \
        'failed_terminal'";
    sqlx::query(LATER).execute(&fixture.pool).await.unwrap();
    // S1-074
    host.until_metric("oncebox_inbox_pending_messages", &[], 1.0).await.unwrap();
    messages("failed_retryable", 1.0).await;
    alert("pending_age_s", 1.0).await;
    // S1-075
    let age = host.metric("oncebox_inbox_oldest_pending_age_seconds", &[]).await.unwrap();
    assert!((7_200.0..7_800.0).contains(&age), "{age}");
    const BACK: &str = "UPDATE oncebox.inbox SET status = 'failed_terminal', next_attempt_at = \
        NULL, processed_at = now() \
        WHERE status = 'failed_retryable'";
    sqlx::query(BACK).execute(&fixture.pool).await.unwrap();
    alert("pending_age_s", 0.0).await;
    let tenant = fixture.tenant.name.clone();
    let named = ["--tenant", &tenant, "--consumer", "payments"];
    let stats = fixture.ok(&[&["inbox", "stats"], &named[..]].concat()).await.unwrap();
    assert!(stats.contains("dead_letters") && stats.contains("parked"), "{stats}");
    fixture
        .ok(&[&["inbox", "discard", "--all", "--because", "a test"], &named[..]].concat())
        .await
        .unwrap();
    alert("parked", 0.0).await;
    alert("dead_letters", 0.0).await;
    messages("parked", 0.0).await;
    host.stop().await.unwrap();
}

/// What could go wrong: what completed, is being run, or cannot be run is run again; or a message
/// that does not fit the filter is.
#[tokio::test(flavor = "multi_thread")]
async fn only_what_it_is_for_is_touched() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", LATER).await;
    let host = fixture.host(&consumer);
    let mut no_id = record(4, "", "");
    no_id.headers.clear();
    let mut unrouted = record(5, "unrouted", "");
    unrouted.headers.push(("type".to_owned(), b"nobody".to_vec()));
    let log = [
        record(0, "done", ""),
        record(1, "rejected", "reject"),
        record(2, "parked", "park"),
        record(3, "later", "before 2 trap"),
        no_id,
        unrouted,
    ];
    deliver(&host, &log).await;
    let count = async |action, filter| self::count(&fixture, &job(action, filter)).await;
    for (action, messages) in [(Action::Redrive, 3), (Action::Discard, 5), (Action::Retry, 1)] {
        assert_eq!(count(action, JobFilter::default()).await, messages, "{action:?}");
    }
    let others = these(&["done", "later", "undecodable:t:0:4", "nothing"]);
    assert_eq!(count(Action::Redrive, others.clone()).await, 0);
    assert_eq!(count(Action::Redrive, of_reason("no_route")).await, 1);
    let parked = JobFilter { status: Some("parked".to_owned()), ..JobFilter::default() };
    assert_eq!(count(Action::Redrive, parked).await, 2);
    assert!(
        fixture
            .control
            .audit()
            .list(None, 100)
            .await
            .unwrap()
            .iter()
            .all(|entry| !entry.action.starts_with("inbox.")),
        "nothing was done"
    );

    let done = carry_out(&fixture.control, "acme", &job(Action::Redrive, others)).await.unwrap();
    assert_eq!(done.left_out.0, [("undecodable".to_owned(), 1)].into(), "{done:?}");
    assert_eq!(act(&fixture, &all(Action::Retry)).await, 1);
    assert_eq!(step(&host).await.unwrap(), 1);
    assert_eq!(fixture.row(&consumer, "later").await.state(), ("completed", None, 2));
    assert_eq!(act(&fixture, &job(Action::Discard, of_reason("reject"))).await, 1);
    // S0-008, S0-030, S1-030.
    assert_eq!(fixture.row(&consumer, "rejected").await.state(), ("discarded", Some("reject"), 1));
    assert_eq!(act(&fixture, &job(Action::Redrive, these(&["rejected"]))).await, 0);
    let of_nobody = NewJob { consumer: Some("nobody".to_owned()), ..all(Action::Redrive) };
    let missing = fixture.control.jobs().start("acme", &of_nobody).await.unwrap_err();
    assert!(matches!(missing, InboxError::NotFound(_)), "{missing}");
    fixture.finish().await;
}

/// What could go wrong: what is run at once fails at once, and is run again and again by the same
/// command until it is a dead letter.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_runs_what_waits_for_its_retry_once() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture
        .simple("", "retry = { backoff_min_ms = 60000, backoff_max_ms = 60000, jitter = 'none' }")
        .await;
    let host = fixture.host(&consumer);
    let log: Vec<Record> = (0..3).map(|n| record(n, &format!("m{n}"), "trap")).collect();
    deliver(&host, &log).await;
    let jobs = fixture.control.jobs();
    let database = fixture.control.tenant_databases().by_name("").await.unwrap();
    // Two messages a page, as two a second are.
    let slow = NewJob { rate: Some(2), ..all(Action::Retry) };
    let job_id = jobs.start("acme", &slow).await.unwrap().job_id;
    let mut leased = jobs.lease(&database, "a test", Some(job_id)).await.unwrap().unwrap();
    for (changed, pause) in [(2, 1_000), (3, 500)] {
        let next = jobs.step(&mut leased).await.unwrap();
        assert_eq!(next, JobStep::Next(Duration::from_millis(pause)));
        while step(&host).await.unwrap() > 0 {}
        assert_eq!(jobs.show("acme", job_id).await.unwrap().changed, changed);
    }
    assert_eq!(jobs.step(&mut leased).await.unwrap(), JobStep::Done);
    assert_eq!(jobs.show("acme", job_id).await.unwrap().changed, 3);
    let attempts: Vec<_> = fixture.rows().await.into_iter().map(|row| row.attempts).collect();
    assert_eq!(attempts, [2, 2, 2]);
    assert_eq!(act(&fixture, &all(Action::Retry)).await, 3, "said again, it is done again");
    fixture.finish().await;
}

/// What could go wrong: two people ask at once, or one asks twice, and a message runs twice.
/// S1-011.
#[tokio::test(flavor = "multi_thread")]
async fn asked_twice_it_is_done_once() {
    const LETTERS: i64 = 500;
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "retry = { attempts_max = 1 }").await;
    let host = fixture.host(&consumer);
    let log: Vec<Record> = (0..LETTERS).map(|n| record(n, &format!("m{n}"), "reject")).collect();
    deliver(&host, &log).await;
    // The scripted handler does what the payload says.
    fixture.execute("UPDATE oncebox.inbox SET payload = '' WHERE status = 'failed_terminal'").await;
    let job = all(Action::Redrive);
    let people = (0..3).map(|_| act(&fixture, &job));
    let changed: i64 = futures::future::join_all(people).await.into_iter().sum();
    // S1-011.
    assert_eq!(changed, LETTERS);
    fixture.retry_until_settled(&host).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        LETTERS
    );
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox_history WHERE event = 'redriven'").await,
        LETTERS
    );
    const AUDITED: &str = "SELECT sum((details->>'messages')::bigint)::bigint FROM oncebox.audit \
        WHERE action = 'job.done'";
    assert_eq!(fixture.number(AUDITED).await, LETTERS);
    fixture.finish().await;
}

/// What could go wrong: the host that carries out a redrive dies in the middle, and messages run
/// twice, never, or nobody knows who did it. S1-011, S1-059, S0-042.
///
/// `ONCEBOX_REDRIVE_DEAD_LETTERS` says how many dead letters there are (3,000 by default).
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_redriven_twice_while_hosts_die() {
    let dead_letters: usize = std::env::var("ONCEBOX_REDRIVE_DEAD_LETTERS")
        .map_or(3_000, |dead_letters| dead_letters.parse().unwrap());
    let fixture = HostFixture::with(Options { partitions: 4, ..Options::default() }).await.unwrap();
    fixture.send(&Load::of((0..dead_letters).map(|_| Work::Park))).await.unwrap();
    let host = fixture.start("a", &[]).unwrap();
    let parked = "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status = \
        'parked' AND reason = 'park'";
    until(&fixture, parked, dead_letters as i64).await;
    // What they waited for.
    fixture.execute("INSERT INTO {schema}.account (account) VALUES ('nowhere')").await.unwrap();
    host.stop().await.unwrap();

    let tenant = fixture.tenant.name.clone();
    let one_tenant = ["--tenant", &tenant];
    let redrive = ["--consumer", "payments", "--reason", "park", "--because", "it is open"];
    let start = [&["inbox", "redrive", "--detach"], &one_tenant[..], &redrive].concat();
    fixture.ok(&start).await.unwrap();
    let one = "SELECT count(*) FROM oncebox.job WHERE state = 'running' AND changed = 0";
    assert_eq!(fixture.number(one).await.unwrap(), 1, "no host works on it yet");
    // Hosts that end with the job in hand: at a page, behind one, and on either side of the end.
    let points = [JOB_POINTS, ACTION_POINTS].concat();
    let ends = points.iter().filter(|point| point.starts_with("job:end"));
    let within = points.iter().filter(|point| !point.starts_with("job:end"));
    for point in within.chain(ends) {
        let died = fixture.start("dying", &[("ONCEBOX_FAILPOINT", point)]).unwrap();
        const CHANGED: &str = "SELECT sum(changed)::bigint FROM oncebox.job";
        while_moving(&fixture, CHANGED, |_| !died.is_running()).await;
        let status = died.wait_exit().await.unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{point}: {status:?}");
        end_leases(&fixture).await;
    }
    let over = "SELECT count(*) FROM oncebox.job WHERE state = 'done'";
    assert_eq!(fixture.number(over).await.unwrap(), 1, "the last one died behind the end");
    let again = [&start[..2], &start[3..]].concat();
    let host = fixture.start("a", &[]).unwrap();
    assert!(fixture.ok(&again).await.unwrap().contains("there is nothing to redrive"));

    let completed = "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND status \
        = 'completed'";
    until(&fixture, completed, dead_letters as i64).await;
    fixture.check_whole().await.unwrap();
    // S1-001, S1-011, S1-059, S3-023.
    let entries = "SELECT count(*) FROM {schema}.ledger_entry";
    assert_eq!(fixture.number(entries).await.unwrap(), dead_letters as i64);
    let distinct = "SELECT count(DISTINCT message_id) FROM {schema}.ledger_entry";
    assert_eq!(fixture.number(distinct).await.unwrap(), dead_letters as i64);
    const REDRIVEN: &str = "SELECT count(*) FROM oncebox.inbox_history WHERE event = 'redriven' \
        AND reason = 'it is open'";
    assert_eq!(fixture.number(REDRIVEN).await.unwrap(), dead_letters as i64, "each has one entry");
    const AUDITED: &str = "SELECT sum((details->>'messages')::bigint)::bigint FROM oncebox.audit \
        WHERE action = 'job.done'";
    assert_eq!(fixture.number(AUDITED).await.unwrap(), dead_letters as i64);
    const ENDED: &str = "SELECT count(*) FROM oncebox.audit WHERE action = 'job.done'";
    assert_eq!(fixture.number(ENDED).await.unwrap(), 2, "each job ends once");
    host.stop().await.unwrap();
}

/// Ends the leases of hosts that are gone, as time does.
async fn end_leases(fixture: &HostFixture) {
    const END: &str = "UPDATE oncebox.job SET locked_until = now() WHERE locked_until IS NOT NULL";
    fixture.execute(END).await.unwrap();
}

/// Waits until a count is this one, as long as it moves.
async fn until(fixture: &HostFixture, count: &str, expected: i64) {
    while_moving(fixture, count, |found| found == expected).await;
}

/// Waits until something is over, as long as a count moves.
async fn while_moving(fixture: &HostFixture, count: &str, is_over: impl Fn(i64) -> bool) {
    let (mut found, mut moved_at) = (-1, Instant::now());
    loop {
        let now = fixture.number(count).await.unwrap();
        if is_over(now) {
            return;
        }
        if now != found {
            (found, moved_at) = (now, Instant::now());
        }
        assert!(moved_at.elapsed() < DEADLINE, "stands at {found}: {count}");
        sleep(Duration::from_millis(100)).await;
    }
}
