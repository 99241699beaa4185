//! What the attacker tries: statements that handlers send, code of its own that runs in triggers,
//! migrations.

use oncebox_tests::attacks;

use super::fixture::{HostileFixture, SEEN};

/// A statement that a handler sends, with the message's id.
pub struct Attempt {
    pub id: String,
    pub sql: String,
    /// Whether the row has to be a failure.
    pub fails: bool,
}

fn attempt(id: impl Into<String>, sql: impl Into<String>) -> Attempt {
    Attempt { id: id.into(), sql: sql.into(), fails: false }
}

/// Statements of handlers.
pub async fn statements(fixture: &HostileFixture) -> Vec<Attempt> {
    let (victim, still) = (&fixture.victim.schema_name, fixture.still);
    let mut all: Vec<_> = attacks::NOT_ON_ROWS
        .iter()
        .map(|(name, sql, _)| Attempt { fails: true, ..attempt(*name, *sql) })
        .collect();
    let denied =
        attacks::out_of_reach(victim, fixture.evil).into_iter().chain(foreign(victim, still));
    all.extend(denied.map(|(name, sql)| Attempt { fails: true, ..attempt(name, sql) }));
    all.extend(greedy(fixture).into_iter().map(|(name, sql)| attempt(name, sql)));
    all
}

/// What is another's, in ways in which the error says what it is about.
fn foreign(victim: &str, still: i32) -> Vec<(&'static str, String)> {
    vec![
        ("a value in an error", format!("SELECT secret::int FROM {victim}.vault")),
        ("a view", format!("INSERT INTO loot SELECT secret FROM {victim}.window_{SEEN}")),
        ("a sequence", format!("SELECT nextval('{victim}.{SEEN}_sequence')")),
        ("a count", format!("INSERT INTO loot SELECT count(*) FROM {victim}.vault")),
        (
            "whether there is",
            format!("SELECT 1/(SELECT count(*) FROM {victim}.vault WHERE secret LIKE 'm%')::int"),
        ),
        ("lock rows", format!("SELECT * FROM {victim}.account FOR UPDATE")),
        (
            "merge",
            format!("MERGE INTO {victim}.account a USING note n ON true WHEN MATCHED THEN DELETE"),
        ),
        (
            "another's row of the inbox",
            format!(
                "UPDATE oncebox.inbox SET status = 'parked', reason = 'mine' WHERE consumer_id = \
                    {still}"
            ),
        ),
        (
            "results of others",
            format!(
                "INSERT INTO loot SELECT result::text FROM oncebox.inbox WHERE consumer_id = \
                    {still}"
            ),
        ),
        (
            "payloads of others",
            "INSERT INTO loot SELECT encode(payload, 'escape') FROM oncebox.inbox_7d".into(),
        ),
        (
            "dead letters of others",
            "INSERT INTO loot SELECT last_error FROM oncebox.dead_letter".into(),
        ),
        ("tokens", "INSERT INTO loot SELECT name FROM oncebox.token".into()),
        ("the log of changes", "INSERT INTO loot SELECT actor FROM oncebox.audit".into()),
        (
            "components",
            "INSERT INTO loot SELECT encode(bytes, 'hex') FROM oncebox.component".into(),
        ),
        ("consumers", "INSERT INTO loot SELECT policy::text FROM oncebox.consumer".into()),
        (
            "statistics of values",
            "INSERT INTO loot SELECT stavalues1::text FROM pg_statistic".into(),
        ),
        ("locks", "INSERT INTO loot SELECT l::text FROM pg_locks l".into()),
        ("hba", "INSERT INTO loot SELECT h::text FROM pg_hba_file_rules h".into()),
        ("configuration files", "INSERT INTO loot SELECT f::text FROM pg_file_settings f".into()),
        (
            "large objects",
            "INSERT INTO loot SELECT encode(data, 'escape') FROM pg_largeobject".into(),
        ),
        ("a seed for others", "SELECT setseed(0)".into()),
        (
            "a message of the other tenant, claimed",
            format!(
                "SELECT * FROM oncebox_host.claim('\\x00', {still}, 0, 'completed', NULL, \
                    't', 0, ARRAY['mine'], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
                    NULL, NULL, NULL, NULL, NULL, NULL)"
            ),
        ),
        ("a capture outside a trigger", "SELECT oncebox_host.capture(0, '', '')".into()),
        ("row security off", "SELECT set_config('row_security', 'off', true)".into()),
        ("replica", "SELECT set_config('session_replication_role', 'replica', true)".into()),
        ("a file's list", "SELECT pg_ls_dir('.')".into()),
        ("write-ahead log", "SELECT pg_switch_wal()".into()),
        ("reload", "SELECT pg_reload_conf()".into()),
        ("slot", "SELECT pg_create_logical_replication_slot('mine', 'test_decoding')".into()),
        ("copy to a program", "COPY (SELECT 1) TO PROGRAM 'cat'".into()),
    ]
}

