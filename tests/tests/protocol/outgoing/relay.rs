//! Relays, step by step with the database's functions: one of them has a message at a time, and a
//! lane is sent in its order.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use oncebox_control::{NewJob, OutgoingAction};
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    job::{carry_out, outgoing_job, these},
    outgoing::{
        LeasedOutgoing, OutgoingRow, StepRelay, caused_by, emitting, emitting_host, outgoing,
    },
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::{
    task::JoinHandle,
    time::{Duration, Instant, sleep},
};

const TO: &str = "kafka:orders.out";

/// A destination that records what arrives, in the order in which it does.
#[derive(Default)]
struct Destination {
    arrived: Mutex<Vec<String>>,
    /// Messages that are on their way.
    under_way: Mutex<BTreeSet<String>>,
}

impl Destination {
    fn begin(&self, id: &str) {
        let is_new = self.under_way.lock().unwrap().insert(id.to_owned());
        assert!(is_new, "two relays send one message at a time: {id}");
    }

    fn arrive(&self, id: &str) {
        self.arrived.lock().unwrap().push(id.to_owned());
        self.under_way.lock().unwrap().remove(id);
    }
}

/// How far a relay comes with its last batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// It does not die.
    Never,
    /// It has leased, and sent nothing.
    Leased,
    /// It has sent some, and said so of none.
    Sent,
}

/// Sends until everything is settled, or until it dies in its third batch. Returns what it had sent
/// by then without saying so.
async fn run(
    relay: StepRelay,
    to: Arc<Destination>,
    death: Death,
    is_done: Arc<AtomicBool>,
    seed: u64,
) -> Vec<LeasedOutgoing> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut batches = 0;
    while !is_done.load(Ordering::SeqCst) {
        let leased = relay.lease(TO, rng.random_range(1..8)).await;
        relay.reclaim().await;
        if leased.is_empty() {
            sleep(Duration::from_millis(2)).await;
            continue;
        }
        batches += 1;
        let dies = death != Death::Never && batches == 3;
        if dies && death == Death::Leased {
            return Vec::new();
        }
        for row in &leased {
            to.begin(&row.id);
            sleep(Duration::from_micros(rng.random_range(0..800))).await;
            to.arrive(&row.id);
        }
        if dies {
            return leased;
        }
        // Together, or each by itself.
        if rng.random_bool(0.5) {
            assert_eq!(relay.mark(&leased, "completed").await, leased.len() as i64);
        } else {
            for row in &leased {
                assert_eq!(relay.mark(std::slice::from_ref(row), "completed").await, 1);
            }
        }
    }
    Vec::new()
}

/// Messages of five keys and without one, some of them due after those that are emitted later.
fn log(rng: &mut StdRng, messages: usize) -> Vec<oncebox_model::record::Record> {
    let line = |rng: &mut StdRng| {
        let key = match rng.random_range(0..6) {
            0 => String::new(),
            key => format!(" key=k{key}"),
        };
        let due = match rng.random_range(0..4) {
            0 => format!(" after={}", rng.random_range(1..60)),
            _ => String::new(),
        };
        format!("emit {TO}{key}{due}")
    };
    let of = |number: usize, rng: &mut StdRng| {
        let lines: Vec<_> = (0..rng.random_range(1..4)).map(|_| line(rng)).collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        emitting(number as i64, &format!("m{number}"), &lines)
    };
    (0..messages).map(|number| of(number, rng)).collect()
}

