//! The emits and cancels of one run, in their order, so that a savepoint can undo the latest.

use std::collections::HashMap;

use oncebox_model::{message::Message, outgoing::OutgoingMessage, policy::Limits};

use crate::record::{CancelRecord, OutgoingRecord};

/// The emits and cancels of one run.
#[derive(Default)]
pub(crate) struct EmitLog {
    /// Messages of the run, which its emits are caused by.
    causes: Vec<EmitCause>,
    /// Emits that were not undone, in their order.
    emitted: Vec<EmittedMessage>,
    /// Cancels that were not undone, in their order.
    cancels: Vec<LoggedCancel>,
    /// Bytes of all emits, of those that were undone too.
    bytes: u64,
}

/// A message of the run.
struct EmitCause {
    message_id: String,
    /// Number of its emits, of those that were undone too.
    emits: u32,
}

/// An emit that was not undone.
struct EmittedMessage {
    /// Index of its cause.
    cause: usize,
    message: OutgoingMessage,
    /// Moment of the emit, by the session's counter.
    moment: u64,
    /// Moment of the cancel that withdrew it; none while it is to be sent.
    cancelled: Option<u64>,
}

/// A cancel that was not undone.
struct LoggedCancel {
    record: CancelRecord,
    moment: u64,
}

impl EmitLog {
    /// Makes the empty log of a run of these messages.
    pub(crate) fn of(messages: &[&Message]) -> Self {
        let cause = |message: &&Message| EmitCause { message_id: message.id.clone(), emits: 0 };
        Self { causes: messages.iter().map(cause).collect(), ..Self::default() }
    }

    /// Returns the index of the cause that a guest names, or of the only one.
    pub(super) fn cause(&self, named: Option<&str>) -> Result<usize, String> {
        match named {
            Some(id) => {
                self.causes.iter().position(|cause| cause.message_id == id).ok_or_else(|| {
                    "the cause is not a message of this call; give the id of the message that the \
                        outgoing one is for"
                        .to_owned()
                })
            }
            None if self.causes.len() == 1 => Ok(0),
            None => Err(format!(
                "this call has {} messages; give the id of the one that causes the outgoing \
                    message as `cause`",
                self.causes.len()
            )),
        }
    }

    /// Returns the id of the message of a cause.
    pub(super) fn cause_id(&self, cause: usize) -> &str {
        self.causes.get(cause).map_or("", |cause| &cause.message_id)
    }

    /// Counts an emit, and refuses it when a cap is reached. Returns its ordinal.
    pub(super) fn admit(
        &mut self,
        cause: usize,
        bytes: u64,
        limits: &Limits,
    ) -> Result<u32, String> {
        let Some(cause) = self.causes.get_mut(cause) else {
            return Err("there is no message that could cause another".to_owned());
        };
        if cause.emits >= limits.outgoing_max {
            return Err(reached("outgoing_max", u64::from(limits.outgoing_max)));
        }
        let total = self.bytes.saturating_add(bytes);
        if total > limits.outgoing_bytes_max {
            return Err(reached("outgoing_bytes_max", limits.outgoing_bytes_max));
        }
        self.bytes = total;
        let ordinal = cause.emits;
        cause.emits += 1;
        Ok(ordinal)
    }

    /// Keeps an emit that was admitted.
    pub(super) fn keep(&mut self, cause: usize, message: OutgoingMessage, moment: u64) {
        self.emitted.push(EmittedMessage { cause, message, moment, cancelled: None });
    }

    /// Withdraws the emits of this run that have a token. Returns whether there was any.
    pub(super) fn cancel(&mut self, token: &str, moment: u64) -> bool {
        let mut found = false;
        for emit in &mut self.emitted {
            let is_named = emit.message.cancel_token.as_deref() == Some(token);
            if is_named && emit.cancelled.is_none() {
                emit.cancelled = Some(moment);
                found = true;
            }
        }
        found
    }

    /// Adds a cancel to the record of the run.
    pub(super) fn cancelled(&mut self, token: &str, found: bool, moment: u64) {
        let record = CancelRecord { token: token.to_owned(), found };
        self.cancels.push(LoggedCancel { record, moment });
    }

    /// Undoes what came after a moment: the emits, and the cancels of earlier emits. PostgreSQL
    /// itself undoes the cancels in the database.
    pub(crate) fn undo_since(&mut self, moment: u64) {
        self.emitted.retain(|emit| emit.moment <= moment);
        for emit in &mut self.emitted {
            emit.cancelled.take_if(|cancelled| *cancelled > moment);
        }
        self.cancels.retain(|cancel| cancel.moment <= moment);
    }

    /// Takes the messages to be sent, by the index of their cause.
    pub(crate) fn take(&mut self) -> HashMap<usize, Vec<OutgoingMessage>> {
        let mut taken: HashMap<usize, Vec<OutgoingMessage>> = HashMap::new();
        for emit in std::mem::take(&mut self.emitted) {
            if emit.cancelled.is_none() {
                taken.entry(emit.cause).or_default().push(emit.message);
            }
        }
        taken
    }

