//! Two releases side by side: hosts of the release before and of this one on one database, while
//! they are replaced one by one, forward and back.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options},
    load::{Load, Work},
    release::previous_version,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::sleep;

use crate::crash_recovery::run_seeds;

const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";
const COMPONENT: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");
const NAMES: [&str; 2] = ["a", "b"];
/// Seeds side by side; each has two hosts.
const AT_ONCE: usize = 2;
/// Messages of one step.
const MESSAGES: usize = 200;
/// Which host is replaced, and by which release: forward, back, and forward again.
const STEPS: [(usize, Release); 6] = [
    (1, Release::This),
    (0, Release::This),
    (1, Release::Previous),
    (0, Release::Previous),
    (0, Release::This),
    (1, Release::This),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

/// What could go wrong: a migration takes away what hosts of the release before still use, or a
/// changed function means something else to them, so that messages are lost or run twice while
/// hosts are replaced; or the release before cannot start any more once an operator goes back.
///
/// `ONCEBOX_UPGRADE_SEEDS` says how many new seeds are run (2 by default), or, as a list with a
/// comma, which.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_of_two_releases_work_side_by_side_forward_and_back() {
    run_seeds("ONCEBOX_UPGRADE_SEEDS", 2, AT_ONCE, upgrade).await;
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
        session_timeout_ms: 45_000,
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
    fixture.wait_settled_within(Duration::from_secs(30)).await.unwrap();
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

async fn upgrade(seed: u64) -> Result<String> {
    let mut random = StdRng::seed_from_u64(seed);
    let own_database = random.random_bool(0.4);
    let fixture = HostFixture::with(Options {
        previous_release: true,
        own_database,
        static_members: random.random_bool(0.5),
        ack: ["after_commit", "after_insert"][random.random_range(0..2)],
        idle_after_ms: 0,
        ..Options::default()
    })
    .await?;
    let mut releases = [Release::Previous; 2];
    let mut hosts = [fixture.start_previous(NAMES[0])?, fixture.start_previous(NAMES[1])?];
    ready(&hosts).await?;
    let (mut kills, mut deployed) = (0, 0);
    for (number, (which, release)) in STEPS.into_iter().enumerate() {
        let load = load(&mut random).named(&number.to_string());
        fixture.open_accounts(&load).await?;
        let before = fixture.number(EFFECTS).await?;
        fixture.send(&load).await?;
        fixture.until(EFFECTS, before + random.random_range(1..40)).await?;
        if random.random_bool(0.4) {
            hosts[which].kill().await?;
            kills += 1;
        } else {
            hosts[which].stop().await?;
        }
        releases[which] = release;
        hosts[which] = release.start(&fixture, NAMES[which])?;
        ready(&hosts).await?;
        if random.random_bool(0.3) {
            deploy(&fixture).await?;
            deployed += 1;
        }
        let more = self::load(&mut random).named(&format!("{number} more"));
        fixture.open_accounts(&more).await?;
        fixture.send(&more).await?;
        if random.random_bool(0.4) {
            let one = random.random_range(0..hosts.len());
            sleep(Duration::from_millis(random.random_range(0..500))).await;
            hosts[one].kill().await?;
            hosts[one] = releases[one].start(&fixture, NAMES[one])?;
            ready(&hosts).await?;
            kills += 1;
        }
        fixture.wait_settled().await.with_context(|| format!("after step {number}"))?;
        check_versions(&fixture, releases).await?;
    }
    fixture.check().await?;
    for host in hosts {
        host.stop().await?;
    }
    let whose = if own_database { "the tenant's own database" } else { "the host's database" };
    Ok(format!("{whose}: {kills} hosts killed, {deployed} deployments"))
}

async fn ready(hosts: &[HostProcess]) -> Result<()> {
    for host in hosts {
        host.wait_ready().await?;
    }
    Ok(())
}

/// The handler once more, as another deployment.
async fn deploy(fixture: &HostFixture) -> Result<()> {
    let new = NewDeployment::stable("payment.captured", "ledger", "");
    fixture
        .control
        .versions()
        .deploy_compiled(&fixture.tenant.name, "payments", new, COMPONENT)
        .await?;
    Ok(())
}

/// What could go wrong: a plan changes something, conceals a database, or names other tables than the
/// migrations lock.
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
    reader.execute("UPDATE oncebox.function SET schema_number = 2").await.unwrap();

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
    let mut seen = 0;
    for file in files {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if name[..4].parse::<i64>().unwrap() <= newest {
            continue;
        }
        let sql = fs::read_to_string(&file).unwrap();
        check_locks(&mut connection, &name, &sql).await;
        seen += 1;
    }
    assert!(seen > 0, "this release has no migration of its own");
}

