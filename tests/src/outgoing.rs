//! Handlers in Rust that emit outgoing messages, and what the table must hold afterwards.
//!
//! A script may say two more steps than those of [`Script`], which come before all others:
//!
//! - `emit <destination> [<option>=<value> …]` emits a message. The options are `key`, `token`,
//!   `type`, `payload`, `after` (milliseconds from now) and `at` (milliseconds since the Unix
//!   epoch);
//! - `cancel <token>` withdraws what the consumer emitted with the token.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use futures::future::BoxFuture;
use oncebox_inbox::{ConsumerInbox, SessionSettings};
use oncebox_model::{
    handler::{Answer, BatchRun, DeliveryKind, Handler, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    outgoing::{Due, OutgoingMessage, Output, outgoing_id},
    record::Record,
    tx::Tx,
};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgExecutor, PgPool};
use tokio::time::timeout;

use crate::inbox::{
    InboxFixture, PlainHandlers, Script, ScriptControl, TestConsumer, code, record,
};
use crate::wait::DEADLINE;

/// A handler that emits what its messages say and then does the rest of their scripts.
struct Emitter {
    script: Arc<dyn Handler>,
    takes_batches: bool,
}

impl Emitter {
    async fn perform(&self, tx: &Tx, run: &Run<'_>) -> Answer {
        let script = script_of(run.message);
        for token in tokens_to_cancel(&script) {
            run.outbox.canceller.cancel(tx, token).await.map_err(|error| sql_failure(&error))?;
        }
        let outgoing = emitted(run.tenant, run.consumer, &run.message.id, &script);
        let message = without_own_steps(run.message, &script);
        let run = Run { message: &message, ..run.clone() };
        let output = self.script.handle(tx, &run).await?;
        Ok(Output { outgoing, ..output })
    }

    /// As with a statement that works on a set, a failed statement speaks for no message in
    /// particular.
    async fn perform_batch(&self, tx: &Tx, batch: &BatchRun<'_>) -> Result<Vec<Answer>, Failure> {
        let mut answers = Vec::new();
        for message in batch.messages {
            let BatchRun { tenant, consumer, deadline, outbox, .. } = *batch;
            let kind = DeliveryKind::Live;
            let (attempt, may_run_ahead) = (1, false);
            let run =
                Run { tenant, consumer, message, attempt, kind, deadline, outbox, may_run_ahead };
            match self.perform(tx, &run).await {
                Err(failure)
                    if matches!(failure.kind, FailureKind::Sql { .. } | FailureKind::Trap) =>
                {
                    return Err(failure);
                }
                answer => answers.push(answer),
            }
        }
        Ok(answers)
    }
}

impl Handler for Emitter {
    fn version(&self) -> i32 {
        1
    }

    fn may_emit(&self) -> bool {
        true
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(self.perform(tx, run))
    }

    fn takes_batches(&self) -> bool {
        self.takes_batches
    }

    fn handle_batch<'a>(
        &'a self,
        tx: &'a Tx,
        run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        Box::pin(self.perform_batch(tx, run))
    }
}

/// Makes a handler that takes one message at a time.
pub fn emitter(control: &Arc<ScriptControl>) -> Arc<dyn Handler> {
    Arc::new(Emitter { script: Script::handler(control.clone()), takes_batches: false })
}

/// Makes a handler that takes the messages of a transaction together.
pub fn batch_emitter(control: &Arc<ScriptControl>) -> Arc<dyn Handler> {
    Arc::new(Emitter { script: Script::handler(control.clone()), takes_batches: true })
}

/// Makes a host whose handler emits.
pub fn emitting_host(fixture: &InboxFixture, consumer: &TestConsumer) -> Arc<ConsumerInbox> {
    let handlers = PlainHandlers::of(emitter(&fixture.script));
    fixture.host_with(consumer, handlers, &SessionSettings::default())
}

/// Makes a host whose handler emits for all messages of a transaction in one call.
pub fn batch_emitting_host(fixture: &InboxFixture, consumer: &TestConsumer) -> Arc<ConsumerInbox> {
    let handlers = PlainHandlers::of(batch_emitter(&fixture.script));
    fixture.host_with(consumer, handlers, &SessionSettings::default())
}

