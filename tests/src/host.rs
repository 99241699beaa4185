//! Real host processes between a real Kafka and a real PostgreSQL, and the final check.
//!
//! A [`HostFixture`] has a database, a topic, a tenant and a consumer of its own, so that many run
//! side by side; the servers are shared unless it is given others. Effects are counted in the
//! database.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::{Control, DatabaseUrl, Job, MasterKey, NewDeployment, NewJob, Tenant};
use oncebox_devkit::local::{free_port, process::Child};
use oncebox_model::policy::Policy;
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer},
    message::{Header, OwnedHeaders, OwnedMessage},
    producer::{FutureProducer, FutureRecord},
};
use sqlx::{
    AssertSqlSafe, Executor, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::{
    coverage,
    http::{self, Response},
    inbox,
    job::carry_out,
    kafka::KafkaServer,
    load::{Found, Load, Message, Violation, Work},
    postgres::{TestDatabase, admin_url},
    program::WorkingDir,
    proxy::Proxy,
    release::{apart, previous_ledger, previous_release, previous_version, run_previous},
    services::target_dir,
    wait::{self, DEADLINE},
};

const SLEEPING: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE usename = '{login}' AND wait_event = 'PgSleep'";
const POLL: Duration = Duration::from_millis(25);
const BROKER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a host may take to say whether it is ready, where it is asked again.
const LOOK: Duration = Duration::from_secs(2);
/// How long a host may take to say what it measures.
const SCRAPE: Duration = Duration::from_secs(20);
/// Records that wait for the broker at once, half of what a producer holds.
const PUBLISHED_AT_ONCE: usize = 50_000;

const COMPONENT: &[u8] = include_bytes!("../../guest-examples/components/ledger.wasm");
const SCHEMA: &str = include_str!("../../guest-examples/ledger/schema.sql");
const CONSUMER: &str = "payments";

/// What an account's name asks for happens here: behind the host's back, under the handler's own
/// statement. The attempt is read from the row of the message, which is in the same transaction.
const BEHAVIOUR: &str = "
CREATE FUNCTION {schema}.behave() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET \
    search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_word text := split_part(NEW.account, '-', 1);
    v_number text := split_part(NEW.account, '-', 2);
    v_attempts int;
BEGIN
    IF v_word = 'sleeps' THEN
        PERFORM pg_sleep(v_number::float8 / 1000);
    ELSIF v_word = 'fails' THEN
        SELECT i.attempts INTO v_attempts FROM oncebox.inbox i WHERE i.consumer_id = {consumer} \
    AND i.message_id = NEW.message_id;
        IF v_attempts < v_number::int THEN
            RAISE EXCEPTION 'attempt % fails', v_attempts;
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER behave BEFORE INSERT ON {schema}.ledger_entry FOR EACH ROW EXECUTE FUNCTION \
    {schema}.behave();";

/// A disk that is full at times: what would make the inbox grow then fails as PostgreSQL fails
/// where it cannot extend a file.
const DISK: &str = "
CREATE TABLE public.disk (is_full boolean NOT NULL);
INSERT INTO public.disk VALUES (false);
CREATE FUNCTION public.extend() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path \
    = pg_catalog, pg_temp AS $$
BEGIN
    IF (SELECT is_full FROM public.disk) THEN
        RAISE EXCEPTION 'could not extend file \"base/16384/16385\": No space left on device' \
    USING ERRCODE = 'disk_full';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER extend AFTER INSERT OR UPDATE ON oncebox.inbox FOR EACH STATEMENT EXECUTE FUNCTION \
    public.extend();";

/// Deviations of a fixture from the plain one.
#[derive(Debug, Clone)]
pub struct Options {
    /// Partitions of the topic.
    pub partitions: i32,
    /// `after_commit` or `after_insert`.
    pub ack: &'static str,
    /// `none`, `key` or `partition`; messages with a key go to its partition. With `sequence` they
    /// go to any, and their keys are put in order by their versions.
    pub order: &'static str,
    /// The consumer subscribes to a pattern that its topic matches, not to its name.
    pub pattern: bool,
    /// Completed messages leave light rows.
    pub light: bool,
    /// Sources of the message id, in TOML.
    pub id: &'static str,
    /// `[batch]` of the policy, in TOML.
    pub batch: &'static str,
    /// Shortest and longest time between two attempts of a message.
    pub backoff_ms: (u32, u32),
    /// How long a handler may take; a lease lasts half a second longer.
    pub deadline_ms: u32,
    /// After how long a silent host is taken for dead, unless it comes back under its own name.
    pub session_timeout_ms: u32,
    /// A host that comes back keeps its place in the group.
    pub static_members: bool,
    /// After how long without anything to do a host leaves the group until there is something; 0
    /// for never.
    pub idle_after_ms: u32,
    /// A superuser's URL of another server than the shared one.
    pub postgres: Option<String>,
    /// Other brokers than the shared one.
    pub brokers: Option<String>,
    /// The tenant's inbox and tables are in a database of its own.
    pub own_database: bool,
    /// A superuser's URL of another server for that than the host's.
    pub own_postgres: Option<String>,
    /// Dead letters are copied to the topic [`HostFixture::copies`].
    pub copies: bool,
    /// The release before makes the databases and the tenant. Its ledger is the handler.
    pub previous_release: bool,
    /// The handler is the ledger of the release before, which hosts of it can run.
    pub previous_ledger: bool,
    /// Hosts reach the databases through proxies, [`HostFixture::ways`].
    pub proxied: bool,
    /// The disk under the inbox can be filled, by [`HostFixture::fill_disk`].
    pub fills: bool,
    /// URL of the schema registry that payloads are decoded by, where they are.
    pub registry: Option<String>,
    /// Further keys of the policy, in TOML.
    pub policy: &'static str,
    /// Further tables of hosts' configurations, in TOML.
    pub config: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            partitions: 2,
            ack: "after_commit",
            order: "none",
            pattern: false,
            light: false,
            id: "[{ header = 'id' }]",
            batch: "{}",
            backoff_ms: (50, 200),
            deadline_ms: 2_500,
            session_timeout_ms: 6_000,
            static_members: true,
            idle_after_ms: 60_000,
            postgres: None,
            brokers: None,
            own_database: false,
            own_postgres: None,
            copies: false,
            previous_release: false,
            previous_ledger: false,
            proxied: false,
            fills: false,
            registry: None,
            policy: "",
            config: String::new(),
        }
    }
}

