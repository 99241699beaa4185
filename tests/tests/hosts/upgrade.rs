//! Two releases side by side: hosts of the release before and of this one on one database, while
//! they are replaced one by one, forward and back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::process::ExitStatusExt,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use oncebox_control::{NewDeployment, SCHEMA_NUMBER};
use oncebox_model::hooks::SCHEMA_POINTS;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options},
    load::{Load, Work},
    release::{previous_ledger, previous_version},
    wait::DEADLINE,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::{Instant, sleep};

use crate::crash_recovery::run_seeds;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";
const NAMES: [&str; 2] = ["a", "b"];
/// Seeds side by side; each has two hosts.
const AT_ONCE: usize = 2;
/// Messages of half a step.
const MESSAGES: usize = 100;
/// Which host is replaced, and by which release: forward, back, and forward again.
const STEPS: [(usize, Release); 6] = [
    (1, Release::This),
    (0, Release::This),
    (1, Release::Previous),
    (0, Release::Previous),
    (0, Release::This),
    (1, Release::This),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Release {
    Previous,
    This,
}

impl Release {
    fn start(self, fixture: &HostFixture, name: &str) -> Result<HostProcess> {
        match self {
            Self::Previous => fixture.start_previous(name),
            Self::This => fixture.start(name, &[]),
        }
    }

    /// Returns the version that its hosts write into their rows. Those of 0.1 write none.
    fn version(self) -> Option<&'static str> {
        match self {
            Self::Previous => Some(previous_version()).filter(|version| *version != "0.1.0"),
            Self::This => Some(env!("CARGO_PKG_VERSION")),
        }
    }
}

/// What could go wrong: a migration takes away what hosts of the release before still use, or a
/// changed function means something else to them, so that messages are lost or run twice while
/// hosts are replaced; hosts of two releases do not share a group; or the release before cannot
/// start any more once an operator goes back.
///
/// `ONCEBOX_UPGRADE_SEEDS` says how many new seeds are run (1 by default), or, as a list with a
/// comma, which.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_of_two_releases_work_side_by_side_forward_and_back() {
    run_seeds("ONCEBOX_UPGRADE_SEEDS", 1, AT_ONCE, |seed| upgrade(seed, false)).await;
}

/// The same with the inbox in a database of the tenant, which hosts bring up to date at first use.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_of_two_releases_work_side_by_side_on_a_tenants_own_database() {
    run_seeds("ONCEBOX_UPGRADE_SEEDS", 1, AT_ONCE, |seed| upgrade(seed, true)).await;
}

/// What could go wrong: the process that updates the database dies between its migrations and its
/// functions, and no host of the release before starts any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_ends_half_way_locks_no_release_out() {
    let fixture = HostFixture::with(Options {
        previous_release: true,
        idle_after_ms: 0,
        ..Options::default()
    })
    .await
    .unwrap();
    let armed = [("ONCEBOX_FAILPOINT", SCHEMA_POINTS[0])];
    let died = fixture.command(&["migrate"], &armed).unwrap();
    assert_eq!(died.status.signal(), Some(libc::SIGKILL), "{died:?}");
    let host = fixture.start_previous("a").unwrap();
    host.wait_ready().await.unwrap();
    let load = Load::of([Work::Pay; 20]);
    fixture.open_accounts(&load).await.unwrap();
    fixture.send(&load).await.unwrap();
    fixture.wait_settled().await.unwrap();
    host.stop().await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    let planned = fixture.ok(&["migrate", "--plan"]).await.unwrap();
    assert_eq!(planned, "the host's database: up to date\n");
    fixture.check().await.unwrap();
    host.stop().await.unwrap();
}

