//! Messages that handlers send in a test, by the host's bounds. Nothing leaves the process.

use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;

use super::Database;
use crate::{
    SqlError, derive_id,
    emit::{Due, EmitError, Outgoing},
};

const DESTINATION_BYTES_MAX: usize = 300;
const NAME_BYTES_MAX: usize = 255;
const HEADERS_MAX: usize = 50;
const HEADERS_BYTES_MAX: usize = 64 << 10;
const KEY_BYTES_MAX: usize = 1 << 10;
const AHEAD_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// What the names of the host's own headers begin with.
const HEADERS_RESERVED: [&str; 3] = ["ce_", "oncebox-", "traceparent"];
/// The policy's defaults of `limits.outgoing_max` and `limits.outgoing_bytes_max`.
const OUTGOING_MAX: u32 = 100;
const OUTGOING_BYTES_MAX: usize = 1 << 20;

/// A message that a handler sent, and that was committed.
#[derive(Debug, Clone, PartialEq)]
pub struct Sent {
    /// Its id: the same on every run, but not the one that the host derives.
    pub id: String,
    /// Id of the message that caused it.
    pub cause: String,
    /// Such as `kafka:orders`.
    pub destination: String,
    /// What happened.
    pub event_type: String,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// What its order goes by.
    pub key: Option<Vec<u8>>,
    /// The handler's headers.
    pub headers: Vec<(String, Vec<u8>)>,
    /// None is a tombstone.
    pub payload: Option<Vec<u8>>,
    /// When it is sent.
    pub due: Due,
    /// What it can be cancelled by.
    pub cancel_token: Option<String>,
}

impl Sent {
    /// The payload, read as JSON.
    #[track_caller]
    pub fn payload_as<T: DeserializeOwned>(&self) -> T {
        let payload = self.payload.as_deref().unwrap_or(b"null");
        serde_json::from_slice(payload)
            .unwrap_or_else(|error| panic!("the payload of `{}`: {error}", self.event_type))
    }
}

/// What handlers sent so far, and what the present run adds to it.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    /// Destinations that may be named.
    pub(super) allowed: Vec<String>,
    /// Committed, neither cancelled nor taken.
    pub(super) waiting: Vec<Sent>,
    /// The messages of the run, each with how many it caused, undone ones too.
    causes: Vec<(String, u32)>,
    emitted: Vec<Emitted>,
    cancels: Vec<(String, u64)>,
    bytes: usize,
}

/// An emit of the run, with the moments of it and of its cancel.
#[derive(Debug, Clone)]
struct Emitted {
    message: Sent,
    moment: u64,
    cancelled: Option<u64>,
}

impl Default for Outbox {
    fn default() -> Self {
        Self {
            allowed: ["kafka:*", "inbox:*", "http:*"].map(str::to_owned).to_vec(),
            waiting: Vec::new(),
            causes: Vec::new(),
            emitted: Vec::new(),
            cancels: Vec::new(),
            bytes: 0,
        }
    }
}

impl Outbox {
    /// Begins the run of these messages.
    pub(super) fn begin(&mut self, causes: Vec<String>) {
        self.causes = causes.into_iter().map(|cause| (cause, 0)).collect();
        self.emitted.clear();
        self.cancels.clear();
        self.bytes = 0;
    }

    /// Checks and keeps a message; answers its id.
    pub(super) fn emit(&mut self, outgoing: Outgoing, moment: u64) -> Result<String, SqlError> {
        let payload = check(&outgoing).map_err(SqlError::Refused)?;
        if !self.allows(&outgoing.destination) {
            return Err(SqlError::Refused(format!(
                "the destination `{}` is not allowed for this tenant",
                outgoing.destination
            )));
        }
        let at = self
            .cause(outgoing.cause.as_deref())
            .map_err(SqlError::Refused)?;
        let bytes = self.bytes + size(&outgoing, payload.as_deref());
        let (cause, count) = &mut self.causes[at];
        if *count >= OUTGOING_MAX {
            return Err(reached("outgoing_max", OUTGOING_MAX as usize));
        }
        if bytes > OUTGOING_BYTES_MAX {
            return Err(reached("outgoing_bytes_max", OUTGOING_BYTES_MAX));
        }
        self.bytes = bytes;
        let id = derive_id(cause, &format!("outgoing {count}"));
        *count += 1;
        let message = Sent {
            id: id.clone(),
            cause: cause.clone(),
            destination: outgoing.destination,
            event_type: outgoing.event_type,
            content_type: outgoing.content_type,
            key: outgoing.key,
            headers: outgoing.headers,
            payload,
            due: outgoing.due,
            cancel_token: outgoing.cancel_token,
        };
        self.emitted.push(Emitted {
            message,
            moment,
            cancelled: None,
        });
        Ok(id)
    }