fn script_of(message: &Message) -> String {
    String::from_utf8_lossy(message.body().unwrap_or_default()).into_owned()
}

fn is_own_step(line: &str) -> bool {
    line.starts_with("emit ") || line.starts_with("cancel ")
}

fn tokens_to_cancel(script: &str) -> impl Iterator<Item = &str> {
    script.lines().filter_map(|line| line.strip_prefix("cancel "))
}

/// Returns the message with the steps of [`Script`] alone.
fn without_own_steps(message: &Message, script: &str) -> Message {
    let steps: Vec<_> = script.lines().filter(|line| !is_own_step(line)).collect();
    let payload = Some(steps.join("\n").into_bytes());
    Message { record: Record { payload, ..message.record.clone() }, ..message.clone() }
}

/// Returns what a message with this script emits.
pub fn emitted(
    tenant: &str,
    consumer: &str,
    message_id: &str,
    script: &str,
) -> Vec<OutgoingMessage> {
    let lines = script.lines().filter_map(|line| line.strip_prefix("emit "));
    (0..)
        .zip(lines)
        .map(|(ordinal, line)| outgoing_message(tenant, consumer, message_id, ordinal, line))
        .collect()
}

fn outgoing_message(
    tenant: &str,
    consumer: &str,
    message_id: &str,
    ordinal: u32,
    line: &str,
) -> OutgoingMessage {
    let (destination, options) = line.split_once(' ').unwrap_or((line, ""));
    let mut message = OutgoingMessage {
        ordinal,
        id: outgoing_id(tenant, consumer, message_id, ordinal),
        destination: destination.parse().unwrap_or_else(|error| panic!("`{line}`: {error}")),
        event_type: "test.emitted".to_owned(),
        content_type: None,
        key: None,
        headers: vec![("note".to_owned(), format!("note of {message_id}").into_bytes())],
        payload: Some(format!("{message_id}/{ordinal}").into_bytes()),
        due: Due::Now,
        cancel_token: None,
    };
    for option in options.split_whitespace() {
        let (name, value) = option.split_once('=').expect("`<option>=<value>`");
        match name {
            "key" => message.key = Some(value.as_bytes().to_vec()),
            "token" => message.cancel_token = Some(value.to_owned()),
            "type" => message.event_type = value.to_owned(),
            "payload" => message.payload = Some(value.as_bytes().to_vec()),
            "after" => {
                message.due =
                    Due::After(Duration::from_millis(value.parse().expect("milliseconds")));
            }
            "at" => message.due = Due::At(value.parse().expect("milliseconds")),
            _ => panic!("a script cannot say `{option}`"),
        }
    }
    message
}

fn sql_failure(error: &sqlx::Error) -> Failure {
    Failure::new(FailureKind::Sql { sqlstate: code(error) }, error.to_string())
}

/// Derives the id of an outgoing message in another way than the host does, for an oracle that no
/// defect of the host reaches.
pub fn derived_id(tenant: &str, consumer: &str, message_id: &str, ordinal: u32) -> String {
    derived(b"oncebox outgoing message 1", [tenant, consumer, message_id], ordinal)
}

/// Derives the id of the answer to an outgoing message, in the same way.
pub fn derived_answer_id(tenant: &str, consumer: &str, outgoing_id: &str) -> String {
    derived(b"oncebox answer 1", [tenant, consumer, outgoing_id], 0)
}