/// What could go wrong: a migration waits for a table behind a long transaction, and every host
/// waits behind the migration.
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_waits_for_a_table_lets_hosts_pass() {
    const SEEN: &str = "SELECT max(seen_at)::text FROM oncebox.host";
    let fixture =
        HostFixture::with(Options { previous_release: true, ..Options::default() }).await.unwrap();
    let fixture = &fixture;
    let host = fixture.start_previous("a").unwrap();
    host.wait_ready().await.unwrap();
    let mut reader = PgConnection::connect(fixture.database_url()).await.unwrap();
    reader.execute("BEGIN; SELECT FROM oncebox.host").await.unwrap();
    let migrated = AtomicBool::new(false);
    let migrate = async {
        fixture.ok(&["migrate"]).await.unwrap();
        migrated.store(true, Ordering::SeqCst);
    };
    let look = async {
        let mut beats = BTreeSet::new();
        let deadline = Instant::now() + DEADLINE;
        while beats.len() < 6 {
            assert!(Instant::now() < deadline, "the host waits: {beats:?}");
            let seen: String = sqlx::query_scalar(SEEN).fetch_one(&mut reader).await.unwrap();
            beats.insert(seen);
            sleep(Duration::from_millis(100)).await;
        }
        assert!(!migrated.load(Ordering::SeqCst), "it did not wait for the table");
        reader.execute("COMMIT").await.unwrap();
    };
    tokio::join!(migrate, look);
    host.stop().await.unwrap();
}

/// What could go wrong: a host that is replaced in good order interrupts messages, so that they run
/// again, or leaves some to the time after which a silent host is taken for dead. Prints how long
/// messages took meanwhile, from the record to the commit.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_are_replaced_in_order_interrupt_no_message() {
    const TIMES: &str = "SELECT percentile_disc(ARRAY[0.5, 0.99, 1]) WITHIN GROUP (ORDER BY \
        extract(epoch FROM processed_at) * 1000 - record_timestamp_ms)::float8[] FROM oncebox.inbox";
    const REPEATED: &str = "SELECT coalesce(sum(attempts), 0)::bigint FROM oncebox.inbox WHERE \
        attempts > 1";
    let fixture = HostFixture::with(Options {
        previous_release: true,
        static_members: false,
        idle_after_ms: 0,
        session_timeout_ms: 240_000,
        ..Options::default()
    })
    .await
    .unwrap();
    let mut hosts = NAMES.map(|name| fixture.start_previous(name).unwrap());
    ready(&hosts).await.unwrap();
    let load = Load::of([Work::Pay; 100]);
    fixture.open_accounts(&load).await.unwrap();
    let is_replaced = AtomicBool::new(false);
    let publish = async {
        let mut number = 0;
        while !is_replaced.load(Ordering::SeqCst) || number < 10 {
            fixture.send(&Load::of([Work::Pay; 5]).named(&number.to_string())).await?;
            number += 1;
            sleep(Duration::from_millis(25)).await;
        }
        anyhow::Ok(())
    };
    let replace = async {
        for which in [1, 0] {
            sleep(Duration::from_secs(3)).await;
            hosts[which].stop().await?;
            hosts[which] = fixture.start(NAMES[which], &[])?;
            ready(&hosts).await?;
        }
        sleep(Duration::from_secs(3)).await;
        is_replaced.store(true, Ordering::SeqCst);
        anyhow::Ok(())
    };
    tokio::try_join!(publish, replace).unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.check().await.unwrap();
    assert_eq!(fixture.number(REPEATED).await.unwrap(), 0, "a message ran again");
    let count = fixture.number("SELECT count(*) FROM oncebox.inbox").await.unwrap();
    let times: Vec<f64> = sqlx::query_scalar(TIMES).fetch_one(&fixture.pool).await.unwrap();
    let [half, most, all] = times[..] else { panic!("{times:?}") };
    println!("{count} messages: half took {half:.0} ms, 99 % {most:.0} ms, all {all:.0} ms");
    for host in hosts {
        host.stop().await.unwrap();
    }
}

/// Two hosts that are replaced, and what happened to them.
struct Upgrade {
    fixture: HostFixture,
    random: StdRng,
    hosts: [HostProcess; 2],
    releases: [Release; 2],
    loads: usize,
    kills: BTreeMap<Release, usize>,
}