/// Of each lane, the ids in the order in which they are to arrive: by due time, then by emit.
async fn lanes(fixture: &InboxFixture) -> BTreeMap<i64, Vec<String>> {
    let rows: Vec<(i64, String)> = sqlx::query_as(
        "SELECT lane, id FROM oncebox.outgoing WHERE lane IS NOT NULL ORDER BY due_at, position",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    let mut lanes: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for (lane, id) in rows {
        lanes.entry(lane).or_default().push(id);
    }
    lanes
}

/// What could go wrong: two relays send one message, or two of a lane at a time; what a relay
/// leased that died is lost, or is passed by what comes after it. S0-025, S1-037, S3-020.
#[tokio::test(flavor = "multi_thread")]
async fn two_relays_send_each_message_once_and_each_lane_in_order_while_one_dies() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = emitting_host(&fixture, &consumer);
    let mut deaths = 0;
    for seed in 0..12 {
        let death = [Death::Leased, Death::Sent, Death::Never][seed as usize % 3];
        let mut rng = StdRng::seed_from_u64(seed);
        deliver(&host, &log(&mut rng, 40)).await;
        let expected: BTreeSet<_> =
            outgoing(&fixture).await.into_iter().map(|row| row.id).collect();
        let lanes = lanes(&fixture).await;
        let (to, is_done) = (Arc::<Destination>::default(), Arc::new(AtomicBool::new(false)));
        let start = |name: &str, death, seed| {
            let relay = StepRelay::new(&fixture, name, &[&consumer]);
            tokio::spawn(run(relay, to.clone(), death, is_done.clone(), seed))
        };
        let mortal = start("mortal", death, 2 * seed);
        let other = start("other", Death::Never, 2 * seed + 1);
        let has_died = settle(&fixture, &consumer, &mortal).await;
        is_done.store(true, Ordering::SeqCst);
        let unsaid = mortal.await.unwrap();
        other.await.unwrap();
        deaths += usize::from(has_died);
        let arrived = to.arrived.lock().unwrap().clone();
        // S0-025, S1-037, S3-020.
        check_arrivals(&arrived, &expected, &unsaid, &lanes, seed);
        assert!(outgoing(&fixture).await.iter().all(|row| row.state() == ("completed", None)));
        fixture.execute("DELETE FROM oncebox.outgoing; DELETE FROM oncebox.inbox").await;
        let schema = &consumer.tenant.schema_name;
        fixture.execute(format!("DELETE FROM {schema}.effect")).await;
    }
    assert!(deaths > 2, "{deaths} relays died of 8");
    fixture.finish().await;
}

/// Waits until every outgoing message is settled. Where a relay dies before that, its leases run
/// out. Returns whether it died.
async fn settle<T>(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    mortal: &JoinHandle<T>,
) -> bool {
    let (deadline, mut has_died) = (Instant::now() + DEADLINE, false);
    while outgoing(fixture).await.iter().any(|row| !row.settled) {
        assert!(Instant::now() < deadline, "not sent: {:#?}", outgoing(fixture).await);
        if !has_died && mortal.is_finished() {
            StepRelay::new(fixture, "mortal", &[consumer]).dies().await;
            has_died = true;
        }
        sleep(Duration::from_millis(5)).await;
    }
    has_died
}

fn check_arrivals(
    arrived: &[String],
    expected: &BTreeSet<String>,
    unsaid: &[LeasedOutgoing],
    lanes: &BTreeMap<i64, Vec<String>>,
    seed: u64,
) {
    let mut times: BTreeMap<&String, usize> = BTreeMap::new();
    arrived.iter().for_each(|id| *times.entry(id).or_default() += 1);
    let ids: BTreeSet<_> = times.keys().map(|id| (*id).clone()).collect();
    assert_eq!(ids, *expected, "seed {seed}: messages are lost, or made up");
    for (id, count) in &times {
        let is_unsaid = unsaid.iter().any(|row| row.id == **id);
        assert_eq!(*count, 1 + usize::from(is_unsaid), "seed {seed}: arrivals of {id}");
    }
    for (lane, order) in lanes {
        let mut first: Vec<&String> = Vec::new();
        for id in arrived.iter().filter(|id| order.contains(id)) {
            if !first.contains(&id) {
                first.push(id);
            }
        }
        assert!(
            first.iter().copied().eq(order),
            "seed {seed}: a message of lane {lane} passed another: {first:?}, not {order:?}"
        );
    }
}

/// What could go wrong: a relay whose lease ran out says of a message, which another relay has by
/// then, that it arrived or failed; the other's word is then worth nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_lease_confirms_nothing() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let line = format!("emit {TO} key=k");
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[&line])]).await;
    let [slow, quick] = ["slow", "quick"].map(|name| StepRelay::new(&fixture, name, &[&consumer]));
    let stale = slow.lease(TO, 1).await;
    assert_eq!((stale.len(), stale[0].epoch), (1, 1));
    assert_eq!(quick.lease(TO, 1).await, [], "a leased message is leased");
    assert_eq!(quick.reclaim().await, 0, "a lease that holds is taken back");
    slow.dies().await;
    assert_eq!(quick.reclaim().await, 1);
    let row = caused_by(&fixture, "a").await;
    assert_eq!(row.state(), ("failed_retryable", Some("lease_expired")));
    assert_eq!(row.attempts, 1, "it may have arrived, so that the attempt counts");
    let fresh = quick.lease(TO, 1).await;
    assert_eq!((fresh.len(), fresh[0].epoch), (1, 2));
    for status in ["completed", "failed_retryable", "parked", "received"] {
        assert_eq!(slow.mark(&stale, status).await, 0, "a stale lease wrote `{status}`");
        assert_eq!(caused_by(&fixture, "a").await.status, "in_progress");
    }
    assert_eq!(quick.mark(&fresh, "completed").await, 1);
    for relay in [&slow, &quick] {
        for status in ["failed_retryable", "parked", "completed"] {
            assert_eq!(relay.mark(&fresh, status).await, 0, "a settled message is written again");
            assert_eq!(relay.mark(&stale, status).await, 0, "a settled message is written again");
        }
    }
    assert_eq!(caused_by(&fixture, "a").await.state(), ("completed", None));
    fixture.finish().await;
}

