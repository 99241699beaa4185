//! Contained: whatever one tenant's handlers, statements, migrations and requests try on a real
//! host, another tenant on the same host is neither read nor changed nor held up.
//!
//! Everything of the victim and of the host bears a marker that nobody could guess. Everything that
//! the attacker is told, by rows of its inbox, by its own tables, by its lines in the log, by the
//! API, is searched for it.

mod attempts;
mod dump;
mod fixture;

use std::{collections::BTreeSet, sync::atomic::Ordering};

use attempts::{migrations, statements, sweep};
use fixture::{HostileFixture, SEEN, Watch};
use oncebox_control::{HostLimits, Severity};
use oncebox_tests::{
    attacks::{self, completes, fails},
    coverage,
    guests::{End, Step, component, encode, execute, spin},
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Executor};

const EFFECT: &str =
    "INSERT INTO effect (consumer, message_id, attempt, version) VALUES ('orders', $1, 1, 1)";

/// The payload is a statement. What the database answers, detail included, goes into the log.
const RUN: &str = "(call $execute (i32.load offset=72 (local.get $message)) (i32.load offset=76 \
    (local.get $message)) (i32.const 0) (i32.const 0) (i32.const 256)) \
    (if (i32.load8_u (i32.const 256)) (then (if (i32.eqz (i32.load8_u (i32.const 264))) (then \
        (call $log (i32.const 3) (i32.load (i32.const 276)) (i32.load (i32.const 280))) \
        (if (i32.load8_u (i32.const 284)) (then (call $log (i32.const 3) (i32.load (i32.const \
        288)) (i32.load (i32.const 292)))))))))";

/// The payload is a query. The first value of its first row goes into the log, where it is text.
const TELL: &str = "(call $query (i32.load offset=72 (local.get $message)) (i32.load offset=76 \
    (local.get $message)) (i32.const 0) (i32.const 0) (i32.const 256)) \
    (if (i32.eqz (i32.load8_u (i32.const 256))) (then (if (i32.load (i32.const 272)) (then \
        (if (i32.eq (i32.load8_u (i32.load (i32.load (i32.const 268)))) (i32.const 8)) (then \
            (call $log (i32.const 3) (i32.load offset=8 (i32.load (i32.load (i32.const 268)))) \
            (i32.load offset=12 (i32.load (i32.load (i32.const 268)))))))))))";

fn around(deed: Vec<Step>) -> Vec<Step> {
    let mut steps =
        vec![Step::ExecuteWithId(EFFECT.to_owned()), execute("INSERT INTO loot VALUES ('before')")];
    steps.extend(deed);
    steps.push(execute("INSERT INTO loot VALUES ('after')"));
    steps
}

fn hostile(deed: &str) -> Vec<u8> {
    component(&around(vec![Step::Wat(deed.to_owned())]), &End::Ok)
}

/// Handlers whose deed is in their code.
fn handlers() -> Vec<attacks::Case> {
    let hostile = |deed: Vec<Step>| component(&around(deed), &End::Ok);
    let growing = "(loop $more (drop (memory.grow (i32.const 1))) (br $more))";
    let invalid = "(i32.store (i32.const 2048) (i32.const -1)) (call $log (i32.const 2) (i32.const \
        2048) (i32.const 4))";
    let far = "(call $log (i32.const 2) (i32.const -8) (i32.const 64))";
    let level = "(call $log (i32.const 77) (i32.const 4096) (i32.const 1))";
    let mut cases = attacks::broken_components(&around);
    cases.extend([
        fails("spins", hostile(vec![spin()]), "deadline", ""),
        fails("grows for ever", hostile(vec![Step::Wat(growing.into())]), "deadline", ""),
        fails(
            "100,000 statements",
            hostile(vec![Step::Repeat(100_000, Box::new(execute("SELECT 1")))]),
            "limit",
            "",
        ),
        completes(
            "floods the log",
            hostile(vec![Step::Repeat(200_000, Box::new(Step::Log("flood flood flood".into())))]),
        ),
        fails("a line that is not UTF-8", hostile(vec![Step::Wat(invalid.into())]), "trap", ""),
        fails("a line outside the memory", hostile(vec![Step::Wat(far.into())]), "trap", ""),
        fails("a line of no level", hostile(vec![Step::Wat(level.into())]), "trap", ""),
        fails("no component at all to speak of", encode(&tiny()), "trap", ""),
    ]);
    cases
}

