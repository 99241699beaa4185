//! Endpoints: what may be set, what is kept secret, and what becomes of messages to them, with the
//! relay of a host and a provider that misbehaves.

use std::collections::{BTreeMap, BTreeSet};

use oncebox_control::{
    Control, DuplicateDecision, HostLimits, IngressSecretChange, JobFilter, MasterKey, NewEndpoint,
    OutgoingAction, OutgoingFilter, SecretRotation, generate_signing_secret,
};
use oncebox_model::outgoing::AnswerMode;
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver},
    job::{carry_out, outgoing_job},
    outgoing::{OutgoingRow, derived_answer_id, derived_id, emitting, emitting_host, outgoing},
    provider::{Behaviour, Call, Provider, Reply},
    relay::TestRelay,
    wait::DEADLINE,
};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

/// Id, event type, source, payload and ordering key of a delivered answer.
type AnswerRow = (String, String, String, Vec<u8>, Option<Vec<u8>>);

const SECRET: &str = "s3cr3t-of-the-tenant";

/// A tenant whose consumer may send to a provider, through the endpoint `pay`.
struct Fixture {
    inbox: InboxFixture,
    provider: Provider,
    orders: TestConsumer,
}

impl Fixture {
    async fn new(behaviour: Behaviour, change: impl FnOnce(&mut NewEndpoint)) -> Self {
        let provider = Provider::start(behaviour).await;
        let mut inbox = InboxFixture::new().await;
        inbox.control = inbox.control.clone().sending_with(provider.sender());
        let orders = inbox.simple("", "").await;
        let fixture = Self { inbox, provider, orders };
        fixture.limit(json!({ "destinations_allowed": ["http:*"] })).await;
        fixture.allow_provider().await;
        let mut endpoint = fixture.provider.endpoint("pay");
        change(&mut endpoint);
        fixture.inbox.control.endpoints().set("acme", &endpoint, false).await.unwrap();
        fixture
    }

    async fn limit(&self, limits: Value) {
        let limits = limits.as_object().unwrap();
        self.inbox.control.tenants().set_limits("acme", limits).await.unwrap();
    }

    async fn allow_provider(&self) {
        self.limit(json!({ "endpoint_hosts_allowed": [self.provider.authority()] })).await;
    }

    /// Delivers messages that emit as the line says, in which `#` is the number of the message.
    async fn emit(&self, first: i64, messages: i64, line: &str) {
        let log: Vec<_> = (first..first + messages)
            .map(|number| {
                let line = line.replace('#', &number.to_string());
                emitting(number, &format!("m{number}"), &[&line])
            })
            .collect();
        deliver(&emitting_host(&self.inbox, &self.orders), &log).await;
    }

    /// Waits until the outgoing messages are as this says.
    async fn until(&self, what: &str, is_so: impl Fn(&[OutgoingRow]) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let rows = outgoing(&self.inbox).await;
            if is_so(&rows) {
                return;
            }
            assert!(Instant::now() < deadline, "never {what}: {rows:#?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_settled(&self) {
        self.until("settled", |rows| rows.iter().all(|row| row.settled)).await;
    }

    async fn redrive(&self) {
        let redrive = outgoing_job(OutgoingAction::Redrive, JobFilter::default());
        carry_out(&self.inbox.control, "acme", &redrive).await.unwrap();
    }

    /// Makes what waits for its next attempt due now.
    async fn make_due(&self) {
        let due = "UPDATE oncebox.outgoing SET next_attempt_at = now() WHERE next_attempt_at IS \
            NOT NULL";
        self.inbox.execute(due).await;
    }

    async fn finish(self) {
        assert_eq!(self.provider.faults(), Vec::<String>::new());
        self.inbox.finish().await;
    }
}

/// What could go wrong: a tenant reaches what the operator or its limits do not allow, or an
/// endpoint is stored that decides nothing about duplicates. S1-041.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_is_on_a_host_that_both_lists_have() {
    let fixture = Fixture::new(Behaviour::sound(), |_| {}).await;
    let endpoints = fixture.inbox.control.endpoints();
    let set = async |change: &dyn Fn(&mut NewEndpoint)| {
        let mut new = fixture.provider.endpoint("pay");
        change(&mut new);
        endpoints.set("acme", &new, false).await.map_err(|error| error.to_string())
    };
    for (url, says) in [
        ("https://evil.example/", "the operator's settings"),
        ("http://127.0.0.1:1/", "the operator's settings"),
        ("ftp://127.0.0.1/", "the URL of the endpoint"),
        ("http://user:pass@127.0.0.1/", "must hold no user or password"),
    ] {
        let error = set(&|new| new.url = url.to_owned()).await.expect_err(url);
        assert!(error.contains(says) && !error.contains("pass@"), "{url}: {error}");
    }
    let header = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    for headers in [header("host", SECRET), header("x-key", "a\r\nhost: b"), header("a b", "c")] {
        let error = set(&|new| new.headers = headers.clone()).await.expect_err("a header");
        assert!(error.contains("header `") && !error.contains(SECRET), "{error}");
    }
    let weak = set(&|new| new.signing_secret = Some("weak".to_owned())).await;
    assert!(weak.expect_err("a secret").contains("`whsec_`"));

