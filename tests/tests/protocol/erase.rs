//! Erasure: what the inbox holds of a subject's payloads is gone for whoever reads the database,
//! and its messages are refused as before.

use std::collections::BTreeMap;

use oncebox_control::{
    Action, Edit, ErasedCount, ErasureProgress, ErasureProof, ErasureRequest, ErasureTarget,
};
use oncebox_devkit::local::postgres;
use oncebox_model::record::Record;
use oncebox_tests::{
    aging::age,
    inbox::{Guest, InboxFixture, TestConsumer, deliver, record, records, step},
    job::{carry_out, inbox_job, these},
};
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;
use tokio::process::Command;

mod killed;

/// Key of the subject that is erased. No reason and no id holds it.
const SUBJECT: &str = "customer-4711";

fn of_key(key: &str) -> ErasureRequest {
    let target = ErasureTarget::Key(key.as_bytes().to_vec());
    ErasureRequest { target, consumer: None, reason: "they asked for it".to_owned() }
}

fn of_id(id: &str) -> ErasureRequest {
    ErasureRequest { target: ErasureTarget::MessageId(id.to_owned()), ..of_key("") }
}

async fn erase_some(
    fixture: &InboxFixture,
    tenant: &str,
    request: &ErasureRequest,
) -> ErasureProgress {
    fixture.control.erasures().erase(tenant, request).await.unwrap()
}

/// Repeats the request until there is a proof.
async fn erase(fixture: &InboxFixture, tenant: &str, request: &ErasureRequest) -> ErasureProof {
    for _ in 0..20 {
        if let Some(proof) = erase_some(fixture, tenant, request).await.proof {
            return proof;
        }
    }
    panic!("the erasure does not end: {:#?}", fixture.rows().await);
}

/// A text that stands for personal data: nothing else in a database holds it.
fn mark() -> String {
    format!("mark-{}", hex::encode(rand::random::<[u8; 12]>()))
}

/// A record of a key, with the mark in a header.
fn keyed(offset: i64, id: &str, key: &str, mark: &str, script: &str) -> Record {
    let mut keyed = Record { key: Some(key.as_bytes().to_vec()), ..record(offset, id, script) };
    keyed.headers.push(("note".to_owned(), mark.as_bytes().to_vec()));
    keyed
}

