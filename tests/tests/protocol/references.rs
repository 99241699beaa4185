//! Messages that refer to their payloads: the host fetches them under the tenant's rights, within
//! bounds, before the transaction of the message.

// Waits: for stores, for other fetches, for memory, and for a stop.
mod waits;
// Faults that are no message's: nothing is counted.
mod host_faults;
// References as identity: collisions, edits, light rows, references in payloads.
mod identity;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use oncebox_control::{
    Action, Control, Edit, FetchLimits, HostLimits, MasterKey, NewTenantStore, Stores, Tenant,
};
use oncebox_inbox::{Budget, ConsumerInbox, SessionSettings, Sessions, retry};
use oncebox_model::{
    error::InboxError,
    record::Record,
    reference::{FetchBounds, FetchError, ReferenceFault, ReferenceFetcher},
};
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, both, deliver, drive, record, step, take},
    job::{carry_out, inbox_job, these},
    s3::{ACCESS_KEY_ID, BUCKET, S3Server, SECRET_ACCESS_KEY},
    wait::{self, DEADLINE},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Retries without a pause, and how long a fetch of the policy may take.
const QUICK: &str = "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }";
/// What a message carries beside its reference.
const CARRIED: &str = "# by reference";

fn stores(server: &S3Server, stall: Duration) -> Stores {
    limited(server, FetchLimits { stall, ..FetchLimits::default() })
}

/// Two stores, which are one server.
fn limited(server: &S3Server, limits: FetchLimits) -> Stores {
    let named = |name: &str| (name.to_owned(), server.store());
    Stores::new(BTreeMap::from([named("docs"), named("slow")]), limits)
}

/// A tenant that may read below `in/`.
async fn tenant(fixture: &mut InboxFixture, server: &S3Server, stall: Duration) -> Tenant {
    fixture.control = fixture.control.clone().fetching_from(stores(server, stall));
    let tenant = fixture.tenant("acme", "").await;
    allow(fixture, &tenant).await;
    tenant
}

async fn allow(fixture: &InboxFixture, tenant: &Tenant) {
    allow_in(fixture, tenant, "docs").await;
}

async fn allow_in(fixture: &InboxFixture, tenant: &Tenant, store: &str) {
    let new = NewTenantStore {
        store: store.to_owned(),
        bucket: BUCKET.to_owned(),
        prefix: "in".to_owned(),
        access_key_id: ACCESS_KEY_ID.to_owned(),
        secret_access_key: SECRET_ACCESS_KEY.to_owned(),
    };
    fixture.control.tenant_stores().set(&tenant.name, &new).await.unwrap();
}

fn policy(bounds: &str, more: &str) -> String {
    format!("reference = {{ store = 'docs', source = {{ header = 'ref' }}{bounds} }}\n{more}")
}

fn fetcher(fixture: &InboxFixture, consumer: &TestConsumer) -> Arc<dyn ReferenceFetcher> {
    let store = &consumer.policy.reference.as_ref().unwrap().store;
    fixture.control.tenant_stores().fetcher(&consumer.tenant, store)
}

fn host(fixture: &InboxFixture, consumer: &TestConsumer) -> Arc<ConsumerInbox> {
    let host = fixture.host(consumer);
    host.fetch_with(fetcher(fixture, consumer));
    host
}

/// A record that refers to its payload.
fn referring(offset: i64, id: &str, reference: &str) -> Record {
    let mut record = record(offset, id, CARRIED);
    record.headers.push(("ref".to_owned(), reference.as_bytes().to_vec()));
    record
}

async fn redrive(fixture: &InboxFixture, consumer: &TestConsumer, id: &str) {
    let redrive = inbox_job(Action::Redrive, &consumer.row.name, these(&[id]));
    let done = carry_out(&fixture.control, &consumer.tenant.name, &redrive).await.unwrap();
    assert_eq!(done.changed, 1, "{id}");
}