impl Options {
    fn policy(&self, topic: &str) -> Result<Policy> {
        let Self { ack, order, id, batch, deadline_ms, session_timeout_ms, policy, .. } = self;
        let (lease_ms, (shortest, longest)) = (deadline_ms + 2_501, self.backoff_ms);
        let (order, sequence) = match *order {
            "sequence" => (
                "key",
                "sequence = { version = { header = 'version' }, first = 1, gap_wait_ms = 600000 }",
            ),
            order => (order, ""),
        };
        let (wire_format, event_type) = match self.registry {
            Some(_) => ("confluent", "'schema'"),
            None => ("plain", "{ header = 'type' }"),
        };
        let copies = if self.copies {
            format!("dead_letters = {{ topic = '{topic}.dead' }}")
        } else {
            String::new()
        };
        let topics = if self.pattern { format!("^{topic}$") } else { topic.to_owned() };
        let rows = if self.light { "light" } else { "full" };
        let policy = format!(
            "topics = ['{topics}']\nack = '{ack}'\norder = '{order}'\n{sequence}\nbatch = {batch}\n\
             inbox = '{rows}'\n\
             identity = {{ id = {id}, event_type = [{event_type}] }}\n\
             retry = {{ attempts_max = 20, backoff_min_ms = {shortest}, backoff_max_ms = \
             {longest}, lease_ms = {lease_ms} }}\n\
             limits = {{ deadline_ms = {deadline_ms} }}\n{copies}\nwire_format = '{wire_format}'\n\
             {policy}\n\
             kafka.properties = {{ 'session.timeout.ms' = '{session_timeout_ms}', \
             'heartbeat.interval.ms' = '300', \
             'auto.commit.interval.ms' = '100', 'reconnect.backoff.max.ms' = '500', \
             'topic.metadata.refresh.interval.ms' = '1000' }}"
        );
        Ok(Policy::parse(&policy)?)
    }
}

/// A database, a topic, a tenant, a consumer with its handler, and everything that was sent to it.
pub struct HostFixture {
    /// What a person can do.
    pub control: Control,
    /// Connections of a superuser to the database of the tenant's inbox and tables, to look and to
    /// meddle.
    pub pool: PgPool,
    /// The tenant.
    pub tenant: Tenant,
    /// The consumer's key.
    pub consumer_id: i32,
    /// The topic.
    pub topic: String,
    options: Options,
    /// Of the topic, by now.
    partitions: AtomicI32,
    /// In front of the host's database, and of the tenant's own where it has one.
    ways: Vec<Proxy>,
    /// In front of the brokers, and those as hosts reach them.
    broker_way: Option<Proxy>,
    /// The host's database as hosts reach it.
    host_url: String,
    brokers: String,
    key: String,
    dir: PathBuf,
    producer: Mutex<FutureProducer>,
    /// Held while records are published, and while their topic is not there.
    publishing: tokio::sync::Mutex<()>,
    sent: Mutex<Load>,
    /// Records without an id that may have gone with their topic.
    gone_without_id: AtomicUsize,
    failed: AtomicBool,
    database: TestDatabase,
    /// The tenant's own, where it has one.
    own: Option<TestDatabase>,
}

impl HostFixture {
    /// The plain one.
    pub async fn new() -> Result<Self> {
        Self::with(Options::default()).await
    }

    /// One with options.
    pub async fn with(options: Options) -> Result<Self> {
        let (postgres, brokers) = servers(&options).await?;
        let (database, host_pool) = migrated(&postgres, options.previous_release).await?;
        let connect: PgConnectOptions = database.url().parse()?;
        let (mut ways, mut host_url) = (Vec::new(), database.url().to_owned());
        if options.proxied {
            let (way, through) = Proxy::before(&host_url).await?;
            (ways, host_url) = (vec![way], through);
        }
        let own = if options.own_database {
            let server = options.own_postgres.as_deref().unwrap_or(&postgres);
            Some(migrated(server, options.previous_release).await?)
        } else {
            None
        };

        let unique = format!("{:08x}", rand::random::<u32>());
        let topic = format!("payments.{unique}");
        let kafka = KafkaServer::at(&brokers);
        kafka.create_topic(&topic, options.partitions, &[]).await?;
        if options.copies {
            kafka
                .create_topic(&format!("{topic}.dead"), 1, &[("max.message.bytes", "20000")])
                .await?;
        }

        let key = MasterKey::generate();
        let control = Control::new(connect, MasterKey::parse(&key)?, "test");
        let mut own_url = own.as_ref().map(|(own, _)| own.url().to_owned());
        if let (Some(url), true) = (&mut own_url, options.proxied) {
            let (way, through) = Proxy::before(url).await?;
            ways.push(way);
            *url = through;
        }
        // The tenant's name is in the group's.
        let name = format!("t-{unique}");
        let tenant = match &own_url {
            _ if options.previous_release => {
                let url = own_url.as_deref().unwrap_or_default();
                let variables = [
                    ("ONCEBOX_DATABASE_URL", database.url()),
                    ("ONCEBOX_MASTER_KEY", &key),
                    ("ONCEBOX_TENANT_DATABASE_URL", url),
                ];
                let variables = if own.is_some() { &variables[..] } else { &variables[..2] };
                run_previous(&["tenant", "create", &name], variables).await?;
                control.tenants().get(&name).await?
            }
            Some(url) => {
                control.tenants().create_dedicated(&name, &DatabaseUrl::parse(url)?).await?
            }
            None => control.tenants().create(&name).await?,
        };
        let (own, pool) = own.map_or((None, host_pool), |(own, pool)| (Some(own), pool));
        control.tenant_databases().apply_migration(&tenant, "tables", SCHEMA).await?;
        let consumer_id = control
            .consumers()
            .create(&tenant.name, CONSUMER, &options.policy(&topic)?)
            .await?
            .consumer_id;
        let behaviour = BEHAVIOUR
            .replace("{schema}", &tenant.schema_name)
            .replace("{consumer}", &consumer_id.to_string());
        pool.execute(sqlx::raw_sql(AssertSqlSafe(behaviour))).await?;
        if options.fills {
            pool.execute(sqlx::raw_sql(DISK)).await?;
        }
        let component = match options.previous_release || options.previous_ledger {
            true => previous_ledger()?,
            false => COMPONENT.to_vec(),
        };
        control
            .versions()
            .deploy_compiled(
                &tenant.name,
                CONSUMER,
                NewDeployment::stable("payment.captured", "ledger", ""),
                &component,
            )
            .await?;

        let dir = target_dir().join("test-hosts").join(&unique);
        fs::create_dir_all(&dir)
            .with_context(|| format!("failed to create `{}`", dir.display()))?;
        let producer = producer(&brokers)?;
        let (sent, failed, partitions) =
            (Mutex::default(), AtomicBool::new(false), AtomicI32::new(options.partitions));
        Ok(Self {
            control,
            pool,
            tenant,
            consumer_id,
            topic,
            options,
            partitions,
            ways,
            broker_way: None,
            host_url,
            brokers,
            key,
            dir,
            producer: Mutex::new(producer),
            publishing: tokio::sync::Mutex::default(),
            sent,
            gone_without_id: AtomicUsize::new(0),
            failed,
            database,
            own,
        })
    }