async fn upgrade(seed: u64, own_database: bool) -> Result<String> {
    let mut random = StdRng::seed_from_u64(seed);
    let fixture = HostFixture::with(Options {
        previous_release: true,
        own_database,
        static_members: random.random_bool(0.5),
        ack: ["after_commit", "after_insert"][random.random_range(0..2)],
        idle_after_ms: 0,
        ..Options::default()
    })
    .await?;
    let hosts = [fixture.start_previous(NAMES[0])?, fixture.start_previous(NAMES[1])?];
    ready(&hosts).await?;
    let (releases, kills) = ([Release::Previous; 2], BTreeMap::new());
    let mut upgrade = Upgrade { fixture, random, hosts, releases, loads: 0, kills };
    for (number, (which, release)) in STEPS.into_iter().enumerate() {
        upgrade.step(number, which, release).await.with_context(|| format!("step {number}"))?;
    }
    let Upgrade { fixture, hosts, kills, .. } = upgrade;
    fixture.check().await?;
    for host in hosts {
        host.stop().await?;
    }
    ensure!(kills.len() == 2, "hosts of one release alone were killed: {kills:?}");
    Ok(format!("killed: {kills:?}"))
}

impl Upgrade {
    /// Replaces a host under load. The first step kills one of the release before, the third one of
    /// this release.
    async fn step(&mut self, number: usize, which: usize, release: Release) -> Result<()> {
        let before = self.fixture.number(EFFECTS).await?;
        self.send(MESSAGES).await?;
        self.fixture.until(EFFECTS, before + self.random.random_range(1..40)).await?;
        if [0, 2].contains(&number) || self.random.random_bool(0.3) {
            self.kill(which).await?;
        } else {
            self.hosts[which].stop().await?;
        }
        self.releases[which] = release;
        self.start(which).await?;
        if self.releases[0] != self.releases[1] {
            self.until_both_work().await?;
        }
        if number == 0 || self.random.random_bool(0.3) {
            deploy(&self.fixture).await?;
        }
        self.send(MESSAGES).await?;
        if self.random.random_bool(0.4) {
            let which = self.random.random_range(0..self.hosts.len());
            sleep(Duration::from_millis(self.random.random_range(0..500))).await;
            self.kill(which).await?;
            self.start(which).await?;
        }
        self.fixture.wait_settled().await?;
        self.check_versions().await
    }

    async fn start(&mut self, which: usize) -> Result<()> {
        self.hosts[which] = self.releases[which].start(&self.fixture, NAMES[which])?;
        ready(&self.hosts).await
    }

    async fn kill(&mut self, which: usize) -> Result<()> {
        *self.kills.entry(self.releases[which]).or_default() += 1;
        self.hosts[which].kill().await
    }

    async fn send(&mut self, messages: usize) -> Result<()> {
        self.loads += 1;
        let load = load(&mut self.random, messages).named(&self.loads.to_string());
        self.fixture.open_accounts(&load).await?;
        self.fixture.send(&load).await
    }

    /// Sends messages until each host has completed some that came after this began.
    async fn until_both_work(&mut self) -> Result<()> {
        let before = self.completed().await;
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.send(10).await?;
            sleep(Duration::from_millis(200)).await;
            let now = self.completed().await;
            if now.iter().zip(before).all(|(now, before)| *now > before) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "one host does it all: {before:?}, then {now:?}");
        }
    }

    /// Returns how many messages each host has completed since its start.
    async fn completed(&self) -> [f64; 2] {
        let mut completed = [0.0; 2];
        for (host, completed) in self.hosts.iter().zip(&mut completed) {
            *completed = host.sum("oncebox_messages_total").await.unwrap_or(0.0);
        }
        completed
    }

    /// Checks that each host is listed with its release, by which an operator sees how far an
    /// upgrade is.
    async fn check_versions(&self) -> Result<()> {
        if !self.releases.contains(&Release::This) {
            return Ok(()); // the table may lack the column yet
        }
        let listed = self.fixture.control.hosts().list().await?;
        for (host, release) in self.hosts.iter().zip(self.releases) {
            let id = format!("{}", host.pid());
            let found = listed.iter().find(|listed| listed.name.ends_with(&id));
            let found = found.with_context(|| format!("host {id} is not in {listed:?}"))?;
            ensure!(found.version.as_deref() == release.version(), "{found:?} is {release:?}");
        }
        Ok(())
    }
}

