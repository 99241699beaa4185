//! `oncebox dev`: a host with a private database and an embedded broker.

mod files;
mod redeploy;
pub mod running;
mod schema;
mod watch;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use oncebox_control::{Control, MasterKey};
use oncebox_model::{InboxError, policy::Policy};
use oncebox_server::{Config, config::LogSettings, serve};
use serde_json::{Map, json};
use tokio_util::sync::CancellationToken;
use tracing::level_filters::LevelFilter;

use self::{files::Files, running::DevStart, schema::Schema};
use crate::{
    api::{Api, local_api},
    local::{
        broker::MockBroker,
        free_port,
        postgres::{PostgresOptions, PrivatePostgres},
    },
    migration::{Migration, create_with_tables},
    new_project::quoted,
};

/// The tenant that `dev` makes, and its consumer.
const TENANT: &str = "dev";
const CONSUMER: &str = "dev";

/// The topic that is read by default.
const TOPIC: &str = "events";

/// The event type of a deployment that takes messages of types that no other deployment takes.
const ANY_EVENT_TYPE: &str = "*";

/// Partitions of a topic of the embedded broker, which keeps 5 MiB of each.
const PARTITIONS: i32 = 16;

/// Policy of the consumer that `dev` makes: any record is a message, whatever its producer. Its
/// membership ends soon after a kill, so that the next start need not wait for long.
const POLICY: &str = "ack = 'after_commit'\nidentity.id = ['cloudevents', {header = 'message-id'}, \
    'position']\n\
    identity.event_type = ['cloudevents', {header = 'event-type'}, 'topic']\n\
    kafka.properties = { 'session.timeout.ms' = '6000', 'heartbeat.interval.ms' = '500' }\n";

/// Options of `oncebox dev`.
pub struct DevOptions {
    /// Components to deploy, each as `event.type=file.wasm` or `file.wasm`.
    pub components: Vec<String>,
    /// Folder of components, each named for its event type.
    pub watch: Option<PathBuf>,
    /// Folder for the database and the keys.
    pub dir: PathBuf,
    /// SQL files with the handlers' tables.
    pub schema: Vec<PathBuf>,
    /// Topic to read; none for the one that was read before.
    pub topic: Option<String>,
    /// URL of a running PostgreSQL; none for a private one.
    pub database_url: Option<String>,
    /// Running brokers; none for the embedded one.
    pub brokers: Option<String>,
}

/// Returns log settings without a line for each of the program's own requests, unless the user
/// chose what to log.
pub fn quiet(log: &LogSettings) -> LogSettings {
    match log.level.parse::<LevelFilter>() {
        Ok(level) => LogSettings {
            level: format!("{level},sqlx=warn,sqlx::postgres::notice=off,oncebox_api=warn"),
            ..log.clone()
        },
        Err(_) => log.clone(),
    }
}

/// Starts the services that are missing, deploys, prints how to send a message, and serves.
pub async fn run(mut config: Config, args: DevOptions) -> Result<()> {
    let stop = CancellationToken::new();
    let signals = serve::cancel_on_signal(stop.clone())?;
    // Errors in the files are reported before anything is started.
    let tables = schema::read(&args.schema)?;
    let mut files = files(&args);
    files.read_all()?;
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("failed to create `{}`", args.dir.display()))?;
    let mut start = DevStart::begin(&args.dir)?;
    config.keys.master_key = Some(master_key(&args.dir)?);
    config.runtime.cache_dir.get_or_insert_with(|| args.dir.join("cache"));
    choose_ports(&mut config)?;
    config.api.mode = oncebox_api::Mode::Open;
    start.is_about("starting its database")?;
    let postgres = start_postgres(&mut config, &args)?;
    let broker = start_broker(&mut config, &args)?;
    let control = config.control()?;
    let api = local_api(&config, control.clone())?;
    let session = DevSession {
        config: &config,
        args: &args,
        control: &control,
        api: &api,
        broker: broker.as_ref(),
    };
    let prepared = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        prepared = session.prepare(&mut files, tables, &mut start) => Some(prepared?),
    };
    let Some(PreparedDev { topic, event_type, schema }) = prepared else {
        println!("stopped before it was up");
        api.give_back().await;
        return Ok(());
    };
    let announced = running(&config, &args, &topic)?.announce(&args.dir)?;
    announce(&config, &args, &topic, event_type.as_deref());
    start.end()?;
    let watching = [
        tokio::spawn(watch::watch(control)),
        tokio::spawn(redeploy::watch(api, files)),
        tokio::spawn(schema.watch()),
    ];
    let served = serve::serve_until(&config, stop).await;
    signals.abort();
    watching.iter().for_each(|task| task.abort());
    drop(announced);
    drop(broker);
    drop(postgres);
    served
}