    // Hosts ---------------------------------------------------------------------------------

    /// Start a host. Its name is its place in the group; the variables go over the usual ones.
    pub fn start(&self, name: &str, variables: &[(&str, &str)]) -> Result<HostProcess> {
        self.start_program(self.program()?, name, variables)
    }

    /// Start a host of the release before.
    pub fn start_previous(&self, name: &str) -> Result<HostProcess> {
        self.start_program(self.on_servers(previous_release()?), name, &[])
    }

    fn start_program(
        &self,
        mut command: Command,
        name: &str,
        variables: &[(&str, &str)],
    ) -> Result<HostProcess> {
        let log = self.dir.join(format!("{name}.log"));
        let output = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .context("failed to open the host's log")?;
        let http = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let config = self.dir.join(format!("{name}.toml"));
        let member = if self.options.static_members {
            format!("[kafka.properties]\n'group.instance.id' = '{name}'\n")
        } else {
            String::new()
        };
        fs::write(&config, member + &self.options.config)
            .context("failed to write the host's configuration")?;
        command
            .arg("serve")
            .env("ONCEBOX_DATABASE_URL", &self.host_url)
            .env(
                "ONCEBOX_KAFKA_BROKERS",
                self.broker_way
                    .as_ref()
                    .map_or_else(|| self.brokers.clone(), |way| way.address().to_string()),
            )
            .env("ONCEBOX_CONFIG", &config)
            .env("ONCEBOX_HTTP_LISTEN", http.to_string())
            .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
            .env("ONCEBOX_RUNTIME_CACHE_DIR", target_dir().join("test-hosts/cache"))
            .env("ONCEBOX_KAFKA_IDLE_AFTER_MS", self.options.idle_after_ms.to_string())
            .env("ONCEBOX_LOG_FORMAT", "text")
            .env(
                "ONCEBOX_SCHEMA_REGISTRY_URL",
                self.options.registry.as_deref().unwrap_or_default(),
            )
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        HostProcess::spawn(name, command, http, log)
    }

    /// Run a command of the program, with its fail points, on the host's database.
    pub fn command(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Output> {
        self.program()?
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .output()
            .context("failed to run the program")
    }

    /// The program, on the database of the host and its brokers.
    pub fn program(&self) -> Result<Command> {
        Ok(self.on_servers(apart(Command::new(program()?))))
    }

    fn on_servers(&self, mut command: Command) -> Command {
        command
            .env("ONCEBOX_DATABASE_URL", self.database.url())
            .env("ONCEBOX_KAFKA_BROKERS", &self.brokers)
            .env("ONCEBOX_MASTER_KEY", &self.key);
        command
    }

    /// The URL of the host's database.
    pub fn database_url(&self) -> &str {
        self.database.url()
    }

    /// The name of the database of the tenant's inbox.
    pub fn database_name(&self) -> &str {
        self.own.as_ref().unwrap_or(&self.database).name()
    }

    /// Start a host and wait until it says that it is ready.
    pub async fn start_ready(&self, name: &str, variables: &[(&str, &str)]) -> Result<HostProcess> {
        let host = self.start(name, variables)?;
        host.wait_ready().await?;
        Ok(host)
    }

    /// A person's folder, in which commands work on this database and these brokers.
    pub fn folder(&self) -> Result<WorkingDir> {
        let folder = WorkingDir::new()?.with("ONCEBOX_DATABASE_URL", self.database.url());
        Ok(folder
            .with("ONCEBOX_MASTER_KEY", &self.key)
            .with("ONCEBOX_KAFKA_BROKERS", &self.brokers))
    }

    /// A command on this database that succeeds; what it prints.
    pub async fn ok(&self, arguments: &[&str]) -> Result<String> {
        let said = self.folder()?.run(arguments, "").await?;
        ensure!(said.code == Some(0), "{arguments:?}: {}{}", said.stdout, said.stderr);
        Ok(said.stdout)
    }

    // Messages ------------------------------------------------------------------------------

    /// Publish the load, spread over the partitions, and remember it for the check. A load that was
    /// sent before comes again, at other places.
    pub async fn send(&self, load: &Load) -> Result<()> {
        self.open_accounts(load).await?;
        self.sent().deliveries.extend(load.deliveries.iter().cloned());
        self.publish(&load.deliveries).await
    }

    /// Make the accounts that the load books to.
    pub async fn open_accounts(&self, load: &Load) -> Result<()> {
        let sql = format!(
            "INSERT INTO {}.account (account) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
            self.tenant.schema_name
        );
        sqlx::query(AssertSqlSafe(sql)).bind(load.accounts()).execute(&self.pool).await?;
        Ok(())
    }

    /// What was sent so far.
    pub fn sent(&self) -> std::sync::MutexGuard<'_, Load> {
        self.sent.lock().expect("no panic while held")
    }

    /// Publish without expecting anything of it.
    pub async fn publish(&self, deliveries: &[Message]) -> Result<()> {
        self.publish_to(None, deliveries).await
    }

    async fn publish_to(&self, only: Option<i32>, deliveries: &[Message]) -> Result<()> {
        let _publishing = self.publishing.lock().await;
        self.publish_now(only, deliveries).await
    }

    fn producer(&self) -> FutureProducer {
        self.producer.lock().expect("no panic while held").clone()
    }

    async fn publish_now(&self, only: Option<i32>, deliveries: &[Message]) -> Result<()> {
        for piece in deliveries.chunks(PUBLISHED_AT_ONCE) {
            self.publish_piece(only, piece).await?;
        }
        Ok(())
    }

    async fn publish_piece(&self, only: Option<i32>, deliveries: &[Message]) -> Result<()> {
        let (mut answers, publisher) = (Vec::new(), self.producer());
        for message in deliveries {
            let payload = message.payload();
            let mut headers = OwnedHeaders::new()
                .insert(Header { key: "type", value: Some(message.event_type()) });
            if message.work != Work::NoId {
                headers = headers.insert(Header { key: "id", value: Some(&message.id) });
            }
            let version = message.version.map(|version| version.to_string());
            if let Some(version) = &version {
                headers = headers.insert(Header { key: "version", value: Some(version) });
            }
            let key = message.key.map(|key| key.to_string());
            let ordered = message.key.filter(|_| self.options.order != "sequence");
            let partition = ordered.map_or_else(
                || rand::random_range(0..self.partitions()),
                |key| self.partition_of(key),
            );
            let partition = only.unwrap_or(partition);
            let mut record = FutureRecord::<String, _>::to(&self.topic)
                .partition(partition)
                .payload(&payload)
                .headers(headers);
            record.key = key.as_ref();
            answers.push(
                publisher
                    .send_result(record)
                    .map_err(|(error, _)| error)
                    .context("failed to publish")?,
            );
        }
        for answer in answers {
            answer
                .await
                .context("the publisher ended")?
                .map_err(|(error, _)| error)
                .context("a record was not published")?;
        }
        Ok(())
    }