/// Everything in a database, as a backup of it has it.
async fn dump(url: &str) -> String {
    let pg_dump = postgres::program("pg_dump").unwrap_or_else(|error| panic!("{error:#}"));
    let output = Command::new(pg_dump).arg(format!("--dbname={url}")).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns whether a dump holds a mark: as text, as hexadecimal digits, or in base64, where it may
/// begin at any of three places.
fn holds(dump: &str, mark: &str) -> bool {
    let in_base64 = (0..3).map(|before| {
        let text = ["x".repeat(before), mark.to_owned()].concat();
        let encoded = openssl::base64::encode_block(text.as_bytes());
        // The first digits depend on what stands before, and the last ones on what follows.
        encoded[4..encoded.len() - 4].to_owned()
    });
    let forms = [mark.to_owned(), hex::encode(mark)].into_iter().chain(in_base64);
    forms.into_iter().any(|form| dump.contains(&form))
}

/// Messages of the subject in every status, each with a mark, by consumer.
struct Statuses {
    orders: TestConsumer,
    stored: TestConsumer,
    in_order: TestConsumer,
    /// What was delivered, by the name of the consumer.
    delivered: BTreeMap<&'static str, Vec<Record>>,
}

impl Statuses {
    fn each(&self) -> [&TestConsumer; 3] {
        [&self.in_order, &self.orders, &self.stored]
    }

    async fn make(fixture: &InboxFixture, mark: &str, others: &str) -> Self {
        let tenant = fixture.tenant("acme", "").await;
        let kept = "payload = 'all'\nno_route = 'skip'";
        let orders = fixture.consumer(&tenant, "orders", kept).await;
        let late = "payload = 'all'\nack = 'after_insert'";
        let stored = fixture.consumer(&tenant, "stored", late).await;
        let in_order =
            fixture.consumer(&tenant, "in-order", "payload = 'all'\norder = 'key'").await;

        let script = |verb: &str| format!("# {mark}\n{verb} {mark}");
        let of = |offset, id, script: &str| keyed(offset, id, SUBJECT, mark, script);
        let mut unrouted = of(5, "skipped", &format!("# {mark}"));
        unrouted.headers.push(("type".to_owned(), b"nobody".to_vec()));
        let log = vec![
            of(0, "completed", &format!("# {mark}\nresult \"{mark}\"")),
            of(1, "again", &format!("# {mark}\nretry 60000")),
            of(2, "parked", &script("park")),
            of(3, "dead", &script("reject")),
            of(4, "discarded", &script("park")),
            unrouted,
            of(6, "edited", &script("park")),
            keyed(7, "of-another", "customer-4712", others, &format!("# {others}\npark {others}")),
        ];
        deliver(&fixture.host(&orders), &log).await;
        let discard = inbox_job(Action::Discard, "orders", these(&["discarded"]));
        carry_out(&fixture.control, "acme", &discard).await.unwrap();
        let messages = fixture.control.messages();
        let payload = format!("# {mark}, mended").into_bytes();
        let edit = Edit { payload, reason: "a test".to_owned(), as_of: None };
        messages.edit_message("acme", "orders", "edited", &edit).await.unwrap();

        let leased = of(0, "leased", &format!("# {mark}"));
        deliver(&fixture.host(&stored), std::slice::from_ref(&leased)).await;
        let mut dying = Guest::connect(fixture, &stored).await;
        assert_eq!(dying.lease(50).await.unwrap().len(), 1);
        let received = of(1, "received", &format!("# {mark}"));
        deliver(&fixture.host(&stored), std::slice::from_ref(&received)).await;

        let behind =
            [of(0, "first", &script("park")), of(1, "behind", &format!("# {mark}"))].to_vec();
        deliver(&fixture.host(&in_order), &behind).await;
        let delivered = BTreeMap::from([
            ("orders", log),
            ("stored", vec![leased, received]),
            ("in-order", behind),
        ]);
        Self { orders, stored, in_order, delivered }
    }
}

/// The statuses before the erasure, by consumer.
const BEFORE: [(&str, &str); 11] = [
    ("in-order", "parked"),
    ("in-order", "waiting"),
    ("orders", "completed"),
    ("orders", "discarded"),
    ("orders", "failed_retryable"),
    ("orders", "failed_terminal"),
    ("orders", "parked"),
    ("orders", "received"),
    ("orders", "skipped"),
    ("stored", "in_progress"),
    ("stored", "received"),
];

/// What could go wrong: a byte of the subject's payloads stays somewhere in the database, another
/// subject's or another tenant's are gone too, an erased id runs again, or its next delivery brings
/// everything back.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_subject_is_left_and_all_of_the_others() {
    let fixture = InboxFixture::new().await;
    let [subjects, others, strangers] = [mark(), mark(), mark()];
    let statuses = Statuses::make(&fixture, &subjects, &others).await;
    // Another tenant's messages, under the same ids and the same key.
    let stranger = fixture.tenant("globex", "").await;
    let stranger = fixture.consumer(&stranger, "orders", "payload = 'all'").await;
    let theirs = [
        keyed(0, "completed", SUBJECT, &strangers, &format!("# {strangers}")),
        keyed(1, "dead", SUBJECT, &strangers, &format!("reject {strangers}")),
    ];
    deliver(&fixture.host(&stranger), &theirs).await;
    let found: Vec<(String, String)> = sqlx::query_as(
        "SELECT consumer_name, status FROM oncebox.inbox_message WHERE tenant_name = 'acme' AND \
            key = convert_to($1, 'UTF8') ORDER BY 1, 2",
    )
    .bind(SUBJECT)
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    let found: Vec<_> = found.iter().map(|(name, status)| (&**name, &**status)).collect();
    assert_eq!(found, BEFORE, "every status is there");
    let before = dump(&fixture.url()).await;
    assert!(
        [&subjects, &others, &strangers].into_iter().all(|mark| holds(&before, mark)),
        "the dump would show what stays"
    );

    // A message whose lease ran out has no worker: everything else is erased meanwhile.
    let waits = loop {
        let progress = erase_some(&fixture, "acme", &of_key(SUBJECT)).await;
        assert_eq!(progress.proof, None, "a message is left");
        if progress.in_flight > 0 {
            break progress;
        }
    };
    assert_eq!((waits.erased, waits.in_flight, &waits.proof), (10, 1, &None), "{waits:?}");
    assert!(waits.waits_for.unwrap().starts_with("messages that workers run"), "it says so");
    let worker = fixture.host(&statuses.stored);
    assert_eq!(step(&worker).await.unwrap(), 1, "a host takes the message over");
    let proof = erase(&fixture, "acme", &of_key(SUBJECT)).await;
    check_proof(&proof, &statuses);

    // Each delivery again, and one of them with another payload.
    let runs = |id: &str| fixture.script.runs(id).len();
    let ids: Vec<_> = statuses.delivered.values().flatten().map(id_of).collect();
    let before: Vec<_> = ids.iter().map(|id| runs(id)).collect();
    for consumer in statuses.each() {
        let host = fixture.host(consumer);
        deliver(&host, &statuses.delivered[&*consumer.row.name]).await;
        while step(&host).await.unwrap() > 0 {}
    }
    let other_payload = format!("# {subjects}, and more");
    let another = keyed(20, "completed", SUBJECT, &subjects, &other_payload);
    deliver(&fixture.host(&statuses.orders), &[another]).await;
    assert_eq!(ids.iter().map(|id| runs(id)).collect::<Vec<_>>(), before, "an id ran again");
    assert_eq!(fixture.rows().await.len(), BEFORE.len() + 3, "an id has another row");

    let after = dump(&fixture.url()).await;
    assert!(!holds(&after, &subjects), "{}", around(&after, &subjects));
    assert!(holds(&after, &others), "another subject's payload is gone");
    assert!(holds(&after, &strangers), "another tenant's payload is gone");
    let in_audit = format!(
        "SELECT count(*) FROM oncebox.audit WHERE concat(subject, details) LIKE '%{SUBJECT}%'"
    );
    assert_eq!(fixture.number(in_audit).await, 0, "the audit log names the subject");
    refused(&fixture).await;

    // Once more: nothing is left to do, and that is said.
    let again = erase(&fixture, "acme", &of_key(SUBJECT)).await;
    assert_eq!((again.erased, again.already_erased, again.readable), (Vec::new(), 11, 0));
    assert_eq!(again.key_hmac, proof.key_hmac, "one subject has one name");
    let nobody = erase(&fixture, "acme", &of_key("nobody")).await;
    assert_eq!((nobody.erased, nobody.already_erased), (Vec::new(), 0));
    assert_ne!(nobody.key_hmac, proof.key_hmac);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.erasure").await, 0);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.erased_message").await, 0);
    fixture.finish().await;
}

