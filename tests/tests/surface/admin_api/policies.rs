//! What a policy may say, and a tenant's token in it. What could go wrong: a policy is stored that
//! a native library, or the host, cannot bear: hosts that start it end, again and again; or a token
//! reads what is another tenant's.

use std::{ffi::CString, mem::MaybeUninit, thread, time::Duration};

use axum::http::StatusCode;
use oncebox_api::{Limits, Mode, wire::Role};
use oncebox_model::policy::{TOPICS_MAX, topic_fault, topics_fault};
use serde_json::{Value, json};

use super::fixture::{Answer, ApiFixture};

/// Every key of a policy, with a value that is right.
fn whole() -> Value {
    json!({
        "topics": ["oncebox.acme.t"], "ack": "after_commit", "order": "key",
        "sequence": { "version": { "header": "v" }, "first": 1, "gap_wait_ms": 1000, "gap": "park" },
        "identity": { "id": [{ "header": "id" }, { "json_pointer": "/id" }], "event_type": [{ "header": "type" }, { "json_pointer": "/type" }],
            "ordering_key": { "json_pointer": "/key" }, "scoped_by_event_type": true },
        "masking": { "fields": ["/card/*/number"], "headers": ["x-card"], "key": true, "role": "operator" },
        "schemas": { "paid": { "json_schema": { "type": "object" } } },
        "batch": { "messages_max": 64, "duration_ms": 50 },
        "retry": { "attempts_max": 5, "backoff_min_ms": 1000, "backoff_max_ms": 2000, "backoff_factor": 2, "lease_ms": 30000, "workers": 2,
            "age_max_ms": 1000 },
        "dead_letters": { "topic": "oncebox.acme.dead" },
        "breaker": { "failures_percent": 50, "runs_min": 20, "window_ms": 30000, "pause_ms": 5000, "pause_max_ms": 300000 },
        "limits": { "deadline_ms": 5000, "memory_bytes": 67108864, "statements_max": 1000, "statement_texts_max": 100,
            "statement_bytes_max": 65536, "params_max": 1000, "params_bytes_max": 8388608, "rows_max": 10000, "result_bytes_max": 8388608,
            "savepoints_max": 16, "log_bytes_max": 65536, "outcome_bytes_max": 65536, "payload_bytes_max": 8388608, "outgoing_max": 100,
            "outgoing_bytes_max": 1048576, "transactions_max": 4, "messages_per_second": 10 },
        "outgoing": { "on_parked": "stop" },
        "alerts": { "pending_age_s": 600, "parked": 1, "dead_letters": 1, "collisions": 1 },
        "kafka": { "group": "oncebox.acme.g", "prefetch_messages": 512, "prefetch_bytes": 8388608, "properties": { "client.rack": "a" } }
    })
}

/// The places of a value that hold no others.
fn leaves(at: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            members.iter().for_each(|(name, member)| leaves(&format!("{at}/{name}"), member, found))
        }
        Value::Array(elements) => (0..)
            .zip(elements)
            .for_each(|(n, element)| leaves(&format!("{at}/{n}"), element, found)),
        _ => found.push(at.to_owned()),
    }
}

/// What is no value of a place that holds such a one, whatever it means.
fn impossible(value: &Value) -> Vec<Value> {
    match value {
        Value::Number(_) => vec![json!(i64::MAX), json!(u64::MAX), json!(-1), json!(1.5)],
        Value::String(_) => vec![
            json!("a".repeat(900_000)),
            json!("a\u{0}b"),
            json!("a\nb"),
            json!("\u{202e}\u{7f}"),
        ],
        _ => Vec::new(),
    }
}

async fn create(fixture: &ApiFixture, name: &str, policy: &Value, token: &str) -> Answer {
    let new = json!({ "name": name, "policy": policy }).to_string().into_bytes();
    fixture.send("POST", "/v1/tenants/acme/consumers", new, "application/json", Some(token)).await
}

