//! A provider outside acts once on each message, whichever host dies at whatever step, and however
//! the provider itself misbehaves. Its answers come back into an inbox, each once.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, stream};
use oncebox_control::{DuplicateDecision, NewDeployment, NewEndpoint};
use oncebox_model::{hooks::OUTGOING_POINTS, outgoing::AnswerMode, policy::Policy};
use oncebox_tests::{
    guests::{Emit, End, Step, component},
    host::{HostFixture, HostProcess, Options, aside},
    outgoing::{derived_answer_id, derived_id},
    provider::{Behaviour, Provider, Reply, refuses},
    shop::{Publisher, end_leases},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;
use sqlx::AssertSqlSafe;
use tokio::time::sleep;

use crate::crash_recovery::run_seeds;

/// Scenarios side by side; each has up to two hosts.
const AT_ONCE: usize = 3;
/// Kills while orders come, before both hosts are killed.
const KILLS: usize = 3;
const HOSTS: [&str; 2] = ["a", "b"];
/// Keys of orders.
const KEYS: usize = 8;
const CONSUMER: &str = "orders";
const ANSWERED: &str = "order.pay.answered";
const SEEN: &str = "CREATE TABLE seen (place bigint GENERATED ALWAYS AS IDENTITY, kind text NOT \
    NULL, message_id text NOT NULL)";

/// Orders that are paid at a provider, whose answers the consumer gets.
struct PaymentFixture {
    base: HostFixture,
    provider: Provider,
    /// What the provider's behaviour is drawn by.
    seed: u64,
    incoming: String,
    publisher: Publisher,
    placed: Vec<String>,
}

impl PaymentFixture {
    async fn new(seed: u64, own_database: bool) -> Result<Self> {
        let provider = Provider::start(Behaviour::Seeded(seed)).await;
        Self::with(provider, seed, own_database, |_| {}).await
    }

    async fn with(
        provider: Provider,
        seed: u64,
        own_database: bool,
        change: impl FnOnce(&mut NewEndpoint),
    ) -> Result<Self> {
        let config = provider.host_settings();
        let options = Options { own_database, config, ..Options::default() };
        let mut base = HostFixture::with(options).await?;
        base.control = base.control.clone().sending_with(provider.sender());
        let incoming = format!("{}.in", base.topic);
        base.kafka().create_topic(&incoming, 2, &[]).await?;
        let tenant = base.tenant.name.clone();
        let limits = json!({
            "destinations_allowed": ["http:pay"],
            "endpoint_hosts_allowed": [provider.authority()],
        });
        let limits = limits.as_object().context("an object")?;
        base.control.tenants().set_limits(&tenant, limits).await?;
        base.control.tenant_databases().apply_migration(&base.tenant, "seen", SEEN).await?;
        let mut endpoint = provider.endpoint("pay");
        endpoint.answer = AnswerMode::Delivered;
        change(&mut endpoint);
        base.control.endpoints().set(&tenant, &endpoint, false).await?;
        base.control.consumers().create(&tenant, CONSUMER, &policy(&incoming)?).await?;
        let publisher = Publisher::new(base.kafka().bootstrap())?;
        let fixture = Self { base, provider, seed, incoming, publisher, placed: Vec::new() };
        let pay = Step::Emit(Emit::to("http:pay", "order.pay"));
        fixture.deploy("order", "order", vec![pay]).await?;
        fixture.deploy(ANSWERED, "answer", Vec::new()).await?;
        Ok(fixture)
    }

    async fn deploy(&self, event_type: &str, kind: &str, steps: Vec<Step>) -> Result<()> {
        let effect = format!("INSERT INTO seen (kind, message_id) VALUES ('{kind}', $1)");
        let grants = if steps.is_empty() { Vec::new() } else { vec!["emit".to_owned()] };
        let all = [vec![Step::ExecuteWithId(effect), Step::GiveUpOnError], steps].concat();
        let new = NewDeployment { grants, ..NewDeployment::stable(event_type, kind, "") };
        let component = component(&all, &End::Ok);
        let tenant = &self.base.tenant.name;
        self.base.control.versions().deploy_compiled(tenant, CONSUMER, new, &component).await?;
        Ok(())
    }

    /// Makes up orders under ids that no other has.
    fn orders(&mut self, count: usize) -> Vec<String> {
        let first = self.placed.len();
        let orders: Vec<_> = (first..first + count).map(|number| format!("o-{number}")).collect();
        self.placed.extend(orders.iter().cloned());
        orders
    }

    async fn place(&self, orders: &[String]) -> Result<()> {
        for (number, id) in orders.iter().enumerate() {
            let (key, payload) = (format!("key-{}", number % KEYS), format!("charge {id}"));
            self.publisher.publish(&self.incoming, (id, "order", &key), &payload).await?;
        }
        Ok(())
    }

    /// The ids of what is sent to the provider, with the orders that cause them.
    fn sent(&self) -> BTreeMap<String, &String> {
        let tenant = &self.base.tenant.name;
        self.placed.iter().map(|id| (derived_id(tenant, CONSUMER, id, 0), id)).collect()
    }

    /// Waits until every order is handled, and so is every answer.
    async fn wait_done(&self) -> Result<()> {
        let seen = "SELECT count(DISTINCT (kind, message_id)) FROM {schema}.seen";
        tokio::select! {
            done = self.base.until(seen, 2 * self.placed.len() as i64) => done,
            failed = self.keep_releasing() => failed,
        }
    }

    /// Lets hosts start the consumer again where it is quarantined, since hosts were killed while
    /// they started it. It ends with an error alone.
    async fn keep_releasing(&self) -> Result<()> {
        loop {
            self.base.control.consumers().release(&self.base.tenant.name, CONSUMER).await?;
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// The provider has acted once for each order that it does not refuse, by its keys; each order
    /// and each answer was handled once; nothing is left to be sent.
    async fn check(&self) -> Result<()> {
        let (sent, ledger) = (self.sent(), self.provider.ledger());
        let faults = self.provider.faults();
        if !faults.is_empty() {
            return self.base.violated(format!("{faults:?}"));
        }
        let (known, wanted): (BTreeSet<&String>, BTreeSet<&String>) =
            (ledger.keys().collect(), sent.keys().collect());
        if known != wanted {
            return self.base.violated(format!("the provider knows other keys: {known:?}"));
        }
        for (id, entry) in &ledger {
            let expected = usize::from(!refuses(self.seed, id));
            let body = format!("charge {}", sent[id]);
            if entry.effects != expected || entry.body != body.as_bytes() {
                return self.base.violated(format!("`{id}` of `{}`: {entry:?}", sent[id]));
            }
        }
        let tenant = &self.base.tenant.name;
        let answers = sent.keys().map(|id| derived_answer_id(tenant, CONSUMER, id));
        let orders = self.placed.iter().map(|id| ("order".to_owned(), id.clone(), 1));
        let expected: BTreeSet<(String, String, i64)> =
            orders.chain(answers.map(|id| ("answer".to_owned(), id, 1))).collect();
        let schema = &self.base.tenant.schema_name;
        let seen = format!("SELECT kind, message_id, count(*) FROM {schema}.seen GROUP BY 1, 2");
        let seen: Vec<(String, String, i64)> =
            sqlx::query_as(AssertSqlSafe(seen)).fetch_all(&self.base.pool).await?;
        let seen: BTreeSet<_> = seen.into_iter().collect();
        if seen != expected {
            let odd: Vec<_> = seen.symmetric_difference(&expected).take(5).collect();
            return self.base.violated(format!("effects are lost, doubled or odd: {odd:?}"));
        }
        let open = "SELECT count(*) FROM oncebox.outgoing WHERE status <> 'completed'";
        let refused = "SELECT count(*) FROM oncebox.outgoing WHERE reason = 'refused'";
        let told = (self.base.number(open).await?, self.base.number(refused).await?);
        let refusals = sent.keys().filter(|id| refuses(self.seed, id)).count() as i64;
        if told != (0, refusals) {
            return self.base.violated(format!("open and refused: {told:?}, not (0, {refusals})"));
        }
        self.base.check_whole().await
    }

    /// Calls beyond the first of each key.
    fn repeated(&self) -> usize {
        self.provider.ledger().values().map(|entry| entry.calls - 1).sum()
    }
}

fn policy(topic: &str) -> Result<Policy> {
    let policy = format!(
        "topics = ['{topic}']\nack = 'after_commit'\n\
         identity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = 'type' }}] }}\n\
         retry = {{ attempts_max = 20, backoff_min_ms = 50, backoff_max_ms = 200, lease_ms = 4000 \
         }}\nlimits = {{ deadline_ms = 1400 }}\n\
         kafka.properties = {{ 'session.timeout.ms' = '6000', 'heartbeat.interval.ms' = '300', \
         'auto.commit.interval.ms' = '100', 'reconnect.backoff.max.ms' = '500', \
         'topic.metadata.refresh.interval.ms' = '1000' }}"
    );
    Ok(Policy::parse(&policy)?)
}

/// What could go wrong: a host dies after the provider has acted and before that is written down,
/// and its successor asks under another key, so that the provider acts twice; an answer is lost
/// with the host, or comes twice. S0-026, S1-007, S1-017, S1-038, S1-040, S1-042, S1-106, S2-005.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_at_any_step_of_a_request_leaves_the_provider_with_one_effect() {
    let points = OUTGOING_POINTS.iter().copied().filter(|point| *point != "outgoing:cancel:after");
    let died = stream::iter(points).map(|point| async move {
        let started = Instant::now();
        let died = aside(move || dies_at(point)).await;
        println!(
            "{point:<24} {:>5.1} s  {}",
            started.elapsed().as_secs_f64(),
            if died.is_ok() { "ok" } else { "FAILED" }
        );
        died.with_context(|| format!("at `{point}`"))
    });
    let outcomes: Vec<_> = died.buffer_unordered(AT_ONCE).collect().await;
    let failures: Vec<_> =
        outcomes.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Kills a host at a point, in the middle of its work, and lets two hosts finish that.
async fn dies_at(point: &'static str) -> Result<()> {
    let seed = u64::from(rand::random::<u32>());
    let mut fixture = PaymentFixture::new(seed, false).await?;
    let orders = fixture.orders(20);
    fixture.place(&orders).await?;
    // Not the first pass, so that something was done before.
    let armed = format!("{point}@2");
    let host = fixture.base.start(HOSTS[0], &[("ONCEBOX_FAILPOINT", &armed)])?;
    let status = host
        .wait_exit()
        .await
        .with_context(|| format!("`{armed}` was never reached; seed {seed}"))?;
    ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
    fixture.base.check_whole().await?;
    end_leases(&fixture.base).await?;
    let one = fixture.base.start(HOSTS[0], &[])?;
    let other = fixture.base.start(HOSTS[1], &[])?;
    let more = fixture.orders(5);
    fixture.place(&more).await?;
    fixture.place(&orders).await?; // what comes again emits nothing
    fixture.wait_done().await.with_context(|| format!("seed {seed}"))?;
    // S0-026, S1-007, S1-017, S1-038, S1-040, S1-042, S1-106, S2-005.
    fixture.check().await.with_context(|| format!("seed {seed}"))?;
    one.stop().await?;
    other.stop().await
}

/// What could go wrong: some mixture of kills of two hosts and of the provider's failures that no
/// list of steps has. S0-026, S1-042, S1-106.
///
/// `ONCEBOX_OUTGOING_SEEDS` says how many new seeds are run (5 by default), or, as a list with a
/// comma such as `17,`, which.
#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_misbehaves_acts_once_on_each_message_whoever_dies() {
    run_seeds("ONCEBOX_OUTGOING_SEEDS", 5, AT_ONCE, survive).await;
}

/// Kills two hosts in turns that are drawn, while orders come. Returns what happened, for readers.
async fn survive(seed: u64) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let own_database = rng.random_bool(0.5);
    let mut fixture = PaymentFixture::new(seed, own_database).await?;
    let batches: Vec<_> = (0..KILLS).map(|_| fixture.orders(15)).collect();
    let trouble = async {
        let mut hosts: Vec<HostProcess> = Vec::new();
        for name in HOSTS {
            hosts.push(fixture.base.start(name, &[])?);
        }
        for host in &hosts {
            host.wait_ready().await?;
        }
        for orders in &batches {
            fixture.place(orders).await?;
            sleep(Duration::from_millis(rng.random_range(0..1_500))).await;
            let struck = rng.random_range(0..HOSTS.len());
            hosts[struck].kill().await?;
            hosts[struck] = fixture.base.start_ready(HOSTS[struck], &[]).await?;
        }
        for host in &hosts {
            host.kill().await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        made = trouble => made?,
        failed = fixture.keep_releasing() => failed?,
    }
    // Nobody lives, so that every lease is one of the dead.
    end_leases(&fixture.base).await?;
    let one = fixture.base.start(HOSTS[0], &[])?;
    let other = fixture.base.start(HOSTS[1], &[])?;
    fixture.wait_done().await?;
    // S0-026, S1-042, S1-106.
    fixture.check().await?;
    one.stop().await?;
    other.stop().await?;
    fixture.check().await?;
    let (orders, repeated) = (fixture.placed.len(), fixture.repeated());
    Ok(format!("{orders} orders, {repeated} calls repeated, own database: {own_database}"))
}

/// An endpoint whose owner accepts that it acts twice, whose breaker opens soon, and that has time to
/// answer.
fn accept_duplicates(endpoint: &mut NewEndpoint) {
    endpoint.duplicates =
        DuplicateDecision::Accepted { by: "ops".to_owned(), because: "a test".to_owned() };
    (endpoint.failures_max, endpoint.pause_ms) = (3, 60_000);
    (endpoint.connect_timeout_ms, endpoint.timeout_ms) = (5_000, 15_000);
}

/// Places an order while the endpoint is not there, so that what it emits is parked, and sets the
/// endpoint again.
async fn park_one(fixture: &mut PaymentFixture, host: &HostProcess) -> Result<()> {
    let (endpoints, tenant) = (fixture.base.control.endpoints(), fixture.base.tenant.name.clone());
    endpoints.remove(&tenant, "pay").await?;
    sleep(Duration::from_millis(1_500)).await; // a change takes effect within a second
    let orders = fixture.orders(1);
    fixture.place(&orders).await?;
    let parked =
        ["consumer=\"orders\"", "destination_kind=\"http\"", "reason=\"no_such_endpoint\""];
    host.until_metric("oncebox_outgoing_parked_total", &parked, 1.0).await?;
    let mut endpoint = fixture.provider.endpoint("pay");
    endpoint.answer = AnswerMode::Delivered;
    accept_duplicates(&mut endpoint);
    fixture.base.control.endpoints().set(&tenant, &endpoint, false).await?;
    Ok(())
}

/// What could go wrong: a provider may have acted twice, or does not know the key although its
/// owner said so, and nobody hears of it; an endpoint is set without a decision on duplicates; or
/// an open breaker shows in one host's memory alone. S1-041, S1-092, S1-098.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_have_happened_twice_is_counted_and_an_open_breaker_is_shown() {
    let replies = [Reply::ActAndBreak, Reply::Status(409)];
    let provider = Provider::start(Behaviour::scripted(&replies)).await;
    let mut fixture = PaymentFixture::with(provider, 0, false, accept_duplicates).await.unwrap();
    let host = fixture.base.start_ready(HOSTS[0], &[]).await.unwrap();
    let orders = fixture.orders(1);
    fixture.place(&orders).await.unwrap();
    fixture.wait_done().await.unwrap();
    // S1-098: it was asked twice, and may have acted twice.
    let repeated = "oncebox_endpoint_repeated_total";
    let accepted = ["endpoint=\"pay\"", "deduplicates=\"false\""];
    host.until_metric_reaches(repeated, &accepted, 1.0).await.unwrap();
    // S1-092: it refused what it had done, so that it does not know the key.
    let refused = "oncebox_endpoint_repeat_refused_total";
    host.until_metric_reaches(refused, &["endpoint=\"pay\""], 1.0).await.unwrap();
    host.wait_log("an endpoint refused a repeated request").await.unwrap();
    let requests = "oncebox_endpoint_requests_total";
    let outcome = |label| ["endpoint=\"pay\"", label];
    let failed = outcome("outcome=\"failed\"");
    host.until_metric_reaches(requests, &failed, 1.0).await.unwrap();
    host.until_metric(requests, &outcome("outcome=\"refused\""), 1.0).await.unwrap();
    let of_http = ["consumer=\"orders\"", "destination_kind=\"http\""];
    let unconfirmed = [&of_http[..], &["reason=\"unconfirmed\""]].concat();
    let failures = "oncebox_outgoing_failures_total";
    host.until_metric_reaches(failures, &unconfirmed, 1.0).await.unwrap();
    host.until_metric("oncebox_outgoing_sent_total", &of_http, 1.0).await.unwrap();
    park_one(&mut fixture, &host).await.unwrap();

    fixture.provider.script(&[Reply::Status(500); 12]);
    let orders = fixture.orders(4);
    fixture.place(&orders).await.unwrap();
    let state = "oncebox_endpoint_breaker_state";
    host.until_metric(state, &["endpoint=\"pay\""], 2.0).await.unwrap();
    let opened = ["endpoint=\"pay\"", "to=\"open\""];
    let transitions = "oncebox_endpoint_breaker_transitions_total";
    host.until_metric_reaches(transitions, &opened, 1.0).await.unwrap();
    let shown = "SELECT count(*) FROM oncebox.host_endpoint WHERE state = 'open'";
    fixture.base.until(shown, 1).await.unwrap();
    let tenant = fixture.base.tenant.name.clone();
    let counts = fixture.base.control.outgoing().stats(&tenant, None).await.unwrap();
    assert!(counts.iter().any(|count| count.breaker.as_deref() == Some("open")), "{counts:?}");
    let stats = ["outgoing", "stats", "--tenant", &tenant];
    assert!(fixture.base.ok(&stats).await.unwrap().contains("open"));
    // S1-041: without a decision there is no endpoint; who has decided is shown.
    let undecided = ["endpoint", "set", "mail", "--tenant", &tenant, "--url", "http://localhost/"];
    let error = fixture.base.ok(&undecided).await.unwrap_err().to_string();
    assert!(error.contains("`--duplicates-accepted-by` and `--because`"), "{error}");
    let listed = fixture.base.ok(&["endpoint", "list", "--tenant", &tenant]).await.unwrap();
    assert!(listed.contains("accepted by ops") && listed.contains("open on "), "{listed}");
    let why = fixture.base.ok(&["why", "o-0", "--tenant", &tenant]).await.unwrap();
    assert!(why.contains("endpoint `pay` may act twice on a message, which ops accepts"), "{why}");
    // What waits for the endpoint is open, and past its due time; what is parked is not open.
    let emitter = ["consumer=\"orders\""];
    host.until_metric("oncebox_outgoing_open", &emitter, orders.len() as f64).await.unwrap();
    let oldest = host.metric("oncebox_outgoing_oldest_seconds", &emitter).await;
    assert!(oldest.is_some_and(|seconds| seconds > 0.0), "{oldest:?}");
    host.stop().await.unwrap();
    fixture.base.until("SELECT 1 - count(*) FROM oncebox.host_endpoint", 1).await.unwrap();
}
