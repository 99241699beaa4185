//! Locks that nobody else can take: ids and keys that are made for the numbers of other tenants'
//! locks, and of the host's, hold up nobody but their own consumer; whoever waits for a lock of the
//! host's waits for a while, and says for whom.
//!
//! `ONCEBOX_SEED` makes the same ids again.

use std::panic::AssertUnwindSafe;

use futures::{FutureExt, future::BoxFuture};
use oncebox_control::{Functions, Tenant, schema};
use oncebox_model::{
    InboxError,
    policy::{Policy, Retention},
};
use oncebox_tests::{
    collisions,
    inbox::{InboxFixture, both, code, record},
    lookup3::Forger,
    wait::DEADLINE,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::timeout;

fn seed() -> u64 {
    std::env::var("ONCEBOX_SEED").map_or_else(|_| rand::random(), |text| text.parse().unwrap())
}

/// What could go wrong: a tenant's ids stop the partitions of another one. D16.
#[tokio::test(flavor = "multi_thread")]
async fn ids_made_for_the_locks_of_another_tenant_hold_up_nothing() {
    both(async |fixture| collisions::strangers(fixture, seed()).await).await;
}

/// What could go wrong: keys do, of which one finds enough by trying.
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_meet_those_of_another_tenant_hold_up_nothing() {
    collisions::keys(InboxFixture::new().await, seed()).await;
}

/// What could go wrong: messages that share a lock are taken for one.
#[tokio::test(flavor = "multi_thread")]
async fn messages_that_share_a_lock_are_messages_of_their_own() {
    both(async |fixture| collisions::neighbours(fixture, seed()).await).await;
}

/// What could go wrong: two claims of one consumer wait for each other, since their ids come in
/// other orders than their locks.
#[tokio::test(flavor = "multi_thread")]
async fn claims_take_their_locks_in_one_order() {
    collisions::crossed(InboxFixture::new().await, seed()).await;
}

/// What each lock of the host's is taken for.
const HOSTS: [&str; 7] =
    ["migrate", "grants", "groups", "partitions", "capture", "tenant removal", "mirror"];

/// Do what takes one of the host's locks. Each can be done once.
fn needs<'a>(
    fixture: &'a InboxFixture,
    lock: &'a str,
    victim: &'a Tenant,
    apart: &'a Tenant,
) -> BoxFuture<'a, Result<(), InboxError>> {
    // Boxed, since together these futures outgrow the stack of a test.
    Box::pin(needs_unboxed(fixture, lock, victim, apart))
}

async fn needs_unboxed(
    fixture: &InboxFixture,
    lock: &str,
    victim: &Tenant,
    apart: &Tenant,
) -> Result<(), InboxError> {
    let control = &fixture.control;
    let policy = || Policy::parse("topics = ['t']\nack = 'after_commit'").unwrap();
    match lock {
        "migrate" => schema::migrate(&fixture.superuser_options()).await.map(drop),
        "grants" => control.tenants().create("newcomer").await.map(drop),
        "groups" => control.consumers().create(&victim.name, "new", &policy()).await.map(drop),
        "partitions" => schema::ensure_partitions_for(&fixture.pool, &[Retention::OneYear.class()])
            .await
            .map(|made| assert_eq!(made, 3)),
        "capture" => control
            .shadows()
            .install_capture(victim)
            .await
            .map(|left| assert!(left.is_empty(), "{left:?}")),
        "tenant removal" => {
            let leaving = control.tenants().delete("leaving").await?;
            control
                .tenants()
                .remove(&leaving)
                .await
                .map(|removed| assert!(removed, "someone else is at it"))
        }
        "mirror" => control.tenant_databases().replicate(apart).await,
        other => panic!("no lock is `{other}`"),
    }
}

