//! Handlers written in other languages keep the same promises: the examples of each language, built
//! beforehand by `guest-examples/languages/build.sh`, on a real PostgreSQL. `ONCEBOX_LANGUAGES`
//! names another folder with components than `target/languages`, and `ONCEBOX_COMPONENTS` another
//! one with those in Rust than `guest-examples/components`.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use oncebox_inbox::SessionSettings;
use oncebox_model::{contract::is_emit, handler::Handler, record::Record};
use oncebox_runtime::HandlerSettings;
use oncebox_tests::{
    guests,
    inbox::{
        InboxFixture, PlainHandler, PlainHandlers, Row, TestConsumer, deliver, execute, record,
    },
};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

const POLICY: &str = "batch = { duration_ms = 60000 }
retry = { attempts_max = 2, backoff_min_ms = 600000, backoff_max_ms = 600000 }
limits = { deadline_ms = 20000 }";
const SCHEMA: &str = include_str!("../../../guest-examples/languages/schema.sql");

/// The tables of the example that sends messages.
const PURCHASES: &str = include_str!("../../../guest-examples/order-events/schema.sql");

/// Settings of that example: one is left at its default.
const SETTINGS: [(&str, &str); 2] = [("confirm_to", "kafka:confirmed"), ("remind_after_s", "60")];

/// A tenant with the example's tables, and one component that takes every message.
struct LanguageFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
    handlers: Arc<PlainHandlers>,
}

impl LanguageFixture {
    async fn new(component: &str) -> Self {
        Self::of(&built(component), SCHEMA, &[]).await
    }

    /// One with other tables, and with settings for the component.
    async fn of(component: &Path, schema: &str, settings: &[(&str, &str)]) -> Self {
        let inbox = InboxFixture::new().await;
        let tenant = inbox.tenant("acme", schema).await;
        let consumer = inbox.consumer(&tenant, "orders", POLICY).await;
        let handlers = PlainHandlers::of(with_effect(load(component, &consumer, settings).await));
        Self { inbox, consumer, handlers }
    }

    /// From now on the tenant may send to these destinations.
    async fn allow(&mut self, destinations: &[&str]) {
        let limits = json!({ "destinations_allowed": destinations });
        let tenants = self.inbox.control.tenants();
        self.consumer.tenant =
            tenants.set_limits("acme", limits.as_object().unwrap()).await.unwrap();
    }

    /// Every record once, by a host of its own.
    async fn deliver(&self, records: &[Record]) {
        let host = self.inbox.host_with(
            &self.consumer,
            self.handlers.clone(),
            &SessionSettings::default(),
        );
        let errors = deliver(&host, records).await;
        assert!(errors.is_empty(), "{errors:?}");
    }

    async fn row(&self, id: &str) -> Row {
        self.inbox.row(&self.consumer, id).await
    }

    async fn check(&self, id: &str, status: &str, reason: Option<&str>, text: &str) {
        let row = self.row(id).await;
        assert_eq!(
            (row.status.as_str(), row.reason.as_deref()),
            (status, reason),
            "`{id}`: {:?}",
            row.last_error
        );
        assert!(
            row.last_error.as_deref().unwrap_or_default().contains(text),
            "`{id}`: {:?} lacks `{text}`",
            row.last_error
        );
    }

    /// Rows of the tenant's tables, as JSON.
    async fn rows(&self, query: &str) -> Vec<Value> {
        let text = format!("SET search_path = {}; ", self.consumer.tenant.schema_name);
        let mut connection = self.inbox.superuser().await;
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await.unwrap();
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT to_jsonb(x) FROM ({query}) x")))
            .fetch_all(&mut connection)
            .await
            .unwrap()
    }
}

/// The path of a component that `guest-examples/languages/build.sh` built.
fn built(component: &str) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/languages");
    std::env::var_os("ONCEBOX_LANGUAGES")
        .map_or(own, PathBuf::from)
        .join(format!("{component}.wasm"))
}

/// The path of the example in Rust that sends messages.
fn order_events_in_rust() -> PathBuf {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples/components");
    std::env::var_os("ONCEBOX_COMPONENTS")
        .map_or(committed, PathBuf::from)
        .join("order-events.wasm")
}