    /// Whether messages of a key are in order.
    fn is_in_order(&self) -> bool {
        matches!(self.options.order, "key" | "sequence")
    }

    fn partition_of(&self, key: usize) -> i32 {
        key as i32 % self.options.partitions
    }

    /// Partitions of the topic, by now.
    pub fn partitions(&self) -> i32 {
        self.partitions.load(Ordering::SeqCst)
    }

    // A neighbour ---------------------------------------------------------------------------

    /// Another tenant, with its inbox in the host's database, that the same hosts work for: a topic
    /// of its own with this many messages, and how many of them have had their effect.
    pub async fn neighbour(&self, messages: usize) -> Result<Neighbour> {
        let topic = format!("{}.neighbour", self.topic);
        self.kafka().create_topic(&topic, 1, &[]).await?;
        let tenant =
            self.control.tenants().create(&format!("{}-neighbour", self.tenant.name)).await?;
        self.control.tenant_databases().apply_migration(&tenant, "tables", SCHEMA).await?;
        self.control
            .consumers()
            .create(&tenant.name, CONSUMER, &self.options.policy(&topic)?)
            .await?;
        self.control
            .versions()
            .deploy_compiled(
                &tenant.name,
                CONSUMER,
                NewDeployment::stable("payment.captured", "ledger", ""),
                COMPONENT,
            )
            .await?;
        let neighbour =
            Neighbour { topic, tenant, control: self.control.clone(), producer: self.producer() };
        neighbour.send(0, messages).await?;
        Ok(neighbour)
    }

    // The broker ----------------------------------------------------------------------------

    /// Deletes the topic and makes another of its name, with so many partitions.
    pub async fn make_topic_again(&self, partitions: i32) -> Result<()> {
        let _publishing = self.publishing.lock().await;
        self.remake_topic(partitions).await
    }

    async fn remake_topic(&self, partitions: i32) -> Result<()> {
        self.kafka().delete_topic(&self.topic).await?;
        self.kafka().create_topic(&self.topic, partitions, &[]).await?;
        self.know_partitions(partitions)
    }

    /// The same with as many partitions as it has; what was sent by then, but for records without
    /// an id, is sent again before anything else is.
    pub async fn make_topic_again_and_resend(&self) -> Result<()> {
        let _publishing = self.publishing.lock().await;
        self.remake_topic(self.partitions()).await?;
        let sent = self.sent().deliveries.clone();
        let (resent, gone): (Vec<_>, Vec<_>) =
            sent.into_iter().partition(|message| message.work != Work::NoId);
        self.gone_without_id.store(gone.len(), Ordering::SeqCst);
        self.publish_now(None, &resent).await
    }

    /// Adds partitions to the topic, up to so many; what is published from now on is spread over
    /// all of them.
    pub async fn add_partitions(&self, partitions: i32) -> Result<()> {
        self.kafka().add_partitions(&self.topic, partitions).await?;
        self.know_partitions(partitions)
    }

    /// The publisher that there was knows the partitions that there were.
    fn know_partitions(&self, partitions: i32) -> Result<()> {
        self.partitions.store(partitions, Ordering::SeqCst);
        *self.producer.lock().expect("no panic while held") = producer(&self.brokers)?;
        Ok(())
    }

    /// Publish the load to one partition, and remember it for the check.
    pub async fn send_to(&self, partition: i32, load: &Load) -> Result<()> {
        self.open_accounts(load).await?;
        self.sent().deliveries.extend(load.deliveries.iter().cloned());
        self.publish_to(Some(partition), &load.deliveries).await
    }

    /// The brokers' administration.
    pub fn kafka(&self) -> KafkaServer {
        KafkaServer::at(&self.brokers)
    }

    /// By partition: the group's committed offset, and the end.
    pub async fn positions(&self) -> Result<BTreeMap<i32, (i64, i64)>> {
        let (client, topic, partitions) =
            (self.group_client()?, self.topic.clone(), self.partitions());
        let ask = move || {
            let mut list = TopicPartitionList::new();
            list.add_partition_range(&topic, 0, partitions - 1);
            let committed = client
                .committed_offsets(list, BROKER_TIMEOUT)
                .context("failed to read the group's offsets")?;
            let position = |partition| {
                let (_, high) = client.fetch_watermarks(&topic, partition, BROKER_TIMEOUT)?;
                let found =
                    committed.find_partition(&topic, partition).map(|element| element.offset());
                let committed = if let Some(Offset::Offset(offset)) = found { offset } else { 0 };
                Ok((partition, (committed, high)))
            };
            (0..partitions).map(position).collect()
        };
        tokio::task::spawn_blocking(ask).await?
    }

    /// Every copy of a dead letter that is in its topic.
    pub async fn copies(&self) -> Result<Vec<OwnedMessage>> {
        let (client, topic) = (self.group_client()?, format!("{}.dead", self.topic));
        let read = move || -> Result<Vec<OwnedMessage>> {
            let (low, high) = client.fetch_watermarks(&topic, 0, BROKER_TIMEOUT)?;
            let mut list = TopicPartitionList::new();
            list.add_partition_offset(&topic, 0, Offset::Offset(low))?;
            client.assign(&list)?;
            let next =
                |_| Ok(client.poll(BROKER_TIMEOUT).context("a record is missing")??.detach());
            (low..high).map(next).collect()
        };
        tokio::task::spawn_blocking(read).await?
    }

    /// Set the group's offsets, as a person with Kafka's tools would, while no host runs.
    pub async fn reset_offsets(&self, to: i64) -> Result<()> {
        let (client, topic, partitions) =
            (self.group_client()?, self.topic.clone(), self.partitions());
        let reset = move || -> Result<()> {
            let mut list = TopicPartitionList::new();
            for partition in 0..partitions {
                list.add_partition_offset(&topic, partition, Offset::Offset(to))?;
            }
            client.commit(&list, CommitMode::Sync).context("failed to reset the group's offsets")
        };
        tokio::task::spawn_blocking(reset).await?
    }

