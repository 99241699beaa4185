//! Copies of dead letters in a topic.

use std::collections::{BTreeMap, BTreeSet};

use oncebox_model::hooks::COPY_POINTS;
use oncebox_tests::load::Message;
use rdkafka::{
    ClientConfig,
    message::{Headers, Message as _, OwnedMessage},
    producer::{FutureProducer, FutureRecord},
};

use super::*;

fn header(copy: &OwnedMessage, name: &str) -> Option<String> {
    let header = copy.headers()?.iter().find(|header| header.key == name)?;
    Some(String::from_utf8_lossy(header.value?).into_owned())
}

/// Loads with dead letters, parked messages and others.
pub(super) fn mixed(messages: usize) -> Load {
    Load::of((0..messages).map(|n| [Work::Park, Work::Pay, Work::Reject][n % 3]))
}

/// What could go wrong: a dead letter is not in the topic, or without what it came with; a host
/// that dies takes copies with it; two hosts copy the same; one that failed again is missing.
/// S0-041, S1-059, S3-023.
#[tokio::test(flavor = "multi_thread")]
async fn every_dead_letter_is_copied_whoever_dies() {
    let fixture = HostFixture::with(Options { copies: true, ..Options::default() }).await.unwrap();
    let load = mixed(60);
    fixture.send(&load).await.unwrap();
    let dead_letters: BTreeMap<_, _> =
        load.messages().into_iter().filter(|(_, message)| message.work != Work::Pay).collect();

    let victim = fixture.start("a", &[("ONCEBOX_FAILPOINT", COPY_POINTS[0])]).unwrap();
    victim.wait_exit().await.unwrap();
    let before = fixture.copies().await.unwrap().len();
    assert!(before > 0, "the brokers have some");
    assert_eq!(
        fixture
            .number("SELECT count(*) FROM oncebox.inbox WHERE copied_at IS NOT NULL")
            .await
            .unwrap(),
        0,
        "no row says so"
    );
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.copying").await.unwrap(), 1);
    fixture.execute("UPDATE oncebox.copying SET until = now()").await.unwrap();

    let hosts = ["a", "b"].map(|name| fixture.start(name, &[]).unwrap());
    const COPIED: &str = "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer} AND \
        copied_at = processed_at";
    fixture.until(COPIED, dead_letters.len() as i64).await.unwrap();
    let copies = fixture.copies().await.unwrap();
    // S0-041, S3-023.
    check_copies(&copies, &dead_letters, &fixture.tenant.name);
    assert_eq!(
        copies.len(),
        before + dead_letters.len(),
        "what was not noted is copied again, and nothing else"
    );

    let tenant = fixture.tenant.name.clone();
    fixture
        .ok(&[
            "inbox",
            "redrive",
            "--tenant",
            &tenant,
            "--consumer",
            "payments",
            "--all",
            "--because",
            "again",
        ])
        .await
        .unwrap();
    let last = "SELECT count(*) FROM oncebox.inbox WHERE copied_at = processed_at AND processed_at \
        > \
        (SELECT max(at) FROM oncebox.inbox_history WHERE event = 'redriven')";
    fixture.until(last, dead_letters.len() as i64).await.unwrap();
    assert_eq!(
        fixture.copies().await.unwrap().len(),
        before + 2 * dead_letters.len(),
        "what failed again is copied again, by one host"
    );
    hosts[0].until_metric("oncebox_dead_letter_copies_failed_total", &[], 0.0).await.unwrap();
    for host in hosts {
        host.stop().await.unwrap();
    }
    fixture.check().await.unwrap();
}

fn check_copies(copies: &[OwnedMessage], dead_letters: &BTreeMap<&str, &Message>, tenant: &str) {
    let there: BTreeSet<_> =
        copies.iter().filter_map(|copy| header(copy, "oncebox-message-id")).collect();
    assert_eq!(
        there.iter().map(String::as_str).collect::<Vec<_>>(),
        dead_letters.keys().copied().collect::<Vec<_>>()
    );
    for copy in copies {
        let id = header(copy, "id").expect("the record's own header");
        let message = dead_letters[id.as_str()];
        assert_eq!(
            copy.payload().map(String::from_utf8_lossy).as_deref(),
            Some(&*message.payload())
        );
        let reason = if message.work == Work::Park { "park" } else { "reject" };
        let status = if message.work == Work::Park { "parked" } else { "failed_terminal" };
        let said = [
            "type",
            "oncebox-reason",
            "oncebox-status",
            "oncebox-consumer",
            "oncebox-tenant",
            "oncebox-attempts",
        ];
        let said = said.map(|name| header(copy, name).unwrap_or_default());
        assert_eq!(said, ["payment.captured", reason, status, "payments", tenant, "1"]);
        assert!(
            header(copy, "oncebox-offset").is_some() && header(copy, "oncebox-error").is_some(),
            "{copy:?}"
        );
    }
}

/// What could go wrong: one letter that the topic does not take holds up the rest for ever, or
/// brokers that are not there hold up the consumer.
#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_is_too_large_is_copied_without_its_payload() {
    let fixture = HostFixture::with(Options { copies: true, ..Options::default() }).await.unwrap();
    let producer: FutureProducer =
        ClientConfig::new().set("bootstrap.servers", fixture.kafka().bootstrap()).create().unwrap();
    let payloads = ["small".to_owned(), "x".repeat(30_000), "too".to_owned()];
    for payload in &payloads {
        producer
            .send(
                FutureRecord::<(), _>::to(&fixture.topic).partition(0).payload(payload),
                Duration::from_secs(10),
            )
            .await
            .unwrap();
    }
    let host = fixture.start("a", &[]).unwrap();
    fixture
        .until("SELECT count(*) FROM oncebox.inbox WHERE copied_at = processed_at", 3)
        .await
        .unwrap();
    let copies = fixture.copies().await.unwrap();
    let mut found: Vec<_> = copies
        .iter()
        .map(|copy| (copy.payload().map(<[u8]>::len), header(copy, "oncebox-payload")))
        .collect();
    found.sort();
    assert_eq!(found, [(None, Some("too-large".to_owned())), (Some(3), None), (Some(5), None)]);
    assert!(
        copies.iter().all(|copy| header(copy, "oncebox-reason")
            .is_some_and(|reason| reason.starts_with("undecodable"))),
        "{copies:?}"
    );

    // The topic goes: the consumer works on, what is to be copied waits, and is copied when there
    // is a topic again.
    let dead = format!("{}.dead", fixture.topic);
    fixture.kafka().delete_topic(&dead).await.unwrap();
    fixture.send(&Load::of([Work::Reject, Work::Pay]).named("later")).await.unwrap();
    fixture
        .until("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'", 1)
        .await
        .unwrap();
    host.until_metric("oncebox_dead_letter_copies_failed_total", &[], 1.0).await.unwrap();
    fixture.kafka().create_topic(&dead, 1, &[]).await.unwrap();
    fixture
        .until("SELECT count(*) FROM oncebox.inbox WHERE copied_at = processed_at", 4)
        .await
        .unwrap();
    assert_eq!(fixture.copies().await.unwrap().len(), 1);
    host.stop().await.unwrap();
}
