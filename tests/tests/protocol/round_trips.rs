//! Statements that share a round trip to the database. What could go wrong: the answer of one is
//! taken for that of another, an error is charged to the wrong statement, or is lost; a COMMIT that
//! was sent behind a refused statement is carried out; a connection that died while it was idle
//! costs a message its transaction.

use oncebox_inbox::SessionSettings;
use oncebox_model::tx::answered;
use oncebox_tests::{
    inbox::{InboxFixture, both, code, deliver, drive, open, record},
    proxy::Proxy,
    wait::DEADLINE,
};
use sqlx::{Connection, Executor, PgConnection, SqlSafeStr, Statement};
use tokio::time::{Instant, sleep, timeout};

async fn proxy_of(fixture: &InboxFixture) -> Proxy {
    let options = fixture.superuser_options();
    let server = format!("{}:{}", options.get_host(), options.get_port()).parse().unwrap();
    Proxy::to(server).await.unwrap()
}

/// What could go wrong: BEGIN, or the completion, waits for an answer of its own; a message alone
/// then takes two round trips more.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_alone_takes_two_round_trips_beside_its_statements() {
    both(a_message_alone_takes_two_round_trips_beside_its_statements_of).await;
}

async fn a_message_alone_takes_two_round_trips_beside_its_statements_of(fixture: InboxFixture) {
    // The call of a batch handler has a savepoint, whose release is a third one.
    let release = usize::from(fixture.takes_batches());
    let consumer = fixture.simple("", "batch = { messages_max = 1 }").await;
    let proxy = proxy_of(&fixture).await;
    let host = fixture.host_through(&consumer, proxy.address(), &SessionSettings::default());
    let mut partition = open(&host, 0).await;
    // The first ones prepare what later ones use.
    let warm = [record(0, "a", ""), record(1, "b", "sql SELECT 1"), record(2, "a", "")];
    assert!(drive(&mut partition, &warm).await.is_empty());
    for (offset, id, script, trips) in [
        (3, "c", "", 3),
        (4, "d", "", 3),
        (5, "c", "", 2), // it is known, and its handler does not run
        (6, "e", "sql SELECT 1", 4),
    ] {
        let before = proxy.trips();
        assert!(drive(&mut partition, &[record(offset, id, script)]).await.is_empty());
        let trips = if trips > 2 { trips + release } else { trips };
        assert_eq!(proxy.trips() - before, trips, "{id} at {offset}");
    }
    partition.close().await;
    for id in ["a", "b", "c", "d", "e"] {
        assert_eq!(fixture.effects(&consumer, id).await, 1);
    }
    fixture.finish().await;
}

/// What could go wrong: the host finds that an idle connection is gone when it has sent the claim
/// of a message, and offers the message again, with a warning and a pause.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_died_while_it_was_idle_costs_no_message_its_transaction() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let proxy = proxy_of(&fixture).await;
    let host = fixture.host_through(&consumer, proxy.address(), &SessionSettings::default());
    let mut errors = 0;
    for round in 0..12 {
        let id = format!("m{round}");
        errors += deliver(&host, &[record(round, &id, "")]).await.len();
        assert_eq!(fixture.effects(&consumer, &id).await, 1);
        if round % 2 == 0 {
            assert!(proxy.cut() > 0, "the network ended it");
        } else {
            let login = &consumer.tenant.login;
            let ended = format!(
                "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE \
                    usename = '{login}'"
            );
            assert!(fixture.number(ended).await > 0, "the server ended it");
        }
        // This process hears of it while it does something else.
        sleep(std::time::Duration::from_millis(50)).await;
    }
    // A process that is late now and then hears of it by a message.
    assert!(errors < 4, "{errors} of 11");
    fixture.finish().await;
}

