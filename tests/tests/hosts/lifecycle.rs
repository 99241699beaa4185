//! Tenants and consumers live and end by API alone, under load, while hosts are killed at random:
//! effects are exact at every step. Show 4.
//!
//! Commands speak to whichever host lives; one that was cut off is given again, since each of them
//! may be.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::{NewToken, TokenRole};
use oncebox_devkit::local::free_port;
use oncebox_model::InboxError;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options},
    program::WorkingDir,
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use sqlx::AssertSqlSafe;
use tokio::time::sleep;

const LEDGER: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");
const SCHEMA: &str = include_str!("../../../guest-examples/ledger/schema.sql");

/// A host that is started again under its name, at its address.
struct Slot {
    name: &'static str,
    api: String,
    process: Option<HostProcess>,
}

/// Hosts that are killed and started again, commands to their API, and a publisher.
struct LifecycleFixture {
    hosts: HostFixture,
    folder: WorkingDir,
    slots: tokio::sync::Mutex<Vec<Slot>>,
    kills: AtomicUsize,
    producer: FutureProducer,
}

/// A consumer with its topic, and what was sent to it.
struct TestConsumer {
    tenant: String,
    name: &'static str,
    topic: String,
    flows: AtomicBool,
    sent: Mutex<BTreeSet<String>>,
    /// What somebody chose never to run.
    skipped: Mutex<BTreeSet<String>>,
}

impl TestConsumer {
    fn new(tenant: &str, name: &'static str) -> Arc<Self> {
        let topic = format!("{tenant}.{name}");
        let (sent, skipped) = (Mutex::default(), Mutex::default());
        Arc::new(Self {
            tenant: tenant.to_owned(),
            name,
            topic,
            flows: AtomicBool::new(false),
            sent,
            skipped,
        })
    }

    fn expected(&self) -> usize {
        self.sent.lock().unwrap().len() - self.skipped.lock().unwrap().len()
    }

    fn policy(&self, more: &str) -> String {
        format!(
            "topics = ['{}']\nack = 'after_commit'\nidentity = {{ id = [{{ header = 'id' }}], \
                event_type = [{{ header = 'type' }}] }}\n\
             retry = {{ attempts_max = 50, backoff_min_ms = 50, backoff_max_ms = 500 }}\n{more}\n\
             [kafka.properties]\n'session.timeout.ms' = '4000'\n'heartbeat.interval.ms' = \
             '300'\n'auto.commit.interval.ms' = '100'\n\
             'reconnect.backoff.max.ms' = '500'\n",
            self.topic
        )
    }
}

impl LifecycleFixture {
    async fn new() -> Result<Self> {
        let hosts =
            HostFixture::with(Options { static_members: false, ..Options::default() }).await?;
        let new =
            NewToken { name: "operator", role: TokenRole::Admin, tenant: None, expires_at: None };
        let (_, secret) = hosts.control.tokens().create(&new).await?;
        let folder = WorkingDir::new()?.with("ONCEBOX_TOKEN", secret.reveal());
        folder.write("ledger.wasm", LEDGER)?;
        folder.write("schema.sql", SCHEMA)?;
        let mut slots = Vec::new();
        for name in ["a", "b"] {
            let api = format!("127.0.0.1:{}", free_port()?);
            let process = Some(hosts.start_ready(name, &[("ONCEBOX_API_LISTEN", &api)]).await?);
            slots.push(Slot { name, api, process });
        }
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", hosts.kafka().bootstrap())
            .set("enable.idempotence", "true")
            .set("linger.ms", "1");
        let (slots, kills, producer) =
            (tokio::sync::Mutex::new(slots), AtomicUsize::new(0), config.create()?);
        Ok(Self { hosts, folder, slots, kills, producer })
    }

