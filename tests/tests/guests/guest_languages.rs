//! Handlers written in other languages keep the same promises: the example of each language, built
//! beforehand by `guest-examples/languages/build.sh`, on a real PostgreSQL. `ONCEBOX_LANGUAGES`
//! names another folder with components than `target/languages`.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use oncebox_inbox::SessionSettings;
use oncebox_model::{handler::Handler, record::Record};
use oncebox_runtime::{HandlerSettings, RuntimeConfig, WasmRuntime};
use oncebox_tests::inbox::{
    InboxFixture, PlainHandler, PlainHandlers, Row, TestConsumer, deliver, execute, record,
};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

const POLICY: &str = "batch = { duration_ms = 60000 }
retry = { attempts_max = 2, backoff_min_ms = 600000, backoff_max_ms = 600000 }
limits = { deadline_ms = 20000 }";
const SCHEMA: &str = include_str!("../../../guest-examples/languages/schema.sql");

/// A tenant with the example's tables, and one component that takes every message.
struct LanguageFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
    handlers: Arc<PlainHandlers>,
}

impl LanguageFixture {
    async fn new(component: &str) -> Self {
        let inbox = InboxFixture::new().await;
        let tenant = inbox.tenant("acme", SCHEMA).await;
        let consumer = inbox.consumer(&tenant, "orders", POLICY).await;
        let handlers = PlainHandlers::of(with_effect(load(component, &consumer).await));
        Self { inbox, consumer, handlers }
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

async fn load(component: &str, consumer: &TestConsumer) -> Arc<dyn Handler> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/languages");
    let path = std::env::var_os("ONCEBOX_LANGUAGES")
        .map_or(own, PathBuf::from)
        .join(format!("{component}.wasm"));
    let language = component.split('-').next().unwrap();
    let bytes = std::fs::read(&path).unwrap_or_else(|error| {
        panic!(
            "`{}`: {error}; build it with `guest-examples/languages/build.sh {language}`",
            path.display()
        )
    });
    let runtime =
        WasmRuntime::new(RuntimeConfig { instances_max: 4, ..RuntimeConfig::default() }).unwrap();
    let start = Instant::now();
    let loaded =
        runtime.load(&bytes).await.unwrap_or_else(|error| panic!("`{component}`: {error}"));
    println!(
        "{component}: {} KiB, checked and compiled in {:.2} s",
        bytes.len() / 1024,
        start.elapsed().as_secs_f64()
    );
    println!("{component}: imports {}", loaded.imports().join(" "));
    let limits = consumer.policy.limits.clone();
    Arc::new(runtime.handler(
        &loaded,
        HandlerSettings { version: 1, limits, config: Vec::new(), random_key: [1; 32] },
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

fn order(offset: i64, id: &str, payload: &str) -> Record {
    let mut record = record(offset, id, payload);
    record.headers.push(("type".to_owned(), "order.placed".into()));
    record
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