    /// By partition: the group's committed offset with what is noted beside it; none where there is
    /// no offset.
    pub async fn offsets_with_notes(&self) -> Result<Vec<(i32, i64, String)>> {
        let (client, topic, partitions) =
            (self.group_client()?, self.topic.clone(), self.partitions());
        let ask = move || -> Result<_> {
            let mut list = TopicPartitionList::new();
            list.add_partition_range(&topic, 0, partitions - 1);
            let committed = client
                .committed_offsets(list, BROKER_TIMEOUT)
                .context("failed to read the group's offsets")?;
            let elements = committed.elements();
            let with_offset = elements.iter().filter_map(|element| match element.offset() {
                Offset::Offset(offset) => {
                    Some((element.partition(), offset, element.metadata().to_owned()))
                }
                _ => None,
            });
            Ok(with_offset.collect())
        };
        tokio::task::spawn_blocking(ask).await?
    }

    /// Set the group's offsets and what is noted beside them, while no host runs.
    pub async fn set_offsets_with_notes(&self, offsets: &[(i32, i64, String)]) -> Result<()> {
        let (client, topic, offsets) = (self.group_client()?, self.topic.clone(), offsets.to_vec());
        let set = move || -> Result<()> {
            let mut list = TopicPartitionList::new();
            for (partition, offset, note) in offsets {
                let mut element = list.add_partition(&topic, partition);
                element.set_offset(Offset::Offset(offset))?;
                element.set_metadata(&note);
            }
            client.commit(&list, CommitMode::Sync).context("failed to set the group's offsets")
        };
        tokio::task::spawn_blocking(set).await?
    }

    fn group_client(&self) -> Result<BaseConsumer> {
        let group = format!("oncebox.{}.{CONSUMER}", self.tenant.name);
        ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", group)
            .set("log_level", "0")
            .create()
            .context("failed to make a client")
    }

    // The database --------------------------------------------------------------------------

    /// A number from the database, read by a superuser; `{schema}` is the tenant's, `{consumer}`
    /// the consumer's key, `{login}` the role of the tenant's sessions.
    pub async fn number(&self, sql: &str) -> Result<i64> {
        let sql = self.fill(sql);
        sqlx::query_scalar(AssertSqlSafe(sql.clone()))
            .fetch_one(&self.pool)
            .await
            .with_context(|| format!("failed: `{sql}`"))
    }

    /// A job of the fixture's tenant, carried out by its hosts or by the test.
    pub async fn job(&self, new: &NewJob) -> Result<Job> {
        carry_out(&self.control, &self.tenant.name, new).await
    }

    /// Statements of a superuser, filled in like [`Self::number`].
    pub async fn execute(&self, sql: &str) -> Result<()> {
        let sql = self.fill(sql);
        self.pool
            .execute(sqlx::raw_sql(AssertSqlSafe(sql.clone())))
            .await
            .with_context(|| format!("failed: `{sql}`"))?;
        Ok(())
    }

    fn fill(&self, sql: &str) -> String {
        sql.replace("{schema}", &self.tenant.schema_name)
            .replace("{consumer}", &self.consumer_id.to_string())
            .replace("{login}", &self.tenant.login)
    }