    /// What a command says that some host carries out, whoever dies meanwhile; of each try, when it
    /// takes several. `done` is what one says that was carried out before its answer was lost.
    async fn api(&self, arguments: &[&str], done: &str) -> Result<String> {
        let deadline = Instant::now() + DEADLINE;
        let mut said = String::new();
        for attempt in 0.. {
            let living: Vec<_> = self
                .slots
                .lock()
                .await
                .iter()
                .filter(|slot| slot.process.is_some())
                .map(|slot| slot.api.clone())
                .collect();
            if let Some(api) = living.get(attempt % living.len().max(1)) {
                let answer = self
                    .folder
                    .run(&[arguments, &["--server", &format!("http://{api}")]].concat(), "")
                    .await?;
                said.push_str(&answer.stdout);
                said.push_str(&answer.stderr);
                if answer.code == Some(0)
                    || (attempt > 0 && !done.is_empty() && answer.stderr.contains(done))
                {
                    println!(
                        "{:>7} ms  {}",
                        (Instant::now() + DEADLINE - deadline).as_millis(),
                        arguments.join(" ")
                    );
                    return Ok(said);
                }
            }
            ensure!(Instant::now() < deadline, "{arguments:?}: {said}");
            sleep(Duration::from_millis(200)).await;
        }
        bail!("it is tried for ever")
    }