/// Exports what it must and answers nothing that makes sense.
fn tiny() -> String {
    oncebox_tests::guests::text(&[], &End::Wat("(i32.const 2147483640)".to_owned()))
}

/// What could go wrong: everything in the list of the issue, and that the victim notices.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_tenant_reaches_nothing_that_is_not_its_own() {
    let mut fixture = HostileFixture::new().await;
    fixture.deploy("run", &hostile(RUN), 1_500).await;
    // Catalogs are long.
    fixture.deploy("sweep", &hostile(RUN), 8_000).await;
    fixture.deploy("tell", &hostile(TELL), 1_500).await;
    let handlers = handlers();
    for case in &handlers {
        fixture.deploy(&case.name, &case.component, 1_500).await;
    }
    // The planner's statistics hold values.
    fixture.pool.execute("ANALYZE").await.unwrap();
    fixture.open().await;
    let (stop, sent, loading) = fixture.start_load();
    fixture.settled(fixture.load, 20).await;
    let before = dump::foreign(&fixture).await;
    let watch = Watch::start(&fixture.pool);

    let (sent_by_attacker, must_fail) = attack(&fixture, &handlers).await;
    let mut answers = migrate(&fixture).await;
    fixture.settled(fixture.evil, sent_by_attacker).await;
    answers.extend(requests(&fixture).await);

    let after = dump::foreign(&fixture).await;
    let differences = dump::differences(&before, &after);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    let shown = watch.end().await;
    const REACHED: &str =
        "SELECT DISTINCT status, reason FROM oncebox.inbox WHERE consumer_id = $1";
    let rows: Vec<(String, Option<String>)> =
        sqlx::query_as(REACHED).bind(fixture.evil).fetch_all(&fixture.pool).await.unwrap();
    rows.iter().for_each(|(status, reason)| coverage::record_state(status, reason.as_deref()));
    locks_itself_out(&fixture).await;

    let settled = sent.load(Ordering::Relaxed);
    fixture.settled(fixture.load, settled + 20).await; // it went on meanwhile
    stop.store(true, Ordering::Relaxed);
    loading.await.unwrap();
    let sent = sent.load(Ordering::Relaxed);
    fixture.settled(fixture.load, sent).await;
    assert!(fixture.is_running(), "the host ended: {}", fixture.log());

    unharmed(&fixture, sent).await;
    own_effects(&fixture, &must_fail).await;
    nothing_told(&fixture, &answers).await;
    no_secret_shown(&fixture, &shown).await;
    seen_in_catalogs(&fixture).await;
    fixture.strike();
}

/// Everything at once, as fast as the broker takes it. How many messages, and which of them have to
/// fail.
async fn attack(fixture: &HostileFixture, handlers: &[attacks::Case]) -> (usize, Vec<String>) {
    let (mut count, mut must_fail) = (0, Vec::new());
    for attempt in sweep(fixture).await {
        fixture.send("attacks", "sweep", &attempt.id, attempt.sql.as_bytes()).await;
        count += 1;
    }
    for attempt in statements(fixture).await {
        for how in ["run", "tell"] {
            let id = format!("{how} {}", attempt.id);
            fixture.send("attacks", how, &id, attempt.sql.as_bytes()).await;
            count += 1;
            must_fail.extend(attempt.fails.then_some(id));
        }
        // By way of the ledger, which is of Rust, and a trigger of its table. What locks it out
        // comes later.
        if !attempt.sql.contains("PASSWORD") {
            let payload = json!({ "account": attempt.sql, "amount": "1", "open_account": true });
            fixture
                .send(
                    "books",
                    "book",
                    &format!("book {}", attempt.id),
                    payload.to_string().as_bytes(),
                )
                .await;
            count += 1;
        }
    }
    for case in handlers {
        fixture.send("attacks", &case.name, &case.name, b"{}").await;
        count += 1;
        must_fail.extend((case.status != "completed").then(|| case.name.clone()));
    }
    for (id, payload) in [
        ("not JSON", b"\xff\xfe{".as_slice()),
        ("deep JSON", "[".repeat(100_000).as_bytes()),
        ("NUL", b"\0\0\0"),
        ("nothing", b""),
    ] {
        fixture.send("books", "book", &format!("payload {id}"), payload).await;
        fixture.send("attacks", "run", &format!("payload of run {id}"), payload).await;
        count += 2;
    }
    (count, must_fail)
}

