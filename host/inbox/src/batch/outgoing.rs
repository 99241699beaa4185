//! The messages that handlers emit: on their way into the completion, and taken back by a cancel.

use std::{
    collections::BTreeSet,
    sync::{Arc, LazyLock},
};

use futures::future::BoxFuture;
use oncebox_model::{
    error::InboxError,
    handler::Handler,
    headers,
    hooks::{self, Defect},
    message::Message,
    outgoing::{CancelOutgoing, Due, Outbox, OutboxMode, OutgoingMessage, correlation_id},
    tx::{Tx, bounded},
};
use sqlx::Row;

use crate::{
    host_call::{column, host_call},
    session::{Sessions, Transaction},
};

/// Bytes of emitted messages from which on a transaction begins no further message. PostgreSQL
/// takes them in one statement, and the host holds them until then.
pub(crate) const TRANSACTION_BYTES: u64 = 16 << 20;

/// The messages that the runs of one transaction emitted.
#[derive(Debug, Default)]
pub(crate) struct Emitted {
    /// Messages in the order of their causes, then of their emits.
    rows: Vec<EmittedRow>,
    /// Bytes of all of them.
    bytes: u64,
    /// Number of the first messages that have rows in this transaction.
    written: usize,
}

/// An outgoing message with what its row has from its cause.
#[derive(Debug)]
pub(crate) struct EmittedRow {
    /// Id of the message whose run emitted it.
    pub(crate) cause: String,
    /// Trace context with which it is sent: that of its emit, or of its cause.
    pub(crate) trace_parent: Option<String>,
    /// Correlation id that the cause hands on.
    pub(crate) correlation_id: String,
    /// The message.
    pub(crate) message: OutgoingMessage,
}

impl Emitted {
    /// Adds the messages that a run of `cause` emitted. `create` returns the trace context of an
    /// emit; none where it has no span.
    pub(crate) fn add(
        &mut self,
        cause: &Message,
        outgoing: Vec<OutgoingMessage>,
        mut create: impl FnMut(&OutgoingMessage) -> Option<String>,
    ) {
        for message in outgoing {
            self.bytes = self.bytes.saturating_add(message.bytes());
            self.rows.push(EmittedRow {
                cause: cause.id.clone(),
                trace_parent: create(&message).or_else(|| cause.trace_parent.clone()),
                correlation_id: correlation_id(cause).to_owned(),
                message,
            });
        }
    }

    /// Returns the messages that have no row yet.
    pub(crate) fn unwritten(&self) -> &[EmittedRow] {
        &self.rows[self.written..]
    }

    /// Returns whether a later message of the transaction may cancel one that has no row yet.
    pub(crate) fn is_cancellable(&self) -> bool {
        self.unwritten().iter().any(|row| row.message.cancel_token.is_some())
    }

    /// Notes that all messages have rows.
    pub(crate) fn wrote(&mut self) {
        self.written = self.rows.len();
    }

    /// Returns whether the transaction has emitted so much that it begins no further message.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= TRANSACTION_BYTES
    }

    /// Returns the destinations of messages that are due with the commit.
    pub(crate) fn due_destinations(&self) -> BTreeSet<String> {
        let due = self.rows.iter().filter(|row| row.message.due.is_now());
        due.map(|row| row.message.destination.to_string()).collect()
    }
}

impl EmittedRow {
    /// Returns the number of the emit, as its column holds it.
    pub(crate) fn ordinal(&self) -> i32 {
        i32::try_from(self.message.ordinal).unwrap_or(i32::MAX)
    }

    /// Returns the milliseconds after the begin of the transaction at which it is due; none where
    /// it is due at a time or at once.
    pub(crate) fn after_ms(&self) -> Option<i64> {
        match self.message.due {
            Due::After(delay) => Some(i64::try_from(delay.as_millis()).unwrap_or(i64::MAX)),
            Due::Now | Due::At(_) => None,
        }
    }

    /// Returns the time at which it is due, milliseconds since the Unix epoch; none where it is due
    /// at once or after a delay. Every time before the epoch is past alike.
    pub(crate) fn at_ms(&self) -> Option<i64> {
        match self.message.due {
            Due::At(at) => Some(at.max(0)),
            Due::Now | Due::After(_) => None,
        }
    }
}

