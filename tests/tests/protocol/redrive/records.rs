//! Dead letters of a policy that keeps no records: a redelivery brings the record back, and they
//! can run again.

use oncebox_control::Action;
use oncebox_model::record::Record;
use oncebox_tests::{
    inbox::{InboxFixture, Row, TestConsumer, both, deliver, open, record},
    job::inbox_job,
};

use super::{act, all, history, job, these};

/// What each dead letter is called, and why it is one.
const LETTERS: [(&str, &str, Option<&str>); 4] = [
    ("refused", "failed_terminal", Some("sql_error:23505")),
    ("parked", "parked", Some("park")),
    ("unrouted", "parked", Some("no_route")),
    ("tombstone", "parked", Some("no_route")),
];

/// The records of the dead letters, which fail until the table `taken` is empty and there is a handler.
fn dead_letters() -> Vec<Record> {
    let with = |record: Record, name: &str, value: &str| {
        let headers = record
            .headers
            .into_iter()
            .chain([(name.to_owned(), value.as_bytes().to_vec())])
            .collect();
        Record { headers, ..record }
    };
    let dead_letters = [
        record(0, "refused", "sql INSERT INTO taken VALUES (1)"),
        record(1, "parked", "park"),
        with(record(2, "unrouted", "result 3"), "type", "nobody"),
        with(Record { payload: None, ..record(3, "tombstone", "") }, "type", "nobody"),
    ];
    dead_letters.map(|letter| with(letter, "causation", "c-1")).into()
}

async fn kept(fixture: &InboxFixture, consumer: &TestConsumer) -> Vec<bool> {
    let mut kept = Vec::new();
    for (id, status, reason) in LETTERS {
        let row = fixture.row(consumer, id).await;
        assert_eq!((row.status.as_str(), row.reason.as_deref()), (status, reason), "{id}");
        kept.push(row.headers.is_some());
    }
    kept
}

async fn restored(fixture: &InboxFixture, id: &str) -> usize {
    history(fixture, id).await.iter().filter(|(event, ..)| event == "restored").count()
}

/// What could go wrong: a dead letter whose record was not kept never runs again, though its
/// history says how; a redelivery runs it by itself, brings back another payload or what a settled
/// message is not to keep, or half of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_brings_the_record_of_a_dead_letter_back() {
    for ack in ["after_commit", "after_insert"] {
        both(async |fixture| a_redelivery_brings_the_record_back(fixture, ack).await).await;
    }
}

async fn a_redelivery_brings_the_record_back(fixture: InboxFixture, ack: &str) {
    let policy = format!("payload = 'none'\nack = '{ack}'\nretry = {{ attempts_max = 1 }}");
    let consumer = fixture
        .simple("CREATE TABLE taken (n int UNIQUE); INSERT INTO taken VALUES (1);", &policy)
        .await;
    let host = fixture.host(&consumer);
    deliver(&host, &dead_letters()).await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(kept(&fixture, &consumer).await, [false; 4], "the policy keeps no record");
    assert_eq!(act(&fixture, &all(Action::Redrive)).await, 0, "there is nothing to run");
    let found =
        fixture.control.messages().message_history("acme", "orders", "refused").await.unwrap();
    assert!(found.next.text.contains("Have it delivered again"), "{}", found.next.text);

    // Another payload under the id is a collision, and brings nothing back.
    deliver(&host, &[record(4, "refused", "result 9")]).await;
    assert_eq!(kept(&fixture, &consumer).await, [false; 4]);
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'collision'").await,
        1
    );

    // As the way out says. Two that come at once bring it back once, and nothing runs.
    let runs = fixture.script.runs("refused").len();
    let (log, hosts) = (dead_letters(), [fixture.host(&consumer), fixture.host(&consumer)]);
    tokio::join!(deliver(&hosts[0], &log), deliver(&hosts[1], &log));
    assert_eq!(kept(&fixture, &consumer).await, [true; 4]);
    assert_eq!(
        (fixture.script.runs("refused").len(), fixture.effects(&consumer, "refused").await),
        (runs, 0)
    );
    for ((id, ..), letter) in LETTERS.into_iter().zip(&log) {
        let Row { payload, headers, attempts, .. } = fixture.row(&consumer, id).await;
        assert_eq!(
            (payload, attempts),
            (letter.payload.clone(), i32::from(!id.starts_with(['u', 't']))),
            "{id}"
        );
        let shown = fixture.control.messages().inbox_show("acme", "orders", id).await.unwrap();
        assert_eq!(
            (shown.is_kept, shown.headers),
            (true, letter.headers.clone()),
            "{id}: {headers:?}"
        );
        assert_eq!(restored(&fixture, id).await, 1, "{id}");
    }
    let found =
        fixture.control.messages().message_history("acme", "orders", "refused").await.unwrap();
    assert!(
        found.next.commands.iter().any(|command| command.contains("inbox redrive")),
        "{:?}",
        found.next
    );

    // What is redriven completes once, and its record is gone again; so is that of what is
    // discarded.
    fixture.execute(format!("DELETE FROM {}.taken", consumer.tenant.schema_name)).await;
    assert_eq!(act(&fixture, &job(Action::Redrive, these(&["refused"]))).await, 1);
    assert_eq!(act(&fixture, &job(Action::Discard, these(&["parked"]))).await, 1);
    fixture.retry_until_settled(&host).await;
    deliver(&host, &dead_letters()).await;
    for (id, status) in [("refused", "completed"), ("parked", "discarded")] {
        let row = fixture.row(&consumer, id).await;
        assert_eq!((row.status.as_str(), row.headers, row.payload), (status, None, None), "{id}");
        assert_eq!(restored(&fixture, id).await, 1, "{id}: a settled message keeps nothing");
    }
    assert_eq!(fixture.effects(&consumer, "refused").await, 1);
    fixture.finish().await;
}