/// What could go wrong: a tenant's ids take the host's own locks, and no host starts, no tenant or
/// consumer is made.
#[tokio::test(flavor = "multi_thread")]
async fn ids_made_for_the_locks_of_the_host_hold_up_nothing() {
    let (fixture, mut forger) = (InboxFixture::new().await, Forger::new(seed()));
    let (victim, evil) = (fixture.tenant("victim", "").await, fixture.tenant("evil", "").await);
    let leaving = fixture.tenant("leaving", "").await;
    let database = InboxFixture::another_database().await;
    let apart = fixture.tenant_at("apart", &database, "").await;
    let evil_apart = fixture.tenant_at("evil-apart", &database, "").await;
    let attacks = fixture.consumer(&evil, "attacks", collisions::PATIENT).await;
    let attacks_apart = fixture.consumer(&evil_apart, "attacks", collisions::PATIENT).await;
    fixture.control.tenant_databases().replicate(&evil_apart).await.unwrap();
    let named = [
        ("oncebox migrate", 0),
        ("oncebox grants", 0),
        ("oncebox groups", 0),
        ("oncebox partitions", 0),
        ("oncebox capture", 0),
    ]
    .map(|(name, seed)| (name, i64::from(seed)));
    let of_tenants = [
        ("oncebox tenant removal", leaving.tenant_id.into()),
        ("oncebox mirror", apart.tenant_id.into()),
    ];
    let hashed = named
        .into_iter()
        .chain(of_tenants)
        .map(|(name, seed)| oncebox_tests::lookup3::hash(name, seed));
    let numbers: Vec<_> = hashed.collect();
    let forged = |forger: &mut Forger, consumer_id: i32| -> Vec<_> {
        let texts = numbers
            .iter()
            .map(|number| forger.text(*number, consumer_id.into()))
            .collect::<Vec<_>>();
        // And for the small numbers that a closed list of locks has, in either half.
        let small =
            (0..16).map(|n| forger.text(n << 32 | n, consumer_id.into())).collect::<Vec<_>>();
        (0..)
            .zip(texts.into_iter().chain(small))
            .map(|(offset, id)| record(offset, &id, ""))
            .collect()
    };
    let here = forged(&mut forger, attacks.row.consumer_id);
    let there = forged(&mut forger, attacks_apart.row.consumer_id);
    let holding = [
        collisions::hold(&fixture, &attacks, here).await,
        collisions::hold(&fixture, &attacks_apart, there).await,
    ];
    let held_up = futures::future::join_all(HOSTS.map(async |lock| {
        match timeout(
            DEADLINE,
            AssertUnwindSafe(needs(&fixture, lock, &victim, &apart)).catch_unwind(),
        )
        .await
        {
            Ok(Ok(Ok(()))) => None,
            Ok(Ok(Err(error))) => Some(format!("{lock}: {error}")),
            Ok(Err(_)) => Some(format!("{lock}: somebody else has it")),
            Err(_) => Some(format!("{lock}: no answer")),
        }
    }));
    let held_up: Vec<_> = held_up.await.into_iter().flatten().collect();
    assert!(held_up.is_empty(), "the host is held up by a tenant's locks: {held_up:#?}");
    for holding in holding {
        holding.release().await;
    }
    fixture.finish().await;
}

/// What could go wrong: a process that hangs with a lock of the host's stops all others for ever,
/// and nobody says which.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_lock_of_the_host_is_told_for_whom() {
    let fixture = InboxFixture::new().await;
    let victim = fixture.tenant("victim", "").await;
    let leaving = fixture.tenant("leaving", "").await;
    let database = InboxFixture::another_database().await;
    let apart = fixture.tenant_at("apart", &database, "").await;
    let (mut here, mut there) = (fixture.superuser().await, database.connect().await.unwrap());
    for number in (1..=4).chain([leaving.tenant_id * 16 + 7]) {
        sqlx::query("SELECT pg_advisory_lock(0, $1)")
            .bind(number)
            .execute(&mut here)
            .await
            .unwrap();
    }
    sqlx::query("SELECT pg_advisory_lock(0, $1)")
        .bind(apart.tenant_id * 16 + 6)
        .execute(&mut there)
        .await
        .unwrap();
    let backend = async |connection| {
        sqlx::query_scalar::<_, i32>("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
    };
    let holders = [backend(&mut here).await, backend(&mut there).await];
    // Nobody waits for whoever takes a tenant away: it is looked at again.
    let deleted = fixture.control.tenants().delete("leaving").await.unwrap();
    assert!(!fixture.control.tenants().remove(&deleted).await.unwrap());
    let waiting: Vec<_> = HOSTS.into_iter().filter(|lock| *lock != "tenant removal").collect();
    let told = futures::future::join_all(waiting.iter().map(async |lock| {
        let answer = timeout(DEADLINE, needs(&fixture, lock, &victim, &apart)).await;
        (lock, answer.unwrap_or_else(|_| panic!("`{lock}` waits for ever")))
    }));
    for (lock, answer) in told.await {
        let error = answer.expect_err(lock);
        assert!(
            matches!(error, InboxError::HostLocked { .. }) && error.is_retryable(),
            "{lock}: {error:?}"
        );
        let text = error.to_string();
        assert!(
            holders.iter().any(|pid| text.contains(&format!("process {pid} ")))
                && text.contains("try again"),
            "{lock}: {text}"
        );
        println!("{lock}: {text}");
    }
    here.close().await.unwrap();
    there.close().await.unwrap();
    // And nothing is left of it.
    for lock in waiting {
        needs(&fixture, lock, &victim, &apart)
            .await
            .unwrap_or_else(|error| panic!("{lock}: {error}"));
    }
    assert!(fixture.control.tenants().remove(&deleted).await.unwrap());
    fixture.finish().await;
}

