//! A tenant may name a database of its own: its inbox and its tables live there, what the host
//! decides reaches it before the host says so, and whatever dies between the two databases, nothing
//! is lost, doubled or completed by a version that was withdrawn. S2-008, D14. The crash tests with
//! such a tenant are in `crash_recovery`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use oncebox_control::{
    Action, Control, DatabaseUrl, DeploymentRole, Filter, JobFilter, MasterKey, NewDeployment,
    NewVersion, Slot,
};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_inbox::SessionSettings;
use oncebox_model::InboxError;
use oncebox_tests::{
    host::{HostFixture, Options},
    inbox::{InboxFixture, PlainHandlers, Script, TestConsumer, deliver, record, records},
    job::{inbox_job, work_off},
    load::{Load, Work},
    postgres::{TestDatabase, create_database, drop_database, with_database},
    temp_dir::TempDir,
    wait::DEADLINE,
};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

const LEDGER: &[u8] = include_bytes!("../../../guest-examples/components/ledger.wasm");

/// A tenant with a database of its own, one without, and a consumer of each.
struct DatabaseFixture {
    inbox: InboxFixture,
    database: TestDatabase,
    own: TestConsumer,
}

impl DatabaseFixture {
    async fn new() -> Self {
        let inbox = InboxFixture::new().await;
        let database = InboxFixture::another_database().await;
        let tenant = inbox.tenant_at("acme", &database, "").await;
        let own = inbox.consumer(&tenant, "orders", "retry = { attempts_max = 1 }").await;
        inbox.control.tenant_databases().replicate(&tenant).await.unwrap();
        Self { inbox, database, own }
    }

    fn control(&self) -> &Control {
        &self.inbox.control
    }

    /// Connections of the host's login to the tenant's database.
    fn pool(&self) -> PgPool {
        self.control().tenant_databases().get(&self.own.tenant).unwrap().pool
    }

    async fn number(&self, sql: &str) -> i64 {
        number(&self.pool(), sql).await
    }

    async fn effects(&self) -> i64 {
        self.number(&format!("SELECT count(*) FROM {}.effect", self.own.tenant.schema_name)).await
    }

    /// A version that is live, alone or as a canary of another one; its bytes are its name.
    async fn deploy(&self, name: &str) -> oncebox_control::Deployment {
        let new = NewVersion {
            component: name.as_bytes(),
            source_digest: None,
            report: &serde_json::Value::Null,
            is_compiled: true,
        };
        let version = self.control().versions().add("acme", "h", new).await.unwrap();
        let new = NewDeployment::stable("*", "h", &hex::encode(&version.digest));
        self.control().deployments().deploy("acme", "orders", &new).await.unwrap()
    }

    /// A host that runs a version of a generation.
    fn host(&self, deployment: &oncebox_control::Deployment) -> Arc<oncebox_inbox::ConsumerInbox> {
        let script = Script::version(self.inbox.script.clone(), deployment.version_id);
        let handlers =
            PlainHandlers::resolving(deployment.generation, move |_| Some(script.clone()));
        self.inbox.host_with(&self.own, handlers, &SessionSettings::default())
    }

    async fn rollback(&self, redrive: bool) -> Result<oncebox_control::Rollback, InboxError> {
        let slot = Slot { event_type: "*".to_owned(), event_versions: None };
        self.control()
            .deployments()
            .roll_back("acme", "orders", &slot, None, Some("why"), redrive)
            .await
    }

    /// What the host's database leaves when the process dies right after it has committed a
    /// withdrawal.
    async fn die_after_the_first_commit(&self, deployment_id: i64) {
        let sql = format!(
            "UPDATE oncebox.consumer SET generation = generation + 1, generation_required = \
                generation + 1; \
             UPDATE oncebox.deployment SET ended_at = now(), ended_how = 'rolled_back', \
             redrive_pending = true WHERE deployment_id = {deployment_id}"
        );
        self.inbox.execute(sql).await;
    }

    /// Generation, generation that is required, hash of the secret: in both databases.
    async fn both(&self) -> [(i64, i64, Vec<u8>); 2] {
        const SAID: &str = "SELECT c.generation, c.generation_required, t.secret_hash FROM \
            oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) WHERE t.name = 'acme'";
        let said = async |pool: &PgPool| sqlx::query_as(SAID).fetch_one(pool).await.unwrap();
        [said(&self.inbox.pool).await, said(&self.pool()).await]
    }

