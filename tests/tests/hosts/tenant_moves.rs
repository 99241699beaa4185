//! Tenants move from database to database while messages come and hosts are killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use oncebox_control::{DatabaseUrl, NamedDatabase, NamedDatabases};
use oncebox_model::hooks::MOVE_POINTS;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Neighbour, Options},
    inbox::InboxFixture,
    load::{Load, Message, Work},
    postgres::TestDatabase,
    wait::DEADLINE,
};
use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedRandom, SliceRandom},
};
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::time::{Instant, sleep};

use crate::crash_recovery::run_seeds;

/// Messages of a history.
const MESSAGES: usize = 300;
/// Messages that are published at a time, and the pause after them.
const PORTION: usize = 6;
const PAUSE: Duration = Duration::from_millis(150);
/// Hosts that are killed during one move, at most.
const KILLS_MAX: usize = 3;
/// How long a move and all of its kills may take.
const MOVE_MAX: Duration = Duration::from_secs(150);

/// What could go wrong: a message is lost or has its effect twice since its tenant moved, whichever
/// host died at whichever step; the tenant is left in two databases; another tenant's messages stop.
///
/// `ONCEBOX_MOVE_SEEDS` says how many new seeds are run (3 by default), or, as a list with a comma
/// such as `17,`, which.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_moves_whichever_host_is_killed() {
    run_seeds("ONCEBOX_MOVE_SEEDS", 3, 2, history).await;
}

/// The databases to which a tenant moves.
struct Places {
    databases: [TestDatabase; 2],
    pools: [PgPool; 2],
}

const NAMES: [&str; 2] = ["one", "two"];

impl Places {
    async fn new() -> Self {
        let databases =
            [InboxFixture::another_database().await, InboxFixture::another_database().await];
        let pool = |database: &TestDatabase| {
            PgPoolOptions::new().max_connections(4).connect_lazy(database.url()).unwrap()
        };
        let pools = [pool(&databases[0]), pool(&databases[1])];
        Self { databases, pools }
    }

    /// Hosts' configuration. New tenants go to the host's database.
    fn config(&self) -> String {
        let named = NAMES.iter().zip(&self.databases);
        named
            .map(|(name, database)| {
                format!("[[databases]]\nname = '{name}'\nurl = '{}'\nweight = 0\n", database.url())
            })
            .collect()
    }

    fn named(&self) -> Result<NamedDatabases> {
        let named = NAMES.iter().zip(&self.databases).map(|(name, database)| {
            Ok(NamedDatabase {
                name: (*name).to_owned(),
                url: DatabaseUrl::parse(database.url())?,
                weight: 0,
                connections_max: 8,
            })
        });
        Ok(NamedDatabases::new(named.collect::<Result<Vec<_>>>()?)?)
    }
}

async fn history(seed: u64) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let places = Places::new().await;
    let order = *["none", "key"].choose(&mut rng).context("an order")?;
    let own_database = rng.random_bool(0.3);
    let options = Options { order, own_database, config: places.config(), ..Options::default() };
    let mut fixture = HostFixture::with(options).await?;
    fixture.control = fixture.control.clone().placing_in(places.named()?);
    let neighbour = fixture.neighbour(1).await?;
    // The harness's own function in the tenant's schema is a superuser's, who does not move.
    fixture.execute("DROP FUNCTION {schema}.behave() CASCADE").await?;
    let works =
        [Work::Pay, Work::Pay, Work::Open, Work::Reject, Work::Park, Work::Unrouted, Work::NoId];
    let mut load = Load::of((0..MESSAGES).map(|_| *works.choose(&mut rng).expect("a work")));
    for _ in 0..MESSAGES / 5 {
        let again = load.deliveries.choose(&mut rng).context("a message")?.clone();
        load.deliveries.push(again);
    }
    load.deliveries.shuffle(&mut rng);
    if order != "none" {
        load = load.keyed(&mut rng, 16);
    }
    fixture.open_accounts(&load).await?;
    let mut first = fixture.pool.clone();

    let mut struck = Struck { seed, killed: Vec::new(), kills: 0 };
    let mut hosts =
        [struck.start(&fixture, "a", &mut rng)?, struck.start(&fixture, "b", &mut rng)?];
    let sent = std::sync::atomic::AtomicUsize::new(1);
    let half = load.deliveries.len() / 2;
    for (number, messages) in
        [&load.deliveries[..half], &load.deliveries[half..]].iter().enumerate()
    {
        struck.kills = 0;
        let moving =
            move_to(&fixture, &neighbour, NAMES[number], &mut hosts, &mut struck, &mut rng);
        let publishing = publish(&fixture, &neighbour, messages, &sent);
        let (moved, published) = tokio::join!(moving, publishing);
        published?;
        moved
            .with_context(|| format!("seed {seed}, to `{}`: {:?}", NAMES[number], struck.killed))?;
        let before = std::mem::replace(&mut fixture.pool, places.pools[number].clone());
        first = if number == 0 { before } else { first };
        check_gone(&fixture, if number == 0 { &first } else { &places.pools[0] }).await?;
    }
    check_gone(&fixture, &first).await?;
    for host in &mut hosts {
        if !host.is_running() {
            *host = fixture.start(host.name(), &[])?;
        }
    }
    fixture.release_quarantined().await?;
    neighbour.release_quarantined().await?;
    fixture.wait_settled_within(DEADLINE * 2).await.with_context(|| format!("seed {seed}"))?;
    fixture.check().await.with_context(|| format!("seed {seed}"))?;
    let sent = sent.into_inner();
    neighbour.wait_effects(sent as i64).await?;
    for host in hosts {
        host.stop().await?;
    }
    fixture.check().await?;
    let first = if own_database { "a database of its own" } else { "the host's" };
    Ok(format!(
        "from {first}, order {order}, {sent} messages beside it, killed at {:?}",
        struck.killed
    ))
}