/// What is answered to every operation that reads, on its own things and on the victim's.
async fn requests(fixture: &HostileFixture) -> Vec<String> {
    let document = serde_json::to_value(oncebox_api::document()).unwrap();
    let mut answers = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        if item.get("get").is_none() || path == "/openapi.json" {
            continue;
        }
        for tenant in ["mallory", "victim", "%2E%2E%2Fvictim", "mallory%00", "MALLORY"] {
            for (consumer, id) in
                [("evil", "run%20a%20view"), ("load", "1"), ("evil", "x%27%20OR%20true%20--")]
            {
                for number in 1..=3 {
                    let filled = path
                        .replace("{tenant}", tenant)
                        .replace("{consumer}", consumer)
                        .replace("{message_id}", id)
                        .replace("{handler}", "ledger")
                        .replace("{digest}", "00")
                        .replace("{other}", "ff");
                    let parts: Vec<_> = filled
                        .split('/')
                        .map(|part| {
                            if part.starts_with('{') { number.to_string() } else { part.to_owned() }
                        })
                        .collect();
                    let answer = fixture.ask("GET", &parts.join("/"), None).await;
                    assert!(
                        tenant == "mallory" && path.starts_with("/v1/tenants/{tenant}")
                            || path == "/v1/whoami"
                            || !answer.starts_with("HTTP/1.1 2"),
                        "{path} of `{tenant}`: {answer}"
                    );
                    answers.push(answer);
                    if !path.contains("_id}") {
                        break;
                    }
                }
                if !path.contains("{consumer}") {
                    break;
                }
            }
            if !path.contains("{tenant}") {
                break;
            }
        }
    }
    answers
}

/// What the API says to migrations of the attacker's, and to the same for the victim.
async fn migrate(fixture: &HostileFixture) -> Vec<String> {
    let mut answers = Vec::new();
    for (number, sql) in migrations(fixture).into_iter().enumerate() {
        let body =
            json!({ "name": format!("mine-{number}-{:08x}", rand::random::<u32>()), "sql": sql });
        for tenant in ["mallory", "victim"] {
            answers.push(
                fixture.ask("POST", &format!("/v1/tenants/{tenant}/migrations"), Some(&body)).await,
            );
        }
    }
    answers
}

/// A tenant that may write functions can change its own password and settings. It harms itself
/// alone, `doctor` says so, and what it says puts it right.
async fn locks_itself_out(fixture: &HostileFixture) {
    let settled = fixture
        .texts(&format!(
            "SELECT count(*)::text FROM oncebox.inbox WHERE consumer_id = {} AND \
            processed_at IS NOT NULL",
            fixture.evil
        ))
        .await;
    let settled: usize = settled[0].parse().unwrap();
    for (id, sql) in [
        (
            "reads and writes by default",
            "ALTER ROLE CURRENT_USER SET default_transaction_read_only = off",
        ),
        (
            "is a replica by default",
            "ALTER ROLE CURRENT_USER SET session_replication_role = replica",
        ),
        ("changes its password", "ALTER ROLE CURRENT_USER PASSWORD 'mine'"),
    ] {
        fixture
            .send(
                "attacks",
                "run",
                id,
                format!("INSERT INTO now_does VALUES ($do${sql}$do$)").as_bytes(),
            )
            .await;
    }
    fixture.settled(fixture.evil, settled + 3).await;
    let limits = HostLimits { connections_max: 32 };
    let findings = fixture.control.doctor().run(limits).await.unwrap();
    let wrong: Vec<_> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && !finding.found.contains("`fsync`"))
        .collect();
    for says in ["cannot log in", "do not default to read-only"] {
        assert!(
            wrong.iter().any(|finding| finding.found.contains(says)),
            "`doctor` should say `{says}`: {findings:#?}"
        );
    }
    for finding in &wrong {
        assert!(
            finding.found.contains(&fixture.attacker.login) || finding.found.contains("mallory"),
            "another than the attacker is harmed: {finding:#?}"
        );
        fixture
            .pool
            .execute(sqlx::raw_sql(AssertSqlSafe(finding.sql.clone().unwrap())))
            .await
            .unwrap();
    }
    fixture.send("attacks", "run", "after it was let in again", b"SELECT 1").await;
    fixture.settled(fixture.evil, settled + 4).await;
}

