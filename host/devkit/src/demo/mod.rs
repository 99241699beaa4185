//! `oncebox demo`: the main job on real input, with a host that is killed while it works, and a
//! count of effects at the end.

mod expected;
mod found;
mod host;
mod input;
mod progress;
mod publish;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_control::{Control, MasterKey};
use oncebox_server::{Config, serve};
use serde_json::json;

use self::{
    expected::Expected,
    host::Host,
    input::{Input, PlannedDelivery},
    progress::Progress,
};
use crate::{
    api::local_api,
    apply::apply,
    local::{
        broker::MockBroker,
        postgres::{PostgresOptions, PrivatePostgres},
    },
    output::table,
};

pub use input::EVENTS_DEFAULT;

/// The two tenants; each has a topic of its own.
const TENANTS: [&str; input::TENANTS] = ["acme", "globex"];
/// Partitions of each topic.
const PARTITIONS: i32 = 16;
/// Tenants, consumers and deployments of the demo, as a file of `oncebox apply`; `FILES` holds the
/// files that it names.
const SETUP: &str = include_str!("../../../../guest-examples/github-demo.toml");
const FILES: [(&str, &[u8]); 6] = [
    ("github-schema.sql", include_bytes!("../../../../guest-examples/github-schema.sql")),
    (
        "components/github-push.wasm",
        include_bytes!("../../../../guest-examples/components/github-push.wasm"),
    ),
    (
        "components/github-issues.wasm",
        include_bytes!("../../../../guest-examples/components/github-issues.wasm"),
    ),
    (
        "components/github-pull-requests.wasm",
        include_bytes!("../../../../guest-examples/components/github-pull-requests.wasm"),
    ),
    (
        "components/github-stars.wasm",
        include_bytes!("../../../../guest-examples/components/github-stars.wasm"),
    ),
    (
        "components/github-audit.wasm",
        include_bytes!("../../../../guest-examples/components/github-audit.wasm"),
    ),
];
/// Time without progress after which the demo fails as stuck.
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
}

/// Runs the demo. It is an error if any number differs.
pub async fn run(args: DemoOptions, as_json: bool) -> Result<()> {
    let started = Instant::now();
    empty(&args.dir)?;
    let (postgres, broker, config) = services(&args)?;
    let admin = set_up(&config).await?;

    let input = Input::new(args.seed, args.events)?;
    let plan = input::plan(args.seed, args.events);
    let expected = expected::expected(&input)?;
    let mut progress = Progress::new(&plan, &input, args.kills);
    let mut host = Host::start(&config, &args.dir)?;
    let publishing = publish::start(input, plan, args.kills, &config.kafka.brokers);
    drive(&admin, &mut host, &publishing, &mut progress).await?;
    publishing.finish().await?;
    host.stop()?;

    let rows = found::compare(&admin, &expected, &progress).await?;
    drop((postgres, broker));
    report(&rows, &progress, started.elapsed(), as_json)
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

fn services(args: &DemoOptions) -> Result<(Option<PrivatePostgres>, Option<MockBroker>, Config)> {
    let mut config = Config::load(None)?;
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

/// Creates tenants, consumers and deployments, as an operator would.
async fn set_up(config: &Config) -> Result<Control> {
    let handlers = SETUP.matches("[[tenant.consumer.deployment]]").count() / TENANTS.len();
    eprintln!("creating {} tenants and deploying {handlers} handlers to each", TENANTS.len());
    serve::migrate(config).await?;
    let admin = config.admin()?;
    let api = local_api(config, admin.clone())?;
    let open = |path: &Path| {
        let found =
            FILES.iter().find(|(name, _)| Path::new(name) == path).map(|(_, bytes)| bytes.to_vec());
        found.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    apply(&api, Path::new("github-demo.toml"), SETUP, &open).await?;
    Ok(admin)
}

/// Watches the inbox fill, and kills the host whenever another share of the work is done.
async fn drive(
    admin: &Control,
    host: &mut Host,
    publishing: &publish::Publishing,
    progress: &mut Progress,
) -> Result<()> {
    let mut moved = (0, Instant::now());
    loop {
        let settled = found::settled(admin).await?;
        progress.show(settled, publishing.published());
        if settled > moved.0 {
            moved = (settled, Instant::now());
        }
        if settled == progress.distinct && publishing.is_consumed().await? {
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
                    records are not acked; the host's log is `{log}`",
                STUCK.as_secs()
            );
        }
        if progress.kill_is_due(settled)
            || progress.has_kills_left() && publishing.is_held_back().await?
        {
            publishing.release();
            host.kill_in_transaction(admin).await?;
            progress.killed();
        }
        host.check()?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns events of the demo's first tenant, for tests: id, event type and payload.
#[cfg(feature = "test-hooks")]
pub fn events(seed: u64, count: usize) -> serde_json::Result<Vec<(String, String, Vec<u8>)>> {
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
    expected: u64,
    found: u64,
    differences: Vec<String>,
}

fn report(rows: &[TenantCount], progress: &Progress, took: Duration, as_json: bool) -> Result<()> {
    if as_json {
        let tenants: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({
                    "tenant": r.tenant, "delivered": r.delivered, "distinct": r.distinct, "malformed": r.malformed, "parked": r.parked,
                    "duplicates_refused": r.refused, "effects_expected": r.expected, "effects_found": r.found, "differences": r.differences,
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::to_string_pretty(
                &json!({ "kills": progress.kills(), "tenants": tenants, "seconds": took.as_secs() })
            )?
        );
    } else {
        let cells = |r: &TenantCount| {
            [r.delivered, r.distinct, r.malformed, r.parked, r.refused, r.expected, r.found]
                .iter()
                .map(u64::to_string)
                .collect::<Vec<_>>()
        };
        let lines: Vec<_> =
            rows.iter().map(|r| [vec![r.tenant.clone()], cells(r)].concat()).collect();
        println!();
        table(
            &[
                "TENANT",
                "DELIVERED",
                "DISTINCT",
                "MALFORMED",
                "PARKED",
                "DUPLICATES REFUSED",
                "EFFECTS EXPECTED",
                "EFFECTS FOUND",
            ],
            &lines,
        );
        let (kills, s) = (progress.kills(), if progress.kills() == 1 { "" } else { "s" });
        println!("\nkilled {kills} time{s} with a transaction open; {} s", took.as_secs());
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
        println!("every effect is there exactly once");
    }
    Ok(())
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
    use super::{MARKER, empty};

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
