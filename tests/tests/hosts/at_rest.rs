//! A consumer with nothing to do asks nothing and holds nothing, and misses nothing for it.

use std::{sync::Arc, time::Duration};

use oncebox_control::Consumer;
use oncebox_inbox::{
    Budget, ConsumerInbox, DuePoller, SessionSettings, Sessions,
    retry::{self, backlog, poller},
};
use oncebox_model::MessageStatus;
use oncebox_tests::inbox::{InboxFixture, TestConsumer, deliver, record};
use sqlx::{Executor, Row};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const QUICK: &str =
    "[retry]\nattempts_max = 20\nbackoff_min_ms = 20\nbackoff_max_ms = 50\nlease_ms = 60000";
const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity WHERE usename LIKE 'oncebox\\_%' AND \
    datname = current_database()";

/// A host whose workers are told what is due.
struct NotifiedHost {
    inbox: Arc<ConsumerInbox>,
    budget: Arc<Budget>,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl NotifiedHost {
    fn start(fixture: &InboxFixture, consumer: &TestConsumer) -> Self {
        let (budget, stop, due_poller) =
            (Budget::new(8), CancellationToken::new(), Arc::new(DuePoller::default()));
        let sessions = Sessions::of(
            fixture.control.tenant_databases().session_target(&consumer.tenant).unwrap(),
            &SessionSettings::default(),
            budget.clone(),
        );
        let Consumer { consumer_id, tenant, name, .. } = consumer.row.clone();
        let inbox = ConsumerInbox::new(
            consumer_id,
            tenant,
            name,
            consumer.policy.clone(),
            "told".to_owned(),
            sessions,
            fixture.scripts(),
        );
        due_poller.watch_consumer(&inbox);
        let mut tasks: Vec<_> =
            (0..2).map(|_| tokio::spawn(retry::work(inbox.clone(), stop.clone()))).collect();
        let looking = stop.clone();
        tasks.push(tokio::spawn(async move { due_poller.run(looking).await }));
        Self { inbox, budget, stop, tasks }
    }

    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
        self.budget.close_unused(Duration::ZERO).await;
    }
}

/// What could go wrong: workers that wait to be told are not told of what another host left, of
/// what comes due later, of a lease that ran out, or of what a person made due; or they hold a
/// connection while they wait.
#[tokio::test(flavor = "multi_thread")]
async fn workers_at_rest_are_told_of_whatever_becomes_due() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", &format!("ack = 'after_insert'\n{QUICK}")).await;
    let notified = NotifiedHost::start(&fixture, &consumer);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(fixture.number(SESSIONS).await, 0, "workers with nothing to do opened a connection");

    // Left by another host: new ones, and some that fail at first.
    let log: Vec<_> = (0..20)
        .map(|n| record(n, &format!("m{n}"), if n % 2 == 0 { "" } else { "before 3 trap" }))
        .collect();
    deliver(&fixture.host(&consumer), &log).await;
    fixture.until("SELECT count(*) = 20 FROM oncebox.inbox WHERE status = 'completed'").await;

    // Stored by this host.
    deliver(&notified.inbox, &[record(20, "own", "")]).await;
    fixture.until("SELECT count(*) = 21 FROM oncebox.inbox WHERE status = 'completed'").await;

    // A lease that ran out, and something that a person made due.
    deliver(
        &fixture.host(&consumer),
        &[record(21, "rejected", "before 2 reject"), record(22, "lost", "")],
    )
    .await;
    fixture.until("SELECT count(*) = 22 FROM oncebox.inbox WHERE status = 'completed'").await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET status = 'in_progress', next_attempt_at = NULL, processed_at \
                = NULL, locked_until = now() + interval '2 s', \
             locked_by = 'gone', epoch = epoch + 1 WHERE message_id = 'rejected'",
        )
        .await;
    fixture.until("SELECT count(*) = 23 FROM oncebox.inbox WHERE status = 'completed'").await;

    assert!(notified.budget.in_use() > 0);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(
        notified.budget.close_unused(Duration::from_secs(60)).await,
        0,
        "one that was just used"
    );
    assert!(notified.budget.close_unused(Duration::from_millis(50)).await > 0);
    assert_eq!(notified.budget.in_use(), 0);
    notified.end().await;
    fixture.finish().await;
}

