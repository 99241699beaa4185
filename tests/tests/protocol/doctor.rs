//! `oncebox doctor`: on a sound database it finds nothing; of each way to break the scheme it names
//! what is broken and what puts it right, and carrying that out does.

use std::collections::BTreeSet;

use oncebox_control::{Control, Finding, HostLimits, MasterKey, Severity, Tenant, schema};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::{
    inbox::{InboxFixture, deliver, records},
    postgres::{create_database, drop_database, with_database},
    program::WorkingDir,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgConnectOptions};

const LIMITS: HostLimits = HostLimits { connections_max: 32 };

/// A way to break the scheme.
struct Broken {
    /// How, as a superuser; `{guest}`, `{owner}`, `{schema}` are the tenant's, `{victim}` is
    /// another's schema.
    sql: &'static str,
    /// The check that has to find it.
    check: &'static str,
    severity: Severity,
    /// Part of what it says.
    says: &'static str,
}

const fn error(sql: &'static str, check: &'static str, says: &'static str) -> Broken {
    Broken { sql, check, severity: Severity::Error, says }
}

const fn warning(sql: &'static str, check: &'static str, says: &'static str) -> Broken {
    Broken { sql, check, severity: Severity::Warning, says }
}

const BROKEN: &[Broken] = &[
    // Roles.
    error("GRANT pg_read_all_data TO {guest}", "memberships", "is a member of `pg_read_all_data`"),
    error("GRANT {victim_owner} TO {guest}", "memberships", "can become it"),
    error("ALTER ROLE {guest} BYPASSRLS", "attributes", "BYPASSRLS"),
    error("ALTER ROLE {owner} CREATEROLE CREATEDB", "attributes", "CREATEDB"),
    error("ALTER ROLE {guest} SUPERUSER", "logins", "are a superuser's"),
    warning("ALTER ROLE {guest} INHERIT", "attributes", "INHERIT"),
    error("ALTER ROLE {guest} NOLOGIN", "attributes", "may not log in"),
    error("ALTER TABLE {schema}.vault OWNER TO {guest}", "ownership", "owns the table"),
    error(
        "ALTER ROLE {guest} RESET default_transaction_read_only",
        "role_settings",
        "do not default to read-only",
    ),
    error(
        "ALTER ROLE {guest} SET session_replication_role = replica",
        "logins",
        "the commit guard does not fire",
    ),
    error(
        "ALTER ROLE {owner} SET log_parameter_max_length_on_error = -1",
        "logins",
        "parameters of failed statements",
    ),
    warning("ALTER ROLE {guest} SET work_mem = '1GB'", "role_settings", "`work_mem=1GB`"),
    warning(
        "ALTER ROLE {guest} RESET temp_file_limit",
        "temporary_files",
        "of the handlers of tenant",
    ),
    warning(
        "ALTER ROLE {owner} RESET temp_file_limit",
        "temporary_files",
        "of the migrations of tenant",
    ),
    error(
        "GRANT EXECUTE ON FUNCTION pg_catalog.pg_get_viewdef(oid) TO PUBLIC",
        "functions_between_tenants",
        "pg_get_viewdef",
    ),
    // Logins.
    error(
        "UPDATE oncebox.tenant SET secret_hash = sha256('mine') WHERE login = '{guest}'",
        "logins",
        "its sessions are denied",
    ),
    error("ALTER ROLE {guest} PASSWORD 'mine'", "logins", "cannot log in"),
    // Grants.
    error(
        "GRANT CREATE ON SCHEMA public TO PUBLIC",
        "creation",
        "PUBLIC may create objects in the schema `public`",
    ),
    error("GRANT CREATE ON SCHEMA {schema} TO {guest}", "creation", "may create objects"),
    error(
        "DO $$ BEGIN EXECUTE format('GRANT TEMPORARY ON DATABASE %I TO {guest}', \
            current_database()); END $$",
        "creation",
        "temporary tables",
    ),
    error("GRANT USAGE ON SCHEMA {victim} TO {guest}", "schemas", "may use the schema `{victim}`"),
    error("GRANT SELECT ON {victim}.vault TO {guest}", "tables", "SELECT on {victim}.vault"),
    error(
        "GRANT SELECT (message_id) ON oncebox.inbox TO {guest}",
        "tables",
        "SELECT (message_id) on oncebox.inbox",
    ),
    error("GRANT INSERT ON oncebox.tenant TO PUBLIC", "tables", "PUBLIC has INSERT"),
    error(
        "GRANT USAGE ON SCHEMA oncebox TO PUBLIC",
        "schemas",
        "PUBLIC may use the schema `oncebox`",
    ),
    error("GRANT SELECT ON pg_authid TO PUBLIC", "catalog", "SELECT on `pg_authid`"),
    error("GRANT EXECUTE ON FUNCTION pg_read_file(text) TO {guest}", "catalog", "pg_read_file"),
    error(
        "GRANT SET ON PARAMETER session_replication_role TO {guest}",
        "parameters",
        "SET on the setting",
    ),
    // Functions and languages.
    error(
        "GRANT EXECUTE ON FUNCTION set_config(text, text, boolean) TO PUBLIC",
        "functions_of_the_session",
        "set_config",
    ),
    error(
        "GRANT EXECUTE ON FUNCTION pg_advisory_xact_lock(bigint) TO {guest}",
        "functions_between_tenants",
        "pg_advisory_xact_lock",
    ),
    error(
        "GRANT USAGE ON LANGUAGE plpgsql TO PUBLIC",
        "languages",
        "PUBLIC may write functions in `plpgsql`",
    ),
    warning("GRANT USAGE ON LANGUAGE sql TO {owner}", "languages", "may write functions in `sql`"),
    error(
        "CREATE SCHEMA tools; GRANT USAGE ON SCHEMA tools TO PUBLIC; \
         CREATE FUNCTION tools.peek() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT \
         count(*) FROM oncebox.inbox'",
        "reached_functions",
        "tools.peek()",
    ),
    // The program's own.
    error("ALTER TABLE oncebox.guard DISABLE TRIGGER guard", "guard", "disabled"),
    error("DROP TRIGGER guard ON oncebox.guard", "guard", "missing"),
    error(
        "DROP TRIGGER guard ON oncebox.guard; CREATE TRIGGER guard AFTER INSERT ON oncebox.guard \
            FOR EACH ROW EXECUTE FUNCTION oncebox.guard_check()",
        "guard",
        "not the one",
    ),
    error(
        "CREATE OR REPLACE FUNCTION oncebox.guard_check() RETURNS trigger LANGUAGE plpgsql \
            SECURITY DEFINER \
         SET search_path = pg_catalog, pg_temp AS 'BEGIN RETURN NULL; END'",
        "host_code",
        "`oncebox.guard_check` is not the one of this program",
    ),
    error("DROP FUNCTION oncebox_host.partition_cleared", "host_code", "is missing"),
    error(
        "CREATE FUNCTION oncebox_host.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "host_code",
        "not of this program",
    ),
    error(
        "ALTER FUNCTION oncebox_host.claim SET search_path = public",
        "host_functions",
        "does not pin its search path",
    ),
    error(
        "ALTER FUNCTION oncebox_host.claim OWNER TO {owner}",
        "host_functions",
        "belongs to `{owner}`",
    ),
    error(
        "GRANT EXECUTE ON FUNCTION oncebox_host.claim TO PUBLIC",
        "host_grants",
        "PUBLIC may execute",
    ),
    error(
        "REVOKE EXECUTE ON FUNCTION oncebox_host.complete FROM {guest}",
        "host_grants",
        "may not call 1 functions of the host",
    ),
    error(
        "SET session_replication_role = replica; INSERT INTO oncebox.guard VALUES \
            (pg_current_xact_id()); SET session_replication_role = origin",
        "guard_rows",
        "committed without",
    ),
    error("ALTER TABLE oncebox.audit DISABLE TRIGGER append_only", "audit_log", "disabled"),
    error("DROP TRIGGER append_only ON oncebox.audit", "audit_log", "missing"),
    error(
        "DROP TRIGGER append_only ON oncebox.audit; CREATE TRIGGER append_only BEFORE UPDATE ON \
            oncebox.audit \
            FOR EACH STATEMENT EXECUTE FUNCTION oncebox.audit_is_append_only()",
        "audit_log",
        "is another",
    ),
    error(
        "CREATE FUNCTION {schema}.spy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; \
            END'; \
         CREATE TRIGGER spy BEFORE INSERT ON oncebox.token FOR EACH ROW EXECUTE FUNCTION \
         {schema}.spy()",
        "foreign_triggers",
        "`spy` of oncebox.token",
    ),
    // What its tokens may name.
    warning(
        "UPDATE oncebox.tenant SET limits = '{\"topics_allowed\": [\"*\"]}' WHERE login = \
            '{guest}'",
        "topics",
        "may read `*`, which are other tenants' as well",
    ),
    warning(
        "UPDATE oncebox.tenant SET limits = '{\"topics_allowed\": [\"oncebox.victim.*\"]}' WHERE \
            login = '{guest}'",
        "topics",
        "`oncebox.victim.*`",
    ),
    // The tenant's schema, and what reaches out.
    error(
        "CREATE RULE loud AS ON INSERT TO {schema}.vault DO ALSO NOTIFY oncebox_deployments",
        "rules",
        "`loud`",
    ),
    error(
        "CREATE VIEW {schema}.window AS SELECT * FROM {victim}.vault",
        "foreign_rights",
        "with whose rights it reads",
    ),
    error(
        "CREATE FUNCTION {schema}.peek() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT \
            count(*) FROM oncebox.inbox'",
        "foreign_rights",
        "runs with the rights of",
    ),
    error(
        "CREATE SCHEMA helpers; CREATE FUNCTION helpers.f() RETURNS trigger LANGUAGE plpgsql AS \
            'BEGIN RETURN NEW; END'; \
         CREATE TRIGGER helped BEFORE INSERT ON {schema}.vault FOR EACH ROW EXECUTE FUNCTION \
         helpers.f()",
        "foreign_triggers_of_tenants",
        "`helped`",
    ),
    warning(
        "CREATE FUNCTION public.seen() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; \
         CREATE EVENT TRIGGER seen ON ddl_command_start EXECUTE FUNCTION public.seen()",
        "event_triggers",
        "`seen`",
    ),
    error("CREATE EXTENSION dblink SCHEMA public", "extensions", "extension `dblink`"),
    error(
        "CREATE FOREIGN DATA WRAPPER far; GRANT USAGE ON FOREIGN DATA WRAPPER far TO {owner}",
        "foreign_servers",
        "wrapper `far`",
    ),
    error(
        "CREATE FOREIGN DATA WRAPPER all_may; CREATE SERVER near FOREIGN DATA WRAPPER all_may; \
            CREATE USER MAPPING FOR PUBLIC SERVER near",
        "foreign_servers",
        "PUBLIC has a user mapping for the foreign server `near`",
    ),
    // Storage.
    error(
        "DO $$ BEGIN EXECUTE format('DROP TABLE %s', (SELECT max(inhrelid::regclass::text) FROM \
            pg_inherits WHERE inhparent = 'oncebox.inbox_7d'::regclass)); END $$",
        "partitions",
        "is missing",
    ),
    warning(
        "DO $$ BEGIN EXECUTE format('ALTER TABLE oncebox.inbox_7d DETACH PARTITION %s', \
         (SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = \
         'oncebox.inbox_7d'::regclass)); END $$",
        "partition_leftovers",
        "is no partition of the inbox any more",
    ),
    error(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = (SELECT \
            max(inhrelid::regclass::text)::regclass FROM pg_inherits i \
         JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relkind = 'i' AND c.relname LIKE \
         'inbox_7d_%_pkey')",
        "indexes",
        "is not valid",
    ),
];

