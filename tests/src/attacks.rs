//! What hostile handlers try, for the tests that try it in process and for those that try it on a
//! real host.

use crate::guests::{self, End, Step, component, encode, execute, trap};

/// A component, and what the row of its message has to say.
pub struct Case {
    /// Its name, and the message's id.
    pub name: String,
    /// The component.
    pub component: Vec<u8>,
    /// Status of the row.
    pub status: &'static str,
    /// Its reason.
    pub reason: Option<String>,
    /// Part of `last_error`.
    pub text: String,
}

/// A guest that fails with this reason.
pub fn fails(name: &str, component: Vec<u8>, reason: &str, text: &str) -> Case {
    Case {
        name: name.to_owned(),
        component,
        status: "failed_retryable",
        reason: Some(reason.to_owned()),
        text: text.to_owned(),
    }
}

/// A guest that does what it may.
pub fn completes(name: &str, component: Vec<u8>) -> Case {
    Case {
        name: name.to_owned(),
        component,
        status: "completed",
        reason: None,
        text: String::new(),
    }
}

/// Statements that are none on rows: name, statement, and the word by which it is refused.
pub const NOT_ON_ROWS: &[(&str, &str, &str)] = &[
    ("commit", "COMMIT", "COMMIT"),
    ("end", "END", "END"),
    ("rollback", "ROLLBACK", "ROLLBACK"),
    ("abort", "ABORT", "ABORT"),
    ("rollback and begin", "ROLLBACK; BEGIN READ WRITE", "ROLLBACK"),
    ("rollback and chain", "ROLLBACK AND CHAIN", "ROLLBACK"),
    ("rollback to the host's savepoint", "ROLLBACK TO SAVEPOINT m", "ROLLBACK"),
    ("release the host's savepoint", "RELEASE SAVEPOINT m", "RELEASE"),
    ("savepoint", "SAVEPOINT mine", "SAVEPOINT"),
    ("begin", "BEGIN", "BEGIN"),
    ("prepare transaction", "PREPARE TRANSACTION 'loot'", "PREPARE"),
    ("set constraints", "SET CONSTRAINTS ALL IMMEDIATE", "SET"),
    ("set", "SET statement_timeout = 0", "SET"),
    ("set local", "SET LOCAL lock_timeout = 0", "SET"),
    ("set role", "SET ROLE oncebox", "SET"),
    ("reset role", "RESET ROLE", "RESET"),
    ("discard", "DISCARD ALL", "DISCARD"),
    ("alter role", "ALTER ROLE CURRENT_USER PASSWORD 'loot'", "ALTER"),
    ("comment before", "/* select */ COMMIT", "COMMIT"),
    ("line comment before", "-- select 1\nCOMMIT", "COMMIT"),
    ("carriage return ends a comment", "-- select 1\rCOMMIT", "COMMIT"),
    ("nested comments", "/* /* select */ select */ /**/ COMMIT", "COMMIT"),
    ("parentheses", "((COMMIT))", "COMMIT"),
    ("do", "DO $$ BEGIN COMMIT; END $$", "DO"),
    ("call", "CALL anything()", "CALL"),
    ("copy", "COPY loot FROM PROGRAM 'echo loot'", "COPY"),
    ("listen", "LISTEN oncebox_deployments", "LISTEN"),
    ("notify", "NOTIFY oncebox_deployments", "NOTIFY"),
    ("lock table", "LOCK TABLE note IN ACCESS EXCLUSIVE MODE", "LOCK"),
    ("explain", "EXPLAIN ANALYZE INSERT INTO loot VALUES ('explained')", "EXPLAIN"),
    ("prepare", "PREPARE p AS SELECT 1", "PREPARE"),
    ("declare", "DECLARE c CURSOR WITH HOLD FOR SELECT 1", "DECLARE"),
    ("truncate", "TRUNCATE note", "TRUNCATE"),
    ("create", "CREATE TABLE mine (n int)", "CREATE"),
    ("grant", "GRANT ALL ON note TO PUBLIC", "GRANT"),
    ("vacuum", "VACUUM", "VACUUM"),
];