/// The victim's messages took effect once each, at their first attempt.
async fn unharmed(fixture: &HostileFixture, sent: usize) {
    let odd = format!(
        "SELECT concat_ws(' ', message_id, status, reason, attempts, last_error) FROM \
            oncebox.inbox WHERE consumer_id = {} AND NOT (status = 'completed' AND attempts = 1)",
        fixture.load
    );
    assert_eq!(fixture.texts(&odd).await, [""; 0]);
    let schema = &fixture.victim.schema_name;
    let counted = format!(
        "SELECT concat_ws(' ', (SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {}), \
            count(*), count(DISTINCT message_id), sum(amount)::int, \
         (SELECT balance::int FROM {schema}.account WHERE account LIKE 'a-%')) FROM \
         {schema}.ledger_entry",
        fixture.load
    );
    assert_eq!(fixture.texts(&counted).await, [format!("{sent} {sent} {sent} {sent} {sent}")]);
    assert_eq!(fixture.texts("SELECT xid::text FROM oncebox.guard").await, [""; 0]);
}

/// Of the attacker's own messages those have an effect that completed, and what has to fail does.
async fn own_effects(fixture: &HostileFixture, must_fail: &[String]) {
    let schema = &fixture.attacker.schema_name;
    let odd = format!(
        "WITH e AS (SELECT message_id, count(*) AS n FROM (SELECT message_id FROM {schema}.effect \
            UNION ALL SELECT message_id FROM {schema}.ledger_entry) x GROUP BY 1) \
         SELECT concat_ws(' ', message_id, i.status, i.reason, e.n) FROM (SELECT * FROM \
         oncebox.inbox WHERE consumer_id = {}) i FULL JOIN e USING (message_id) \
         WHERE coalesce(e.n, 0) <> (i.status IS NOT DISTINCT FROM 'completed')::int",
        fixture.evil
    );
    assert_eq!(
        fixture.texts(&odd).await,
        [""; 0],
        "a completed message has one effect, any other none"
    );
    let completed = format!(
        "SELECT message_id FROM oncebox.inbox WHERE consumer_id = {} AND status = 'completed'",
        fixture.evil
    );
    let completed: BTreeSet<_> = fixture.texts(&completed).await.into_iter().collect();
    let succeeded: Vec<_> = must_fail.iter().filter(|id| completed.contains(*id)).collect();
    assert!(succeeded.is_empty(), "these should fail: {succeeded:?}");
}

/// Nothing that the attacker sees holds the marker, or a secret.
async fn nothing_told(fixture: &HostileFixture, answers: &[String]) {
    let mut told: Vec<_> = answers.iter().map(|answer| ("the API", answer.clone())).collect();
    let rows = format!(
        "SELECT to_jsonb(i)::text || encode(coalesce(payload, ''), 'escape') FROM oncebox.inbox i \
            WHERE consumer_id = {}",
        fixture.evil
    );
    told.extend(fixture.texts(&rows).await.into_iter().map(|row| ("the inbox", row)));
    for table in ["loot", "account", "ledger_entry", "effect", "now_does", "then_does"] {
        let rows = format!("SELECT t::text FROM {}.{table} t", fixture.attacker.schema_name);
        told.extend(fixture.texts(&rows).await.into_iter().map(|row| ("a table of its own", row)));
    }
    let log = fixture.log();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("mallory"))
        .map(|line| ("the log", line.to_owned()))
        .collect();
    assert!(
        lines.len() > 100,
        "its lines are not found: {}",
        log.lines().take(20).collect::<Vec<_>>().join("\n")
    );
    assert!(told.len() > 1_000, "{}", told.len());
    told.extend(lines);
    for what in fixture.secrets.iter().chain([&fixture.marker]) {
        for (place, text) in &told {
            assert!(
                !text.contains(what.as_str()),
                "{place} tells the attacker `{what}`: {}",
                text.chars().take(2_000).collect::<String>()
            );
        }
    }
}