/// What could go wrong: two hosts write a list of privileges at the same time, and PostgreSQL
/// refuses it to one of them.
#[tokio::test(flavor = "multi_thread")]
async fn who_writes_privileges_waits_for_whoever_does() {
    const GRANTS: i32 = 2;
    let fixture = InboxFixture::new().await;
    let victim = fixture.tenant("victim", "CREATE TABLE item (id int PRIMARY KEY);").await;
    let leaving = fixture.tenant("leaving", "").await;
    let database = InboxFixture::another_database().await;
    let apart = fixture.tenant_at("apart", &database, "").await;
    let deleted = fixture.control.tenants().delete("leaving").await.unwrap();
    let name: String = sqlx::query_scalar("SELECT current_database()::text")
        .fetch_one(&fixture.pool)
        .await
        .unwrap();
    for what in ["migrate", "grants", "capture", "tenant removal"] {
        let mut other = fixture.superuser().await;
        let write = format!(
            "BEGIN; SELECT pg_advisory_xact_lock(0, {GRANTS}); REVOKE ALL ON DATABASE \"{name}\" \
                FROM {0}; \
             REVOKE ALL ON SCHEMA oncebox_host FROM {0}; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA \
             oncebox_host FROM {0}",
            leaving.login
        );
        other.execute(AssertSqlSafe(write)).await.unwrap();
        let writing = async {
            match what {
                "tenant removal" => {
                    fixture.control.tenants().remove(&deleted).await.map(|removed| assert!(removed))
                }
                what => needs(&fixture, what, &victim, &apart).await,
            }
        };
        let waited_for = async {
            fixture
                .until(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = \
                    current_database() AND wait_event_type = 'Lock')",
                )
                .await;
            other.execute("COMMIT").await.unwrap();
        };
        let (written, ()) = tokio::join!(writing, waited_for);
        written.unwrap_or_else(|error| panic!("{what}: {error}"));
        other.close().await.unwrap();
    }
    fixture.finish().await;
}

/// What could go wrong: a release changes which locks a claim takes, and a host of the one before,
/// which was claiming while the database was brought up to date, goes on under the locks of before,
/// since it has the function's old text in its hands. The migration of such a release does what
/// migrations/README.md says.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_waits_for_other_locks_is_refused() {
    const CHANGE: &str = "ALTER TABLE oncebox.consumer ADD COLUMN locks int; ALTER TABLE \
        oncebox.inbox ADD COLUMN locks int; ALTER SEQUENCE oncebox.ordering_place RENAME TO \
        ordering_place_2";
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let (mut session, secret) =
        (fixture.guest(&consumer.tenant).await, fixture.secret(&consumer.tenant));
    let consumer_id = consumer.row.consumer_id;
    store(&mut session, &secret, consumer_id, "before").await.unwrap();

    let mut migration = fixture.superuser().await;
    migration.execute(sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; {CHANGE}")))).await.unwrap();
    let claiming = tokio::spawn({
        let secret = secret.clone();
        async move { (store(&mut session, &secret, consumer_id, "meanwhile").await, session) }
    });
    fixture
        .until(
            "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND database = (SELECT oid \
        FROM pg_database WHERE datname = current_database())",
        )
        .await;
    migration.execute("COMMIT").await.unwrap();
    let (refused, mut session) = claiming.await.unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(code(&refused), "42P01", "{refused}");
    println!("{refused}");
    migration.close().await.unwrap();
    let stored =
        async || fixture.rows().await.into_iter().map(|row| row.message_id).collect::<Vec<_>>();
    assert_eq!(stored().await, ["before"]);

    // The text of the new release claims, also in a session that was there, and no host of the one
    // before puts its own back.
    let before = Functions::of_this_program();
    let after = Functions {
        schema_number: before.schema_number + 1,
        texts: (before.texts.iter())
            .map(|text| text.replace("ordering_place", "ordering_place_2").into())
            .collect(),
    };
    for program in [&after, &before] {
        schema::migrate_with(&fixture.superuser_options(), program).await.unwrap();
    }
    store(&mut session, &secret, consumer_id, "meanwhile").await.unwrap();
    assert_eq!(stored().await, ["before", "meanwhile"]);
    session.close().await.unwrap();
    fixture.finish().await;
}

/// Store a message, as a host does with `ack = "after_insert"`.
async fn store(
    session: &mut PgConnection,
    secret: &[u8],
    consumer_id: i32,
    id: &str,
) -> Result<(), sqlx::Error> {
    const CLAIM: &str = "SELECT * FROM oncebox_host.claim($1, $2, 0, 'received', '{}', \
        't', 0, ARRAY[$3], '{0}', '{0}', '{}', '{}', \
        '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', NULL, NULL)";
    session.execute("BEGIN READ WRITE").await?;
    let claimed =
        sqlx::query(CLAIM).bind(secret).bind(consumer_id).bind(id).execute(&mut *session).await;
    session.execute(if claimed.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
    claimed.map(drop)
}