/// What is wrong in a database, but for what is wrong with the server of the tests: it runs without
/// `fsync`, and others use it.
async fn wrong(control: &Control) -> Vec<Finding> {
    let findings = control.doctor().run(LIMITS).await.unwrap();
    let is_of_the_server = |finding: &Finding| {
        ["connect", "replicas", "prepared_transactions", "open_transactions"]
            .contains(&finding.check)
            || finding.found.contains("`fsync` is off")
    };
    // A login that is no superuser is not told everything.
    let is_sound = |finding: &Finding| match finding.severity {
        Severity::Ok => true,
        Severity::Unknown => {
            ["permission denied", "must be superuser"].iter().any(|why| finding.found.contains(why))
        }
        Severity::Error | Severity::Warning => false,
    };
    findings
        .into_iter()
        .filter(|finding| !is_of_the_server(finding) && !is_sound(finding))
        .collect()
}

/// What could go wrong: the scheme is broken, and nobody is told, or is told something that does
/// not help.
#[tokio::test(flavor = "multi_thread")]
async fn every_broken_set_up_is_named_with_its_fix() {
    let side_by_side = BROKEN.chunks(BROKEN.len().div_ceil(3)).map(are_named);
    let faults = futures::future::join_all(side_by_side).await.concat();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

async fn are_named(some: &[Broken]) -> Vec<String> {
    let fixture = InboxFixture::new().await;
    let victim = fixture.tenant("victim", "CREATE TABLE vault (secret text);").await;
    let tenant = fixture.tenant("acme", "CREATE TABLE vault (secret text);").await;
    fixture.consumer(&tenant, "orders", "topics = ['oncebox.acme.orders']").await;
    let sound = wrong(&fixture.control).await;
    assert!(sound.is_empty(), "on a sound database: {sound:#?}");
    let has_dblink =
        fixture.number("SELECT count(*) FROM pg_available_extensions WHERE name = 'dblink'").await
            == 1;
    let mut faults = Vec::new();
    for broken in some {
        if broken.sql.contains("dblink") && !has_dblink {
            println!("skipped, since PostgreSQL's contrib is not installed: {}", broken.sql);
            continue;
        }
        faults.extend(check(&fixture, &tenant, &victim, broken).await);
    }
    fixture.finish().await;
    faults
}

/// Break it, look, carry out what is printed, look again.
async fn check(
    fixture: &InboxFixture,
    tenant: &Tenant,
    victim: &Tenant,
    broken: &Broken,
) -> Option<String> {
    let fill = |text: &str| {
        text.replace("{guest}", &tenant.login)
            .replace("{owner}", &tenant.owner_login)
            .replace("{schema}", &tenant.schema_name)
            .replace("{victim}", &victim.schema_name)
            .replace("{victim_owner}", &victim.owner_login)
    };
    fixture.execute(fill(broken.sql)).await;
    let mut findings = wrong(&fixture.control).await;
    let says = fill(broken.says);
    let named = findings.iter().find(|f| {
        f.check == broken.check && f.severity == broken.severity && f.found.contains(&says)
    });
    let fault = match named.map(|named| &named.sql) {
        None => Some(format!(
            "after `{}`, `{}` should say `{says}`: {findings:#?}",
            broken.sql, broken.check
        )),
        Some(None) => Some(format!("after `{}`, there is no fix: {named:#?}", broken.sql)),
        Some(Some(fix)) => {
            fixture.execute(fix).await;
            None
        }
    };
    // What the fix did not reach has its own: a function that is made anew gets its grants by the
    // next.
    for _ in 0..3 {
        findings = wrong(&fixture.control).await;
        if findings.is_empty() {
            return fault;
        }
        let fixes: BTreeSet<_> =
            findings.iter().filter_map(|finding| finding.sql.clone()).collect();
        for fix in fixes {
            // One may make another pointless; what counts is the end.
            let _ = fixture.pool.execute(sqlx::raw_sql(AssertSqlSafe(fix))).await;
        }
    }
    Some(format!("after `{}` and its fixes there is still: {findings:#?}", broken.sql))
}

/// What could go wrong: hosts are allowed more than the server bears, and messages fail under load.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_has_to_bear_what_hosts_may_open() {
    let fixture = InboxFixture::new().await;
    fixture.tenant("acme", "").await;
    let findings =
        fixture.control.doctor().run(HostLimits { connections_max: 10_000 }).await.unwrap();
    for (check, setting) in
        [("locks", "max_locks_per_transaction"), ("connections", "max_connections")]
    {
        let finding = findings.iter().find(|finding| finding.check == check).unwrap();
        assert_eq!(finding.severity, Severity::Error, "{finding:?}");
        assert!(finding.sql.as_ref().unwrap().contains(setting), "{finding:?}");
    }
    fixture.finish().await;
}

