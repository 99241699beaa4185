//! Tenants are placed over several databases: by weight, each in the one that its row names and in
//! no other, and a server that is away or slow costs its own tenants alone.
//!
//! `ONCEBOX_PLACED_TENANTS` says how many tenants there are over four servers (24 by default).

use std::time::Duration;

use futures::{StreamExt, stream};
use oncebox_control::{Control, DatabaseUrl, Filter, HostLimits, NamedDatabase, NamedDatabases};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::{
    cli::{Access, CliFixture},
    inbox::{InboxFixture, deliver, record},
    postgres::TestDatabase,
    proxy::Proxy,
    temp_dir::TempDir,
    wait::{self, DEADLINE},
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::time::Instant;

use crate::many_tenants::{ManyTenants, load, wait_consumers};

/// A host's database, and two in which tenants are placed.
struct PlacementFixture {
    inbox: InboxFixture,
    /// A process whose settings name no database.
    plain: Control,
    databases: [TestDatabase; 2],
}

impl PlacementFixture {
    /// Tenants are placed in `one` with a weight of 1, and in `two` with this one.
    async fn new(weight_of_two: u32) -> Self {
        let mut inbox = InboxFixture::new().await;
        let (one, two) =
            (InboxFixture::another_database().await, InboxFixture::another_database().await);
        let plain = inbox.control.clone();
        inbox.control =
            process(&plain, &[("one", one.url(), 1), ("two", two.url(), weight_of_two)]);
        Self { inbox, plain, databases: [one, two] }
    }

    fn urls(&self) -> [&str; 2] {
        [self.databases[0].url(), self.databases[1].url()]
    }

    /// A process whose settings name other databases.
    fn process(&self, named: &[(&str, &str, u32)]) -> Control {
        process(&self.plain, named)
    }
}

fn process(plain: &Control, named: &[(&str, &str, u32)]) -> Control {
    let databases = named.iter().map(|(name, url, weight)| NamedDatabase {
        name: (*name).to_owned(),
        url: DatabaseUrl::parse(url).unwrap(),
        weight: *weight,
        connections_max: 4,
    });
    plain.clone().placing_in(NamedDatabases::new(databases).unwrap())
}

/// The number of schemas of tenants in a database.
async fn schemas(url: &str) -> i64 {
    const SCHEMAS: &str = "SELECT count(*) FROM pg_namespace WHERE nspname ~ '^t_'";
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::query_scalar(SCHEMAS).fetch_one(&mut connection).await.unwrap()
}

/// The numbers of tenants in the databases, by name.
async fn named(control: &Control) -> Vec<(String, u64)> {
    let shown = control.tenant_databases().named().await.unwrap();
    shown.into_iter().map(|shown| (shown.name, shown.tenants)).collect()
}

/// What could go wrong: all tenants land in one database; effect and inbox are in different ones; a
/// loop of the host goes over a database once for each of its tenants, or over one tenant alone; a
/// process whose settings do not name a database takes the host's for it.
#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_placed_by_weight_and_live_where_they_are_placed() {
    let fixture = PlacementFixture::new(3).await;
    let [one, two] = fixture.urls();
    let control = &fixture.inbox.control;
    let here = fixture.plain.tenants().create("here").await.unwrap();
    let mut tenants = Vec::new();
    for number in 0..8 {
        tenants.push(fixture.inbox.tenant(&format!("t-{number}"), "").await);
    }
    assert_eq!(named(control).await, [("one".to_owned(), 2), ("two".to_owned(), 6)]);
    control.tenants().create_in("named", "one").await.unwrap();
    assert_eq!((schemas(one).await, schemas(two).await), (3, 6));

    // Each database once, the host's first.
    let all = control.tenant_databases().all().await.unwrap();
    assert_eq!(
        all.iter().map(|of| of.name()).collect::<Vec<_>>(),
        [None, Some("one"), Some("two")]
    );

    for tenant in &tenants {
        let database = control.tenant_databases().get(tenant).unwrap();
        let query = sqlx::query_scalar("SELECT current_database()");
        let name: String = query.fetch_one(&database.pool).await.unwrap();
        let place = usize::from(tenant.database_name() == Some("two"));
        assert_eq!(name, fixture.databases[place].name());
        control.tenant_databases().prepare(tenant).await.unwrap();
    }
    // No row holds an address: another process refuses them, and makes no tenant in the host's.
    for error in [
        fixture.plain.tenant_databases().prepare(&tenants[0]).await.unwrap_err(),
        fixture.plain.tenant_databases().session_target(&tenants[0]).err().unwrap(),
        fixture.plain.tenants().create("elsewhere").await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("in `[[databases]]` of this process"), "{error}");
    }
    assert_eq!((schemas(one).await, schemas(two).await), (3, 6));

    // Inbox and effect are together, and one look over a database finds all of its tenants.
    let in_one: Vec<_> =
        tenants.iter().filter(|tenant| tenant.database_name() == Some("one")).collect();
    for tenant in &in_one {
        let consumer = fixture.inbox.consumer(tenant, "orders", "").await;
        control.tenant_databases().replicate(tenant).await.unwrap();
        deliver(&fixture.inbox.host(&consumer), &[record(0, "m0", "")]).await;
        let effects = format!("SELECT count(*) FROM {}.effect", tenant.schema_name);
        let pool = control.tenant_databases().get(tenant).unwrap().pool;
        let query = sqlx::query_scalar::<_, i64>(AssertSqlSafe(effects));
        assert_eq!(query.fetch_one(&pool).await.unwrap(), 1);
    }
    let filter = Filter { limit: 10, ..Filter::default() };
    let listed = control.messages().inbox_list(&filter).await.unwrap();
    let mut listed: Vec<_> = listed.iter().map(|row| row.tenant.as_str()).collect();
    listed.sort_unstable();
    assert_eq!(listed, in_one.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>());
    let measured = control.storage().report(&all[1]).await.unwrap();
    let found: Vec<_> = measured.tenants.iter().map(|storage| storage.tenant.as_str()).collect();
    assert_eq!(found, in_one.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>());
    let report = control.retention().report(&all[1]).await.unwrap();
    assert_eq!(report.label.database.as_deref(), Some("one"));

    // A tenant that goes leaves the others.
    control.tenants().take_back(&here).await.unwrap();
    let gone = control.tenants().get("named").await.unwrap();
    control.tenants().take_back(&gone).await.unwrap();
    assert_eq!((schemas(one).await, schemas(two).await), (2, 6));
    fixture.inbox.finish().await;
}

