//! `oncebox dev`: a host with batteries.

mod files;
mod redeploy;
pub(crate) mod running;
mod watch;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use oncebox_inbox::{Admin, InboxError, MasterKey, policy::Policy};
use tracing::level_filters::LevelFilter;

use self::files::Files;
use crate::{
    cli::{Api, create_with_tables, local_api},
    config::{Config, Log},
    local::{
        broker::MockBroker,
        free_port,
        postgres::{PostgresOptions, PrivatePostgres},
    },
    serve,
};

/// Partitions of the topic of the embedded broker, which keeps 5 MiB of each.
const PARTITIONS: i32 = 16;

/// The consumer that `dev` makes: any record is a message, whoever sent it. Its membership ends soon
/// after a kill, so that the next start need not wait for long.
const POLICY: &str = "ack = 'after_commit'\nidentity.id = ['cloudevents', {header = 'message-id'}, 'position']\n\
    identity.event_type = ['cloudevents', {header = 'event-type'}, 'topic']\n\
    kafka.properties = { 'session.timeout.ms' = '6000', 'heartbeat.interval.ms' = '500' }\n";

/// What to run.
#[derive(Args)]
pub(crate) struct DevArgs {
    /// Components to deploy, each as `event.type=file.wasm`, or `file.wasm` for every event type. A file
    /// that changes is deployed again
    components: Vec<String>,
    /// Folder of components, each named for its event type: `event.type.wasm`. What changes or comes is
    /// deployed
    #[arg(long, value_name = "DIR")]
    watch: Option<PathBuf>,
    /// Folder for the database and the keys
    #[arg(long, default_value = running::DIR)]
    dir: PathBuf,
    /// SQL files with the handlers' tables
    #[arg(long)]
    schema: Vec<PathBuf>,
    /// Topic to read
    #[arg(long, default_value = "events")]
    topic: String,
    /// A running PostgreSQL instead of a private one
    #[arg(long)]
    database_url: Option<String>,
    /// Running brokers instead of the embedded one
    #[arg(long)]
    brokers: Option<String>,
}

/// Logs without a line for each of its own requests, unless somebody chose what to log.
pub(crate) fn quiet(log: &Log) -> Log {
    match log.level.parse::<LevelFilter>() {
        Ok(level) => Log { level: format!("{level},sqlx=warn,sqlx::postgres::notice=off,oncebox_admin=warn"), ..log.clone() },
        Err(_) => log.clone(),
    }
}

/// Start what is missing, deploy, tell how to send a message, and serve.
pub(crate) async fn run(mut config: Config, args: DevArgs) -> Result<()> {
    std::fs::create_dir_all(&args.dir).with_context(|| format!("failed to create `{}`", args.dir.display()))?;
    config.keys.master_key = Some(master_key(&args.dir)?);
    config.runtime.cache_dir.get_or_insert_with(|| args.dir.join("cache"));
    if config.http.listen == crate::config::Http::default().listen && std::net::TcpListener::bind(config.http.listen).is_err() {
        config.http.listen = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    }
    config.api.mode = oncebox_admin::Mode::Open;
    if config.api.listen == crate::config::Api::default().listen && std::net::TcpListener::bind(config.api.listen).is_err() {
        config.api.listen = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    }
    let postgres = start_postgres(&mut config, &args)?;
    let broker = start_broker(&mut config, &args)?;
    serve::migrate(&config).await?;
    let admin = config.admin()?;
    set_up(&admin, &args).await?;
    let api = local_api(&config, admin.clone())?;
    let files = deploy(&api, &args).await?;
    let announced = running(&config, &args)?.announce(&args.dir)?;
    announce(&config, &args);
    let watching = [tokio::spawn(watch::watch(admin)), tokio::spawn(redeploy::watch(api, files))];
    let served = serve::serve(&config).await;
    watching.iter().for_each(|task| task.abort());
    drop(announced);
    drop(broker);
    drop(postgres);
    served
}

/// A key that lives as long as the folder, since the database in it was made with it.
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

