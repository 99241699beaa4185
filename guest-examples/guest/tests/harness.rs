//! The harness on a real PostgreSQL: what handlers read and write, and what fails a message.
#![cfg(feature = "test")]

use std::time::Duration;

use oncebox_guest::{
    Context, Date, DeliveryKind, Failure, Interval, Json, Message, Numeric, Result, Row, SqlError,
    Time, Timestamp, Timestamptz, Value, config, execute, json,
    log::{self, Level},
    once::{Inserted, Transition, Upserted, insert_once, transition, upsert_newer},
    params, query, query_as, query_one, query_optional, retry_after, savepoint,
    test::{Database, Outcome},
};
use serde::Deserialize;

const TABLES: &str = "
    CREATE TYPE mood AS ENUM ('calm', 'angry');
    CREATE TABLE item (
        id int PRIMARY KEY,
        name text NOT NULL CHECK (name <> ''),
        version int NOT NULL DEFAULT 1,
        next int REFERENCES item DEFERRABLE INITIALLY DEFERRED
    );";

fn message() -> Message {
    Message::new("m-1", "item.named", &json!(null))
}

/// Runs a handler and answers what became of its message, and the names that are left.
fn run(work: impl Fn() -> Result<()>) -> (Outcome, Vec<String>) {
    let mut db = Database::from_env(TABLES);
    let outcome = db.run(|_: &Message| work(), &message());
    (
        outcome,
        db.query("SELECT name FROM item ORDER BY id", params![]),
    )
}

fn insert(id: i32, name: &str) -> Result<u64, SqlError> {
    execute(
        "INSERT INTO item (id, name) VALUES ($1, $2)",
        params![id, name],
    )
}

/// The reason in the inbox row.
fn reason(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

#[test]
fn what_an_ok_handler_wrote_is_kept_and_nothing_else() {
    let ok = run(|| {
        insert(1, "one")?;
        Ok(())
    });
    assert_eq!(ok, (Outcome::ok(()), vec!["one".to_owned()]));
    for failure in [
        Failure::reject("why"),
        Failure::park("why"),
        Failure::Retry(None),
        retry_after(Duration::from_secs(3)),
    ] {
        let (outcome, left) = run(|| {
            insert(1, "one")?;
            Err(failure.clone())
        });
        let expected = match failure {
            Failure::Retry(delay) => Outcome::Retry(delay),
            Failure::Park(reason) => Outcome::Park(reason),
            _ => Outcome::Reject("why".into()),
        };
        assert_eq!((outcome, left.len()), (expected, 0));
    }
}

/// What could go wrong: a handler that does not look at an error passes here and fails on the host.
#[test]
fn an_error_that_was_swallowed_fails_the_message() {
    for (statement, expected) in [
        ("INSERT INTO item VALUES (1, '')", "sql_error:23514"),
        ("SELECT nothing", "sql_error:42703"),
        ("TRUNCATE item", "statement_refused"),
        ("COMMIT", "statement_refused"),
        ("SELECT ROW(1)", "other"),
    ] {
        let (outcome, left) = run(|| {
            insert(1, "one")?;
            let _ = query(statement, params![]);
            Ok(())
        });
        assert_eq!(
            (reason(&outcome), left.len()),
            (expected, 0),
            "{statement}: {outcome}"
        );
    }
    let (outcome, _) = run(|| Ok(insert(1, "").map(drop)?));
    let text = "23514: new row for relation \"item\" violates check constraint \"item_name_check\"; the handler: database error 23514 (item_name_check): new row for relation \"item\" violates check constraint \"item_name_check\"";
    let expected = Outcome::Failed {
        reason: "sql_error:23514".into(),
        text: text.into(),
    };
    assert_eq!(outcome, expected);
    // An explicit answer stands.
    let (outcome, _) = run(|| {
        let _ = insert(1, "");
        oncebox_guest::reject!("no name")
    });
    assert_eq!(outcome, Outcome::Reject("no name".into()));
}

#[test]
fn a_savepoint_forgives_what_came_after_it() {
    let (outcome, left) = run(|| {
        insert(1, "one")?;
        let again = savepoint(|| {
            insert(2, "two")?;
            insert(1, "one again")
        });
        assert!(again.is_err_and(|error| error.is_unique_violation()));
        savepoint(|| insert(3, "three"))?;
        Ok(())
    });
    assert_eq!(
        (outcome, left),
        (Outcome::ok(()), vec!["one".into(), "three".into()])
    );
    // An error before the savepoint is not forgiven.
    let (outcome, _) = run(|| {
        let _ = execute("COMMIT", params![]);
        let _: Result<()> = savepoint(|| Err(Failure::other("undo")));
        Ok(())
    });
    assert_eq!(reason(&outcome), "statement_refused");
}

#[test]
fn deferred_constraints_are_checked_before_the_commit() {
    let (outcome, left) = run(|| {
        execute(
            "INSERT INTO item (id, name, next) VALUES (1, 'one', 2)",
            params![],
        )?;
        Ok(())
    });
    assert_eq!((reason(&outcome), left.len()), ("sql_error:23503", 0));
}

#[test]
fn a_dry_run_and_a_panic_leave_nothing() {
    let mut db = Database::from_env(TABLES);
    let handler = |_: Context| insert(1, "one");
    assert_eq!(db.dry_run(handler, &message()), Outcome::ok(1));
    let panicking = |_: Context| -> Result<()> {
        insert(1, "one")?;
        panic!("as it is meant to")
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        db.run(panicking, &message())
    }));
    assert!(caught.is_err());
    assert_eq!(db.query::<i64>("SELECT count(*) FROM item", params![]), [0]);
    assert_eq!(db.run(handler, &message()), Outcome::ok(1));
}