/// What could go wrong: an operator exchanges two URLs, or a server comes back empty, and each
/// tenant gets a new inbox that knows no message; a tenant's own URL leads into a database that is
/// shared; two kinds of tenants share one.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_is_used_as_itself_alone() {
    let fixture = PlacementFixture::new(1).await;
    let [one, two] = fixture.urls();
    let control = &fixture.inbox.control;
    let tenants = [fixture.inbox.tenant("a", "").await, fixture.inbox.tenant("b", "").await];
    assert_eq!(named(control).await, [("one".to_owned(), 1), ("two".to_owned(), 1)]);

    // Exchanged: nothing is made in the wrong one.
    let exchanged = fixture.process(&[("one", two, 1), ("two", one, 1)]);
    for tenant in &tenants {
        for error in [
            exchanged.tenant_databases().prepare(tenant).await.unwrap_err(),
            exchanged.tenant_databases().replicate(tenant).await.unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("does not hold the inboxes of its tenants; it is"), "{text}");
            assert!(text.contains("`[[databases]]`"), "{text}");
        }
    }
    let error = exchanged.tenants().create("c").await.unwrap_err().to_string();
    assert!(error.contains("one for other tenants"), "{error}");
    let found = exchanged.doctor().run(HostLimits { connections_max: 4 }).await.unwrap();
    let found: Vec<_> = found.iter().filter(|found| found.check == "databases").collect();
    assert!(found.len() == 2 && found[0].found.contains("it is database `"), "{found:?}");
    assert_eq!((schemas(one).await, schemas(two).await), (1, 1));

    // An address of a tenant's own does not lead into a shared database, nor the other way round.
    let url = DatabaseUrl::parse(one).unwrap();
    assert!(fixture.plain.tenants().create_dedicated("c", &url).await.is_err());
    let own = InboxFixture::another_database().await;
    let url = DatabaseUrl::parse(own.url()).unwrap();
    fixture.plain.tenants().create_dedicated("own", &url).await.unwrap();
    let other = fixture.process(&[("three", own.url(), 1)]);
    assert!(other.tenants().create("c").await.is_err());
    let of_host = fixture.process(&[("host", &fixture.inbox.url(), 1)]);
    assert!(of_host.tenants().create("c").await.is_err());

    // Lost and made anew, empty: not taken again while tenants are in it.
    let empty = InboxFixture::another_database().await;
    let lost = fixture.process(&[("one", empty.url(), 1)]);
    let error = lost.tenants().create_in("c", "one").await.unwrap_err().to_string();
    assert!(error.contains("has tenants, such as `a`") && error.contains("backup"), "{error}");
    let error = lost.tenant_databases().prepare(&tenants[0]).await.unwrap_err().to_string();
    assert!(error.contains("does not hold the inboxes of its tenants"), "{error}");
    assert_eq!(schemas(empty.url()).await, 0);

    let error = control.tenants().create_in("c", "four").await.unwrap_err().to_string();
    assert!(error.contains("no database is named `four`"), "{error}");
    assert_eq!(control.tenants().list().await.unwrap().len(), 3);
    fixture.inbox.finish().await;
}

