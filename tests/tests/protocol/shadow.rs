//! A shadow tells how a candidate would have changed the tables, and changes nothing itself. What
//! could go wrong: something of its transaction is committed; it starts from rows that the live
//! version did not see, so that it finds differences where there are none; it misses some; or the
//! live path waits for it, or fails because of it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use oncebox_control::{DeploymentRole, NewDeployment, ShadowReport};
use oncebox_inbox::{Budget, ConsumerInbox, SessionSettings, Sessions};
use oncebox_model::{
    Shadow,
    handler::{Answer, DeliveryKind, Handler, Run},
    outcome::{Failure, FailureKind},
    record::Record,
    tx::Tx,
};
use oncebox_tests::inbox::{
    Guest, InboxFixture, PlainHandler, PlainHandlers, Script, TestConsumer, code, deliver, execute,
    record,
};
use oncebox_tests::wait::DEADLINE;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::time::{Instant, sleep, timeout};

/// A tenant with a consumer, a live version and a shadow.
struct ShadowFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
    deployment_id: i64,
}

impl ShadowFixture {
    async fn new(schema: &str, policy: &str) -> Self {
        let inbox = InboxFixture::new().await;
        let consumer = inbox.simple(schema, policy).await;
        let deploy = |new: NewDeployment, bytes: &'static [u8]| {
            let (tenant, name) = (consumer.tenant.name.clone(), consumer.row.name.clone());
            let control = inbox.control.clone();
            async move { control.versions().deploy_compiled(&tenant, &name, new, bytes).await.unwrap() }
        };
        deploy(NewDeployment::stable("*", "h", ""), b"live").await;
        let shadow = NewDeployment {
            role: DeploymentRole::Shadow,
            percent: Some(100.0),
            ..NewDeployment::stable("*", "h", "")
        };
        let deployment_id = deploy(shadow, b"candidate").await.deployment_id;
        assert_eq!(
            inbox.control.shadows().reconcile_capture(&consumer.tenant).await.unwrap(),
            Vec::<String>::new()
        );
        Self { inbox, consumer, deployment_id }
    }

    fn shadow(&self, handler: Arc<dyn Handler>) -> Shadow {
        Shadow {
            deployment_id: self.deployment_id,
            handler,
            percent: 100.0,
            duration: Duration::from_secs(10),
        }
    }

    /// A host whose live version and candidate both do what the messages say.
    fn host(&self) -> Arc<ConsumerInbox> {
        self.host_of(self.shadow(Script::handler(self.inbox.script.clone())))
    }

    fn host_of(&self, shadow: Shadow) -> Arc<ConsumerInbox> {
        let live = Script::handler(self.inbox.script.clone());
        self.inbox.host_with(
            &self.consumer,
            PlainHandlers::shadowed(live, shadow),
            &SessionSettings::default(),
        )
    }

    /// What was found, once so many messages are accounted for.
    async fn report(&self, messages: i64) -> ShadowReport {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let report = self.inbox.control.shadows().report(self.deployment_id).await.unwrap();
            if report.messages >= messages {
                let skipped: i64 = report.skipped.iter().map(|skipped| skipped.messages).sum();
                assert_eq!(
                    report.messages,
                    report.same + report.differ + report.failed + skipped,
                    "{report:#?}"
                );
                assert_eq!(report.messages, messages, "{report:#?}");
                return report;
            }
            assert!(
                Instant::now() < deadline,
                "{messages} messages were not accounted for: {report:#?}"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Everything in the tenant's tables.
    async fn dump(&self) -> Vec<String> {
        let mut connection = self.inbox.superuser().await;
        dump(&mut connection, &self.consumer.tenant.schema_name).await
    }

    async fn finish(self, host: Arc<ConsumerInbox>) {
        host.finish_shadows().await;
        self.inbox.finish().await;
    }
}

const TABLES: &str = "SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = \
    $1::text::regnamespace AND c.relkind = 'r' ORDER BY 1";

/// Every row of every table as text.
async fn dump(connection: &mut PgConnection, schema: &str) -> Vec<String> {
    let tables: Vec<String> =
        sqlx::query_scalar(TABLES).bind(schema).fetch_all(&mut *connection).await.unwrap();
    let mut rows = Vec::new();
    for table in tables {
        let sql = format!("SELECT '{table} ' || x::text FROM {schema}.\"{table}\" x ORDER BY 1");
        rows.extend(
            sqlx::query_scalar::<_, String>(AssertSqlSafe(sql))
                .fetch_all(&mut *connection)
                .await
                .unwrap(),
        );
    }
    rows
}

fn skipped(report: &ShadowReport) -> Vec<(&str, i64)> {
    report.skipped.iter().map(|skipped| (skipped.reason.as_str(), skipped.messages)).collect()
}

/// The newest differences, oldest first, in one line each.
fn lines(report: &ShadowReport) -> Vec<String> {
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    let line = |d: &oncebox_control::ShadowDifference| {
        format!(
            "{} {} {} {}: {} {} {}",
            d.table,
            d.change,
            d.column,
            shown(&d.row_key),
            shown(&d.before),
            shown(&d.live),
            shown(&d.candidate)
        )
    };
    report.differences.iter().rev().map(line).collect()
}

/// A candidate that looks at the tables as it finds them, then does what the message says.
fn looking(fixture: &ShadowFixture, found: &Arc<Mutex<Vec<Vec<String>>>>) -> Arc<dyn Handler> {
    let (script, found) = (Script::handler(fixture.inbox.script.clone()), found.clone());
    let schema = fixture.consumer.tenant.schema_name.clone();
    PlainHandler::new(1, move |tx: &Tx, run: &Run<'_>| {
        let (script, found, schema) = (script.clone(), found.clone(), schema.clone());
        Box::pin(async move {
            let mut statement = tx.statement().await;
            let rows = dump(statement.connection(), &schema).await;
            statement.finish(None);
            found.lock().unwrap().push(rows);
            script.handle(tx, run).await
        })
    })
}