fn start_postgres(config: &mut Config, args: &DevArgs) -> Result<Option<PrivatePostgres>> {
    if let Some(url) = &args.database_url {
        config.database.url = url.clone();
        return Ok(None);
    }
    let postgres = PrivatePostgres::start(PostgresOptions::new(args.dir.join("postgres")).tcp(true))?;
    config.database.url = postgres.url();
    Ok(Some(postgres))
}

fn start_broker(config: &mut Config, args: &DevArgs) -> Result<Option<MockBroker>> {
    if let Some(brokers) = &args.brokers {
        config.kafka.brokers = brokers.clone();
        return Ok(None);
    }
    let broker = MockBroker::start()?;
    broker.create_topic(&args.topic, PARTITIONS)?;
    config.kafka.brokers = broker.bootstrap().to_owned();
    // This broker lets a group that everyone has left wait for most of a session before it takes a member.
    config.kafka.idle_after_ms = 0;
    Ok(Some(broker))
}

/// The tenant and the consumer, unless an earlier run made them.
async fn set_up(admin: &Admin, args: &DevArgs) -> Result<()> {
    match admin.tenant("dev").await {
        Ok(_) => {}
        Err(InboxError::NotFound(_)) => {
            create_with_tables(admin, "dev", &args.schema).await?;
        }
        Err(error) => return Err(error.into()),
    }
    match admin.consumer("dev", "dev").await {
        Err(InboxError::NotFound(_)) => {
            let policy = Policy::parse(&format!("topics = ['{}']\n{POLICY}", args.topic))?;
            admin.create_consumer("dev", "dev", &policy).await?;
        }
        found => {
            found?;
        }
    }
    Ok(())
}

/// Deploy the components as they are, through the API; the host finds what was compiled in the cache.
async fn deploy(api: &Api, args: &DevArgs) -> Result<Files> {
    let named = args.components.iter().map(|component| {
        let (event_type, file) = component.split_once('=').unwrap_or(("*", component));
        (event_type.to_owned(), PathBuf::from(file))
    });
    let mut files = Files::new(named, args.watch.clone());
    for component in files.read_all()? {
        redeploy::deploy(api, &component).await?;
        println!("handler   {} takes `{}`", redeploy::handler_of(&component.path), component.event_type);
    }
    if let Some(dir) = &args.watch {
        println!("watching  {}: each `<event type>.wasm` in it is deployed", dir.display());
    }
    Ok(files)
}

/// For the commands of this folder. The password of a database that was given stays where it was given.
fn running(config: &Config, args: &DevArgs) -> Result<running::Running> {
    let key = args.dir.join("master.key");
    Ok(running::Running {
        brokers: config.kafka.brokers.clone(),
        topic: args.topic.clone(),
        database_url: args.database_url.is_none().then(|| config.database.url.clone()),
        master_key_file: key.canonicalize().with_context(|| format!("failed to find `{}`", key.display()))?,
    })
}

fn announce(config: &Config, args: &DevArgs) {
    let (brokers, topic) = (&config.kafka.brokers, &args.topic);
    // The password of a database that was given stays where it was given; the private one has no other place.
    let database = if args.database_url.is_some() { "…" } else { config.database.url.as_str() };
    println!("database  {database}");
    println!("brokers   {brokers}");
    println!("topic     {topic}");
    println!("api       http://{}", config.api.listen);
    println!("metrics   http://{}/metrics", config.http.listen);
    println!();
    let is_here = args.dir == Path::new(running::DIR);
    let to = if is_here { String::new() } else { format!(" --brokers {brokers} --topic {topic}") };
    println!("send      oncebox send messages.jsonl{to}");
    println!("or        echo '{{\"hello\":\"world\"}}' | kcat -P -b {brokers} -t {topic} -H message-id=1 -H event-type=greeting");
    if is_here && args.database_url.is_none() {
        println!("look      oncebox inbox list");
    } else {
        look_from_elsewhere(database, args);
    }
    if args.brokers.is_none() {
        println!("note      the embedded broker keeps 5 MiB per partition and forgets everything when this process ends");
    }
    println!();
}

fn look_from_elsewhere(database: &str, args: &DevArgs) {
    println!(
        "look      ONCEBOX_DATABASE_URL='{database}' ONCEBOX_KEYS_MASTER_KEY_FILE={} oncebox inbox list",
        args.dir.join("master.key").display()
    );
}