/// What could go wrong: two hosts have different URLs for one name, and a tenant that is made by
/// one of them gets a second inbox by the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_stands_for_one_database() {
    let fixture = PlacementFixture::new(1).await;
    let [one, two] = fixture.urls();
    let (before, after) =
        (fixture.process(&[("three", one, 1)]), fixture.process(&[("three", two, 1)]));
    // Each has taken its database; the first has no tenant any more.
    let first = before.tenants().create("first").await.unwrap();
    before.tenants().take_back(&first).await.unwrap();
    let tenant = after.tenants().create("acme").await.unwrap();
    for refused in [
        before.tenant_databases().replicate(&tenant).await,
        before.tenant_databases().prepare(&tenant).await,
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("does not hold the inboxes of its tenants"), "{error}");
    }
    let error = before.tenants().create("other").await.unwrap_err().to_string();
    assert!(error.contains("database `three` has tenants, such as `acme`"), "{error}");
    assert_eq!((schemas(one).await, schemas(two).await), (0, 1));
    after.tenant_databases().prepare(&tenant).await.unwrap();

    // Nobody deletes it where it is not.
    let deleting = before.tenants().delete("acme").await.unwrap();
    let error = before.tenants().remove(&deleting).await.unwrap_err().to_string();
    assert!(error.contains("is another one now"), "{error}");
    assert_eq!((schemas(one).await, schemas(two).await), (0, 1));
    assert!(after.tenants().remove(&deleting).await.unwrap());
    assert_eq!((schemas(one).await, schemas(two).await), (0, 0));
    fixture.inbox.finish().await;
}

/// What could go wrong: a process dies after a database was marked and before the host's database
/// knows of it, or a trial under another URL is over, and the database can never be used.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_was_left_marked_is_taken_again() {
    let fixture = PlacementFixture::new(0).await;
    let [one, two] = fixture.urls();
    let control = &fixture.inbox.control;
    let first = control.tenants().create("first").await.unwrap();
    control.tenants().take_back(&first).await.unwrap();
    for left in [
        "DELETE FROM oncebox.named_database",
        "UPDATE oncebox.named_database SET database_id = gen_random_uuid()",
    ] {
        fixture.inbox.execute(left.to_owned()).await;
        let tenant = control.tenants().create("acme").await.unwrap();
        control.tenant_databases().prepare(&tenant).await.unwrap();
        control.tenants().take_back(&tenant).await.unwrap();
    }
    let elsewhere = fixture.process(&[("one", two, 1)]);
    let trial = elsewhere.tenants().create("trial").await.unwrap();
    assert!(control.tenants().create("acme").await.is_err(), "the trial is not over");
    elsewhere.tenants().take_back(&trial).await.unwrap();
    let tenant = control.tenants().create("acme").await.unwrap();
    control.tenant_databases().prepare(&tenant).await.unwrap();
    assert_eq!((schemas(one).await, schemas(two).await), (1, 0));

    // The host's database comes from a backup of before the tenant, and gives its number again.
    let again = format!(
        "DELETE FROM oncebox.tenant WHERE tenant_id = {id}; \
         ALTER TABLE oncebox.tenant ALTER tenant_id RESTART WITH {id}",
        id = tenant.tenant_id
    );
    for sql in again.split("; ") {
        fixture.inbox.execute(sql.to_owned()).await;
    }
    let error = control.tenants().create_in("globex", "one").await.unwrap_err().to_string();
    assert!(error.contains("holds another tenant under the number of `globex`"), "{error}");
    assert_eq!(schemas(one).await, 1);
    fixture.inbox.finish().await;
}