    /// Withdraws what has this token, of this run and of those before it.
    pub(super) fn cancel(&mut self, token: &str, moment: u64) -> Result<bool, SqlError> {
        check_name("the cancel token", token).map_err(SqlError::Refused)?;
        let mut found = false;
        for emit in &mut self.emitted {
            if emit.message.cancel_token.as_deref() == Some(token) && emit.cancelled.is_none() {
                emit.cancelled = Some(moment);
                found = true;
            }
        }
        let is_cancelled = self.cancels.iter().any(|(cancelled, _)| cancelled == token);
        let is_named = |sent: &Sent| sent.cancel_token.as_deref() == Some(token);
        found |= !is_cancelled && self.waiting.iter().any(is_named);
        self.cancels.push((token.to_owned(), moment));
        Ok(found)
    }

    /// Undoes what came after a savepoint.
    pub(super) fn undo_since(&mut self, moment: u64) {
        self.emitted.retain(|emit| emit.moment <= moment);
        for emit in &mut self.emitted {
            emit.cancelled.take_if(|cancelled| *cancelled > moment);
        }
        self.cancels.retain(|(_, cancelled)| *cancelled <= moment);
    }

    /// Ends the run: what it did is kept, or as if it had not been.
    pub(super) fn end(&mut self, is_kept: bool) {
        let (emitted, cancels) = (
            std::mem::take(&mut self.emitted),
            std::mem::take(&mut self.cancels),
        );
        if !is_kept {
            return;
        }
        for (token, _) in cancels {
            self.waiting
                .retain(|sent| sent.cancel_token.as_deref() != Some(token.as_str()));
        }
        let kept = emitted.into_iter().filter(|emit| emit.cancelled.is_none());
        self.waiting.extend(kept.map(|emit| emit.message));
    }

    fn allows(&self, destination: &str) -> bool {
        self.allowed
            .iter()
            .any(|entry| match entry.strip_suffix('*') {
                Some(beginning) => destination.starts_with(beginning),
                None => entry == destination,
            })
    }

    fn cause(&self, named: Option<&str>) -> Result<usize, String> {
        match named {
            Some(id) => self
                .causes
                .iter()
                .position(|(cause, _)| cause == id)
                .ok_or_else(|| "the cause is not a message of this call".to_owned()),
            None if self.causes.len() == 1 => Ok(0),
            None => Err(format!(
                "this call has {} messages; name the one that causes the outgoing message with `caused_by`",
                self.causes.len()
            )),
        }
    }
}

impl Database {
    /// The messages that handlers sent in committed runs and did not cancel, in their order.
    pub fn sent(&self) -> &[Sent] {
        &self.outbox.waiting
    }

    /// Takes these messages, as the relay does when it sends them: a cancel finds them no more.
    pub fn take_sent(&mut self) -> Vec<Sent> {
        std::mem::take(&mut self.outbox.waiting)
    }

    /// The destinations that handlers may send to: whole ones, or beginnings followed by `*`. By
    /// default all.
    pub fn allow_destinations(&mut self, allowed: &[&str]) {
        self.outbox.allowed = allowed.iter().map(|entry| (*entry).to_owned()).collect();
    }
}

/// An error as a handler gets it. Nothing here is PostgreSQL's.
pub(super) fn to_handler(error: SqlError) -> EmitError {
    match error {
        SqlError::Refused(text) => EmitError::Refused(text),
        SqlError::Limit(text) => EmitError::Limit(text),
        other => EmitError::Database(other.to_string()),
    }
}