/// What could go wrong: the host dies after the record was written, and half of it stays, or it
/// cannot come again.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_comes_back_with_the_commit_or_not_at_all() {
    both(async |fixture| {
        let consumer = fixture.simple("", "payload = 'none'").await;
        let host = fixture.host(&consumer);
        let letter = record(0, "a", "park");
        deliver(&host, std::slice::from_ref(&letter)).await;
        let batch = [letter, record(1, "b", "gate g")];
        let (mut partition, records) = (open(&host, 0).await, batch.clone());
        let dying = tokio::spawn(async move { partition.process(&records).await });
        fixture.script.gate("g").reached(1).await;
        let backend = fixture.script.runs("b")[0].backend;
        fixture.execute(format!("SELECT pg_terminate_backend({backend})")).await;
        fixture.script.gate("g").open();
        assert!(dying.await.unwrap().is_err());
        assert_eq!(
            (fixture.row(&consumer, "a").await.headers, restored(&fixture, "a").await),
            (None, 0)
        );
        deliver(&fixture.host(&consumer), &batch).await;
        fixture.retry_until_settled(&host).await;
        let row = fixture.row(&consumer, "a").await;
        assert_eq!(
            (row.state(), row.payload.as_deref()),
            (("parked", Some("park"), 1), Some(&b"park"[..]))
        );
        assert_eq!(restored(&fixture, "a").await, 1);
        fixture.finish().await;
    })
    .await;
}

/// What could go wrong: a payload that nobody expects fills the database, by one of the ways in
/// which a message is stored; the message is lost, or holds up the others; or it cannot run once
/// the limit is raised.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_is_too_large_is_parked_without_it() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    for (name, ack) in [("commits", "after_commit"), ("inserts", "after_insert")] {
        let policy =
            format!("ack = '{ack}'\npayload = 'all'\nlimits = {{ payload_bytes_max = 20 }}");
        let consumer = fixture.consumer(&tenant, name, &policy).await;
        let host = fixture.host(&consumer);
        let script = |bytes: usize| format!("# {}", "x".repeat(bytes - 2));
        let nameless = Record { headers: Vec::new(), ..record(3, "", &script(21)) };
        let log = [
            record(0, "fits", &script(20)),
            record(1, "large", &script(21)),
            record(2, "fits", &script(22)),
            nameless,
            record(4, "after", ""),
        ];
        deliver(&host, &log).await;
        fixture.retry_until_settled(&host).await;
        let too_large = "too_large: 21 bytes are more than the 20 of `limits.payload_bytes_max`";
        let large = async || {
            let row = fixture.row(&consumer, "large").await;
            assert_eq!(row.state(), ("parked", Some(too_large), 0));
            assert!(row.payload_hash.is_some());
            (row.payload.is_some(), row.headers.is_some())
        };
        // S0-051: neither its bytes nor those of a collision or of what has no id are kept.
        assert_eq!(large().await, (false, false));
        let kept = |what: &str| {
            format!(
                "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {} AND {what}",
                consumer.row.consumer_id
            )
        };
        assert_eq!(fixture.number(kept("octet_length(payload) > 20")).await, 0);
        assert_eq!(fixture.number(kept("status = 'parked' AND headers IS NULL")).await, 3);
        assert_eq!(fixture.number(kept("reason = 'collision'")).await, 1);
        assert_eq!(fixture.number(kept("reason LIKE 'undecodable%'")).await, 1);
        for id in ["fits", "after"] {
            assert_eq!(fixture.row(&consumer, id).await.status, "completed", "{id}");
        }

        // Neither an operator nor a redelivery runs it under this limit.
        let redrive = inbox_job(Action::Redrive, name, these(&["large"]));
        assert_eq!(act(&fixture, &redrive).await, 0);
        deliver(&host, &log).await;
        assert_eq!(large().await, (false, false));
        assert_eq!(fixture.number(kept("true")).await, 5, "each delivery is known");
        let found =
            fixture.control.messages().message_history("acme", name, "large").await.unwrap();
        assert!(found.next.text.contains("raise that limit"), "{}", found.next.text);

        let mut raised = consumer.clone();
        raised.policy.limits.payload_bytes_max = 21;
        let host = fixture.host(&raised);
        deliver(&host, &log[1..2]).await;
        assert_eq!(large().await, (true, true));
        assert_eq!(fixture.effects(&consumer, "large").await, 0, "it waits for an operator");
        assert_eq!(act(&fixture, &redrive).await, 1);
        fixture.retry_until_settled(&host).await;
        assert_eq!(fixture.row(&consumer, "large").await.state(), ("completed", None, 1));
        assert_eq!(fixture.effects(&consumer, "large").await, 1);
    }
    fixture.finish().await;
}