#[test]
fn settings_context_and_log_are_the_tests() {
    let mut db = Database::from_env("");
    db.settings.insert("units".into(), "7".into());
    db.delivery.attempt = 2;
    db.delivery.kind = DeliveryKind::Retry;
    let handler = |context: Context| {
        log::warn!("run {}", context.attempt());
        assert_eq!(context.delivery(), DeliveryKind::Retry);
        assert_eq!(config::parse::<i32>("absent")?, None);
        config::require::<i32>("units")
    };
    assert_eq!(db.run(handler, &message()), Outcome::ok(7));
    assert_eq!(db.log(), [(Level::Warn, "run 2".to_owned())]);
    db.settings.insert("units".into(), "seven".into());
    let outcome = db.run(handler, &message());
    let text = "setting `units`: invalid digit found in string";
    assert_eq!(
        outcome,
        Outcome::Failed {
            reason: "other".into(),
            text: text.into()
        }
    );
}

/// Every type, as a parameter and back.
#[test]
fn values_survive_the_way_to_postgresql_and_back() {
    let values: &[(&str, Value)] = &[
        ("bool", Value::Boolean(true)),
        ("int2", Value::Int2(-2)),
        ("int4", Value::Int4(i32::MIN)),
        ("int8", Value::Int8(i64::MAX)),
        ("float4", Value::Float4(1.5)),
        ("float8", Value::Float8(-0.1)),
        (
            "numeric",
            Value::Numeric("-12345678901234567890.0012300".into()),
        ),
        ("text", Value::Text("a'ü\\\"".into())),
        ("bytea", Value::Bytea(vec![0, 255])),
        (
            "uuid",
            Value::Uuid("0e4f2a5e-0001-4abc-8def-0123456789ab".into()),
        ),
        ("json", Value::Json("{\"a\": [1]}".into())),
        ("date", Value::Date(-1)),
        ("time", Value::Time(86_399_999_999)),
        ("timestamp", Value::Timestamp(1)),
        ("timestamptz", Value::Timestamptz(-1)),
        (
            "interval",
            Value::Interval(Interval {
                months: 1,
                days: -2,
                microseconds: 3,
            }),
        ),
        ("mood", Value::Text("angry".into())),
    ];
    let mut db = Database::from_env(TABLES);
    for (name, value) in values {
        let row: Row = one(&mut db, &format!("SELECT $1::{name}, $2::{name}[]"), value);
        assert_eq!(&row.values()[0], value, "{name}");
        assert_eq!(row.values()[1], array_of(value), "{name}");
    }
}