fn derived(label: &[u8], parts: [&str; 3], ordinal: u32) -> String {
    let mut bytes = label.to_vec();
    for part in parts {
        bytes.extend((part.len() as u64).to_be_bytes());
        bytes.extend(part.bytes());
    }
    bytes.extend(ordinal.to_be_bytes());
    let mut id = Sha256::digest(bytes)[..16].to_vec();
    id[6] = 0x80 | (id[6] & 0x0f);
    id[8] = 0x80 | (id[8] & 0x3f);
    let hex = hex::encode(id);
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A row of the table of outgoing messages, as the tests look at it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
#[allow(missing_docs, reason = "the columns of the table")]
pub struct OutgoingRow {
    pub consumer_id: i32,
    pub message_id: String,
    pub ordinal: i32,
    pub id: String,
    pub destination: String,
    pub key: Option<Vec<u8>>,
    pub lane: Option<i64>,
    pub event_type: String,
    pub correlation_id: String,
    pub payload: Option<Vec<u8>>,
    pub cancel_token: Option<String>,
    pub status: String,
    pub reason: Option<String>,
    pub attempts: i32,
    pub epoch: i64,
    /// Whether a relay holds it.
    pub leased: bool,
    /// Whether it is settled.
    pub settled: bool,
    /// Milliseconds from its insert until it was, or is, due.
    pub due_after_ms: i64,
    /// The partition that holds it.
    pub partition: String,
}

impl OutgoingRow {
    /// Status and reason.
    pub fn state(&self) -> (&str, Option<&str>) {
        (&self.status, self.reason.as_deref())
    }
}

const ROWS: &str = "SELECT consumer_id, message_id, ordinal, id, destination, key, lane, \
    event_type, correlation_id, payload, cancel_token, status, reason, attempts, epoch, \
    locked_until IS NOT NULL AS leased, settled_at IS NOT NULL AS settled, \
    (extract(epoch FROM due_at - created_at) * 1000)::bigint AS due_after_ms, \
    tableoid::regclass::text AS partition FROM oncebox.outgoing ORDER BY position";

/// Reads every outgoing message in a database, in the order of the inserts.
pub async fn outgoing_in(pool: &PgPool) -> Vec<OutgoingRow> {
    sqlx::query_as(AssertSqlSafe(ROWS)).fetch_all(pool).await.expect("the outgoing messages")
}

/// Reads every outgoing message in the fixture's database, in the order of the inserts.
pub async fn outgoing(fixture: &InboxFixture) -> Vec<OutgoingRow> {
    outgoing_in(&fixture.pool).await
}

/// Reads the only outgoing message that a message caused.
pub async fn caused_by(fixture: &InboxFixture, message_id: &str) -> OutgoingRow {
    let rows = outgoing(fixture).await;
    let mut own = rows.iter().filter(|row| row.message_id == message_id);
    match (own.next(), own.next()) {
        (Some(row), None) => row.clone(),
        _ => panic!("`{message_id}` caused not one message, but those of it among {rows:#?}"),
    }
}

/// A record whose script is these lines.
pub fn emitting(offset: i64, id: &str, lines: &[&str]) -> Record {
    record(offset, id, &lines.join("\n"))
}

/// What identifies an outgoing message, with what a destination gets of it.
type Sent = (String, i32, String, String, Option<Vec<u8>>, Option<Vec<u8>>);

/// Checks that the consumer's completed messages have emitted exactly what their scripts say, and
/// that no other message has emitted anything. A failed check names the first difference.
pub async fn check_emitted(fixture: &InboxFixture, consumer: &TestConsumer, log: &[Record]) {
    let (tenant, name) = (&consumer.row.tenant, &consumer.row.name);
    let mut expected = BTreeMap::new();
    for record in log {
        let id = String::from_utf8_lossy(record.header("id").unwrap_or_default()).into_owned();
        let script = String::from_utf8_lossy(record.payload.as_deref().unwrap_or_default());
        let row = fixture.find(consumer, &id).await;
        if row.is_some_and(|row| row.status == "completed") {
            let messages = emitted(tenant, name, &id, &script);
            expected.extend(messages.into_iter().map(|message| {
                let destination = message.destination.to_string();
                let ordinal = i32::try_from(message.ordinal).expect("few emits");
                let derived = derived_id(tenant, name, &id, message.ordinal);
                let sent: Sent =
                    (id.clone(), ordinal, derived, destination, message.key, message.payload);
                ((id.clone(), ordinal), sent)
            }));
        }
    }
    let rows = outgoing(fixture).await;
    let own: Vec<_> =
        rows.iter().filter(|row| row.consumer_id == consumer.row.consumer_id).cloned().collect();
    let found: BTreeMap<_, Sent> = own
        .iter()
        .cloned()
        .map(|row| {
            let place = (row.message_id.clone(), row.ordinal);
            (place, (row.message_id, row.ordinal, row.id, row.destination, row.key, row.payload))
        })
        .collect();
    assert_eq!(found.len(), own.len(), "an outgoing message has two rows: {own:#?}");
    assert_eq!(found, expected, "outgoing messages are not those of the completed messages");
}

/// A transaction of a tenant's session in which outgoing messages are cancelled, as a handler's
/// host does it.
pub struct CancelTransaction {
    connection: PgConnection,
    /// What it binds as its secret; its tenant's, unless a test says otherwise.
    pub secret: Vec<u8>,
    /// The consumer it speaks for.
    pub consumer_id: i32,
}

impl CancelTransaction {
    /// Begins one in a session of the consumer's tenant.
    pub async fn begin(fixture: &InboxFixture, consumer: &TestConsumer) -> Self {
        let mut connection = fixture.guest(&consumer.tenant).await;
        connection
            .execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
            .await
            .expect("a transaction");
        let (secret, consumer_id) = (fixture.secret(&consumer.tenant), consumer.row.consumer_id);
        Self { connection, secret, consumer_id }
    }

    /// Cancels what was emitted with a token. Returns whether there was any. It never waits.
    pub async fn cancel(&mut self, token: &str) -> Result<bool, sqlx::Error> {
        const CANCEL: &str = "SELECT oncebox_host.cancel_outgoing($1, $2, $3)";
        let query =
            sqlx::query_scalar(CANCEL).bind(&self.secret).bind(self.consumer_id).bind(token);
        let cancelling = query.fetch_one(&mut self.connection);
        timeout(DEADLINE, cancelling).await.expect("a cancel waits for nobody")
    }

    /// Commits what was cancelled.
    pub async fn commit(mut self) {
        self.connection.execute("COMMIT").await.expect("a commit");
    }

    /// Takes back what was cancelled.
    pub async fn roll_back(mut self) {
        self.connection.execute("ROLLBACK").await.expect("a rollback");
    }
}

/// An outgoing message that a relay leased.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct LeasedOutgoing {
    /// The consumer whose handler emitted it.
    pub consumer_id: i32,
    /// The message that caused it.
    pub message_id: String,
    /// Number of the emit among those of its cause.
    pub ordinal: i32,
    /// Start of the day of its row.
    pub bucket: DateTime<Utc>,
    /// Its id.
    pub id: String,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Number of the lease.
    pub epoch: i64,
}