fn id_of(record: &Record) -> String {
    String::from_utf8(record.header("id").unwrap().to_vec()).unwrap()
}

/// The lines of a dump that hold a mark in clear or in hexadecimal digits, cut.
fn around(dump: &str, mark: &str) -> String {
    let lines = dump.lines().filter(|line| holds(line, mark));
    lines.map(|line| format!("{line:.300}\n")).collect()
}

fn check_proof(proof: &ErasureProof, statuses: &Statuses) {
    // The message that was leased completed before it was erased.
    let mut expected: BTreeMap<(&str, &str), i64> = BTreeMap::new();
    for (consumer, status) in BEFORE {
        let status = if status == "in_progress" { "completed" } else { status };
        *expected.entry((consumer, status)).or_default() += 1;
    }
    let erased: BTreeMap<_, _> = proof
        .erased
        .iter()
        .map(|ErasedCount { consumer, status, messages }| ((&**consumer, &**status), *messages))
        .collect();
    assert_eq!(erased, expected);
    assert_eq!((proof.already_erased, proof.readable, proof.edits), (0, 0, 1), "{proof:#?}");
    // Of the runs that failed: again, parked, dead, discarded, edited, and the first of its key.
    assert_eq!(proof.errors, 6, "{proof:#?}");
    assert_eq!((&*proof.actor, &*proof.reason), ("test", "they asked for it"));
    assert_eq!((&proof.message_id, proof.consumers.len()), (&None, 3));
    assert!(proof.ended_at > proof.began_at && proof.not_vacuumed.is_empty(), "{proof:#?}");
    for table in ["oncebox.inbox_edit", "oncebox.inbox_history", "oncebox.inbox_7d_"] {
        assert!(proof.vacuumed.iter().any(|vacuumed| vacuumed.starts_with(table)), "{table}");
    }
    let mut lines: Vec<_> = statuses
        .delivered
        .iter()
        .flat_map(|(consumer, log)| log.iter().map(move |record| (consumer, record)))
        .filter(|(_, record)| record.key.as_deref() == Some(SUBJECT.as_bytes()))
        .map(|(consumer, record)| format!("{consumer}/{}\n", id_of(record)))
        .collect();
    lines.sort_unstable();
    assert_eq!(proof.digest, hex::encode(Sha256::digest(lines.concat())));
}