/// What could go wrong: to count what is open, what completed is read too.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_open_is_counted_by_index() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "retry = { attempts_max = 1 }").await;
    let log: Vec<_> = (0..30)
        .map(|n| record(n, &format!("m{n}"), if n % 3 == 0 { "park" } else { "reject" }))
        .collect();
    deliver(&fixture.host(&consumer), &log).await;
    let id = consumer.row.consumer_id;
    fixture
        .execute(format!(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", \
                record_timestamp_ms, status, attempts, processed_at) SELECT {id}, 'old' || n, 1, \
                oncebox.bucket_at(1::smallint, now()), 't', 0, n, \
                0, 'completed', 1, now() FROM generate_series(1, 20000) n; ANALYZE"
        ))
        .await;
    let asked: Vec<_> = (id..id + 100).map(|id| (id, consumer.policy.retention.class())).collect();
    let backlogs = backlog::backlogs(&fixture.pool, &asked, 1_000).await.unwrap();
    assert_eq!(
        (
            backlogs[0].messages(MessageStatus::Parked),
            backlogs[0].messages(MessageStatus::FailedTerminal),
            backlogs[0].pending()
        ),
        (10, 20, 0)
    );
    assert!(backlogs.len() == 100 && backlogs[1..].iter().all(|backlog| backlog.open.is_empty()));

    let mut tx = fixture.pool.begin().await.unwrap();
    tx.execute(sqlx::raw_sql(backlog::SETTINGS)).await.unwrap();
    let (ids, classes): (Vec<i32>, Vec<i16>) = asked.into_iter().unzip();
    let explain = format!("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {}", backlog::OPEN);
    let plan = sqlx::query(sqlx::AssertSqlSafe(explain))
        .bind(ids)
        .bind(classes)
        .bind(1_000_i64)
        .fetch_all(&mut *tx)
        .await
        .unwrap();
    let text = plan.iter().map(|line| line.get::<String, _>(0)).collect::<Vec<_>>().join("\n");
    assert!(
        !text.contains("Seq Scan on inbox")
            && !text.contains("Bitmap")
            && text.contains("status_received_at_idx"),
        "{text}"
    );
    assert!(!text.contains("Rows Removed"), "{text}");
    drop(tx);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}

/// What could go wrong: the look at what is due reads more the more there is, or plans without its
/// indexes.
#[tokio::test(flavor = "multi_thread")]
async fn the_look_at_what_is_due_is_the_head_of_an_index() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let log: Vec<_> = (0..300).map(|n| record(n, &format!("m{n}"), "")).collect();
    deliver(&fixture.host(&consumer), &log).await;
    let id = consumer.row.consumer_id;
    let asked: Vec<_> = (id..id + 500).map(|id| (id, 2)).collect();
    assert!(
        poller::due(&fixture.pool, &asked).await.unwrap().0.is_empty(),
        "another retention class"
    );
    let asked: Vec<_> = (id..id + 500).map(|id| (id, consumer.policy.retention.class())).collect();
    assert_eq!(poller::due(&fixture.pool, &asked).await.unwrap().0, [(id, 0)]);
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() + interval '10 minutes'")
        .await;
    assert!(poller::due(&fixture.pool, &asked).await.unwrap().0.is_empty(), "not for a while");
    fixture
        .execute(
            "UPDATE oncebox.inbox SET next_attempt_at = now() + interval '500 ms' WHERE \
        message_id = 'm7'",
        )
        .await;
    let found = poller::due(&fixture.pool, &asked).await.unwrap().0;
    assert!(found.len() == 1 && found[0].0 == id && (1..=500).contains(&found[0].1), "{found:?}");

    let mut tx = fixture.pool.begin().await.unwrap();
    tx.execute(sqlx::raw_sql(backlog::SETTINGS)).await.unwrap();
    let (ids, classes): (Vec<i32>, Vec<i16>) = asked.into_iter().unzip();
    let explain = format!("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {}", poller::DUE);
    let plan = sqlx::query(sqlx::AssertSqlSafe(explain))
        .bind(ids)
        .bind(classes)
        .bind(1_000_i64)
        .fetch_all(&mut *tx)
        .await
        .unwrap();
    let plan: Vec<String> = plan.iter().map(|line| line.get(0)).collect();
    let text = plan.join("\n");
    assert!(
        !text.contains("Seq Scan") && !text.contains("Sort Method") && !text.contains("Bitmap"),
        "{text}"
    );
    let read = plan.iter().filter(|line| {
        line.contains("Index Scan") && !line.contains("never executed") && line.contains("rows=1 ")
    });
    assert!(read.count() <= 1, "{text}");
    drop(tx);
    fixture.execute("DELETE FROM oncebox.inbox").await;
    fixture.finish().await;
}