    async fn finish(self) {
        let [truth, mirror] = self.both().await;
        assert_eq!(truth, mirror, "the mirror is not equal");
        assert_eq!(self.number("SELECT count(*) FROM oncebox.guard").await, 0);
        self.inbox.finish().await;
    }
}

async fn number(pool: &PgPool, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(pool)
        .await
        .unwrap_or_else(|error| panic!("`{sql}`: {error}"))
}

/// What could go wrong: a part of the tenant is made in, or asked of, the wrong database, so that
/// effect and claim are apart; or people do not find its messages.
#[tokio::test(flavor = "multi_thread")]
async fn inbox_and_tables_live_in_the_tenants_own_database() {
    let fixture = DatabaseFixture::new().await;
    let neighbour = fixture.inbox.tenant("plain", "").await;
    let neighbour = fixture.inbox.consumer(&neighbour, "orders", "").await;
    let live = fixture.deploy("one").await;
    let host = fixture.host(&live);
    deliver(&host, &records(["a", "b"])).await;
    deliver(&host, &records(["a", "b"])).await;
    deliver(&fixture.inbox.host(&neighbour), &[record(0, "c", "reject")]).await;

    assert_eq!(fixture.effects().await, 2, "each message had its effect once, there");
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'").await,
        2
    );
    assert_eq!(
        fixture.inbox.number("SELECT count(*) FROM oncebox.inbox").await,
        1,
        "the neighbour's alone is here"
    );
    let here = format!(
        "SELECT count(*) FROM pg_namespace WHERE nspname = '{}'",
        fixture.own.tenant.schema_name
    );
    assert_eq!(fixture.inbox.number(here).await, 0, "the schema is not here");

    let all = fixture
        .control()
        .messages()
        .inbox_list(&Filter { limit: 10, ..Filter::default() })
        .await
        .unwrap();
    let told: Vec<_> =
        all.iter().map(|row| (row.tenant.as_str(), row.message_id.as_str())).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.contains(&("acme", "a")) && told.contains(&("plain", "c")), "{told:?}");
    let newest = fixture
        .control()
        .messages()
        .inbox_list(&Filter { limit: 1, ..Filter::default() })
        .await
        .unwrap();
    assert_eq!(newest[0].message_id, "c", "newest first, over all databases");
    let shown = fixture.control().messages().inbox_show("acme", "orders", "a").await.unwrap();
    assert_eq!(
        shown.row.version.as_deref(),
        Some(hex::encode(&live.digest).as_str()),
        "versions have their names"
    );

    // The record of a migration is beside the tables; the host's copy has its audit row, once.
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let held = fixture.control().tenant_databases().migrations("acme").await.unwrap();
    assert_eq!(held.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["tables"]);
    let audit = "SELECT count(*) FROM oncebox.audit WHERE action = 'tenant.migrate' AND subject = \
        'acme/tables'";
    assert_eq!(fixture.inbox.number(audit).await, 1);
    let requires = NewDeployment {
        requires_migration: Some("tables".into()),
        ..NewDeployment::stable("x", "h", &hex::encode(&live.digest))
    };
    fixture.control().deployments().deploy("acme", "orders", &requires).await.unwrap();
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a database is taken that cannot do it, or that somebody else uses.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_the_place_is_refused_and_nothing_is_made() {
    let fixture = DatabaseFixture::new().await;
    let control = fixture.control();
    let refused = async |url: &str, expected: &str| {
        let error = control
            .tenants()
            .create_dedicated("other", &DatabaseUrl::parse(url).unwrap())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
        assert!(matches!(control.tenants().get("other").await, Err(InboxError::NotFound(_))));
    };
    let host_url = fixture.inbox.url();
    refused(&host_url, "is an installation's own database").await;

    let empty = format!("own_{:08x}", rand::random::<u32>());
    let url = create_database(&empty).await.unwrap();
    let pool = PgPool::connect_lazy(&url).unwrap();
    sqlx::query("CREATE TABLE public.theirs (n int)").execute(&pool).await.unwrap();
    refused(&url, "it holds `public.theirs`").await;
    assert_eq!(
        number(&pool, "SELECT count(*) FROM pg_namespace WHERE nspname = 'oncebox'").await,
        0,
        "nothing was made there"
    );
    sqlx::query("DROP TABLE public.theirs").execute(&pool).await.unwrap();
    sqlx::query(AssertSqlSafe(format!(
        "ALTER DATABASE {empty} SET default_transaction_read_only = on"
    )))
    .execute(&pool)
    .await
    .unwrap();
    refused(&url, "it is a replica or read-only").await;
    pool.close().await;
    let pool = PgPool::connect_lazy(&with_database(&url, "postgres").unwrap()).unwrap();
    sqlx::query(AssertSqlSafe(format!("ALTER DATABASE {empty} RESET ALL")))
        .execute(&pool)
        .await
        .unwrap();
    let login = format!("weak_{:08x}", rand::random::<u32>());
    sqlx::query(AssertSqlSafe(format!("CREATE ROLE {login} LOGIN PASSWORD 'x1y2z3'")))
        .execute(&pool)
        .await
        .unwrap();
    let weak =
        url.split_once('@').map(|(_, rest)| format!("postgres://{login}:x1y2z3@{rest}")).unwrap();
    refused(&weak, "the login may not create roles and schemas").await;
    sqlx::query(AssertSqlSafe(format!("DROP ROLE {login}"))).execute(&pool).await.unwrap();
    refused("postgres://nobody:s3cr3t@127.0.0.1:9/none", "cannot hold tenants").await;

    // Another tenant of this installation may be there; another installation's may not.
    let tenant = control
        .tenants()
        .create_dedicated("other", &DatabaseUrl::parse(&url).unwrap())
        .await
        .unwrap();
    let stranger = InboxFixture::new().await;
    let error = stranger
        .control
        .tenants()
        .create_dedicated("acme", &DatabaseUrl::parse(&url).unwrap())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("one for other tenants"), "{error}");
    stranger.finish().await;
    let theirs = Control::new(
        url.parse().unwrap(),
        MasterKey::parse(&MasterKey::generate()).unwrap(),
        "test",
    );
    let error = theirs.tenant_databases().check_host_database().await.unwrap_err().to_string();
    assert!(error.contains("give the host a database of its own"), "{error}");
    theirs.pool.close().await;

    control.tenants().take_back(&tenant).await.unwrap();
    let left = format!("SELECT count(*) FROM pg_roles WHERE rolname LIKE '{}%'", tenant.login);
    assert_eq!(number(&pool, &left).await, 0, "its roles are gone");
    pool.close().await;
    drop_database(&empty).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a job of a tenant with a database of its own looks into the host's, leaves
