//! Random histories: deliveries, redeliveries, failures, operators, days that pass, and runs of
//! retention that end anywhere.

use super::*;
use oncebox_tests::aging::pass;

/// Histories of one run of the test.
const HISTORIES: u64 = 6;
/// Steps of a history.
const STEPS: usize = 40;
/// Days for which a completed message is surely remembered.
const REMEMBERED: i64 = 7;

const NOBODY_RETAINS: &str = "NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = \
    'oncebox retention' AND datname = current_database())";

/// A message of a history, as the test knows it.
#[derive(Debug, Clone)]
struct Known {
    record: Record,
    /// Days since it was settled for good; none while it is open, or was never delivered.
    settled: Option<i64>,
    is_delivered: bool,
    /// Whether it came again after it was forgotten.
    is_past_horizon: bool,
}

/// What could go wrong: in some order of states, ages, redeliveries, redrives and ends of the job an
/// open message is lost, one within the horizon runs twice, or one beyond it runs by itself. S2-017,
/// S4-013, S1-046.
#[tokio::test(flavor = "multi_thread")]
async fn any_history_keeps_what_it_must() {
    let seed: u64 =
        std::env::var("ONCEBOX_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("ONCEBOX_SEED={seed}");
    let (mut forgotten, mut removed) = (0, 0);
    for history in 0..HISTORIES {
        let (past_horizon, partitions) = one(seed.wrapping_add(history)).await;
        forgotten += past_horizon;
        removed += partitions;
    }
    println!("{forgotten} messages came after they were forgotten, {removed} partitions went");
    assert!(removed > 0, "no history reached its retention");
}

async fn one(seed: u64) -> (usize, i64) {
    let mut random = StdRng::seed_from_u64(seed);
    let fixture = InboxFixture::new().await;
    let order = ["", "order = 'key'"][random.random_range(0..2)];
    let rows = ["", "inbox = 'light'"][random.random_range(0..2)];
    let policy = format!("{order}\n{rows}\n{QUICK}");
    let consumer = fixture.simple("", &policy).await;
    let host = fixture.host(&consumer);
    let mut log: Vec<Known> = Vec::new();
    for step in 0..STEPS {
        match random.random_range(0..100) {
            0..30 => {
                for _ in 0..random.random_range(1..8) {
                    log.push(known(log.len() as i64, &mut random));
                }
                let new: Vec<_> = log.iter().filter(|known| !known.is_delivered).collect();
                let records: Vec<_> = new.iter().map(|known| known.record.clone()).collect();
                deliver(&host, &records).await;
            }
            30..50 if !log.is_empty() => {
                let from = random.random_range(0..log.len());
                let records: Vec<_> =
                    log[from..].iter().map(|known| known.record.clone()).collect();
                deliver(&host, &records).await;
            }
            50..60 => fixture.retry_until_settled(&host).await,
            60..65 => drop(act(&fixture, Action::Discard, &some(&log, &mut random)).await),
            65..70 => {
                let ids = some(&log, &mut random);
                let again: Vec<_> = ids
                    .into_iter()
                    .filter(|id| log.iter().any(|k| id_of(k) == *id && !k.is_past_horizon))
                    .collect();
                act(&fixture, Action::Redrive, &again).await;
            }
            70..82 => {
                let days = random.random_range(1..6);
                // No message enters a time that is over; here one is put there with its table gone.
                fixture.until(NOBODY_RETAINS).await;
                retain(&fixture).await;
                pass(&fixture.pool, days).await;
                for known in &mut log {
                    known.record.timestamp_ms -= days * 86_400_000;
                    known.settled = known.settled.map(|settled| settled + days);
                }
            }
            _ => {
                let open = open_rows(&fixture).await;
                // A process that dies anywhere in between, or two that begin together.
                let patience = Duration::from_millis(random.random_range(0..60));
                let _ = timeout(patience, retain(&fixture)).await;
                if random.random_bool(0.5) {
                    let _ = tokio::join!(retain(&fixture), retain(&fixture));
                }
                assert_eq!(open_rows(&fixture).await, open, "seed {seed}, step {step}: open rows");
            }
        }
        judge(&fixture, &consumer, &mut log, &format!("seed {seed}, step {step}")).await;
    }
    for known in log.iter().filter(|known| known.is_delivered) {
        let id = id_of(known);
        if fixture
            .find(&consumer, id)
            .await
            .is_none_or(|row| row.reason.as_deref() == Some("horizon"))
        {
            let schema = &consumer.tenant.schema_name;
            fixture.execute(format!("DELETE FROM {schema}.effect WHERE message_id = '{id}'")).await;
        }
    }
    let dropped = "SELECT count(*) FROM oncebox.removal WHERE state = 'dropped'";
    let dropped = fixture.number(dropped).await;
    fixture.finish().await;
    (log.iter().filter(|known| known.is_past_horizon).count(), dropped)
}

fn known(offset: i64, random: &mut StdRng) -> Known {
    let script = ["", "", "", "park", "reject", "before 2 trap", "retry 1"];
    let script = script[random.random_range(0..script.len())];
    let record = Record {
        key: Some(vec![b"abc"[random.random_range(0..3)]]),
        ..record(offset, &format!("m{offset}"), script)
    };
    Known { record, settled: None, is_delivered: false, is_past_horizon: false }
}

fn id_of(known: &Known) -> &str {
    std::str::from_utf8(&known.record.headers[0].1).unwrap()
}

fn some<'a>(log: &'a [Known], random: &mut StdRng) -> Vec<&'a str> {
    log.iter().filter(|_| random.random_bool(0.3)).map(id_of).collect()
}