/// Too much of something, and the like.
fn greedy(fixture: &HostileFixture) -> Vec<(&'static str, String)> {
    let later = |what: &str| format!("INSERT INTO then_does VALUES ($do${what}$do$)");
    let now = |what: &str| format!("INSERT INTO now_does VALUES ($do${what}$do$)");
    let victim = &fixture.victim.schema_name;
    vec![
        (
            "memory bomb",
            "SELECT array_agg(repeat('x', 100000000)) FROM generate_series(1, 100)".into(),
        ),
        ("a huge row", "SELECT repeat('x', 50000000)".into()),
        (
            "recursion without end",
            "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM \
            r) SELECT count(*) FROM r"
                .into(),
        ),
        ("a join without end", attacks::endless("count(*)")),
        ("a sort without end", format!("{} ORDER BY 1", attacks::endless("md5(random()::text)"))),
        ("many locks", "SELECT count(*) FROM many".into()),
        ("deep recursion", "SELECT deep(1)".into()),
        ("deep JSON", "SELECT (repeat('[', 10000) || repeat(']', 10000))::jsonb".into()),
        ("deep XML", "SELECT (repeat('<a>', 10000) || repeat('</a>', 10000))::xml".into()),
        ("deep arrays", "SELECT (repeat('{', 10000) || repeat('}', 10000))::int[]".into()),
        ("deep parentheses", format!("SELECT {}1{}", "(".repeat(9_900), ")".repeat(9_900))),
        ("deep domains", "SELECT 1::d300".into()),
        ("deep domains in an array", "SELECT ARRAY[1::d300]".into()),
        ("deep composites", "SELECT NULL::c300".into()),
        ("rather deep domains", "SELECT 1::d40".into()),
        ("a slow expression", "SELECT repeat('a', 5000) ~ '(a*)*(a*)*b'".into()),
        ("listens", now("LISTEN oncebox_deployments")),
        ("notifies", now("NOTIFY oncebox_deployments, 'mine'")),
        ("notifies at commit", later("NOTIFY oncebox_deployments, 'mine'")),
        (
            "floods notifications",
            now("DO $$ BEGIN FOR i IN 1..10000 LOOP EXECUTE 'NOTIFY mine, ''' \
            || i || ''''; END LOOP; END $$"),
        ),
        ("forgets statements", now("DEALLOCATE ALL")),
        ("discards", now("DISCARD ALL")),
        (
            "timeouts off, then for ever",
            now("SET statement_timeout = 0; SET lock_timeout = 0; SET \
                    idle_in_transaction_session_timeout = 0; DO $$ BEGIN LOOP NULL; END LOOP; END \
                    $$"),
        ),
        ("for ever at commit", later("DO $$ BEGIN LOOP NULL; END LOOP; END $$")),
        ("sleeps at commit", later("SELECT pg_sleep(100)")),
        (
            "reads another's at commit",
            later(&format!(
                "INSERT INTO loot SELECT secret FROM \
            {victim}.vault"
            )),
        ),
        ("becomes the owner", now(&format!("SET ROLE {}", fixture.attacker.owner_login))),
        (
            "becomes the other tenant",
            now(&format!("SET SESSION AUTHORIZATION {}", fixture.victim.login)),
        ),
        ("becomes it at commit", later(&format!("SET ROLE {}", fixture.victim.owner_login))),
        ("replica role", now("SET session_replication_role = replica")),
        ("logs everything", now("SET log_statement = 'all'")),
        ("tells everything", now("SET client_min_messages = debug5; RAISE")),
        ("finishes by itself", now("DELETE FROM oncebox.guard")),
        ("constraints off", now("SET CONSTRAINTS ALL DEFERRED")),
        ("constraints early", now("SET CONSTRAINTS ALL IMMEDIATE")),
        ("commits in a function", now("COMMIT")),
        ("prepares in a function", now("PREPARE TRANSACTION 'mine'")),
        ("copies out", now("COPY loot TO '/tmp/mine'")),
        ("copies from a program", now("COPY loot FROM PROGRAM 'id'")),
        ("a temporary table", now("CREATE TEMP TABLE oncebox_guard (xid xid8)")),
        ("a table in public", now("CREATE TABLE public.mine (n int)")),
        ("a cursor that stays", now("DECLARE mine CURSOR WITH HOLD FOR SELECT * FROM note")),
        ("locks a table", now("LOCK TABLE note IN ACCESS EXCLUSIVE MODE")),
        ("locks the inbox", now("LOCK TABLE oncebox.inbox IN ACCESS SHARE MODE")),
        ("imports a file", now("SELECT lo_import('/etc/passwd')")),
        ("raises as the server's end", "INSERT INTO now_raises VALUES ('57P01')".into()),
        ("raises as a lost connection", "INSERT INTO now_raises VALUES ('08006')".into()),
        ("raises as the guard", "INSERT INTO then_raises VALUES ('OB001')".into()),
        ("raises as stale", "INSERT INTO now_raises VALUES ('OB005')".into()),
        ("raises as a full disk", "INSERT INTO then_raises VALUES ('53100')".into()),
        ("raises as no memory", "INSERT INTO now_raises VALUES ('53200')".into()),
        ("raises as a deadlock", "INSERT INTO then_raises VALUES ('40P01')".into()),
        ("raises a panic", "INSERT INTO now_raises VALUES ('XX000')".into()),
    ]
}