async fn ready(hosts: &[HostProcess]) -> Result<()> {
    for host in hosts {
        host.wait_ready().await?;
    }
    Ok(())
}

/// Deploys the handler once more.
async fn deploy(fixture: &HostFixture) -> Result<()> {
    let new = NewDeployment::stable("payment.captured", "ledger", "");
    fixture
        .control
        .versions()
        .deploy_compiled(&fixture.tenant.name, "payments", new, &previous_ledger()?)
        .await?;
    Ok(())
}

/// What could go wrong: a plan changes something, conceals a database, or names other tables than
/// the migrations lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_says_what_an_upgrade_changes_and_locks() {
    let fixture = HostFixture::with(Options {
        previous_release: true,
        own_database: true,
        ..Options::default()
    })
    .await
    .unwrap();
    let tenant = &fixture.tenant.name;
    let mut reader = PgConnection::connect(fixture.database_url()).await.unwrap();
    reader.execute("BEGIN; SELECT FROM oncebox.host").await.unwrap();
    let waits = "1 transaction, the oldest open for ";
    let planned = fixture.ok(&["migrate", "--plan"]).await.unwrap();
    for said in [
        "the host's database:\n",
        &format!("the database of tenant `{tenant}`:\n"),
        "0002_host_version",
        "oncebox.host",
        "an instant",
        waits,
        "nobody",
    ] {
        assert!(planned.contains(said), "{said}: {planned}");
    }
    let plans = fixture.ok(&["migrate", "--plan", "--json"]).await.unwrap();
    let plans: Value = serde_json::from_str(&plans).unwrap();
    assert_eq!(plans[0]["tenant"], Value::Null);
    assert_eq!(plans[1]["tenant"], **tenant);
    for plan in [&plans[0]["plan"], &plans[1]["plan"]] {
        assert_eq!(plan["migrations"][0]["version"], 2, "{plan}");
        assert_eq!(plan["migrations"][0]["locks"][0]["table"], "oncebox.host");
        assert_eq!(plan["migrations"][0]["locks"][0]["time"], "instant");
    }
    assert_eq!(plans[0]["plan"]["migrations"][0]["locks"][0]["transactions"], 1);
    reader.execute("COMMIT").await.unwrap();

    let again = fixture.ok(&["migrate", "--plan", "--json"]).await.unwrap();
    let again: Value = serde_json::from_str(&again).unwrap();
    assert_eq!(again[1], plans[1], "a plan changes nothing");
    fixture.ok(&["migrate"]).await.unwrap();
    let planned = fixture.ok(&["migrate", "--plan"]).await.unwrap();
    assert!(planned.contains("the host's database: up to date\n"), "{planned}");
    reader.execute("UPDATE oncebox.function SET schema_number = 1000").await.unwrap();
    let planned = fixture.ok(&["migrate", "--plan"]).await.unwrap();
    assert!(planned.contains("the host's database: a newer release"), "{planned}");
    let restore = format!("UPDATE oncebox.function SET schema_number = {SCHEMA_NUMBER}");
    reader.execute(AssertSqlSafe(restore)).await.unwrap();

    // A database that cannot be read conceals no other.
    let database = fixture.database_name();
    let shut = format!("ALTER DATABASE \"{database}\" ALLOW_CONNECTIONS false");
    reader.execute(AssertSqlSafe(shut)).await.unwrap();
    let said = fixture.folder().unwrap().run(&["migrate", "--plan"], "").await.unwrap();
    assert_eq!(said.code, Some(1), "{}", said.stdout);
    assert!(said.stdout.contains("the host's database: up to date\n"), "{}", said.stdout);
    let unread = format!("the database of tenant `{tenant}` could not be read: ");
    assert!(said.stderr.contains(&unread), "{}", said.stderr);
}