/// Statements that PostgreSQL denies a tenant: `victim` is another's schema, `consumer` its own
/// consumer.
pub fn out_of_reach(victim: &str, consumer: i32) -> Vec<(&'static str, String)> {
    let secret = "'\\x0000000000000000000000000000000000000000000000000000000000000000'::bytea";
    vec![
        ("another tenant's rows", format!("INSERT INTO loot SELECT secret FROM {victim}.vault")),
        ("another tenant's table", format!("TABLE {victim}.vault")),
        ("another tenant's effect", format!("DELETE FROM {victim}.effect")),
        ("the inbox", "INSERT INTO loot SELECT message_id FROM oncebox.inbox".into()),
        ("its own row of the inbox", "UPDATE oncebox.inbox SET status = 'completed'".into()),
        ("the guard", "DELETE FROM oncebox.guard".into()),
        (
            "the tenants",
            "INSERT INTO loot SELECT encode(secret_hash, 'hex') FROM oncebox.tenant".into(),
        ),
        ("a helper of the host", "SELECT oncebox.bucket_at(1::int2, now())".into()),
        (
            "claim with a guess",
            format!(
                "SELECT * FROM oncebox_host.claim({secret}, {consumer}, 0, 'completed', \
                    NULL, 't', 0, ARRAY['loot'], \
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
            NULL)"
            ),
        ),
        (
            "a record with a guess",
            format!(
                "SELECT oncebox_host.restore_records({secret}, {consumer}, ARRAY['good'], \
                    ARRAY[NULL::bytea], NULL, NULL)"
            ),
        ),
        (
            "complete with a guess",
            format!(
                "SELECT oncebox_host.complete({secret}, {consumer}, NULL, NULL, NULL, NULL, NULL, \
                    NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
            ),
        ),
        (
            "complete without a secret",
            format!(
                "SELECT oncebox_host.complete(NULL, {consumer}, NULL, NULL, NULL, NULL, NULL, \
                    NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
            ),
        ),
        (
            "lease with a guess",
            format!("SELECT * FROM oncebox_host.lease({secret}, {consumer}, 'me', 10, 1000, 3, 5)"),
        ),
        (
            "release with a guess",
            format!("SELECT oncebox_host.release({secret}, {consumer}, 'good', 0, 0)"),
        ),
        (
            "renew with a guess",
            format!("SELECT oncebox_host.renew_lease({secret}, {consumer}, 'good', 0, 0)"),
        ),
        (
            "a partition with a guess",
            format!("SELECT oncebox_host.partition_cleared({secret}, {consumer}, 't', 0)"),
        ),
        ("passwords", "INSERT INTO loot SELECT rolpassword FROM pg_authid".into()),
        ("files", "SELECT pg_read_file('/etc/hostname')".into()),
        ("a table", "SELECT 1 AS n INTO mine".into()),
        ("a temporary table", "SELECT 1 AS n INTO TEMP mine".into()),
        ("another backend", "SELECT pg_terminate_backend(pid) FROM pg_stat_activity".into()),
        ("a setting", "SELECT set_config('statement_timeout', '0', false)".into()),
        (
            "a setting through a view",
            "UPDATE pg_settings SET setting = '0' WHERE name = 'statement_timeout'".into(),
        ),
        ("a role by a setting", "SELECT set_config('role', 'none', true)".into()),
        ("a query as text", "SELECT query_to_xml('SELECT 1', true, true, '')".into()),
        ("a table as text", "SELECT table_to_xml('oncebox.inbox', true, true, '')".into()),
        ("a notification", "SELECT pg_notify('oncebox_deployments', '')".into()),
        ("an advisory lock", "SELECT pg_advisory_lock(1)".into()),
        ("an advisory lock in a transaction", "SELECT pg_advisory_xact_lock(1)".into()),
        ("a try at an advisory lock", "SELECT pg_try_advisory_lock_shared(1)".into()),
        ("a large object", "SELECT lo_create(0)".into()),
        ("a large object of bytes", "SELECT lo_from_bytea(0, 'loot')".into()),
        ("sleep", "SELECT pg_sleep(1)".into()),
        ("sleep until", "SELECT pg_sleep_until(now() + interval '1 second')".into()),
        ("the log of changes", "SELECT pg_logical_emit_message(false, 'loot', 'loot')".into()),
        ("a snapshot", "SELECT pg_export_snapshot()".into()),
        ("a query in a text search", "SELECT ts_stat('SELECT 1')".into()),
        (
            "a query that rewrites",
            "SELECT ts_rewrite('a'::tsquery, 'SELECT ''a''::tsquery, ''b''::tsquery')".into(),
        ),
    ]
}