/// no trace in the audit log, or no host finds it.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_carried_out_in_the_tenants_database() {
    let fixture = DatabaseFixture::new().await;
    let live = fixture.deploy("live").await;
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let host = fixture.host(&live);
    deliver(&host, &[record(0, "a", "park"), record(1, "b", "park"), record(2, "c", "")]).await;
    let discard = inbox_job(Action::Discard, "orders", JobFilter::default());
    let jobs = fixture.control().jobs();
    let own = fixture.own.tenant.database.clone().unwrap();
    let waiting = async |database: &str| {
        let inbox = fixture.control().tenant_databases().by_name(database).await.unwrap();
        let open = jobs.open(&inbox).await.unwrap();
        open.iter().any(|jobs| jobs.is_waiting)
    };
    let job_id = jobs.start("acme", &discard).await.unwrap().job_id;
    assert_eq!((waiting("").await, waiting(&own).await), (false, true));
    let done = work_off(fixture.control(), "acme", job_id).await.unwrap();
    assert_eq!((done.changed, done.left_out.0.len()), (2, 0));
    let discarded = "SELECT count(*) FROM oncebox.inbox WHERE status = 'discarded'";
    assert_eq!(fixture.number(discarded).await, 2);
    let audit = fixture.control().audit().list(Some("acme"), 100).await.unwrap();
    let of_job = |action: &str| audit.iter().filter(|entry| entry.action == action).count();
    assert_eq!((of_job("inbox.discard"), of_job("job.done")), (1, 1));
    fixture.finish().await;
}