/// Keeps the addresses that the user chose and picks free ones otherwise: those of a `serve` stay
/// free for it.
fn choose_ports(config: &mut Config) -> Result<()> {
    if !config.http.is_chosen {
        config.http.listen = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    }
    if !config.api.is_chosen {
        config.api.listen = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    }
    Ok(())
}

/// The services on which a run is prepared.
struct DevSession<'a> {
    config: &'a Config,
    args: &'a DevOptions,
    control: &'a Control,
    api: &'a Api,
    broker: Option<&'a MockBroker>,
}

/// The results of the preparation.
struct PreparedDev {
    /// The topic to send to.
    topic: String,
    /// An event type that a handler takes, if any does.
    event_type: Option<String>,
    schema: Schema,
}

impl DevSession<'_> {
    /// Brings the database up to date, makes the parts that no earlier run made, and deploys.
    async fn prepare(
        &self,
        files: &mut Files,
        tables: Vec<Migration>,
        start: &mut DevStart,
    ) -> Result<PreparedDev> {
        serve::migrate(self.config).await?;
        let topics = self.set_up().await?;
        for topic in &topics {
            if let Some(broker) = self.broker {
                broker.create_topic(topic, PARTITIONS)?;
            }
        }
        let schema = Schema::apply(self.api, tables, anew(self.args)).await?;
        self.deploy(files, start).await?;
        let topic = topics.into_iter().next().unwrap_or_else(|| TOPIC.to_owned());
        Ok(PreparedDev { topic, event_type: self.event_type().await?, schema })
    }

    /// Makes the tenant and the consumer, unless an earlier run made them. Returns the topics that
    /// the consumer reads, the one to send to first.
    async fn set_up(&self) -> Result<Vec<String>> {
        match self.control.tenants().get(TENANT).await {
            Ok(_) => {}
            Err(InboxError::NotFound(_)) => {
                create_with_tables(self.control, TENANT, &self.args.schema).await?;
                // What is tried here may send anywhere.
                let everywhere = json!(["kafka:*", "inbox:*", "http:*"]);
                let limits = Map::from_iter([("destinations_allowed".to_owned(), everywhere)]);
                self.control.tenants().set_limits(TENANT, &limits).await?;
            }
            Err(error) => return Err(error.into()),
        }
        let asked = self.args.topic.as_deref();
        let consumer = match self.control.consumers().get(TENANT, CONSUMER).await {
            Err(InboxError::NotFound(_)) => {
                let topic = asked.unwrap_or(TOPIC);
                let policy = Policy::parse(&format!("topics = ['{topic}']\n{POLICY}"))?;
                self.control.consumers().create(TENANT, CONSUMER, &policy).await?;
                return Ok(vec![topic.to_owned()]);
            }
            found => found?,
        };
        let mut policy = consumer.policy()?;
        if let Some(topic) = asked.filter(|topic| !policy.topics.iter().any(|read| read == topic)) {
            println!(
                "topic     {topic} is read from now on, instead of {}",
                policy.topics.join(", ")
            );
            policy.topics = vec![topic.to_owned()];
            self.control.consumers().set_policy(TENANT, CONSUMER, policy.clone(), true).await?;
        }
        // Patterns are not names of topics.
        let mut topics: Vec<_> =
            policy.topics.into_iter().filter(|topic| !topic.starts_with('^')).collect();
        topics.sort_by_key(|topic| Some(topic.as_str()) != asked);
        Ok(topics)
    }

    /// Deploys the components as they are, through the API; the host finds the compiled code in the
    /// cache.
    async fn deploy(&self, files: &mut Files, start: &mut DevStart) -> Result<()> {
        for component in files.read_all()? {
            start.is_about(&format!("compiling `{}`", component.path.display()))?;
            let outcome = redeploy::deploy(self.api, &component).await?;
            println!(
                "handler   {} takes `{}`",
                redeploy::handler_of(&component.path),
                component.event_type
            );
            if let redeploy::DeployOutcome::Now { grants, .. } = &outcome {
                redeploy::tell_grants(&component.path, grants);
            }
        }
        if let Some(dir) = &self.args.watch {
            println!("watching  {}: each `<event type>.wasm` in it is deployed", dir.display());
        }
        Ok(())
    }

    /// Returns an event type that a deployment takes, also one of an earlier run.
    async fn event_type(&self) -> Result<Option<String>> {
        let consumer = self.control.consumers().get(TENANT, CONSUMER).await?;
        let live = self.control.deployments().list(consumer.consumer_id, false).await?;
        let mut taken: Vec<_> =
            live.into_iter().map(|deployment| deployment.slot.event_type).collect();
        taken.sort_by_key(|event_type| event_type.ends_with('*'));
        Ok(taken.first().map(|event_type| one_of(event_type)))
    }
}