/// Live run, trial, look: the candidate finds the tables as the live run found them, to the last
/// byte; it does the same and so nothing differs; and the tables are as the live run left them.
async fn check_exact(schema: &str, script: &str) {
    let fixture = ShadowFixture::new(schema, "").await;
    let found = Arc::default();
    let host = fixture.host_of(fixture.shadow(looking(&fixture, &found)));
    let before = fixture.dump().await;
    deliver(&host, &[record(0, "m", script)]).await;
    let after = fixture.dump().await;
    let report = fixture.report(1).await;
    assert_eq!((report.same, lines(&report)), (1, vec![]), "{script}: {:?}", skipped(&report));
    assert_eq!(
        *found.lock().unwrap(),
        std::slice::from_ref(&before),
        "{script}: the candidate began with other rows"
    );
    assert_eq!(fixture.dump().await, after, "{script}: the trial left something");
    assert_ne!(before, after, "{script}: it changed nothing");
    assert_eq!(
        fixture.inbox.script.runs("m").iter().map(|ran| ran.kind).collect::<Vec<_>>(),
        [DeliveryKind::Live, DeliveryKind::Shadow]
    );
    fixture.finish(host).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_change_is_captured_and_undone_to_the_byte() {
    const ITEM: &str = "CREATE TABLE item (id int PRIMARY KEY, n int, note text); \
        INSERT INTO item SELECT i, i * 10, 'note ' || i FROM generate_series(1, 5) i;";
    const NO_KEY: &str = "CREATE TABLE line (n int, note json); \
        INSERT INTO line VALUES (1, '{\"a\":1}'), (1, '{\"a\":1}'), (1, '{ \"a\": 1 }'), (2, \
        NULL);";
    const FAMILY: &str = "CREATE TABLE parent (id int PRIMARY KEY, name text); \
        CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE ON \
        UPDATE CASCADE, n int); \
        CREATE TABLE friend (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE SET NULL \
        ON UPDATE CASCADE); \
        CREATE TABLE node (id int PRIMARY KEY, up int REFERENCES node ON DELETE CASCADE); \
        INSERT INTO parent VALUES (1, 'a'), (2, 'b'); INSERT INTO child VALUES (1, 1, 0), (2, 1, \
        0), (3, 2, 0); \
        INSERT INTO friend VALUES (1, 1), (2, 2); INSERT INTO node VALUES (1, NULL), (2, 1), (3, \
        2);";
    const PARTS: &str = "CREATE TABLE part (day int, id int, note text, PRIMARY KEY (day, id)) \
        PARTITION BY RANGE (day); \
        CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (10); \
        CREATE TABLE part_2 (note text, gone int, id int NOT NULL, day int NOT NULL, PRIMARY KEY \
        (day, id)); \
        ALTER TABLE part_2 DROP COLUMN gone; ALTER TABLE part ATTACH PARTITION part_2 FOR VALUES \
        FROM (10) TO (20); \
        INSERT INTO part VALUES (1, 1, 'a'), (11, 2, 'b');";
    const KEYS: &str = "CREATE TABLE made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int, \
        twice int GENERATED ALWAYS AS (a * 2) STORED); \
        INSERT INTO made (a) VALUES (1), (2); \
        CREATE TABLE pair (\"Odd \"\"name\" text, b numeric, c text, PRIMARY KEY (b, \"Odd \
        \"\"name\")); INSERT INTO pair VALUES ('x', 1.50, 'c'); \
        CREATE TABLE later (id int PRIMARY KEY, of int REFERENCES later DEFERRABLE INITIALLY \
        DEFERRED);";
    let cases = [
        (ITEM, "sql INSERT INTO item VALUES (6, NULL, ''), (7, 1, 'a \"b\" \\ , () \u{e9}')"),
        (ITEM, "sql UPDATE item SET n = n + 1, note = NULL WHERE id < 3"),
        (ITEM, "sql DELETE FROM item WHERE id > 2"),
        (
            ITEM,
            "sql INSERT INTO item VALUES (1, 7), (9, 9) ON CONFLICT (id) DO UPDATE SET n = item.n \
                + excluded.n",
        ),
        (
            ITEM,
            "sql WITH gone AS (DELETE FROM item WHERE id = 1 RETURNING *), more AS (UPDATE item \
                SET n = 0 WHERE id = 2 RETURNING *) \
             INSERT INTO item SELECT id + 20, n, note FROM gone UNION ALL SELECT id + 20, n, note \
             FROM more",
        ),
        (
            ITEM,
            "sql MERGE INTO item USING (VALUES (1), (30)) v(i) ON id = i WHEN MATCHED THEN DELETE \
                WHEN NOT MATCHED THEN INSERT VALUES (i, 0, 'm')",
        ),
        (
            ITEM,
            "sql UPDATE item SET n = 1 WHERE id = 1\nsql UPDATE item SET n = 2 WHERE id = 1\nsql \
                DELETE FROM item WHERE id = 1\nsql INSERT INTO item VALUES (1, 3)",
        ),
        (ITEM, "sql UPDATE item SET id = id + 100 WHERE id = 3"),
        (ITEM, "sql INSERT INTO item VALUES (8, 1)\nsql DELETE FROM item WHERE id = 8"),
        (NO_KEY, "sql INSERT INTO line VALUES (1, '{\"a\":1}'), (3, '[ ]')"),
        (NO_KEY, "sql UPDATE line SET n = n + 1 WHERE note::text = '{ \"a\": 1 }'"),
        (NO_KEY, "sql DELETE FROM line WHERE ctid = (SELECT min(ctid) FROM line)"),
        (NO_KEY, "sql DELETE FROM line"),
        (FAMILY, "sql DELETE FROM parent WHERE id = 1"),
        (FAMILY, "sql UPDATE parent SET id = 10 WHERE id = 1"),
        (
            FAMILY,
            "sql INSERT INTO parent VALUES (3, 'c')\nsql INSERT INTO child VALUES (4, 3, 1)\nsql \
                UPDATE child SET parent = 3 WHERE id = 1",
        ),
        (FAMILY, "sql DELETE FROM node WHERE id = 1"),
        (FAMILY, "sql INSERT INTO node VALUES (4, 5), (5, 4)"),
        (PARTS, "sql INSERT INTO part VALUES (2, 3, 'x'), (12, 4, 'y')"),
        (PARTS, "sql UPDATE part SET day = 15, note = 'moved' WHERE id = 1"),
        (PARTS, "sql UPDATE part SET note = note || '!'\nsql DELETE FROM part WHERE id = 2"),
        (
            KEYS,
            "sql INSERT INTO made (a) VALUES (7)\nsql UPDATE made SET a = 5 WHERE id = 1\nsql \
                DELETE FROM made WHERE id = 2",
        ),
        (KEYS, "sql UPDATE pair SET c = NULL\nsql INSERT INTO pair VALUES ('y', 1.5)"),
        (KEYS, "sql INSERT INTO later VALUES (1, 2)\nsql INSERT INTO later VALUES (2, 1)"),
    ];
    for (schema, script) in cases {
        check_exact(schema, script).await;
    }
}

/// Values of every type that a handler can write, and of some that it cannot name, come back as
/// they were.
#[tokio::test(flavor = "multi_thread")]
async fn every_type_comes_back_as_it_was() {
    let types = [
        ("bool", "true"),
        ("int2", "-32768"),
        ("int8", "9223372036854775807"),
        ("float4", "1.1"),
        ("float8", "0.1"),
        ("float8", "-0"),
        ("float8", "NaN"),
        ("numeric", "-123456789012345678901234567890.000100"),
        ("numeric(10,2)", "7.50"),
        ("text", "\u{fc}n\u{ef}c\u{f6}d\u{e9} \u{1f980} \"q\" \\ ,()"),
        ("varchar(5)", "a  "),
        ("char(5)", "a"),
        ("\"char\"", "x"),
        ("name", "n"),
        ("bytea", "\\x00ff5c"),
        ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("json", "{ \"b\" : 1.10,  \"a\": null }"),
        ("jsonb", "{\"b\": 1.10, \"a\": \"\\u00e9\"}"),
        ("date", "infinity"),
        ("date", "2024-02-29"),
        ("time", "23:59:59.999999"),
        ("timetz", "12:00:00+05:30"),
        ("timestamp", "-infinity"),
        ("timestamp", "2024-02-29 12:34:56.789012"),
        ("timestamptz", "2024-02-29 12:34:56.789012+03"),
        ("interval", "1 year -2 mons 3 days -04:05:06.789"),
        ("int4[]", "[2:3]={1,NULL}"),
        ("text[]", "{\"a,b\",\"NULL\",NULL,\"\"}"),
        ("mood", "happy"),
        ("amount", "12.30"),
        ("pair", "(1,\"a \"\"b\"\"\")"),
        ("pair[]", "{\"(1,x)\",NULL}"),
        ("int4range", "[1,5)"),
        ("tstzrange", "[2024-01-01 00:00:00+00,)"),
        ("inet", "10.0.0.1/8"),
        ("macaddr", "08:00:2b:01:02:03"),
        ("bit(3)", "101"),
        ("varbit", "1"),
        ("point", "(0.1,-2)"),
        ("xml", "<a b=\"c\">d</a>"),
        ("tsvector", "'a':1 'b':2A"),
        ("money", "$1.50"),
        ("oid", "7"),
        ("regclass", "pg_class"),
        ("pg_lsn", "16/B374D848"),
    ];
    let mut columns: Vec<_> =
        types.iter().enumerate().map(|(n, (name, _))| format!("c{n} {name}")).collect();
    let literal = |text: &str| format!("'{}'", text.replace('\'', "''"));
    let values: Vec<_> = types.iter().map(|(_, value)| literal(value)).collect();
    let names: Vec<_> = (0..types.len()).map(|n| format!("c{n}")).collect();
    columns.insert(0, "id int".to_owned());
    let schema = format!(
        "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN amount AS numeric(12,2) CHECK \
            (VALUE >= 0); \
         CREATE TYPE pair AS (a int, b text); CREATE TABLE keyed ({0}, PRIMARY KEY (id)); CREATE \
         TABLE bare ({0}); \
         INSERT INTO keyed VALUES (1, {1}); INSERT INTO keyed VALUES (2); INSERT INTO bare VALUES \
         (1, {1}); INSERT INTO bare VALUES (2);",
        columns.join(", "),
        values.join(", ")
    );
    let nulls = names.iter().map(|name| format!("{name} = NULL")).collect::<Vec<_>>().join(", ");
    let set = names
        .iter()
        .zip(&values)
        .map(|(name, value)| format!("{name} = {value}"))
        .collect::<Vec<_>>()
        .join(", ");
    for table in ["keyed", "bare"] {
        check_exact(&schema, &format!("sql UPDATE {table} SET {nulls} WHERE id = 1")).await;
        check_exact(&schema, &format!("sql UPDATE {table} SET {set} WHERE id = 2")).await;
        check_exact(
            &schema,
            &format!(
                "sql DELETE FROM {table}\nsql INSERT INTO {table} VALUES (3, {})",
                values.join(", ")
            ),
        )
        .await;
    }
}

/// What could go wrong: later messages of the same transaction have changed the rows by the time of
/// the trial, and the candidate adds to theirs, or takes their rows for its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_trial_begins_where_its_own_message_began_whatever_came_later() {
    let fixture = ShadowFixture::new(
        "CREATE TABLE stock (id int PRIMARY KEY, n int); INSERT INTO stock \
        VALUES (1, 100), (2, 0);",
        "",
    )
    .await;
    let host = fixture.host();
    let scripts = [
        "sql UPDATE stock SET n = n - 1 WHERE id = 1",
        "sql UPDATE stock SET n = n * 2 WHERE id = 1\nsql INSERT INTO stock VALUES (3, 1)",
        "sql UPDATE stock SET n = n - 1 WHERE id = 1\nsql DELETE FROM stock WHERE id = 3",
        "sql DELETE FROM stock WHERE id = 2\nsql INSERT INTO stock VALUES (3, 7)",
        "sql INSERT INTO stock VALUES (2, 5)",
    ];
    let log: Vec<_> = (0..)
        .zip(scripts)
        .map(|(offset, script)| record(offset, &format!("m{offset}"), script))
        .collect();
    deliver(&host, &log).await;
    let report = fixture.report(5).await;
    assert_eq!((report.same, lines(&report)), (5, vec![]), "{:?}", skipped(&report));
    assert_eq!((report.live_statements, report.candidate_statements), (13, 13));
    fixture.finish(host).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_difference_is_named_with_table_column_and_values() {
    const SCHEMA: &str = "CREATE TABLE item (id int PRIMARY KEY, n int, note text, at \
        timestamptz); INSERT INTO item VALUES (1, 0, 'a'), (2, 0, 'b'); \
        CREATE TABLE orders (id bigserial PRIMARY KEY, what text); \
        CREATE TABLE line (id uuid DEFAULT gen_random_uuid() PRIMARY KEY, orders bigint REFERENCES \
        orders, n int);";
    const SAME: &str = "sql UPDATE item SET at = now() WHERE id = 1\nsql UPDATE item SET at = \
        clock_timestamp() WHERE id = 2\n\
        sql WITH o AS (INSERT INTO orders (what) VALUES ('a'), ('b') RETURNING *) INSERT INTO line \
        (orders, n) SELECT id, length(what) FROM o";
    let cases: &[(&str, &str, &[&str])] = &[
        ("same", SAME, &[]),
        (
            "column",
            "live sql UPDATE item SET n = 1 WHERE id = 1\nshadow sql UPDATE item SET n = 2 WHERE \
                id = 1",
            &[r#"item updated n {"id":"1"}: 0 1 2"#],
        ),
        (
            "more",
            "shadow sql UPDATE item SET note = NULL WHERE id = 2",
            &[r#"item updated note {"id":"2"}: b b -"#],
        ),
        (
            "less",
            "live sql DELETE FROM item WHERE id = 2",
            &[
                r#"item deleted  {"id":"2"}: {"at":null,"id":"2","n":"0","note":"b"} - {"at":null,"id":"2","n":"0","note":"b"}"#,
            ],
        ),
        (
            "sequence",
            "live sql INSERT INTO orders (what) VALUES ('x')\nshadow sql INSERT INTO orders (what) \
                VALUES ('y')",
            &["orders inserted what {\"id\":\"#\"}: - x y"],
        ),
        (
            "result",
            "live result {\"a\": 1}\nshadow result {\"a\": 2}",
            &[" outcome result -: - {\"a\": 1} {\"a\": 2}"],
        ),
        ("same result", "live result {\"a\": 1,\"b\":2}\nshadow result {\"b\":2, \"a\":1}", &[]),
    ];
    for (name, script, expected) in cases {
        let fixture = ShadowFixture::new(SCHEMA, "").await;
        let host = fixture.host();
        deliver(&host, &[record(0, "m", script)]).await;
        let report = fixture.report(1).await;
        let mut found = lines(&report);
        if *name == "sequence" {
            found
                .iter_mut()
                .for_each(|line| *line = line.replace(|c: char| c.is_ascii_digit(), "#"));
        }
        assert_eq!(found, *expected, "{name}: {report:#?}");
        assert_eq!(
            (report.same, report.differ),
            (expected.is_empty().into(), (!expected.is_empty()).into()),
            "{name}"
        );
        let sums: i64 = report.sums.iter().map(|sum| sum.messages).sum();
        assert_eq!(sums, expected.len() as i64, "{name}: {:?}", report.sums);
        fixture.finish(host).await;
    }
}

/// What could go wrong: a candidate that fails, however it fails, leaves an effect, fails the live
/// message, or is taken for one that did the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_fails_leaves_the_live_path_as_it_is() {
    let fixture = ShadowFixture::new(
        "CREATE TABLE item (id int PRIMARY KEY, up int REFERENCES item \
        DEFERRABLE INITIALLY DEFERRED);",
        "",
    )
    .await;
    let shadow = Shadow {
        duration: Duration::from_millis(400),
        ..fixture.shadow(Script::handler(fixture.inbox.script.clone()))
    };
    let host = fixture.host_of(shadow);
    let cases = [
        ("trap", "shadow trap", "failed"),
        ("reject", "shadow reject", "failed"),
        ("statement", "shadow sql INSERT INTO item VALUES (NULL)", "failed"),
        ("swallowed", "shadow swallow INSERT INTO item VALUES (NULL)", "failed"),
        ("deferred", "shadow sql INSERT INTO item VALUES (1, 77)", "failed"),
        ("no json", "shadow result {", "failed"),
        ("commit", "shadow sql COMMIT", "failed"),
        ("rollback", "shadow sql ROLLBACK", "not_captured"),
        ("slow", "shadow sleep 5000", "time"),
        (
            "slow statement",
            "shadow sql SELECT count(*) FROM generate_series(1, 1000000000)",
            "time",
        ),
        (
            "many",
            "shadow sql INSERT INTO item SELECT i FROM generate_series(1, 300) i",
            "candidate_changes",
        ),
        ("large", "shadow sql ALTER TABLE item ADD note text", "failed"),
        ("lost", "shadow sql SELECT pg_terminate_backend(pg_backend_pid())", "failed"),
        (
            "live many",
            "sql INSERT INTO item SELECT i FROM generate_series(1000, 1300) i",
            "too_many_changes",
        ),
        ("fine", "sql INSERT INTO item VALUES (5)", "same"),
    ];
    let (mut failed, mut same, mut reasons) =
        (0, 0, std::collections::BTreeMap::<&str, i64>::new());
    for (offset, (id, script, verdict)) in (0..).zip(cases) {
        deliver(&host, &[record(offset, id, script)]).await;
        let report = fixture.report(offset + 1).await;
        match verdict {
            "failed" => failed += 1,
            "same" => same += 1,
            reason => *reasons.entry(reason).or_default() += 1,
        }
        assert_eq!(
            (report.failed, report.same, report.differ),
            (failed, same, 0),
            "`{id}`: {report:#?}"
        );
        assert_eq!(
            skipped(&report),
            reasons.iter().map(|(reason, count)| (*reason, *count)).collect::<Vec<_>>(),
            "`{id}`"
        );
        assert_eq!(
            fixture.inbox.row(&fixture.consumer, id).await.state(),
            ("completed", None, 1),
            "`{id}`"
        );
        assert_eq!(fixture.inbox.effects(&fixture.consumer, id).await, 1, "`{id}`");
    }
    let items = format!("SELECT count(*) FROM {}.item", fixture.consumer.tenant.schema_name);
    assert_eq!(fixture.inbox.number(items).await, 302, "a trial left a row");
    fixture.finish(host).await;
}

/// What could go wrong: a live transaction that needs a row which a trial holds waits until the
/// trial ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_live_transaction_gets_a_row_that_a_trial_holds() {
    let fixture = ShadowFixture::new(
        "CREATE TABLE item (id int PRIMARY KEY, n int); INSERT INTO item VALUES (1, 0), (2, 0);",
        "",
    )
    .await;
    let host = fixture.host();
    // It holds the row and computes, holds it and waits in a statement, and waits for a row itself.
    let cases = [
        (
            "computes",
            "shadow sql UPDATE item SET n = 7 WHERE id = 1\nshadow gate held1\nshadow gate never",
            "held1",
        ),
        (
            "in a statement",
            "shadow sql UPDATE item SET n = 7 WHERE id = 1\nshadow gate held2\nshadow sql SELECT \
                count(*) FROM generate_series(1, 1000000000)",
            "held2",
        ),
    ];
    for (offset, (id, script, gate)) in (0..).zip(cases) {
        deliver(&host, &[record(offset, id, script)]).await;
        let gate = fixture.inbox.script.gate(gate);
        gate.reached(1).await;
        gate.open();
        let mut live = fixture.inbox.guest(&fixture.consumer.tenant).await;
        let started = Instant::now();
        let update = "BEGIN READ WRITE; UPDATE item SET n = n + 1 WHERE id = 1; COMMIT";
        timeout(DEADLINE, live.execute(sqlx::raw_sql(update))).await.expect("the row").unwrap();
        // 20 ms and a round trip or two on an idle machine; the trial by itself would last 10 s.
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "`{id}`: waited {:?}",
            started.elapsed()
        );
        println!("{id}: waited {:?}", started.elapsed());
        let report = fixture.report(offset + 1).await;
        assert_eq!(skipped(&report), [("stood_in_the_way", offset + 1)], "`{id}`");
        live.close().await.unwrap();
    }
    // The other way round: what someone else holds is not waited for.
    let mut other = fixture.inbox.guest(&fixture.consumer.tenant).await;
    other
        .execute(sqlx::raw_sql("BEGIN READ WRITE; UPDATE item SET n = n + 1 WHERE id = 2"))
        .await
        .unwrap();
    deliver(&host, &[record(2, "waits", "shadow sql UPDATE item SET n = 7 WHERE id = 2")]).await;
    assert_eq!(skipped(&fixture.report(3).await), [("busy", 1), ("stood_in_the_way", 2)]);
    other.close().await.unwrap();
    let n = format!("SELECT sum(n)::bigint FROM {}.item", fixture.consumer.tenant.schema_name);
    assert_eq!(fixture.inbox.number(n).await, 2, "a trial left something, or took something");
    fixture.finish(host).await;
}