async fn load(path: &Path, consumer: &TestConsumer, settings: &[(&str, &str)]) -> Arc<dyn Handler> {
    let component = path.file_stem().unwrap().to_str().unwrap();
    let bytes = std::fs::read(path).unwrap_or_else(|error| {
        panic!(
            "`{}`: {error}; build it with `guest-examples/languages/build.sh`, or one in Rust with \
             `guest-examples/build.sh build`",
            path.display()
        )
    });
    let runtime = guests::runtime().unwrap();
    let start = Instant::now();
    let loaded =
        runtime.load(&bytes).await.unwrap_or_else(|error| panic!("`{component}`: {error}"));
    println!(
        "{component}: {} KiB, loaded in {:.2} s",
        bytes.len() / 1024,
        start.elapsed().as_secs_f64()
    );
    println!("{component}: imports {}", loaded.imports().join(" "));
    // What a component imports is what it asks to be allowed.
    let emits = loaded.imports().iter().any(|import| is_emit(import));
    assert_eq!(emits, component.ends_with("order-events"), "{component}: {:?}", loaded.imports());
    let limits = consumer.policy.limits.clone();
    let config =
        settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Arc::new(runtime.handler(
        &loaded,
        HandlerSettings { version: 1, limits, config, random_key: [1; 32], may_emit: true },
    ))
}

/// The component, with the row that [`InboxFixture::finish`] counts its effects by.
fn with_effect(component: Arc<dyn Handler>) -> Arc<dyn Handler> {
    PlainHandler::new(1, move |tx, run| {
        let component = component.clone();
        let id = run.message.id.replace('\'', "''");
        Box::pin(async move {
            execute(
                tx,
                &format!("INSERT INTO effect VALUES ('orders', '{id}', {}, 1)", run.attempt),
            )
            .await?;
            component.handle(tx, run).await
        })
    })
}

fn event(offset: i64, id: &str, event_type: &str, payload: &str) -> Record {
    let mut record = record(offset, id, payload);
    record.headers.push(("type".to_owned(), event_type.into()));
    record
}

fn order(offset: i64, id: &str, payload: &str) -> Record {
    event(offset, id, "order.placed", payload)
}

fn placed(order: &str, account: i64, amount: i64, note: &str) -> String {
    json!({ "order_id": order, "account": account, "amount": amount, "note": note, "more": [null, { "a": 1.5 }] }).to_string()
}