/// What could go wrong: a message stands in two buckets, so that it may have taken effect twice,
/// and nobody looks; or looking takes as long as the inbox is big.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_stands_twice_is_named() {
    const CHECK: &str = "ids";
    const COPY: &str = "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, \
        bucket, topic, partition, \"offset\", \
            record_timestamp_ms, status, reason, processed_at) \
        SELECT i.consumer_id, i.message_id, i.retention_class, i.bucket + r.bucket, i.topic, \
        i.partition, i.\"offset\", 0, 'parked', 'copy', now() \
        FROM oncebox.inbox i JOIN oncebox.retention_class r USING (retention_class)";
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let ids: Vec<_> = (0..50).map(|n| format!("m{n}")).collect();
    deliver(&fixture.host(&consumer), &records(ids.iter().map(String::as_str))).await;
    let found = async || -> Vec<Finding> {
        let findings = fixture.control.doctor().run(LIMITS).await.unwrap();
        findings.into_iter().filter(|finding| finding.check == CHECK).collect()
    };
    let sound = found().await;
    assert!(
        matches!(&sound[..], [one] if one.severity == Severity::Ok && one.found.contains("50 \
            messages")),
        "{sound:#?}"
    );
    fixture.execute(format!("{COPY} WHERE message_id = 'm7'")).await;
    let twice = found().await;
    let [one] = &twice[..] else { panic!("{twice:#?}") };
    assert_eq!(one.severity, Severity::Error);
    for part in ["message `m7` of `acme/orders` stands twice", "completed", "parked"] {
        assert!(one.found.contains(part), "`{part}` in {one:#?}");
    }
    assert!(one.advice.is_some(), "{one:#?}");
    // However many there are, a few are named and the others counted.
    fixture.execute(format!("{COPY} WHERE message_id <> 'm7'")).await;
    let many = found().await;
    assert!(
        many.len() == 11 && many.iter().any(|finding| finding.found.contains("40 more")),
        "{many:#?}"
    );
    fixture.execute("DELETE FROM oncebox.inbox WHERE reason = 'copy'").await;

    // A big inbox is looked at in part, by the order of its key: never all of it, and nothing is
    // sorted for that.
    fixture
        .execute(
            "ANALYZE oncebox.inbox; UPDATE pg_class SET reltuples = 5e8 \
            WHERE relnamespace = 'oncebox'::regnamespace AND relkind = 'r' AND relispartition AND \
            reltuples > 0",
        )
        .await;
    let part = found().await;
    assert!(
        matches!(&part[..], [one] if one.severity == Severity::Ok && one.found.contains("of some \
            5")),
        "{part:#?}"
    );
    fixture.finish().await;
}