/// Every number and text of a policy is bounded, and every list: generated from all of its places.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_policy_is_without_a_bound() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let operator = fixture.token_of("", Role::Admin);
    let before = fixture.digest().await;
    let mut places = Vec::new();
    leaves("", &whole(), &mut places);
    assert!(places.len() > 50, "{places:?}");
    let mut taken = Vec::new();
    for place in places {
        let good = whole();
        // What a schema says is data, and is judged as a schema.
        let is_word = ["ack", "order", "gap"].iter().any(|word| place.ends_with(word))
            || place.starts_with("/schemas");
        for bad in impossible(good.pointer(&place).unwrap()) {
            let mut policy = good.clone();
            *policy.pointer_mut(&place).unwrap() = bad.clone();
            let answer = create(&fixture, "evil", &policy, &operator).await;
            if answer.status.is_server_error() || (!answer.status.is_client_error() && !is_word) {
                taken.push(format!("{place} = {:.40}: {}", bad.to_string(), answer.status));
            }
            if answer.status.is_success() {
                fixture.remove_consumer("evil").await;
            }
        }
    }
    for (key, many) in [
        ("/topics", (0..100_000).map(|n| json!(n.to_string())).collect::<Vec<_>>()),
        ("/identity/id", (0..20_000).map(|_| json!({ "header": "id" })).collect()),
        ("/masking/fields", (0..100_000).map(|_| json!("/a")).collect()),
        ("/masking/headers", (0..100_000).map(|_| json!("a")).collect()),
        ("/identity/event_type", (0..20_000).map(|_| json!("topic")).collect()),
    ] {
        let mut policy = whole();
        *policy.pointer_mut(key).unwrap() = Value::Array(many);
        let answer = create(&fixture, "evil", &policy, &operator).await;
        if !answer.status.is_client_error() {
            taken.push(format!("{key}: {}", answer.status));
            fixture.remove_consumer("evil").await;
        }
    }
    let properties: serde_json::Map<_, _> =
        (0..20_000).map(|n| (format!("a{n}"), json!("b"))).collect();
    let mut policy = whole();
    policy["kafka"]["properties"] = Value::Object(properties);
    if !create(&fixture, "evil", &policy, &operator).await.status.is_client_error() {
        taken.push("/kafka/properties".to_owned());
        fixture.remove_consumer("evil").await;
    }
    assert!(taken.is_empty(), "these are taken:\n{}", taken.join("\n"));
    assert_eq!(
        fixture.digest_but_audit().await,
        before_but_audit(&before),
        "what is refused changes nothing"
    );
    let good = create(&fixture, "good", &whole(), &operator).await;
    assert_eq!(good.status, StatusCode::CREATED, "{good:?}");
    fixture.finish().await;
}