/// What could go wrong: a server comes back from a backup that is older than one of its tenants,
/// and the tenant gets an empty inbox without a word.
#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_is_older_than_a_tenant_is_refused_for_it() {
    let fixture = PlacementFixture::new(0).await;
    let [one, _] = fixture.urls();
    let control = &fixture.inbox.control;
    let (older, newer) =
        (fixture.inbox.tenant("older", "").await, fixture.inbox.tenant("newer", "").await);
    let mut connection = PgConnection::connect(one).await.unwrap();
    let back = format!(
        "DROP SCHEMA {} CASCADE; DELETE FROM oncebox.tenant_migration WHERE tenant_id = {id}; \
         DELETE FROM oncebox.tenant WHERE tenant_id = {id}",
        newer.schema_name,
        id = newer.tenant_id
    );
    sqlx::raw_sql(AssertSqlSafe(back)).execute(&mut connection).await.unwrap();
    let error = control.tenant_databases().prepare(&newer).await.unwrap_err().to_string();
    assert!(error.contains("`one` knows nothing of tenant `newer`"), "{error}");
    assert_eq!(schemas(one).await, 1);
    control.tenant_databases().prepare(&older).await.unwrap();
    // What was only damaged is put right.
    let damage = format!("DELETE FROM oncebox.tenant WHERE tenant_id = {}", older.tenant_id);
    sqlx::raw_sql(AssertSqlSafe(damage)).execute(&mut connection).await.unwrap();
    control.tenant_databases().prepare(&older).await.unwrap();
    fixture.inbox.finish().await;
}

/// What could go wrong: nobody can create a tenant because one of the databases is away.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_is_passed_over() {
    let fixture = PlacementFixture::new(1).await;
    let [one, _] = fixture.urls();
    let away = "postgres://oncebox:x@127.0.0.1:1/oncebox";
    let control = fixture.process(&[("away", away, 9), ("one", one, 1), ("none", one, 0)][..2]);
    for number in 0..3 {
        control.tenants().create(&format!("t-{number}")).await.unwrap();
    }
    assert_eq!(named(&control).await, [("away".to_owned(), 0), ("one".to_owned(), 3)]);
    let error = control.tenants().create_in("t-3", "away").await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:1/oncebox"), "{error}");
    // Without a database that takes tenants they are placed in the host's.
    let closed = fixture.process(&[("one", one, 0)]);
    assert_eq!(closed.tenants().create("here").await.unwrap().database, None);
    assert_eq!(named(&closed).await, [("one".to_owned(), 3)]);
    // Those of another process's settings are shown, too.
    assert_eq!(named(&fixture.plain).await, [("one".to_owned(), 3)]);
    let unknown = fixture.plain.tenant_databases().named().await.unwrap().remove(0);
    assert_eq!((unknown.address, unknown.weight), (None, None));
    fixture.inbox.finish().await;
}