/// A relay that goes step by step, with the functions that the relay of a host calls.
#[derive(Debug, Clone)]
pub struct StepRelay {
    pool: PgPool,
    tenant_id: i32,
    consumers: Vec<i32>,
    /// Consumers whose parked messages hold their lanes.
    stopping: Vec<i32>,
    /// Its host's name in the rows.
    owner: String,
}

impl StepRelay {
    /// A relay for the messages of these consumers, which are of one tenant.
    pub fn new(fixture: &InboxFixture, owner: &str, consumers: &[&TestConsumer]) -> Self {
        let tenant_id = consumers.first().expect("a consumer").tenant.tenant_id;
        let consumers = consumers.iter().map(|consumer| consumer.row.consumer_id).collect();
        let (pool, owner) = (fixture.pool.clone(), owner.to_owned());
        Self { pool, tenant_id, consumers, stopping: Vec::new(), owner }
    }

    /// The same relay, if the policies of its consumers said that parked messages hold their lanes.
    pub fn stopping(&self) -> Self {
        Self { stopping: self.consumers.clone(), ..self.clone() }
    }

    /// Leases messages to a destination that are due and are heads of their lanes.
    pub async fn lease(&self, destination: &str, most: i32) -> Vec<LeasedOutgoing> {
        let lease = self.lease_statement(destination, most);
        sqlx::query_as(AssertSqlSafe(lease)).fetch_all(&self.pool).await.expect("a lease")
    }