/// What could go wrong: trials that are slow hold up the messages behind them, or are not accounted
/// for.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_and_a_spent_budget_are_counted_and_hold_nobody_up() {
    let fixture = ShadowFixture::new("", "").await;
    let host = fixture.host();
    let log: Vec<_> = (0..150).map(|n| record(n, &format!("m{n}"), "shadow gate slow")).collect();
    deliver(&host, &log).await;
    let done = "SELECT count(*) = 150 FROM oncebox.inbox WHERE status = 'completed'";
    fixture.inbox.until(done).await;
    fixture.inbox.script.gate("slow").open();
    let report = fixture.report(150).await;
    let [("queue_full", full)] = skipped(&report)[..] else { panic!("{report:#?}") };
    assert!(
        (85..=86).contains(&full) && report.same == 150 - full,
        "64 wait and one runs: {report:#?}"
    );

    // One connection for all: a trial has none to spare, and the live path does not notice.
    let sessions = Sessions::of(
        fixture.inbox.control.tenant_databases().session_target(&fixture.consumer.tenant).unwrap(),
        &SessionSettings::default(),
        Budget::new(1),
    );
    let handlers = PlainHandlers::shadowed(
        Script::handler(fixture.inbox.script.clone()),
        fixture.shadow(Script::handler(fixture.inbox.script.clone())),
    );
    let row = fixture.consumer.row.clone();
    let poor = ConsumerInbox::new(
        row.consumer_id,
        row.tenant,
        row.name,
        fixture.consumer.policy.clone(),
        "poor".into(),
        sessions,
        handlers,
    );
    deliver(&poor, &[record(200, "last", "")]).await;
    let report = fixture.report(151).await;
    assert_eq!(skipped(&report), [("no_connection", 1), ("queue_full", full)]);
    poor.finish_shadows().await;
    fixture.finish(host).await;
}

