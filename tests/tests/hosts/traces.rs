//! What a collector of OpenTelemetry gets to see of a message: one trace, from its producer over
//! each run to the messages that it causes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use oncebox_tests::{
    collector::{CollectedSpan, Collector},
    guests::Step,
    host::{HostFixture, HostProcess, Options},
    shop::{Publisher, ShopFixture},
    wait::{self, DEADLINE},
};
use rand::{SeedableRng, rngs::StdRng};
use sqlx::AssertSqlSafe;

/// Id of the span in which a producer sent its message.
const PRODUCER: &str = "b7ad6b7169203331";

/// The `traceparent` of a producer, with its decision.
fn trace_parent(trace_id: &str, is_sampled: bool) -> String {
    format!("00-{trace_id}-{PRODUCER}-0{}", u8::from(is_sampled))
}

fn new_trace() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Starts a host that sends to a collector.
async fn start(base: &HostFixture, name: &str, collector: &Collector) -> Result<HostProcess> {
    let to = ("ONCEBOX_TELEMETRY_ENDPOINT", collector.url());
    let more = [("ONCEBOX_TELEMETRY_STATEMENTS", "true"), ("ONCEBOX_TELEMETRY_LOGS", "true")];
    base.start_ready(name, &[to, more[0], more[1], ("OTEL_BSP_SCHEDULE_DELAY", "200")]).await
}

/// The spans of a trace.
fn of_trace(collector: &Collector, trace_id: &str) -> Vec<CollectedSpan> {
    collector.spans().into_iter().filter(|span| span.trace_id == trace_id).collect()
}

/// Fails the first run of each order.
async fn fail_first_runs(shop: &ShopFixture) -> Result<()> {
    let schema = &shop.base.tenant.schema_name;
    let sql = format!(
        "CREATE FUNCTION {schema}.fail_first() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER \
            SET search_path = pg_catalog, pg_temp AS $$ BEGIN \
            IF NEW.consumer = 'orders' AND EXISTS (SELECT 1 FROM oncebox.inbox i WHERE \
            i.message_id = NEW.message_id AND i.attempts = 1) THEN \
            RAISE EXCEPTION 'the first run fails'; END IF; RETURN NEW; END $$;\n\
         CREATE TRIGGER fail_first BEFORE INSERT ON {schema}.seen FOR EACH ROW EXECUTE FUNCTION \
            {schema}.fail_first();"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&shop.base.pool).await?;
    Ok(())
}