/// A database as a provider gives it: a login that may make roles, owns the database, and is no
/// superuser.
struct Managed {
    name: String,
    superuser: String,
    options: PgConnectOptions,
}

impl Managed {
    async fn new() -> Self {
        let name = format!("managed_{:016x}", rand::random::<u64>());
        let superuser = create_database(&name).await.unwrap();
        let managed = Self {
            options: superuser
                .parse::<PgConnectOptions>()
                .unwrap()
                .username(&name)
                .password("managed"),
            superuser,
            name,
        };
        let Self { name, .. } = &managed;
        managed
            .execute(&format!(
                "CREATE ROLE {name} LOGIN CREATEROLE PASSWORD 'managed'; ALTER \
            DATABASE {name} OWNER TO {name}"
            ))
            .await;
        managed
    }

    async fn execute(&self, sql: &str) {
        let mut connection = PgConnection::connect(&self.superuser).await.unwrap();
        connection
            .execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())))
            .await
            .unwrap_or_else(|error| panic!("`{sql}`: {error}"));
        connection.close().await.unwrap();
    }

    async fn drop(self) {
        drop_database(&self.name).await.unwrap();
    }
}

/// What could go wrong: on a managed database nobody says what stays open, or what they say locks
/// the host out.
#[tokio::test(flavor = "multi_thread")]
async fn on_a_managed_database_it_says_what_is_open() {
    let managed = Managed::new().await;
    let left = schema::migrate(&managed.options).await.unwrap();
    assert!(left.iter().any(|what| what.contains("functions that reach past a role")), "{left:?}");
    let control = Control::new(
        managed.options.clone(),
        MasterKey::parse(&MasterKey::generate()).unwrap(),
        "test",
    );
    let tenant = control.tenants().create("acme").await.unwrap();
    let findings = wrong(&control).await;
    let of =
        |check: &str| findings.iter().filter(|finding| finding.check == check).collect::<Vec<_>>();
    for (check, severity, says) in [
        ("functions_between_tenants", Severity::Error, "can block or fill up what all share"),
        ("functions_of_the_session", Severity::Warning, "can change its own session"),
        ("languages", Severity::Warning, "PUBLIC may write functions in `plpgsql`"),
        ("temporary_files", Severity::Warning, "not bounded"),
        ("logins", Severity::Warning, "would write, if it logged statements"),
    ] {
        let found = of(check);
        assert!(
            found
                .iter()
                .any(|finding| finding.severity == severity && finding.found.contains(says)),
            "`{check}` should say `{says}`: {findings:#?}"
        );
        assert!(found.iter().all(|finding| finding.sql.is_some()), "{found:#?}");
    }
    assert!(
        of("functions_between_tenants")[0]
            .advice
            .as_ref()
            .unwrap()
            .contains("a database server of their own")
    );
    let others: Vec<_> = findings
        .iter()
        .filter(|finding| {
            finding.severity == Severity::Error && finding.check != "functions_between_tenants"
        })
        .collect();
    assert!(others.is_empty(), "what the login could do was done: {others:#?}");

    // Whoever is a superuser at the provider carries it out once. The host goes on without being
    // one.
    for finding in &findings {
        managed.execute(finding.sql.as_ref().unwrap_or_else(|| panic!("{finding:#?}"))).await;
    }
    assert_eq!(wrong(&control).await, []);
    schema::migrate(&managed.options).await.unwrap();
    assert!(
        control
            .tenant_databases()
            .apply_migration(&tenant, "tables", "CREATE TABLE t (n int)")
            .await
            .is_ok()
    );
    assert_eq!(wrong(&control).await, []);
    control.pool.close().await;
    managed.drop().await;
}

