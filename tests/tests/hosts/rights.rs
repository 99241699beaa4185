//! A host whose login has exactly the rights that `oncebox rights` prints, as on a managed server.

use std::time::Duration;

use oncebox_control::{
    Control, Finding, HostLimits, MasterKey, OtherProcess, RightsStatement, Severity, rights,
    rights_script, schema,
};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_model::InboxError;
use oncebox_tests::{
    postgres::with_database,
    temp_dir::TempDir,
    wait::{self, DEADLINE},
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};

use crate::many_tenants::{ManyTenants, load};

const PASSWORD: &str = "hunter2";

/// A server of its own, since roles and parameters belong to servers.
struct ManagedServer {
    superuser: String,
    _postgres: PrivatePostgres,
    _dir: TempDir,
}

impl ManagedServer {
    async fn start() -> Self {
        let dir = TempDir::new("managed");
        let options = PostgresOptions::new(dir.path().join("data")).tcp(true);
        let postgres =
            tokio::task::spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap();
        let postgres = postgres.unwrap();
        Self { superuser: postgres.url(), _postgres: postgres, _dir: dir }
    }

    /// Runs the statements, but one where that is left out. An administrator who is no superuser
    /// runs those that are not optional, and the last one. Returns the URL of the login.
    async fn give(&self, name: &str, left_out: Option<usize>) -> Result<String, sqlx::Error> {
        let administrator = format!("{name}_administrator");
        let create =
            format!("CREATE ROLE {administrator} LOGIN CREATEROLE CREATEDB PASSWORD '{PASSWORD}'");
        execute(&self.superuser, &create).await?;
        self.run(name, left_out).await?;
        execute(&self.superuser, &format!("ALTER ROLE {name} PASSWORD '{PASSWORD}'")).await?;
        Ok(self.url(name, name))
    }

    async fn run(&self, name: &str, left_out: Option<usize>) -> Result<(), sqlx::Error> {
        let administrator = format!("{name}_administrator");
        for (number, statement) in rights(name, name).unwrap().into_iter().enumerate() {
            if Some(number) == left_out {
                continue;
            }
            let RightsStatement { is_in_database, is_optional, sql, .. } = statement;
            let database = if is_in_database { name } else { "postgres" };
            let url = match is_optional && !sql.ends_with("CURRENT_USER") {
                true => with_database(&self.superuser, database).unwrap(),
                false => self.url(&administrator, database),
            };
            execute(&url, &sql).await?;
        }
        Ok(())
    }

    fn url(&self, login: &str, database: &str) -> String {
        let url = with_database(&self.superuser, database).unwrap();
        let (_, server) = url.split_once('@').unwrap();
        format!("postgres://{login}:{PASSWORD}@{server}")
    }
}

async fn execute(url: &str, sql: &str) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect(url).await?;
    connection.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await?;
    connection.close().await
}

/// What is wrong in a database, by check and severity, without what the server's own settings are.
async fn wrong(control: &Control) -> Vec<String> {
    let findings = control.doctor().run(HostLimits { connections_max: 32 }).await.unwrap();
    let is_of_rights = |finding: &&Finding| {
        finding.severity != Severity::Ok && !OF_THE_SERVER.contains(&finding.check)
    };
    findings
        .iter()
        .filter(is_of_rights)
        .map(|finding| format!("{}: {}", finding.check, finding.found))
        .collect()
}

/// Checks of what no right of a login changes.
const OF_THE_SERVER: [&str; 7] =
    ["connect", "durability", "encryption", "memory", "passwords", "replicas", "topics"];