/// What could go wrong: a withdrawn version completes messages there after somebody was told that
/// it cannot, or what it failed is forgotten, because the process died between the two databases or
/// the second is away.
#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_stands_in_both_databases_before_it_is_answered() {
    let fixture = DatabaseFixture::new().await;
    let (good, bad) = (fixture.deploy("good").await, fixture.deploy("bad").await);
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let stale = fixture.host(&bad);
    deliver(&stale, &[record(0, "a", "before 2 reject"), record(1, "b", "")]).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'failed_terminal'").await,
        1
    );

    let rollback = fixture.rollback(true).await.unwrap();
    assert_eq!((rollback.live.version_id, rollback.redriven), (good.version_id, 1));
    let [truth, mirror] = fixture.both().await;
    assert_eq!(truth, mirror, "the answer came before the mirror");
    let mut partition = oncebox_tests::inbox::take(&stale).await;
    assert!(matches!(
        partition.process(&[record(2, "c", "")]).await,
        Err(InboxError::StaleDeployments)
    ));
    partition.close().await;

    // Dead between the two commits: nobody was told, and until a look the withdrawn version may go
    // on.
    let live = fixture.host(&rollback.live);
    fixture.inbox.retry_until_settled_in(&live, &fixture.pool()).await;
    assert_eq!(fixture.effects().await, 2, "what it had failed ran again, with what is live");
    let worse = fixture.deploy("worse").await;
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let stale = fixture.host(&worse);
    deliver(&stale, &[record(3, "d", "before 2 reject")]).await;
    fixture.die_after_the_first_commit(worse.deployment_id).await;
    let [truth, mirror] = fixture.both().await;
    assert!(truth.1 > mirror.1, "what is required there never runs ahead");
    for _ in 0..2 {
        // Any host's look, and again.
        fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    }
    let [truth, mirror] = fixture.both().await;
    assert_eq!(truth, mirror);
    assert_eq!(
        fixture.inbox.number("SELECT count(*) FROM oncebox.deployment WHERE redrive_pending").await,
        0
    );
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'd' AND status \
        = 'failed_retryable'"
            )
            .await,
        1
    );
    let mut partition = oncebox_tests::inbox::take(&stale).await;
    assert!(matches!(
        partition.process(&[record(4, "e", "")]).await,
        Err(InboxError::StaleDeployments)
    ));
    partition.close().await;
    let handlers =
        fixture.host(&oncebox_control::Deployment { generation: truth.0, ..good.clone() });
    fixture.inbox.retry_until_settled_in(&handlers, &fixture.pool()).await;
    assert_eq!(fixture.effects().await, 3);
    fixture.finish().await;
}

/// What could go wrong: a withdrawal is said to be done while the tenant's database is away and
/// does not know.
#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_that_did_not_reach_the_tenants_database_says_so() {
    let fixture = DatabaseFixture::new().await;
    let (good, bad) = (fixture.deploy("good").await, fixture.deploy("bad").await);
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let allow = async |allowed: bool| {
        fixture
            .inbox
            .execute(format!(
                "ALTER DATABASE {} ALLOW_CONNECTIONS {allowed}",
                fixture.database.name()
            ))
            .await;
    };
    allow(false).await;
    let error = fixture.rollback(true).await.unwrap_err();
    assert!(matches!(error, InboxError::NotPropagated { .. }), "{error:?}");
    assert!(
        error.to_string().contains("hosts that reach it may still complete messages"),
        "{error}"
    );
    let live =
        fixture.control().deployments().list(fixture.own.row.consumer_id, false).await.unwrap();
    assert_eq!(live[0].version_id, good.version_id, "the change is made");
    assert!(bad.version_id != good.version_id);
    allow(true).await;
    fixture.control().tenant_databases().prepare(&fixture.own.tenant).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: somebody meddles with the mirror, restores it from a backup or loses its