/// What could go wrong: a guest switches capturing on, calls what only triggers may, or writes what
/// the host takes for changes; or values are kept for a consumer that keeps no payloads.
#[tokio::test(flavor = "multi_thread")]
async fn guests_cannot_reach_the_capture_and_values_follow_the_policy() {
    let fixture = ShadowFixture::new(
        "CREATE TABLE item (id int PRIMARY KEY, note text); INSERT INTO item VALUES (1, 'x');",
        "payload = 'none'",
    )
    .await;
    let mut guest = Guest::begin(&fixture.inbox, &fixture.consumer).await;
    for sql in [
        "SELECT set_config('oncebox.capture', '200', true)",
        "SELECT oncebox_host.capture(1, 'a', 'b')",
        "SELECT oncebox_host.capture_failed()",
        "SELECT * FROM oncebox_host.captured('guess')",
        "SELECT * FROM oncebox.shadow_difference",
        "SELECT * FROM oncebox.capture_missing('x')",
    ] {
        guest.execute("SAVEPOINT s").await.unwrap();
        let refused = guest.execute(sql).await.unwrap_err();
        assert_eq!(code(&refused), "42501", "{sql}: {refused}");
        guest.execute("ROLLBACK TO SAVEPOINT s").await.unwrap();
    }
    guest.execute("ROLLBACK").await.unwrap();
    drop(guest);
    let host = fixture.host();
    deliver(
        &host,
        &[record(0, "m", "shadow sql UPDATE item SET note = 'secret'\nshadow result \"secret\"")],
    )
    .await;
    let report = fixture.report(1).await;
    assert_eq!(lines(&report), ["item updated note -: - - -", " outcome result -: - - -"]);
    fixture.finish(host).await;
}

