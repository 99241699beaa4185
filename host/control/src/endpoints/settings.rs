//! The settings of an endpoint: as they are given, and as they are shown, without secrets.

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, outgoing::AnswerMode};

use crate::control::check_name;

/// Largest rate of an endpoint, requests a second.
const RATE_MAX: u32 = 10_000;
/// Most requests of a host to an endpoint at a time.
const REQUESTS_MAX: u32 = 100;
/// Most failures in a row before a breaker opens.
const FAILURES_MAX: u32 = 1_000;
/// Least and greatest first pause of a breaker, milliseconds.
const PAUSE_MS: std::ops::RangeInclusive<u32> = 100..=300_000;
/// Most bytes of an event type, and of the name of who accepts duplicates.
const NAME_BYTES_MAX: usize = 255;
/// Most bytes of the reason why duplicates are accepted.
const REASON_BYTES_MAX: usize = 1_000;

/// The decision on a request that is sent twice. At least once is all that HTTP gives, so that one
/// of them has to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DuplicateDecision {
    /// The receiver recognises a repeated request by its `Idempotency-Key`.
    ReceiverDeduplicates,
    /// Somebody accepts that the receiver may act twice.
    Accepted {
        /// Who accepts it.
        by: String,
        /// Why it does no harm.
        because: String,
    },
}

/// An endpoint as it is set, with its secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct NewEndpoint {
    /// Name, as destinations have it behind `http:`.
    pub name: String,
    /// URL. Its path may be a secret.
    pub url: String,
    /// Method: `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: String,
    /// Names and values of headers that each request has. The values may be secrets.
    pub headers: Vec<(String, String)>,
    /// Secret with which requests are signed; none to keep those that the endpoint has, and empty
    /// for requests without a signature.
    pub signing_secret: Option<String>,
    /// Longest time for DNS, connection and TLS, milliseconds.
    pub connect_timeout_ms: u32,
    /// Longest time for all of a request, milliseconds.
    pub timeout_ms: u32,
    /// Requests a second of one host; none for no bound.
    pub requests_per_second: Option<u32>,
    /// Requests of one host at a time.
    pub requests_max: u32,
    /// Failures in a row after which a host's circuit breaker opens.
    pub failures_max: u32,
    /// First pause of an open breaker, milliseconds.
    pub pause_ms: u32,
    /// What becomes of answers.
    pub answer: AnswerMode,
    /// Consumer that gets delivered answers; none for the one that emitted.
    pub answer_to: Option<String>,
    /// Event type of delivered answers; none for that of the message with `.answered` behind it.
    pub answer_event_type: Option<String>,
    /// What a request that is sent twice does.
    pub duplicates: DuplicateDecision,
}

impl NewEndpoint {
    /// Creates an endpoint for `POST` with the default settings, without headers.
    pub fn new(name: &str, url: &str, duplicates: DuplicateDecision) -> Self {
        Self {
            name: name.to_owned(),
            url: url.to_owned(),
            method: "POST".to_owned(),
            headers: Vec::new(),
            signing_secret: None,
            connect_timeout_ms: 5_000,
            timeout_ms: 15_000,
            requests_per_second: None,
            requests_max: 8,
            failures_max: 5,
            pause_ms: 5_000,
            answer: AnswerMode::None,
            answer_to: None,
            answer_event_type: None,
            duplicates,
        }
    }

    /// Refuses settings that are out of bounds. URL, headers, timeouts and secrets are checked by
    /// who sends.
    pub(super) fn check(&self) -> Result<(), InboxError> {
        check_name("endpoint", &self.name)?;
        for (what, value, least, most) in [
            ("requests_per_second", self.requests_per_second.unwrap_or(1), 1, RATE_MAX),
            ("requests_max", self.requests_max, 1, REQUESTS_MAX),
            ("failures_max", self.failures_max, 1, FAILURES_MAX),
            ("pause_ms", self.pause_ms, *PAUSE_MS.start(), *PAUSE_MS.end()),
        ] {
            if !(least..=most).contains(&value) {
                return Err(InboxError::Invalid(format!(
                    "`{what}` of the endpoint is {value}; it must be {least} to {most}"
                )));
            }
        }
        let goes = self.answer_to.is_some() || self.answer_event_type.is_some();
        if goes && self.answer != AnswerMode::Delivered {
            return Err(InboxError::Invalid(
                "`answer_to` and `answer_event_type` need `answer` to be `delivered`".to_owned(),
            ));
        }
        if let Some(consumer) = &self.answer_to {
            check_name("consumer", consumer)?;
        }
        if let Some(event_type) = &self.answer_event_type {
            check_text("answer_event_type", event_type, NAME_BYTES_MAX)?;
        }
        if let DuplicateDecision::Accepted { by, because } = &self.duplicates {
            check_text("duplicates_accepted_by", by, NAME_BYTES_MAX)?;
            check_text("duplicates_because", because, REASON_BYTES_MAX)?;
        }
        Ok(())
    }
}

fn check_text(what: &str, text: &str, bytes_max: usize) -> Result<(), InboxError> {
    let fits = (1..=bytes_max).contains(&text.len()) && !text.chars().any(char::is_control);
    if fits && !text.trim().is_empty() {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`{what}` of the endpoint must have 1 to {bytes_max} bytes, without control characters"
    )))
}

/// The URL, the values of headers and the signing secret are secrets.
impl std::fmt::Debug for NewEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewEndpoint")
            .field("name", &self.name)
            .field("method", &self.method)
            .field("answer", &self.answer)
            .field("duplicates", &self.duplicates)
            .finish_non_exhaustive()
    }
}