/// What could go wrong: an operator cannot tell where a tenant is, which database is full or away,
/// or does not learn that a name is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_the_databases_and_names_one() {
    let mut cli = CliFixture::open(Access::Database).await;
    let (one, two) =
        (InboxFixture::another_database().await, InboxFixture::another_database().await);
    let address = |url: &str| DatabaseUrl::parse(url).unwrap().shown().to_owned();
    cli.file("url", format!("{}\n", two.url()));
    let away = "postgres://oncebox:hunter2@127.0.0.1:1/oncebox";
    let config = format!(
        "[[databases]]\nname = 'one'\nurl = '{}'\nweight = 2\n\
         [[databases]]\nname = 'two'\nurl_file = '{}'\nweight = 0\nconnections_max = 5\n\
         [[databases]]\nname = 'away'\nurl = '{away}'\nweight = 0\n",
        one.url(),
        cli.dir().join("url").display()
    );
    cli.file("databases.toml", config);
    let file = cli.dir().join("databases.toml").display().to_string();
    cli.folder().set("ONCEBOX_CONFIG", &file);

    let said = cli.ok(&["tenant", "create", "acme"]).await;
    assert!(said.ends_with(" of database `one`\n"), "{said}");
    cli.ok(&["tenant", "create", "globex", "--database", "two"]).await;
    let listed = cli.json(&["databases"]).await;
    let [of_away, of_one, of_two] = [&listed[0], &listed[1], &listed[2]];
    let rows = [(of_one, "one", one.url(), 2, 32), (of_two, "two", two.url(), 0, 5)];
    for (row, name, url, weight, connections_max) in rows {
        let expected = json!({
            "name": name, "address": address(url), "weight": weight, "tenants": 1,
            "connections_max": connections_max, "error": null,
        });
        assert_eq!(row, &expected);
    }
    assert_eq!((&of_away["tenants"], &of_away["name"]), (&json!(0), &json!("away")));
    assert!(of_away["error"].as_str().unwrap().contains("not reachable"), "{of_away}");
    let shown = cli.ok(&["databases"]).await;
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(
        lines[0].split("  ").map(str::trim).filter(|word| !word.is_empty()).collect::<Vec<_>>(),
        ["DATABASE", "ADDRESS", "WEIGHT", "TENANTS", "CONNECTIONS MAX"]
    );
    assert!(lines.len() == 5 && lines[4].starts_with("database `away`: "), "{shown}");
    assert!(!shown.contains("hunter2") && !listed.to_string().contains("hunter2"), "{shown}");
    let tenants = cli.ok(&["tenant", "list"]).await;
    assert!(tenants.contains("acme    active  one ") && tenants.contains("globex  active  two "));
    let shown = cli.json(&["tenant", "show", "globex"]).await;
    assert_eq!(shown["database"], "two");
    let plans = cli.json(&["migrate", "--plan"]).await;
    let names: Vec<_> = plans.as_array().unwrap().iter().map(|plan| &plan["database"]).collect();
    assert_eq!(names, [&json!(null), &json!("one"), &json!("two")]);
    for (arguments, says) in [
        (
            &["tenant", "create", "x", "--database", "three"][..],
            "no database is named `three` in `[[databases]]` of this process; `oncebox databases` \
                lists those that are",
        ),
        (&["tenant", "create", "acme", "--database", "two"], "there is a tenant `acme` already"),
    ] {
        cli.fails(arguments, says).await;
    }
    // A file of `oncebox apply` names one, too.
    let state = |database: &str| format!("[[tenant]]\nname = 'filed'\ndatabase = '{database}'\n");
    let file = cli.dir().join("state.toml").display().to_string();
    cli.file("state.toml", state("two"));
    cli.ok(&["apply", "--file", &file]).await;
    assert_eq!(cli.json(&["tenant", "show", "filed"]).await["database"], "two");
    cli.file("state.toml", state("one"));
    cli.fails(
        &["apply", "--file", &file],
        "tenant `filed` is in database `two`, and the file says `one`: a tenant stays where it was \
            created, so correct the file",
    )
    .await;
    let said = cli.run(&["tenant", "create", "x", "--database", "away"]).await;
    assert!(said.code == Some(1) && said.stderr.contains("127.0.0.1:1/oncebox"), "{said:?}");
    assert!(!said.stderr.contains("hunter2"), "{said:?}");
}