/// Adds the parameters of emitted messages to a call: passes what follows the name of a macro on to
/// that macro, with these parameters in braces behind it.
macro_rules! with_outgoing {
    ($emitted:ident, $call:ident, $($head:tt)*) => {
        $call!($($head)* {
            p_outgoing_cause: column($emitted, |e| e.cause.as_str()),
            p_outgoing_ordinal: column($emitted, |e| e.ordinal()),
            p_outgoing_id: column($emitted, |e| e.message.id.as_str()),
            p_outgoing_destination: column($emitted, |e| e.message.destination.to_string()),
            p_outgoing_key: column($emitted, |e| e.message.key.as_deref()),
            p_outgoing_event_type: column($emitted, |e| e.message.event_type.as_str()),
            p_outgoing_content_type: column($emitted, |e| e.message.content_type.as_deref()),
            p_outgoing_headers: column($emitted, |e| headers::encode(&e.message.headers)),
            p_outgoing_payload: column($emitted, |e| e.message.payload.as_deref()),
            p_outgoing_token: column($emitted, |e| e.message.cancel_token.as_deref()),
            p_outgoing_after_ms: column($emitted, |e| e.after_ms()),
            p_outgoing_at_ms: column($emitted, |e| e.at_ms()),
            p_outgoing_trace_parent: column($emitted, |e| e.trace_parent.as_deref()),
            p_outgoing_correlation_id: column($emitted, |e| e.correlation_id.as_str()),
        })
    };
}
pub(crate) use with_outgoing;

/// Builds the call of `write_outgoing`.
macro_rules! write_call {
    ($transaction:ident, $consumer_id:ident { $($parameter:ident: $value:expr),+ $(,)? }) => {
        host_call!("write_outgoing" {
            p_secret: $transaction.secret(),
            p_consumer: $consumer_id,
            $($parameter: $value,)+
        })
    };
}

/// Writes the emitted messages of the transaction that have no row yet, before its completion. The
/// handler of a later message can then cancel them, and a savepoint that is set after this undoes
/// such a cancel. All of them are written, so that their positions stay in the order of the emits.
pub(crate) async fn write_outgoing(
    transaction: &Transaction<'_>,
    consumer_id: i32,
    emitted: &Emitted,
) -> Result<(), InboxError> {
    hooks::point("outgoing:insert:before");
    let emitted = emitted.unwritten();
    let query = with_outgoing!(emitted, write_call, transaction, consumer_id);
    transaction.rows(query).await?;
    Ok(())
}

/// The outbox of runs that may not emit.
static CLOSED: LazyLock<Outbox> = LazyLock::new(Outbox::closed);

/// Returns what a handler may do with its consumer's outgoing messages, in a transaction.
pub(crate) fn outbox(
    sessions: &Arc<Sessions>,
    consumer_id: i32,
    transaction: &Transaction<'_>,
    handler: &dyn Handler,
) -> Outbox {
    if !handler.may_emit() {
        return CLOSED.clone();
    }
    Outbox {
        mode: OutboxMode::Open,
        may_emit: true,
        allowed: sessions.scheduler().destinations_allowed(sessions.tenant_id),
        canceller: Arc::new(Canceller {
            consumer_id,
            secret: transaction.secret().to_vec(),
            sessions: sessions.clone(),
        }),
    }
}

/// Cancels outgoing messages of one consumer, in the transaction of the run that asks for it.
struct Canceller {
    consumer_id: i32,
    /// Secret with which that transaction began.
    secret: Vec<u8>,
    sessions: Arc<Sessions>,
}

impl Canceller {
    /// Cancels in the transaction of the run.
    async fn cancel_inside(&self, tx: &Tx, token: &str) -> Result<bool, sqlx::Error> {
        let query = host_call!("cancel_outgoing" {
            p_secret: self.secret.as_slice(),
            p_consumer: self.consumer_id,
            p_token: token,
        });
        let mut statement = tx.statement().await;
        let row = bounded(query.fetch_one(statement.connection())).await;
        statement.finish(row.as_ref().err());
        row?.try_get(0)
    }

