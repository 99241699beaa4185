//! What ids and keys can do that were made for the numbers of locks: of another tenant's, and of
//! their own consumer's. Each scenario ends with the fixture's final check.

use std::{collections::HashMap, sync::Arc};

use oncebox_inbox::SessionSettings;
use oncebox_model::record::Record;
use sha2::{Digest, Sha256};
use tokio::{task::JoinHandle, time::timeout};

use crate::{
    inbox::{Gate, Guest, InboxFixture, TestConsumer, deliver, drive, record, take},
    lookup3::{Forger, hash},
    wait::DEADLINE,
};

/// What a victim says that was held up.
pub const HELD_UP: &str = "a tenant is held up by another's locks";
/// What is said of claims that wait for each other.
pub const DEADLOCK: &str = "claims wait for each other in a circle";
/// What is said of a message that was taken for another one.
pub const MISTAKEN: &str = "a message was taken for another one";

/// A policy under which a handler may keep its transaction open.
pub const PATIENT: &str = "limits = { deadline_ms = 600000 }\nretry = { lease_ms = 700000 }";

/// The number of what messages of a key are in order with, as rows carry it.
pub fn ordering(consumer: &TestConsumer, key: &str) -> i64 {
    let consumer_id = consumer.row.consumer_id.to_be_bytes();
    let hash = Sha256::new_with_prefix(consumer_id)
        .chain_update(b"key")
        .chain_update(key.as_bytes())
        .finalize();
    i64::from_be_bytes(hash[..8].try_into().expect("eight bytes"))
}

/// A message of a key.
pub fn of_key(offset: i64, id: &str, key: &str, script: &str) -> Record {
    Record { key: Some(key.as_bytes().to_vec()), ..record(offset, id, script) }
}

/// A transaction of a consumer that is kept open in the middle of its first message.
pub struct Holding {
    gate: Arc<Gate>,
    host: JoinHandle<()>,
}

/// Claim messages in one transaction of a consumer, and keep it open.
pub async fn hold(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    mut records: Vec<Record>,
) -> Holding {
    assert!(records.len() <= 64, "one transaction");
    let settings =
        SessionSettings { idle_in_transaction_timeout_ms: 600_000, ..SessionSettings::default() };
    let name = format!("attacker-{}", consumer.row.consumer_id);
    let host = fixture.host_with(consumer, fixture.scripts(), &settings);
    records[0].payload = Some(format!("gate {name}").into_bytes());
    let gate = fixture.script.gate(&name);
    let host = tokio::spawn(async move {
        let mut partition = take(&host).await;
        drive(&mut partition, &records).await;
        partition.close().await;
    });
    gate.reached(1).await;
    Holding { gate, host }
}

impl Holding {
    /// Let it go on to its end.
    pub async fn release(self) {
        assert!(!self.host.is_finished(), "the transaction was held all the time");
        self.gate.open();
        self.host.await.expect("the attacker's host");
    }
}

/// Offer records once; none of them may have to wait for another tenant, nor be put off.
async fn passes(fixture: &InboxFixture, consumer: &TestConsumer, records: &[Record]) {
    let mut partition = take(&fixture.host(consumer)).await;
    let mut settled = 0;
    while settled < records.len() {
        let answer = timeout(DEADLINE, partition.process(&records[settled..])).await;
        match answer.unwrap_or_else(|_| panic!("{HELD_UP}: no answer")) {
            Ok(more) => settled += more,
            Err(error) => panic!("{HELD_UP}: {error}"),
        }
    }
    partition.close().await;
    for row in fixture.rows().await {
        if records.iter().any(|record| record.headers[0].1 == row.message_id.as_bytes()) {
            assert_eq!(row.state(), ("completed", None, 1), "{HELD_UP}: {}", row.message_id);
        }
    }
}

/// Ids of one tenant for the locks of another tenant's messages, and of what its messages are in
/// order with.
pub async fn strangers(fixture: InboxFixture, seed: u64) {
    println!("seed {seed}");
    let mut forger = Forger::new(seed);
    let (victim, evil) = (fixture.tenant("victim", "").await, fixture.tenant("evil", "").await);
    let plain = fixture.consumer(&victim, "plain", "").await;
    let ordered = fixture.consumer(&victim, "ordered", "order = 'key'").await;
    let attacks = fixture.consumer(&evil, "attacks", PATIENT).await;
    let ids: Vec<_> = (0..24).map(|n| format!("order-{n}-{:x}", forger.number())).collect();
    let keys: Vec<_> = (0..24).map(|n| format!("account-{n}-{:x}", forger.number())).collect();
    let of_messages = ids.iter().map(|id| hash(id, plain.row.consumer_id.into()));
    let of_keys = keys.iter().map(|key| ordering(&ordered, key));
    let numbers: Vec<_> = of_messages.chain(of_keys).collect();
    let forged = numbers.iter().map(|number| forger.text(*number, attacks.row.consumer_id.into()));
    let forged: Vec<_> = (0..).zip(forged).map(|(offset, id)| record(offset, &id, "")).collect();
    // The generator is PostgreSQL's hash undone, not something like it.
    let query = sqlx::query_scalar(
        "SELECT array_agg(hashtextextended(id, $2) ORDER BY n) FROM unnest($1::text[]) WITH \
            ORDINALITY AS u(id, n)",
    );
    let made: Vec<_> = forged
        .iter()
        .map(|record| String::from_utf8_lossy(&record.headers[0].1).into_owned())
        .collect();
    let found: Vec<i64> = query
        .bind(made)
        .bind(i64::from(attacks.row.consumer_id))
        .fetch_one(&fixture.pool)
        .await
        .expect("hashes");
    assert_eq!(found, numbers);

    let holding = hold(&fixture, &attacks, forged).await;
    let messages: Vec<_> = (0..).zip(&ids).map(|(offset, id)| record(offset, id, "")).collect();
    passes(&fixture, &plain, &messages).await;
    let messages: Vec<_> = (0..)
        .zip(&keys)
        .map(|(offset, key)| of_key(offset, &format!("of {key}"), key, ""))
        .collect();
    passes(&fixture, &ordered, &messages).await;
    holding.release().await;
    fixture.finish().await;
}