/// An operator acts on messages of `orders`.
async fn act(fixture: &InboxFixture, action: OutgoingAction, ids: &[&String]) -> i64 {
    let ids: Vec<_> = ids.iter().map(|id| id.as_str()).collect();
    let job = NewJob { consumer: Some("orders".to_owned()), ..outgoing_job(action, these(&ids)) };
    carry_out(&fixture.control, "acme", &job).await.unwrap().changed
}

fn ids_of(leased: &[LeasedOutgoing]) -> Vec<&String> {
    leased.iter().map(|row| &row.id).collect()
}

/// What could go wrong: a parked message holds its lane where its consumer says `go_on`, or holds
/// nothing where it says `stop`; a redrive loses its place in the lane; a discarded message is
/// sent, or still holds the lane; an operator takes what a relay is sending.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_holds_its_lane_where_its_consumer_says_so() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let line = format!("emit {TO} key=k");
    let other = format!("emit {TO} key=other");
    let lines = [line.as_str(), &line, &line, &line, &other];
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &lines)]).await;
    let rows = outgoing(&fixture).await;
    let ids: Vec<_> = rows.iter().map(|row| &row.id).collect();
    let goes_on = StepRelay::new(&fixture, "relay", &[&consumer]);
    let stops = goes_on.stopping();

    let heads = stops.lease(TO, 100).await;
    assert_eq!(BTreeSet::from_iter(ids_of(&heads)), BTreeSet::from([ids[0], ids[4]]));
    assert_eq!(act(&fixture, OutgoingAction::Discard, &[ids[0]]).await, 0, "it is being sent");
    assert_eq!(stops.mark(&heads, "parked").await, 2);
    assert_eq!(caused_states(&fixture).await[0], ("parked".to_owned(), Some("refused".to_owned())));
    assert_eq!(stops.lease(TO, 100).await, [], "a parked head holds its lane");

    // An operator lets it go again; it has its old place.
    assert_eq!(act(&fixture, OutgoingAction::Redrive, &[ids[0]]).await, 1);
    assert_eq!(outgoing(&fixture).await[0].attempts, 0);
    let head = stops.lease(TO, 100).await;
    assert_eq!(ids_of(&head), [ids[0]]);
    assert_eq!(stops.mark(&head, "parked").await, 1);
    // Or gives it up, and the next one is the head.
    assert_eq!(act(&fixture, OutgoingAction::Discard, &[ids[0]]).await, 1);
    assert_eq!(act(&fixture, OutgoingAction::Redrive, &[ids[0]]).await, 0, "it is given up");
    let head = stops.lease(TO, 100).await;
    assert_eq!(ids_of(&head), [ids[1]]);
    assert_eq!(stops.mark(&head, "parked").await, 1);
    // Where parked messages hold nothing, the next one follows at once.
    let next = goes_on.lease(TO, 100).await;
    assert_eq!(ids_of(&next), [ids[2]]);
    assert_eq!(goes_on.mark(&next, "completed").await, 1);
    assert_eq!(act(&fixture, OutgoingAction::Discard, &[ids[3], ids[4]]).await, 2);
    assert_eq!(goes_on.lease(TO, 100).await, [], "a discarded message is sent");

    let states: Vec<_> =
        caused_states(&fixture).await.into_iter().map(|(state, _)| state).collect();
    assert_eq!(states, ["discarded", "parked", "completed", "discarded", "discarded"]);
    let audit = "SELECT count(*) FROM oncebox.audit WHERE action IN ('outgoing.redrive', \
        'outgoing.discard') AND details->>'reason' = 'a test'";
    assert_eq!(fixture.number(audit).await, 5, "each job is in the audit log, once");
    let changed = "SELECT sum((details->>'messages')::int)::bigint FROM oncebox.audit WHERE \
        action = 'job.done'";
    assert_eq!(fixture.number(changed).await, 4, "with what it changed");
    fixture.finish().await;
}