/// What could go wrong: each of the idle connections that died unnoticed costs a message an attempt
/// of its own; or the tenant's other transactions do not learn that they broke together.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_died_unnoticed_cost_one_attempt_together() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let proxy = proxy_of(&fixture).await;
    let host = fixture.host_through(&consumer, proxy.address(), &SessionSettings::default());
    // Five messages at the same time leave five idle connections.
    let waiting: Vec<_> = (0..5)
        .map(|number| {
            let (host, record) = (host.clone(), record(0, &format!("w{number}"), "gate w"));
            tokio::spawn(async move { deliver(&host, &[record]).await })
        })
        .collect();
    fixture.script.gate("w").reached(5).await;
    fixture.script.gate("w").open();
    for delivered in waiting {
        assert!(delivered.await.unwrap().is_empty());
    }
    let mut partition = open(&host, 100).await;
    assert!(proxy.cut_when_used() >= 5);
    let errors = drive(&mut partition, &[record(100, "a", "")]).await;
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(fixture.effects(&consumer, "a").await, 1);
    assert!(drive(&mut partition, &[record(101, "b", "")]).await.is_empty());
    partition.close().await;
    fixture.finish().await;
}

/// A statement, and the code of its error.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Insert,
    Raw,
    /// One that returns more than a buffer of the network holds.
    Rows,
    /// One that the server says more about than an answer: notices, and a new setting.
    Noise,
    Divide,
    RawDivide,
    Forgotten,
}

const STEPS: [Step; 7] = [
    Step::Insert,
    Step::Raw,
    Step::Rows,
    Step::Noise,
    Step::Divide,
    Step::RawDivide,
    Step::Forgotten,
];

impl Step {
    fn error(self) -> Option<&'static str> {
        match self {
            Self::Insert | Self::Raw | Self::Rows | Self::Noise => None,
            Self::Divide | Self::RawDivide => Some("22012"),
            Self::Forgotten => Some("26000"),
        }
    }

    const FORGET: &str = "SELECT 'forgotten' WHERE $1 = 1";

    async fn enqueue(self, connection: &mut PgConnection) {
        let enqueued = match self {
            Self::Insert => connection.enqueue(sqlx::query("INSERT INTO t VALUES ($1)").bind(1)),
            Self::Rows => {
                let rows = "SELECT repeat('x', 1000) FROM generate_series(1, $1)";
                connection.enqueue(sqlx::query(rows).bind(2_000)).await.unwrap();
                return;
            }
            Self::Divide => connection.enqueue(sqlx::query("SELECT 1 / $1").bind(0)),
            Self::Forgotten => connection.enqueue(sqlx::query(Self::FORGET).bind(1)),
            Self::Raw => {
                connection.enqueue(sqlx::raw_sql("INSERT INTO t VALUES (2), (3)")).await.unwrap();
                return;
            }
            Self::Noise => {
                let noise = "SET TIME ZONE 'Asia/Tokyo'; SET TIME ZONE 'UTC'; DO $$ BEGIN RAISE NOTICE \
                    'n'; END $$";
                connection.enqueue(sqlx::raw_sql(noise)).await.unwrap();
                return;
            }
            Self::RawDivide => {
                connection.enqueue(sqlx::raw_sql("SELECT 1; SELECT 1 / 0")).await.unwrap();
                return;
            }
        };
        enqueued.await.unwrap();
    }
}

/// A connection on which everything is prepared, and the server has forgotten one statement.
async fn prepared(fixture: &InboxFixture) -> PgConnection {
    let mut connection = fixture.superuser().await;
    connection.execute("CREATE TEMPORARY TABLE t (n int)").await.unwrap();
    for step in STEPS {
        step.enqueue(&mut connection).await;
        let _ = connection.wait_for_enqueued().await;
    }
    let name = "SELECT name FROM pg_prepared_statements WHERE statement LIKE '%forgotten%' AND \
        statement NOT LIKE '%pg_prepared%'";
    let name: String = sqlx::query_scalar(name).fetch_one(&mut connection).await.unwrap();
    let deallocate = format!("DEALLOCATE \"{name}\"");
    connection.execute(sqlx::AssertSqlSafe(deallocate)).await.unwrap();
    connection.execute("TRUNCATE t").await.unwrap();
    connection
}