/// A value and an array of it and a null, through a handler.
fn one(db: &mut Database, statement: &str, value: &Value) -> Row {
    let row = std::cell::RefCell::new(None);
    let array = array_of(value);
    let handler = |_: &Message| -> Result<()> {
        *row.borrow_mut() = query(statement, params![value, array])?.pop();
        Ok(())
    };
    assert_eq!(db.run(handler, &message()), Outcome::ok(()), "{statement}");
    row.into_inner().expect("the statement answers a row")
}

fn array_of(value: &Value) -> Value {
    use oncebox_guest::Element as E;
    let element = match value.clone() {
        Value::Boolean(it) => E::Boolean(it),
        Value::Int2(it) => E::Int2(it),
        Value::Int4(it) => E::Int4(it),
        Value::Int8(it) => E::Int8(it),
        Value::Float4(it) => E::Float4(it),
        Value::Float8(it) => E::Float8(it),
        Value::Numeric(it) => E::Numeric(it),
        Value::Text(it) => E::Text(it),
        Value::Bytea(it) => E::Bytea(it),
        Value::Uuid(it) => E::Uuid(it),
        Value::Json(it) => E::Json(it),
        Value::Date(it) => E::Date(it),
        Value::Time(it) => E::Time(it),
        Value::Timestamp(it) => E::Timestamp(it),
        Value::Timestamptz(it) => E::Timestamptz(it),
        Value::Interval(it) => E::Interval(it),
        other => panic!("{other:?}"),
    };
    Value::Array(vec![element, E::Null])
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mood {
    Calm,
    Angry,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Everything {
    id: i32,
    small: u8,
    sum: i64,
    amount: Numeric,
    share: f64,
    name: String,
    absent: Option<String>,
    mood: Mood,
    tags: Vec<String>,
    bytes: Vec<u8>,
    document: Document,
    any: serde_json::Value,
    at: Timestamptz,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Document {
    a: Vec<i32>,
}

#[test]
fn rows_become_rust_types() {
    let mut db = Database::from_env(TABLES);
    let everything: Vec<Everything> = db.query(
        "SELECT 1 AS id, 7::int2 AS small, sum(n::int8) AS sum, 1.50 AS amount, 0.5 AS share,
                'x' AS name, NULL::text AS absent, 'angry'::mood AS mood, ARRAY['a', 'b'] AS tags,
                '\\x0102'::bytea AS bytes, '{\"a\": [1, 2]}'::jsonb AS document, '[1]'::json AS any,
                'epoch'::timestamptz AS at
         FROM (VALUES (3), (4)) AS t (n)",
        params![],
    );
    let expected = Everything {
        id: 1,
        small: 7,
        sum: 7,
        amount: Numeric("1.50".into()),
        share: 0.5,
        name: "x".into(),
        absent: None,
        mood: Mood::Angry,
        tags: vec!["a".into(), "b".into()],
        bytes: vec![1, 2],
        document: Document { a: vec![1, 2] },
        any: json!([1]),
        at: Timestamptz(0),
    };
    assert_eq!(everything, [expected]);
    assert_eq!(
        db.query::<(i32, Option<bool>)>("SELECT 1, NULL::bool", params![]),
        [(1, None)]
    );
    assert_eq!(
        db.query::<Option<i32>>("SELECT NULL::int", params![]),
        [None]
    );
    assert_eq!(
        db.query::<Vec<i32>>("SELECT '{1,2}'::int[]", params![]),
        [[1, 2]]
    );
    assert_eq!(
        db.query::<Mood>("SELECT 'calm'::mood", params![]),
        [Mood::Calm]
    );
    let json: Vec<Json<Document>> = db.query("SELECT '{\"a\": []}'::jsonb", params![]);
    assert_eq!(json, [Json(Document { a: vec![] })]);
}

#[test]
fn rust_types_become_parameters() {
    let mut db = Database::from_env(TABLES);
    let text = String::from("t");
    let nothing: Option<i32> = None;
    type Columns = (i64, String, Option<i32>, Vec<u8>, String, String, i64);
    let row: Vec<Columns> = db.query(
        "SELECT $1::int8, $2::text, $3::int, $4::bytea, $5::uuid, $6::numeric::text,
                (SELECT sum(n) FROM unnest($7::int[]) AS t (n))",
        params![
            7_i16,
            text,
            nothing,
            [1_u8, 2],
            oncebox_guest::derive_id("m", "p"),
            "1.50",
            [1, 2]
        ],
    );
    let id = oncebox_guest::derive_id("m", "p");
    assert_eq!(
        row,
        [(7, "t".into(), None, vec![1, 2], id, "1.50".into(), 3)]
    );
    let times: Vec<(String, String, String, String)> = db.query(
        "SELECT $1::date::text, $2::time::text, $3::timestamp::text, ($4::timestamptz AT TIME ZONE 'UTC')::text",
        params![Date(1), Time(1_000_000), Timestamp(0), Timestamptz::from_millis(86_400_000)],
    );
    let expected = [
        "1970-01-02",
        "00:00:01",
        "1970-01-01 00:00:00",
        "1970-01-02 00:00:00",
    ];
    assert_eq!(times, [expected.map(String::from).into()]);
    let documents: Vec<(serde_json::Value, i32)> = db.query(
        "SELECT $1::jsonb, ($2::jsonb ->> 'a')::int",
        params![
            json!({ "b": null }),
            Json(std::collections::BTreeMap::from([("a", 5)]))
        ],
    );
    assert_eq!(documents, [(json!({ "b": null }), 5)]);
}

/// What could go wrong: a row that does not fit is taken for another value, or the error does not say which.
#[test]
fn what_does_not_fit_says_so() {
    fn text<T: std::fmt::Debug>(result: Result<T, SqlError>) -> String {
        result.expect_err("it does not fit").to_string()
    }
    let (outcome, _) = run(|| {
        let texts = [
            text(query_as::<i32>("SELECT 3000000000", params![])),
            text(query_as::<(String, i32)>(
                "SELECT 'a' AS a, 'b' AS b",
                params![],
            )),
            text(query_as::<(i32,)>("SELECT 1, 2", params![])),
            text(query_as::<i32>("SELECT 1, 2", params![])),
            text(query_as::<i32>("SELECT NULL::int AS n", params![])),
            text(query_as::<i64>("SELECT 1.5 AS n", params![])),
            text(query_as::<String>("SELECT now() AS at", params![])),
            text(query_one::<i32>("SELECT 1 WHERE false", params![])),
            text(query_optional::<i32>("VALUES (1), (2)", params![])),
        ];
        let expected = [
            "column `?column?`: invalid value: integer `3000000000`, expected i32",
            "column `b`: invalid type: string \"b\", expected i32",
            "the row has 2 columns, and is read as a tuple of 1",
            "the row has 2 columns, and is read as a single value; read it as a tuple or a struct",
            "column `n`: invalid type: unit value, expected i32",
            "column `n`: the numeric 1.5 is no i64; read it as `Numeric`",
            "column `at`: a time is no text; read it as `Timestamptz` or the like, or cast it to text",
            "the statement answered no row, not one",
            "the statement answered 2 rows, not one",
        ];
        assert_eq!(texts, expected);
        Ok(())
    });
    assert_eq!(
        outcome,
        Outcome::ok(()),
        "a row that does not fit is the handler's to look at"
    );
    for (statement, param, expected) in [
        (
            "SELECT $1::int4",
            params![3_000_000_000_i64],
            "parameter `$1` is of type `INT4`: the value is out of range",
        ),
        (
            "SELECT $1::int4",
            params!["1"],
            "parameter `$1` is of type `INT4` and does not take a text as it is; write `$1::text::int4` and PostgreSQL reads it, or give a value of that type",
        ),
        (
            "SELECT $1::uuid",
            params!["1"],
            "parameter `$1` is of type `UUID`: it takes 8-4-4-4-12 hexadecimal digits",
        ),
        (
            "SELECT $1::point",
            params!["1"],
            "parameter `$1` is of type `POINT`, which cannot be carried; give it as text and cast it: `$1::text::point`",
        ),
        (
            "SELECT $1::text",
            params!["\0"],
            "parameter `$1` is of type `TEXT`: the text contains a NUL character, which PostgreSQL cannot store",
        ),
        (
            "SELECT $1::mood[]",
            params![true],
            "parameter `$1` is of type `mood[]` and does not take a single value; give it as text and cast it: `$1::text::mood[]`",
        ),
        (
            "SELECT 1",
            params![1],
            "the statement has 0 parameters, 1 were given",
        ),
    ] {
        let (outcome, _) = run(|| Ok(execute(statement, param).map(drop)?));
        let text = format!("{expected}; the handler: value not supported: {expected}");
        assert_eq!(
            outcome,
            Outcome::Failed {
                reason: "other".into(),
                text
            },
            "{statement}"
        );
    }
}

/// What could go wrong: an older version replaces a newer one, or a state moves twice. S1-013, S1-014,
/// S1-015, S1-016.
#[test]
fn helpers_say_what_a_statement_did() {
    let (outcome, left) = run(|| {
        let once = "INSERT INTO item (id, name) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING";
        // S1-013.
        assert_eq!(insert_once(once, params![1, "one"])?, Inserted::New);
        assert_eq!(
            insert_once(once, params![1, "again"])?,
            Inserted::AlreadyThere
        );

        let newer = "INSERT INTO item AS old (id, name, version) VALUES ($1, $2, $3)
            ON CONFLICT (id) DO UPDATE SET name = excluded.name, version = excluded.version
            WHERE old.version < excluded.version";
        assert_eq!(
            upsert_newer(newer, params![2, "third", 3])?,
            Upserted::Written
        );
        // S1-015.
        assert_eq!(
            upsert_newer(newer, params![2, "second", 2])?,
            Upserted::Outdated
        );
        assert_eq!(
            upsert_newer(newer, params![2, "third again", 3])?,
            Upserted::Outdated
        );
        assert_eq!(
            upsert_newer(newer, params![2, "fourth", 4])?,
            Upserted::Written
        );

        let moves = "UPDATE item SET name = $3 WHERE id = $1 AND name = $2";
        // S1-016.
        assert_eq!(
            transition(moves, params![1, "one", "uno"])?,
            Transition::Moved
        );
        assert_eq!(
            transition(moves, params![1, "one", "uno"])?,
            Transition::NotMoved
        );
        Ok(())
    });
    assert_eq!(
        (outcome, left),
        (Outcome::ok(()), vec!["uno".into(), "fourth".into()])
    );
    // Another kind of statement is refused before it is run, and one for many rows fails the message.
    let (outcome, _) = run(|| {
        let plain = insert_once("INSERT INTO item VALUES (1, 'one')", params![]);
        let text = "statement refused: `insert_once` takes `INSERT … ON CONFLICT … DO NOTHING`";
        assert_eq!(plain.expect_err("it has no ON CONFLICT").to_string(), text);
        insert(1, "one")?;
        insert(2, "two")?;
        let _ = transition("UPDATE item SET name = 'x' WHERE id > 0", params![])?;
        Ok(())
    });
    let text = "`transition` is for one row, and the statement touched 2";
    assert_eq!(
        outcome,
        Outcome::Failed {
            reason: "other".into(),
            text: text.into()
        }
    );
}