/// What an operator may not do with an erased message, and what is told of it.
async fn refused(fixture: &InboxFixture) {
    let messages = fixture.control.messages();
    let edit = Edit { payload: b"new".to_vec(), reason: "a test".to_owned(), as_of: None };
    let error = messages.edit_message("acme", "orders", "dead", &edit).await.unwrap_err();
    assert!(error.to_string().contains("was erased at"), "{error}");
    for action in [Action::Redrive, Action::Retry] {
        let job = inbox_job(action, "orders", these(&["dead"]));
        let error = fixture.control.jobs().start("acme", &job).await.unwrap_err();
        assert!(error.to_string().contains("was erased at"), "{error}");
    }
    let history = messages.message_history("acme", "orders", "dead").await.unwrap();
    let events: Vec<_> = history.history.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(events, ["failed", "discarded", "erased"]);
    assert!(history.history.iter().all(|event| event.error.is_none() && event.reason.is_some()));
    assert!(history.next.text.contains("was erased at"), "{}", history.next.text);
    let row = messages.inbox_show("acme", "orders", "dead").await.unwrap();
    assert!(row.row.erased_at.is_some() && row.key.as_deref() == Some(SUBJECT.as_bytes()));
    assert!(row.payload.is_none() && !row.is_kept && row.row.payload_hash.is_none());
}

/// What could go wrong: a message whose claim is open when the erasure begins is not seen by it,
/// and is committed behind it with its payload.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_an_open_claim_is_erased_after_it() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let live = fixture.host(&consumer);
    let subjects = keyed(0, "live", SUBJECT, "note", "gate g");
    let running = tokio::spawn(async move { deliver(&live, &[subjects]).await });
    fixture.script.gate("g").reached(1).await;
    let request = of_key(SUBJECT);
    let erasing = erase(&fixture, "acme", &request);
    let opening = async {
        fixture.until("SELECT EXISTS (SELECT FROM oncebox.erasure WHERE waits_for <> '{}')").await;
        fixture.script.gate("g").open();
        running.await.unwrap();
    };
    let (proof, ()) = tokio::join!(erasing, opening);
    let one =
        ErasedCount { consumer: "orders".to_owned(), status: "completed".to_owned(), messages: 1 };
    assert_eq!(proof.erased, [one]);
    assert_eq!(fixture.row(&consumer, "live").await.payload, None);
    fixture.finish().await;
}