/// What could go wrong: a migration locks a table that its text does not name, so that no plan says
/// it; or reads or rewrites one of millions of rows though its text says that it takes an instant.
#[tokio::test(flavor = "multi_thread")]
async fn migrations_lock_what_their_texts_say() {
    let fixture =
        HostFixture::with(Options { previous_release: true, ..Options::default() }).await.unwrap();
    let mut connection = PgConnection::connect(fixture.database_url()).await.unwrap();
    let newest: i64 = sqlx::query_scalar("SELECT max(version) FROM oncebox._sqlx_migrations")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "sql"));
    files.sort();
    let mut tx = connection.begin().await.unwrap();
    for file in files {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if name[..4].parse::<i64>().unwrap() <= newest {
            continue;
        }
        let sql = fs::read_to_string(&file).unwrap();
        check_locks(&mut tx, &name, &sql).await;
    }
    tx.rollback().await.unwrap();
}

/// Runs a migration inside a transaction of its own, which is undone with the outer one, and
/// compares. A partition counts as its table.
async fn check_locks(tx: &mut PgConnection, name: &str, sql: &str) {
    const BEFORE: &str = "CREATE TEMPORARY TABLE before AS SELECT c.oid, c.relfilenode, s.seq_scan \
        AS scans, coalesce(pg_partition_root(c.oid)::oid, c.oid)::regclass::text AS name, ARRAY(SELECT \
        l.mode FROM pg_locks l WHERE l.relation = c.oid AND l.pid = pg_backend_pid()) AS modes FROM \
        pg_class c JOIN pg_stat_xact_user_tables s ON s.relid = c.oid WHERE c.relkind IN ('r', 'p') \
        AND c.relnamespace = 'oncebox'::regnamespace";
    // Locks that hosts wait for, of tables that were there before.
    const LOCKED: &str = "SELECT DISTINCT b.name FROM pg_locks l JOIN before b ON b.oid = l.relation \
        WHERE l.pid = pg_backend_pid() AND l.mode <> ALL (b.modes) AND l.mode IN ('ShareLock', \
        'ShareUpdateExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', \
        'AccessExclusiveLock') ORDER BY 1";
    const READ: &str = "SELECT DISTINCT b.name FROM before b JOIN pg_class c USING (oid) JOIN \
        pg_stat_xact_user_tables s ON s.relid = b.oid WHERE s.seq_scan > b.scans OR c.relfilenode <> \
        b.relfilenode ORDER BY 1";
    tx.execute(BEFORE).await.unwrap();
    tx.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
    let locked: Vec<String> = sqlx::query_scalar(LOCKED).fetch_all(&mut *tx).await.unwrap();
    // The migrations before it hold theirs until the end of the outer transaction.
    let held = LOCKED.replace("l.mode <> ALL (b.modes)", "true");
    let held: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(held)).fetch_all(&mut *tx).await.unwrap();
    let read: Vec<String> = sqlx::query_scalar(READ).fetch_all(&mut *tx).await.unwrap();
    tx.execute("DROP TABLE before").await.unwrap();
    let mut said: Vec<_> =
        sql.lines().filter_map(|line| line.strip_prefix("-- Locks: ")?.split_once(", ")).collect();
    said.sort_unstable();
    let tables: Vec<_> = said.iter().map(|(table, _)| *table).collect();
    assert!(
        locked.iter().all(|table| tables.contains(&table.as_str()))
            && tables.iter().all(|table| held.iter().any(|held| held == table)),
        "{name} locks other tables than it says: {locked:?}, {held:?}"
    );
    for table in &read {
        assert!(said.contains(&(table, "one read")), "{name} reads or rewrites `{table}`");
    }
}

/// Returns payments, a tenth of which fail at first, and some of which take a while.
fn load(random: &mut StdRng, messages: usize) -> Load {
    Load::of((0..messages).map(|_| match random.random_range(0..20) {
        0 | 1 => Work::Fails(2),
        2 => Work::Sleeps(random.random_range(5..60)),
        _ => Work::Pay,
    }))
}