/// A server for tenants, and the way to it of a host.
struct Server {
    name: String,
    way: Proxy,
    url: String,
    through: String,
    _postgres: PrivatePostgres,
    _dir: TempDir,
}

/// Connections of all tenants in one of these servers.
const CONNECTIONS_MAX: usize = 3;

impl Server {
    async fn start(number: usize) -> Self {
        let dir = TempDir::new("placed");
        let options = PostgresOptions::new(dir.path().join("data"))
            .tcp(true)
            .setting("max_connections", "60")
            .setting("fsync", "off");
        let postgres =
            tokio::task::spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap();
        let postgres = postgres.unwrap();
        let url = postgres.url();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        sqlx::query("CREATE DATABASE oncebox").execute(&mut connection).await.unwrap();
        let url = url.replace("/postgres?", "/oncebox?");
        let (way, through) = Proxy::before(&url).await.unwrap();
        Self { name: format!("db{number}"), way, url, through, _postgres: postgres, _dir: dir }
    }

    fn config(&self) -> String {
        format!(
            "[[databases]]\nname = '{}'\nurl = '{}'\nconnections_max = {CONNECTIONS_MAX}\n",
            self.name, self.through
        )
    }
}

/// The databases as a host reaches them, of which `db2` would get the next tenants.
fn by_the_proxies(servers: &[Server]) -> NamedDatabases {
    let databases = servers.iter().map(|server| NamedDatabase {
        name: server.name.clone(),
        url: DatabaseUrl::parse(&server.through).unwrap(),
        weight: if server.name == "db2" { 1_000 } else { 1 },
        connections_max: CONNECTIONS_MAX,
    });
    NamedDatabases::new(databases).unwrap()
}