/// What could go wrong: two operators who erase the same messages count them twice, or each leaves
/// them to the other; a run that ends in between brings a payload back.
#[tokio::test(flavor = "multi_thread")]
async fn erasures_share_their_work_with_each_other_and_give_way_to_workers() {
    let fixture = InboxFixture::new().await;
    const PATIENT: &str = "payload = 'all'\nack = 'after_insert'\n\
        limits = { deadline_ms = 20000 }\nretry = { lease_ms = 60000 }";
    let consumer = fixture.simple("", PATIENT).await;
    let host = fixture.host(&consumer);
    let mut log: Vec<_> = (0..300)
        .map(|n| keyed(n, &format!("m{n}"), SUBJECT, "note", if n % 2 == 0 { "" } else { "park" }))
        .collect();
    log.push(keyed(300, "runs", SUBJECT, "note", "gate g"));
    deliver(&host, &log[300..]).await;
    let worker = host.clone();
    let working = tokio::spawn(async move { step(&worker).await });
    fixture.script.gate("g").reached(1).await;
    deliver(&host, &log[..300]).await;
    for _ in 0..20 {
        step(&host).await.unwrap();
    }
    let (by_key, only) = (
        of_key(SUBJECT),
        ErasureRequest { consumer: Some("orders".to_owned()), ..of_key(SUBJECT) },
    );
    let held = async {
        fixture
            .until("SELECT EXISTS (SELECT FROM oncebox.erased_message WHERE status IS NULL)")
            .await;
        fixture.script.gate("g").open();
        working.await.unwrap().unwrap();
    };
    let (one, other, ()) =
        tokio::join!(erase(&fixture, "acme", &by_key), erase(&fixture, "acme", &only), held);
    let erased =
        |proof: &ErasureProof| proof.erased.iter().map(|count| count.messages).sum::<i64>();
    assert_eq!(erased(&one) + erased(&other), 301, "{one:#?} {other:#?}");
    const LEFT: &str = "SELECT count(*) FROM oncebox.inbox WHERE erased_at IS NULL OR payload IS \
        NOT NULL OR headers IS NOT NULL OR payload_hash IS NOT NULL";
    assert_eq!(fixture.number(LEFT).await, 0);
    const ERASED: &str = "SELECT count(*) FROM oncebox.inbox_history WHERE event = 'erased'";
    assert_eq!(fixture.number(ERASED).await, 301, "each message once");
    fixture.finish().await;
}

/// What could go wrong: messages of the subject in a time partition that is out of the inbox, and
/// not dropped yet, stay readable there, or their history outlives them.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_erased_in_a_time_partition_that_is_being_removed() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let marks = mark();
    let script = format!("# {marks}");
    let old = [
        keyed(0, "old", SUBJECT, &marks, &script),
        keyed(1, "of-another", "customer-4712", "note", ""),
    ];
    deliver(&fixture.host(&consumer), &old).await;
    let name = age(&fixture.pool, "true", 12).await;
    let detach = format!(
        "INSERT INTO oncebox.removal (partition_name, retention_class, from_at, to_at, state, \
            removed, bytes, host) SELECT '{name}', 1, b.at, b.at + interval '56 hours', 'counted', \
            2, 1, 'test' FROM (SELECT oncebox.bucket_at(1::smallint, now() - interval '12 days') \
            AS at) b; \
         ALTER TABLE oncebox.inbox_7d DETACH PARTITION oncebox.{name}"
    );
    fixture.execute(detach).await;
    assert!(holds(&dump(&fixture.url()).await, &marks), "the dump would show what stays");
    let proof = erase(&fixture, "acme", &of_key(SUBJECT)).await;
    let erased: Vec<_> =
        proof.erased.iter().map(|count| (&*count.status, count.messages)).collect();
    assert_eq!((erased, proof.readable), ([("completed", 1)].to_vec(), 0));
    assert!(proof.vacuumed.contains(&format!("oncebox.{name}")), "{proof:#?}");
    let after = dump(&fixture.url()).await;
    assert!(!holds(&after, &marks), "{}", around(&after, &marks));
    let others = format!("SELECT count(*) FROM oncebox.{name} WHERE payload IS NOT NULL");
    assert_eq!(fixture.number(others).await, 1, "another subject's payload is gone");
    let again = erase(&fixture, "acme", &of_key(SUBJECT)).await;
    assert_eq!((again.erased, again.already_erased), (Vec::new(), 1));
    let entries = "SELECT count(*) FROM oncebox.inbox_history";
    assert_eq!(fixture.number(entries).await, 1);
    let database = fixture.control.tenant_databases().all().await.unwrap().remove(0);
    let run = fixture.control.retention().run(&database).await.unwrap();
    assert_eq!((run.removed.len(), run.failed.len()), (1, 0), "{run:?}");
    assert_eq!(fixture.number(entries).await, 0);
    fixture.execute(format!("DELETE FROM {}.effect", consumer.tenant.schema_name)).await;
    fixture.finish().await;
}