    /// Kill hosts at random and start them again, until told to stop. One that was started again
    /// gets to work before the next dies: on a busy machine nothing would be done otherwise, and
    /// nothing shown.
    async fn kill_at_random(&self, mut rng: StdRng, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(rng.random_range(2_000..8_000))).await;
            let victim = rng.random_range(0..2);
            let process = self.slots.lock().await[victim].process.take().context("it runs")?;
            process.kill().await?;
            self.kills.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(rng.random_range(0..1_500))).await;
            let (name, api) = {
                let slots = self.slots.lock().await;
                (slots[victim].name, slots[victim].api.clone())
            };
            let process = self.hosts.start_ready(name, &[("ONCEBOX_API_LISTEN", &api)]).await?;
            self.slots.lock().await[victim].process = Some(process);
        }
        Ok(())
    }

    /// Be the operator who lets hosts start a consumer again that is quarantined, since some were
    /// killed while they started it. Ends only with an error.
    async fn release_quarantined(&self) -> Result<()> {
        const QUARANTINED: &str = "SELECT t.name, c.name FROM oncebox.consumer_start JOIN \
            oncebox.consumer c USING (consumer_id) \
            JOIN oncebox.tenant t USING (tenant_id) WHERE quarantined_revision IS NOT NULL";
        let mut released = BTreeMap::<_, usize>::new();
        loop {
            sleep(Duration::from_millis(500)).await;
            let quarantined: Vec<(String, String)> =
                sqlx::query_as(QUARANTINED).fetch_all(&self.hosts.pool).await?;
            for (tenant, name) in quarantined {
                match self.hosts.control.consumers().release(&tenant, &name).await {
                    Ok(true) => println!("`{tenant}/{name}` was quarantined, and is started again"),
                    Ok(false) | Err(InboxError::NotFound(_)) => continue,
                    Err(error) => return Err(error.into()),
                }
                let (kills, times) = (
                    self.kills.load(Ordering::Relaxed),
                    released.entry((tenant, name)).or_default(),
                );
                *times += 1;
                ensure!(
                    *times <= kills,
                    "a consumer was quarantined {times} times, after {kills} kills"
                );
            }
        }
    }

    async fn send(&self, consumer: &TestConsumer, ids: Vec<String>) -> Result<()> {
        consumer.sent.lock().unwrap().extend(ids.iter().cloned());
        let mut answers = Vec::new();
        for (number, id) in ids.iter().enumerate() {
            let payload =
                format!(r#"{{"account":"acc-{}","amount":"1","open_account":true}}"#, number % 20);
            let headers = OwnedHeaders::new()
                .insert(Header { key: "type", value: Some("payment.captured") })
                .insert(Header { key: "id", value: Some(id) });
            let partition = i32::try_from(number % 2)?;
            let record = FutureRecord::<(), _>::to(&consumer.topic)
                .partition(partition)
                .payload(&payload)
                .headers(headers);
            answers.push(self.producer.send_result(record).map_err(|(error, _)| error)?);
        }
        for answer in answers {
            answer.await?.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    /// A steady load, while it flows.
    async fn flow(&self, consumer: &TestConsumer, stop: &AtomicBool) -> Result<()> {
        for burst in 0.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if consumer.flows.load(Ordering::Relaxed) {
                self.send(
                    consumer,
                    (0..4)
                        .map(|n| format!("{}-{}-{burst}-{n}", consumer.tenant, consumer.name))
                        .collect(),
                )
                .await?;
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn schema(&self, consumer: &TestConsumer) -> Result<String> {
        Ok(self.hosts.control.tenants().get(&consumer.tenant).await?.schema_name)
    }

    async fn number(&self, sql: String) -> Result<i64> {
        sqlx::query_scalar(AssertSqlSafe(sql.clone()))
            .fetch_one(&self.hosts.pool)
            .await
            .with_context(|| sql)
    }

    async fn effects(&self, consumer: &TestConsumer) -> Result<i64> {
        let schema = self.schema(consumer).await?;
        self.number(format!(
            "SELECT count(*) FROM {schema}.ledger_entry WHERE message_id LIKE '{}-{}-%'",
            consumer.tenant, consumer.name
        ))
        .await
    }

    /// What is visible now is whole: a completed message has one effect, and every effect is of
    /// one.
    async fn check_whole(&self, consumer: &TestConsumer) -> Result<()> {
        let consumer_id =
            self.hosts.control.consumers().get(&consumer.tenant, consumer.name).await?.consumer_id;
        let odd = format!(
            "WITH e AS (SELECT message_id, count(*) AS n FROM {}.ledger_entry WHERE message_id \
                LIKE '{}-{}-%' GROUP BY 1), \
                i AS (SELECT message_id, status FROM oncebox.inbox WHERE consumer_id = \
                {consumer_id}) \
             SELECT count(*) FROM i FULL JOIN e USING (message_id) WHERE coalesce(n, 0) <> (status \
             IS NOT DISTINCT FROM 'completed')::int",
            self.schema(consumer).await?,
            consumer.tenant,
            consumer.name
        );
        let odd = self.number(odd).await?;
        ensure!(
            odd == 0,
            "{odd} messages of `{}/{}` do not have the effect that their row says",
            consumer.tenant,
            consumer.name
        );
        Ok(())
    }

    /// Everything that was sent and not skipped has its effect, once; nothing that was skipped has
    /// one.
    async fn wait_exact(&self, consumer: &TestConsumer) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while self.effects(consumer).await? < consumer.expected() as i64 {
            if Instant::now() > deadline {
                return self.hosts.violated(self.late(consumer).await?);
            }
            sleep(Duration::from_millis(100)).await;
        }
        self.check_whole(consumer).await?;
        let found = self.effects(consumer).await?;
        ensure!(
            found == consumer.expected() as i64,
            "`{}/{}` has {found} effects of {}",
            consumer.tenant,
            consumer.name,
            consumer.expected()
        );
        let listed =
            format!("SELECT message_id FROM {}.ledger_entry", self.schema(consumer).await?);
        let all: Vec<String> =
            sqlx::query_scalar(AssertSqlSafe(listed)).fetch_all(&self.hosts.pool).await?;
        let skipped = consumer.skipped.lock().unwrap();
        ensure!(!all.iter().any(|id| skipped.contains(id)), "a message ran that was skipped");
        Ok(())
    }

    /// What is known of a consumer that is late.
    async fn late(&self, consumer: &TestConsumer) -> Result<String> {
        let (found, expected) = (self.effects(consumer).await?, consumer.expected());
        let consumer_id =
            self.hosts.control.consumers().get(&consumer.tenant, consumer.name).await?.consumer_id;
        let rows = format!(
            "SELECT status, count(*) FROM oncebox.inbox WHERE consumer_id = {consumer_id} GROUP BY \
                1"
        );
        let rows: Vec<(String, i64)> =
            sqlx::query_as(AssertSqlSafe(rows)).fetch_all(&self.hosts.pool).await?;
        let plan = ["consumer", "seek", consumer.name, "--tenant", &consumer.tenant, "--to", "end"];
        let group = self.hosts.folder()?.run(&plan, "").await?.stdout;
        let shown = self
            .hosts
            .ok(&["consumer", "show", consumer.name, "--tenant", &consumer.tenant])
            .await?;
        Ok(format!(
            "`{}/{}` has {found} effects of {expected}; rows: {rows:?}\n{group}\n{shown}",
            consumer.tenant, consumer.name
        ))
    }

    /// It goes on: effects come.
    async fn wait_progress(&self, consumer: &TestConsumer) -> Result<()> {
        let (before, deadline) = (self.effects(consumer).await?, Instant::now() + DEADLINE);
        while self.effects(consumer).await? <= before {
            if Instant::now() > deadline {
                return self.hosts.violated(format!("no progress: {}", self.late(consumer).await?));
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Nothing of it runs, while its messages go on coming.
    async fn check_still(&self, consumer: &TestConsumer) -> Result<()> {
        let before = self.effects(consumer).await?;
        sleep(Duration::from_millis(1_500)).await;
        let after = self.effects(consumer).await?;
        ensure!(
            after == before,
            "`{}/{}` rests, and {} messages ran",
            consumer.tenant,
            consumer.name,
            after - before
        );
        Ok(())
    }

    /// Every host that lives says that nothing of the consumer runs there.
    async fn wait_stopped(&self, consumer: &TestConsumer) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while !self
            .hosts
            .control
            .hosts()
            .statuses(Some(&consumer.tenant), Some(consumer.name))
            .await?
            .iter()
            .all(|run| run.state == "stopped")
        {
            if Instant::now() > deadline {
                return self
                    .hosts
                    .violated(format!("it does not stop: {}", self.late(consumer).await?));
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn create_consumer(&self, consumer: &TestConsumer) -> Result<()> {
        self.hosts.kafka().create_topic(&consumer.topic, 2, &[]).await?;
        let file = format!("{}-{}.toml", consumer.tenant, consumer.name);
        self.folder.write(&file, consumer.policy(""))?;
        self.api(
            &["consumer", "create", consumer.name, "--tenant", &consumer.tenant, "--policy", &file],
            "there is a consumer",
        )
        .await?;
        let of = [
            "--tenant",
            &consumer.tenant,
            "--consumer",
            consumer.name,
            "--event-type",
            "payment.captured",
        ];
        self.api(&[&["deploy", "ledger.wasm", "--handler", "ledger"], &of[..]].concat(), "")
            .await?;
        consumer.flows.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn consumer(
        &self,
        consumer: &TestConsumer,
        verb: &[&str],
        more: &[&str],
    ) -> Result<String> {
        self.api(
            &[
                &["consumer"],
                verb,
                &[consumer.name, "--tenant", &consumer.tenant, "--wait", "40"],
                more,
            ]
            .concat(),
            "",
        )
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_and_consumers_live_and_end_while_hosts_die() {
    let seed = std::env::var("ONCEBOX_TEST_SEED")
        .map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("seed {seed}; ONCEBOX_TEST_SEED={seed} repeats it");
    lives(seed).await.unwrap();
}

async fn lives(seed: u64) -> Result<()> {
    let fixture = LifecycleFixture::new().await?;
    let unique = format!("{:06x}", rand::random::<u32>() & 0xff_ffff);
    let (x, y) = (format!("x-{unique}"), format!("y-{unique}"));
    let (first, second, short) =
        (TestConsumer::new(&x, "one"), TestConsumer::new(&y, "one"), TestConsumer::new(&x, "two"));
    let (stop_killing, stop_flowing) = (AtomicBool::new(false), AtomicBool::new(false));
    let story = async {
        let told = tell(&fixture, &first, &second, &short).await;
        stop_flowing.store(true, Ordering::Relaxed);
        stop_killing.store(true, Ordering::Relaxed);
        told
    };
    let lived = async {
        tokio::try_join!(
            story,
            fixture.kill_at_random(StdRng::seed_from_u64(seed), &stop_killing),
            fixture.flow(&first, &stop_flowing),
            fixture.flow(&second, &stop_flowing),
            fixture.flow(&short, &stop_flowing)
        )?;
        let kills = fixture.kills.load(Ordering::Relaxed);
        println!(
            "{kills} hosts were killed; {} and {} messages",
            first.expected(),
            second.expected()
        );
        ensure!(kills >= 5, "only {kills} hosts were killed");
        fixture.wait_exact(&first).await
    };
    tokio::select! {
        lived = lived => lived?,
        failed = fixture.release_quarantined() => failed?,
    }
    for slot in fixture.slots.into_inner() {
        slot.process.context("it was started again")?.stop().await?;
    }
    Ok(())
}

async fn tell(
    fixture: &LifecycleFixture,
    first: &TestConsumer,
    second: &TestConsumer,
    short: &TestConsumer,
) -> Result<()> {
    for consumer in [first, second] {
        fixture
            .api(
                &["tenant", "create", &consumer.tenant, "--schema", "schema.sql"],
                "there is a tenant",
            )
            .await?;
        fixture.create_consumer(consumer).await?;
        fixture.wait_progress(consumer).await?;
    }

    println!("another policy");
    fixture.folder.write("new.toml", first.policy("batch.messages_max = 8"))?;
    fixture.consumer(first, &["policy", "set"], &["--policy", "new.toml"]).await?;
    fixture.wait_progress(first).await?;
    fixture.check_whole(first).await?;

    println!("paused; its neighbour goes on");
    fixture.consumer(second, &["pause"], &[]).await?;
    fixture.check_still(second).await?;
    fixture.check_whole(second).await?;
    fixture.wait_progress(first).await?;
    fixture.consumer(second, &["resume"], &[]).await?;
    fixture.wait_progress(second).await?;

    println!("sought to the beginning");
    let said = fixture.consumer(first, &["seek"], &["--to", "beginning", "--yes"]).await?;
    ensure!(said.contains("records are read again"), "{said}");
    fixture.wait_progress(first).await?;
    fixture.check_whole(first).await?;

    println!("drained, and resumed");
    fixture.consumer(first, &["drain"], &[]).await?;
    fixture.check_still(first).await?;
    fixture.check_whole(first).await?;
    fixture.consumer(first, &["resume"], &[]).await?;
    fixture.wait_progress(first).await?;

    println!("sought over messages that somebody gives up");
    second.flows.store(false, Ordering::Relaxed);
    fixture.wait_exact(second).await?;
    fixture.consumer(second, &["pause"], &[]).await?;
    let given_up: Vec<_> = (0..10).map(|n| format!("given-up-{n}")).collect();
    second.skipped.lock().unwrap().extend(given_up.iter().cloned());
    fixture.send(second, given_up).await?;
    fixture.consumer(second, &["seek"], &["--to", "end", "--yes"]).await?;
    fixture.consumer(second, &["resume"], &[]).await?;
    second.flows.store(true, Ordering::Relaxed);
    fixture.wait_progress(second).await?;

    println!("a consumer that lives a short life");
    fixture.create_consumer(short).await?;
    fixture.wait_progress(short).await?;
    fixture.check_whole(short).await?;
    let deleted = [
        "consumer",
        "delete",
        short.name,
        "--tenant",
        &short.tenant,
        "--confirm",
        short.name,
        "--wait",
        "60",
    ];
    fixture.api(&deleted, "there is no consumer").await?;
    const LEFT: &str = "SELECT count(*) FROM oncebox.inbox i WHERE NOT EXISTS (SELECT FROM \
        oncebox.consumer c WHERE c.consumer_id = i.consumer_id)";
    ensure!(
        fixture.number(LEFT.to_owned()).await? == 0,
        "rows of a consumer that was deleted are left"
    );
    fixture.check_still(short).await?;
    let twice = format!(
        "SELECT count(*) - count(DISTINCT message_id) FROM {}.ledger_entry",
        fixture.schema(short).await?
    );
    ensure!(fixture.number(twice).await? == 0, "an effect is doubled");
    short.flows.store(false, Ordering::Relaxed);

    println!("a tenant with new credentials, that rests and goes on");
    let tenant = second.tenant.as_str();
    fixture.api(&["tenant", "rotate-credentials", tenant], "").await?;
    fixture.wait_progress(second).await?;
    fixture.api(&["tenant", "suspend", tenant], "").await?;
    fixture.wait_stopped(second).await?;
    fixture.check_still(second).await?;
    fixture.check_whole(second).await?;
    fixture.wait_progress(first).await?;
    fixture.api(&["tenant", "resume", tenant], "").await?;
    fixture.wait_progress(second).await?;

    println!("the end of a tenant");
    second.flows.store(false, Ordering::Relaxed);
    fixture.wait_exact(second).await?;
    println!("{} effects of `{tenant}`, each once", second.expected());
    let (schema, login) = {
        let row = fixture.hosts.control.tenants().get(tenant).await?;
        (row.schema_name, row.login)
    };
    fixture.api(&["tenant", "delete", tenant, "--confirm", tenant], "there is no tenant").await?;
    let left = format!(
        "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = '{schema}') + (SELECT count(*) \
            FROM pg_roles WHERE rolname = '{login}') + ({LEFT})"
    );
    ensure!(fixture.number(left).await? == 0, "something of a tenant that was deleted is left");
    fixture.wait_progress(first).await
}