fn before_but_audit(digest: &str) -> String {
    digest
        .lines()
        .filter(|line| !line.starts_with("oncebox.audit "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Topics that Kafka does not know and patterns that end the process are refused to everybody;
/// patterns at all to a tenant's token.
#[tokio::test(flavor = "multi_thread")]
async fn no_topic_is_stored_that_could_end_a_host() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let (operator, theirs) =
        (fixture.token_of("", Role::Admin), fixture.token_of("acme", Role::Admin));
    let allow = json!({ "topics_allowed": ["*"] }).to_string().into_bytes();
    let allowed = fixture
        .send("PATCH", "/v1/tenants/acme/limits", allow, "application/json", Some(&operator))
        .await;
    assert_eq!(allowed.status, StatusCode::OK, "{allowed:?}");
    let mut all = vec![
        format!("^{}a{}", "(".repeat(60_000), ")".repeat(60_000)),
        format!("^(a{})", "|b".repeat(200_000)),
        format!("^{}", "a{255}".repeat(50)),
        format!("^{}a{}", "(".repeat(8), "{200})".repeat(8)),
        "^(a)\\1".to_owned(),
        "a".repeat(900_000),
        "a".repeat(250),
    ];
    all.extend(["a\nb", "a\u{0}b", "*", "", ".", "..", "ä", "a b"].map(str::to_owned));
    for topic in &all {
        for token in [&operator, &theirs] {
            let answer = create(
                &fixture,
                "evil",
                &json!({ "topics": [topic], "ack": "after_commit" }),
                token,
            )
            .await;
            assert!(answer.status.is_client_error(), "{:.40}: {answer:?}", topic);
            assert!(
                answer.body.to_string().len() < 2_000,
                "the answer repeats what was sent: {:.200}",
                answer.body.to_string()
            );
        }
    }
    let pattern = json!({ "topics": ["^acme\\..*"], "ack": "after_commit" });
    let refused = create(&fixture, "evil", &pattern, &theirs).await;
    assert_eq!(
        refused.status,
        StatusCode::FORBIDDEN,
        "a pattern from a tenant's token: {refused:?}"
    );
    let made = create(&fixture, "given", &pattern, &operator).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    fixture.finish().await;
}

/// What could go wrong: a token reads another tenant's topic, since nobody said that it may not.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_reads_its_own_topics_until_somebody_says_more() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let (operator, theirs) =
        (fixture.token_of("", Role::Admin), fixture.token_of("acme", Role::Admin));
    let policy = |topics: &[&str]| json!({ "topics": topics, "ack": "after_commit" });
    let set = async |name: &str, policy: Value, token: &str| {
        let new = json!({ "policy": policy, "accept": true }).to_string().into_bytes();
        fixture
            .send(
                "PUT",
                &format!("/v1/tenants/acme/consumers/{name}/policy"),
                new,
                "application/json",
                Some(token),
            )
            .await
            .status
    };
    for (n, topics) in [
        &["payments"][..],
        &["^pay.*"],
        &["oncebox.other.t"],
        &["oncebox.acme"],
        &["oncebox.acmeat.t"],
        &["oncebox.acme.t", "t"],
    ]
    .into_iter()
    .enumerate()
    {
        let answer = create(&fixture, &format!("spy{n}"), &policy(topics), &theirs).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{topics:?}: {answer:?}");
    }
    assert_eq!(
        create(&fixture, "own", &policy(&["oncebox.acme.t"]), &theirs).await.status,
        StatusCode::CREATED
    );
    assert_eq!(
        set("own", policy(&["oncebox.acme.t", "payments"]), &theirs).await,
        StatusCode::FORBIDDEN
    );
    // Nor by its offsets, nor by its dead letters.
    let seek = json!({ "offsets": [{ "topic": "payments", "partition": 0, "offset": 0 }] })
        .to_string()
        .into_bytes();
    let sought = fixture
        .send(
            "POST",
            "/v1/tenants/acme/consumers/own/seek",
            seek,
            "application/json",
            Some(&theirs),
        )
        .await;
    assert_eq!(sought.status, StatusCode::FORBIDDEN, "{sought:?}");
    let mut copying = policy(&["oncebox.acme.t"]);
    copying["dead_letters"] = json!({ "topic": "payments" });
    assert_eq!(set("own", copying, &theirs).await, StatusCode::FORBIDDEN);
    // What an operator put into a policy stays there when its tenant changes the rest; what was
    // taken out does not come back.
    assert_eq!(set("own", policy(&["payments"]), &operator).await, StatusCode::OK);
    let mut other = policy(&["payments"]);
    other["retry"] = json!({ "workers": 3 });
    assert_eq!(set("own", other, &theirs).await, StatusCode::OK);
    assert_eq!(set("own", policy(&["oncebox.acme.t"]), &theirs).await, StatusCode::OK);
    assert_eq!(set("own", policy(&["payments"]), &theirs).await, StatusCode::FORBIDDEN);
    // An operator says more.
    let allow = json!({ "topics_allowed": ["pay*"] }).to_string().into_bytes();
    assert_eq!(
        fixture
            .send("PATCH", "/v1/tenants/acme/limits", allow, "application/json", Some(&operator))
            .await
            .status,
        StatusCode::OK
    );
    assert_eq!(
        create(&fixture, "more", &policy(&["payments"]), &theirs).await.status,
        StatusCode::CREATED
    );
    assert_eq!(
        create(&fixture, "less", &policy(&["refunds"]), &theirs).await.status,
        StatusCode::FORBIDDEN
    );
    fixture.finish().await;
}

/// What could go wrong: a token keeps its messages for longer than the operator of the host pays
/// for, by the class that it names or by a raise; or a bound keeps a tenant from its consumers.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_chooses_no_longer_memory_than_its_tenant_may_have() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let (operator, theirs) =
        (fixture.token_of("", Role::Admin), fixture.token_of("acme", Role::Admin));
    let policy = |retention: &str, replay: Value, replay_days: u64| {
        json!({ "topics": ["oncebox.acme.t"], "ack": "after_commit", "retention": retention,
            "replay": replay, "factors": { "replay_days": replay_days } })
    };
    let raise = |most: &str| json!({ "horizon": "raise", "raise_max": most });
    let asked = async |name: &str, policy: &Value, token: &str| {
        let answer = create(&fixture, name, policy, token).await;
        (answer.status, format!("{answer:?}"))
    };
    let for_ever = policy("7d", raise("permanent"), 1_000);
    let (status, said) = asked("ever", &for_ever, &theirs).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{said}");
    let (status, said) = asked("ever", &for_ever, &operator).await;
    assert_eq!(status, StatusCode::CREATED, "{said}");
    // Without a limit, every other class.
    let (status, said) = asked("year", &policy("1y", json!({}), 1), &theirs).await;
    assert_eq!(status, StatusCode::CREATED, "{said}");

    let limit = json!({ "retention_max": "30d" }).to_string().into_bytes();
    let path = "/v1/tenants/acme/limits";
    let limited = fixture.send("PATCH", path, limit, "application/json", Some(&operator)).await;
    assert_eq!(limited.status, StatusCode::OK, "{limited:?}");
    let (status, said) = asked("named", &policy("1y", json!({}), 1), &theirs).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{said}");
    assert!(said.contains("above the tenant's limit `retention_max`, `30d`"), "{said}");
    let (status, said) = asked("raised", &policy("7d", raise("1y"), 100), &theirs).await;
    assert_eq!(status, StatusCode::CONFLICT, "{said}");
    assert!(said.contains("the tenant's limit `retention_max` lets the memory be"), "{said}");
    let (status, said) = asked("month", &policy("7d", raise("1y"), 10), &theirs).await;
    assert_eq!(status, StatusCode::CREATED, "{said}");
    assert!(said.contains("the memory is raised from `7d` to `30d`"), "{said}");
    let (status, said) = asked("free", &policy("7d", raise("1y"), 100), &operator).await;
    assert_eq!(status, StatusCode::CREATED, "{said}");
    // What exists may change in other keys.
    let mut other = policy("1y", json!({}), 1);
    other["retry"] = json!({ "workers": 3 });
    let new = json!({ "policy": other, "accept": true }).to_string().into_bytes();
    let path = "/v1/tenants/acme/consumers/year/policy";
    let set = fixture.send("PUT", path, new, "application/json", Some(&theirs)).await;
    assert_eq!(set.status, StatusCode::OK, "{set:?}");
    fixture.finish().await;
}