/// What could go wrong: the trace of a message ends at the inbox, a retry begins another one, or a
/// message sent on comes from nowhere; a span says that a run had its effect, and it was rolled
/// back.
#[tokio::test(flavor = "multi_thread")]
async fn one_trace_leads_from_a_producer_over_a_retry_an_hour_later_to_what_is_sent_on() {
    let (collector, trace) = (Collector::start().await.unwrap(), new_trace());
    let mut shop = ShopFixture::with_slow_retries().await.unwrap();
    fail_first_runs(&shop).await.unwrap();
    let first = start(&shop.base, "a", &collector).await.unwrap();
    shop.place_traced("traced", &trace_parent(&trace, true)).await.unwrap();
    let failed = "SELECT count(*) FROM oncebox.inbox WHERE status = 'failed_retryable'";
    shop.base.until(failed, 1).await.unwrap();
    first.stop().await.unwrap(); // what it has not sent yet, it sends at its end
    // An hour passes.
    let earlier = "UPDATE oncebox.inbox SET next_attempt_at = next_attempt_at - interval '1 hour'";
    shop.base.execute(earlier).await.unwrap();
    let second = start(&shop.base, "b", &collector).await.unwrap();
    shop.wait_done().await.unwrap();
    second.stop().await.unwrap();
    shop.check().await.unwrap();

    let spans = of_trace(&collector, &trace);
    let named = |consumer: &str, operation: &str| -> Vec<&CollectedSpan> {
        let is_it = |span: &&CollectedSpan| {
            span.operation() == operation && span.get("oncebox.consumer") == consumer
        };
        spans.iter().filter(is_it).collect()
    };
    // The run that failed, rolled back at first and then with its failure committed, and the one an
    // hour later, on another host.
    let runs = named("orders", "process");
    let facts = |key| runs.iter().map(|run| run.get(key)).collect::<Vec<_>>();
    assert_eq!(facts("oncebox.attempt"), ["1", "1", "2"], "{spans:#?}");
    assert_eq!(facts("oncebox.delivery"), ["live", "live", "retry"]);
    assert_eq!(facts("oncebox.transaction"), ["rolled_back", "committed", "committed"]);
    assert_eq!(facts("error.type"), ["sql_error", "sql_error", ""]);
    assert_eq!(runs.iter().map(|run| run.is_error).collect::<Vec<_>>(), [true, true, false]);
    assert!(runs.iter().all(|run| run.parent_id == PRODUCER), "{runs:#?}");
    assert_ne!(runs[1].instance, runs[2].instance);
    assert!(runs.iter().all(|run| run.service == "oncebox"));
    // What it causes, over two topics and into an inbox.
    let to = |operation: &str, destination: &str| {
        let is_it = |span: &&CollectedSpan| {
            span.operation() == operation
                && span.get("messaging.destination.name") == destination
                && span.get("oncebox.consumer") == "orders"
        };
        let found: Vec<_> = spans.iter().filter(is_it).collect();
        assert_eq!(found.len(), 1, "{operation} {destination}: {spans:#?}");
        found[0]
    };
    let created = to("create", &shop.events);
    assert_eq!((&*created.name, created.kind), ("create kafka", "SPAN_KIND_PRODUCER"));
    assert_eq!(
        (&created.parent_id, created.get("oncebox.transaction")),
        (&runs[2].span_id, "committed")
    );
    let sent = to("send", &shop.events);
    assert_eq!((&sent.parent_id, sent.is_error), (&created.span_id, false));
    for consumer in ["shipping", "last", "billing"] {
        let run = named(consumer, "process");
        assert_eq!(run.len(), 1, "{consumer}: {spans:#?}");
        assert_eq!(run[0].get("oncebox.transaction"), "committed");
    }
    assert_eq!(named("shipping", "process")[0].parent_id, created.span_id);
    // What came from another consumer came from no topic.
    let billed = named("billing", "process")[0];
    assert_eq!((&*billed.name, billed.get("messaging.system")), ("process billing", "oncebox"));
    assert_eq!(
        (billed.get("messaging.kafka.offset"), &billed.parent_id),
        ("", &to("create", "billing").span_id)
    );
    // Statements, with their text and without parameters.
    let inserts: Vec<_> = spans.iter().filter(|span| span.name == "INSERT").collect();
    assert!(inserts.iter().any(|insert| insert.parent_id == runs[2].span_id), "{spans:#?}");
    assert!(inserts.iter().all(|insert| insert.get("db.query.text").contains("VALUES ('")));
    let refused = inserts.iter().find(|insert| insert.parent_id == runs[0].span_id).unwrap();
    assert_eq!(refused.get("db.response.status_code"), "P0001");
    // Each failure is an exception in the log of its span, and no span has its text.
    let exceptions: Vec<_> = collector
        .lines()
        .into_iter()
        .filter(|line| line.attributes.contains_key("exception.message"))
        .collect();
    let of: Vec<_> = exceptions.iter().map(|line| (&line.trace_id, &line.span_id)).collect();
    assert_eq!(of, [(&trace, &runs[0].span_id), (&trace, &runs[1].span_id)]);
    for exception in &exceptions {
        assert!(exception.attributes["exception.message"].contains("the first run fails"));
        assert_eq!(exception.attributes["exception.type"], "sql_error");
    }
    let shown = format!("{:?}", collector.spans());
    for secret in ["the first run fails", "order traced"] {
        assert!(!shown.contains(secret), "{secret}: {shown}");
    }
    // The batch in which it came is linked to its producer, and its commit is below that.
    let all = collector.spans();
    let batch =
        all.iter().find(|span| span.links.contains(&trace) && span.operation() == "receive");
    let batch = batch.context("no batch is linked to the producer").unwrap();
    assert_eq!((batch.parent_id.as_str(), batch.kind), ("", "SPAN_KIND_CLIENT"));
    assert!(runs[1].links.contains(&batch.trace_id));
    let settle = all.iter().find(|span| span.parent_id == batch.span_id).unwrap();
    assert_eq!((settle.operation(), settle.is_error), ("settle", false));
    compare_with_docs(&all);
}