async fn caused_states(fixture: &InboxFixture) -> Vec<(String, Option<String>)> {
    let state = |row: OutgoingRow| (row.status, row.reason);
    outgoing(fixture).await.into_iter().map(state).collect()
}

/// What could go wrong: messages of one key to two destinations, of two tenants, or of two keys
/// that share a hash wait for each other; or a message that is due later holds one that is due now.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_wait_for_no_other() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let beside = fixture.consumer(&consumer.tenant, "beside", "").await;
    let stranger = fixture.tenant("other", "").await;
    let theirs = fixture.consumer(&stranger, "orders", "").await;
    let lines = [
        "emit kafka:one key=k",
        "emit kafka:two key=k",
        "emit kafka:one key=l",
        "emit kafka:one",
        "emit kafka:one",
        "emit kafka:one key=k after=3600000",
        "emit kafka:one key=later after=3600000",
        "emit kafka:one key=later",
    ];
    for consumer in [&consumer, &beside, &theirs] {
        deliver(&emitting_host(&fixture, consumer), &[emitting(0, "a", &lines)]).await;
    }
    // Two keys with one hash.
    let clash = "UPDATE oncebox.outgoing l SET lane = k.lane FROM oncebox.outgoing k WHERE \
        k.consumer_id = l.consumer_id AND k.ordinal = 0 AND l.ordinal = 2";
    fixture.execute(clash).await;
    let ordinals = |leased: &[LeasedOutgoing], consumer_id: i32| -> BTreeSet<i32> {
        leased.iter().filter(|row| row.consumer_id == consumer_id).map(|row| row.ordinal).collect()
    };
    let own = StepRelay::new(&fixture, "relay", &[&consumer, &beside]);
    let leased = own.lease("kafka:one", 100).await;
    let (first, second) = (consumer.row.consumer_id, beside.row.consumer_id);
    assert_eq!(ordinals(&leased, first), BTreeSet::from([0, 2, 3, 4, 7]));
    // A lane is the tenant's, whichever of its consumers emits.
    assert_eq!(ordinals(&leased, second), BTreeSet::from([3, 4]));
    let leased = own.lease("kafka:two", 100).await;
    assert_eq!(ordinals(&leased, first), BTreeSet::from([1]));
    let leased = StepRelay::new(&fixture, "relay", &[&theirs]).lease("kafka:one", 100).await;
    assert_eq!(ordinals(&leased, theirs.row.consumer_id), BTreeSet::from([0, 2, 3, 4, 7]));
    fixture.finish().await;
}

/// Entries of indexes and rows of outgoing messages that scans of this transaction have returned.
async fn read_so_far(connection: &mut PgConnection) -> i64 {
    const READ: &str = "SELECT sum(pg_stat_get_xact_tuples_returned(r.id))::bigint FROM ( \
            SELECT i.inhrelid AS id FROM pg_inherits i \
            WHERE i.inhparent = 'oncebox.outgoing'::regclass \
            UNION ALL SELECT x.indexrelid FROM pg_inherits i JOIN pg_index x ON x.indrelid = \
                i.inhrelid WHERE i.inhparent = 'oncebox.outgoing'::regclass) r";
    sqlx::query_scalar(READ).fetch_one(connection).await.unwrap()
}

/// What could go wrong: a connection that first looked while nothing was due has plans that read
/// all due messages for each lease and each mark, so that a relay gets the slower the more it has
/// to send. What it plans by are the figures of an empty table, or of one that was vacuumed while
/// all was completed, when the index of what is open seems the smallest.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_reads_a_window_and_a_mark_its_rows_however_many_are_due() {
    for (completed, waiting) in [(0, 0), (3_000, 0), (3_000, 1_100)] {
        reads_what_it_needs(completed, waiting).await;
    }
}