/// roles, and the tenant stands still, or goes on under what does not hold any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_was_damaged_is_made_equal() {
    let fixture = DatabaseFixture::new().await;
    let live = fixture.deploy("one").await;
    let tenant = &fixture.own.tenant;
    fixture.control().tenant_databases().replicate(tenant).await.unwrap();
    let host = fixture.host(&live);
    deliver(&host, &records(["a"])).await;
    let login = &tenant.login;
    for (number, damage) in [
        "UPDATE oncebox.tenant SET secret_hash = '\\x00', name = 'x'".to_owned(),
        "UPDATE oncebox.consumer SET generation_required = 1000, retention_class = 4, name = 'y'"
            .to_owned(),
        "UPDATE oncebox.consumer SET generation_required = 0".to_owned(),
        "DELETE FROM oncebox.consumer".to_owned(),
        format!("ALTER ROLE {login} NOLOGIN; UPDATE oncebox.tenant SET secret_hash = '\\x00'"),
        format!(
            "ALTER ROLE {login} PASSWORD 'changed'; UPDATE oncebox.tenant SET secret_hash = \
            '\\x00'"
        ),
        format!("DROP OWNED BY {login}; DROP ROLE {login}"),
        "DELETE FROM oncebox.consumer; DELETE FROM oncebox.tenant".to_owned(),
        // Left by a tenant that was deleted half way.
        "UPDATE oncebox.tenant SET name = 'moved'; INSERT INTO oncebox.tenant (tenant_id, name, \
            schema_name, login, owner_login, secret_hash) \
            OVERRIDING SYSTEM VALUE VALUES (9999, 'acme', 's', 'l', 'o', '')"
            .to_owned(),
    ]
    .into_iter()
    .enumerate()
    {
        sqlx::raw_sql(AssertSqlSafe(damage.clone()))
            .execute(&fixture.pool())
            .await
            .unwrap_or_else(|error| panic!("`{damage}`: {error}"));
        fixture.control().tenant_databases().replicate(tenant).await.unwrap_or_else(|error| {
            panic!(
                "after `{damage}`: \
            {error}"
            )
        });
        let id = format!("m{number}");
        deliver(&fixture.host(&live), &records([id.as_str()])).await;
        assert_eq!(fixture.effects().await, number as i64 + 2, "after `{damage}`");
    }
    sqlx::raw_sql("DELETE FROM oncebox.tenant WHERE tenant_id = 9999")
        .execute(&fixture.pool())
        .await
        .unwrap();

    // Not the mirror but the whole inbox is gone: an empty one would take everything that comes
    // again for new.
    sqlx::raw_sql("DELETE FROM oncebox.installation").execute(&fixture.pool()).await.unwrap();
    for error in [
        fixture.control().tenant_databases().replicate(tenant).await.unwrap_err(),
        fixture.control().tenant_databases().prepare(tenant).await.unwrap_err(),
    ] {
        assert!(
            error.to_string().contains("does not hold its inbox; restore it from a backup"),
            "{error}"
        );
    }
    let give_back =
        "INSERT INTO oncebox.installation (installation_id, is_dedicated) VALUES ($1, true)";
    let id: sqlx::types::Uuid =
        sqlx::query_scalar("SELECT installation_id FROM oncebox.installation")
            .fetch_one(&fixture.inbox.pool)
            .await
            .unwrap();
    sqlx::query(give_back).bind(id).execute(&fixture.pool()).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: writers of the mirror overtake each other, and what is required there goes
/// back to what the slower one had read.
#[tokio::test(flavor = "multi_thread")]
async fn writers_of_the_mirror_never_take_it_back() {
    let fixture = DatabaseFixture::new().await;
    fixture.deploy("one").await;
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..3)
        .map(|_| {
            let (control, tenant, stop) =
                (fixture.control().clone(), fixture.own.tenant.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    control.tenant_databases().replicate(&tenant).await.unwrap();
                }
            })
        })
        .collect();
    let raise = "UPDATE oncebox.consumer SET generation = generation + 1, generation_required = \
        generation + 1 RETURNING generation_required";
    let (mut seen, until) = (0, Instant::now() + Duration::from_secs(3));
    while Instant::now() < until {
        fixture.inbox.number(raise).await;
        let required = fixture.number("SELECT generation_required FROM oncebox.consumer").await;
        let truth = fixture.inbox.number("SELECT generation_required FROM oncebox.consumer").await;
        assert!(seen <= required && required <= truth, "{seen}, {required}, {truth}");
        seen = required;
    }
    assert!(seen > 3, "the writers hardly wrote: {seen}");
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: the password in the URL is shown by a command, an answer, a log or an
/// error.
#[tokio::test(flavor = "multi_thread")]
async fn the_url_is_sealed_and_its_password_never_shown() {
    let fixture = DatabaseFixture::new().await;
    let plain = fixture.database.url();
    let password = plain
        .split_once("://")
        .and_then(|(_, rest)| rest.split_once('@'))
        .map(|(login, _)| login.split_once(':').map_or(login, |(_, p)| p));
    let password = password.unwrap();
    let row: String = sqlx::query_scalar(
        "SELECT t::text || encode(t.database_url, 'escape') FROM \
        oncebox.tenant t WHERE name = 'acme'",
    )
    .fetch_one(&fixture.inbox.pool)
    .await
    .unwrap();
    let tenant = fixture.control().tenants().get("acme").await.unwrap();
    let shown = tenant.database.clone().unwrap();
    assert!(shown.ends_with(fixture.database.name()) && row.contains(&shown), "{shown}");
    let said = [
        row,
        serde_json::to_string(&tenant).unwrap(),
        format!("{:?}", fixture.control().audit().list(None, 50).await.unwrap()),
    ];
    for said in said {
        assert!(!said.contains(plain), "{said}");
        assert!(password.len() < 6 || !said.contains(password), "{said}");
    }
    let stranger = Control::new(
        fixture.inbox.superuser_options(),
        MasterKey::parse(&MasterKey::generate()).unwrap(),
        "test",
    );
    let Err(error) = stranger.tenant_databases().get(&tenant) else {
        panic!("another key opens it")
    };
    assert!(error.to_string().contains("is sealed under the master key"), "{error}");
    fixture.finish().await;
}