/// What could go wrong: a sound server is called broken, or a broken one sound, by the exit code.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_ends_as_it_found() {
    let folder = WorkingDir::new().unwrap();
    let dir = folder.dir().join("postgres");
    let postgres = tokio::task::spawn_blocking(move || {
        PrivatePostgres::start(PostgresOptions::new(dir).tcp(true))
    })
    .await
    .unwrap()
    .unwrap();
    let mut connection = PgConnection::connect(&postgres.url()).await.unwrap();
    connection.execute("CREATE DATABASE app").await.unwrap();
    let url = with_database(&postgres.url(), "app").unwrap();
    let folder = folder
        .with("ONCEBOX_DATABASE_URL", &url)
        .with("ONCEBOX_MASTER_KEY", &MasterKey::generate());
    for command in [["migrate"].as_slice(), &["tenant", "create", "acme"]] {
        let said = folder.run(command, "").await.unwrap();
        assert_eq!(said.code, Some(0), "{said:?}");
    }
    let said = folder.run(&["doctor"], "").await.unwrap();
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "{}", said.stdout);
    assert!(
        said.stdout.contains("ok       memory: a session of the server may take"),
        "{}",
        said.stdout
    );
    assert!(said.stdout.lines().last().unwrap().starts_with("no errors, "), "{}", said.stdout);

    let mut app = PgConnection::connect(&url).await.unwrap();
    app.execute("ALTER TABLE oncebox.guard DISABLE TRIGGER guard").await.unwrap();
    let said = folder.run(&["doctor"], "").await.unwrap();
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(
        said.stdout.starts_with("error    guard: the trigger of the commit guard is disabled\n"),
        "{}",
        said.stdout
    );
    assert!(
        said.stdout.contains("fix: ALTER TABLE oncebox.guard ENABLE TRIGGER guard;"),
        "{}",
        said.stdout
    );
    assert!(
        said.stderr.starts_with("error: the database does not hold what it should: 1 errors"),
        "{}",
        said.stderr
    );
    let said = folder.run(&["doctor", "--json"], "").await.unwrap();
    let report = said.json().unwrap();
    assert_eq!(
        (said.code, &report["errors"], &report["findings"][0]["check"]),
        (Some(1), &1.into(), &"guard".into())
    );
}