    /// Cancels in a transaction of its own: a defect, for the tests to notice.
    async fn cancel_outside(&self, token: &str) -> Result<bool, sqlx::Error> {
        let begun = self.sessions.begin().await;
        let transaction = begun.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
        let is_cancelled = self.cancel_inside(transaction.tx(), token).await?;
        let committed = transaction.commit().await;
        committed.map_err(|error| sqlx::Error::Protocol(format!("{error:?}")))?;
        Ok(is_cancelled)
    }
}

impl CancelOutgoing for Canceller {
    fn cancel<'a>(
        &'a self,
        tx: &'a Tx,
        token: &'a str,
    ) -> BoxFuture<'a, Result<bool, sqlx::Error>> {
        Box::pin(async move {
            let is_cancelled = match hooks::sabotage(Defect::OutgoingCancelOutside) {
                true => self.cancel_outside(token).await?,
                false => self.cancel_inside(tx, token).await?,
            };
            hooks::point("outgoing:cancel:after");
            Ok(is_cancelled)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncebox_model::{PayloadKey, outgoing::Destination, record::Record};

    use super::*;

    fn message(due: Due, topic: &str, payload: usize) -> OutgoingMessage {
        OutgoingMessage {
            ordinal: 0,
            id: "id".to_owned(),
            destination: Destination::Kafka { topic: topic.to_owned() },
            event_type: "type".to_owned(),
            content_type: None,
            key: None,
            headers: Vec::new(),
            payload: Some(vec![0; payload]),
            due,
            cancel_token: None,
        }
    }

    fn cause() -> Message {
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 1,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: None,
        };
        Message { id: "m".to_owned(), ..Message::undecodable(&record, &PayloadKey::new(&[0; 32])) }
    }

    // What could go wrong: the relay is woken for what is not due, or never for what is; or a time
    // that PostgreSQL cannot hold fails the message.
    #[test]
    fn a_row_has_the_times_of_its_message() {
        let mut emitted = Emitted::default();
        let dues = [
            (Due::Now, (None, None)),
            (Due::After(Duration::from_secs(5)), (Some(5_000), None)),
            (Due::After(Duration::MAX), (Some(i64::MAX), None)),
            (Due::At(i64::MIN), (None, Some(0))),
            (Due::At(7), (None, Some(7))),
        ];
        let outgoing = (0..).zip(dues).map(|(n, (due, _))| message(due, &format!("t{n}"), 1));
        emitted.add(&cause(), outgoing.collect(), |_| None);
        for (row, (_, expected)) in emitted.unwritten().iter().zip(dues) {
            assert_eq!((row.after_ms(), row.at_ms()), expected);
            assert_eq!((row.cause.as_str(), row.correlation_id.as_str()), ("m", "m"));
        }
        assert_eq!(emitted.due_destinations(), BTreeSet::from(["kafka:t0".to_owned()]));
    }

    // What could go wrong: a message is written twice, or a later message of the batch cannot
    // cancel what an earlier one emitted.
    #[test]
    fn what_may_be_cancelled_is_written_once() {
        let mut emitted = Emitted::default();
        emitted.add(&cause(), vec![message(Due::Now, "a", 1)], |_| None);
        assert!(!emitted.is_cancellable());
        let named =
            OutgoingMessage { cancel_token: Some("token".to_owned()), ..message(Due::Now, "b", 1) };
        emitted.add(&cause(), vec![named], |_| None);
        assert!(emitted.is_cancellable() && emitted.unwritten().len() == 2);
        emitted.wrote();
        assert!(!emitted.is_cancellable() && emitted.unwritten().is_empty());
        emitted.add(&cause(), vec![message(Due::Now, "c", 1)], |_| None);
        let topics: Vec<_> =
            emitted.unwritten().iter().map(|row| row.message.destination.to_string()).collect();
        assert_eq!(topics, ["kafka:c"]);
        assert_eq!(emitted.due_destinations().len(), 3, "the relay is told of all");
    }

    // What could go wrong: the messages of a large batch together are more than one statement may
    // hold.
    #[test]
    fn a_transaction_is_full_by_bytes() {
        let mut emitted = Emitted::default();
        emitted.add(&cause(), vec![message(Due::Now, "t", (16 << 20) - 1_000)], |_| None);
        assert!(!emitted.is_full());
        emitted.add(&cause(), vec![message(Due::Now, "t", 2_000)], |_| None);
        assert!(emitted.is_full());
    }
}