    // S1-041: who accepts duplicates, and why, is kept and shown.
    let accepted = DuplicateDecision::Accepted {
        by: "ops".to_owned(),
        because: "a mail twice is harmless".to_owned(),
    };
    let changed = set(&|new| new.duplicates = accepted.clone()).await.unwrap();
    assert_eq!(
        changed.changed,
        ["receiver_deduplicates", "duplicates_accepted_by", "duplicates_because"]
    );
    let listed = endpoints.list("acme").await.unwrap();
    assert_eq!(listed[0].duplicates_accepted_by.as_deref(), Some("ops"));
    assert_eq!((listed[0].revision, listed.len()), (2, 1));
    let same = set(&|new| new.duplicates = accepted.clone()).await.unwrap();
    assert!(same.changed.is_empty() && same.endpoint.revision == 2, "{same:?}");

    fixture.limit(json!({ "endpoint_hosts_allowed": ["other.example"] })).await;
    let error = set(&|new| new.timeout_ms = 2_000).await.expect_err("not of the tenant");
    assert!(error.contains("the tenant's limits"), "{error}");
    let findings = fixture.inbox.control.doctor().run(HostLimits { connections_max: 16 }).await;
    let findings = findings.unwrap();
    let found: Vec<_> = findings.iter().filter(|finding| finding.check == "endpoints").collect();
    let said = "nothing is sent to endpoint `pay` of tenant `acme`";
    assert!(found.len() == 1 && found[0].found.starts_with(said), "{found:?}");
    let wrong = json!({ "endpoint_hosts_allowed": ["*.com"] });
    let refused =
        fixture.inbox.control.tenants().set_limits("acme", wrong.as_object().unwrap()).await;
    assert!(refused.unwrap_err().to_string().contains("`*.com` is no entry"));

    endpoints.remove("acme", "pay").await.unwrap();
    assert!(endpoints.get("acme", "pay").await.is_err());
    fixture.finish().await;
}