/// Every order of up to two statements behind BEGIN, and each kind of end.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_that_of_the_statement_that_raised_it() {
    let fixture = InboxFixture::new().await;
    let mut connection = prepared(&fixture).await;
    let mut orders = vec![Vec::new()];
    for one in STEPS {
        orders.push(vec![one]);
        orders.extend(STEPS.map(|other| vec![one, other]));
    }
    let mut failed = 0;
    for order in &orders {
        for end in ["COMMIT", "SELECT 1 / 0", "WAIT", "PING", "UNPREPARED", "BAD"] {
            let what = format!("{order:?}, {end}");
            connection.enqueue(sqlx::raw_sql("BEGIN")).await.unwrap();
            for step in order {
                step.enqueue(&mut connection).await;
            }
            let error = order.iter().find_map(|step| step.error());
            failed += usize::from(error.is_some());
            let (answer, own) = match end {
                "WAIT" => (connection.wait_for_enqueued().await, None),
                "PING" => {
                    // It reads the answers; the statement behind it gets the error all the same.
                    connection.ping().await.unwrap();
                    (connection.execute("SELECT 1").await.map(drop), None)
                }
                "UNPREPARED" => {
                    let text = format!("SELECT $1::int + {}", rand::random::<u16>());
                    let query = sqlx::query(sqlx::AssertSqlSafe(text)).bind(1);
                    (query.fetch_one(&mut connection).await.map(drop), None)
                }
                "BAD" => {
                    // It cannot be prepared; what is enqueued goes first.
                    let query = sqlx::query("SELECT no_such_column, $1").bind(1);
                    (query.fetch_one(&mut connection).await.map(drop), Some("42703"))
                }
                "COMMIT" => (connection.execute("COMMIT").await.map(drop), None),
                end => (connection.execute(end).await.map(drop), Some("22012")),
            };
            let failed = connection.take_failed_enqueued();
            assert_eq!(answer.as_ref().err().map(code).as_deref(), error.or(own), "{what}");
            // BEGIN is the first one.
            let place = order.iter().position(|step| step.error().is_some()).map(|at| at + 1);
            assert_eq!(failed, place, "{what}");
            assert_eq!(connection.take_failed_enqueued(), None, "{what}: told once");
            connection.execute("ROLLBACK").await.unwrap();
            // The answers of later statements are their own.
            let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM t");
            let rows = rows.fetch_one(&mut connection).await.unwrap();
            let written: i64 = match (error, end) {
                (None, "COMMIT") => order.iter().map(|step| step.rows()).sum(),
                _ => 0,
            };
            assert_eq!(rows, written, "{what}");
            connection.execute("TRUNCATE t").await.unwrap();
        }
    }
    assert!(failed > 100 && orders.len() == 57, "{failed} of {}", orders.len());
    fixture.finish().await;
}

impl Step {
    fn rows(self) -> i64 {
        match self {
            Self::Insert => 1,
            Self::Raw => 2,
            _ => 0,
        }
    }
}

/// What could go wrong: the runtime asks for the types of a guest's statement, which the driver
/// knows, and what was enqueued before it, such as a savepoint, makes a trip of its own for that.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_is_prepared_waits_for_nothing_before_it() {
    let fixture = InboxFixture::new().await;
    let proxy = proxy_of(&fixture).await;
    let options = fixture.superuser_options().port(proxy.address().port()).host("127.0.0.1");
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    connection.execute("BEGIN").await.unwrap();
    for round in 0..3 {
        let before = proxy.trips();
        connection.enqueue(sqlx::raw_sql("SAVEPOINT m")).await.unwrap();
        let prepared = connection.prepare(sqlx::AssertSqlSafe("SELECT $1::int8").into_sql_str());
        let prepared = prepared.await.unwrap();
        let number = prepared.query_scalar::<i64>().bind(7_i64).fetch_one(&mut connection).await;
        assert_eq!(number.unwrap(), 7);
        let trips = proxy.trips() - before;
        // The first time what is enqueued goes first, and then the text is prepared.
        assert_eq!(trips, if round == 0 { 3 } else { 1 }, "round {round}");
    }
    connection.execute("ROLLBACK TO SAVEPOINT m").await.unwrap();
    connection.close().await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: the look whether a session lives reads the answers of what was enqueued, and