/// What could go wrong: triggers stay behind, are missing on a table that came later, or wait for a
/// table that is in use with everybody behind them.
#[tokio::test(flavor = "multi_thread")]
async fn triggers_come_with_a_shadow_and_go_with_it() {
    const TRIGGERS: &str =
        "SELECT count(*) FROM pg_trigger WHERE tgname = 'RI_oncebox_capture' AND tgparentid = 0";
    let fixture = ShadowFixture::new(
        "CREATE TABLE part (id int) PARTITION BY LIST (id); CREATE TABLE part_1 \
            PARTITION OF part FOR VALUES IN (1);",
        "",
    )
    .await;
    let (inbox, tenant) = (&fixture.inbox, &fixture.consumer.tenant);
    assert_eq!(inbox.number(TRIGGERS).await, 2);
    // A table that came later: nothing is compared until it has its trigger, which a look puts
    // there.
    inbox
        .control
        .tenant_databases()
        .apply_migration(tenant, "later", "CREATE TABLE later (id int)")
        .await
        .unwrap();
    let host = fixture.host();
    deliver(&host, &[record(0, "early", "sql INSERT INTO later VALUES (1)")]).await;
    let early = fixture.report(1).await;
    assert_eq!(
        (skipped(&early), early.uncaptured_tables.as_slice()),
        (vec![("not_installed", 1)], ["later".to_owned()].as_slice())
    );
    let mut busy = fixture.inbox.guest(tenant).await;
    busy.execute(sqlx::raw_sql("BEGIN READ WRITE; INSERT INTO later VALUES (2)")).await.unwrap();
    let looking = tokio::spawn({
        let (control, tenant) = (inbox.control.clone(), tenant.clone());
        async move { control.shadows().reconcile_capture(&tenant).await }
    });
    let mut writer = fixture.inbox.guest(tenant).await;
    for _ in 0..20 {
        let started = Instant::now();
        writer
            .execute(sqlx::raw_sql("BEGIN READ WRITE; INSERT INTO later VALUES (3); ROLLBACK"))
            .await
            .unwrap();
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "a writer waited {:?} behind a trigger",
            started.elapsed()
        );
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        looking.await.unwrap().unwrap(),
        ["later"],
        "a table in use is left for the next look"
    );
    busy.execute(sqlx::raw_sql("COMMIT")).await.unwrap();
    assert!(inbox.control.shadows().reconcile_capture(tenant).await.unwrap().is_empty());
    deliver(&host, &[record(1, "late", "sql INSERT INTO later VALUES (4)")]).await;
    let late = fixture.report(2).await;
    assert!(late.same == 1 && late.uncaptured_tables.is_empty(), "{late:?}");
    // Switched off by the tenant's own DDL; and twice for hosts that do it at the same time.
    inbox
        .control
        .tenant_databases()
        .apply_migration(tenant, "off", "ALTER TABLE later DISABLE TRIGGER \"RI_oncebox_capture\"")
        .await
        .unwrap();
    let shadows = inbox.control.shadows();
    let (one, other) =
        tokio::join!(shadows.reconcile_capture(tenant), shadows.reconcile_capture(tenant));
    assert!(one.unwrap().is_empty() && other.unwrap().is_empty());
    assert_eq!(inbox.number(TRIGGERS).await, 3);
    // The shadow ends.
    inbox
        .control
        .deployments()
        .end(&tenant.name, &fixture.consumer.row.name, fixture.deployment_id, None)
        .await
        .unwrap();
    assert!(inbox.control.shadows().reconcile_capture(tenant).await.unwrap().is_empty());
    assert_eq!(inbox.number(TRIGGERS).await, 0);
    busy.close().await.unwrap();
    writer.close().await.unwrap();
    fixture.finish(host).await;
}