/// What could go wrong: a handler gets the reference, or what an earlier run got; the row keeps what
/// was fetched; a message that carries its payload itself is not run. S0-051.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_is_fetched_for_each_run_and_only_the_reference_is_kept() {
    both(fetched_for_each_run).await;
}

async fn fetched_for_each_run(mut fixture: InboxFixture) {
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    let policy = policy("", &format!("payload = 'all'\n{QUICK}"));
    let consumer = fixture.consumer(&tenant, "orders", &policy).await;
    let host = host(&fixture, &consumer);
    server.put_key("in/plain", Some("result 5"));
    server.put_key("in/twice", Some("before 2 other\nresult 6"));
    server.put_key("in/refused", Some("reject"));
    let log = [
        referring(0, "plain", "s3://kept/in/plain"),
        referring(1, "twice", "s3://kept/in/twice"),
        record(2, "carries", "result 7"),
        referring(3, "refused", "s3://kept/in/refused"),
    ];
    deliver(&host, &log).await;
    fixture.retry_until_settled(&host).await;
    for (id, attempts, result) in [("plain", 1, 5), ("twice", 2, 6), ("carries", 1, 7)] {
        let row = fixture.row(&consumer, id).await;
        assert_eq!(row.state(), ("completed", None, attempts), "{id}");
        // S0-051.
        assert_eq!(row.result, Some(result.into()), "{id}: it ran by another payload");
        let kept = if id == "carries" { "result 7" } else { CARRIED };
        assert_eq!(row.payload.as_deref(), Some(kept.as_bytes()), "{id}");
        assert_eq!(fixture.effects(&consumer, id).await, 1, "{id}");
    }
    // One fetch for each run, however often its transaction was repeated.
    assert_eq!((server.asked("in/plain"), server.asked("in/twice")), (1, 2));

    // Another object stands there when it runs again, on another host.
    assert_eq!(fixture.row(&consumer, "refused").await.state().0, "failed_terminal");
    server.put_key("in/refused", Some("result 8"));
    redrive(&fixture, &consumer, "refused").await;
    let other = self::host(&fixture, &consumer);
    fixture.retry_until_settled(&other).await;
    let row = fixture.row(&consumer, "refused").await;
    assert_eq!((row.status.as_str(), row.result), ("completed", Some(8.into())));

    // A known message does not run again, whatever its object is by now.
    server.put_key("in/plain", None);
    deliver(&other, &log).await;
    assert_eq!(fixture.row(&consumer, "plain").await.state(), ("completed", None, 1));
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.inbox").await, 4);
    fixture.finish().await;
}

/// Reason of each message that can never run by its reference, and a part of what the row says.
const NEVER: [(&str, &str, &str, &str); 6] = [
    ("malformed", "ftp://kept/in/a", "reference_malformed", "a reference is `s3://bucket/key`"),
    ("elsewhere", "s3://other/in/a", "reference_not_allowed", "not in the bucket"),
    ("outside", "s3://kept/out/a", "reference_not_allowed", "not below the prefix"),
    ("denied", "s3://kept/in/denied", "reference_not_allowed", "refuses `s3://kept/in/denied`"),
    ("missing", "s3://kept/in/missing", "reference_missing", "has no object"),
    ("large", "s3://kept/in/large", "reference_too_large", "has 21 bytes"),
];

/// References that leave the prefix by some spelling.
fn ways_out() -> Vec<String> {
    let mut ways = Vec::new();
    for dots in ["..", "%2e%2e", "%2E.", "%252e%252e"] {
        for slash in ["/", "%2f", "%5c", "//"] {
            for steps in 1..3 {
                let back = format!("{dots}{slash}").repeat(steps);
                ways.push(format!("s3://kept/in/{back}out/a"));
                ways.push(format!("s3://kept/in/x/{back}{back}out/a"));
            }
        }
    }
    ways
}