/// Schemas that take as long to compile as schemas may, each its own.
fn worst(salt: usize) -> Value {
    let patterns: serde_json::Map<_, _> = (0..64)
        .map(|n| (format!("a{n}"), json!({ "pattern": format!("^x{salt}y{n}[a-z]{{4000}}$") })))
        .collect();
    json!({ "topics": ["oncebox.acme.t"], "ack": "after_commit", "schemas": { "*": { "json_schema": { "properties": patterns } } } })
}

/// What could go wrong: policies are judged on the threads that answer everybody, and a few
/// requests stop a host.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn others_are_answered_while_policies_are_judged() {
    // Each of them is judged in the end, however many are before it.
    let limits = Limits { request_timeout: Duration::from_secs(600), ..Limits::default() };
    let fixture = std::sync::Arc::new(ApiFixture::new(Mode::Tokens, limits).await);
    let (theirs, other) =
        (fixture.token_of("acme", Role::Admin), fixture.token_of("other", Role::Viewer));
    let judged = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    const MANY: usize = 32;
    let asked: Vec<_> = (0..MANY)
        .map(|n| {
            let (fixture, theirs, judged) = (fixture.clone(), theirs.clone(), judged.clone());
            tokio::spawn(async move {
                let answer = create(&fixture, &format!("heavy{n}"), &worst(n), &theirs).await;
                judged.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                answer
            })
        })
        .collect();
    // Another tenant's request comes behind all of them, and is answered before the last.
    tokio::task::yield_now().await;
    for _ in 0..3 {
        let answer = fixture.send("GET", "/v1/whoami", Vec::new(), "", Some(&other)).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    let before = judged.load(std::sync::atomic::Ordering::SeqCst);
    assert!(
        before < MANY,
        "{before} of {MANY} policies were judged before another tenant had three answers"
    );
    for answer in asked {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    }
    // What all schemas of a policy cost together is bounded before any of them is compiled.
    let mut policy = worst(0);
    let one = policy["schemas"]["*"].clone();
    policy["schemas"]["more"] = one;
    let refused = create(&fixture, "heavier", &policy, &theirs).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{refused:?}");
    assert!(
        refused
            .body
            .to_string()
            .contains("together they have 128 patterns, and may have at most 64"),
        "{refused:?}"
    );
    std::sync::Arc::into_inner(fixture).unwrap().finish().await;
}