/// The messages that must stay, with what makes them curable.
async fn open_rows(fixture: &InboxFixture) -> Vec<(String, String, Option<Vec<u8>>)> {
    sqlx::query_as(
        "SELECT message_id, status, payload FROM oncebox.inbox WHERE status NOT IN ('completed', \
            'skipped', 'discarded') ORDER BY message_id",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap()
}

/// Compares the inbox and the effects with what the test knows.
async fn judge(fixture: &InboxFixture, consumer: &TestConsumer, log: &mut [Known], at: &str) {
    let rows: BTreeMap<_, _> =
        fixture.rows().await.into_iter().map(|row| (row.message_id.clone(), row)).collect();
    let effects = format!(
        "SELECT message_id, count(*) FROM {}.effect GROUP BY 1",
        consumer.tenant.schema_name
    );
    let effects: Vec<(String, i64)> =
        sqlx::query_as(AssertSqlSafe(effects)).fetch_all(&fixture.pool).await.unwrap();
    for (id, count) in &effects {
        assert_eq!(*count, 1, "{at}: `{id}` had its effect more than once");
    }
    let highest = rows.values().map(|row| row.offset).max();
    for known in log.iter_mut() {
        let id = id_of(known).to_owned();
        known.is_delivered |= highest.is_some_and(|highest| known.record.offset <= highest);
        let Some(row) = rows.get(&id) else {
            let Some(days) = known.settled else {
                assert!(!known.is_delivered, "{at}: `{id}` was open, and is lost");
                continue;
            };
            assert!(days >= REMEMBERED, "{at}: `{id}` is gone after {days} days");
            continue;
        };
        let is_forgotten = row.reason.as_deref() == Some("horizon") && row.status == "parked";
        if is_forgotten && !known.is_past_horizon {
            let days =
                known.settled.unwrap_or_else(|| panic!("{at}: `{id}` never ran and is parked"));
            assert!(days >= REMEMBERED, "{at}: `{id}` is known for {days} days only");
            known.is_past_horizon = true;
        }
        let is_settled = ["completed", "skipped", "discarded"].contains(&&*row.status);
        if !is_settled && !known.is_past_horizon {
            known.settled = None;
        } else if is_settled && known.settled.is_none() {
            known.settled = Some(0);
        }
    }
}