/// What could go wrong: a message without a payload runs, is lost, is tried for ever or holds up the
/// others; its row does not say what to do; a reference reaches what the tenant may not read.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_fetched_is_parked_by_its_reason() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    server.put_key("out/a", Some("result 1"));
    server.put_key("in/denied", Some("result 1"));
    server.deny("in/denied");
    server.put_key("in/large", Some("result 1\n# 2345678901"));
    server.put_key("in/fits", Some("result 1\n# 234567890"));
    for (name, ack) in [("commits", "after_commit"), ("inserts", "after_insert")] {
        let policy = policy(", bytes_max = 20", &format!("ack = '{ack}'\n{QUICK}"));
        let consumer = fixture.consumer(&tenant, name, &policy).await;
        let host = host(&fixture, &consumer);
        let ways = ways_out();
        let never = NEVER.iter().map(|(id, reference, ..)| ((*id).to_owned(), *reference));
        let out = (0..).zip(&ways).map(|(n, way)| (format!("way-{n}"), way.as_str()));
        let all = never.chain(out).chain([("after".to_owned(), "s3://kept/in/fits")]);
        let log: Vec<_> =
            (0..).zip(all).map(|(at, (id, reference))| referring(at, &id, reference)).collect();
        deliver(&host, &log).await;
        fixture.retry_until_settled(&host).await;
        for (id, _, reason, says) in NEVER {
            let row = fixture.row(&consumer, id).await;
            assert_eq!(row.state(), ("parked", Some(reason), 1), "{id}: {row:?}");
            let said = row.last_error.unwrap();
            assert!(said.contains(says), "{id}: {said}");
            assert!(!said.contains(SECRET_ACCESS_KEY), "{said}");
        }
        for (n, way) in ways.iter().enumerate() {
            let row = fixture.row(&consumer, &format!("way-{n}")).await;
            let expected = ("parked", Some("reference_not_allowed"), 1);
            assert_eq!(row.state(), expected, "{way}");
        }
        assert_eq!(fixture.row(&consumer, "after").await.state(), ("completed", None, 1));
        let stray: Vec<_> =
            server.gets().into_iter().filter(|path| !path.starts_with("/kept/in/")).collect();
        assert!(stray.is_empty(), "the host asked for {stray:?}");

        let found = fixture.control.messages().message_history("acme", name, "missing").await;
        let next = found.unwrap().next;
        assert!(next.text.contains("Put the object there"), "{next:?}");
        assert!(next.commands.iter().any(|command| command.contains("redrive")), "{next:?}");

        // The object appears, and the bound is raised.
        server.put_key("in/missing", Some("result 2"));
        let mut raised = consumer.clone();
        raised.policy.reference.as_mut().unwrap().bytes_max = 21;
        let host = self::host(&fixture, &raised);
        for id in ["missing", "large"] {
            redrive(&fixture, &consumer, id).await;
            fixture.retry_until_settled(&host).await;
            assert_eq!(fixture.row(&consumer, id).await.status, "completed", "{id}");
            assert_eq!(fixture.effects(&consumer, id).await, 1, "{id}");
        }
        server.put_key("in/missing", None);
    }
    fixture.finish().await;
}

/// What could go wrong: a store that is away parks messages, or costs them no attempt and is asked
/// for ever; a store that sends a byte now and then holds a message for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_deliver_is_tried_again_by_the_ladder() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_millis(50)).await;
    let stalls = fixture.consumer(&tenant, "stalls", &policy("", QUICK)).await;
    let late = fixture.consumer(&tenant, "late", &policy(", timeout_ms = 1", QUICK)).await;
    for (consumer, says) in [(&stalls, "did not deliver"), (&late, "`reference.timeout_ms`")] {
        server.put_key("in/held", Some("result 1"));
        server.hold("in/held");
        let host = host(&fixture, consumer);
        let log = [referring(0, "held", "s3://kept/in/held"), record(1, "behind", "")];
        deliver(&host, &log).await;
        let row = fixture.row(consumer, "held").await;
        let reason = Some("reference_unavailable");
        assert_eq!(row.state(), ("failed_retryable", reason, 1));
        let said = row.last_error.unwrap();
        assert!(said.contains(says), "{said}");
        assert_eq!(fixture.row(consumer, "behind").await.status, "completed", "it is held up");
        fixture.retry_until_settled(&host).await;
        assert_eq!(fixture.row(consumer, "held").await.state(), ("failed_terminal", reason, 2));
        server.release("in/held");
    }
    redrive(&fixture, &stalls, "held").await;
    let patient = fixture.control.clone().fetching_from(stores(&server, Duration::from_secs(10)));
    let host = fixture.host(&stalls);
    host.fetch_with(patient.tenant_stores().fetcher(&tenant, "docs"));
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&stalls, "held").await.status, "completed");
    assert_eq!(fixture.effects(&stalls, "held").await, 1);
    fixture.finish().await;
}