/// What could go wrong: the page of the spans names an attribute that none has, or one is sent that
/// no page names, perhaps with something of a payload.
fn compare_with_docs(spans: &[CollectedSpan]) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/traces.md");
    let page = fs::read_to_string(page).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let quoted = |cell: &str| -> BTreeSet<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let mut documented = BTreeMap::<String, BTreeSet<String>>::new();
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        if let [_, name, kind, _, attributes, _] = cells[..] {
            let name = quoted(name).pop_first().unwrap();
            let operation = name.split(' ').next().unwrap().to_owned();
            let mut all = quoted(attributes);
            all.extend(quoted(kind));
            documented.insert(operation, all);
        }
    }
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for span in spans {
        let operation =
            if span.get("db.system.name").is_empty() { span.operation() } else { "<operation>" };
        let of = found.entry(operation.to_owned()).or_default();
        of.extend(span.keys());
        of.insert(span.kind.trim_start_matches("SPAN_KIND_").to_lowercase());
    }
    // What only some runs have.
    const AT_TIMES: [&str; 1] = ["messaging.kafka.message.tombstone"];
    for (operation, attributes) in &documented {
        let of = found.get(operation).unwrap_or_else(|| panic!("no span `{operation}`"));
        let missing: Vec<_> = attributes
            .difference(of)
            .filter(|key| !AT_TIMES.contains(&key.as_str()) && *key != "error.type")
            .collect();
        assert!(missing.is_empty(), "`{operation}` has no {missing:?}");
        let unnamed: Vec<_> = of.difference(attributes).collect();
        assert!(
            unnamed.is_empty(),
            "docs/traces.md does not say that `{operation}` has {unnamed:?}"
        );
    }
    assert_eq!(found.keys().collect::<Vec<_>>(), documented.keys().collect::<Vec<_>>());
}