/// Payloads that can never succeed.
const MALFORMED: &[(&str, &str)] = &[
    ("no JSON", "{"),
    ("nothing", ""),
    ("no object", "[1, 2]"),
    ("null", "null"),
    ("a text for a number", r#"{"order_id":"o-9","account":"17","amount":250,"note":""}"#),
    ("a number for a text", r#"{"order_id":9,"account":17,"amount":250,"note":""}"#),
    ("a fraction", r#"{"order_id":"o-9","account":17,"amount":2.5,"note":""}"#),
    (
        "an account that does not fit",
        r#"{"order_id":"o-9","account":4294967313,"amount":250,"note":""}"#,
    ),
    ("a truth for a number", r#"{"order_id":"o-9","account":17,"amount":true,"note":""}"#),
    ("a null", r#"{"order_id":"o-9","account":17,"amount":null,"note":""}"#),
    ("a member less", r#"{"order_id":"o-9","account":17,"amount":250}"#),
];

/// What could go wrong: a redelivery books twice, a text or a number is not the one that was sent,
/// a business "no" looks like a bug and is tried for ever, or its statements stay.
async fn check_example(language: &str) {
    let fixture = LanguageFixture::new(language).await;
    let note = "größer \u{1f980} \"quoted\" \\ \n';--";
    let mut records = vec![
        order(0, "first", &placed("o-1", 17, 250, note)),
        order(1, "large", &placed("o-2", 17, 9_007_199_254_740_991 - 250, "")),
        order(2, "negative", &placed("o-3", 3, -5, "back")),
        order(3, "no account", &placed("o-4", 999, 1, "")),
        Record { payload: None, ..order(4, "tombstone", "") },
        order(5, "same order", &placed("o-1", 3, 1, "another message")),
        Record { payload: Some(b"{\"order_id\":\"\xff\"}".to_vec()), ..order(6, "no UTF-8", "") },
    ];
    records.extend((7..).zip(MALFORMED).map(|(offset, (id, payload))| order(offset, id, payload)));
    fixture.deliver(&records).await;
    let before = fixture.inbox.rows().await;
    // Again, at other offsets: as a producer that repeats itself does it.
    let again: Vec<_> = records
        .iter()
        .cloned()
        .map(|record| Record { offset: record.offset + 1_000, ..record })
        .collect();
    fixture.deliver(&again).await;
    assert_eq!(fixture.inbox.rows().await.len(), before.len(), "the second delivery left rows");

    for id in ["first", "large", "negative"] {
        fixture.check(id, "completed", None, "").await;
        assert_eq!(fixture.row(id).await.result, None, "`{id}`");
    }
    fixture.check("no account", "failed_terminal", Some("reject"), "no account 999").await;
    for id in ["tombstone", "no UTF-8"].into_iter().chain(MALFORMED.iter().map(|(id, _)| *id)) {
        fixture.check(id, "failed_terminal", Some("reject"), "payload").await;
    }
    // What only the database can say is no decision of the handler: tried again, with PostgreSQL's
    // words.
    fixture.check("same order", "failed_retryable", Some("sql_error:23505"), "orders_pkey").await;
    assert_eq!(
        fixture.rows("SELECT * FROM orders ORDER BY id").await,
        [
            json!({ "id": "o-1", "account": 17, "amount": 250, "note": note }),
            json!({ "id": "o-2", "account": 17, "amount": 9_007_199_254_740_741_i64, "note": "" }),
            json!({ "id": "o-3", "account": 3, "amount": -5, "note": "back" }),
        ]
    );
    assert_eq!(
        fixture.rows("SELECT * FROM account WHERE n <> 0 OR balance <> 0 ORDER BY id").await,
        [
            json!({ "id": 3, "balance": -5, "n": 1 }),
            json!({ "id": 17, "balance": 9_007_199_254_740_991_i64, "n": 2 })
        ]
    );
    fixture.inbox.finish().await;
}

/// What could go wrong: a bug in a handler leaves "unreachable" and nothing to go by, or what it
/// wrote before.
async fn check_crash(component: &str, text: &str) {
    let fixture = LanguageFixture::new(component).await;
    fixture.deliver(&[order(0, "crash", &placed("o-1", 17, 250, ""))]).await;
    let row = fixture.row("crash").await;
    println!(
        "{component}: {} {:?}: {}",
        row.status,
        row.reason,
        row.last_error.as_deref().unwrap_or_default()
    );
    assert_eq!(row.status, "failed_retryable");
    assert!(
        row.last_error.as_deref().unwrap_or_default().contains(text),
        "{:?} lacks `{text}`",
        row.last_error
    );
    assert!(fixture.rows("SELECT * FROM orders").await.is_empty());
    fixture.inbox.finish().await;
}

/// An order's id with what JSON, UTF-8 and formats have to carry.
const ODD_ID: &str = "o-\"gr\u{f6}\u{df}er\" \u{1f980} \\ %s{}<&";

/// Messages of the example that sends messages.
fn order_events() -> Vec<Record> {
    let events = [
        ("placed", "order.placed", json!({ "order_id": ODD_ID, "amount": 250, "more": [1] })),
        ("kept", "order.placed", json!({ "order_id": "o-2" })),
        ("paid", "order.paid", json!({ "order_id": ODD_ID })),
        ("reminded late", "order.reminder", json!({ "order_id": ODD_ID })),
        ("reminded", "order.reminder", json!({ "order_id": "o-2" })),
        ("no order", "order.paid", json!({ "order_id": "o-9" })),
        ("same order", "order.placed", json!({ "order_id": "o-2", "amount": 1 })),
        // Its token would be refused, so nothing of it stays.
        ("control character", "order.placed", json!({ "order_id": "o-\n" })),
        ("no event", "order.shipped", json!({ "order_id": "o-2" })),
        ("no id", "order.placed", json!({ "amount": 1 })),
        ("a number for a text", "order.placed", json!({ "order_id": 9 })),
        ("a text for a number", "order.placed", json!({ "order_id": "o-9", "amount": "1" })),
    ];
    (0..)
        .zip(events)
        .map(|(offset, (id, event_type, payload))| {
            event(offset, id, event_type, &payload.to_string())
        })
        .collect()
}

/// What a component made of the messages of [`order_events`].
#[derive(Debug, PartialEq)]
struct Observed {
    /// Id, status and reason of each message.
    states: Vec<(String, String, Option<String>)>,
    /// Rows of the handler's own table.
    purchases: Vec<Value>,
    /// Rows of the outgoing messages, but for the times of this run and the places they give.
    outgoing: Vec<Value>,
}

const OUTGOING: &str = "SELECT message_id, ordinal, id, destination, convert_from(key, 'UTF8') AS \
    key, event_type, content_type, correlation_id, encode(headers, 'hex') AS headers, \
    convert_from(payload, 'UTF8')::jsonb AS payload, cancel_token, status, reason, attempts, \
    (extract(epoch FROM due_at - created_at) * 1000)::bigint AS due_after_ms FROM oncebox.outgoing \
    ORDER BY message_id, ordinal";

/// Runs the messages through a component. At first the tenant may not send to its inbox: the order
/// of that time is refused as a whole.
async fn observe(component: &Path) -> Observed {
    let mut fixture = LanguageFixture::of(component, PURCHASES, &SETTINGS).await;
    fixture.allow(&["kafka:confirmed"]).await;
    let refused = json!({ "order_id": "o-3", "amount": 5 }).to_string();
    fixture.deliver(&[order(100, "refused", &refused)]).await;
    fixture.allow(&["kafka:confirmed", "inbox:orders"]).await;
    let records = order_events();
    fixture.deliver(&records).await;
    let again: Vec<_> = records
        .iter()
        .cloned()
        .map(|record| Record { offset: record.offset + 1_000, ..record })
        .collect();
    fixture.deliver(&again).await;
    let rows = fixture.inbox.rows().await.into_iter();
    let observed = Observed {
        states: rows.map(|row| (row.message_id, row.status, row.reason)).collect(),
        purchases: fixture.rows("SELECT * FROM purchases ORDER BY order_id COLLATE \"C\"").await,
        outgoing: fixture.rows(OUTGOING).await,
    };
    fixture.inbox.finish().await;
    observed
}

/// What could go wrong: a language sends what another does not, under another id or key, or with a
/// payload that its own writer of JSON or UTF-8 spoils; a reminder is not withdrawn; or an order
/// that is not stored is confirmed.
async fn check_order_events(language: &str) {
    let observed = observe(&built(&format!("{language}-order-events"))).await;
    assert_eq!(observed, observe(&order_events_in_rust()).await, "{language} and Rust differ");

    let sent: Vec<_> = observed
        .outgoing
        .iter()
        .map(|row| ["message_id", "destination", "key", "status"].map(|name| row[name].as_str()))
        .collect();
    assert_eq!(
        sent,
        [
            ["kept", "kafka:confirmed", "o-2", "received"].map(Some),
            ["kept", "inbox:orders", "o-2", "received"].map(Some),
            ["placed", "kafka:confirmed", ODD_ID, "received"].map(Some),
            ["placed", "inbox:orders", ODD_ID, "cancelled"].map(Some),
        ]
    );
    assert_eq!(observed.outgoing[2]["payload"], json!({ "order_id": ODD_ID, "amount": 250 }));
    assert_eq!(observed.outgoing[1]["due_after_ms"], 60_000);
    assert_eq!(
        observed.purchases,
        [
            json!({ "order_id": ODD_ID, "amount": 250, "is_paid": true, "reminders": 0 }),
            json!({ "order_id": "o-2", "amount": 0, "is_paid": false, "reminders": 1 }),
        ]
    );
    for (id, status, reason) in &observed.states {
        let completed = ["placed", "kept", "paid", "reminded late", "reminded"];
        assert_eq!(status == "completed", completed.contains(&id.as_str()), "`{id}`: {reason:?}");
    }
}

macro_rules! languages {
    ($($language:ident: $text:literal,)+) => {$(
        mod $language {
            #[tokio::test(flavor = "multi_thread")]
            async fn books_each_order_once() {
                super::check_example(stringify!($language)).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn says_why_it_crashed() {
                super::check_crash(concat!(stringify!($language), "-crash"), $text).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn sends_what_the_example_in_rust_sends() {
                super::check_order_events(stringify!($language)).await;
            }
        }
    )+};
}

// What each language says of the bug in `guest-examples/languages/crash`.
languages! {
    typescript: "TypeError: not a function",
    javascript: "TypeError: not a function",
    python: "KeyError: 'lines'",
    go: "index out of range [3] with length 0",
    c: "Assertion failed: lines > 3",
}
