//! `oncebox demo`: the main job on real input, with a host that is killed while it works, and a
//! count at the end: of effects in the tables, of events that arrived in topics, and of what a
//! provider outside did.

mod event_reader;
mod expected;
mod files;
mod found;
mod host;
mod input;
mod ledger;
mod progress;
mod provider;
mod publish;
mod webhooks;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use oncebox_api::wire::{EndpointChangeBody, IngressSecretChangeBody, TenantBody};
use oncebox_control::{Control, MasterKey};
use oncebox_server::{Config, serve};
use serde_json::{Value, json};

use self::{
    event_reader::EventReader,
    expected::Expected,
    found::TenantLedgers,
    host::Host,
    input::{Input, PlannedDelivery},
    progress::Progress,
    provider::FakeProvider,
    webhooks::WebhookTarget,
};
use crate::{
    api::{Api, local_api, path},
    apply::apply,
    local::{
        broker::MockBroker,
        free_port,
        postgres::{PostgresOptions, PrivatePostgres},
    },
    output::{self, table},
};

pub use input::EVENTS_DEFAULT;

/// The two tenants; each has a topic of its own.
const TENANTS: [&str; input::TENANTS] = ["acme", "globex"];
/// Partitions of each topic.
const PARTITIONS: i32 = 16;
/// Tenants, consumers and deployments of the demo, as a file of `oncebox apply`; [`files`] holds
/// the files that it names.
const SETUP: &str = include_str!("../../../../guest-examples/github-demo.toml");
/// Name of the endpoint at the provider, as the handlers' settings have it behind `http:`.
const ENDPOINT: &str = "mail";
/// Time without progress after which the demo fails as stuck. A message that a killed host had
/// leased waits for half of it.
const STUCK: Duration = Duration::from_secs(60);

/// Options of `oncebox demo`.
pub struct DemoOptions {
    /// Distinct events.
    pub events: usize,
    /// Number of kills of the host while a transaction is open.
    pub kills: usize,
    /// Seed of the order, the duplicates and the malformed records.
    pub seed: u64,
    /// Folder for the database and the logs; emptied first.
    pub dir: PathBuf,
    /// URL of a running PostgreSQL with an empty database; none for a private one.
    pub database_url: Option<String>,
    /// Running brokers with the demo's topics; none for the embedded one.
    pub brokers: Option<String>,
    /// The way in which webhooks come.
    pub source: DemoSource,
}

/// The way in which webhooks come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DemoSource {
    /// Every delivery is a record of Kafka.
    Kafka,
    /// Every other delivery of a webhook comes over HTTP, signed as GitHub signs, and the others by
    /// Kafka. Malformed ones come by Kafka.
    Http,
}

/// Runs the demo. It is an error if any number differs.
pub async fn run(args: DemoOptions, as_json: bool) -> Result<()> {
    let started = Instant::now();
    empty(&args.dir)?;
    let provider = FakeProvider::start().await?;
    let settings = args.dir.join("oncebox.toml");
    let ingress = match args.source {
        DemoSource::Kafka => None,
        DemoSource::Http => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?))),
    };
    let listen = ingress.map_or_else(String::new, |at| format!("[ingress]\nlisten = \"{at}\"\n"));
    std::fs::write(&settings, provider.host_settings() + &listen)
        .with_context(|| format!("failed to write `{}`", settings.display()))?;
    let (postgres, broker, config) = services(&args, &settings)?;
    let control = set_up(&config, &provider).await?;
    let target = match ingress {
        Some(address) => Some(webhook_target(&config, &control, address).await?),
        None => None,
    };

    let input = Input::new(args.seed, args.events)?;
    let plan = input::plan(args.seed, args.events);
    let expected = expected::expected(&input)?;
    let mut progress = Progress::new(&plan, &input, args.kills);
    let reader = EventReader::start(&config.kafka.brokers).await?;
    let mut host = Host::start(&config, &settings, &args.dir)?;
    let publishing = publish::start(input, plan, args.kills, &config.kafka.brokers, target);
    drive(&control, &mut host, &publishing, &mut progress).await?;
    publishing.finish().await?;
    host.stop()?;

    let ledgers = reader.finish().await?.into_iter().zip(provider.ledgers());
    let ledgers: Vec<_> = ledgers.map(|(events, calls)| TenantLedgers { events, calls }).collect();
    let rows = found::compare(&control, &expected, &progress, &ledgers).await?;
    let over_http = found::over_http(&control).await?;
    drop((postgres, broker));
    report(&rows, over_http, &progress, started.elapsed(), as_json)
}