/// What could go wrong: of a large batch only the first contexts are linked, a producer's decision
/// not to trace is overruled, or a message without a context is lost to every trace.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_linked_to_each_traced_message_and_to_no_other() {
    const TRACED: usize = 900;
    let collector = Collector::start().await.unwrap();
    let options = Options {
        partitions: 1,
        batch: "{ messages_max = 1000, duration_ms = 20000 }",
        ..Options::default()
    };
    let base = HostFixture::with(options).await.unwrap();
    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let traces: Vec<_> = (0..TRACED).map(|_| new_trace()).collect();
    let (untraced, broken) = (new_trace(), "00-nothing");
    let contexts = traces.iter().map(|trace| Some(trace_parent(trace, true)));
    let contexts =
        contexts.chain([Some(trace_parent(&untraced, false)), Some(broken.to_owned()), None]);
    let publish = |(number, context): (usize, Option<String>)| {
        let (publisher, topic) = (&publisher, &base.topic);
        async move {
            let headers: Vec<_> = context.iter().map(|it| ("traceparent", it.as_str())).collect();
            let (id, account) = (format!("m-{number}"), format!("plain-{number}"));
            let payload = format!(r#"{{"account":"{account}","amount":"1","open_account":true}}"#);
            let of = (&*id, "payment.captured", &*account);
            publisher.publish_with(topic, of, &payload, &headers).await
        }
    };
    let sent = contexts.enumerate().map(publish);
    stream::iter(sent).buffer_unordered(200).try_collect::<Vec<()>>().await.unwrap();
    let host = start(&base, "a", &collector).await.unwrap();
    let completed = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'";
    base.until(completed, TRACED as i64 + 3).await.unwrap();
    host.stop().await.unwrap();

    let spans = collector.spans();
    let batches: Vec<_> = spans.iter().filter(|span| span.operation() == "receive").collect();
    let linked: Vec<_> = batches.iter().flat_map(|batch| &batch.links).cloned().collect();
    // The decision of a message without a context is that of its place, and its row keeps it.
    let kept: Vec<(String, Option<String>)> = sqlx::query_as(
        "SELECT message_id, trace_parent FROM oncebox.inbox ORDER BY \"offset\" DESC",
    )
    .fetch_all(&base.pool)
    .await
    .unwrap();
    let kept: BTreeMap<_, _> = kept.into_iter().collect();
    let [unsampled, invalid, none] = [0, 1, 2].map(|more| format!("m-{}", TRACED + more));
    assert_eq!(kept[&unsampled], Some(trace_parent(&untraced, false)));
    let own = [&invalid, &none].map(|id| {
        let context = kept[id].clone().unwrap_or_else(|| panic!("{id} has no context"));
        context.split('-').nth(1).unwrap().to_owned()
    });
    let expected: BTreeSet<_> = traces.iter().chain(&own).cloned().collect();
    assert_eq!(linked.iter().cloned().collect::<BTreeSet<_>>(), expected, "each, and no other");
    assert!(linked.len() < 2 * expected.len(), "{} links: messages are linked once", linked.len());
    assert!(batches.iter().all(|batch| batch.links_dropped == 0), "no link is cut");
    let largest = batches.iter().map(|batch| batch.links.len()).max().unwrap();
    assert!(largest > 128, "a batch of {largest} shows nothing: by default that many are kept");
    // Each message has the run that committed in its trace.
    let is_run = |span: &&CollectedSpan| {
        span.operation() == "process" && span.get("oncebox.transaction") == "committed"
    };
    let ran: BTreeSet<_> = spans.iter().filter(is_run).map(|span| span.trace_id.clone()).collect();
    assert_eq!(ran, expected);
    // A trace of a message's own begins with a span that is there.
    for trace in &own {
        let of_trace = of_trace(&collector, trace);
        let roots: Vec<_> = of_trace.iter().filter(|span| span.parent_id.is_empty()).collect();
        assert_eq!(roots.len(), 1, "{of_trace:#?}");
        let run = of_trace.iter().find(is_run).unwrap();
        assert_eq!((roots[0].operation(), &run.parent_id), ("receive", &roots[0].span_id));
    }
}

/// What could go wrong: the share of an operator does not hold for the messages beside a traced one,
/// or what an untraced message causes is traced from its middle on.
#[tokio::test(flavor = "multi_thread")]
async fn a_share_of_none_traces_none_and_nothing_that_they_cause() {
    let collector = Collector::start().await.unwrap();
    let mut shop = ShopFixture::new().await.unwrap();
    let trace = new_trace();
    shop.place_traced("traced", &trace_parent(&trace, true)).await.unwrap();
    let orders = shop.orders(&mut StdRng::seed_from_u64(1), 20);
    shop.place(&orders).await.unwrap();
    let to = ("ONCEBOX_TELEMETRY_ENDPOINT", collector.url());
    let host = shop.base.start_ready("a", &[to, ("ONCEBOX_TELEMETRY_SAMPLE", "0")]).await.unwrap();
    shop.wait_done().await.unwrap();
    host.stop().await.unwrap();
    shop.check().await.unwrap();
    let spans = collector.spans();
    let runs: BTreeSet<_> = spans
        .iter()
        .filter(|span| span.operation() == "process")
        .map(|span| (span.trace_id.clone(), span.get("oncebox.consumer").to_owned()))
        .collect();
    let expected = ["orders", "shipping", "last", "billing"];
    let expected = expected.map(|consumer| (trace.clone(), consumer.to_owned()));
    assert_eq!(runs, expected.into_iter().collect(), "{spans:#?}");
    // A header tells the next consumer, so that it does not decide again.
    let told = "SELECT count(*) FROM oncebox.outgoing WHERE trace_parent LIKE '00-%-00'";
    assert!(shop.base.number(told).await.unwrap() >= 40);
    let rows = "SELECT count(*) FROM oncebox.inbox WHERE trace_parent IS NULL";
    assert_eq!(shop.base.number(rows).await.unwrap(), 20, "an untraced order keeps none");

    // Nor are producers followed, where none are to be.
    let host = shop.base.start_ready("b", &[to, ("ONCEBOX_TELEMETRY_FOLLOW", "0")]).await.unwrap();
    let other = new_trace();
    shop.place_traced("not followed", &trace_parent(&other, true)).await.unwrap();
    shop.wait_done().await.unwrap();
    host.stop().await.unwrap();
    assert!(of_trace(&collector, &other).is_empty());
}

