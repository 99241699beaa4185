//! A saga of messages, answers over HTTP and timers ends in one way for each order, and the books
//! of the payment provider agree with that, although hosts die in the middle of it and the
//! provider misbehaves. The saga is the example `order-saga`.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::process::ExitStatusExt,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_model::{outgoing::AnswerMode, policy::Policy};
use oncebox_tests::{
    host::{HostFixture, Options},
    outgoing::{derived_answer_id, derived_id},
    provider::{Behaviour, Provider, refuses},
    shop::{Publisher, end_leases, read_topic},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use tokio::time::sleep;

const CONSUMER: &str = "orders";
const SCHEMA: &str = include_str!("../../../guest-examples/order-saga/schema.sql");
/// Units of the only article before any order.
const STOCK: i32 = 100;
/// An order that no stock suffices for.
const UNSTOCKED: &str = "o-unstocked";

/// Shop whose orders are sagas, with the provider that they are charged at.
struct SagaFixture {
    base: HostFixture,
    provider: Provider,
    /// What the provider's behaviour is drawn by.
    seed: u64,
    incoming: String,
    shipments: String,
    publisher: Publisher,
    /// Number of the next id that is looked at.
    next: usize,
    placed: BTreeSet<String>,
}

impl SagaFixture {
    async fn new(seed: u64) -> Result<Self> {
        let provider = Provider::start(Behaviour::Seeded(seed)).await;
        let options = Options { config: provider.host_settings(), ..Options::default() };
        let mut base = HostFixture::with(options).await?;
        base.control = base.control.clone().sending_with(provider.sender());
        let topic = |name: &str| format!("{}.{name}", base.topic);
        let (incoming, shipments) = (topic("orders"), topic("shipments"));
        for topic in [&incoming, &shipments] {
            base.kafka().create_topic(topic, 2, &[]).await?;
        }
        let publisher = Publisher::new(base.kafka().bootstrap())?;
        let placed = BTreeSet::new();
        let fixture =
            Self { base, provider, seed, incoming, shipments, publisher, next: 0, placed };
        fixture.deploy().await?;
        Ok(fixture)
    }

    async fn deploy(&self) -> Result<()> {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-examples/components/order-saga.wasm");
        let component = std::fs::read(path)
            .with_context(|| format!("`{path}` is missing; run `guest-examples/build.sh build`"))?;
        let (control, tenant) = (&self.base.control, &self.base.tenant.name);
        let ship_to = format!("kafka:{}", self.shipments);
        let limits = json!({
            "destinations_allowed": ["http:pay", format!("inbox:{CONSUMER}"), ship_to],
            "endpoint_hosts_allowed": [self.provider.authority()],
        });
        let limits = limits.as_object().context("an object")?;
        control.tenants().set_limits(tenant, limits).await?;
        control.tenant_databases().apply_migration(&self.base.tenant, "orders", SCHEMA).await?;
        let stock = format!("INSERT INTO {{schema}}.stock VALUES ('apple', {STOCK})");
        self.base.execute(&stock).await?;
        let mut endpoint = self.provider.endpoint("pay");
        endpoint.answer = AnswerMode::Delivered;
        control.endpoints().set(tenant, &endpoint, false).await?;
        control.consumers().create(tenant, CONSUMER, &policy(&self.incoming)?).await?;
        // Timers are due when the test says so, and never by themselves.
        let settings = json!({ "ship_to": ship_to, "payment_timeout_s": "86400" });
        let new = NewDeployment {
            grants: vec!["emit".to_owned()],
            settings: settings.as_object().context("an object")?.clone(),
            ..NewDeployment::stable("*", "order-saga", "")
        };
        control.versions().deploy_compiled(tenant, CONSUMER, new, &component).await?;
        Ok(())
    }

    fn tenant(&self) -> &str {
        &self.base.tenant.name
    }

    /// The key by which the provider knows the charge of an order.
    fn charge(&self, order: &str) -> String {
        derived_id(self.tenant(), CONSUMER, order, 0)
    }

    /// The key by which it knows the void of an order whose timer came.
    fn void(&self, order: &str) -> String {
        let timer = derived_id(self.tenant(), CONSUMER, order, 1);
        derived_id(self.tenant(), CONSUMER, &timer, 0)
    }

    /// The id of what follows the answer to the charge of an order: the shipment; or, where the
    /// provider refuses a charge that it was asked for again, the void.
    fn follow_up(&self, order: &str) -> String {
        let answer = derived_answer_id(self.tenant(), CONSUMER, &self.charge(order));
        derived_id(self.tenant(), CONSUMER, &answer, 0)
    }

    /// Draws orders whose charge the provider refuses, or does not. It refuses no void.
    fn draw(&mut self, count: usize, is_refused: bool) -> Vec<String> {
        let mut drawn = Vec::new();
        while drawn.len() < count {
            let order = format!("o-{}", self.next);
            self.next += 1;
            let is_fit = refuses(self.seed, &self.charge(&order)) == is_refused
                && !refuses(self.seed, &self.void(&order))
                && !refuses(self.seed, &self.follow_up(&order));
            if is_fit {
                drawn.push(order);
            }
        }
        drawn
    }

    async fn place(&mut self, orders: &[String]) -> Result<()> {
        for order in orders {
            self.publish(order, order).await?;
            self.placed.insert(order.clone());
        }
        Ok(())
    }

    /// Places an order that is placed already under another message id, and waits until that is
    /// handled.
    async fn place_again(&self, order: &str) -> Result<()> {
        let id = format!("{order}-again");
        self.publish(&id, order).await?;
        let handled = format!(
            "SELECT count(*) FROM oncebox.inbox WHERE message_id = '{id}' AND status = 'completed'"
        );
        self.until(&handled, 1).await
    }

    async fn publish(&self, id: &str, order: &str) -> Result<()> {
        let units = if order == UNSTOCKED { STOCK + 1 } else { units(order) };
        let payload = json!({ "order_id": order, "sku": "apple", "units": units, "amount": 250 });
        let names = (id, "order.placed", order);
        self.publisher.publish(&self.incoming, names, &payload.to_string()).await
    }

    /// Starts a host that dies at a point.
    async fn die_at(&self, point: &str) -> Result<()> {
        let host = self.base.start("a", &[("ONCEBOX_FAILPOINT", point)])?;
        let status = host.wait_exit().await?;
        ensure!(status.signal() == Some(libc::SIGKILL), "the host ended with {status}");
        Ok(())
    }

    /// Puts off by an hour the charges that no relay has leased. Returns their orders. No host may
    /// live.
    async fn put_off_charges(&self) -> Result<Vec<String>> {
        const PUT_OFF: &str = "UPDATE oncebox.outgoing SET next_attempt_at = now() + interval '1 \
            hour' WHERE status = 'received' AND destination = 'http:pay' \
            RETURNING convert_from(key, 'UTF8')";
        Ok(sqlx::query_scalar(PUT_OFF).fetch_all(&self.base.pool).await?)
    }

    /// Ends the leases of dead hosts, but for charges that they had begun to send: those stay
    /// unanswered until [`Self::end_held_leases`]. Returns their orders. No host may live.
    async fn hold_charge_leases(&self) -> Result<Vec<String>> {
        const HOLD: &str = "UPDATE oncebox.outgoing SET locked_until = now() + interval '1 hour' \
            WHERE status = 'in_progress' AND destination = 'http:pay' \
            RETURNING convert_from(key, 'UTF8')";
        end_leases(&self.base).await?;
        Ok(sqlx::query_scalar(HOLD).fetch_all(&self.base.pool).await?)
    }

    /// Ends the leases that are held, so that the charges are sent again.
    async fn end_held_leases(&self) -> Result<()> {
        const FREE: &str = "UPDATE oncebox.outgoing SET locked_until = now() - interval '1 s' \
            WHERE locked_until > now() + interval '30 minutes'";
        self.base.execute(FREE).await
    }

    /// Lets the payment timeouts of orders pass. Where an order is charged already, its timer is
    /// cancelled and stays so.
    async fn time_out(&self, orders: &[String]) -> Result<()> {
        const PASS: &str = "UPDATE oncebox.outgoing SET next_attempt_at = now() \
            WHERE status = 'received' AND event_type = 'order.payment_timed_out' \
            AND convert_from(key, 'UTF8') = ANY ($1)";
        sqlx::query(PASS).bind(orders.to_vec()).execute(&self.base.pool).await?;
        Ok(())
    }

    /// Waits until a number from the database reaches a bound, while hosts may start the consumer
    /// again where it is quarantined.
    async fn until(&self, sql: &str, at_least: i64) -> Result<()> {
        tokio::select! {
            done = self.base.until(sql, at_least) => done,
            failed = self.keep_releasing() => failed,
        }
    }

    async fn keep_releasing(&self) -> Result<()> {
        loop {
            self.base.control.consumers().release(self.tenant(), CONSUMER).await?;
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Waits until every order has ended, and nothing is left to be sent or to be handled.
    async fn wait_ended(&self) -> Result<()> {
        let ended = format!(
            "SELECT ((SELECT count(*) FROM {{schema}}.orders WHERE state NOT IN ('placed', \
                'charging')) = {} AND NOT EXISTS (SELECT FROM oncebox.outgoing WHERE status NOT \
                IN ('completed', 'cancelled')) AND NOT EXISTS (SELECT FROM oncebox.inbox WHERE \
                status <> 'completed'))::int::bigint",
            self.placed.len()
        );
        self.until(&ended, 1).await
    }

    /// The orders with their states.
    async fn states(&self) -> Result<BTreeMap<String, String>> {
        let schema = &self.base.tenant.schema_name;
        let sql = format!("SELECT order_id, state FROM {schema}.orders");
        let rows: Vec<(String, String)> =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.base.pool).await?;
        Ok(rows.into_iter().collect())
    }

    /// Each order has ended; the provider has charged it and given the money back as its state
    /// says, under the keys of its messages and no other; the stock adds up; what is charged is
    /// shipped, and nothing else. Returns how many orders ended in each state.
    async fn check(&self) -> Result<BTreeMap<String, usize>> {
        let states = self.states().await?;
        if states.keys().ne(self.placed.iter()) {
            return self.base.violated(format!("there are other orders: {states:?}"));
        }
        let mut ends: BTreeMap<String, usize> = BTreeMap::new();
        for (order, state) in &states {
            self.check_books(order, state)?;
            *ends.entry(state.clone()).or_default() += 1;
        }
        self.check_keys()?;
        let charged: Vec<_> = states.iter().filter(|(_, state)| *state == "charged").collect();
        let left = self.base.number("SELECT units::bigint FROM {schema}.stock").await?;
        let taken: i32 = charged.iter().map(|(order, _)| units(order)).sum();
        if left != i64::from(STOCK - taken) {
            return self.base.violated(format!("{left} of {STOCK} units are left, {taken} taken"));
        }
        let shipment =
            |order: &String| json!({ "order_id": order, "sku": "apple", "units": units(order) });
        let expected: BTreeMap<String, Value> =
            charged.iter().map(|(order, _)| (self.follow_up(order), shipment(order))).collect();
        let mut shipped: BTreeMap<String, Value> = BTreeMap::new();
        for record in read_topic(self.base.kafka().bootstrap(), &self.shipments).await? {
            let payload = record.payload.as_deref().unwrap_or_default();
            shipped.insert(record.id(), serde_json::from_slice(payload)?);
        }
        if shipped != expected {
            return self.base.violated(format!("{shipped:?} are shipped, not {expected:?}"));
        }
        self.base.check_whole().await?;
        Ok(ends)
    }

    /// The provider holds the money of an order if it is charged, and of no other.
    fn check_books(&self, order: &str, state: &str) -> Result<()> {
        let ledger = self.provider.ledger();
        let entry = |key: String| ledger.get(&key).cloned().unwrap_or_default();
        let (charge, voids) = (entry(self.charge(order)), entry(self.follow_up(order)).effects);
        let booked = (charge.effects, entry(self.void(order)).effects, voids);
        let expected = match state {
            "charged" => (1, 0, 0),
            "voided" => (1, 1, 0),
            // This provider refuses a charge at each call, and has not made it. One that was asked
            // for twice is voided all the same. So is one that it got once, if a host died before.
            "refused" if charge.calls > 1 => (0, 0, 1),
            "refused" => (0, 0, voids),
            "rejected" | "timed_out" => (0, 0, 0),
            other => return self.base.violated(format!("`{order}` has not ended: {other}")),
        };
        if booked != expected {
            let text = format!("charge and voids of `{order}`, which is {state}: {booked:?}");
            return self.base.violated(text);
        }
        if state != "rejected" && (state == "refused") != refuses(self.seed, &self.charge(order)) {
            return self.base.violated(format!("`{order}` is {state}, and its charge is not"));
        }
        Ok(())
    }

    /// The provider was asked for what the orders need, under the keys of their messages.
    fn check_keys(&self) -> Result<()> {
        let faults = self.provider.faults();
        if !faults.is_empty() {
            return self.base.violated(format!("{faults:?}"));
        }
        let orders = self.placed.iter();
        let known: BTreeMap<_, _> = orders
            .flat_map(|order| {
                [
                    (self.charge(order), ("charge", order)),
                    (self.void(order), ("void", order)),
                    (self.follow_up(order), ("void", order)),
                ]
            })
            .collect();
        for (key, entry) in self.provider.ledger() {
            let body: Value = serde_json::from_slice(&entry.body)?;
            let Some((action, order)) = known.get(&key) else {
                return self.base.violated(format!("a call of no message: {body}"));
            };
            if body != json!({ "action": action, "order_id": order, "amount": 250 }) {
                return self.base.violated(format!("{action} of `{order}` is {body}"));
            }
        }
        Ok(())
    }
}

/// Units of an order.
fn units(order: &str) -> i32 {
    1 + order.len() as i32 % 3
}

fn policy(topic: &str) -> Result<Policy> {
    let policy = format!(
        "topics = ['{topic}']\nack = 'after_commit'\norder = 'key'\n\
         outgoing = {{ on_parked = 'stop' }}\n\
         identity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = 'type' }}] }}\n\
         retry = {{ attempts_max = 20, backoff_min_ms = 50, backoff_max_ms = 200, lease_ms = 4000 \
         }}\nlimits = {{ deadline_ms = 1400 }}\n\
         kafka.properties = {{ 'session.timeout.ms' = '6000', 'heartbeat.interval.ms' = '300', \
         'auto.commit.interval.ms' = '100', 'reconnect.backoff.max.ms' = '500', \
         'topic.metadata.refresh.interval.ms' = '1000' }}"
    );
    Ok(Policy::parse(&policy)?)
}

/// What could go wrong: an answer and a timer both end an order, or a repeated one ends it again;
/// an order is charged and not shipped, or given up and not paid back; stock is lost or comes back
/// twice, when a host dies between a provider's answer and its own note of it. S3-021, S1-054,
/// S3-014, S1-034.
#[tokio::test(flavor = "multi_thread")]
async fn each_order_ends_once_and_the_provider_agrees_although_hosts_die() {
    let seed = u64::from(rand::random::<u32>());
    let ends = survive(seed).await.with_context(|| format!("seed {seed}")).unwrap();
    println!("seed {seed}: {ends:?}");
}

async fn survive(seed: u64) -> Result<BTreeMap<String, usize>> {
    let mut fixture = SagaFixture::new(seed).await?;
    // Orders whose charge no relay has leased yet, nor does before the timer.
    let unsent = fixture.draw(2, false);
    fixture.place(&unsent).await?;
    fixture.die_at("inbox:commit:after@1").await?;
    end_leases(&fixture.base).await?;
    let unsent = fixture.put_off_charges().await?;
    ensure!(!unsent.is_empty(), "the host died, and no charge is left to be sent");

    let first = fixture.draw(4, false);
    fixture.place(&first).await?;
    fixture.die_at("outgoing:send:after@1").await?;

    // Orders whose charge was sent, and may have been made: time is over before the answer comes.
    let unanswered = fixture.hold_charge_leases().await?;
    ensure!(!unanswered.is_empty(), "the host died, and no charge is unanswered");
    let host = fixture.base.start("a", &[])?;
    fixture.time_out(&[&unsent[..], &unanswered[..]].concat()).await?;
    let voided = "SELECT count(*) FROM {schema}.orders WHERE state = 'voided'";
    fixture.until(voided, unanswered.len() as i64).await?;
    let timed_out = "SELECT count(*) FROM {schema}.orders WHERE state = 'timed_out'";
    fixture.until(timed_out, unsent.len() as i64).await?;
    fixture.end_held_leases().await?;

    // Orders that nothing but their answers end, and such whose timers race with them.
    let calm = [fixture.draw(4, false), fixture.draw(2, true), vec![UNSTOCKED.to_owned()]].concat();
    let raced = fixture.draw(8, false);
    fixture.place(&calm).await?;
    fixture.place(&raced).await?;
    let all = "SELECT count(*) FROM {schema}.orders";
    fixture.until(all, fixture.placed.len() as i64).await?;
    fixture.time_out(&raced).await?;
    let mut rng = StdRng::seed_from_u64(seed);
    sleep(Duration::from_millis(rng.random_range(0..1_200))).await;
    host.kill().await?;
    end_leases(&fixture.base).await?;

    let hosts = [fixture.base.start("a", &[])?, fixture.base.start("b", &[])?];
    fixture.place(&first).await?; // what comes again starts no second process
    fixture.place_again(&first[0]).await?;
    fixture.wait_ended().await?;
    // S3-021, S1-054, S3-014, S1-034.
    let ends = fixture.check().await?;
    for host in &hosts {
        host.stop().await?;
    }
    fixture.check().await?;
    let of = |state: &str| ends.get(state).copied().unwrap_or(0);
    ensure!((of("rejected"), of("refused")) == (1, 2), "{ends:?}");
    ensure!(of("charged") >= 4 && of("voided") >= unanswered.len(), "{ends:?}");
    ensure!(of("timed_out") >= unsent.len(), "{ends:?}");
    Ok(ends)
}