    /// Wait until a number from the database reaches a bound.
    pub async fn until(&self, sql: &str, at_least: i64) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while self.number(sql).await? < at_least {
            if Instant::now() > deadline {
                return self.violated(format!("never {at_least}: `{sql}`"));
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Sessions of the tenant that sleep inside a handler's statement.
    pub async fn sleeping(&self) -> Result<i64> {
        self.number(SLEEPING).await
    }

    /// Wait until as many sleep.
    pub async fn until_sleeping(&self, at_least: i64) -> Result<()> {
        self.until(SLEEPING, at_least).await
    }

    /// End every session that a program of ours has on the database of the tenant's inbox.
    pub async fn end_all_sessions(&self) -> Result<i64> {
        const END: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name \
            LIKE 'oncebox%'";
        self.number(END).await
    }

    /// The proxies in front of the host's database and the tenant's own.
    pub fn ways(&self) -> &[Proxy] {
        &self.ways
    }

    /// Hosts that start from now on reach the brokers by this.
    pub fn reach_brokers_by(&mut self, way: Proxy) {
        self.broker_way = Some(way);
    }

    /// The proxy in front of the brokers.
    pub fn broker_way(&self) -> Option<&Proxy> {
        self.broker_way.as_ref()
    }

    /// The disk under the inbox is full, or has room again.
    pub async fn fill_disk(&self, is_full: bool) -> Result<()> {
        self.execute(if is_full {
            "UPDATE public.disk SET is_full = true"
        } else {
            "UPDATE public.disk SET is_full = false"
        })
        .await
    }

    /// Let hosts start the consumer again, as an operator would, where some of them were killed
    /// while they started it. Whether it was quarantined.
    pub async fn release_quarantined(&self) -> Result<bool> {
        Ok(self.control.consumers().release(&self.tenant.name, CONSUMER).await?)
    }

    /// Cut every connection of the tenant's sessions.
    pub async fn cut_sessions(&self) -> Result<i64> {
        self.number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = \
            '{login}'",
        )
        .await
    }

    /// The rows of the inbox with the effects of each message; a message without a row has none.
    pub async fn found(&self) -> Result<Vec<Found>> {
        const FOUND: &str = "WITH e AS (SELECT message_id, count(*) AS n FROM \
            {schema}.ledger_entry GROUP BY 1), \
                i AS (SELECT * FROM oncebox.inbox WHERE consumer_id = {consumer}) \
            SELECT message_id, coalesce(i.status, 'absent') AS status, i.reason, \
            coalesce(i.attempts, 0) AS attempts, \
                coalesce(i.crashes, 0) AS crashes, coalesce(e.n, 0) AS effects FROM i FULL JOIN e \
                USING (message_id)";
        let found: Vec<Found> =
            sqlx::query_as(AssertSqlSafe(self.fill(FOUND))).fetch_all(&self.pool).await?;
        found
            .iter()
            .filter(|row| row.status != "absent")
            .for_each(|row| coverage::record_state(&row.status, row.reason.as_deref()));
        Ok(found)
    }

    // The check -----------------------------------------------------------------------------

    /// Wait until everything sent is settled and acked.
    pub async fn wait_settled(&self) -> Result<()> {
        self.wait_settled_within(DEADLINE).await
    }

    /// The same with another deadline.
    pub async fn wait_settled_within(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            // Servers may be away while a test waits.
            let open = match self.open().await {
                Ok(open) if open.is_empty() => return Ok(()),
                Ok(open) => open,
                Err(error) if error.is::<Violation>() => return Err(error),
                Err(error) => vec![format!("{error:#}")],
            };
            if Instant::now() > deadline {
                return self.violated(format!("not settled after {limit:?}: {}", open.join("; ")));
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn open(&self) -> Result<Vec<String>> {
        let positions = self.positions().await?;
        let found = self.found().await?;
        let behind = self.behind(&found);
        let is_open = |row: &&Found| {
            !(row.is_settled() || (row.status == "waiting" && behind.contains(&row.message_id)))
        };
        let mut open: Vec<_> =
            found.iter().filter(is_open).take(5).map(|row| format!("{row:?}")).collect();
        if positions.values().any(|(committed, end)| committed != end) {
            open.push(format!(
                "acked by partition, of how many: {positions:?}; {} rows",
                found.len()
            ));
        } else if found.len() < self.expected() {
            // What was acked is in the inbox, so there is nothing to wait for.
            return self.violated(format!(
                "everything is acked, but messages are lost: {} of {} rows",
                found.len(),
                self.expected()
            ));
        }
        Ok(open)
    }

    /// The messages that stand behind one of their key that will not run any more.
    fn behind(&self, found: &[Found]) -> HashSet<String> {
        let rows: HashMap<&str, &Found> =
            found.iter().map(|row| (row.message_id.as_str(), row)).collect();
        let is_dead = |message: &&Message| {
            rows.get(&*message.id).is_some_and(|row| row.is_settled() && row.status != "completed")
        };
        let sent = self.sent();
        let keys = sent.keys().into_values();
        keys.flat_map(|of_key| {
            of_key
                .into_iter()
                .skip_while(|message| !is_dead(message))
                .skip(1)
                .map(|message| message.id.clone())
        })
        .collect()
    }

    fn expected(&self) -> usize {
        let sent = self.sent();
        sent.messages().len() + sent.undecodable() - self.gone_without_id.load(Ordering::SeqCst)
    }

    /// Every message had its effect exactly once, is in the state and has the attempts that it
    /// should; balances agree; nothing is left over of any transaction.
    pub async fn check(&self) -> Result<()> {
        self.check_nothing_left().await?;
        let found = self.found().await?;
        let mut faults = self.row_faults(&found);
        faults.extend(self.balance_faults(&found).await?);
        faults.extend(self.order_faults().await?);
        if faults.is_empty() {
            return Ok(());
        }
        self.violated(faults.into_iter().take(10).collect::<Vec<_>>().join("\n"))
    }

    fn row_faults(&self, found: &[Found]) -> Vec<String> {
        let behind = self.behind(found);
        let sent = self.sent();
        let messages = sent.messages();
        let behind = if self.is_in_order() { behind } else { HashSet::new() };
        let mut rows: HashMap<&str, Vec<&Found>> = HashMap::new();
        found.iter().for_each(|row| rows.entry(&row.message_id).or_default().push(row));
        let mut faults: Vec<_> = rows
            .values()
            .filter(|rows| rows.len() > 1)
            .map(|rows| format!("two rows: {rows:?}"))
            .collect();
        for (id, message) in &messages {
            faults.extend(match rows.get(id) {
                None => Some(format!("`{id}` ({:?}) is lost: there is no row", message.work)),
                Some(rows) if behind.contains(*id) => rows[0].fault_behind(message.work),
                Some(rows) => rows[0].fault(message.work),
            });
        }
        let others: Vec<_> =
            found.iter().filter(|row| !messages.contains_key(row.message_id.as_str())).collect();
        let is_undecodable = |row: &&&Found| {
            row.message_id.starts_with("undecodable:") && row.status == "parked" && row.effects == 0
        };
        let undecodable = others.iter().filter(is_undecodable).count();
        let least = sent.undecodable() - self.gone_without_id.load(Ordering::SeqCst);
        if !(least..=sent.undecodable()).contains(&undecodable) || undecodable != others.len() {
            faults.push(format!(
                "{} records without an id were sent; beside the messages there are {others:?}",
                sent.undecodable()
            ));
        }
        faults
    }

    async fn balance_faults(&self, found: &[Found]) -> Result<Vec<String>> {
        let mut expected: BTreeMap<String, i64> = BTreeMap::new();
        let completed: Vec<&str> = found
            .iter()
            .filter(|row| row.status == "completed")
            .map(|row| row.message_id.as_str())
            .collect();
        for (id, message) in self.sent().messages() {
            if completed.contains(&id) {
                *expected.entry(message.account()).or_default() += message.amount();
            }
        }
        let sql =
            self.fill("SELECT account, balance::bigint FROM {schema}.account WHERE balance <> 0");
        let balances: Vec<(String, i64)> =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.pool).await?;
        let balances: BTreeMap<_, _> = balances.into_iter().collect();
        Ok(if balances == expected {
            Vec::new()
        } else {
            vec![format!("balances are {balances:?}, should be {expected:?}")]
        })
    }

    /// The effects of each key are in the order of its messages, and each of them is there once.
    pub async fn check_order(&self) -> Result<()> {
        self.check_whole().await?;
        let faults = self.order_faults().await?;
        if faults.is_empty() { Ok(()) } else { self.violated(faults.join("\n")) }
    }

    async fn order_faults(&self) -> Result<Vec<String>> {
        if !self.is_in_order() {
            return Ok(Vec::new());
        }
        let sql = self.fill("SELECT message_id FROM {schema}.ledger_entry ORDER BY entry");
        let entries: Vec<String> =
            sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&self.pool).await?;
        let places: HashMap<&str, usize> =
            entries.iter().enumerate().map(|(place, id)| (id.as_str(), place)).collect();
        let sent = self.sent();
        let unordered = |(key, of_key): (usize, Vec<&Message>)| {
            let effects: Vec<_> = of_key
                .iter()
                .filter_map(|message| Some((places.get(&*message.id)?, &message.id)))
                .collect();
            (!effects.is_sorted())
                .then(|| format!("the effects of key {key} are out of order: {effects:?}"))
        };
        Ok(sent.keys().into_iter().filter_map(unordered).collect())
    }

    /// What is visible now is whole: a completed message has its effect, any other none, and no
    /// open transaction of a dead host holds anything.
    pub async fn check_whole(&self) -> Result<()> {
        self.check_nothing_left().await?;
        let half: Vec<_> =
            self.found().await?.into_iter().filter(|row| !row.has_its_effect()).collect();
        if half.is_empty() {
            Ok(())
        } else {
            self.violated(format!("a completed message has one effect, any other none: {half:?}"))
        }
    }

    async fn check_nothing_left(&self) -> Result<()> {
        const OPEN: &str = "SELECT (SELECT count(*) FROM pg_stat_activity WHERE usename = \
            '{login}' AND (state <> 'idle' OR backend_xid IS NOT NULL)) \
            + (SELECT count(*) FROM oncebox.guard) + (SELECT count(*) FROM pg_locks WHERE locktype \
            = 'advisory' \
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
        // An idle worker's look for what is due is a transaction, too: it is enough to see none
        // once.
        let deadline = Instant::now() + DEADLINE;
        while self.number(OPEN).await? > 0 {
            if Instant::now() > deadline {
                return self
                    .violated("a transaction, a guard row or a lock is left over".to_owned());
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// An error that says which promise was broken, and where the logs are.
    pub fn violated<T>(&self, what: String) -> Result<T> {
        self.failed.store(true, Ordering::Relaxed);
        Err(Violation(format!("{what}\n(the hosts' logs are in `{}`)", self.dir.display())).into())
    }
}

/// A tenant beside the fixture's.
pub struct Neighbour {
    topic: String,
    tenant: Tenant,
    control: Control,
    producer: FutureProducer,
}

impl Neighbour {
    /// Let hosts start its consumer again, where some of them were killed while they started it.
    pub async fn release_quarantined(&self) -> Result<bool> {
        Ok(self.control.consumers().release(&self.tenant.name, CONSUMER).await?)
    }

    /// Publish payments.
    pub async fn send(&self, first: usize, messages: usize) -> Result<()> {
        let load = Load::of((0..messages).map(|_| Work::Pay)).named(&format!("n{first}"));
        let accounts = format!(
            "INSERT INTO {}.account (account) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
            self.tenant.schema_name
        );
        sqlx::query(AssertSqlSafe(accounts))
            .bind(load.accounts())
            .execute(&self.control.pool)
            .await?;
        for message in &load.deliveries {
            let payload = message.payload();
            let headers = OwnedHeaders::new()
                .insert(Header { key: "type", value: Some(message.event_type()) })
                .insert(Header { key: "id", value: Some(&message.id) });
            let record = FutureRecord::<(), _>::to(&self.topic).payload(&payload).headers(headers);
            self.producer
                .send(record, BROKER_TIMEOUT)
                .await
                .map_err(|(error, _)| error)
                .context("a record was not published")?;
        }
        Ok(())
    }

    /// Wait until this many messages have had their effect.
    pub async fn wait_effects(&self, at_least: i64) -> Result<()> {
        let sql = format!("SELECT count(*) FROM {}.ledger_entry", self.tenant.schema_name);
        let effects = async || {
            let effects = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql.clone()));
            effects.fetch_one(&self.control.pool).await
        };
        wait::until(
            DEADLINE,
            POLL,
            async || Ok(effects().await? >= at_least),
            async || {
                format!("the neighbour's messages had {:?} of {at_least} effects", effects().await)
            },
        )
        .await
    }
}

impl Drop for HostFixture {
    fn drop(&mut self) {
        if !self.failed.load(Ordering::Relaxed) && !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Run a scenario on a thread of its own beside others: the harness blocks its thread here and
/// there.
pub async fn aside<T: Send + 'static, F: Future<Output = T>>(
    scenario: impl FnOnce() -> F + Send + 'static,
) -> T {
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(scenario()))
        .await
        .expect("a scenario answers with an error instead of a panic")
}

/// A database as `oncebox migrate` leaves it.
async fn migrated(server: &str, by_previous: bool) -> Result<(TestDatabase, PgPool)> {
    let source = match by_previous {
        true => format!("release {}", previous_version()),
        false => inbox::SOURCE.clone(),
    };
    let database = TestDatabase::create_on(server, &source, async |url: &str| {
        if by_previous {
            let key = MasterKey::generate();
            let variables = [("ONCEBOX_DATABASE_URL", url), ("ONCEBOX_MASTER_KEY", &key)];
            return run_previous(&["migrate"], &variables).await;
        }
        inbox::prepare(&url.parse()?).await
    })
    .await?;
    let pool = PgPoolOptions::new().max_connections(4).connect_lazy_with(database.url().parse()?);
    // Privileges on a database are not copied from its template.
    pool.execute(AssertSqlSafe(format!("REVOKE ALL ON DATABASE {} FROM PUBLIC", database.name())))
        .await?;
    Ok((database, pool))
}

async fn servers(options: &Options) -> Result<(String, String)> {
    let (postgres, brokers) = (options.postgres.clone(), options.brokers.clone());
    let find = move || -> Result<(String, String)> {
        let postgres = postgres.map_or_else(admin_url, Ok)?;
        let brokers = brokers
            .map_or_else(|| KafkaServer::shared().map(|kafka| kafka.bootstrap().to_owned()), Ok)?;
        Ok((postgres, brokers))
    };
    tokio::task::spawn_blocking(find).await?
}

fn producer(brokers: &str) -> Result<FutureProducer> {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("linger.ms", "1")
        .set("enable.idempotence", "true")
        .set("reconnect.backoff.max.ms", "500")
        .set("log_level", "0");
    config.create().context("failed to start the publisher")
}

/// Whether a line of metrics is a sample of this name, with labels or without.
fn is_sample(line: &str, name: &str) -> bool {
    line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
}

/// The host of the tests: the whole program, with its fail points. Cargo builds it with the tests.
pub fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the running program")?;
    let found =
        own.ancestors().skip(1).take(2).map(|dir| dir.join("host")).find(|path| path.is_file());
    found.context("the program `host` is missing; run `cargo build -p oncebox-tests --bins`")
}

/// A running host. It is killed when this is dropped, and when this process ends.
pub struct HostProcess {
    name: String,
    child: Child,
    http: SocketAddr,
    log: PathBuf,
}

impl HostProcess {
    /// Its name in the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it answers about health and metrics.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Where it logs to.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Send a signal.
    pub fn signal(&self, signal: libc::c_int) {
        self.child.signal(signal);
    }