/// Keys of two consumers, of whom one is the victim, whose numbers have one half in common.
pub async fn keys(fixture: InboxFixture, seed: u64) {
    const KEYS: usize = 200_000;
    println!("seed {seed}");
    let (victim, evil) = (fixture.tenant("victim", "").await, fixture.tenant("evil", "").await);
    let ordered = fixture.consumer(&victim, "ordered", "order = 'key'").await;
    let attacks = fixture.consumer(&evil, "attacks", &format!("order = 'key'\n{PATIENT}")).await;
    let key = |n: usize| format!("{seed:x}-{n}");
    let halves = |consumer: &TestConsumer, shift: u32| -> HashMap<i32, usize> {
        (0..KEYS).map(|n| ((ordering(consumer, &key(n)) >> shift) as i32, n)).collect()
    };
    // Each half has nine pairs that meet, give or take three.
    let mut pairs = Vec::new();
    for shift in [32, 0] {
        let (ours, theirs) = (halves(&ordered, shift), halves(&attacks, shift));
        pairs.extend(
            ours.iter().filter_map(|(half, ours)| Some((*ours, *theirs.get(half)?))).take(16),
        );
    }
    assert!(!pairs.is_empty(), "no keys meet; another seed has some");
    let forged = (0..)
        .zip(&pairs)
        .map(|(offset, (_, theirs))| of_key(offset, &format!("a{offset}"), &key(*theirs), ""))
        .collect();
    let holding = hold(&fixture, &attacks, forged).await;
    let messages: Vec<_> = (0..)
        .zip(&pairs)
        .map(|(offset, (ours, _))| of_key(offset, &format!("v{offset}"), &key(*ours), ""))
        .collect();
    passes(&fixture, &ordered, &messages).await;
    holding.release().await;
    fixture.finish().await;
}

/// Messages of one consumer whose ids share locks, in one batch: each is a message of its own, and
/// a duplicate is one.
pub async fn neighbours(fixture: InboxFixture, seed: u64) {
    println!("seed {seed}");
    let mut forger = Forger::new(seed);
    let consumer = fixture.simple("", "").await;
    let consumer_id = i64::from(consumer.row.consumer_id);
    let mut records = Vec::new();
    for group in 0..4_usize {
        let number = forger.number();
        // Two of the whole number, and two of its upper half.
        let mut ids = vec![forger.text(number, consumer_id), forger.text(number, consumer_id)];
        ids.extend((0..2).map(|_| forger.text_of_half((number >> 32) as i32, consumer_id)));
        ids.push(ids[group].clone());
        records.extend(ids);
    }
    let distinct: std::collections::BTreeSet<_> = records.iter().cloned().collect();
    assert_eq!((records.len(), distinct.len()), (20, 16));
    let batch: Vec<_> = (0..).zip(&records).map(|(offset, id)| record(offset, id, "")).collect();
    deliver(&fixture.host(&consumer), &batch).await;
    for id in &distinct {
        let row = fixture.find(&consumer, id).await;
        assert!(
            row.is_some_and(|row| row.state() == ("completed", None, 1)),
            "{MISTAKEN}: `{id}` did not run"
        );
        assert_eq!(fixture.effects(&consumer, id).await, 1, "{MISTAKEN}: `{id}`");
    }
    fixture.finish().await;
}

/// Two claims of other ids, which share two locks that their ids name in opposite orders.
pub async fn crossed(fixture: InboxFixture, seed: u64) {
    println!("seed {seed}");
    let mut forger = Forger::new(seed);
    let consumer = fixture.simple("", "").await;
    let consumer_id = i64::from(consumer.row.consumer_id);
    let (low, high) = (forger.number().min(-2), forger.number().max(2));
    let mut of = |number: i64, is_fit: &dyn Fn(&str) -> bool| loop {
        let id = forger.text(number, consumer_id);
        if is_fit(&id) {
            break id;
        }
    };
    let (held, any) = (of(high, &|_| true), of(low, &|_| true));
    let after = of(high, &|id| id > any.as_str());
    let pivot = of(high, &|_| true);
    let before = of(low, &|id| id > pivot.as_str());
    // By id: `pivot` (high) before `before` (low); `any` (low) before `after` (high).
    let mut holder = Guest::begin(&fixture, &consumer).await;
    holder.claim(&[&held]).await.expect("a claim");
    let mut claims = Vec::new();
    const WAITING: &str = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = \
        l.database \
        WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted";
    for (waiting, ids) in [(1, [pivot, before]), (2, [any, after])] {
        let mut guest = Guest::begin(&fixture, &consumer).await;
        guest.execute("SET lock_timeout = '30s'").await.expect("a setting");
        claims.push(tokio::spawn(async move {
            let ids: Vec<_> = ids.iter().map(String::as_str).collect();
            let claimed = guest.claim(&ids).await.map(drop);
            guest.execute("ROLLBACK").await.expect("ROLLBACK");
            claimed
        }));
        fixture.until(&format!("({WAITING}) = {waiting}")).await;
    }
    holder.execute("ROLLBACK").await.expect("ROLLBACK");
    for claim in claims {
        if let Err(error) = claim.await.expect("a claim") {
            panic!("{DEADLOCK}: {error}");
        }
    }
    drop(holder);
    fixture.finish().await;
}