/// A host of several tenants, which share its few places.
fn sharing(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    budget: &Arc<Budget>,
) -> Arc<ConsumerInbox> {
    let sessions = Sessions::of(
        fixture.control.tenant_databases().session_target(&consumer.tenant).unwrap(),
        &SessionSettings::default(),
        budget.clone(),
    );
    let host = ConsumerInbox::new(
        consumer.row.consumer_id,
        consumer.tenant.name.clone(),
        consumer.row.name.clone(),
        consumer.policy.clone(),
        "host".to_owned(),
        sessions,
        fixture.scripts(),
    );
    host.fetch_with(fetcher(fixture, consumer));
    host
}

/// What could go wrong: a fetch holds a connection, a transaction or a place of the host, so that
/// one tenant's slow store stops all tenants.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_store_holds_up_no_other_tenant() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let slow = tenant(&mut fixture, &server, Duration::from_secs(600)).await;
    let quick = fixture.tenant("globex", "").await;
    allow(&fixture, &quick).await;
    const PATIENT: &str = ", timeout_ms = 600000";
    let live = fixture.consumer(&slow, "live", &policy(PATIENT, "")).await;
    let stored = policy(PATIENT, "ack = 'after_insert'");
    let stored = fixture.consumer(&slow, "stored", &stored).await;
    let beside = fixture.consumer(&quick, "orders", &policy("", "")).await;
    server.put_key("in/held", Some("result 1"));
    server.put_key("in/quick", Some("result 2"));
    server.hold("in/held");
    // Two places, and two fetches that hang: one of a batch, one of a worker.
    let budget = Budget::new(2);
    let log = [referring(0, "held", "s3://kept/in/held")];
    let inserted = sharing(&fixture, &stored, &budget);
    deliver(&inserted, &log).await;
    let worker = tokio::spawn(async move { step(&inserted).await });
    let host = sharing(&fixture, &live, &budget);
    let batch = tokio::spawn(async move { deliver(&host, &log).await });
    let hanging = async || anyhow::Ok(server.asked("in/held") == 2);
    let said = async || format!("it was asked for {:?}", server.gets());
    wait::until(DEADLINE, Duration::from_millis(5), hanging, said).await.unwrap();

    let host = sharing(&fixture, &beside, &budget);
    let log: Vec<_> =
        (0..20).map(|n| referring(n, &format!("m{n}"), "s3://kept/in/quick")).collect();
    let done = timeout(DEADLINE, deliver(&host, &log)).await;
    assert!(done.is_ok(), "another tenant's store holds it up");
    assert_eq!(fixture.row(&beside, "m19").await.state(), ("completed", None, 1));
    assert!(!worker.is_finished() && !batch.is_finished());
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE usename = '{}' AND xact_start IS NOT NULL",
        slow.login
    );
    assert_eq!(fixture.number(open).await, 0, "a transaction is open during a fetch");

    // Who waits for a payload gives up the partition at once.
    let mut partition = take(&sharing(&fixture, &live, &budget)).await;
    let log = [referring(7, "later", "s3://kept/in/held")];
    let ready = timeout(Duration::from_millis(20), partition.ready(&log)).await;
    assert!(ready.is_err());
    partition.close().await;

    server.release("in/held");
    assert_eq!(worker.await.unwrap().unwrap(), 1);
    assert!(batch.await.unwrap().is_empty());
    for consumer in [&live, &stored] {
        assert_eq!(fixture.row(consumer, "held").await.state(), ("completed", None, 1));
    }
    fixture.finish().await;
}