/// What could go wrong: tenants on a server that is slow, silent or gone hold what the tenants of
/// the others need: connections, places, the turns of the host's own loops; more connections go to
/// a server than it is meant to get; a host is not ready, or not in charge of its other tenants,
/// while one server is away; messages are lost or doubled when it comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_costs_its_tenants_alone() {
    let size: usize =
        std::env::var("ONCEBOX_PLACED_TENANTS").map_or(24, |size| size.parse().unwrap());
    let servers = futures::future::join_all((1..=4).map(Server::start)).await;
    let databases = servers.iter().map(|server| NamedDatabase {
        name: server.name.clone(),
        url: DatabaseUrl::parse(&server.url).unwrap(),
        weight: 1,
        connections_max: CONNECTIONS_MAX,
    });
    let config: String = servers.iter().map(Server::config).collect();
    let config =
        format!("[database]\nlock_timeout_ms = 30000\nstatement_timeout_ms = 40000\n{config}");
    let databases = NamedDatabases::new(databases).unwrap();
    let began = Instant::now();
    let mut fixture = ManyTenants::placed(size, databases, &config).await;
    println!("{size} tenants made in {:.1} s", began.elapsed().as_secs_f64());
    let counts = named(&fixture.control).await;
    // Four at a time are made.
    assert!(counts.iter().all(|(_, tenants)| tenants.abs_diff(size as u64 / 4) <= 4), "{counts:?}");

    let host = fixture.start();
    host.wait_ready().await.unwrap();
    wait_consumers(&host, "idle", size).await;
    println!("all known after {:.1} s", began.elapsed().as_secs_f64());
    // Each tenant has its turn once, and some have work from then on; the others come to rest.
    let all: Vec<usize> = (0..size).collect();
    for some in all.chunks(BUSY) {
        effects(&fixture, some, "a", 0).await;
    }
    let mut sent = MESSAGES as i64;
    let busy = size.min(BUSY);
    wait_consumers(&host, "idle", size).await;
    println!("each had its messages after {:.1} s", began.elapsed().as_secs_f64());
    let is_away = |number: &usize| fixture.tenants[*number].database_name() == Some("db2");
    let (away, others): (Vec<usize>, Vec<usize>) = (0..busy).partition(is_away);

    // Slow: the handlers of all tenants there wait for a lock, and keep to their connections. The
    // others' messages complete meanwhile.
    let mut locks = Vec::new();
    for number in &away {
        let mut lock = PgConnection::connect(&servers[1].url).await.unwrap();
        let sql = format!(
            "BEGIN; LOCK TABLE {}.ledger_entry IN ACCESS EXCLUSIVE MODE",
            fixture.tenants[*number].schema_name
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lock).await.unwrap();
        locks.push(lock);
    }
    send(&fixture, &away, "b").await;
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND usename IN ({})",
        logins(&fixture, &away)
    );
    until(&servers[1].url, &waiting, CONNECTIONS_MAX as i64).await;
    sent = effects(&fixture, &others, "b", sent).await;
    // A claim gives up a lock after two seconds, and its session may end meanwhile.
    assert!(number(&servers[1].url, TENANTS).await <= CONNECTIONS_MAX as i64);
    until(&servers[1].url, &waiting, CONNECTIONS_MAX as i64).await;
    drop(locks);
    for number in &away {
        fixture.wait_effects(*number, sent).await;
    }

    // Silent, then gone: what a host asks there gets no answer, then a refusal.
    for (name, is_silent) in [("c", true), ("d", false)] {
        if is_silent {
            servers[1].way.swallow()
        } else {
            servers[1].way.close()
        }
        send(&fixture, &away, name).await;
        let before = sent;
        sent = effects(&fixture, &others, name, sent).await;
        // Operators reach the others, and a new tenant is placed in none but them.
        let newest = fixture.tenants.len();
        let direct = fixture.control.clone();
        fixture.control = direct.clone().placing_in(by_the_proxies(&servers));
        let joined = fixture.join(newest).await;
        fixture.control = direct;
        assert_ne!(joined.database_name(), Some("db2"));
        fixture.tenants.push(joined);
        fixture.send(newest, &load(name, MESSAGES)).await;
        fixture.wait_effects(newest, MESSAGES as i64).await;
        host.wait_ready().await.unwrap();
        for number in &away {
            let (count, different) = fixture.effects(*number).await;
            assert!(count == different && count <= before, "it was away: {count}");
        }
        servers[1].way.heal();
        for number in &away {
            fixture.wait_effects(*number, sent).await;
        }
        println!("{name}: all is done {:.1} s after the start", began.elapsed().as_secs_f64());
    }
    for server in &servers {
        assert!(number(&server.url, TENANTS).await <= CONNECTIONS_MAX as i64);
    }
    host.stop().await.unwrap();
}

/// Sessions of tenants.
const TENANTS: &str = "SELECT count(*) FROM pg_stat_activity WHERE usename ~ '^oncebox_'";
/// Tenants with work at a time.
const BUSY: usize = 40;
/// Messages of a load.
const MESSAGES: usize = 3;

/// Sends some messages to tenants and waits for their effects. `before` are those of before. Returns
/// how many there are now.
async fn effects(fixture: &ManyTenants, tenants: &[usize], name: &str, before: i64) -> i64 {
    send(fixture, tenants, name).await;
    let all = before + MESSAGES as i64;
    for number in tenants {
        fixture.wait_effects(*number, all).await;
    }
    all
}

async fn send(fixture: &ManyTenants, tenants: &[usize], name: &str) {
    let load = load(name, MESSAGES);
    let sending = tenants.iter().map(|number| fixture.send(*number, &load));
    stream::iter(sending).buffer_unordered(20).collect::<Vec<_>>().await;
}

/// The logins of handlers of some tenants, as a list of SQL.
fn logins(fixture: &ManyTenants, tenants: &[usize]) -> String {
    let login = |number: &usize| format!("'{}'", fixture.tenants[*number].login);
    tenants.iter().map(login).collect::<Vec<_>>().join(", ")
}

async fn number(url: &str, sql: &str) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap()
}

async fn until(url: &str, sql: &str, count: i64) {
    let short = Duration::from_millis(50);
    let is_there = async || Ok(number(url, sql).await == count);
    let what = async || format!("{} instead of {count}: {sql}", number(url, sql).await);
    wait::until(DEADLINE, short, is_there, what).await.unwrap();
}