/// What could go wrong: a host works for a superuser alone; with less it fails at the first tenant,
/// at a session that has to be ended, at a removal or a deletion; or what an administrator runs by
/// the page leaves tenants less apart than they are on a server of one's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_needs_no_more_rights_than_are_printed() {
    let server = ManagedServer::start().await;
    let url = server.give("oncebox", None).await.unwrap();
    let options: PgConnectOptions = url.parse().unwrap();
    // A second run of the script stops before it changes anything.
    assert!(server.run("oncebox", None).await.is_err());
    // Nothing is left for somebody else to close.
    assert_eq!(schema::migrate(&options).await.unwrap(), Vec::<String>::new());
    let mut fixture = ManyTenants::at(&url, 3).await;
    let pool = fixture.pool_of(0);
    const ROLE: &str = "SELECT rolsuper OR rolcreatedb OR rolreplication OR rolbypassrls \
        FROM pg_roles WHERE rolname = current_user";
    assert!(!sqlx::query_scalar::<_, bool>(ROLE).fetch_one(&pool).await.unwrap());
    assert_eq!(wrong(&fixture.control).await, Vec::<String>::new());

    let host = fixture.start();
    host.wait_ready().await.unwrap();
    for number in 0..3 {
        fixture.send(number, &load("a", 20)).await;
    }
    for number in 0..3 {
        fixture.wait_effects(number, 20).await;
    }
    // What a host that was killed has left is ended by the next one, with the same rights.
    for number in 0..3 {
        fixture.send(number, &load("b", 20)).await;
    }
    host.kill().await.unwrap();
    let host = fixture.start();
    for number in 0..3 {
        fixture.wait_effects(number, 40).await;
    }
    fixture.control.tenants().rotate_credentials("t-0").await.unwrap();
    fixture.send(0, &load("c", 20)).await;
    fixture.wait_effects(0, 60).await;
    let run = fixture.control.retention().run_all(OtherProcess::Leave).await;
    assert_eq!(run.failed, []);
    assert_eq!(wrong(&fixture.control).await, Vec::<String>::new());

    let gone = fixture.tenants.pop().unwrap();
    fixture.control.tenants().delete(&gone.name).await.unwrap();
    wait::until(
        DEADLINE,
        Duration::from_millis(100),
        async || Ok(fixture.control.tenants().state(&gone.name).await?.is_none()),
        async || "the tenant is still there".to_owned(),
    )
    .await
    .unwrap();
    const ROLES: &str = "SELECT count(*) FROM pg_roles WHERE rolname IN ($1, $2)";
    let roles = sqlx::query_scalar::<_, i64>(ROLES).bind(&gone.login).bind(&gone.owner_login);
    assert_eq!(roles.fetch_one(&pool).await.unwrap(), 0);
    host.stop().await.unwrap();
}

/// What could go wrong: a statement of the script gives a right that nothing needs.
#[tokio::test(flavor = "multi_thread")]
async fn each_right_that_is_printed_is_needed() {
    let server = ManagedServer::start().await;
    let count = rights("x", "x").unwrap().len();
    for left_out in 0..count {
        let name = format!("without_{left_out}");
        let said = match server.give(&name, Some(left_out)).await {
            Err(error) => error.to_string(),
            Ok(url) => match created(&url).await {
                Err(error) => error.to_string(),
                Ok(wrong) => wrong.join("; "),
            },
        };
        println!("without {left_out}: {said}");
        assert_ne!(said, "", "nothing is wrong without {:?}", rights("x", "x").unwrap()[left_out]);
    }
}

/// Makes a tenant, and returns what is wrong then.
async fn created(url: &str) -> Result<Vec<String>, InboxError> {
    let options: PgConnectOptions = url.parse().unwrap();
    schema::migrate(&options).await?;
    let control = Control::new(options, MasterKey::parse(&MasterKey::generate()).unwrap(), "test");
    let tenant = control.tenants().create("acme").await?;
    let sql = "CREATE TABLE t (n int)";
    control.tenant_databases().apply_migration(&tenant, "tables", sql).await?;
    Ok(wrong(&control).await)
}

/// What could go wrong: a name is read as SQL, or the script is not one for `psql`.
#[test]
fn the_script_is_for_psql_and_takes_plain_names() {
    let script = rights_script("hosts", "app").unwrap();
    assert!(script.starts_with("\\set ON_ERROR_STOP on\n"), "{script}");
    let (before, after) = script.split_once("\\connect app\n").unwrap();
    assert!(before.contains("CREATE ROLE hosts LOGIN CREATEROLE;\n"), "{before}");
    assert!(before.contains("CREATE DATABASE app OWNER hosts;\n"), "{before}");
    let (needed, optional) = after.split_once("\\set ON_ERROR_STOP off\n").unwrap();
    assert!(needed.contains("AUTHORIZATION hosts_owner;\n"), "{after}");
    assert!(optional.contains("GRANT SET ON PARAMETER"), "{after}");
    assert!(after.ends_with("\\password hosts\n"), "{after}");
    for (login, database, says) in [
        ("x; DROP TABLE y", "app", "cannot be the name of the login"),
        ("hosts", "App", "cannot be the name of the database"),
        ("", "app", "cannot be the name of the login"),
    ] {
        let error = rights(login, database).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