/// What could go wrong: a tenant lets its consumer end another host.
#[tokio::test(flavor = "multi_thread")]
async fn only_an_operator_resumes_what_ended_a_host() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let (operator, theirs) =
        (fixture.token_of("", Role::Operator), fixture.token_of("acme", Role::Admin));
    fixture
        .execute(
            "INSERT INTO oncebox.consumer_start (consumer_id, deaths, quarantined_revision, \
            quarantined_at, quarantined_host) \
         SELECT consumer_id, 1, policy_revision, now(), 'a/1' FROM oncebox.consumer JOIN \
         oncebox.tenant t USING (tenant_id) WHERE t.name = 'acme'",
        )
        .await;
    let path = "/v1/tenants/acme/consumers/orders";
    let show = async || {
        fixture.send("GET", path, Vec::new(), "", Some(&theirs)).await.body["quarantine"].clone()
    };
    let post = async |what: &str, token: &str| {
        fixture
            .send(
                "POST",
                &format!("{path}/{what}"),
                b"{}".to_vec(),
                "application/json",
                Some(token),
            )
            .await
    };
    assert_eq!(
        (show().await["host"].as_str(), show().await["deaths"].as_i64()),
        (Some("a/1"), Some(1))
    );
    assert!(
        show().await["text"]
            .as_str()
            .unwrap()
            .contains("`oncebox consumer resume orders --tenant acme`")
    );
    let refused = post("resume", &theirs).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
    assert_eq!(post("pause", &theirs).await.status, StatusCode::OK);
    assert_eq!(post("resume", &theirs).await.status, StatusCode::FORBIDDEN);
    assert!(show().await["host"].is_string());
    let resumed = post("resume", &operator).await;
    assert_eq!(
        (resumed.status, &resumed.body["state"]),
        (StatusCode::OK, &json!("running")),
        "{resumed:?}"
    );
    assert!(show().await.is_null());
    fixture.finish().await;
}

/// What librdkafka does with a pattern, on a stack of a sixteenth of a worker's: whether the C
/// library takes it.
fn compiles(pattern: &str) -> bool {
    let pattern = CString::new(pattern).expect("no NUL");
    let compile = move || {
        let mut compiled = MaybeUninit::<libc::regex_t>::uninit();
        // SAFETY: both outlive the call; what was compiled is freed once, and only if it was.
        unsafe {
            let code = libc::regcomp(
                compiled.as_mut_ptr(),
                pattern.as_ptr(),
                libc::REG_EXTENDED | libc::REG_NOSUB,
            );
            if code == 0 {
                libc::regfree(compiled.as_mut_ptr());
            }
            code == 0
        }
    };
    thread::Builder::new()
        .stack_size(128 << 10)
        .spawn(compile)
        .expect("a thread")
        .join()
        .expect("it answers")
}