    /// Whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.child.is_running()
    }

    /// SIGKILL, and wait for the end.
    pub async fn kill(&self) -> Result<()> {
        self.signal(libc::SIGKILL);
        self.wait_exit().await.map(drop)
    }

    /// SIGTERM, and wait for a clean end. A process that has only begun does not listen for
    /// signals yet, so that this waits until its port is open.
    pub async fn stop(&self) -> Result<()> {
        wait::until(
            DEADLINE,
            POLL,
            async || Ok(!self.is_running() || TcpStream::connect(self.http).await.is_ok()),
            async || format!("host `{}` does not open its port{}", self.name, self.log_end()),
        )
        .await?;
        self.signal(libc::SIGTERM);
        let status = self.wait_exit().await?;
        ensure!(status.success(), "host `{}` ended with {status}{}", self.name, self.log_end());
        Ok(())
    }

    /// Wait for the end, long enough for a start on a machine that does much else.
    pub async fn wait_exit(&self) -> Result<ExitStatus> {
        let mut status = None;
        wait::until(
            DEADLINE,
            POLL,
            async || {
                status = self.child.wait(Duration::ZERO);
                Ok(status.is_some())
            },
            async || {
                format!("host `{}` did not end within {DEADLINE:?}{}", self.name, self.log_end())
            },
        )
        .await?;
        status.context("the host has ended")
    }