/// What could go wrong: passwords or secret change in one database alone, and sessions cannot begin
/// or are denied in the middle of a batch.
#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_rotated_in_both_databases_and_open_sessions_go_on() {
    let mut fixture = DatabaseFixture::new().await;
    let live = fixture.deploy("one").await;
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    let before = fixture.host(&live);
    deliver(&before, &records(["a"])).await;
    for round in 0..2 {
        let rotated = fixture.control().tenants().rotate_credentials("acme").await.unwrap();
        let [truth, mirror] = fixture.both().await;
        assert_eq!(truth, mirror, "the answer came before the mirror");
        if round == 0 {
            deliver(&before, &records(["b"])).await;
        }
        fixture.own.tenant = rotated;
        deliver(&fixture.host(&live), &records([format!("after-{round}").as_str()])).await;
    }
    assert_eq!(fixture.effects().await, 4);
    fixture.finish().await;
}

/// What could go wrong: a tenant is deleted and something of it stays in its database, or somebody
/// who looks at it meanwhile gives it back what was taken away.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_tenant_leaves_nothing_in_its_database_and_its_name_is_free() {
    let fixture = DatabaseFixture::new().await;
    let live = fixture.deploy("one").await;
    fixture.control().tenant_databases().replicate(&fixture.own.tenant).await.unwrap();
    deliver(&fixture.host(&live), &records(["a", "b"])).await;
    let pool = PgPool::connect(fixture.database.url()).await.unwrap();
    let tenant = fixture.control().tenants().delete("acme").await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let looking = tokio::spawn({
        let (control, tenant, stop) = (fixture.control().clone(), tenant.clone(), stop.clone());
        async move {
            while !stop.load(Ordering::Relaxed) {
                let _ = control.tenant_databases().replicate(&tenant).await; // as a host does
            }
        }
    });
    assert!(fixture.control().tenants().remove(&tenant).await.unwrap());
    stop.store(true, Ordering::Relaxed);
    looking.await.unwrap();
    assert_eq!(left_over(&pool, &tenant.login).await, 0, "something is left there");
    assert!(matches!(fixture.control().tenants().get("acme").await, Err(InboxError::NotFound(_))));
    let again = fixture.inbox.tenant_at("acme", &fixture.database, "").await;
    assert_ne!(again.tenant_id, tenant.tenant_id);
    pool.close().await;
    fixture.inbox.finish().await;
}

/// How much a database holds of tenants, where there was one alone.
async fn left_over(pool: &PgPool, login: &str) -> i64 {
    let left = format!(
        "SELECT (SELECT count(*) FROM oncebox.tenant) + (SELECT count(*) FROM oncebox.consumer) + \
            (SELECT count(*) FROM oncebox.inbox) \
            + (SELECT count(*) FROM oncebox.tenant_migration) + (SELECT count(*) FROM pg_roles \
            WHERE rolname LIKE '{login}%') \
            + (SELECT count(*) FROM pg_namespace WHERE nspname ~ '^t_')"
    );
    number(pool, &left).await
}

// With real hosts -----------------------------------------------------------------------------

fn own() -> Options {
    Options { own_database: true, ..Options::default() }
}

/// A tenant made by a process that dies between the two databases, and a withdrawal by one, are
/// finished by any host that runs.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_process_left_between_the_databases_is_finished_by_a_host() {
    finished_by_a_host().await.unwrap();
}