/// A pattern that grows with a number.
type Grown = fn(usize) -> String;

/// Patterns that grow in each of the ways in which a pattern can; the size is what it grows by.
const GROWING: [(&str, Grown); 12] = [
    ("parentheses within each other", |n| format!("^{}a{}", "(".repeat(n), ")".repeat(n))),
    ("parentheses beside each other", |n| format!("^{}", "(a)".repeat(n))),
    ("branches", |n| format!("^(a{})", "|b".repeat(n))),
    ("empty branches", |n| format!("^(a{})", "|".repeat(n))),
    ("stars", |n| format!("^a{}", "*".repeat(n))),
    ("optional ones", |n| format!("^{}", "a?".repeat(n))),
    ("sets", |n| format!("^{}", "[a-z]".repeat(n))),
    ("a repetition", |n| format!("^a{{{n}}}")),
    ("a repetition without an end", |n| format!("^(ab){{{n},}}")),
    ("repetitions within each other", |n| format!("^{}a{}", "(".repeat(n), "{9})".repeat(n))),
    ("repeated branches", |n| format!("^(a|b|c|d|e|f|g|h){{1,{n}}}")),
    ("length", |n| format!("^{}", "a".repeat(n))),
];

#[test]
fn patterns_are_bounded_in_every_way_in_which_they_grow() {
    for (what, pattern) in GROWING {
        let taken = |n: usize| topic_fault(&pattern(n)).is_none();
        for huge in [1_000, 60_000, 200_000] {
            let fault = topic_fault(&pattern(huge))
                .unwrap_or_else(|| panic!("{what}, {huge} times, are taken"));
            assert!(fault.len() < 300, "{what}: {fault}");
        }
        // At its bound, and at every size below, librdkafka can compile it.
        let largest =
            (1..1_000).take_while(|n| taken(*n)).last().unwrap_or_else(|| panic!("none of {what}"));
        assert!(!taken(largest + 1));
        for n in (1..=largest).filter(|n| *n < 20 || n.is_multiple_of(97) || *n == largest) {
            assert!(compiles(&pattern(n)), "{what}, {n} times: {}", pattern(n));
        }
    }
}

#[test]
fn topics_are_judged_by_the_rules_of_kafka() {
    let long = "a".repeat(250);
    for wrong in ["", ".", "..", "a b", "a\nb", "a\0b", "*", "a*", "ä", "a/b", "a,b", &long] {
        assert!(topic_fault(wrong).is_some(), "{wrong:?}");
    }
    for right in ["a", "...", "payments", "A.b_c-9", &long[1..]] {
        assert_eq!(topic_fault(right), None);
    }
    for right in
        ["^orders\\..*", "^(a|b)-[0-9a-f]{8}$", "^[^.]+$", "^x{2,}y{1,3}", "^[-a]b?", "^.*"]
    {
        assert_eq!(topic_fault(right), None);
        assert!(compiles(right), "{right}");
    }
    for wrong in [
        "^a\\1",
        "^(?i)a",
        "^[[:alpha:]]",
        "^[a",
        "^[]a]",
        "^[^]",
        "^a{",
        "^a{,3}",
        "^a{1000}",
        "^a{3,2}",
        "^(a",
        "^a)",
        "^a\\",
        "^a\n",
        "^ä",
        "^[a--b]",
        "^a&&b",
        "^a}",
        "^a{1,2,3}",
    ] {
        assert!(topic_fault(wrong).is_some(), "{wrong:?}");
    }
    let many: Vec<String> = (0..=TOPICS_MAX).map(|n| n.to_string()).collect();
    assert!(
        topics_fault(&many).is_some()
            && topics_fault(&many[1..]).is_none()
            && topics_fault(&[]).is_some()
    );
    assert!(topics_fault(&["a".to_owned(), "a".to_owned()]).expect("a fault").contains("twice"));
}