async fn check_locks(connection: &mut PgConnection, name: &str, sql: &str) {
    // Locks that hosts wait for, of tables that were there before.
    const LOCKED: &str = "SELECT DISTINCT l.relation::regclass::text FROM pg_locks l JOIN before b \
        ON b.oid = l.relation WHERE l.pid = pg_backend_pid() AND l.mode IN ('ShareLock', \
        'ShareUpdateExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', \
        'AccessExclusiveLock') ORDER BY 1";
    const READ: &str = "SELECT DISTINCT b.oid::regclass::text FROM before b JOIN pg_class c USING \
        (oid) JOIN pg_stat_xact_user_tables s ON s.relid = b.oid WHERE s.seq_scan > b.scans OR \
        c.relfilenode <> b.relfilenode ORDER BY 1";
    const BEFORE: &str = "CREATE TEMPORARY TABLE before ON COMMIT DROP AS SELECT c.oid, \
        c.relfilenode, s.seq_scan AS scans FROM pg_class c JOIN pg_stat_xact_user_tables s ON \
        s.relid = c.oid WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'oncebox'::regnamespace";
    let mut tx = connection.begin().await.unwrap();
    tx.execute(BEFORE).await.unwrap();
    tx.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
    let locked: Vec<String> = sqlx::query_scalar(LOCKED).fetch_all(&mut *tx).await.unwrap();
    let read: Vec<String> = sqlx::query_scalar(READ).fetch_all(&mut *tx).await.unwrap();
    tx.rollback().await.unwrap();
    let mut said: Vec<_> =
        sql.lines().filter_map(|line| line.strip_prefix("-- Locks: ")?.split_once(", ")).collect();
    said.sort_unstable();
    let tables: Vec<_> = said.iter().map(|(table, _)| *table).collect();
    assert_eq!(locked, tables, "{name} locks other tables than it says");
    for table in &read {
        assert!(said.contains(&(table, "one read")), "{name} reads or rewrites `{table}`");
    }
}

/// Each of the hosts that run says its release, which is how an operator sees how far an upgrade
/// is. Hosts of the release before say none.
async fn check_versions(fixture: &HostFixture, releases: [Release; 2]) -> Result<()> {
    if !releases.contains(&Release::This) {
        return Ok(());
    }
    let listed: Vec<_> =
        fixture.control.hosts().list().await?.into_iter().map(|host| host.version).collect();
    for release in releases {
        let version = match release {
            Release::Previous => None,
            Release::This => Some(env!("CARGO_PKG_VERSION").to_owned()),
        };
        ensure!(listed.contains(&version), "no host says {version:?}: {listed:?}");
    }
    ensure!(env!("CARGO_PKG_VERSION") != previous_version(), "the release before is this one");
    Ok(())
}

/// Payments, a tenth of which fail at first, and some of which take a while.
fn load(random: &mut StdRng) -> Load {
    Load::of((0..MESSAGES / 2).map(|_| match random.random_range(0..20) {
        0 | 1 => Work::Fails(2),
        2 => Work::Sleeps(random.random_range(5..60)),
        _ => Work::Pay,
    }))
}