/// What could go wrong: a handler's span hangs beside the run or above what is within it, says what
/// only the host knows, or a handler makes any number of them; one that no one asked for is made.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_adds_spans_below_its_run_as_many_as_the_operator_allows() {
    let collector = Collector::start().await.unwrap();
    let mut shop = ShopFixture::new().await.unwrap();
    let (long, longer) = ("é".repeat(50), "é".repeat(600));
    let priced = [
        Step::Span(0, "price"),
        Step::SpanAttribute(0, "currency", "CHF".to_owned()),
        Step::SpanAttribute(0, "currency", longer),
        Step::SpanAttribute(0, "oncebox.tenant", "another".to_owned()),
        Step::Span(1, "look up"),
        Step::Query("SELECT 'within'".to_owned()),
        Step::FailSpan(1, "first"),
        Step::FailSpan(1, "not_found"),
        Step::EndSpan(1),
        Step::EndSpan(0),
        Step::Query("SELECT 'behind'".to_owned()),
        Step::Span(2, "left open"),
        Step::Span(3, "texts"),
    ];
    // As many as fit, and then none.
    let texts = (0..40).map(|number| Step::SpanAttribute(3, "key", format!("{number:02}{long}")));
    let many = (0..40).flat_map(|_| [Step::Span(4, ""), Step::EndSpan(4)]);
    // Handles that are never dropped, more than the table of a run's resources has room for.
    let kept = [Step::Repeat(2_000, Box::new(Step::Span(5, "")))];
    let steps = priced.into_iter().chain(texts).chain(many).chain(kept).collect();
    shop.deploy_one("last", "order.shipped", steps).await.unwrap();

    let (traced, untraced) = (new_trace(), new_trace());
    let host = start(&shop.base, "a", &collector).await.unwrap();
    shop.place_traced("traced", &trace_parent(&traced, true)).await.unwrap();
    shop.place_traced("untraced", &trace_parent(&untraced, false)).await.unwrap();
    shop.wait_done().await.unwrap();
    host.stop().await.unwrap();
    shop.check().await.unwrap();
    assert!(of_trace(&collector, &untraced).is_empty());

    let spans = of_trace(&collector, &traced);
    let run = spans
        .iter()
        .find(|span| span.operation() == "process" && span.get("oncebox.consumer") == "last")
        .unwrap();
    assert!(!run.is_error, "{run:#?}");
    let own: Vec<_> =
        spans.iter().filter(|span| span.kind == "SPAN_KIND_INTERNAL").cloned().collect();
    assert_eq!(own.len(), 32, "{own:#?}");
    let named = |name: &str| own.iter().find(|span| span.name == name).unwrap();
    let (price, lookup) = (named("price"), named("look up"));
    assert_eq!((&price.parent_id, price.is_error), (&run.span_id, false));
    assert_eq!(&lookup.parent_id, &price.span_id);
    assert_eq!((lookup.is_error, lookup.get("error.type")), (true, "not_found"));
    assert_eq!(price.get("handler.currency"), "é".repeat(512), "1 KiB");
    assert_eq!(price.get("handler.oncebox.tenant"), "another");
    assert_eq!(price.get("oncebox.tenant"), shop.base.tenant.name);
    // What runs within a span of the handler is below it, and what runs after it is not.
    let parent_of = |text: &str| {
        &spans.iter().find(|span| span.get("db.query.text").contains(text)).unwrap().parent_id
    };
    assert_eq!([parent_of("within"), parent_of("behind")], [&lookup.span_id, &run.span_id]);
    let open = named("left open");
    assert_eq!((&open.parent_id, open.get("error.type")), (&run.span_id, "interrupted"));
    let texts = named("texts");
    assert_eq!(texts.parent_id, open.span_id);
    let last: usize = texts.get("handler.key")[..2].parse().unwrap();
    assert!((20..30).contains(&last), "4 KiB are kept: {last}");

    // An operator may want none.
    let none = ("ONCEBOX_TELEMETRY_HANDLER_SPANS", "0");
    let to = ("ONCEBOX_TELEMETRY_ENDPOINT", collector.url());
    let host = shop.base.start_ready("b", &[to, none]).await.unwrap();
    let other = new_trace();
    shop.place_traced("another", &trace_parent(&other, true)).await.unwrap();
    shop.wait_done().await.unwrap();
    host.stop().await.unwrap();
    let spans = of_trace(&collector, &other);
    assert!(spans.iter().any(|span| span.get("oncebox.consumer") == "last"), "{spans:#?}");
    assert!(spans.iter().all(|span| span.kind != "SPAN_KIND_INTERNAL"), "{spans:#?}");
}