/// Ten billion rows that are not stored anywhere on their way.
pub fn endless(what: &str) -> String {
    let tables: Vec<_> = ('a'..='j').map(|name| format!("t {name}")).collect();
    format!(
        "WITH t (x) AS (VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9), (10)) SELECT {what} \
            FROM {}",
        tables.join(", ")
    )
}

/// Code of a tenant's own, for those that may write functions: tables whose rows are run as they
/// are inserted, or at COMMIT.
pub const FUNCTIONS: &str = "
    CREATE TABLE now_raises (code text); CREATE TABLE then_raises (code text); CREATE TABLE \
    then_does (what text); CREATE TABLE now_does (what text);
    CREATE FUNCTION raise_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION \
    'raised' USING ERRCODE = NEW.code; END $$;
    CREATE FUNCTION do_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN EXECUTE NEW.what; RETURN \
    NEW; END $$;
    CREATE TRIGGER now AFTER INSERT ON now_raises FOR EACH ROW EXECUTE FUNCTION raise_it();
    CREATE CONSTRAINT TRIGGER later AFTER INSERT ON then_raises DEFERRABLE INITIALLY DEFERRED FOR \
    EACH ROW EXECUTE FUNCTION raise_it();
    CREATE TRIGGER now AFTER INSERT ON now_does FOR EACH ROW EXECUTE FUNCTION do_it();
    CREATE CONSTRAINT TRIGGER later AFTER INSERT ON then_does DEFERRABLE INITIALLY DEFERRED FOR \
    EACH ROW EXECUTE FUNCTION do_it();";