/// Name of the file that marks a folder of the demo.
const MARKER: &str = "oncebox-demo";

/// Makes the demo's folder, or empties that of an earlier run. It touches no other folder.
fn empty(dir: &Path) -> Result<()> {
    let shown = dir.display();
    if dir.join(MARKER).exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("failed to empty `{shown}`"))?;
    } else if dir.exists() {
        let mut entries = std::fs::read_dir(dir)
            .with_context(|| format!("failed to read the folder `{shown}`"))?;
        ensure!(
            entries.next().is_none(),
            "`{shown}` holds files that are not of an earlier demo; name another folder with \
                `--dir`"
        );
    }
    std::fs::create_dir_all(dir).with_context(|| format!("failed to create `{shown}`"))?;
    std::fs::write(dir.join(MARKER), "").with_context(|| format!("failed to write to `{shown}`"))
}

fn services(
    args: &DemoOptions,
    settings: &Path,
) -> Result<(Option<PrivatePostgres>, Option<MockBroker>, Config)> {
    let mut config = Config::load(Some(settings))?;
    config.keys.master_key = Some(MasterKey::generate());
    config.runtime.cache_dir = Some(args.dir.join("cache"));
    let postgres = match &args.database_url {
        Some(url) => {
            config.database.url = url.clone();
            None
        }
        None => {
            eprintln!("starting a private PostgreSQL");
            let postgres =
                PrivatePostgres::start(PostgresOptions::new(args.dir.join("postgres")).tcp(true))?;
            config.database.url = postgres.url();
            Some(postgres)
        }
    };
    let broker = match &args.brokers {
        Some(brokers) => {
            config.kafka.brokers = brokers.clone();
            None
        }
        None => {
            eprintln!("starting the embedded broker");
            let broker = MockBroker::start()?;
            for tenant in TENANTS {
                broker.create_topic(&topic(tenant), PARTITIONS)?;
                broker.create_topic(&comments_topic(tenant), PARTITIONS)?;
            }
            config.kafka.brokers = broker.bootstrap().to_owned();
            Some(broker)
        }
    };
    Ok((postgres, broker, config))
}

fn topic(tenant: &str) -> String {
    format!("github.{tenant}")
}

/// Returns the topic to which a tenant's handlers tell of comments.
fn comments_topic(tenant: &str) -> String {
    format!("github.{tenant}.comments")
}

/// Creates tenants, consumers, deployments and endpoints, as an operator would.
async fn set_up(config: &Config, provider: &FakeProvider) -> Result<Control> {
    let handlers = SETUP.matches("[[tenant.consumer.deployment]]").count() / TENANTS.len();
    eprintln!("creating {} tenants and deploying {handlers} handlers to each", TENANTS.len());
    serve::migrate(config).await?;
    let control = config.control()?;
    let api = local_api(config, control.clone())?;
    let open = |path: &Path| files::read(&path.to_string_lossy());
    apply(&api, Path::new("github-demo.toml"), SETUP, &open).await?;
    for tenant in TENANTS {
        allow_outgoing(&api, tenant, provider).await?;
    }
    Ok(control)
}

/// Gives the tenants' consumers secrets, which the host makes.
async fn webhook_target(
    config: &Config,
    control: &Control,
    address: SocketAddr,
) -> Result<WebhookTarget> {
    let api = local_api(config, control.clone())?;
    let mut secrets = Vec::new();
    for tenant in TENANTS {
        let secret = path(&["tenants", tenant, "consumers", "github", "ingress-secret"]);
        let set: IngressSecretChangeBody = api.put_json(&secret, &json!({})).await?;
        secrets.push(set.secret.context("the host made no secret")?);
    }
    let secrets = secrets.try_into().map_err(|_| anyhow!("a secret for each tenant"))?;
    Ok(WebhookTarget { address, secrets })
}