/// What could go wrong: a tenant's access key stands in the database or in an answer, opens for
/// another tenant, or is lost when the master key changes.
#[tokio::test(flavor = "multi_thread")]
async fn access_keys_are_sealed_and_go_with_the_master_key() {
    let mut fixture = InboxFixture::new().await;
    let server = S3Server::start().await;
    let tenant = tenant(&mut fixture, &server, Duration::from_secs(10)).await;
    let other = fixture.tenant("globex", "").await;
    server.put_key("in/a", Some("the object"));
    let fetch = async |control: &Control, tenant: &Tenant| {
        let fetcher = control.tenant_stores().fetcher(tenant, "docs");
        let timeout = Duration::from_secs(30);
        let bounds = FetchBounds { bytes_max: 100, timeout, waits_for_memory: true };
        let fetched = fetcher.fetch("s3://kept/in/a", bounds).await;
        fetched.map(|bytes| bytes.to_vec()).map_err(|error| match error {
            FetchError::Reference(error) => Some(error.fault),
            FetchError::Host(_) | FetchError::NoMemory => None,
        })
    };
    let (object, not_allowed) = (Ok(b"the object".to_vec()), Err(Some(ReferenceFault::NotAllowed)));
    assert_eq!(fetch(&fixture.control, &tenant).await, object);
    assert_eq!(fetch(&fixture.control, &other).await, not_allowed);
    for secret in [SECRET_ACCESS_KEY, ACCESS_KEY_ID] {
        let kept = format!(
            "SELECT count(*) FROM oncebox.tenant_store t, oncebox.audit a WHERE position('{secret}' \
             IN encode(t.access_key, 'escape') || t::text || a::text) > 0"
        );
        assert_eq!(fixture.number(kept).await, 0, "`{secret}` can be read");
    }
    for (tenant, name) in [(&tenant, "orders"), (&other, "refunds")] {
        fixture.consumer(tenant, name, &policy("", "")).await;
    }
    let findings = fixture.control.doctor().run(HostLimits { connections_max: 16 }).await.unwrap();
    let found: Vec<_> = findings.iter().filter(|finding| finding.check == "stores").collect();
    let said = "consumer `globex/refunds` names the store `docs`, without access to it";
    assert!(found.len() == 1 && found[0].found == said, "{found:?}");
    let listed = fixture.control.tenant_stores().list("acme").await.unwrap();
    assert!(listed.len() == 1 && listed[0].prefix == "in", "{listed:?}");

    // A row that is copied to another tenant does not open there.
    let copy = format!(
        "INSERT INTO oncebox.tenant_store (tenant_id, store, bucket, prefix, access_key, set_by) \
         SELECT {}, store, bucket, '', access_key, 'thief' FROM oncebox.tenant_store",
        other.tenant_id
    );
    fixture.execute(copy).await;
    assert_eq!(fetch(&fixture.control, &other).await, Err(None), "the host is at fault");
    fixture.execute("DELETE FROM oncebox.tenant_store WHERE set_by = 'thief'").await;

    let new = MasterKey::parse(&MasterKey::generate()).unwrap();
    let rotated = fixture.control.tenants().rotate_master_key(&new).await.unwrap();
    assert_eq!((rotated.sealed, rotated.unchanged), (2, 0));
    let rotated = fixture.control.tenants().rotate_master_key(&new).await.unwrap();
    assert_eq!((rotated.sealed, rotated.unchanged), (0, 2));
    let after = Control::new(fixture.superuser_options(), new, "test");
    let after = after.fetching_from(stores(&server, Duration::from_secs(10)));
    assert_eq!(fetch(&after, &tenant).await, object);
    assert_eq!(fetch(&fixture.control, &tenant).await, Err(None), "the host is at fault");
    after.tenant_stores().delete("acme", "docs").await.unwrap();
    assert_eq!(fetch(&after, &tenant).await, not_allowed);
    fixture.finish().await;
}