    /// Returns the records of the messages to be sent, in the order of their emits.
    pub(crate) fn records(&self) -> Vec<OutgoingRecord> {
        let sent = self.emitted.iter().filter(|emit| emit.cancelled.is_none());
        sent.map(|emit| OutgoingRecord::of(self.cause_id(emit.cause), &emit.message)).collect()
    }

    /// Returns the records of the cancels, in their order.
    pub(crate) fn cancel_records(&self) -> Vec<CancelRecord> {
        self.cancels.iter().map(|cancel| cancel.record.clone()).collect()
    }
}

/// Returns the text of a cap, by its name in the policy.
fn reached(name: &str, max: u64) -> String {
    format!("the limit of {max} (`{name}`) is reached")
}

#[cfg(test)]
mod tests {
    use oncebox_model::{
        outgoing::{Destination, Due},
        payload_key::PayloadKey,
        record::Record,
    };

    use super::*;

    fn log_of(ids: &[&str]) -> EmitLog {
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 0,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: None,
        };
        let key = PayloadKey::new(&[0; 32]);
        let named =
            |id: &&str| Message { id: (*id).to_owned(), ..Message::undecodable(&record, &key) };
        let messages: Vec<Message> = ids.iter().map(named).collect();
        EmitLog::of(&messages.iter().collect::<Vec<_>>())
    }

    /// Emits a message with a token, or none, at a moment.
    fn emit(log: &mut EmitLog, cause: usize, token: Option<&str>, moment: u64) {
        let ordinal = log.admit(cause, 10, &Limits::default()).expect("below the caps");
        let message = OutgoingMessage {
            ordinal,
            id: format!("{cause}-{ordinal}"),
            destination: Destination::Inbox { consumer: "a".to_owned() },
            event_type: "e".to_owned(),
            content_type: None,
            key: None,
            headers: Vec::new(),
            payload: None,
            due: Due::Now,
            cancel_token: token.map(str::to_owned),
        };
        log.keep(cause, message, moment);
    }

    /// Takes the ids of what is to be sent for a cause.
    fn taken(log: &mut EmitLog, cause: usize) -> Vec<String> {
        let messages = log.take().remove(&cause).unwrap_or_default();
        messages.into_iter().map(|message| message.id).collect()
    }

    // What could go wrong: an emit that was undone is sent, or the next one takes its ordinal and
    // so its id.
    #[test]
    fn a_rollback_undoes_what_came_after_and_ordinals_go_on() {
        let mut log = log_of(&["m"]);
        emit(&mut log, 0, None, 1);
        emit(&mut log, 0, None, 3);
        log.undo_since(2);
        emit(&mut log, 0, None, 4);
        assert_eq!(taken(&mut log, 0), ["0-0", "0-2"]);
    }

    // What could go wrong: a cancel that was undone keeps a message from being sent.
    #[test]
    fn a_cancel_is_undone_with_its_savepoint() {
        let mut log = log_of(&["m"]);
        emit(&mut log, 0, Some("a"), 1);
        assert!(!log.cancel("b", 2) && log.cancel("a", 3));
        log.cancelled("a", true, 3);
        assert!(!log.cancel("a", 4), "it is withdrawn already");
        log.undo_since(2);
        assert!(log.cancel_records().is_empty());
        assert_eq!(log.records().len(), 1);
        assert!(log.cancel("a", 5));
        log.undo_since(5);
        assert!(log.records().is_empty() && taken(&mut log, 0).is_empty());
    }

    #[test]
    fn emits_are_those_of_their_causes() {
        let mut log = log_of(&["m", "n"]);
        assert_eq!((log.cause(Some("n")), log.cause(Some("m"))), (Ok(1), Ok(0)));
        assert!(log.cause(Some("x")).is_err_and(|why| why.contains("not a message of this call")));
        assert!(log.cause(None).is_err_and(|why| why.contains("2 messages")));
        emit(&mut log, 1, None, 1);
        emit(&mut log, 0, None, 2);
        emit(&mut log, 1, None, 3);
        let mut sent = log.take();
        let ids = |messages: Option<Vec<OutgoingMessage>>| {
            messages.unwrap_or_default().into_iter().map(|it| it.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(sent.remove(&1)), ["1-0", "1-1"]);
        assert_eq!(ids(sent.remove(&0)), ["0-0"]);
        assert_eq!(log_of(&["m"]).cause(None), Ok(0));
    }

    #[test]
    fn every_cap_names_its_setting() {
        let limits = Limits { outgoing_max: 2, outgoing_bytes_max: 25, ..Limits::default() };
        let mut log = log_of(&["m", "n"]);
        assert_eq!(log.admit(0, 10, &limits), Ok(0));
        assert!(log.admit(0, 16, &limits).is_err_and(|why| why.contains("outgoing_bytes_max")));
        assert_eq!(log.admit(0, 10, &limits), Ok(1));
        assert!(log.admit(0, 1, &limits).is_err_and(|why| why.contains("outgoing_max")));
        assert_eq!(log.admit(1, 5, &limits), Ok(0));
        assert!(log.admit(1, 1, &limits).is_err_and(|why| why.contains("outgoing_bytes_max")));
    }
}