/// Allows a tenant the destinations of its handlers, and gives it the endpoint at the provider.
async fn allow_outgoing(api: &Api, tenant: &str, provider: &FakeProvider) -> Result<()> {
    let limits = json!({
        "destinations_allowed": [
            format!("kafka:{}", comments_topic(tenant)), format!("http:{ENDPOINT}"),
        ],
        "endpoint_hosts_allowed": [provider.authority()],
    });
    let _: TenantBody = api.patch(&path(&["tenants", tenant, "limits"]), &limits).await?;
    let endpoint = json!({ "url": provider.url(tenant), "receiver_deduplicates": true });
    let endpoints = path(&["tenants", tenant, "endpoints", ENDPOINT]);
    let _: EndpointChangeBody = api.put_json(&endpoints, &endpoint).await?;
    Ok(())
}

/// Watches the inbox fill and the outgoing messages leave, and kills the host whenever another
/// share of the work is done.
async fn drive(
    control: &Control,
    host: &mut Host,
    publishing: &publish::Publishing,
    progress: &mut Progress,
) -> Result<()> {
    let mut moved = (0, Instant::now());
    loop {
        // In this order: a message that is settled has its outgoing messages.
        let settled = found::settled(control).await?;
        let (unsent, sent) = found::outgoing(control).await?;
        progress.show(settled, publishing.published(), sent);
        if settled + sent > moved.0 {
            moved = (settled + sent, Instant::now());
        }
        if settled == progress.distinct && unsent == 0 && publishing.is_consumed().await? {
            progress.finish();
            return Ok(());
        }
        if let Some(error) = publishing.failure() {
            bail!("{error}");
        }
        if moved.1.elapsed() > STUCK {
            let (log, distinct, behind) =
                (host.log().display(), progress.distinct, publishing.behind().await?);
            bail!(
                "no progress for {} s: {settled} of {distinct} messages are settled, {behind} \
                    records are not acked, {unsent} outgoing messages are not sent; the host's log \
                    is `{log}`",
                STUCK.as_secs()
            );
        }
        if progress.kill_is_due(settled)
            || progress.has_kills_left() && publishing.is_held_back().await?
        {
            publishing.release();
            host.kill_in_transaction(control).await?;
            progress.killed();
            moved.1 = Instant::now();
        }
        host.check()?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns events of the demo's first tenant, for tests: id, event type and payload.
#[cfg(feature = "test-hooks")]
pub fn events(seed: u64, count: usize) -> Result<Vec<(String, String, Vec<u8>)>> {
    let input = Input::new(seed, count)?;
    let events = input.events().filter(|event| event.tenant == 0);
    Ok(events.map(|event| (event.delivery, event.event_type, event.payload)).collect())
}

/// A line of the final table.
struct TenantCount {
    tenant: String,
    delivered: u64,
    distinct: u64,
    malformed: u64,
    parked: u64,
    refused: u64,
    /// Rows of effects.
    expected: u64,
    found: u64,
    /// Events in the tenant's topic, by their ids, and records that repeat one.
    events_expected: u64,
    events_found: u64,
    events_repeated: u64,
    /// Calls of the provider, by their keys, and calls that it recognised as repeated.
    calls_expected: u64,
    calls_acted_on: u64,
    calls_repeated: u64,
    differences: Vec<String>,
}

/// Prints the table or the JSON. It is an error if any number differs.
fn report(
    rows: &[TenantCount],
    over_http: u64,
    progress: &Progress,
    took: Duration,
    as_json: bool,
) -> Result<()> {
    if as_json {
        let tenants: Vec<_> = rows.iter().map(tenant_json).collect();
        output::json(&json!({
            "kills": progress.kills(), "over_http_first": over_http, "tenants": tenants,
            "seconds": took.as_secs(),
        }))?;
    } else {
        print_table(rows);
        let (kills, s) = (progress.kills(), if progress.kills() == 1 { "" } else { "s" });
        println!("\nkilled {kills} time{s} with a transaction open; {} s", took.as_secs());
        if over_http > 0 {
            println!("{over_http} webhooks came over HTTP first, the others by Kafka");
        }
    }
    let differences: Vec<_> = rows
        .iter()
        .flat_map(|row| row.differences.iter().map(move |d| format!("{}: {d}", row.tenant)))
        .collect();
    for difference in differences.iter().take(20) {
        eprintln!("differs: {difference}");
    }
    ensure!(differences.is_empty(), "{} numbers differ", differences.len());
    ensure!(
        progress.kills() >= progress.kills_wanted(),
        "the host was killed {} times, {} were asked for",
        progress.kills(),
        progress.kills_wanted()
    );
    if !as_json {
        println!(
            "every effect is there exactly once; every event arrived, and the provider acted once \
             for each call"
        );
    }
    Ok(())
}

fn tenant_json(row: &TenantCount) -> Value {
    json!({
        "tenant": row.tenant,
        "delivered": row.delivered,
        "distinct": row.distinct,
        "malformed": row.malformed,
        "parked": row.parked,
        "duplicates_refused": row.refused,
        "effects_expected": row.expected,
        "effects_found": row.found,
        "events_expected": row.events_expected,
        "events_found": row.events_found,
        "events_repeated": row.events_repeated,
        "calls_expected": row.calls_expected,
        "calls_acted_on": row.calls_acted_on,
        "calls_repeated": row.calls_repeated,
        "differences": row.differences,
    })
}

fn print_table(rows: &[TenantCount]) {
    let of = |found: u64, expected: u64| format!("{found} of {expected}");
    let line = |row: &TenantCount| {
        vec![
            row.tenant.clone(),
            row.delivered.to_string(),
            row.distinct.to_string(),
            row.malformed.to_string(),
            row.parked.to_string(),
            row.refused.to_string(),
            of(row.found, row.expected),
            of(row.events_found, row.events_expected),
            of(row.calls_acted_on, row.calls_expected),
            row.calls_repeated.to_string(),
        ]
    };
    println!();
    table(
        &[
            "TENANT",
            "DELIVERED",
            "DISTINCT",
            "MALFORMED",
            "PARKED",
            "DUPLICATES REFUSED",
            "EFFECTS",
            "EVENTS",
            "PROVIDER ACTED",
            "CALLS REPEATED",
        ],
        &rows.iter().map(line).collect::<Vec<_>>(),
    );
}

/// Counts the rows of effects, for the table.
fn effects(expected: &Expected) -> u64 {
    (expected.repository_activity.len()
        + expected.issues.len()
        + expected.pull_requests.len()
        + expected.audit.len()) as u64
}

/// Returns the index of a delivery's tenant.
fn tenant_of(input: &Input, delivery: PlannedDelivery) -> usize {
    input.record(delivery).tenant
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{ENDPOINT, MARKER, SETUP, TENANTS, comments_topic, empty, files};

    // What could go wrong: the handlers send to another place than is allowed and read.
    #[test]
    fn the_setup_names_files_topics_and_endpoints_that_are_there() {
        let named = SETUP.split('"').filter(|it| it.ends_with(".wasm") || it.ends_with(".sql"));
        // The setup does not name the webhooks.
        let held = files::FILES.map(|(name, _)| name).into_iter();
        let held = held.filter(|name| !name.starts_with("data/"));
        assert_eq!(named.collect::<BTreeSet<_>>(), held.collect());
        for tenant in TENANTS {
            let settings = format!(
                "settings = {{ tell_to = \"kafka:{}\", mail_to = \"http:{ENDPOINT}\" }}",
                comments_topic(tenant)
            );
            assert_eq!(SETUP.matches(&settings).count(), 3, "{settings}");
        }
        assert_eq!(SETUP.matches("grants = [\"emit\"]").count(), 3 * TENANTS.len());
    }

    // Could fail so: a mistyped `--dir` costs a user a folder.
    #[test]
    fn only_a_folder_of_the_demo_is_emptied() {
        let dir = std::env::temp_dir().join(format!("oncebox-empty-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("a new folder");
        std::fs::write(dir.join("thesis.txt"), "years").expect("a file");
        assert!(empty(&dir).is_err() && dir.join("thesis.txt").exists());
        std::fs::write(dir.join(MARKER), "").expect("a file");
        empty(&dir).expect("a folder of the demo");
        assert!(!dir.join("thesis.txt").exists() && dir.join(MARKER).exists());
        std::fs::remove_dir_all(&dir).expect("the folder is there");
    }
}