/// an error of the completion behind it counts as one of COMMIT.
#[tokio::test(flavor = "multi_thread")]
async fn a_ping_among_them_moves_no_error_to_another() {
    let fixture = InboxFixture::new().await;
    let mut connection = prepared(&fixture).await;
    for before in STEPS {
        connection.enqueue(sqlx::raw_sql("BEGIN")).await.unwrap();
        before.enqueue(&mut connection).await;
        connection.ping().await.unwrap();
        Step::Divide.enqueue(&mut connection).await;
        Step::Insert.enqueue(&mut connection).await;
        let error = connection.wait_for_enqueued().await.unwrap_err();
        // An error that the ping read is told by its own place, any other by those since then.
        let (code_of, place) = before.error().map_or(("22012", 0), |error| (error, 1));
        assert_eq!(code(&error), code_of, "{before:?}");
        assert_eq!(connection.take_failed_enqueued(), Some(place), "{before:?}");
        connection.execute("ROLLBACK").await.unwrap();
    }
    connection.close().await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: a connection that the server closed, or says something on, passes for one
/// that nothing happened to; or one that waits for an answer does.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_says_by_itself_is_noticed() {
    let fixture = InboxFixture::new().await;
    for ended in [true, false] {
        let mut connection = fixture.superuser().await;
        connection.execute("LISTEN said").await.unwrap();
        let pid: i32 =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await.unwrap();
        assert!(connection.is_quiet() && connection.is_quiet(), "nothing happened");
        match ended {
            true => fixture.execute(format!("SELECT pg_terminate_backend({pid})")).await,
            false => fixture.execute("NOTIFY said").await,
        }
        let began = Instant::now();
        while connection.is_quiet() {
            assert!(began.elapsed() < DEADLINE, "ended: {ended}");
            sleep(std::time::Duration::from_millis(1)).await;
        }
        assert!(connection.execute("SELECT 1").await.is_err(), "the look has lost nothing");
    }
    let mut connection = fixture.superuser().await;
    connection.enqueue(sqlx::raw_sql("SELECT 1")).await.unwrap();
    assert!(!connection.is_quiet(), "an answer is due");
    connection.wait_for_enqueued().await.unwrap();
    assert!(connection.is_quiet());
    connection.close().await.unwrap();
    fixture.finish().await;
}

/// What could go wrong: the server ends a session in the middle of what was sent to it, and the
/// host takes the answer of an earlier statement for that of COMMIT, or waits for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_among_them_answers_nothing() {
    let fixture = InboxFixture::new().await;
    for end in ["SELECT pg_terminate_backend(pg_backend_pid())", "SELECT pg_sleep(60)"] {
        for behind in 0..2 {
            let mut connection = prepared(&fixture).await;
            connection.enqueue(sqlx::raw_sql("BEGIN")).await.unwrap();
            connection.enqueue(sqlx::raw_sql(end)).await.unwrap();
            for _ in 0..behind {
                Step::Divide.enqueue(&mut connection).await;
            }
            let committing = connection.execute("COMMIT");
            let terminating = async {
                const SLEEPS: &str = "FROM pg_stat_activity WHERE datname = current_database() AND \
                    wait_event = 'PgSleep'";
                let began = Instant::now();
                while end.contains("sleep") && began.elapsed() < DEADLINE {
                    let ended = format!("SELECT count(pg_terminate_backend(pid)) {SLEEPS}");
                    if fixture.number(ended).await > 0 {
                        break;
                    }
                }
            };
            let (answer, ()) = tokio::join!(timeout(DEADLINE, committing), terminating);
            let error = answer.expect("an answer in time").unwrap_err();
            assert!(answered(&error).is_none(), "{end}: the connection is lost: {error}");
        }
    }
    fixture.finish().await;
}