/// What could go wrong: a secret can be read in the database or the audit log, a row that is copied
/// to another tenant opens there, or a change of the master key loses it.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_sealed_for_their_tenant_alone() {
    let signing = generate_signing_secret();
    let fixture = Fixture::new(Behaviour::sound(), |new| {
        new.url = format!("{}/{SECRET}", new.url);
        new.headers = vec![("authorization".to_owned(), SECRET.to_owned())];
        new.signing_secret = Some(signing.clone());
    })
    .await;
    let control = &fixture.inbox.control;
    let other = generate_signing_secret();
    control.endpoints().rotate("acme", "pay", &SecretRotation::Begin(other.clone())).await.unwrap();
    for secret in [SECRET, &signing, &other] {
        let kept = format!(
            "SELECT count(*) FROM oncebox.endpoint e, oncebox.audit a WHERE position('{secret}' IN \
                encode(e.request, 'escape') || e::text || a::text) > 0"
        );
        assert_eq!(fixture.inbox.number(kept).await, 0, "`{secret}` can be read");
    }
    let shown = control.endpoints().get("acme", "pay").await.unwrap();
    assert_eq!(shown.origin, format!("http://{}", fixture.provider.authority()));
    assert_eq!(
        (shown.header_names.as_slice(), shown.signing_secrets),
        (&["authorization".to_owned()][..], 2)
    );

    let thief = fixture.inbox.tenant("globex", "").await;
    let copy = format!(
        "INSERT INTO oncebox.endpoint SELECT {}, name, revision, origin, method, header_names, \
            signing_secrets, request, connect_timeout_ms, timeout_ms, requests_per_second, \
            requests_max, failures_max, pause_ms, answer, answer_to, answer_event_type, \
            receiver_deduplicates, duplicates_accepted_by, duplicates_because, set_at, 'thief' \
         FROM oncebox.endpoint",
        thief.tenant_id
    );
    fixture.inbox.execute(copy).await;
    let stolen = control.endpoints().open(thief.tenant_id, "pay").await.unwrap_err().to_string();
    assert!(stolen.contains("is damaged"), "{stolen}");
    fixture.inbox.execute("DELETE FROM oncebox.endpoint WHERE set_by = 'thief'").await;

    seal_ingress_secret(&fixture).await;
    let new = MasterKey::parse(&MasterKey::generate()).unwrap();
    let rotated = control.tenants().rotate_master_key(&new).await.unwrap();
    assert_eq!((rotated.sealed, rotated.unchanged), (2, 0));
    let after = Control::new(fixture.inbox.superuser_options(), new, "test");
    let tenant_id = fixture.orders.tenant.tenant_id;
    assert!(after.endpoints().open(tenant_id, "pay").await.unwrap().is_some());
    assert!(control.endpoints().open(tenant_id, "pay").await.is_err(), "the key is another");
    let rows = after.ingress().rows().await.unwrap();
    assert_eq!(after.ingress().open(&rows[0]).unwrap().secrets, [INGRESS_SECRET]);
    assert!(control.ingress().open(&rows[0]).is_err(), "the key is another");
    fixture.finish().await;
}

const INGRESS_SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Gives the consumer a secret for messages over HTTP. The row holds it sealed.
async fn seal_ingress_secret(fixture: &Fixture) {
    let (tenant, name) = (&fixture.orders.tenant.name, &fixture.orders.row.name);
    fixture
        .inbox
        .execute("UPDATE oncebox.consumer SET policy = policy || '{\"ingress\": {\"verify\": \"bearer\"}}'")
        .await;
    let change = IngressSecretChange::Replace(INGRESS_SECRET.to_owned());
    let control = &fixture.inbox.control;
    control.ingress().change_secret(tenant, name, &change).await.unwrap();
    let readable = "SELECT count(*) FROM oncebox.ingress_secret WHERE position(convert_to(\
        '0123456789abcdef', 'UTF8') IN sealed) > 0";
    assert_eq!(fixture.inbox.number(readable).await, 0);
}