/// Components that trap, lie about their memory or take too much, each doing so after what `around`
/// puts before it.
pub fn broken_components(around: &dyn Fn(Vec<Step>) -> Vec<Step>) -> Vec<Case> {
    let hostile = |deed: Vec<Step>| component(&around(deed), &End::Ok);
    let wat = |text: &str| hostile(vec![Step::Wat(text.to_owned())]);
    let query = |sql: &str| Step::Query(sql.to_owned());
    let select_1 = "(i64.store (i32.const 2048) (i64.const 0x31205443454c4553))";
    let many = |prefix: &str, count| {
        (0..count).map(|n| execute(format!("SELECT {prefix}{n}"))).collect::<Vec<_>>()
    };
    let ending = |end: &str| component(&around(Vec::new()), &End::Wat(end.to_owned()));
    let rubbish_allocator = guests::text(&around(Vec::new()), &End::Ok).replacen(
        "(local.get $at))",
        "(i32.const -16))",
        1,
    );
    let trapping_start = guests::text(&around(Vec::new()), &End::Ok).replacen(
        "(memory ",
        "(start $begin) (func $begin unreachable) (memory ",
        1,
    );
    let recursive = guests::text(&around(vec![Step::Wat("(call $deep)".into())]), &End::Ok)
        .replacen("(memory ", "(func $deep (call $deep)) (memory ", 1);
    let result =
        |text: &str| component(&around(Vec::new()), &End::Result(text.as_bytes().to_vec()));
    vec![
        // Traps.
        fails("unreachable", hostile(vec![trap()]), "trap", "unreachable"),
        fails(
            "divided by zero",
            wat("(drop (i32.div_s (i32.const 1) (i32.const 0)))"),
            "trap",
            "divide by zero",
        ),
        fails("out of bounds", wat("(drop (i32.load (i32.const -4)))"), "trap", "out of bounds"),
        fails("too deep", encode(&recursive), "trap", "call stack exhausted"),
        fails("at the start", encode(&trapping_start), "trap", "unreachable"),
        fails("an allocator that lies", encode(&rubbish_allocator), "trap", ""),
        fails(
            "a statement outside the memory",
            wat("(call $execute (i32.const -64) (i32.const 32) (i32.const 0) (i32.const 0) \
                (i32.const 256))"),
            "trap",
            "",
        ),
        fails(
            "a statement longer than the memory",
            wat("(call $execute (i32.const 0) (i32.const 1073741824) (i32.const 0) (i32.const 0) \
                (i32.const 256))"),
            "trap",
            "",
        ),
        fails(
            "endless parameters",
            wat("(call $execute (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 100000000) \
                (i32.const 256))"),
            "trap",
            "",
        ),
        fails(
            "a statement that is not UTF-8",
            wat("(i32.store (i32.const 2048) (i32.const -1)) (call $execute (i32.const 2048) \
                    (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 256))"),
            "trap",
            "utf-8",
        ),
        fails(
            "a parameter of no type",
            wat("(i32.store8 (i32.const 1024) (i32.const 200)) (call $execute (i32.const 0) \
                    (i32.const 0) (i32.const 1024) (i32.const 1) (i32.const 256))"),
            "trap",
            "",
        ),
        fails(
            "an answer outside the memory",
            wat(&format!(
                "{select_1} (call $execute (i32.const 2048) (i32.const 8) (i32.const 0) \
                (i32.const 0) (i32.const -64))"
            )),
            "trap",
            "",
        ),
        fails(
            "a savepoint that is none",
            wat("(call $rollback (i32.const 77) (i32.const 256))"),
            "trap",
            "",
        ),
        fails(
            "a savepoint dropped twice",
            hostile(vec![
                Step::Savepoint,
                Step::Wat(
                    "(call $drop (i32.load (i32.const 512))) (call $drop (i32.load \
                    (i32.const 512)))"
                        .into(),
                ),
            ]),
            "trap",
            "",
        ),
        fails("an end outside the memory", ending("(i32.const -8)"), "trap", ""),
        fails(
            "an end that is no answer",
            ending(
                "(i32.store8 (i32.const 64) (i32.const 7)) \
            (i32.const 64)",
            ),
            "trap",
            "",
        ),
        fails(
            "a failure of no kind",
            ending(
                "(i32.store8 (i32.const 64) (i32.const 1)) (i32.store8 (i32.const 72) \
                (i32.const 9)) (i32.const 64)",
            ),
            "trap",
            "",
        ),
        // Memory.
        fails(
            "all memory at once",
            wat("(if (i32.eq (memory.grow (i32.const 2000)) (i32.const -1)) (then unreachable))"),
            "out_of_memory",
            "memory_bytes",
        ),
        fails(
            "all memory, bit by bit",
            wat("(loop $more (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) \
                unreachable"),
            "out_of_memory",
            "memory_bytes",
        ),
        // Results.
        fails("a result that is no JSON", result("{"), "bad_result", "not JSON"),
        fails("a result with a NUL", result("\"\\u0000\""), "bad_result", ""),
        fails(
            "a large result",
            result(&format!("\"{}\"", "x".repeat(2000))),
            "bad_result",
            "outcome_bytes_max",
        ),
        fails(
            "a result that is not UTF-8",
            component(&around(Vec::new()), &End::Result(vec![0xff, 0xfe])),
            "trap",
            "utf-8",
        ),
        // Caps.
        fails(
            "too many statements",
            hostile(vec![Step::Repeat(60, Box::new(execute("SELECT 1")))]),
            "limit",
            "statements_max",
        ),
        fails(
            "too many savepoints",
            hostile(vec![
                Step::Savepoint,
                Step::Savepoint,
                Step::Savepoint,
                Step::Savepoint,
                Step::Savepoint,
            ]),
            "limit",
            "savepoints_max",
        ),
        fails("too many texts", hostile(many("", 31)), "limit", "statement_texts_max"),
        fails(
            "too many rows",
            hostile(vec![query("SELECT generate_series(1, 1000)")]),
            "limit",
            "rows_max",
        ),
        fails(
            "too large a row",
            hostile(vec![query("SELECT repeat('x', 200000)")]),
            "limit",
            "result_bytes_max",
        ),
        fails(
            "a row of twenty megabytes",
            hostile(vec![query("SELECT repeat('x', 20000000)")]),
            "limit",
            "result_bytes_max",
        ),
        fails(
            "an error that quotes twenty megabytes",
            hostile(vec![query("SELECT repeat('x', 20000000)::int")]),
            "sql_error:22P02",
            "invalid input syntax",
        ),
        fails(
            "too many bytes of rows",
            hostile(vec![query("SELECT repeat('x', 60000) FROM generate_series(1, 3)")]),
            "limit",
            "result_bytes_max",
        ),
        fails(
            "too long a statement",
            hostile(vec![execute(format!("SELECT '{}'", "x".repeat(20_000)))]),
            "limit",
            "statement_bytes_max",
        ),
        fails(
            "too many parameters",
            hostile(vec![Step::ExecuteWith("SELECT 1".into(), 101, 1)]),
            "limit",
            "params_max",
        ),
    ]
}