    /// The statement by which it leases, for a test that has the transaction in its hand.
    pub fn lease_statement(&self, destination: &str, most: i32) -> String {
        let Self { tenant_id, consumers, stopping, owner, .. } = self;
        format!(
            "SELECT consumer_id, message_id, ordinal, bucket, id, key, epoch FROM \
                oncebox.lease_outgoing(p_tenant => {tenant_id}, p_consumers => \
                ARRAY{consumers:?}::int[], p_stopping => ARRAY{stopping:?}::int[], p_destination \
                => '{destination}', p_most => {most}, p_bytes_max => 8388608, p_lease_ms => 60000, \
                p_owner => '{owner}')"
        )
    }

    /// Writes what became of messages that it leased. Returns the number of rows that it wrote.
    pub async fn mark(&self, leased: &[LeasedOutgoing], status: &str) -> i64 {
        self.mark_on(&self.pool, leased, status).await
    }

    /// The same, for a test that has the transaction in its hand.
    pub async fn mark_on<'e>(
        &self,
        executor: impl PgExecutor<'e>,
        leased: &[LeasedOutgoing],
        status: &str,
    ) -> i64 {
        const MARK: &str = "SELECT count(*) FROM oncebox.mark_outgoing($1, $2, $3, $4, $5, $6, $7, \
            $8, $9, $10, 10, 86400000)";
        let all = leased.len();
        let reason = ["parked", "failed_retryable"].contains(&status).then_some("refused");
        sqlx::query_scalar(MARK)
            .bind(leased.iter().map(|row| row.consumer_id).collect::<Vec<_>>())
            .bind(leased.iter().map(|row| row.message_id.clone()).collect::<Vec<_>>())
            .bind(leased.iter().map(|row| row.ordinal).collect::<Vec<_>>())
            .bind(leased.iter().map(|row| row.bucket).collect::<Vec<_>>())
            .bind(leased.iter().map(|row| row.epoch).collect::<Vec<_>>())
            .bind(vec![status.to_owned(); all])
            .bind(vec![reason.map(str::to_owned); all])
            .bind(vec![reason.map(str::to_owned); all])
            .bind(vec![0_i64; all])
            .bind(vec![true; all])
            .fetch_one(executor)
            .await
            .expect("a mark")
    }

    /// Ends its leases, as the time does after it died; another relay then finds them run out.
    pub async fn dies(&self) {
        const EXPIRE: &str = "UPDATE oncebox.outgoing SET locked_until = now() - interval '1 s' \
            WHERE status = 'in_progress' AND locked_by = $1";
        sqlx::query(EXPIRE).bind(&self.owner).execute(&self.pool).await.expect("time passes");
    }

    /// Takes back leases that ran out, whosever they are. Returns their number.
    pub async fn reclaim(&self) -> i32 {
        let query = sqlx::query_scalar("SELECT oncebox.reclaim_outgoing(1000)");
        query.fetch_one(&self.pool).await.expect("an answer")
    }
}

/// The name of the partition of a day so many days ago, as an expression.
pub fn partition_name(days: i64) -> String {
    format!("'outgoing_' || to_char((now() AT TIME ZONE 'UTC')::date - {days}, 'YYYYMMDD')")
}

/// Puts the outgoing messages of a condition so many days back, into a partition of their day.
pub async fn age_outgoing(fixture: &InboxFixture, which: &str, days: i64) {
    let make = format!(
        "DO $$ DECLARE v_from timestamptz := date_bin('1 day', now() - interval '{days} days', \
            '2000-01-03 00:00:00+00'); BEGIN EXECUTE format('CREATE TABLE IF NOT EXISTS \
            oncebox.%I PARTITION OF oncebox.outgoing FOR VALUES FROM (%L) TO (%L)', {name}, \
            v_from, v_from + interval '24 hours'); EXECUTE format('ALTER TABLE oncebox.%I OWNER \
            TO %I', {name}, (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = \
            'oncebox.outgoing'::regclass)); END $$",
        name = partition_name(days)
    );
    fixture.execute(make).await;
    let back = format!("interval '{days} days'");
    fixture
        .execute(format!(
            "UPDATE oncebox.outgoing SET bucket = bucket - {back}, created_at = created_at - \
                {back} WHERE {which}"
        ))
        .await;
}