async fn finished_by_a_host() -> Result<()> {
    let fixture = HostFixture::with(own()).await?;
    let other = InboxFixture::another_database().await;
    let said = fixture.command(
        &["tenant", "create", "half"],
        &[
            ("ONCEBOX_FAILPOINT", "tenant_database:create:after"),
            ("ONCEBOX_TENANT_DATABASE_URL", other.url()),
        ],
    )?;
    ensure!(!said.status.success(), "it died");
    let half = fixture.control.tenants().get("half").await?;
    let bad = fixture
        .control
        .versions()
        .deploy_compiled(&fixture.tenant.name, "payments", second(), &twin())
        .await?;
    let host = fixture.start_ready("a", &[]).await?;
    fixture.send(&Load::of([Work::Pay; 20])).await?;
    fixture.wait_settled().await?;
    host.stop().await?;
    for point in [
        "tenant_database:replicate:before",
        "tenant_database:replicate:after",
        "tenant_database:redrive:before",
        "tenant_database:redrive:after",
    ] {
        let deployment = fixture
            .control
            .versions()
            .deploy_compiled(&fixture.tenant.name, "payments", second(), &twin())
            .await;
        let deployment = deployment.unwrap_or_else(|_| bad.clone());
        let tenant = &fixture.tenant.name;
        let rollback = [
            "rollback",
            "--tenant",
            tenant,
            "--consumer",
            "payments",
            "--event-type",
            "payment.captured",
            "--redrive",
        ];
        let said = fixture.command(&rollback, &[("ONCEBOX_FAILPOINT", point)])?;
        ensure!(!said.status.success(), "it died at `{point}`: {said:?}");
        let ended = fixture
            .control
            .deployments()
            .get(fixture.consumer_id, deployment.deployment_id)
            .await?;
        ensure!(
            ended.ended_how.as_deref() == Some("rolled_back"),
            "`{point}`: {ended:?}, {said:?}"
        );
        let host = fixture.start("a", &[])?;
        let deadline = Instant::now() + DEADLINE;
        loop {
            const TRUTH: &str = "SELECT generation_required, (SELECT count(*) FROM \
                oncebox.deployment WHERE redrive_pending) FROM oncebox.consumer WHERE consumer_id \
                = $1";
            let (required, pending): (i64, i64) = sqlx::query_as(TRUTH)
                .bind(fixture.consumer_id)
                .fetch_one(&fixture.control.pool)
                .await?;
            let there = fixture
                .number(
                    "SELECT generation_required FROM oncebox.consumer WHERE \
                consumer_id = {consumer}",
                )
                .await?;
            ensure!(there <= required, "what is required there ran ahead");
            if there == required && pending == 0 {
                break;
            }
            ensure!(
                Instant::now() < deadline,
                "`{point}`: required {required}, there {there}, {pending} redrives pending"
            );
            sleep(Duration::from_millis(50)).await;
        }
        host.stop().await?;
    }
    let host = fixture.start_ready("a", &[]).await?;
    let pool = PgPool::connect(other.url()).await?;
    let roles = format!(
        "SELECT count(*) FROM oncebox.tenant t JOIN pg_roles r ON r.rolname IN (t.login, \
            t.owner_login) WHERE t.name = 'half' AND t.login = '{}'",
        half.login
    );
    ensure!(number(&pool, &roles).await == 2, "the tenant is whole");
    pool.close().await;
    fixture.send(&Load::of([Work::Pay; 20]).named("after")).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    host.stop().await
}

fn second() -> NewDeployment {
    NewDeployment {
        role: DeploymentRole::Stable,
        ..NewDeployment::stable("payment.captured", "ledger", "")
    }
}

/// The ledger as another version: other bytes, the same effect.
fn twin() -> Vec<u8> {
    let mut component = LEDGER.to_vec();
    // A custom section at the end, which nothing reads.
    component.extend([0, 6, 4, b't', b'w', b'i', b'n', 0]);
    component
}

/// What could go wrong: a host that was stopped while a version was withdrawn goes on with it in
/// the tenant's own database when it comes back. D11.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_stopped_across_a_rollback_completes_nothing_there_with_the_withdrawn_version()
 {
    across_a_rollback().await.unwrap();
}