/// Show 5: the demo's webhooks go to its components; of one of them a version with one changed
/// column runs as a shadow. The report shows exactly that, and the tables are those of a run
/// without it.
#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_with_one_changed_column_shows_exactly_that_on_the_demos_input() {
    const SCHEMA: &str = include_str!("../../../guest-examples/github-schema.sql");
    let events = oncebox_devkit::demo_events(5, 1_200).unwrap();
    let log: Vec<_> = (0..).zip(&events).map(|(offset, event)| webhook(offset, event)).collect();
    let pushes = events.iter().filter(|(_, kind, _)| kind == "com.github.push").count() as i64;
    assert!(pushes > 10);
    let mut tables = Vec::new();
    for with_shadow in [false, true] {
        let fixture = ShadowFixture::new(SCHEMA, "limits = { deadline_ms = 20000 }").await;
        let live = Components::load(&fixture, |bytes| bytes).await;
        // The same length, so that it stays a component.
        let candidate = Components::load(&fixture, |bytes| {
            replaced(bytes, b"pushes = activity.pushes + 1", b"pushes = activity.pushes + 2")
        })
        .await;
        let shadow = fixture.shadow(Arc::new(candidate));
        let handlers: Arc<dyn oncebox_model::handler::Handlers> = match with_shadow {
            true => PlainHandlers::shadowed(Arc::new(live), shadow),
            false => PlainHandlers::of(Arc::new(live)),
        };
        let host =
            fixture.inbox.host_with(&fixture.consumer, handlers, &SessionSettings::default());
        // In step with the trials, so that none is dropped.
        for part in log.chunks(32) {
            deliver(&host, part).await;
            if with_shadow {
                fixture.report(i64::from(part[0].offset as i32) + part.len() as i64).await;
            }
        }
        if with_shadow {
            let report = fixture.report(log.len() as i64).await;
            let sums: Vec<_> = report
                .sums
                .iter()
                .map(|s| (s.table.as_str(), s.change.as_str(), s.column.as_str()))
                .collect();
            assert_eq!(sums, [("repository_activity", "updated", "pushes")], "{report:#?}");
            let updated = report.sums[0].messages;
            assert_eq!(
                (report.differ, report.failed, skipped(&report)),
                (updated, 0, vec![]),
                "{report:#?}"
            );
            assert!(updated > 0 && updated <= pushes, "a first push inserts and is the same");
            for d in &report.differences {
                let number =
                    |value: &Option<String>| value.as_deref().unwrap().parse::<i64>().unwrap();
                assert_eq!(
                    (number(&d.live), number(&d.candidate)),
                    (number(&d.before) + 1, number(&d.before) + 2),
                    "{d:?}"
                );
            }
            println!(
                "{} messages, {} same, {} differ: {:?}",
                report.messages, report.same, report.differ, report.differences[0]
            );
        }
        let schema = &fixture.consumer.tenant.schema_name;
        let rows = format!(
            "SELECT x::text FROM {schema}.repository_activity x UNION ALL SELECT x::text FROM \
                {schema}.issue x \
             UNION ALL SELECT x::text FROM {schema}.pull_request x UNION ALL SELECT (delivery, \
             event, action, repository)::text FROM {schema}.audit ORDER BY 1"
        );
        tables.push(
            sqlx::query_scalar::<_, String>(AssertSqlSafe(rows))
                .fetch_all(&fixture.inbox.pool)
                .await
                .unwrap(),
        );
        host.finish_shadows().await;
        fixture.inbox.finish().await;
    }
    assert!(tables[0].len() > 500);
    assert_eq!(tables[0], tables[1], "the shadow changed the live tables");
}