    /// The last lines of its log, for an error: the log itself may go with the fixture.
    fn log_end(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        format!("; its log ends:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }

    /// What it is about, for the error of a history that stands still: its partitions and whoever
    /// waits, by its metrics, and the last lines of its log.
    pub async fn told(&self) -> String {
        const ABOUT: [&str; 8] = [
            "oncebox_consumer",
            "oncebox_kafka_partition_paused",
            "oncebox_kafka_lag_records",
            "oncebox_kafka_records_",
            "oncebox_kafka_inbox_errors",
            "oncebox_scheduler_waiting",
            "oncebox_database_",
            "oncebox_tenant_transactions_total",
        ];
        let metrics = self.metrics().await.unwrap_or_else(|| "no metrics".to_owned());
        let lines: Vec<_> = metrics
            .lines()
            .filter(|line| ABOUT.iter().any(|about| line.starts_with(about)))
            .collect();
        format!("host `{}`:\n{}{}", self.name, lines.join("\n"), self.log_end())
    }

    /// Waits until `/readyz` says so.
    pub async fn wait_ready(&self) -> Result<()> {
        self.wait_ready_within(DEADLINE).await
    }

    /// Waits until `/readyz` says so, for a limited time.
    pub async fn wait_ready_within(&self, limit: Duration) -> Result<()> {
        wait::until(
            limit,
            POLL,
            async || {
                if self.readiness().await == Some(200) {
                    return Ok(true);
                }
                ensure!(
                    self.is_running(),
                    "host `{}` ended before it was ready{}",
                    self.name,
                    self.log_end()
                );
                Ok(false)
            },
            async || format!("host `{}` did not become ready{}", self.name, self.log_end()),
        )
        .await
    }

    /// Wait until `/readyz` answers 503.
    pub async fn wait_not_ready(&self) -> Result<()> {
        wait::until(
            DEADLINE,
            POLL,
            async || Ok(self.readiness().await == Some(503)),
            async || format!("host `{}` still says that it is ready", self.name),
        )
        .await
    }

    /// The status that `/readyz` answers; none while nobody listens.
    pub async fn readiness(&self) -> Option<u16> {
        self.readiness_within(LOOK).await
    }

    /// The same, of a host that may take that long to answer.
    pub async fn readiness_within(&self, limit: Duration) -> Option<u16> {
        Some(self.get("/readyz", limit).await?.status)
    }

    /// What `/readyz` answers, in its own words; none while nobody listens.
    pub async fn readiness_text(&self) -> Option<String> {
        Some(self.get("/readyz", LOOK).await?.body)
    }

    /// Wait until `/readyz` answers 503 for a reason with this text.
    pub async fn wait_not_ready_for(&self, why: &str) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let said = self.readiness_text().await;
            if self.readiness().await == Some(503)
                && said.as_ref().is_some_and(|said| said.contains(why))
            {
                return Ok(());
            }
            if !self.is_running() {
                bail!("host `{}` ended instead of waiting{}", self.name, self.log_end());
            }
            ensure!(
                Instant::now() < deadline,
                "host `{}` says {said:?}, not `{why}`{}",
                self.name,
                self.log_end()
            );
            sleep(POLL).await;
        }
    }

    /// Lines of its log that hold a text.
    pub fn log_lines(&self, holds: &str) -> usize {
        fs::read_to_string(&self.log)
            .unwrap_or_default()
            .lines()
            .filter(|line| line.contains(holds))
            .count()
    }

    /// Wait until its log has a line with this text.
    pub async fn wait_log(&self, holds: &str) -> Result<()> {
        wait::until(
            DEADLINE,
            POLL,
            async || Ok(self.log_lines(holds) > 0),
            async || format!("host `{}` never logs `{holds}`{}", self.name, self.log_end()),
        )
        .await
    }

    /// The value of a metric's only sample whose line holds all of these texts; none while there is
    /// no such.
    pub async fn metric(&self, name: &str, holds: &[&str]) -> Option<f64> {
        let answer = self.metrics().await?;
        let lines = answer
            .lines()
            .filter(|line| is_sample(line, name) && holds.iter().all(|text| line.contains(text)));
        let mut samples = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok());
        let sample = samples.next();
        assert!(samples.next().is_none(), "`{name}` has several samples with {holds:?}");
        sample
    }

    /// The lines of a metric's samples.
    pub async fn samples(&self, name: &str) -> Vec<String> {
        let answer = self.metrics().await.unwrap_or_default();
        answer.lines().filter(|line| is_sample(line, name)).map(str::to_owned).collect()
    }

    /// The sum of a metric's samples; none while there is no such.
    pub async fn sum(&self, name: &str) -> Option<f64> {
        let samples = self.samples(name).await;
        let values = samples.iter().filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.reduce(|sum, value| sum + value)
    }

    /// Starts a host whose command is complete.
    pub fn spawn(name: &str, command: Command, http: SocketAddr, log: PathBuf) -> Result<Self> {
        let child = Child::spawn(command, libc::SIGKILL).context("failed to start a host")?;
        Ok(Self { name: name.to_owned(), child, http, log })
    }

    /// Returns the process's id.
    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// All that it measures, as it is scraped.
    pub async fn metrics(&self) -> Option<String> {
        Some(self.get("/metrics", SCRAPE).await?.body)
    }

    /// Wait until a metric has a value.
    pub async fn until_metric(&self, name: &str, holds: &[&str], value: f64) -> Result<()> {
        self.until_metric_is(name, holds, &format!("{value}"), |found| found == value).await
    }

    /// Wait until a metric has a value or a greater one.
    pub async fn until_metric_reaches(&self, name: &str, holds: &[&str], value: f64) -> Result<()> {
        self.until_metric_is(name, holds, &format!("{value} or more"), |found| found >= value).await
    }

    async fn until_metric_is(
        &self,
        name: &str,
        holds: &[&str],
        wanted: &str,
        is_wanted: impl Fn(f64) -> bool,
    ) -> Result<()> {
        wait::until(
            DEADLINE,
            4 * POLL,
            async || Ok(self.metric(name, holds).await.is_some_and(&is_wanted)),
            async || {
                let value = self.metric(name, holds).await;
                format!("`{name}` is {value:?}, never {wanted}{}", self.log_end())
            },
        )
        .await
    }

    async fn get(&self, path: &str, limit: Duration) -> Option<Response> {
        http::get(self.http, path, limit).await
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        self.child.end(&[(libc::SIGKILL, Duration::from_secs(10))]);
    }
}