/// What could go wrong: a repeated request has another key or another body, so that the provider
/// acts twice; the receiver cannot prove where it comes from. S0-026, S1-007, S1-017, S1-038.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_has_the_key_of_the_first() {
    let replies =
        [Reply::Status(503), Reply::ActAndFail, Reply::ActAndBreak, Reply::ActAndStall, Reply::Ok];
    let fixture = Fixture::new(Behaviour::scripted(&replies), |new| {
        new.headers = vec![("authorization".to_owned(), "Bearer token".to_owned())];
        new.signing_secret = Some(generate_signing_secret());
    })
    .await;
    fixture.emit(0, 1, "emit http:pay key=k payload=charge token=t").await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    for calls in 1..=replies.len() {
        let deadline = Instant::now() + DEADLINE;
        while fixture.provider.calls().len() < calls {
            assert!(Instant::now() < deadline, "{calls} calls never came");
            fixture.make_due().await;
            sleep(Duration::from_millis(50)).await;
        }
    }
    fixture.until_settled().await;
    let id = derived_id("acme", "orders", "m0", 0);
    let ledger = fixture.provider.ledger();
    // S0-026, S1-007, S1-017, S1-038.
    assert_eq!(ledger.keys().collect::<Vec<_>>(), [&id]);
    assert_eq!((ledger[&id].calls, ledger[&id].effects), (5, 1), "{ledger:?}");
    for call in fixture.provider.calls() {
        let header = |name: &str| call.headers.get(name).cloned().unwrap_or_default();
        assert_eq!((call.line.as_str(), call.body.as_slice()), ("POST /charges", &b"charge"[..]));
        for (name, value) in [
            ("ce-id", id.as_str()),
            ("ce-type", "test.emitted"),
            ("ce-source", "oncebox:acme/orders"),
            ("ce-causationid", "m0"),
            ("ce-correlationid", "m0"),
            ("authorization", "Bearer token"),
            ("webhook-id", id.as_str()),
            ("note", "note of m0"),
        ] {
            assert_eq!(header(name), value, "{name}");
        }
        assert!(header("webhook-signature").starts_with("v1,"), "{call:?}");
    }
    let row = &outgoing(&fixture.inbox).await[0];
    assert_eq!((row.state(), row.attempts), (("completed", None), 5));
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: an answer is kept twice or not at all, appears in a list, or outlives an
/// erasure. S1-040.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_stored_with_its_message() {
    let fixture = Fixture::new(Behaviour::scripted(&[Reply::Status(500)]), |new| {
        new.answer = AnswerMode::Stored;
    })
    .await;
    fixture.emit(0, 2, "emit http:pay").await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    fixture.until_settled().await;
    relay.stop().await;
    let control = &fixture.inbox.control;
    let listed =
        control.outgoing().list("acme", &OutgoingFilter::default(), None, 10).await.unwrap();
    assert!(listed.iter().all(|row| row.answer_status == Some(200)), "{listed:?}");
    assert!(!serde_json::to_string(&listed).unwrap().contains("charge"), "a list shows an answer");
    for row in &listed {
        let (consumer, cause) = (Some("orders".to_owned()), Some(row.cause.clone()));
        let shown = control.outgoing().show("acme", &row.id, consumer, cause).await.unwrap();
        let answer = shown.answer.expect("an answer");
        // S1-040.
        assert_eq!(answer.body, format!("{{\"charge\":\"{}\"}}", row.id).into_bytes());
        assert_eq!(
            (answer.content_type.as_deref(), answer.is_whole),
            (Some("application/json"), true)
        );
    }
    let erase = format!(
        "SELECT count(*) FROM oncebox.erase_outgoing({}, 'm0')",
        fixture.orders.row.consumer_id
    );
    assert_eq!(fixture.inbox.number(erase).await, 1);
    let left = "SELECT count(*) FROM oncebox.outgoing WHERE message_id = 'm0' AND (answer IS NOT \
        NULL OR answer_content_type IS NOT NULL)";
    assert_eq!(fixture.inbox.number(left).await, 0, "an erased message keeps its answer");
    fixture.finish().await;
}

/// What could go wrong: an answer is lost or comes twice when a relay dies, a refusal is not told
/// to the saga that has to compensate, or an answer cannot be told from a message. S1-040, S1-106.
#[tokio::test(flavor = "multi_thread")]
async fn answers_and_refusals_are_delivered_once() {
    const MESSAGES: i64 = 12;
    let seed = rand::random();
    let fixture = Fixture::new(Behaviour::Seeded(seed), |new| {
        new.answer = AnswerMode::Delivered;
        new.answer_to = Some("answers".to_owned());
        new.answer_event_type = Some("charge.answered".to_owned());
    })
    .await;
    let answers = fixture.inbox.consumer(&fixture.orders.tenant, "answers", "order = 'key'").await;
    fixture.emit(0, MESSAGES, "emit http:pay key=k# payload=charge token=saga").await;
    let mut relay = TestRelay::start(&fixture.inbox, "a").await;
    let deadline = Instant::now() + DEADLINE;
    while outgoing(&fixture.inbox).await.iter().any(|row| !row.settled) {
        assert!(Instant::now() < deadline, "seed {seed}: {:#?}", outgoing(&fixture.inbox).await);
        sleep(Duration::from_millis(300)).await;
        relay.kill(&fixture.inbox).await;
        fixture.make_due().await;
        relay = TestRelay::start(&fixture.inbox, "a").await;
        sleep(Duration::from_millis(700)).await;
    }
    relay.stop().await;
    let (ledger, calls) = (fixture.provider.ledger(), fixture.provider.calls());
    let expected: BTreeSet<_> =
        (0..MESSAGES).map(|n| derived_id("acme", "orders", &format!("m{n}"), 0)).collect();
    assert_eq!(ledger.keys().cloned().collect::<BTreeSet<_>>(), expected, "seed {seed}");
    let rows: Vec<AnswerRow> = sqlx::query_as(
        "SELECT message_id, event_type, source, payload, ordering_key FROM oncebox.inbox WHERE \
            consumer_id = $1",
    )
    .bind(answers.row.consumer_id)
    .fetch_all(&fixture.inbox.pool)
    .await
    .unwrap();
    let by_id: BTreeMap<_, _> = rows.iter().map(|row| (row.0.clone(), row)).collect();
    assert_eq!((by_id.len(), rows.len()), (expected.len(), expected.len()), "seed {seed}");
    for row in outgoing(&fixture.inbox).await {
        let is_refused = oncebox_tests::provider::refuses(seed, &row.id);
        let reason = is_refused.then_some("refused");
        assert_eq!(row.state(), ("completed", reason), "seed {seed}: {row:?}");
        // S1-106: the provider acted once although it was asked again.
        assert_eq!(ledger[&row.id].effects, usize::from(!is_refused), "seed {seed}: {row:?}");
        let id = derived_answer_id("acme", "orders", &row.id);
        let (_, event_type, source, payload, key) = by_id[&id];
        assert_eq!(
            (event_type.as_str(), source.as_str()),
            ("charge.answered", "oncebox:acme/orders")
        );
        assert_eq!(*key, Some(row.message_id.replace('m', "k").into_bytes()));
        let payload: Value = serde_json::from_slice(payload).unwrap();
        assert_eq!(
            (&payload["outgoing_id"], &payload["cancel_token"]),
            (&json!(row.id), &json!("saga"))
        );
        let status = payload["status"].as_u64().unwrap();
        assert_eq!(is_refused, [307, 400].contains(&status), "seed {seed}: {payload}");
        // Whoever was asked again may have acted before, unless it put the message off.
        let asked = |call: &&Call| call.key == row.id && !matches!(call.reply, Reply::Limit(_));
        let is_repeated = payload["is_repeated"].as_bool().unwrap();
        assert!(is_repeated || calls.iter().filter(asked).count() < 2, "seed {seed}: {payload}");
    }
    fixture.finish().await;
}