/// Neither sessions nor logs show a secret, nor payloads of messages.
async fn no_secret_shown(
    fixture: &HostileFixture,
    shown: &std::collections::BTreeMap<String, String>,
) {
    assert!(shown.len() > 5, "{shown:?}");
    for (query, user) in shown {
        let has_secret = fixture.secrets.iter().any(|secret| query.contains(secret.as_str()));
        let has_payload = *user == fixture.victim.login && query.contains(&fixture.marker);
        assert!(!has_secret && !has_payload, "a session of `{user}` shows: {query}");
    }
    // The hashes that the host stores are parameters of its own login; what opens something is not.
    let opening = &fixture.secrets[..5];
    for (name, log) in
        [("the host's log", fixture.log()), ("the server's log", fixture.server_log())]
    {
        assert!(log.len() > 10_000, "{name} is there");
        let line =
            log.lines().find(|line| opening.iter().any(|secret| line.contains(secret.as_str())));
        assert_eq!(line, None, "{name} shows a secret");
    }
}

/// What catalogs show of the victim is what the documentation says, and no more.
async fn seen_in_catalogs(fixture: &HostileFixture) {
    const DOCS: &str = include_str!("../../../docs/isolation.md");
    let listed = |heading: &str| -> BTreeSet<String> {
        let section = DOCS
            .split(heading)
            .nth(1)
            .unwrap_or_else(|| panic!("`{heading}` is missing"))
            .split("\n#")
            .next()
            .unwrap();
        section.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let loot = format!("{}.loot", fixture.attacker.schema_name);
    let found = async |pattern: &str| -> BTreeSet<String> {
        let sql = format!(
            "SELECT DISTINCT substring(split_part(what, ': ', 1) from '^(?:pg_catalog\\.)?(.*)$') \
                FROM {loot} WHERE what LIKE '%: %' AND what LIKE '%{pattern}%'"
        );
        fixture.texts(&sql).await.into_iter().collect()
    };
    let mut names = found(SEEN).await;
    for opaque in [&fixture.victim.schema_name, &fixture.victim.login] {
        names.extend(found(opaque).await);
    }
    let (always, at_times) = (listed("### Relations that show names"), listed("### At times"));
    let surprising: Vec<_> =
        names.iter().filter(|name| !always.contains(*name) && !at_times.contains(*name)).collect();
    assert!(
        surprising.is_empty(),
        "names of another tenant are in relations that docs/isolation.md does not list: \
            {surprising:?}; all: {names:?}"
    );
    let gone: Vec<_> = always.difference(&names).collect();
    assert!(
        gone.is_empty(),
        "docs/isolation.md lists relations that show nothing of another tenant: {gone:?}"
    );
    let swept = format!(
        "SELECT concat_ws(' ', substr(message_id, 7), status, reason) FROM oncebox.inbox WHERE \
            consumer_id = {} AND message_id LIKE 'sweep %'",
        fixture.evil
    );
    let failed =
        fixture.texts(&swept).await.into_iter().filter_map(|row| {
            row.strip_suffix(" failed_terminal sql_error:42501").map(str::to_owned)
        });
    let denied: BTreeSet<_> =
        failed.map(|name| name.trim_start_matches("pg_catalog.").to_owned()).collect();
    assert_eq!(denied, listed("### Relations that are closed"));
    let odd: Vec<_> = fixture
        .texts(&swept)
        .await
        .into_iter()
        .filter(|row| !row.ends_with(" completed") && !row.ends_with(":42501"))
        .collect();
    assert_eq!(odd, [""; 0], "these were not read, and not denied either");
    // The tenant's name is nobody's business.
    let told = format!("SELECT what FROM {loot} WHERE what ~ '\\mvictim\\M' LIMIT 3");
    assert_eq!(fixture.texts(&told).await, [""; 0]);
}