/// What could go wrong: a collector that refuses holds messages up, or spans are lost and nothing
/// counts them.
#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_holds_up_nothing_and_lost_spans_are_counted() {
    let collector = Collector::start().await.unwrap();
    collector.refuse(true);
    let base = HostFixture::new().await.unwrap();
    let host = start(&base, "a", &collector).await.unwrap();
    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let payload = r#"{"account":"plain-1","amount":"1","open_account":true}"#;
    publisher.publish(&base.topic, ("one", "payment.captured", "k"), payload).await.unwrap();
    let completed = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'";
    base.until(completed, 1).await.unwrap();
    host.until_metric_reaches("oncebox_spans_total", &["outcome=\"failed\""], 3.0).await.unwrap();
    host.wait_log("BatchSpanProcessor").await.unwrap();
    collector.refuse(false);
    publisher.publish(&base.topic, ("two", "payment.captured", "k"), payload).await.unwrap();
    base.until(completed, 2).await.unwrap();
    host.until_metric_reaches("oncebox_spans_total", &["outcome=\"exported\""], 3.0).await.unwrap();
    let ended = host.metric("oncebox_spans_total", &["outcome=\"ended\""]).await.unwrap();
    assert!(ended >= 6.0, "{ended}");
    wait::until(
        DEADLINE,
        Duration::from_millis(50),
        async || Ok(!collector.spans().is_empty()),
        async || "no span came".to_owned(),
    )
    .await
    .unwrap();
    host.stop().await.unwrap();
}