/// What could go wrong: messages that an endpoint refuses for ever are sent for ever, a redirect is
/// followed, or an answer without a receiver is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_is_parked_with_its_reason() {
    let fixture =
        Fixture::new(Behaviour::scripted(&[Reply::Status(422), Reply::Redirect]), |new| {
            new.requests_max = 1;
        })
        .await;
    fixture.emit(0, 2, "emit http:pay").await;
    fixture.emit(2, 1, "emit http:nowhere").await;
    let mut lost = fixture.provider.endpoint("lost");
    (lost.answer, lost.answer_to) = (AnswerMode::Delivered, Some("nobody".to_owned()));
    fixture.inbox.control.endpoints().set("acme", &lost, false).await.unwrap();
    fixture.emit(3, 1, "emit http:lost").await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    let is_parked = |row: &OutgoingRow| row.status == "parked";
    fixture.until("parked", |rows| rows.iter().all(is_parked)).await;
    let reasons: Vec<_> =
        outgoing(&fixture.inbox).await.into_iter().map(|row| row.reason.unwrap()).collect();
    assert_eq!(reasons, ["refused", "refused", "no_such_endpoint", "no_such_consumer"]);
    assert_eq!(fixture.provider.calls().len(), 2, "{:?}", fixture.provider.calls());
    assert!(fixture.provider.ledger().values().all(|entry| entry.effects == 0));
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a host that was taken from a list is still sent to, or what waited for it
/// is lost when it is allowed again.
#[tokio::test(flavor = "multi_thread")]
async fn the_lists_of_hosts_are_looked_at_again_before_each_send() {
    let fixture = Fixture::new(Behaviour::sound(), |_| {}).await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    fixture.emit(0, 1, "emit http:pay").await;
    fixture.until_settled().await;
    fixture.limit(json!({ "endpoint_hosts_allowed": null })).await;
    // A change takes effect within a second.
    sleep(Duration::from_millis(1_500)).await;
    fixture.emit(1, 1, "emit http:pay").await;
    fixture.until("parked", |rows| rows[1].state() == ("parked", Some("not_allowed"))).await;
    assert_eq!(fixture.provider.calls().len(), 1, "a host that is not allowed was asked");
    fixture.allow_provider().await;
    fixture.redrive().await;
    fixture.until_settled().await;
    assert_eq!(fixture.provider.ledger().len(), 2);
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: an endpoint that fails is asked by every message, or is never asked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_opens_probes_and_closes() {
    const MESSAGES: i64 = 6;
    let fixture = Fixture::new(Behaviour::scripted(&[Reply::Status(500); 4]), |new| {
        (new.failures_max, new.pause_ms, new.requests_max) = (3, 1_000, 1);
    })
    .await;
    fixture.emit(0, MESSAGES, "emit http:pay").await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    let deadline = Instant::now() + DEADLINE;
    while relay.breakers().is_empty() {
        assert!(Instant::now() < deadline, "it never opened");
        sleep(Duration::from_millis(10)).await;
    }
    let breaker = relay.breakers().remove(0);
    assert_eq!(breaker.endpoint, "pay");
    assert!(breaker.failures >= 3, "{breaker:?}");
    // The messages that have failed need not wait for longer than the breaker.
    fixture.make_due().await;
    // The first probe fails, and the second one closes it.
    fixture.until_settled().await;
    let calls = fixture.provider.calls();
    assert_eq!(calls.len() as i64, MESSAGES + 4, "{calls:?}");
    // Each call came before its failure was noted, from when on nobody asks.
    let paused = |nth: usize| calls[nth].at - calls[nth - 1].at;
    assert!(paused(3) >= Duration::from_secs(1), "it is asked while it is open: {:?}", paused(3));
    assert!(paused(4) >= Duration::from_secs(2), "the second pause is short: {:?}", paused(4));
    assert!(relay.breakers().is_empty(), "{:?}", relay.breakers());
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: an endpoint gets more requests a second, or at a time, than it takes.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_has_a_rate() {
    const RATE: u32 = 5;
    const MESSAGES: i64 = 15;
    let fixture =
        Fixture::new(Behaviour::sound(), |new| new.requests_per_second = Some(RATE)).await;
    fixture.emit(0, MESSAGES, "emit http:pay").await;
    let begin = std::time::Instant::now();
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    fixture.until_settled().await;
    let calls = fixture.provider.calls();
    assert_eq!(calls.len() as i64, MESSAGES);
    // A full bucket goes at once, and each further call has to wait for a token.
    for (waited, call) in (1..).zip(&calls[RATE as usize..]) {
        let least = Duration::from_secs(1) * waited / RATE - Duration::from_millis(1);
        let took = call.at - begin;
        assert!(took >= least, "call {waited} beyond the first {RATE} came after {took:?}");
    }
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: an endpoint that asks for time is asked at once by other messages, or the
/// time uses up the attempts of the message.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_asks_for_time_gets_it() {
    let fixture =
        Fixture::new(Behaviour::scripted(&[Reply::Limit(2)]), |new| new.requests_max = 1).await;
    fixture.emit(0, 3, "emit http:pay").await;
    let relay = TestRelay::start(&fixture.inbox, "a").await;
    fixture
        .until("limited", |rows| {
            rows.iter().any(|row| row.reason.as_deref() == Some("rate_limited"))
        })
        .await;
    fixture.until_settled().await;
    let calls = fixture.provider.calls();
    assert_eq!(calls.len(), 4);
    let rest = calls[1].at - calls[0].at;
    assert!(rest >= Duration::from_millis(1_900), "the endpoint rested for {rest:?}");
    let rows = outgoing(&fixture.inbox).await;
    assert!(rows.iter().all(|row| row.attempts == 1), "a limit counts no attempt: {rows:?}");
    relay.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a test message reaches what is not allowed, or leaves no trace.
#[tokio::test(flavor = "multi_thread")]
async fn a_test_sends_one_message_and_is_recorded() {
    let fixture = Fixture::new(Behaviour::scripted(&[Reply::Ok, Reply::Status(401)]), |_| {}).await;
    let endpoints = fixture.inbox.control.endpoints();
    let first = endpoints.test("acme", "pay").await.unwrap();
    assert_eq!((first.status, first.verdict), (Some(200), "delivered"));
    let second = endpoints.test("acme", "pay").await.unwrap();
    assert_eq!((second.status, second.verdict), (Some(401), "refused"));
    fixture.limit(json!({ "endpoint_hosts_allowed": [] })).await;
    let third = endpoints.test("acme", "pay").await.unwrap();
    assert_eq!((third.status, third.verdict), (None, "refused"), "{third:?}");
    assert_eq!(fixture.provider.calls().len(), 2);
    let tests = "SELECT count(*) FROM oncebox.audit WHERE action = 'endpoint.test'";
    assert_eq!(fixture.inbox.number(tests).await, 3);
    fixture.finish().await;
}