/// Returns the folder's master key, which it makes on first use. The database in the folder was
/// made with it, so it lives as long as the folder.
pub(crate) fn master_key(dir: &Path) -> Result<String> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let path = dir.join("master.key");
    if let Ok(key) = std::fs::read_to_string(&path) {
        return Ok(key);
    }
    let key = MasterKey::generate();
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("failed to create `{}`", path.display()))?;
    file.write_all(key.as_bytes())?;
    Ok(key)
}

fn start_postgres(config: &mut Config, args: &DevOptions) -> Result<Option<PrivatePostgres>> {
    if let Some(url) = &args.database_url {
        config.database.url = url.clone();
        return Ok(None);
    }
    let postgres =
        PrivatePostgres::start(PostgresOptions::new(args.dir.join("postgres")).tcp(true))?;
    config.database.url = postgres.url();
    Ok(Some(postgres))
}

fn start_broker(config: &mut Config, args: &DevOptions) -> Result<Option<MockBroker>> {
    if let Some(brokers) = &args.brokers {
        config.kafka.brokers = brokers.clone();
        return Ok(None);
    }
    let broker = MockBroker::start()?;
    config.kafka.brokers = broker.bootstrap().to_owned();
    // This broker lets a group that every member has left wait for most of a session before it
    // takes a member.
    config.kafka.idle_after_ms = 0;
    Ok(Some(broker))
}

/// Returns an event type that a deployment takes: its own, or one with its prefix.
fn one_of(event_type: &str) -> String {
    match event_type.strip_suffix('*') {
        Some("") => "greeting".to_owned(),
        Some(stem) => format!("{stem}any"),
        None => event_type.to_owned(),
    }
}

/// Returns the files to watch: the components that are named, and the folder.
fn files(args: &DevOptions) -> Files {
    let named = args.components.iter().map(|component| {
        let (event_type, file) = component.split_once('=').unwrap_or((ANY_EVENT_TYPE, component));
        (event_type.to_owned(), PathBuf::from(file))
    });
    Files::new(named, args.watch.clone())
}

/// Returns a text on how to make new tables, as the end of a sentence.
fn anew(args: &DevOptions) -> String {
    match &args.database_url {
        None => format!("stop this, then rm -r {}", quoted(&args.dir)),
        Some(_) => "stop this, and give it an empty database".to_owned(),
    }
}

/// Returns the details for the commands of this folder. The password of a database that was given
/// stays where it was given.
fn running(config: &Config, args: &DevOptions, topic: &str) -> Result<running::RunningDev> {
    let key = args.dir.join("master.key");
    Ok(running::RunningDev {
        brokers: config.kafka.brokers.clone(),
        topic: topic.to_owned(),
        database_url: args.database_url.is_none().then(|| config.database.url.clone()),
        master_key_file: key
            .canonicalize()
            .with_context(|| format!("failed to find `{}`", key.display()))?,
    })
}

fn announce(config: &Config, args: &DevOptions, topic: &str, event_type: Option<&str>) {
    let brokers = &config.kafka.brokers;
    // The password of a database that was given stays where it was given; the private one has no
    // other place.
    let database = if args.database_url.is_some() { "…" } else { config.database.url.as_str() };
    println!("database  {database}");
    println!("brokers   {brokers}");
    println!("topic     {topic}");
    println!("api       http://{}", config.api.listen);
    if config.api.console {
        println!("console   http://{}/console", config.api.listen);
    }
    println!("metrics   http://{}/metrics", config.http.listen);
    println!();
    let is_here = args.dir == Path::new(running::DIR);
    let to = if is_here { String::new() } else { format!(" --brokers {brokers} --topic {topic}") };
    println!("send      oncebox send messages.jsonl{to}");
    match event_type {
        Some(event_type) => {
            let event_type = quoted(event_type);
            println!(
                "or        echo '{{\"hello\":\"world\"}}' | kcat -P -b {brokers} -t {topic} -H \
                    message-id=1 -H event-type={event_type}"
            );
        }
        None => println!(
            "note      nothing is deployed, so that messages are parked; name a component, or \
                `--watch` a folder"
        ),
    }
    if is_here && args.database_url.is_none() {
        println!("look      oncebox inbox list");
    } else {
        look_from_elsewhere(database, args);
    }
    if args.brokers.is_none() {
        println!(
            "note      the embedded broker keeps 5 MiB per partition and forgets everything when \
                this process ends"
        );
    }
    println!();
}

fn look_from_elsewhere(database: &str, args: &DevOptions) {
    println!(
        "look      ONCEBOX_DATABASE_URL='{database}' ONCEBOX_KEYS_MASTER_KEY_FILE={} oncebox inbox \
            list",
        args.dir.join("master.key").display()
    );
}