/// Checks everything that has a bound of its own; answers the payload.
fn check(outgoing: &Outgoing) -> Result<Option<Vec<u8>>, String> {
    let payload = outgoing.payload.clone()?;
    check_destination(&outgoing.destination)?;
    check_name("the event type", &outgoing.event_type)?;
    if let Some(content_type) = &outgoing.content_type {
        check_length("the content type", content_type.len(), NAME_BYTES_MAX)?;
        check_characters("the content type", content_type)?;
    }
    check_headers(&outgoing.headers)?;
    if let Some(key) = &outgoing.key {
        check_length("the key", key.len(), KEY_BYTES_MAX)?;
    }
    if let Some(token) = &outgoing.cancel_token {
        check_name("the cancel token", token)?;
    }
    let ahead = match outgoing.due {
        Due::Now => Duration::ZERO,
        Due::After(delay) => delay,
        Due::At(ms) => {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let at = Duration::from_millis(u64::try_from(ms).unwrap_or(0));
            at.saturating_sub(now.unwrap_or_default())
        }
    };
    match ahead <= AHEAD_MAX {
        true => Ok(payload),
        false => Err("the due time is more than 366 days ahead".to_owned()),
    }
}

fn check_destination(destination: &str) -> Result<(), String> {
    check_length("the destination", destination.len(), DESTINATION_BYTES_MAX)?;
    let is_sound = match destination.split_once(':') {
        Some(("kafka", topic)) => {
            let is_of_topic = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            (1..=249).contains(&topic.len())
                && topic.chars().all(is_of_topic)
                && ![".", ".."].contains(&topic)
        }
        Some(("inbox" | "http", name)) => {
            let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            name.len() <= 63
                && name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.chars().all(is_of_name)
        }
        _ => false,
    };
    match is_sound {
        true => Ok(()),
        false => Err(format!(
            "`{destination}` is no destination; there are `kafka:<topic>`, `inbox:<consumer>` and \
             `http:<endpoint>`"
        )),
    }
}

fn check_headers(headers: &[(String, Vec<u8>)]) -> Result<(), String> {
    if headers.len() > HEADERS_MAX {
        return Err(format!(
            "there are {} headers, more than {HEADERS_MAX}",
            headers.len()
        ));
    }
    for (name, _) in headers {
        check_name("a header's name", name)?;
        let is_reserved = |reserved: &&str| {
            name.get(..reserved.len())
                .is_some_and(|begin| begin.eq_ignore_ascii_case(reserved))
        };
        if let Some(reserved) = HEADERS_RESERVED.iter().find(|it| is_reserved(it)) {
            return Err(format!(
                "the header `{name}` is the host's: names do not begin with `{reserved}`"
            ));
        }
    }
    check_length(
        "the list of headers",
        headers_size(headers),
        HEADERS_BYTES_MAX,
    )
}

fn check_name(what: &str, text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err(format!("{what} is empty"));
    }
    check_length(what, text.len(), NAME_BYTES_MAX)?;
    check_characters(what, text)
}

fn check_length(what: &str, bytes: usize, max: usize) -> Result<(), String> {
    match bytes <= max {
        true => Ok(()),
        false => Err(format!("{what} has {bytes} bytes, more than {max}")),
    }
}

fn check_characters(what: &str, text: &str) -> Result<(), String> {
    match text.chars().any(char::is_control) {
        true => Err(format!("{what} contains a control character")),
        false => Ok(()),
    }
}

fn size(outgoing: &Outgoing, payload: Option<&[u8]>) -> usize {
    let optional = |bytes: Option<usize>| bytes.unwrap_or(0);
    outgoing.destination.len()
        + outgoing.event_type.len()
        + optional(outgoing.content_type.as_ref().map(String::len))
        + headers_size(&outgoing.headers)
        + optional(payload.map(<[u8]>::len))
        + optional(outgoing.key.as_ref().map(Vec::len))
        + optional(outgoing.cancel_token.as_ref().map(String::len))
}

fn headers_size(headers: &[(String, Vec<u8>)]) -> usize {
    headers
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum()
}

fn reached(name: &str, max: usize) -> SqlError {
    SqlError::Limit(format!("the limit of {max} (`{name}`) is reached"))
}