/// An endpoint without its secrets.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct TenantEndpoint {
    /// Name, as destinations have it behind `http:`.
    pub name: String,
    /// Number of the latest change, from 1.
    pub revision: i64,
    /// Scheme, host and port of its URL.
    pub origin: String,
    /// Method.
    pub method: String,
    /// Names of the headers that each request has.
    pub header_names: Vec<String>,
    /// Number of signing secrets: 0 for requests without a signature, 2 during a rotation.
    pub signing_secrets: i32,
    /// Longest time for DNS, connection and TLS, milliseconds.
    pub connect_timeout_ms: i32,
    /// Longest time for all of a request, milliseconds.
    pub timeout_ms: i32,
    /// Requests a second of one host; none for no bound.
    pub requests_per_second: Option<i32>,
    /// Requests of one host at a time.
    pub requests_max: i32,
    /// Failures in a row after which a host's circuit breaker opens.
    pub failures_max: i32,
    /// First pause of an open breaker, milliseconds.
    pub pause_ms: i32,
    /// What becomes of answers: `none`, `stored` or `delivered`.
    pub answer: String,
    /// Consumer that gets delivered answers; none for the one that emitted.
    pub answer_to: Option<String>,
    /// Event type of delivered answers.
    pub answer_event_type: Option<String>,
    /// Whether the receiver recognises a repeated request by its key.
    pub receiver_deduplicates: bool,
    /// Who accepts that the receiver may act twice.
    pub duplicates_accepted_by: Option<String>,
    /// Why that does no harm.
    pub duplicates_because: Option<String>,
    /// Time of the last change.
    pub set_at: DateTime<Utc>,
    /// Author of the last change.
    pub set_by: String,
}

/// Columns of a [`TenantEndpoint`], of the table `e`.
pub(super) const SHOWN: &str = "e.name, e.revision, e.origin, e.method, e.header_names, \
    e.signing_secrets, e.connect_timeout_ms, e.timeout_ms, e.requests_per_second, e.requests_max, \
    e.failures_max, e.pause_ms, e.answer, e.answer_to, e.answer_event_type, \
    e.receiver_deduplicates, e.duplicates_accepted_by, e.duplicates_because, e.set_at, e.set_by";

impl TenantEndpoint {
    /// Names the settings in which this endpoint differs from another state of it, apart from its
    /// secrets.
    pub(super) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let checks = [
            ("method", self.method == other.method),
            ("connect_timeout_ms", self.connect_timeout_ms == other.connect_timeout_ms),
            ("timeout_ms", self.timeout_ms == other.timeout_ms),
            ("requests_per_second", self.requests_per_second == other.requests_per_second),
            ("requests_max", self.requests_max == other.requests_max),
            ("failures_max", self.failures_max == other.failures_max),
            ("pause_ms", self.pause_ms == other.pause_ms),
            ("answer", self.answer == other.answer),
            ("answer_to", self.answer_to == other.answer_to),
            ("answer_event_type", self.answer_event_type == other.answer_event_type),
            ("receiver_deduplicates", self.receiver_deduplicates == other.receiver_deduplicates),
            ("duplicates_accepted_by", self.duplicates_accepted_by == other.duplicates_accepted_by),
            ("duplicates_because", self.duplicates_because == other.duplicates_because),
        ];
        checks.into_iter().filter(|(_, is_same)| !is_same).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(change: impl FnOnce(&mut NewEndpoint)) -> String {
        let decision = DuplicateDecision::ReceiverDeduplicates;
        let mut new = NewEndpoint::new("pay", "https://pay.example", decision);
        change(&mut new);
        new.check().err().map(|error| error.to_string()).unwrap_or_default()
    }

    // What could go wrong: an endpoint is stored that no host can send to, or duplicates are
    // accepted by nobody and for no reason.
    #[test]
    fn settings_out_of_bounds_are_refused_by_their_names() {
        assert_eq!(fault(|_| {}), "");
        let accepted = |by: &str, because: &str| DuplicateDecision::Accepted {
            by: by.to_owned(),
            because: because.to_owned(),
        };
        assert_eq!(fault(|it| it.duplicates = accepted("ops", "a mail twice is harmless")), "");
        assert!(
            fault(|it| it.duplicates = accepted(" ", "x")).contains("`duplicates_accepted_by`")
        );
        assert!(fault(|it| it.duplicates = accepted("ops", "")).contains("`duplicates_because`"));
        assert!(fault(|it| it.name = "Pay".to_owned()).contains("the name of an endpoint"));
        assert!(fault(|it| it.requests_per_second = Some(0)).contains("`requests_per_second`"));
        assert!(fault(|it| it.requests_max = 101).contains("`requests_max`"));
        assert!(fault(|it| it.failures_max = 0).contains("`failures_max`"));
        assert!(fault(|it| it.pause_ms = 99).contains("`pause_ms`"));
        assert!(fault(|it| it.answer_to = Some("c".to_owned())).contains("to be `delivered`"));
        let delivered = |it: &mut NewEndpoint, event_type: &str| {
            it.answer = AnswerMode::Delivered;
            it.answer_event_type = Some(event_type.to_owned());
        };
        assert_eq!(fault(|it| delivered(it, "paid")), "");
        assert!(fault(|it| delivered(it, "a\nb")).contains("`answer_event_type`"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let decision = DuplicateDecision::ReceiverDeduplicates;
        let mut new = NewEndpoint::new("pay", "https://pay.example/s3cr3t", decision);
        new.headers = vec![("authorization".to_owned(), "s3cr3t".to_owned())];
        new.signing_secret = Some("whsec_s3cr3t".to_owned());
        assert!(!format!("{new:?}").contains("s3cr3t"));
    }
}