/// With messages that are completed when it plans, and with those of one lane that are due first.
async fn reads_what_it_needs(completed: i64, waiting: i64) {
    const DUE: i64 = 6_000;
    const MOST: i32 = 10;
    /// The window of a lease.
    const WINDOW: i64 = 1_000;
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let relay = StepRelay::new(&fixture, "relay", &[&consumer]);
    let lease = relay.lease_statement(TO, MOST);
    let lease = || sqlx::query_as::<_, LeasedOutgoing>(AssertSqlSafe(lease.clone()));
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "m", &[&format!("emit {TO}")])])
        .await;
    /// Half of them have a key of their own each.
    const KEYS: &str = "CASE WHEN n % 2 = 0 THEN n::text END";
    let insert = |name: &str, count: i64, key: &str, state: &str| {
        format!(
            "INSERT INTO oncebox.outgoing (consumer_id, message_id, ordinal, bucket, id, \
                destination, key, lane, event_type, correlation_id, headers, due_at, status, \
                next_attempt_at, settled_at) \
             SELECT consumer_id, '{name}-' || n, 0, bucket, '{name}' || n, destination, k.key, \
                oncebox.outgoing_lane({}, destination, k.key), event_type, correlation_id, \
                headers, due_at, {state} \
             FROM oncebox.outgoing CROSS JOIN generate_series(1, {count}) n CROSS JOIN LATERAL \
                (SELECT convert_to({key}, 'UTF8')) AS k(key) \
             WHERE message_id = 'm'",
            consumer.tenant.tenant_id
        )
    };
    let mut connection = fixture.pool.acquire().await.unwrap();
    let only = relay.lease(TO, 1).await;
    assert_eq!(relay.mark_on(&mut *connection, &only, "completed").await, 1);
    if completed > 0 {
        fixture.execute(insert("done", completed, KEYS, "'completed', NULL, now()")).await;
        fixture.execute("VACUUM ANALYZE oncebox.outgoing").await;
    }
    assert!(lease().fetch_all(&mut *connection).await.unwrap().is_empty(), "now it has planned");
    fixture.execute(insert("wait", waiting, "'one'", "'received', due_at, NULL")).await;
    fixture.execute(insert("due", DUE, KEYS, "'received', due_at, NULL")).await;

    let mut tx = connection.begin().await.unwrap();
    let leased = lease().fetch_all(&mut *tx).await.unwrap();
    assert_eq!(leased.len(), MOST as usize);
    let by_lease = read_so_far(&mut tx).await;
    assert_eq!(relay.mark_on(&mut *tx, &leased, "completed").await, i64::from(MOST));
    let by_mark = read_so_far(&mut tx).await - by_lease;
    tx.commit().await.unwrap();
    drop(connection);
    // The window, the lanes of what may be leased, and the rows that are. Those that wait have one
    // before them each, and the first of them is compared with all.
    let beside = format!("beside {completed} completed and {waiting} waiting");
    let most = if waiting > 0 { 4 * WINDOW } else { 2 * WINDOW };
    assert!(by_lease <= most, "{beside} a lease read {by_lease}");
    assert!(by_mark <= 10 * i64::from(MOST), "{beside} a mark read {by_mark}");
    fixture.finish().await;
}

/// What could go wrong: a handler that cancels, an erasure or another relay holds the first due
/// messages locked, and a relay that wants few finds none but those, for as long as they are held.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_passes_messages_that_others_hold() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let relay = StepRelay::new(&fixture, "relay", &[&consumer]);
    let line = format!("emit {TO}");
    let lines: Vec<_> = (0..100).map(|_| line.as_str()).collect();
    let causes: Vec<_> =
        (0..3).map(|offset| emitting(offset, &format!("m{offset}"), &lines)).collect();
    deliver(&emitting_host(&fixture, &consumer), &causes).await;
    // More than the candidates of one turn of the lease.
    let mut holder = fixture.pool.begin().await.unwrap();
    const HELD: &str = "SELECT position FROM oncebox.outgoing ORDER BY next_attempt_at, position \
        LIMIT 250 FOR UPDATE";
    let held: Vec<i64> = sqlx::query_scalar(HELD).fetch_all(&mut *holder).await.unwrap();
    let leased = relay.lease(TO, 1).await;
    assert_eq!((held.len(), leased.len()), (250, 1));
    // It locks none beyond what it leases: all others are there for another relay.
    let mut tx = fixture.pool.begin().await.unwrap();
    let lease = relay.lease_statement(TO, 10);
    let lease = sqlx::query_as::<_, LeasedOutgoing>(AssertSqlSafe(lease));
    assert_eq!(lease.fetch_all(&mut *tx).await.unwrap().len(), 10);
    assert_eq!(relay.lease(TO, 100).await.len(), 50 - 1 - 10);
    tx.commit().await.unwrap();
    holder.rollback().await.unwrap();
    assert_eq!(relay.lease(TO, 500).await.len(), 250);
    fixture.finish().await;
}