/// Every relation that PostgreSQL comes with, copied. The relation's name is the id's second word.
pub async fn sweep(fixture: &HostileFixture) -> Vec<Attempt> {
    const RELATIONS: &str = "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN \
        pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname IN ('pg_catalog', 'information_schema') AND c.relkind IN ('r', 'v') ORDER \
        BY 1";
    let relations = fixture.texts(RELATIONS).await;
    relations
        .into_iter()
        .map(|name| {
            attempt(
                format!("sweep {name}"),
                format!("INSERT INTO loot SELECT '{name}: ' || t::text FROM {name} t"),
            )
        })
        .collect()
}

/// Migrations of the attacker's own schema, sent to the API.
pub fn migrations(fixture: &HostileFixture) -> Vec<String> {
    let (victim, login) = (&fixture.victim.schema_name, &fixture.victim.login);
    let guest = &fixture.attacker.login;
    [
        "RESET ROLE; SELECT count(*) FROM oncebox.inbox".to_owned(),
        "SET ROLE postgres".to_owned(),
        format!("SET SESSION AUTHORIZATION {login}"),
        format!("CREATE TABLE taken AS SELECT * FROM {victim}.vault"),
        format!("INSERT INTO loot SELECT secret FROM {victim}.vault"),
        format!("SELECT secret::int FROM {victim}.vault"),
        "CREATE TABLE taken AS SELECT * FROM oncebox.token".to_owned(),
        format!("CREATE VIEW taken AS SELECT * FROM {victim}.vault"),
        format!("CREATE TABLE heir () INHERITS ({victim}.vault)"),
        format!("CREATE TABLE refers (s text REFERENCES {victim}.account)"),
        format!("ALTER TABLE {victim}.vault ADD COLUMN mine int"),
        format!("DROP TABLE {victim}.vault"),
        format!("DROP SCHEMA {victim} CASCADE"),
        format!("GRANT ALL ON SCHEMA {victim} TO {guest}"),
        format!("COMMENT ON TABLE {victim}.vault IS 'mine'"),
        format!(
            "CREATE TRIGGER mine BEFORE INSERT ON {victim}.vault FOR EACH ROW EXECUTE FUNCTION \
            run_account()"
        ),
        "CREATE TRIGGER mine BEFORE INSERT ON oncebox.inbox FOR EACH ROW EXECUTE FUNCTION \
            run_account()"
            .to_owned(),
        "CREATE RULE loud AS ON INSERT TO loot DO ALSO SELECT * FROM oncebox.inbox".to_owned(),
        "CREATE POLICY mine ON note USING (deep(1) > 0); ALTER TABLE note ENABLE ROW LEVEL \
            SECURITY"
            .to_owned(),
        "CREATE EXTENSION dblink".to_owned(),
        "CREATE EVENT TRIGGER mine ON ddl_command_start EXECUTE FUNCTION run_account()".to_owned(),
        "CREATE PUBLICATION mine FOR ALL TABLES".to_owned(),
        "CREATE SUBSCRIPTION mine CONNECTION 'host=/tmp' PUBLICATION mine".to_owned(),
        "CREATE SERVER mine FOREIGN DATA WRAPPER postgres_fdw".to_owned(),
        "CREATE FOREIGN DATA WRAPPER mine".to_owned(),
        "CREATE DATABASE mine".to_owned(),
        "CREATE ROLE mine SUPERUSER".to_owned(),
        format!("ALTER ROLE {guest} SUPERUSER"),
        format!("ALTER ROLE {login} PASSWORD 'mine'"),
        format!("GRANT {login} TO {guest}"),
        format!("REASSIGN OWNED BY {login} TO CURRENT_USER"),
        "ALTER SYSTEM SET fsync = off".to_owned(),
        "ALTER DATABASE postgres SET statement_timeout = 0".to_owned(),
        "CREATE FUNCTION c(text) RETURNS int LANGUAGE c AS 'libc', 'system'".to_owned(),
        "CREATE FUNCTION i() RETURNS int LANGUAGE internal AS 'pg_backend_pid'".to_owned(),
        "CREATE LANGUAGE plpython3u".to_owned(),
        "CREATE SCHEMA mine".to_owned(),
        "CREATE TEMP TABLE mine (n int)".to_owned(),
        "CREATE TABLE public.mine (n int)".to_owned(),
        "CREATE TABLE oncebox_host.mine (n int)".to_owned(),
        "CREATE OR REPLACE FUNCTION oncebox_host.complete() RETURNS void LANGUAGE plpgsql AS \
            'BEGIN END'"
            .to_owned(),
        "COPY loot TO PROGRAM 'cat'".to_owned(),
        "COPY loot FROM '/etc/passwd'".to_owned(),
        "LOCK TABLE oncebox.inbox".to_owned(),
        format!("LOCK TABLE {victim}.vault"),
        "SELECT pg_advisory_lock(1)".to_owned(),
        "SELECT lo_create(0)".to_owned(),
        "SELECT set_config('role', 'postgres', false)".to_owned(),
        "PREPARE TRANSACTION 'mine'".to_owned(),
        "DO $$ BEGIN EXECUTE 'SELECT 1 FROM oncebox.tenant'; END $$".to_owned(),
        "CREATE FUNCTION boss() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN RETURN \
            (SELECT count(*) FROM oncebox.inbox); END'; SELECT boss()"
            .to_owned(),
        "SELECT oncebox_host.migration_applied('\\x00', 'mine', '\\x00', 'mine')".to_owned(),
        "SECURITY LABEL ON TABLE note IS 'mine'".to_owned(),
        "VACUUM FULL".to_owned(),
        "this is no SQL".to_owned(),
        "SELECT '\u{fffd}\u{202e}'".to_owned(),
    ]
    .into()
}
