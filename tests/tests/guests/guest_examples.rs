//! The example components do what their README says, and each effect once, however often their
//! message is delivered. `ONCEBOX_COMPONENTS` names another folder than the committed components'.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use oncebox_inbox::SessionSettings;
use oncebox_model::{handler::Handler, record::Record};
use oncebox_runtime::{HandlerSettings, WasmRuntime};
use oncebox_tests::{
    guests,
    inbox::{
        InboxFixture, PlainHandler, PlainHandlers, Row, TestConsumer, deliver, execute, record,
    },
    outgoing::{derived_id, outgoing},
    program::WorkingDir,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};

const POLICY: &str = "batch = { duration_ms = 60000 }
retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }
limits = { deadline_ms = 20000 }";

/// A tenant with an example's tables, and its handlers by event type.
struct ExampleFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
    handlers: Arc<PlainHandlers>,
}

impl ExampleFixture {
    /// `components` by event type; `*` takes what no other takes.
    async fn new(schema: &str, components: &[(&str, &str)]) -> Self {
        let inbox = InboxFixture::new().await;
        let tenant = inbox.tenant("acme", schema).await;
        let consumer = inbox.consumer(&tenant, "orders", POLICY).await;
        let runtime = guests::runtime().unwrap();
        let mut handlers = HashMap::new();
        for (event_type, name) in components {
            handlers.insert(
                (*event_type).to_owned(),
                with_effect(load(&runtime, name, &consumer).await),
            );
        }
        let handlers = PlainHandlers::resolving(0, move |event_type| {
            handlers.get(event_type).or_else(|| handlers.get("*")).cloned()
        });
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

    /// Twice, the second time at other offsets, as a producer that repeats itself does it.
    async fn deliver_twice(&self, records: &[Record]) {
        self.deliver(records).await;
        let before = self.inbox.rows().await;
        let again: Vec<_> = records
            .iter()
            .cloned()
            .map(|record| Record { offset: record.offset + 1_000, ..record })
            .collect();
        self.deliver(&again).await;
        assert_eq!(self.inbox.rows().await.len(), before.len(), "the second delivery left rows");
    }

    async fn row(&self, id: &str) -> Row {
        self.inbox.row(&self.consumer, id).await
    }

    /// Rows of the tenant's tables, as JSON.
    async fn rows(&self, query: &str) -> Vec<Value> {
        let schema = &self.consumer.tenant.schema_name;
        let mut connection = self.inbox.superuser().await;
        connection.execute(AssertSqlSafe(format!("SET search_path = {schema}"))).await.unwrap();
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT to_jsonb(x) FROM ({query}) x")))
            .fetch_all(&mut connection)
            .await
            .unwrap()
    }

    /// State and result of a message's row.
    async fn check(&self, id: &str, status: &str, reason: Option<&str>, result: Option<Value>) {
        let row = self.row(id).await;
        assert_eq!(
            (row.status.as_str(), row.reason.as_deref(), &row.result),
            (status, reason, &result),
            "`{id}`: {:?}",
            row.last_error
        );
    }
}

/// The committed components, or those that were just built.
fn components() -> PathBuf {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples/components");
    std::env::var_os("ONCEBOX_COMPONENTS").map_or(committed, PathBuf::from)
}

async fn load(runtime: &WasmRuntime, name: &str, consumer: &TestConsumer) -> Arc<dyn Handler> {
    let path = components().join(format!("{name}.wasm"));
    let bytes =
        std::fs::read(&path).unwrap_or_else(|error| panic!("`{}`: {error}", path.display()));
    let loaded = runtime.load(&bytes).await.unwrap_or_else(|error| panic!("`{name}`: {error}"));
    let limits = consumer.policy.limits.clone();
    Arc::new(runtime.handler(
        &loaded,
        HandlerSettings {
            version: 1,
            limits,
            config: Vec::new(),
            random_key: [1; 32],
            may_emit: true,
        },
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

/// What could go wrong: stock is taken twice, or a business "no" is a failure. S4-010: first and
/// second delivery of `msg-abc-123`; S0-038: too little stock.
#[tokio::test(flavor = "multi_thread")]
async fn inventory_is_reserved_once_and_too_little_is_an_answer() {
    let schema = format!(
        "{} INSERT INTO stock VALUES ('apple', 10);",
        include_str!("../../../guest-examples/inventory-reservation/schema.sql")
    );
    let fixture =
        ExampleFixture::new(&schema, &[("inventory.reserve", "inventory-reservation")]).await;
    let reserve = |offset, id: &str, quantity: i64| {
        event(
            offset,
            id,
            "inventory.reserve",
            &json!({ "reservation_id": format!("r-{id}"), "order_id": "o-1", "sku": "apple", "quantity": quantity }).to_string(),
        )
    };
    let stock = async || fixture.rows("SELECT sku, available FROM stock").await;

    // First delivery: one effect, one completed row with the answer.
    fixture.deliver(&[reserve(0, "msg-abc-123", 3)]).await;
    let first = fixture.row("msg-abc-123").await;
    assert_eq!(
        (first.state(), first.result.clone()),
        (("completed", None, 1), Some(json!({ "status": "reserved" })))
    );
    let reservation = [
        json!({ "reservation_id": "r-msg-abc-123", "order_id": "o-1", "sku": "apple", "quantity": 3 }),
    ];
    let reservations =
        "SELECT reservation_id, order_id, sku, quantity FROM inventory_reservations ORDER BY 1";
    assert_eq!(fixture.rows(reservations).await, reservation);
    assert_eq!(stock().await, [json!({ "sku": "apple", "available": 7 })]);

    // Second delivery, of the same record and of a copy: acked, and nothing changes.
    fixture.deliver(&[reserve(0, "msg-abc-123", 3), reserve(1, "msg-abc-123", 3)]).await;
    // S4-010.
    assert_eq!(fixture.row("msg-abc-123").await, first);
    assert_eq!(fixture.rows(reservations).await, reservation);
    assert_eq!(stock().await, [json!({ "sku": "apple", "available": 7 })]);

    // Too little: completed, nothing written, and the answer is kept. Then what is left, to the
    // last.
    fixture
        .deliver_twice(&[
            reserve(2, "msg-too-many", 8),
            reserve(3, "msg-rest", 7),
            reserve(4, "msg-none", 1),
            reserve(5, "msg-zero", 0),
        ])
        .await;
    // S0-038.
    fixture
        .check("msg-too-many", "completed", None, Some(json!({ "status": "insufficient_stock" })))
        .await;
    fixture.check("msg-rest", "completed", None, Some(json!({ "status": "reserved" }))).await;
    fixture
        .check("msg-none", "completed", None, Some(json!({ "status": "insufficient_stock" })))
        .await;
    fixture.check("msg-zero", "failed_terminal", Some("reject"), None).await;
    assert_eq!(fixture.rows(reservations).await.len(), 2);
    assert_eq!(stock().await, [json!({ "sku": "apple", "available": 0 })]);
    fixture.inbox.finish().await;
}

/// What could go wrong: an effect without its inbox row or the other way round; two messages that
/// mean the same order ship twice. S2-006, S2-007, S3-002, S4-011.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_shipped_once_whatever_its_messages_are_called() {
    let fixture = ExampleFixture::new(
        include_str!("../../../guest-examples/fulfilment/schema.sql"),
        &[("order.placed", "fulfilment")],
    )
    .await;
    let order = |offset, id: &str, order: &str, units: i64| {
        event(
            offset,
            id,
            "order.placed",
            &json!({ "order_id": order, "warehouse": "north", "units": units }).to_string(),
        )
    };
    fixture
        .deliver_twice(&[
            order(0, "m-1", "o-1", 3),
            order(1, "m-2", "o-1", 3),
            order(2, "m-3", "o-2", 4),
            order(3, "m-4", "o-3", 0),
        ])
        .await;
    fixture.check("m-1", "completed", None, Some(json!({ "status": "shipped" }))).await;
    fixture.check("m-2", "completed", None, Some(json!({ "status": "already_shipped" }))).await;
    fixture.check("m-3", "completed", None, Some(json!({ "status": "shipped" }))).await;
    fixture.check("m-4", "failed_terminal", Some("reject"), None).await;
    // S2-006, S2-007, S3-002, S4-011.
    assert_eq!(
        fixture.rows("SELECT order_id, message_id, units FROM shipments ORDER BY 1").await,
        [
            json!({ "order_id": "o-1", "message_id": "m-1", "units": 3 }),
            json!({ "order_id": "o-2", "message_id": "m-3", "units": 4 }),
        ]
    );
    assert_eq!(
        fixture.rows("SELECT * FROM fulfilment_totals").await,
        [json!({ "warehouse": "north", "shipments": 2, "units": 7 })]
    );
    // The row says which version did it, and that it was run once.
    let row = fixture.row("m-1").await;
    assert_eq!((row.attempts, row.version_id, row.processed), (1, Some(1), true));
    fixture.inbox.finish().await;
}

/// What could go wrong: an amount loses digits, an effect that is not idempotent happens twice, or
/// a statement that was recovered from fails the message. Numeric, savepoint, park, reject,
/// redelivery.
#[tokio::test(flavor = "multi_thread")]
async fn payments_are_booked_to_the_last_digit() {
    let schema = format!(
        "{} INSERT INTO account VALUES ('old', 0.1);",
        include_str!("../../../guest-examples/ledger/schema.sql")
    );
    let fixture = ExampleFixture::new(&schema, &[("payment.captured", "ledger")]).await;
    let payment = |offset, id: &str, payload: Value| {
        event(offset, id, "payment.captured", &payload.to_string())
    };
    let empty = Record { payload: None, ..payment(9, "tombstone", Value::Null) };
    fixture
        .deliver_twice(&[
            payment(0, "tenth", json!({ "account": "old", "amount": "0.2" })),
            payment(1, "opens", json!({ "account": "new", "amount": "12.50", "open_account": true })),
            // The account is there: its insert fails, and the handler goes back to its savepoint.
            payment(2, "opens again", json!({ "account": "new", "amount": "12345678901234567890.123456789", "open_account": true })),
            payment(3, "unknown account", json!({ "account": "nobody", "amount": "1" })),
            payment(4, "negative", json!({ "account": "old", "amount": "-1" })),
            payment(5, "float", json!({ "account": "old", "amount": 1.5 })),
            payment(6, "NaN", json!({ "account": "old", "amount": "NaN" })),
            payment(7, "no account", json!({ "amount": "1" })),
            event(8, "no JSON", "payment.captured", "{"),
            empty,
            payment(10, "unicode", json!({ "account": "old", "amount": "１" })),
            payment(11, "nul", json!({ "account": "\0", "amount": "1", "open_account": true })),
        ])
        .await;
    fixture.check("tenth", "completed", None, Some(json!({ "balance": "0.3" }))).await;
    fixture.check("opens", "completed", None, Some(json!({ "balance": "12.50" }))).await;
    fixture
        .check(
            "opens again",
            "completed",
            None,
            Some(json!({ "balance": "12345678901234567902.623456789" })),
        )
        .await;
    fixture.check("unknown account", "parked", Some("park"), None).await;
    assert_eq!(
        fixture.row("unknown account").await.last_error.as_deref(),
        Some("no account `nobody`")
    );
    for rejected in ["negative", "float", "NaN", "no account", "no JSON", "tombstone", "unicode"] {
        fixture.check(rejected, "failed_terminal", Some("reject"), None).await;
    }
    // What PostgreSQL's text cannot hold is not the handler's decision: it is tried again.
    assert_eq!(fixture.row("nul").await.status, "failed_retryable");
    assert_eq!(
        fixture
            .rows("SELECT message_id, account, amount::text FROM ledger_entry ORDER BY entry")
            .await,
        [
            json!({ "message_id": "tenth", "account": "old", "amount": "0.2" }),
            json!({ "message_id": "opens", "account": "new", "amount": "12.50" }),
            json!({ "message_id": "opens again", "account": "new", "amount": "12345678901234567890.123456789" }),
        ]
    );
    assert_eq!(
        fixture.rows("SELECT account, balance::text FROM account ORDER BY 1").await,
        [
            json!({ "account": "new", "balance": "12345678901234567902.623456789" }),
            json!({ "account": "old", "balance": "0.3" }),
        ]
    );
    fixture.inbox.finish().await;
}

/// What could go wrong: an instance whose memory is full, or just not, loses or mixes up what it
/// holds; a handler of batches answers for another message than it was asked. S0-036, S3-011.
#[tokio::test(flavor = "multi_thread")]
async fn orders_of_any_size_are_booked_one_by_one_and_together() {
    for component in ["order", "order-batch"] {
        let schema = format!(
            "{} INSERT INTO account (id) VALUES (17);",
            include_str!("../../../guest-examples/order/schema.sql")
        );
        let fixture = ExampleFixture::new(&schema, &[("order.placed", component)]).await;
        let sizes =
            [0_usize, 1, 1_000, 60_000, 100_000, 131_072, 200_000, 262_144, 400_000, 900_000];
        let order = |(offset, size): (usize, &usize)| {
            let account = if offset == 3 { 18 } else { 17 };
            let payload = json!({ "order_id": format!("o-{offset}"), "account": account, "amount": 1, "note": "né".repeat(*size) });
            event(offset as i64, &format!("m-{offset}"), "order.placed", &payload.to_string())
        };
        fixture.deliver_twice(&sizes.iter().enumerate().map(order).collect::<Vec<_>>()).await;
        fixture.check("m-3", "failed_terminal", Some("reject"), None).await;
        let booked = "SELECT id, length(note) AS length, note = repeat('né', length(note) / 2) AS \
            whole FROM orders ORDER BY length";
        let expected = sizes.iter().enumerate().filter(|(offset, _)| *offset != 3);
        let expected: Vec<_> = expected
            .map(|(n, size)| json!({ "id": format!("o-{n}"), "length": 2 * size, "whole": true }))
            .collect();
        // S0-036, S3-011.
        assert_eq!(fixture.rows(booked).await, expected, "{component}");
        assert_eq!(
            fixture.rows("SELECT * FROM account").await,
            [json!({ "id": 17, "balance": 9, "n": 9 })]
        );
        fixture.inbox.finish().await;
    }
}

/// What could go wrong: an order is booked twice, or half: its row without its account's balance.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_booked_once_or_not_at_all() {
    let schema = format!(
        "{} INSERT INTO account (id) VALUES (17);",
        include_str!("../../../guest-examples/order/schema.sql")
    );
    let fixture = ExampleFixture::new(&schema, &[("order.placed", "order")]).await;
    let order = |offset, id: &str, order: &str, account: i64| {
        let payload =
            json!({ "order_id": order, "account": account, "amount": 250, "note": "a gift" });
        event(offset, id, "order.placed", &payload.to_string())
    };
    fixture
        .deliver_twice(&[
            order(0, "first", "o-1", 17),
            order(1, "second", "o-2", 17),
            order(2, "unknown account", "o-3", 18),
            order(3, "the first again", "o-1", 17),
            event(4, "malformed", "order.placed", r#"{"order_id": "o-4", "account": 17}"#),
            event(
                5,
                "too wide",
                "order.placed",
                r#"{"order_id": "o-5", "account": 3000000000, "amount": 1, "note": ""}"#,
            ),
        ])
        .await;
    for booked in ["first", "second"] {
        fixture.check(booked, "completed", None, None).await;
    }
    for rejected in ["unknown account", "malformed", "too wide"] {
        fixture.check(rejected, "failed_terminal", Some("reject"), None).await;
    }
    assert_eq!(fixture.row("unknown account").await.last_error.as_deref(), Some("no account 18"));
    let malformed = "malformed payload: missing field `amount` at line 1 column 34";
    assert_eq!(fixture.row("malformed").await.last_error.as_deref(), Some(malformed));
    // Another message for an order that is there: the handler has no answer to it, so its error is
    // the reason.
    fixture.check("the first again", "failed_retryable", Some("sql_error:23505"), None).await;
    assert_eq!(
        fixture.rows("SELECT id, account, amount, note FROM orders ORDER BY 1").await,
        [
            json!({ "id": "o-1", "account": 17, "amount": 250, "note": "a gift" }),
            json!({ "id": "o-2", "account": 17, "amount": 250, "note": "a gift" }),
        ]
    );
    assert_eq!(
        fixture.rows("SELECT * FROM account").await,
        [json!({ "id": 17, "balance": 500, "n": 2 })]
    );
    fixture.inbox.finish().await;
}

/// The newest time and state that were named, and the number of events.
type Progress = (Option<(String, String)>, i64);

/// What the tables must hold, computed from the events alone.
#[derive(Default)]
struct Expected {
    audit: BTreeMap<String, Value>,
    /// By repository: commits, pushes, stars.
    activity: BTreeMap<i64, [i64; 3]>,
    /// By kind, repository and number.
    progress: BTreeMap<(&'static str, i64, i64), Progress>,
}

impl Expected {
    fn add(&mut self, event: &str, delivery: &str, payload: &Value) {
        let repository = payload["repository"]["id"].as_i64();
        self.audit.insert(delivery.to_owned(), json!({ "event": event, "action": payload["action"], "repository": repository, "n": 1 }));
        let Some(repository) = repository else { return };
        match event {
            "push" => {
                self.count(repository, [payload["commits"].as_array().unwrap().len() as i64, 1, 0])
            }
            "star" | "watch" => {
                self.count(repository, [0, 0, if payload["action"] == "deleted" { -1 } else { 1 }])
            }
            "issues" => self.newest("issue", repository, &payload["issue"]),
            "pull_request" => self.newest("pull_request", repository, &payload["pull_request"]),
            _ => {}
        }
    }

    fn count(&mut self, repository: i64, delta: [i64; 3]) {
        let activity = self.activity.entry(repository).or_default();
        activity.iter_mut().zip(delta).for_each(|(sum, delta)| *sum += delta);
    }

    fn newest(&mut self, kind: &'static str, repository: i64, of: &Value) {
        let (newest, events) =
            self.progress.entry((kind, repository, of["number"].as_i64().unwrap())).or_default();
        *events += 1;
        let state = if of["merged"] == true { Some("merged") } else { of["state"].as_str() };
        if let Some(state) = state {
            *newest = newest
                .take()
                .max(Some((of["updated_at"].as_str().unwrap().to_owned(), state.to_owned())));
        }
    }
}

/// What could go wrong: a handler stumbles over a real payload, or a redelivery counts twice. Every
/// webhook of the demo's data, each by its handler, each delivered twice.
#[tokio::test(flavor = "multi_thread")]
async fn every_github_webhook_has_its_effect_once() {
    let components = [
        ("com.github.push", "github-push"),
        ("com.github.star", "github-stars"),
        ("com.github.watch", "github-stars"),
        ("com.github.issues", "github-issues"),
        ("com.github.pull_request", "github-pull-requests"),
        ("*", "github-audit"),
    ];
    let fixture =
        ExampleFixture::new(include_str!("../../../guest-examples/github-schema.sql"), &components)
            .await;
    let (mut expected, mut records) = (Expected::default(), Vec::new());
    for (offset, line) in
        (0..).zip(include_str!("../../../guest-examples/data/github-webhooks.jsonl").lines())
    {
        let webhook: Value = serde_json::from_str(line).unwrap();
        let (name, delivery) =
            (webhook["event"].as_str().unwrap(), webhook["delivery"].as_str().unwrap());
        expected.add(name, delivery, &webhook["payload"]);
        records.push(event(
            offset,
            delivery,
            &format!("com.github.{name}"),
            &webhook["payload"].to_string(),
        ));
    }
    for event_type in
        components.iter().map(|(event_type, _)| event_type).filter(|event_type| **event_type != "*")
    {
        assert!(
            records.iter().any(|record| record.header("type") == Some(event_type.as_bytes())),
            "the data holds no `{event_type}`"
        );
    }
    fixture.deliver_twice(&records).await;

    let completed = fixture
        .inbox
        .number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts = 1")
        .await;
    assert_eq!(
        completed,
        records.len() as i64,
        "{:#?}",
        fixture.inbox.rows().await.iter().find(|row| row.status != "completed")
    );
    let audit = fixture
        .rows(
            "SELECT delivery, event, action, repository, count(*) AS n FROM audit \
        GROUP BY 1, 2, 3, 4",
        )
        .await;
    let audit: BTreeMap<_, _> = audit
        .into_iter()
        .map(|mut row| {
            (row["delivery"].as_str().unwrap().to_owned(), {
                row.as_object_mut().unwrap().remove("delivery");
                row
            })
        })
        .collect();
    assert_eq!(audit, expected.audit);

    let activity: Vec<_> = expected.activity.iter().map(|(repository, [commits, pushes, stars])| {
        json!({ "repository": repository, "commits": commits, "pushes": pushes, "stars": stars })
    }).collect();
    assert!(!activity.is_empty());
    assert_eq!(
        fixture
            .rows("SELECT repository, commits, pushes, stars FROM repository_activity ORDER BY 1")
            .await,
        activity
    );

    for kind in ["issue", "pull_request"] {
        let progress: Vec<_> = expected.progress.iter().filter(|((of, ..), _)| *of == kind).map(|((_, repository, number), (newest, events))| {
            json!({ "repository": repository, "number": number, "state": newest.as_ref().map(|(_, state)| state), "events": events })
        }).collect();
        assert!(!progress.is_empty());
        assert_eq!(
            fixture
                .rows(&format!(
                    "SELECT repository, number, state, events FROM {kind} ORDER BY 1, 2"
                ))
                .await,
            progress
        );
    }
    fixture.inbox.finish().await;
}

/// What could go wrong: an order is confirmed twice or under another id, its reminder is sent
/// although it is paid, or an order that is refused tells anyone. S1-039.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_confirmed_and_its_reminder_is_withdrawn_when_it_is_paid() {
    let schema = include_str!("../../../guest-examples/order-events/schema.sql");
    let mut fixture = ExampleFixture::new(schema, &[("*", "order-events")]).await;
    let limits = json!({ "destinations_allowed": ["kafka:order-events", "inbox:orders"] });
    let limits = limits.as_object().unwrap();
    let tenants = fixture.inbox.control.tenants();
    fixture.consumer.tenant = tenants.set_limits("acme", limits).await.unwrap();
    let of = |offset, id: &str, what: &str, order: &str| {
        let payload = json!({ "order_id": order, "amount": 250 }).to_string();
        event(offset, id, &format!("order.{what}"), &payload)
    };
    let log = [
        of(0, "m-1", "placed", "o-1"),
        of(1, "m-2", "placed", "o-2"),
        of(2, "m-3", "paid", "o-1"),
        of(3, "m-4", "paid", "o-9"),
    ];
    fixture.deliver_twice(&log).await;
    fixture.check("m-1", "completed", None, None).await;
    fixture.check("m-4", "failed_terminal", Some("reject"), None).await;
    let rows = outgoing(&fixture.inbox).await;
    let sent: Vec<_> = rows
        .iter()
        .map(|row| (row.message_id.as_str(), row.destination.as_str(), row.status.as_str()))
        .collect();
    assert_eq!(
        sent,
        [
            ("m-1", "kafka:order-events", "received"),
            ("m-1", "inbox:orders", "cancelled"),
            ("m-2", "kafka:order-events", "received"),
            ("m-2", "inbox:orders", "received"),
        ]
    );
    for row in &rows {
        let ordinal = u32::try_from(row.ordinal).unwrap();
        // S1-039.
        assert_eq!(row.id, derived_id("acme", "orders", &row.message_id, ordinal));
        let order = if row.message_id == "m-1" { "o-1" } else { "o-2" };
        assert_eq!(row.key.as_deref(), Some(order.as_bytes()));
        let (event_type, payload, due_after_ms) = match ordinal {
            0 => ("order.confirmed", json!({ "order_id": order, "amount": 250 }), 0),
            _ => ("order.reminder", json!({ "order_id": order }), 3_600_000),
        };
        assert_eq!((row.event_type.as_str(), row.due_after_ms), (event_type, due_after_ms));
        let found: Value = serde_json::from_slice(row.payload.as_deref().unwrap()).unwrap();
        assert_eq!(found, payload);
    }
    fixture.inbox.finish().await;
}

/// What could go wrong: an order ends twice, keeps units that are given up, or is paid back twice or
/// never, as its answer and its timer come in one order or in the other. S3-021, S1-054.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_and_a_timer_end_an_order_once_in_either_order() {
    let schema = concat!(
        include_str!("../../../guest-examples/order-saga/schema.sql"),
        include_str!("../../../guest-examples/order-saga/rows.sql")
    );
    let mut fixture = ExampleFixture::new(schema, &[("*", "order-saga")]).await;
    let limits = json!({ "destinations_allowed": ["http:pay", "inbox:orders", "kafka:shipments"] });
    let tenants = fixture.inbox.control.tenants();
    let limits = limits.as_object().unwrap();
    fixture.consumer.tenant = tenants.set_limits("acme", limits).await.unwrap();
    let file = include_str!("../../../guest-examples/order-saga/messages.jsonl");
    let log: Vec<_> = (0..)
        .zip(file.lines())
        .map(|(offset, line)| {
            let message: Value = serde_json::from_str(line).unwrap();
            let text = |member: &str| message[member].as_str().unwrap().to_owned();
            event(offset, &text("id"), &text("event_type"), &message["payload"].to_string())
        })
        .collect();
    fixture.deliver_twice(&log).await;
    let states = fixture.rows("SELECT order_id, state FROM orders ORDER BY 1").await;
    let ends = ["charged", "voided", "refused", "rejected"];
    let expected: Vec<_> = (1..)
        .zip(ends)
        .map(|(number, state)| json!({ "order_id": format!("o-{number}"), "state": state }))
        .collect();
    // S3-021, S1-054.
    assert_eq!(states, expected);
    // Only the order that is charged keeps its 3 units.
    assert_eq!(fixture.rows("SELECT units FROM stock").await, [json!({ "units": 7 })]);
    let rows = outgoing(&fixture.inbox).await;
    let sent: Vec<_> = rows
        .iter()
        .map(|row| (row.message_id.as_str(), row.event_type.as_str(), row.status.as_str()))
        .collect();
    assert_eq!(
        sent,
        [
            ("m-1", "order.charge", "received"),
            ("m-1", "order.payment_timed_out", "cancelled"),
            ("m-2", "order.charge", "cancelled"),
            ("m-2", "order.payment_timed_out", "received"),
            ("m-3", "order.charge", "received"),
            ("m-3", "order.payment_timed_out", "cancelled"),
            ("a-1", "order.ship", "received"),
            ("a-2", "order.void", "received"),
        ]
    );
    fixture.inbox.finish().await;
}

/// What could go wrong: a crash around a reply or a timer of a saga loses what it does or does it
/// twice, or `verify` does not try it. S3-021, S1-054.
#[tokio::test(flavor = "multi_thread")]
async fn a_saga_is_verified_with_its_replies_and_timers() {
    let folder = WorkingDir::new().unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples/order-saga");
    let path = |path: PathBuf| path.canonicalize().unwrap().to_str().unwrap().to_owned();
    let component = path(components().join("order-saga.wasm"));
    let [messages, schema, rows] =
        ["messages.jsonl", "schema.sql", "rows.sql"].map(|name| path(example.join(name)));
    let files = ["--message", &messages, "--schema", &schema, "--schema", &rows];
    let arguments = [&["verify", &component, "--json"], &files[..]].concat();
    let said = folder.run(&arguments, "").await.unwrap();
    assert_eq!(said.code, Some(0), "{}{}", said.stderr, said.stdout);
    let report = said.json().unwrap();
    let windows = report["windows"].as_array().unwrap();
    for name in [
        "killed before the outgoing messages are written",
        "reply: killed after the lease",
        "reply: killed after COMMIT",
        "timer: killed after the lease",
        "timer: killed after COMMIT",
    ] {
        let window = windows.iter().find(|window| window["window"] == name);
        let window = window.unwrap_or_else(|| panic!("no `{name}` in {windows:#?}"));
        // S3-021, S1-054.
        assert_eq!((&window["verdict"], &window["killed"]), (&json!("once"), &json!(1)));
    }
    // Which of a reply and a timer comes first decides how an order ends. Nothing else matters.
    let odd: Vec<_> = windows
        .iter()
        .filter(|window| {
            !window["window"].as_str().unwrap().starts_with("in another order")
                && !["once", "changes nothing"].contains(&window["verdict"].as_str().unwrap())
        })
        .collect();
    assert!(odd.is_empty(), "{odd:#?}");
}