/// What could go wrong: a collector has other numbers than `/metrics`, the last ones of a host are
/// lost, a host that nobody scrapes counts as unseen, or a refusal stops the sending or tells the key.
#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_the_metrics_to_the_last() {
    let collector = Collector::start().await.unwrap();
    collector.refuse(true);
    let base = HostFixture::new().await.unwrap();
    let settings = [
        ("ONCEBOX_TELEMETRY_ENDPOINT", collector.url()),
        ("ONCEBOX_TELEMETRY_METRICS", "true"),
        ("ONCEBOX_TELEMETRY_METRICS_INTERVAL_MS", "1000"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter2%2C1"),
    ];
    let host = base.start_ready("a", &settings).await.unwrap();
    host.wait_log("the collector does not take the metrics: it answered with the status 400")
        .await
        .unwrap();
    const REQUESTS: &str = "oncebox_metrics_requests_total";
    host.until_metric_reaches(REQUESTS, &["outcome=\"failed\""], 2.0).await.unwrap();
    let exported = ["outcome=\"exported\""];
    assert_eq!(host.metric(REQUESTS, &exported).await, None, "nothing was taken yet");
    // It takes a request in part: that is a failure as well.
    collector.reject_samples(3);
    collector.refuse(false);
    host.wait_log("the collector does not take the metrics: it rejected 3 of the samples")
        .await
        .unwrap();
    assert_eq!(host.metric(REQUESTS, &exported).await, None, "none was taken whole yet");
    collector.reject_samples(0);
    host.wait_log("the collector takes the metrics again").await.unwrap();
    host.until_metric_reaches(REQUESTS, &exported, 1.0).await.unwrap();
    let scraped = "SELECT count(*) FROM oncebox.host WHERE scraped_at IS NOT NULL";
    base.until(scraped, 1).await.unwrap();

    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let payload = r#"{"account":"plain-1","amount":"1","open_account":true}"#;
    publisher.publish(&base.topic, ("one", "payment.captured", "k"), payload).await.unwrap();
    base.until("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'", 1).await.unwrap();
    const MESSAGES: &str = "oncebox_messages_total";
    host.until_metric_reaches(MESSAGES, &[], 1.0).await.unwrap();
    let shown = host.samples(MESSAGES).await;
    host.stop().await.unwrap();
    let last = collector.samples().pop().unwrap();
    assert!(
        last.iter().all(|it| it.service == "oncebox" && it.api_key == "hunter2,1"),
        "{last:#?}"
    );
    let told: Vec<_> = last.iter().filter(|it| it.name == MESSAGES).collect();
    assert_eq!(told.len(), shown.len(), "{told:#?} {shown:#?}");
    for sample in told {
        let is_it = |line: &&String| {
            let has =
                |(key, value): (&String, &String)| line.contains(&format!("{key}=\"{value}\""));
            sample.labels.iter().all(has)
        };
        let line = shown.iter().find(is_it).unwrap_or_else(|| panic!("{sample:?}: {shown:?}"));
        assert!(line.ends_with(&format!(" {}", sample.value)), "{sample:?}: {line}");
    }
    assert_eq!(host.log_lines("does not take the metrics"), 2, "one line for each, however often");
    assert_eq!(host.log_lines("hunter2"), 0);

    // A host that ends long before its first interval sends them once, also while it waits for its
    // database.
    let settings = [settings[0], settings[1], ("ONCEBOX_TELEMETRY_METRICS_INTERVAL_MS", "120000")];
    let before = collector.samples().len();
    let host = base.start_ready("b", &settings).await.unwrap();
    host.stop().await.unwrap();
    assert_eq!(collector.samples().len(), before + 1);
    let nowhere = ("ONCEBOX_DATABASE_URL", "postgres://nobody@127.0.0.1:1/nowhere");
    let host = base.start("c", &[&settings[..], &[nowhere]].concat()).unwrap();
    host.stop().await.unwrap();
    assert_eq!(collector.samples().len(), before + 2);
}

/// What could go wrong: a host without a collector makes contexts, and rows and headers grow.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_collector_nothing_is_traced() {
    let base = HostFixture::new().await.unwrap();
    let host = base.start_ready("a", &[]).await.unwrap();
    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let payload = r#"{"account":"plain-1","amount":"1","open_account":true}"#;
    publisher.publish(&base.topic, ("one", "payment.captured", "k"), payload).await.unwrap();
    base.until("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'", 1).await.unwrap();
    let traced = "SELECT count(*) FROM oncebox.inbox WHERE trace_parent IS NOT NULL";
    assert_eq!(base.number(traced).await.unwrap(), 0);
    assert_eq!(host.sum("oncebox_spans_total").await, None);
    host.stop().await.unwrap();
}
