//! SQL of a guest against a real PostgreSQL. What could go wrong: a value changes on its
//! way to the database or back, a statement gets past the list of allowed kinds, an error
//! that a guest swallows is committed as a success, or a cap is noticed too late.

use anyhow::{Context, Result, bail, ensure};
use oncebox_model::{
    Outbox,
    handler::{DeliveryKind, Handler, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    policy::Limits,
    record::Record,
    tx::Tx,
};
use oncebox_runtime::{
    ComponentHandler,
    sql::{Element, Error, Interval, SqlAnswer, SqlStop, StatementMode, Value, run_statement},
};
use oncebox_tests::{interpreter::interpreter, postgres::TestDatabase, program::in_own_process};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

const SCHEMA: &str = "
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN amount AS numeric(12,2) CHECK (VALUE >= 0);
    CREATE DOMAIN label AS text;
    CREATE DOMAIN labels AS label[];
    CREATE TYPE pair AS (a int, b int);
    CREATE TABLE item (id int PRIMARY KEY, name text CONSTRAINT item_has_name CHECK (name <> ''));
";

/// A database of its own, and a transaction in it.
struct Session {
    database: TestDatabase,
    tx: Tx,
}

impl Session {
    async fn begin() -> Result<Self> {
        let database = TestDatabase::create(SCHEMA, async |url: &str| {
            PgConnection::connect(url).await?.execute(SCHEMA).await?;
            Ok(())
        })
        .await?;
        Ok(Self { tx: open(&database).await?, database })
    }

    async fn query(&self, text: &str, params: &[Value]) -> Result<SqlAnswer, Error> {
        answer(
            run_statement(&self.tx, &Limits::default(), StatementMode::Query, text, params).await,
        )
    }

    async fn execute(&self, text: &str, params: &[Value]) -> Result<u64, Error> {
        answer(
            run_statement(&self.tx, &Limits::default(), StatementMode::Execute, text, params).await,
        )
        .map(|answer| answer.rows_affected)
    }

    /// The only value of the only row.
    async fn value(&self, text: &str, params: &[Value]) -> Result<Value> {
        let answer =
            self.query(text, params).await.map_err(|error| anyhow::anyhow!("{text}: {error:?}"))?;
        let row = answer.rows.into_iter().next().context("a row")?;
        row.into_iter().next().context("a column")
    }

    /// Start over after an error.
    async fn restart(&mut self) -> Result<()> {
        self.tx = open(&self.database).await?;
        Ok(())
    }
}

async fn open(database: &TestDatabase) -> Result<Tx> {
    let mut connection = database.connect().await?;
    connection.execute("SET TIME ZONE 'UTC'; BEGIN").await?;
    Ok(Tx::on(connection))
}

fn answer(result: Result<SqlAnswer, SqlStop>) -> Result<SqlAnswer, Error> {
    match result {
        Ok(answer) => Ok(answer),
        Err(SqlStop::Guest(error)) => Err(error),
        Err(SqlStop::Host(lost)) => panic!("{lost}"),
    }
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

fn numeric(value: &str) -> Value {
    Value::Numeric(value.to_owned())
}

fn json(value: &str) -> Value {
    Value::Json(value.to_owned())
}

/// Equal, with NaN equal to itself.
fn same(a: &Value, b: &Value) -> bool {
    a == b || format!("{a:?}") == format!("{b:?}")
}

#[tokio::test]
async fn every_type_survives_both_ways() -> Result<()> {
    let session = Session::begin().await?;
    let uuid = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11";
    let cases: &[(&str, &[(Value, &str)])] = &[
        ("bool", &[(Value::Boolean(true), "true"), (Value::Boolean(false), "false")]),
        ("int2", &[(Value::Int2(i16::MIN), "-32768"), (Value::Int2(i16::MAX), "32767")]),
        ("int4", &[(Value::Int4(i32::MIN), "-2147483648"), (Value::Int4(7), "7")]),
        (
            "int8",
            &[
                (Value::Int8(i64::MIN), "-9223372036854775808"),
                (Value::Int8(i64::MAX), "9223372036854775807"),
            ],
        ),
        (
            "float4",
            &[
                (Value::Float4(1.5), "1.5"),
                (Value::Float4(f32::NAN), "NaN"),
                (Value::Float4(f32::INFINITY), "Infinity"),
            ],
        ),
        (
            "float8",
            &[
                (Value::Float8(0.1), "0.1"),
                (Value::Float8(-0.0), "-0"),
                (Value::Float8(f64::NEG_INFINITY), "-Infinity"),
            ],
        ),
        (
            "numeric",
            &[
                (numeric("0"), "0"),
                (
                    numeric("-123456789012345678901234567890.000100"),
                    "-123456789012345678901234567890.000100",
                ),
                (numeric("10000"), "10000"),
                (numeric("0.00000001"), "0.00000001"),
                (numeric("NaN"), "NaN"),
                (numeric("Infinity"), "Infinity"),
                (numeric("-Infinity"), "-Infinity"),
            ],
        ),
        (
            "text",
            &[(text(""), ""), (text("ünïcödé 🦀 'quoted' \\ \n"), "ünïcödé 🦀 'quoted' \\ \n")],
        ),
        ("varchar(10)", &[(text("abc"), "abc")]),
        ("char(5)", &[(text("abc  "), "abc")]),
        ("name", &[(text("abc"), "abc")]),
        ("\"char\"", &[(text("x"), "x"), (text(""), "")]),
        ("bytea", &[(Value::Bytea(vec![0, 1, 255]), "\\x0001ff"), (Value::Bytea(vec![]), "\\x")]),
        ("uuid", &[(Value::Uuid(uuid.to_owned()), uuid)]),
        ("json", &[(json("{\"b\": 1,  \"a\":null}"), "{\"b\": 1,  \"a\":null}")]),
        ("jsonb", &[(json("{\"a\": null, \"b\": 1}"), "{\"a\": null, \"b\": 1}")]),
        (
            "date",
            &[
                (Value::Date(0), "1970-01-01"),
                (Value::Date(10_957), "2000-01-01"),
                (Value::Date(-1), "1969-12-31"),
                (Value::Date(i32::MAX), "infinity"),
                (Value::Date(i32::MIN), "-infinity"),
            ],
        ),
        (
            "time",
            &[
                (Value::Time(0), "00:00:00"),
                (Value::Time(86_400_000_000), "24:00:00"),
                (Value::Time(1), "00:00:00.000001"),
            ],
        ),
        (
            "timestamp",
            &[
                (Value::Timestamp(0), "1970-01-01 00:00:00"),
                (Value::Timestamp(-1), "1969-12-31 23:59:59.999999"),
                (Value::Timestamp(i64::MAX), "infinity"),
                (Value::Timestamp(i64::MIN), "-infinity"),
            ],
        ),
        (
            "timestamptz",
            &[
                (Value::Timestamptz(1_700_000_000_000_001), "2023-11-14 22:13:20.000001+00"),
                (Value::Timestamptz(i64::MAX), "infinity"),
            ],
        ),
        (
            "interval",
            &[(
                Value::Interval(Interval { months: 14, days: -3, microseconds: 4_000_005 }),
                "1 year 2 mons -3 days +00:00:04.000005",
            )],
        ),
        ("mood", &[(text("happy"), "happy")]),
        ("amount", &[(numeric("12.50"), "12.50")]),
        ("label", &[(text("x"), "x")]),
    ];
    for (name, values) in cases {
        for (value, written) in *values {
            // Both through the value itself and through PostgreSQL's own text of it.
            let back =
                session.value(&format!("SELECT $1::{name}"), std::slice::from_ref(value)).await?;
            ensure!(same(&back, value), "{name}: {back:?} for {value:?}");
            let shown = session
                .value(&format!("SELECT $1::{name}::text"), std::slice::from_ref(value))
                .await?;
            let expected = if *name == "char(5)" { written.trim_end() } else { written };
            ensure!(shown == text(expected), "{name}: {shown:?} for {value:?}");
            let read = session.value(&format!("SELECT $1::text::{name}"), &[text(written)]).await?;
            ensure!(same(&read, value), "{name}: {read:?} for the text {written}");
            let null = session.value(&format!("SELECT $1::{name}"), &[Value::Null]).await?;
            ensure!(null == Value::Null, "{name}: {null:?} for null");
        }
    }
    Ok(())
}

#[tokio::test]
async fn random_numbers_agree_with_postgresql() -> Result<()> {
    let session = Session::begin().await?;
    let digits = "(random() * 10 ^ (random() * 30)::int)::numeric * (10::numeric ^ -(random() * \
        20)::int) * sign(random() - 0.5)::numeric";
    let rows = session
        .query(
            &format!(
                "SELECT n, n::text FROM (SELECT {digits} AS n FROM generate_series(1, 2000)) AS x"
            ),
            &[],
        )
        .await
        .map_err(|error| anyhow::anyhow!("{error:?}"))?
        .rows;
    for row in rows {
        let [Value::Numeric(ours), Value::Text(theirs)] = &row[..] else { bail!("{row:?}") };
        ensure!(ours == theirs, "{ours} for {theirs}");
        let equal = session
            .value("SELECT $1::numeric = $2::text::numeric", &[numeric(ours), text(theirs)])
            .await?;
        ensure!(equal == Value::Boolean(true), "{ours}");
    }
    Ok(())
}

#[tokio::test]
async fn arrays_survive_both_ways() -> Result<()> {
    let session = Session::begin().await?;
    let some = |text: &str| Element::Text(text.to_owned());
    let cases: &[(&str, Vec<Element>, &str)] = &[
        ("int4[]", vec![Element::Int4(1), Element::Null, Element::Int4(-3)], "{1,NULL,-3}"),
        ("int4[]", vec![], "{}"),
        ("int4[]", vec![Element::Null], "{NULL}"),
        (
            "text[]",
            vec![some("a"), some(""), some("NULL"), some("{x,\"y\"}")],
            "{a,\"\",\"NULL\",\"{x,\\\"y\\\"}\"}",
        ),
        (
            "numeric[]",
            vec![Element::Numeric("1.50".to_owned()), Element::Numeric("NaN".to_owned())],
            "{1.50,NaN}",
        ),
        ("jsonb[]", vec![Element::Json("{\"a\": 1}".to_owned())], "{\"{\\\"a\\\": 1}\"}"),
        ("bool[]", vec![Element::Boolean(true), Element::Boolean(false)], "{t,f}"),
        ("bytea[]", vec![Element::Bytea(vec![0, 255])], "{\"\\\\x00ff\"}"),
        ("date[]", vec![Element::Date(0)], "{1970-01-01}"),
        ("mood[]", vec![some("sad"), Element::Null], "{sad,NULL}"),
        ("amount[]", vec![Element::Numeric("3.00".to_owned())], "{3.00}"),
        ("labels", vec![some("a")], "{a}"),
        ("varchar[]", vec![some("a")], "{a}"),
        (
            "uuid[]",
            vec![Element::Uuid("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11".to_owned())],
            "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
        ),
    ];
    for (name, elements, written) in cases {
        let value = Value::Array(elements.clone());
        let back =
            session.value(&format!("SELECT $1::{name}"), std::slice::from_ref(&value)).await?;
        ensure!(back == value, "{name}: {back:?} for {value:?}");
        let shown = session
            .value(&format!("SELECT $1::{name}::text"), std::slice::from_ref(&value))
            .await?;
        ensure!(shown == text(written), "{name}: {shown:?} for {value:?}");
        let read = session.value(&format!("SELECT $1::text::{name}"), &[text(written)]).await?;
        ensure!(read == value, "{name}: {read:?} for {written}");
    }
    Ok(())
}

#[tokio::test]
async fn values_go_into_types_they_fit() -> Result<()> {
    let session = Session::begin().await?;
    for (name, given, stored) in [
        ("int8", Value::Int2(7), Value::Int8(7)),
        ("int8", Value::Int4(-7), Value::Int8(-7)),
        ("int2", Value::Int8(7), Value::Int2(7)),
        ("float8", Value::Float4(1.5), Value::Float8(1.5)),
        ("float4", Value::Float8(1.5), Value::Float4(1.5)),
        ("numeric", text("1.50"), numeric("1.50")),
        ("numeric", Value::Int8(i64::MIN), numeric("-9223372036854775808")),
        ("numeric", numeric("1.5e3"), numeric("1500")),
        (
            "uuid",
            text("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"),
            Value::Uuid("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11".to_owned()),
        ),
        ("jsonb", text("[1]"), json("[1]")),
        ("mood", text("sad"), text("sad")),
    ] {
        let back =
            session.value(&format!("SELECT $1::{name}"), std::slice::from_ref(&given)).await?;
        ensure!(back == stored, "{name}: {back:?} for {given:?}");
    }
    Ok(())
}

#[tokio::test]
async fn what_does_not_fit_is_unsupported_and_harms_nothing() -> Result<()> {
    let session = Session::begin().await?;
    for (name, given, part) in [
        ("int2", Value::Int4(40_000), "out of range"),
        ("int4", Value::Int8(1 << 40), "out of range"),
        ("int4", text("7"), "`$1::text::int4`"),
        ("int4", Value::Float8(1.0), "a float"),
        ("text", Value::Int4(1), "an integer"),
        ("text", text("a\0b"), "NUL"),
        ("jsonb", json("\"a\0\""), "NUL"),
        ("numeric", text("ten"), "not a decimal number"),
        ("uuid", text("a0eebc999c0b4ef8bb6d6bb9bd380a11"), "hexadecimal"),
        ("uuid", text("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1g"), "hexadecimal"),
        ("float4", Value::Float8(1e300), "out of range"),
        ("timestamptz", Value::Timestamp(0), "a timestamp"),
        ("timestamp", Value::Timestamp(i64::MIN + 5), "out of range"),
        ("\"char\"", text("ab"), "one ASCII character"),
        ("inet", text("10.0.0.1"), "`$1::text::inet`"),
        ("point", text("(1,2)"), "cannot be carried"),
        ("pair", text("(1,2)"), "cannot be carried"),
        ("int4[]", Value::Int4(1), "a single value"),
        ("int4", Value::Array(vec![]), "an array"),
        ("int4[]", Value::Array(vec![Element::Text("x".to_owned())]), "a text"),
    ] {
        match session.query(&format!("SELECT $1::{name}"), std::slice::from_ref(&given)).await {
            Err(Error::Unsupported(reason)) => {
                ensure!(reason.contains(part) && reason.contains("$1"), "{name}: {reason}")
            }
            other => bail!("{name} took {given:?}: {other:?}"),
        }
    }
    for (text, part) in [
        ("SELECT point(1, 2) AS place", "`place::text`"),
        ("SELECT ROW(1, 2)::pair AS p", "`p::text`"),
        ("SELECT '10.0.0.1'::inet AS address", "`address::text`"),
        ("SELECT ARRAY[[1,2],[3,4]] AS grid", "more than one dimension"),
        ("SELECT '[0:1]={1,2}'::int[] AS shifted", "does not begin at index 1"),
        ("SELECT '294276-12-31'::timestamp AS late", "too far"),
    ] {
        match session.query(text, &[]).await {
            Err(Error::Unsupported(reason)) => ensure!(reason.contains(part), "{text}: {reason}"),
            other => bail!("{text}: {other:?}"),
        }
    }
    ensure!(
        session
            .query("SELECT $1::int", &[])
            .await
            .is_err_and(|error| format!("{error:?}").contains("1 parameters, 0 were given"))
    );
    // Nothing of this aborted the transaction or broke the connection.
    ensure!(session.value("SELECT 1", &[]).await? == Value::Int4(1));
    ensure!(session.tx.error().await.is_none() && !session.tx.is_broken().await);
    Ok(())
}

/// What could go wrong: whoever binds a text is told that it is refused, and not what to write
/// instead.
#[tokio::test]
async fn a_text_that_is_refused_is_taken_as_the_error_says() -> Result<()> {
    let session = Session::begin().await?;
    for (name, given) in [
        ("timestamptz", "2026-11-20 18:38:52+00"),
        ("timestamp", "2026-11-20 18:38:52"),
        ("date", "2026-11-20"),
        ("time", "18:38:52"),
        ("interval", "1 day"),
        ("bool", "true"),
        ("int2", "7"),
        ("int4", "7"),
        ("int8", "7"),
        ("float4", "1.5"),
        ("float8", "1.5"),
        ("bytea", "\\x00ff"),
        ("inet", "10.0.0.1"),
        ("int4[]", "{1,2}"),
        ("timestamptz[]", "{2026-11-20 18:38:52+00}"),
    ] {
        // The fourth of several, as in the middle of an INSERT.
        let params = [text("a"), text("b"), text("c"), text(given)];
        let statement =
            |cast: &str| format!("SELECT $1::text || $2::text || $3::text, ({cast})::text");
        let Err(Error::Unsupported(reason)) =
            session.query(&statement(&format!("$4::{name}")), &params).await
        else {
            bail!("{name} takes a text");
        };
        let cast = reason
            .split('`')
            .find(|word| word.starts_with("$4::text::"))
            .with_context(|| format!("{name}: {reason}"))?
            .to_owned();
        let answer = session.query(&statement(&cast), &params).await;
        ensure!(answer.is_ok(), "{name}: `{cast}` is not taken: {answer:?}");
    }
    Ok(())
}

#[tokio::test]
async fn columns_carry_names_and_types_and_statements_their_counts() -> Result<()> {
    let session = Session::begin().await?;
    let answer = session
        .query("SELECT 1::int8 AS n, NULL::text[] AS tags, 'sad'::mood AS m, pg_sleep(0)", &[])
        .await;
    let answer = answer.map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let columns: Vec<_> = answer
        .columns
        .iter()
        .map(|column| (column.name.as_str(), column.type_name.as_str()))
        .collect();
    ensure!(
        columns == [("n", "INT8"), ("tags", "TEXT[]"), ("m", "mood"), ("pg_sleep", "VOID")],
        "{columns:?}"
    );
    ensure!(
        answer.rows == [[Value::Int8(1), Value::Null, text("sad"), Value::Null]],
        "{:?}",
        answer.rows
    );
    let insert = "INSERT INTO item SELECT n, 'x' FROM generate_series(1, $1) AS n";
    ensure!(session.execute(insert, &[Value::Int4(5)]).await == Ok(5));
    ensure!(
        session.execute("DELETE FROM item WHERE id > 3 RETURNING point(1,2)", &[]).await == Ok(2)
    );
    let updated = session
        .query("UPDATE item SET name = 'y'", &[])
        .await
        .map_err(|error| anyhow::anyhow!("{error:?}"))?;
    ensure!(updated.rows.is_empty() && updated.columns.is_empty() && updated.rows_affected == 3);
    Ok(())
}

#[tokio::test]
async fn the_same_text_is_bound_by_its_described_types_whatever_the_values() -> Result<()> {
    let session = Session::begin().await?;
    let statement = "INSERT INTO item VALUES ($1, $2)";
    ensure!(session.execute(statement, &[Value::Int2(1), text("a")]).await == Ok(1));
    ensure!(session.execute(statement, &[Value::Int8(2), text("b")]).await == Ok(1));
    ensure!(
        session
            .execute(statement, &[text("3"), text("c")])
            .await
            .is_err_and(|error| matches!(error, Error::Unsupported(_)))
    );
    ensure!(session.execute(statement, &[Value::Int4(3), text("c")]).await == Ok(1));
    Ok(())
}

#[tokio::test]
async fn statements_outside_the_list_never_reach_the_server() -> Result<()> {
    let session = Session::begin().await?;
    for statement in [
        "COMMIT",
        "/**/ROLLBACK",
        "SET ROLE x",
        "DO $$ BEGIN COMMIT; END $$",
        ";COMMIT",
        "EXPLAIN SELECT 1",
    ] {
        ensure!(
            matches!(session.execute(statement, &[]).await, Err(Error::Refused(_))),
            "{statement}"
        );
    }
    ensure!(session.tx.error().await.is_none());
    // Two statements in one text: PostgreSQL refuses them in the extended protocol.
    match session.execute("SELECT 1; COMMIT", &[]).await {
        Err(Error::Database(error)) => ensure!(error.sqlstate == "42601", "{error:?}"),
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn no_text_that_is_let_through_can_end_the_transaction() -> Result<()> {
    const PIECES: &[&str] = &[
        "/*",
        "*/",
        "/**/",
        "--",
        "\n",
        "\r",
        "(",
        ")",
        ";",
        " ",
        "\t",
        "\u{b}",
        "\u{a0}",
        "'",
        "$$",
        "\"",
        "\\",
        "E'",
        "select 1",
        "SELECT",
        "values (1)",
        "table item",
        "with x as (select 1)",
        "commit",
        "rollback",
        "begin",
        "and chain",
        "savepoint x",
        "set role x",
        "end",
        "abort",
    ];
    let session = Session::begin().await?;
    let transaction = session.value("SELECT pg_current_xact_id()::text", &[]).await?;
    let mut seed = 20_240_229_u64;
    let mut next = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let mut passed = 0;
    for _ in 0..3_000 {
        let count = 1 + next(6);
        let text: String = (0..count).map(|_| PIECES[next(PIECES.len())]).collect();
        control(&session, "SAVEPOINT fuzz").await?;
        passed += usize::from(session.execute(&text, &[]).await.is_ok());
        control(&session, "ROLLBACK TO SAVEPOINT fuzz")
            .await
            .with_context(|| format!("after {text:?}"))?;
        control(&session, "RELEASE SAVEPOINT fuzz").await?;
        session.tx.recovered().await;
    }
    ensure!(passed > 50, "only {passed} texts ran at all");
    ensure!(session.value("SELECT pg_current_xact_id()::text", &[]).await? == transaction);
    Ok(())
}

/// A statement of the host between those of a guest.
async fn control(session: &Session, text: &str) -> Result<()> {
    let mut statement = session.tx.statement().await;
    let result =
        statement.connection().execute(sqlx::raw_sql(AssertSqlSafe(text.to_owned()))).await;
    statement.finish(result.as_ref().err());
    result?;
    Ok(())
}

#[tokio::test]
async fn errors_carry_code_detail_and_constraint_and_no_context() -> Result<()> {
    let session = Session::begin().await?;
    match session.execute("INSERT INTO item VALUES (1, '')", &[]).await {
        Err(Error::Database(error)) => {
            ensure!(
                error.sqlstate == "23514" && error.constraint.as_deref() == Some("item_has_name"),
                "{error:?}"
            );
            ensure!(error.detail.is_some_and(|detail| detail.contains("Failing row")));
        }
        other => bail!("{other:?}"),
    }
    ensure!(session.tx.error().await.is_some_and(|error| error.sqlstate == "23514"));
    match session.query("SELECT 1", &[]).await {
        Err(Error::Database(error)) => ensure!(error.sqlstate == "25P02", "{error:?}"),
        other => bail!("{other:?}"),
    }
    ensure!(
        session.tx.error().await.is_some_and(|error| error.sqlstate == "23514"),
        "the first error is kept"
    );
    Ok(())
}

#[tokio::test]
async fn caps_on_results_and_parameters_leave_the_connection_sound() -> Result<()> {
    let session = Session::begin().await?;
    let limits = Limits {
        rows_max: 100,
        result_bytes_max: 100_000,
        params_max: 2,
        params_bytes_max: 10,
        ..Limits::default()
    };
    let statements: [(&str, Vec<Value>, &str); 9] = [
        ("SELECT generate_series(1, 100000)", vec![], "rows_max"),
        ("SELECT repeat('x', 60000) FROM generate_series(1, 3)", vec![], "result_bytes_max"),
        ("SELECT array_fill(true, ARRAY[5000])", vec![], "result_bytes_max"),
        ("SELECT array_fill(NULL::int, ARRAY[5000])", vec![], "result_bytes_max"),
        // Ten bytes on the wire, a hundred thousand digits as text.
        ("SELECT 1e131071", vec![], "result_bytes_max"),
        ("SELECT ARRAY[1, 1e131071]", vec![], "result_bytes_max"),
        ("SELECT round(0.1, 16383) FROM generate_series(1, 10)", vec![], "result_bytes_max"),
        ("SELECT 1", vec![Value::Null, Value::Null, Value::Null], "params_max"),
        ("SELECT $1::text", vec![text("eleven chars")], "params_bytes_max"),
    ];
    for (statement, params, setting) in statements {
        match answer(
            run_statement(&session.tx, &limits, StatementMode::Query, statement, &params).await,
        ) {
            Err(Error::Limit(reason)) => ensure!(reason.contains(setting), "{reason}"),
            other => bail!("{statement}: {other:?}"),
        }
    }
    ensure!(session.value("SELECT 1", &[]).await? == Value::Int4(1));
    // Rows that nobody wants are not kept, and not counted against the caps.
    let counted = run_statement(
        &session.tx,
        &limits,
        StatementMode::Execute,
        "SELECT generate_series(1, 1000)",
        &[],
    )
    .await;
    ensure!(answer(counted).is_ok_and(|answer| answer.rows_affected == 1000));
    Ok(())
}

/// What could go wrong: the driver takes a row, or an error that quotes one, into memory whole
/// before anyone counts its bytes, and one statement costs the host a gigabyte. In a process of its
/// own: what other tests take meanwhile would be counted too.
#[tokio::test]
async fn one_row_takes_no_more_than_its_cap() -> Result<()> {
    if !in_own_process("sql_values::one_row_takes_no_more_than_its_cap")? {
        return Ok(());
    }
    const HUGE: usize = 400_000_000;
    let mut session = Session::begin().await?;
    session.value("SELECT 1", &[]).await?;
    let before = peak_memory()?;

    let row = format!("SELECT repeat('x', {HUGE}) FROM generate_series(1, 2)");
    match session.query(&row, &[]).await {
        Err(Error::Limit(reason)) => ensure!(reason.contains("result_bytes_max"), "{reason}"),
        other => bail!("{other:?}"),
    }
    ensure!(session.value("SELECT 1", &[]).await? == Value::Int4(1), "its transaction goes on");
    ensure!(
        session.execute(&row, &[]).await.is_ok_and(|rows| rows == 2),
        "rows that nobody wants are counted"
    );
    match session.query(&format!("SELECT repeat('ü', {})::int", HUGE / 8), &[]).await {
        Err(Error::Database(error)) => {
            ensure!(
                error.sqlstate == "22P02" && error.message.len() < 5_000,
                "{} {}",
                error.sqlstate,
                error.message.len()
            )
        }
        other => bail!("{other:?}"),
    }
    session.restart().await?;
    match session.query("SELECT array_fill(1e131071::numeric, ARRAY[5000])", &[]).await {
        Err(Error::Limit(reason)) => ensure!(reason.contains("result_bytes_max"), "{reason}"),
        other => bail!("{other:?}"),
    }
    let taken = peak_memory()? - before;
    ensure!(taken < HUGE / 16, "{taken} bytes");

    // What is left of a row that nobody waits for any more is read by nobody.
    session.restart().await?;
    let limits = Limits::default();
    let endless = format!("SELECT repeat('x', {HUGE}) FROM generate_series(1, 200)");
    let dropped = run_statement(&session.tx, &limits, StatementMode::Query, &endless, &[]);
    ensure!(
        tokio::time::timeout(std::time::Duration::from_millis(500), dropped).await.is_err(),
        "read to its end"
    );
    ensure!(session.tx.is_broken().await);

    // As many columns as there can be, and as many bytes as there may be.
    session.restart().await?;
    let columns = vec!["repeat('x', 100)"; 1_600].join(", ");
    let limits =
        Limits { result_bytes_max: 1_600 * (100 + size_of::<Value>()), ..Limits::default() };
    for (columns, fits) in [(columns.clone(), true), (columns + ", ''", false)] {
        let answered = answer(
            run_statement(
                &session.tx,
                &limits,
                StatementMode::Query,
                &format!("SELECT {columns}"),
                &[],
            )
            .await,
        );
        ensure!(answered.is_ok() == fits, "{answered:?}");
    }
    Ok(())
}

/// The most memory this process ever held, in bytes.
fn peak_memory() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<usize>()? * 1024)
}

/// What could go wrong: what PostgreSQL says of a type is as long as a tenant makes it, or says
/// nothing, and the driver is asked for more of a type than it knows.
#[tokio::test]
async fn a_type_that_cannot_be_described_harms_nothing() -> Result<()> {
    let session = Session::begin().await?;
    let labels: Vec<_> = (0..6_000).map(|n| format!("'{n:060}'")).collect();
    control(&session, &format!("CREATE TYPE vast AS ENUM ({})", labels.join(", "))).await?;
    for _ in 0..2 {
        match session.query("SELECT NULL::vast, NULL::vast[]", &[]).await {
            Err(Error::Unsupported(reason)) => {
                ensure!(reason.contains("cannot be described"), "{reason}")
            }
            other => bail!("{other:?}"),
        }
        ensure!(
            session.value("SELECT (enum_last(NULL::vast))::text", &[]).await?
                == text(&format!("{:060}", 5_999))
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_dropped_statement_condemns_the_connection() -> Result<()> {
    let session = Session::begin().await?;
    let limits = Limits::default();
    let slow =
        run_statement(&session.tx, &limits, StatementMode::Query, "SELECT pg_sleep(30)", &[]);
    ensure!(tokio::time::timeout(std::time::Duration::from_millis(100), slow).await.is_err());
    ensure!(session.tx.is_broken().await);
    Ok(())
}

#[tokio::test]
async fn a_session_that_is_killed_is_the_hosts_loss() -> Result<()> {
    let session = Session::begin().await?;
    let limits = Limits::default();
    let killed = run_statement(
        &session.tx,
        &limits,
        StatementMode::Query,
        "SELECT pg_terminate_backend(pg_backend_pid())",
        &[],
    )
    .await;
    ensure!(matches!(killed, Err(SqlStop::Host(_))), "{killed:?}");
    ensure!(session.tx.is_broken().await);
    Ok(())
}

#[tokio::test]
async fn a_statement_whose_table_changed_is_prepared_again() -> Result<()> {
    let session = Session::begin().await?;
    ensure!(session.query("SELECT * FROM item", &[]).await.is_ok());
    control(&session, "ALTER TABLE item ADD COLUMN extra int").await?;
    control(&session, "SAVEPOINT here").await?;
    let stale = session.query("SELECT * FROM item", &[]).await;
    ensure!(
        matches!(&stale, Err(Error::Database(error)) if error.sqlstate == "0A000"),
        "{stale:?}"
    );
    control(&session, "ROLLBACK TO SAVEPOINT here").await?;
    let fresh = session
        .query("SELECT * FROM item", &[])
        .await
        .map_err(|error| anyhow::anyhow!("{error:?}"))?;
    ensure!(fresh.columns.len() == 3);
    Ok(())
}

#[tokio::test]
async fn types_nested_without_end_cannot_overflow_the_host() -> Result<()> {
    let mut session = Session::begin().await?;
    let mut admin = session.database.connect().await?;
    admin.execute("CREATE DOMAIN d0 AS int").await?;
    for level in 1..300 {
        admin.execute(AssertSqlSafe(format!("CREATE DOMAIN d{level} AS d{}", level - 1))).await?;
    }
    ensure!(session.value("SELECT 1::d20", &[]).await? == Value::Int4(1));
    // Deeper than the driver follows: reported, and the connection lives.
    let deep = session.query("SELECT $1::d299", &[Value::Int4(1)]).await;
    ensure!(matches!(deep, Err(Error::Unsupported(_))), "{deep:?}");
    ensure!(!session.tx.is_broken().await);
    // Deep enough to be a step of an attack that goes deeper each time: the connection
    // is given up, and its types with it.
    session.restart().await?;
    let step = run_statement(
        &session.tx,
        &Limits::default(),
        StatementMode::Query,
        "SELECT $1::d60",
        &[Value::Int4(1)],
    )
    .await;
    ensure!(matches!(step, Err(SqlStop::Host(_))), "{step:?}");
    Ok(())
}

async fn interpret(
    handler: &ComponentHandler,
    tx: &Tx,
    steps: &[(&str, &str)],
    end: &str,
) -> Result<Option<String>, Failure> {
    let record = Record {
        topic: "t".into(),
        topic_id: None,
        partition: 0,
        offset: 0,
        timestamp_ms: 0,
        key: None,
        headers: steps
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
            .collect(),
        payload: None,
    };
    let message = Message {
        id: "m".to_owned(),
        source: "t".to_owned(),
        event_type: "t".to_owned(),
        event_version: None,
        ordering_key: None,
        sequence: None,
        content_type: Some(end.to_owned()),
        trace_parent: None,
        decoded: None,
        fetched: None,
        payload_hash: None,
        record,
    };
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    let run = Run {
        tenant: "t",
        consumer: "c",
        message: &message,
        attempt: 1,
        kind: DeliveryKind::Live,
        deadline,
        outbox: &Outbox::closed(),
        may_run_ahead: false,
    };
    handler.handle(tx, &run).await.map(|output| output.result)
}

#[tokio::test]
async fn a_failed_statement_fails_the_message_unless_it_was_rolled_back() -> Result<()> {
    let mut session = Session::begin().await?;
    let handler = interpreter(Limits::default()).await?;
    let (good, bad) =
        (("e", "INSERT INTO item VALUES (1, 'a')"), ("e", "INSERT INTO item VALUES (2, '')"));
    let sql = || Some(FailureKind::Sql { sqlstate: "23514".to_owned() });
    let (refused, unsupported) = (("e", "COMMIT"), ("e", "SELECT $1::int"));
    type Steps<'a> = &'a [(&'a str, &'a str)];
    let cases: &[(Steps<'_>, &str, Option<FailureKind>)] = &[
        (&[good], "n", None),
        (&[good, bad], "n", sql()),
        (&[bad], "x", sql()),
        (&[bad], "f", sql()),
        (&[bad], "j", Some(FailureKind::Reject)),
        (&[good, ("s", ""), bad, ("r", "")], "n", None),
        (&[good, ("s", ""), bad, ("r", ""), ("l", "")], "n", None),
        (&[good, ("s", ""), bad, ("r", ""), bad], "n", sql()),
        (&[good, ("s", ""), bad, ("l", "")], "n", sql()),
        (&[good, ("s", ""), bad, ("d", "")], "n", sql()),
        (&[("s", ""), ("l", ""), ("r", "")], "n", Some(FailureKind::StatementRefused)),
        (&[("s", ""), ("d", "")], "n", None),
        (&[refused], "n", Some(FailureKind::StatementRefused)),
        (&[("s", ""), refused, ("r", "")], "n", None),
        (&[refused, ("s", ""), ("r", "")], "n", Some(FailureKind::StatementRefused)),
        (&[unsupported], "n", Some(FailureKind::Other)),
        (
            &[("e", "SELECT 1; COMMIT")],
            "n",
            Some(FailureKind::Sql { sqlstate: "42601".to_owned() }),
        ),
        (&[("o", ""); 17], "n", Some(FailureKind::Limit)),
        (&[], "x", Some(FailureKind::Trap)),
    ];
    for (steps, end, expected) in cases {
        session.restart().await?;
        let result = interpret(&handler, &session.tx, steps, end).await;
        let kind = result.as_ref().err().map(|failure| failure.kind.clone());
        ensure!(kind == *expected, "{steps:?} {end}: {result:?}");
        ensure!(!session.tx.is_broken().await, "{steps:?} {end}");
    }
    Ok(())
}

#[tokio::test]
async fn a_savepoint_left_open_does_not_reach_the_next_message() -> Result<()> {
    let session = Session::begin().await?;
    let handler = interpreter(Limits::default()).await?;
    for id in 1..=3 {
        let insert = format!("INSERT INTO item VALUES ({id}, 'a')");
        let result =
            interpret(&handler, &session.tx, &[("s", ""), ("e", &insert), ("o", "")], "n").await;
        ensure!(result == Ok(None), "{result:?}");
        // Both of the guest's savepoints are gone, by the names the host gives them.
        for name in ["guest_1", "guest_3"] {
            let mut statement = session.tx.statement().await;
            statement.connection().execute("SAVEPOINT probe").await?;
            let gone = statement
                .connection()
                .execute(AssertSqlSafe(format!("RELEASE SAVEPOINT {name}")))
                .await;
            ensure!(gone.is_err_and(|error| {
                error.as_database_error().and_then(|error| error.code()).as_deref() == Some("3B001")
            }));
            statement.connection().execute("ROLLBACK TO SAVEPOINT probe").await?;
            statement.finish(None);
        }
    }
    ensure!(session.value("SELECT count(*) FROM item", &[]).await? == Value::Int8(3));
    Ok(())
}

#[tokio::test]
async fn a_deadline_within_a_statement_condemns_the_connection_and_frees_the_instance() -> Result<()>
{
    let mut session = Session::begin().await?;
    let handler = interpreter(Limits::default()).await?;
    for _ in 0..4 {
        session.restart().await?;
        let slow = interpret(&handler, &session.tx, &[("e", "SELECT pg_sleep(30)")], "n");
        ensure!(tokio::time::timeout(std::time::Duration::from_millis(100), slow).await.is_err());
        ensure!(session.tx.is_broken().await);
    }
    Ok(())
}