/// What could go wrong: in a tenant's own database nothing is erased, or the audit log, which is in
/// the host's, has nothing of it; an id takes messages of other ids.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_erased_by_its_id_in_a_tenants_own_database() {
    let fixture = InboxFixture::new().await;
    let database = InboxFixture::another_database().await;
    let tenant = fixture.tenant_at("apart", &database, "").await;
    let consumer = fixture.consumer(&tenant, "orders", "payload = 'all'").await;
    fixture.control.tenant_databases().replicate(&tenant).await.unwrap();
    deliver(&fixture.host(&consumer), &records(["a", "ab", "b"])).await;
    let proof = erase(&fixture, "apart", &of_id("a")).await;
    assert_eq!((proof.message_id.as_deref(), &proof.key_hmac), (Some("a"), &None));
    assert_eq!(proof.erased.iter().map(|count| count.messages).collect::<Vec<_>>(), [1]);
    let mut there = database.connect().await.unwrap();
    let left: Vec<String> = sqlx::query_scalar(
        "SELECT message_id FROM oncebox.inbox WHERE payload IS NOT NULL ORDER BY message_id",
    )
    .fetch_all(&mut there)
    .await
    .unwrap();
    assert_eq!(left, ["ab", "b"]);
    let audit = format!(
        "SELECT count(*) FROM oncebox.audit WHERE action = 'erase' AND audit_id = {} AND \
            details->>'digest' = '{}' AND details->>'message_id' = 'a'",
        proof.audit_id, proof.digest
    );
    assert_eq!(fixture.number(audit).await, 1);
    let shown = sqlx::query("SELECT FROM oncebox.erasure").fetch_all(&mut there).await.unwrap();
    assert!(shown.is_empty(), "the erasure has ended");

    // Neither a consumer nor a tenant that is not there is taken for one without messages.
    let misspelt = ErasureRequest { consumer: Some("order".to_owned()), ..of_id("b") };
    for (tenant, request) in [("apart", misspelt), ("nobody", of_id("b"))] {
        let error = fixture.control.erasures().erase(tenant, &request).await.unwrap_err();
        assert!(error.to_string().contains("there is no"), "{error}");
    }
    sqlx::Connection::close(there).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a command that was left unfinished is given again, goes on where it ended,
/// and proves that nothing is left of messages that came in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_is_given_again_later_looks_at_what_came_since() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let (host, tenant) = (fixture.host(&consumer), consumer.tenant.name.as_str());
    deliver(&host, &records(["a"])).await;
    // An open claim keeps the erasure from its end.
    let mut claim = fixture.pool.begin().await.unwrap();
    let lock = "SELECT pg_advisory_xact_lock($1, 1)";
    sqlx::query(lock).bind(consumer.row.consumer_id).execute(&mut *claim).await.unwrap();
    let answer = fixture.control.erasures().erase(tenant, &of_id("b")).await.unwrap();
    assert!(answer.proof.is_none() && answer.in_flight == 1, "{answer:?}");
    // As it is at the end of its last pass.
    let ended = "UPDATE oncebox.erasure SET pass = 3, found = 0, empty_passes = 1, waits_for = '{}', \
        at_consumer = 2147483647, worked_at = now() - interval '2 minutes'";
    fixture.execute(ended).await;
    claim.rollback().await.unwrap();
    let late = [record(1, "b", "")];
    deliver(&host, &late).await;
    let proof = erase(&fixture, tenant, &of_id("b")).await;
    assert_eq!(proof.erased.iter().map(|count| count.messages).sum::<i64>(), 1);
    let left = "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'b' AND payload IS NOT NULL";
    assert_eq!(fixture.number(left).await, 0);
    fixture.finish().await;
}

/// What could go wrong: a hand, or a bug of ours, gives an erased message something back.
#[tokio::test(flavor = "multi_thread")]
async fn the_schema_keeps_an_erased_message_empty() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    erase(&fixture, "acme", &of_id("a")).await;
    for set in [
        "payload = 'x'",
        "headers = 'x'",
        "payload_hash = 'x'",
        "result = '1'",
        "last_error = 'x'",
        "status = 'parked', reason = 'x'",
    ] {
        let refused = sqlx::query(AssertSqlSafe(format!("UPDATE oncebox.inbox SET {set}")));
        let refused = refused.execute(&fixture.pool).await.unwrap_err();
        let constraint = refused.as_database_error().unwrap().constraint().map(str::to_owned);
        assert_eq!(constraint.as_deref(), Some("inbox_erased_is_empty"), "`{set}`: {refused}");
    }
    fixture.finish().await;
}
