//! The messages of a file that the handler causes by what it sends: the answers of endpoints, and
//! what it sends to an inbox for later.

use oncebox_runtime::{OutgoingRecord, RunRecord};

use crate::messages::FileMessage;

/// Behind the event type of an outgoing message, that of its answer.
const ANSWERED: &str = ".answered";

/// Kind of a message that another message of the file causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CausedKind {
    /// Answer of an endpoint.
    Reply,
    /// Message to an inbox, due later than its cause.
    Timer,
}

impl CausedKind {
    /// Returns the word for the kind, which begins the names of its windows.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Reply => "reply",
            Self::Timer => "timer",
        }
    }
}

/// Place of a message in the file, with that of its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CausedMessage {
    pub(super) message: usize,
    pub(super) cause: usize,
    pub(super) kind: CausedKind,
}

/// Finds the messages that earlier messages of the file cause. They are known by the event type and
/// the key of what the cause sends.
pub(super) fn find(messages: &[FileMessage], runs: &[RunRecord]) -> Vec<CausedMessage> {
    let place = |id: &str| messages.iter().position(|message| message.id == id);
    let sent: Vec<(usize, &OutgoingRecord)> = runs
        .iter()
        .flat_map(|run| &run.outgoing)
        .filter_map(|record| Some((place(&record.cause)?, record)))
        .collect();
    let caused = |(at, message): (usize, &FileMessage)| {
        let of_earlier = sent.iter().filter(|(cause, _)| *cause < at);
        of_earlier
            .filter_map(|(cause, record)| {
                let kind = kind_of(message, record)?;
                Some(CausedMessage { message: at, cause: *cause, kind })
            })
            .max_by_key(|caused| caused.cause)
    };
    messages.iter().enumerate().filter_map(caused).collect()
}

/// Returns what a message is to an outgoing message; none where they have nothing in common.
fn kind_of(message: &FileMessage, record: &OutgoingRecord) -> Option<CausedKind> {
    if message.key.is_none() || message.key != record.key {
        return None;
    }
    let answers = |event_type: &str| message.event_type.strip_suffix(ANSWERED) == Some(event_type);
    match record.destination.split_once(':')?.0 {
        "http" if answers(&record.event_type) => Some(CausedKind::Reply),
        "inbox" if record.due != "now" && message.event_type == record.event_type => {
            Some(CausedKind::Timer)
        }
        _ => None,
    }
}

/// Returns the cause of each message of the file.
pub(super) fn causes(messages: usize, caused: &[CausedMessage]) -> Vec<Option<usize>> {
    let mut causes = vec![None; messages];
    for caused in caused {
        causes[caused.message] = Some(caused.cause);
    }
    causes
}

/// Puts each message behind its cause and keeps the order otherwise.
pub(super) fn causes_first(mut order: Vec<usize>, causes: &[Option<usize>]) -> Vec<usize> {
    let mut is_placed = vec![false; causes.len()];
    let mut placed = Vec::with_capacity(order.len());
    while !order.is_empty() {
        let is_free = |message: &usize| causes[*message].is_none_or(|cause| is_placed[cause]);
        // A cause stands earlier in the file, so that one of the messages is always free.
        let at = order.iter().position(is_free).unwrap_or(0);
        let message = order.remove(at);
        is_placed[message] = true;
        placed.push(message);
    }
    placed
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;

    fn message(id: &str, event_type: &str, key: Option<&str>) -> FileMessage {
        FileMessage {
            id: id.to_owned(),
            event_type: event_type.to_owned(),
            payload: None,
            key: key.map(str::to_owned),
            source: None,
            content_type: None,
            timestamp_ms: None,
            headers: BTreeMap::new(),
        }
    }

    /// A run that sends to these destinations, each with an event type, a key and a due time.
    fn run(id: &str, sent: &[[&str; 4]]) -> RunRecord {
        let record =
            |(ordinal, [destination, event_type, key, due]): (u32, &[&str; 4])| OutgoingRecord {
                cause: id.to_owned(),
                ordinal,
                id: format!("{id}/{ordinal}"),
                destination: (*destination).to_owned(),
                event_type: (*event_type).to_owned(),
                content_type: None,
                key: Some((*key).to_owned()),
                headers: Vec::new(),
                payload: None,
                due: (*due).to_owned(),
                cancel_token: None,
            };
        RunRecord {
            message_id: id.to_owned(),
            attempt: 1,
            statements: Vec::new(),
            outgoing: (0..).zip(sent).map(record).collect(),
            cancels: Vec::new(),
            lines: Vec::new(),
            memory_bytes: 0,
            fuel: None,
            elapsed: Duration::ZERO,
        }
    }

    #[test]
    fn replies_and_timers_are_known_by_what_their_causes_send() {
        let sent = |id: &str, key: &'static str| {
            let pay = ["http:pay", "charge", key, "now"];
            let timer = ["inbox:orders", "late", key, "after 1000 ms"];
            let told = ["inbox:billing", "told", key, "now"];
            run(id, &[pay, timer, told])
        };
        let runs = [sent("m-1", "a"), sent("m-2", "b"), run("r-1", &[])];
        let messages = [
            message("early", "late", Some("a")),
            message("m-1", "placed", Some("a")),
            message("m-2", "placed", Some("b")),
            message("r-1", "charge.answered", Some("b")),
            message("r-2", "charge.answered", Some("c")),
            message("r-3", "charge.answered", None),
            message("t-1", "late", Some("a")),
            message("t-2", "told", Some("a")),
            message("t-3", "charge", Some("a")),
        ];
        let found = find(&messages, &runs);
        let reply = CausedMessage { message: 3, cause: 2, kind: CausedKind::Reply };
        let timer = CausedMessage { message: 6, cause: 1, kind: CausedKind::Timer };
        assert_eq!(found, [reply, timer]);
        let causes = causes(messages.len(), &found);
        assert_eq!((causes[3], causes[6], causes[7]), (Some(2), Some(1), None));
    }

    #[test]
    fn a_message_comes_behind_its_cause_and_keeps_its_place_otherwise() {
        let causes = [None, Some(0), Some(1), None];
        for (order, expected) in [
            (vec![0, 1, 2, 3], [0, 1, 2, 3]),
            (vec![2, 1, 0, 3], [0, 1, 2, 3]),
            (vec![3, 1, 0, 2], [3, 0, 1, 2]),
            (vec![2, 3, 0, 1], [3, 0, 1, 2]),
        ] {
            assert_eq!(causes_first(order.clone(), &causes), expected, "{order:?}");
        }
    }
}