/// The hosts that were killed.
struct Struck {
    seed: u64,
    /// Where, over all moves.
    killed: Vec<&'static str>,
    /// During this move.
    kills: usize,
}

impl Struck {
    /// Starts a host that dies at a step of a move. The first steps go round with the seeds.
    fn start(&self, fixture: &HostFixture, name: &str, rng: &mut StdRng) -> Result<HostProcess> {
        let point = match self.killed.len() {
            0 => MOVE_POINTS[self.seed as usize % MOVE_POINTS.len()],
            _ => MOVE_POINTS.choose(rng).copied().context("a fail point")?,
        };
        if self.kills >= KILLS_MAX {
            return fixture.start(name, &[]);
        }
        fixture.start(name, &[("ONCEBOX_FAILPOINT", point)])
    }
}

/// Moves the tenant, with hosts that die and are started again.
async fn move_to(
    fixture: &HostFixture,
    neighbour: &Neighbour,
    to: &str,
    hosts: &mut [HostProcess; 2],
    struck: &mut Struck,
    rng: &mut StdRng,
) -> Result<()> {
    let tenants = fixture.control.tenants();
    let name = &fixture.tenant.name;
    tenants.begin_move(name, to).await?;
    let deadline = Instant::now() + MOVE_MAX;
    while let Some(known) = tenants.move_of(name).await? {
        ensure!(Instant::now() < deadline, "the move is not over: {known:?}");
        for host in hosts.iter_mut() {
            if struck.kills < KILLS_MAX && rng.random_bool(0.01) && host.is_running() {
                host.kill().await?;
            }
            if !host.is_running() {
                struck.kills += 1;
                struck.killed.push(known.step.as_str());
                *host = struck.start(fixture, host.name(), rng)?;
            }
        }
        // What hosts were killed for is not what they started.
        fixture.release_quarantined().await?;
        neighbour.release_quarantined().await?;
        sleep(Duration::from_millis(50)).await;
    }
    ensure!(tenants.get(name).await?.database.as_deref() == Some(to), "it is elsewhere");
    Ok(())
}

/// Publishes messages, in portions, and one of the neighbour after each.
async fn publish(
    fixture: &HostFixture,
    neighbour: &Neighbour,
    messages: &[Message],
    sent: &std::sync::atomic::AtomicUsize,
) -> Result<()> {
    for portion in messages.chunks(PORTION) {
        fixture.sent().deliveries.extend(portion.iter().cloned());
        fixture.publish(portion).await?;
        let number = sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        neighbour.send(number, 1).await?;
        sleep(PAUSE).await;
    }
    Ok(())
}

/// Nothing of the tenant is in a database that it left.
async fn check_gone(fixture: &HostFixture, left: &PgPool) -> Result<()> {
    const LEFT: &str = "SELECT (SELECT count(*) FROM oncebox.inbox WHERE consumer_id = $1) + (SELECT \
        count(*) FROM oncebox.partition_position WHERE consumer_id = $1) + (SELECT count(*) FROM \
        pg_namespace WHERE nspname = $2)";
    let left: i64 = sqlx::query_scalar(LEFT)
        .bind(fixture.consumer_id)
        .bind(&fixture.tenant.schema_name)
        .fetch_one(left)
        .await?;
    ensure!(left == 0, "{left} things of the tenant are left in a database");
    Ok(())
}