/// The demo's components by event type, as one handler that also leaves the effect the harness
/// counts.
struct Components(Vec<(&'static str, Arc<dyn Handler>)>);

const COMPONENTS: &[(&str, &str)] = &[
    ("com.github.push", "github-push"),
    ("com.github.issues", "github-issues"),
    ("com.github.pull_request", "github-pull-requests"),
    ("com.github.star", "github-stars"),
    ("com.github.watch", "github-stars"),
    ("", "github-audit"),
];

impl Components {
    async fn load(fixture: &ShadowFixture, change: impl Fn(Vec<u8>) -> Vec<u8>) -> Self {
        let runtime = oncebox_runtime::WasmRuntime::new(oncebox_runtime::RuntimeConfig {
            instances_max: 4,
            ..Default::default()
        })
        .unwrap();
        let mut handlers = Vec::new();
        for (event_type, name) in COMPONENTS {
            let bytes = std::fs::read(format!(
                "{}/../guest-examples/components/{name}.wasm",
                env!("CARGO_MANIFEST_DIR")
            ))
            .unwrap();
            let bytes = if *name == "github-push" { change(bytes) } else { bytes };
            let settings = oncebox_runtime::HandlerSettings {
                version: 1,
                limits: fixture.consumer.policy.limits.clone(),
                config: Vec::new(),
                random_key: [7; 32],
                may_emit: false,
            };
            let handler: Arc<dyn Handler> =
                Arc::new(runtime.handler(&runtime.load(&bytes).await.unwrap(), settings));
            handlers.push((*event_type, handler));
        }
        Self(handlers)
    }
}

impl Handler for Components {
    fn version(&self) -> i32 {
        1
    }

    fn handle<'a>(
        &'a self,
        tx: &'a Tx,
        run: &'a Run<'a>,
    ) -> futures::future::BoxFuture<'a, Answer> {
        Box::pin(async move {
            let effect = format!(
                "INSERT INTO effect VALUES ('{}', '{}', 1, 1)",
                run.consumer, run.message.id
            );
            execute(tx, &effect).await?;
            let taken = self.0.iter().find(|(event_type, _)| {
                event_type.is_empty() || *event_type == run.message.event_type
            });
            let (_, handler) =
                taken.ok_or_else(|| Failure::new(FailureKind::NoRoute, "nobody takes it"))?;
            handler.handle(tx, run).await
        })
    }
}

fn webhook(offset: i64, (id, event_type, payload): &(String, String, Vec<u8>)) -> Record {
    let mut record = record(offset, id, "");
    record.headers.push(("type".to_owned(), event_type.clone().into_bytes()));
    record.headers.push(("content-type".to_owned(), b"application/json".to_vec()));
    record.payload = Some(payload.clone());
    record
}

fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes
        .windows(from.len())
        .position(|window| window == from)
        .expect("the statement is in the component");
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}