async fn across_a_rollback() -> Result<()> {
    // Longer than the pause: a deadline is wall clock, and would charge the pause to the message.
    let fixture = HostFixture::with(Options { deadline_ms: 15_000, ..own() }).await?;
    let (awake, asleep) =
        (fixture.start_ready("a", &[]).await?, fixture.start_ready("b", &[]).await?);
    let stop = AtomicBool::new(false);
    let sending = async {
        for burst in 0.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            fixture
                .send(
                    &Load::of([Work::Pay, Work::Open, Work::Pay, Work::Fails(2)])
                        .named(&format!("b{burst}")),
                )
                .await?;
            sleep(Duration::from_millis(15)).await;
        }
        anyhow::Ok(())
    };
    let roll_back = async {
        fixture
            .until("SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {consumer}", 100)
            .await?;
        let bad = fixture
            .control
            .versions()
            .deploy_compiled(&fixture.tenant.name, "payments", second(), &twin())
            .await?;
        fixture
            .until(
                &format!(
                    "SELECT count(*) FROM oncebox.inbox WHERE version_id = {}",
                    bad.version_id
                ),
                100,
            )
            .await?;
        asleep.signal(libc::SIGSTOP);
        let slot = Slot { event_type: "payment.captured".to_owned(), event_versions: None };
        fixture
            .control
            .deployments()
            .roll_back(&fixture.tenant.name, "payments", &slot, None, Some("wrong"), false)
            .await?;
        // Read where the messages are: a row's time is that of the beginning of its transaction.
        let rolled_back_us =
            fixture.number("SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint").await?;
        sleep(Duration::from_secs(2)).await;
        asleep.signal(libc::SIGCONT);
        sleep(Duration::from_secs(3)).await;
        stop.store(true, Ordering::Relaxed);
        anyhow::Ok((bad.version_id, rolled_back_us))
    };
    let (_, (version, rolled_back_us)) = tokio::try_join!(sending, roll_back)?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    let of = |what: &str| format!("SELECT count(*) FROM oncebox.inbox WHERE version_id {what}");
    let late =
        of(&format!("= {version} AND extract(epoch FROM processed_at) * 1e6 > {rolled_back_us}"));
    ensure!(
        fixture.number(&late).await? == 0,
        "the withdrawn version completed messages in transactions that began after the rollback"
    );
    ensure!(
        fixture
            .number(&of(&format!(
                "<> {version} AND extract(epoch FROM processed_at) * 1e6 > {rolled_back_us}"
            )))
            .await?
            > 0
    );
    awake.stop().await?;
    asleep.stop().await?;
    fixture.check().await
}

/// What could go wrong: a tenant's database goes away and comes back, and its messages are acked
/// without their effect, repeated or charged with it; or others on the same host stand still with
/// it. Show 6, S1-105.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_whose_database_is_away_fails_alone_and_goes_on_when_it_is_back() {
    away_and_back().await.unwrap();
}

async fn away_and_back() -> Result<()> {
    let folder = TempDir::new("own");
    let options = PostgresOptions::new(folder.path()).tcp(true);
    let mut postgres = spawn_blocking(move || PrivatePostgres::start(options)).await??;
    let fixture =
        HostFixture::with(Options { own_postgres: Some(postgres.url()), ..own() }).await?;
    let neighbour = fixture.neighbour(20).await?;
    let load =
        Load::of((0..400).map(|number| if number % 10 == 0 { Work::Fails(2) } else { Work::Pay }));
    fixture.open_accounts(&load).await?;
    let host = fixture.start_ready("a", &[]).await?;
    neighbour.wait_effects(20).await?;
    for (outage, chunk) in load.deliveries.chunks(200).enumerate() {
        let before = fixture.number("SELECT count(*) FROM {schema}.ledger_entry").await?;
        fixture.send(&Load { deliveries: chunk.to_vec() }).await?;
        fixture.until("SELECT count(*) FROM {schema}.ledger_entry", before + 10).await?;
        postgres.kill()?;
        if outage == 1 {
            host.kill().await?;
        }
        let host = if outage == 1 { Some(fixture.start("a", &[])?) } else { None };
        let started = Instant::now();
        let first = 20 * (outage + 1);
        neighbour.send(first, 20).await?;
        neighbour.wait_effects(first as i64 + 20).await.context("the neighbour stands still")?;
        println!("outage {outage}: the neighbour's 20 messages took {:?}", started.elapsed());
        postgres.start_again()?;
        fixture.wait_settled().await?;
        fixture.check().await?;
        if let Some(host) = host {
            host.stop().await?;
        }
    }
    drop(fixture);
    drop(postgres);
    Ok(())
}
