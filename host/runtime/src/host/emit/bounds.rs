//! Bounds of what a guest may emit, checked before anything else is done with its values.

use std::time::{Duration, SystemTime};

use oncebox_model::outgoing::{Destination, DestinationFault, Due};

use crate::{
    bindings::emitter::oncebox::handler0_2_0::emit::{Due as GuestDue, Options, Outgoing},
    text::{bounded, printable},
};

/// Most bytes of a destination.
const DESTINATION_BYTES_MAX: usize = 300;
/// Most bytes of an event type, a content type, a header's name or a cancel token.
const NAME_BYTES_MAX: usize = 255;
/// Most headers of one message.
const HEADERS_MAX: usize = 50;
/// Most bytes of all headers of one message.
const HEADERS_BYTES_MAX: usize = 64 << 10;
/// Most bytes of a key.
const KEY_BYTES_MAX: usize = 1 << 10;
/// Longest time ahead of a message that waits.
const AHEAD_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Most bytes of a guest's text that a refusal quotes.
const QUOTED_BYTES: usize = 100;
/// Beginnings of headers' names that the host keeps for its own.
const HEADERS_RESERVED: [&str; 3] = ["ce_", "oncebox-", "traceparent"];

/// The parts of an emit within its bounds that the host reads.
#[derive(Debug)]
pub(super) struct Bounded {
    pub(super) destination: Destination,
    pub(super) due: Due,
    /// Bytes that the emit counts against `limits.outgoing_bytes_max`.
    pub(super) bytes: u64,
}

/// Checks everything of an emit that has a bound of its own.
///
/// # Errors
///
/// The reason for which it cannot be sent, for the handler's author.
pub(super) fn check(
    destination: &str,
    message: &Outgoing,
    options: &Options,
) -> Result<Bounded, String> {
    let parsed = parse(destination)?;
    check_name("the event type", &message.event_type)?;
    if let Some(content_type) = &message.content_type {
        check_length("the content type", content_type.len(), NAME_BYTES_MAX)?;
        check_characters("the content type", content_type)?;
    }
    check_headers(&message.headers)?;
    if let Some(key) = &options.key {
        check_length("the key", key.len(), KEY_BYTES_MAX)?;
    }
    if let Some(token) = &options.cancel_token {
        check_token(token)?;
    }
    let due = due(&options.due)?;
    Ok(Bounded { destination: parsed, due, bytes: size(destination, message, options) })
}

/// Checks a cancel token.
///
/// # Errors
///
/// The reason for which it is none.
pub(super) fn check_token(token: &str) -> Result<(), String> {
    check_name("the cancel token", token)
}

fn parse(destination: &str) -> Result<Destination, String> {
    check_length("the destination", destination.len(), DESTINATION_BYTES_MAX)?;
    destination.parse().map_err(|fault: DestinationFault| fault.to_string())
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
        true => Err(format!("{what} contains a control character: `{}`", quoted(text))),
        false => Ok(()),
    }
}

fn check_headers(headers: &[(String, Vec<u8>)]) -> Result<(), String> {
    if headers.len() > HEADERS_MAX {
        return Err(format!("there are {} headers, more than {HEADERS_MAX}", headers.len()));
    }
    for (name, _) in headers {
        check_name("a header's name", name)?;
        if let Some(reserved) = reserved(name) {
            return Err(format!(
                "the header `{}` is the host's: names do not begin with `{reserved}`",
                quoted(name)
            ));
        }
    }
    check_length("the list of headers", headers_size(headers), HEADERS_BYTES_MAX)
}

/// Returns the host's beginning of a header's name, which stands for any case of its letters.
fn reserved(name: &str) -> Option<&'static str> {
    HEADERS_RESERVED.into_iter().find(|reserved| {
        name.get(..reserved.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(reserved))
    })
}

/// Translates a due time. A time in the past is due now, in any century.
fn due(due: &GuestDue) -> Result<Due, String> {
    let too_far = || {
        Err(format!("the due time is more than {} days ahead", AHEAD_MAX.as_secs() / (24 * 3600)))
    };
    match *due {
        GuestDue::Now => Ok(Due::Now),
        GuestDue::After(ms) => match Duration::from_millis(ms) {
            after if after > AHEAD_MAX => too_far(),
            after => Ok(Due::After(after)),
        },
        GuestDue::At(ms) => match u64::try_from(ms).map(Duration::from_millis) {
            Err(_) => Ok(Due::At(0)),
            Ok(at) if at.saturating_sub(now()) > AHEAD_MAX => too_far(),
            Ok(_) => Ok(Due::At(ms)),
        },
    }
}

/// Returns the time since the Unix epoch by this host's clock, which is near enough to that of the
/// database for a bound of a year.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the bytes of everything that is kept of an emit.
fn size(destination: &str, message: &Outgoing, options: &Options) -> u64 {
    let optional = |bytes: Option<usize>| bytes.unwrap_or(0);
    let bytes = destination.len()
        + message.event_type.len()
        + optional(message.content_type.as_ref().map(String::len))
        + headers_size(&message.headers)
        + optional(message.payload.as_ref().map(Vec::len))
        + optional(options.key.as_ref().map(Vec::len))
        + optional(options.cancel_token.as_ref().map(String::len));
    bytes as u64
}

fn headers_size(headers: &[(String, Vec<u8>)]) -> usize {
    headers.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// Makes a guest's text fit for quotation.
fn quoted(text: &str) -> String {
    printable(&bounded(text, QUOTED_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: u64 = 24 * 3600 * 1000;

    fn message() -> Outgoing {
        Outgoing {
            event_type: "order.confirmed".to_owned(),
            content_type: Some("application/json".to_owned()),
            headers: vec![("region".to_owned(), b"north".to_vec())],
            payload: Some(b"{}".to_vec()),
        }
    }

    fn options() -> Options {
        Options { key: None, due: GuestDue::Now, cancel_token: None, cause: None }
    }

    /// Checks that an emit is refused, for a reason with this part.
    fn refused(destination: &str, message: &Outgoing, options: &Options, part: &str) {
        let reason = check(destination, message, options).expect_err(part);
        assert!(reason.contains(part) && !reason.contains('\n'), "`{reason}` lacks `{part}`");
    }

    #[test]
    fn what_fits_is_counted_with_all_its_parts() {
        let options = Options {
            key: Some(b"o-1".to_vec()),
            cancel_token: Some("reminder".to_owned()),
            ..options()
        };
        let bounded = check("kafka:orders", &message(), &options).expect("it fits");
        assert_eq!(bounded.destination, Destination::Kafka { topic: "orders".to_owned() });
        assert_eq!((bounded.due, bounded.bytes), (Due::Now, 12 + 15 + 16 + 6 + 5 + 2 + 3 + 8));
        let smallest = Outgoing {
            event_type: "e".to_owned(),
            content_type: None,
            headers: Vec::new(),
            payload: None,
        };
        assert_eq!(check("inbox:a", &smallest, &self::options()).expect("it fits").bytes, 8);
    }

    #[test]
    fn every_bound_is_named() {
        let long = "x".repeat(256);
        refused("orders", &message(), &options(), "`orders` is no destination");
        refused("kafka:", &message(), &options(), "names no topic");
        refused(&format!("kafka:{}", "x".repeat(300)), &message(), &options(), "306 bytes");
        for event_type in ["", "a\nb", &long] {
            let message = Outgoing { event_type: event_type.to_owned(), ..message() };
            refused("kafka:orders", &message, &options(), "the event type");
        }
        for content_type in ["a\0b", &long] {
            let message = Outgoing { content_type: Some(content_type.to_owned()), ..message() };
            refused("kafka:orders", &message, &options(), "the content type");
        }
        let key = Options { key: Some(vec![0; 1025]), ..options() };
        refused("kafka:orders", &message(), &key, "the key has 1025 bytes");
        for token in ["", "a\0b", &long] {
            let token = Options { cancel_token: Some(token.to_owned()), ..options() };
            refused("kafka:orders", &message(), &token, "the cancel token");
        }
    }

    #[test]
    fn headers_of_the_host_are_its_own() {
        let with = |name: &str, value: &[u8]| Outgoing {
            headers: vec![(name.to_owned(), value.to_vec())],
            ..message()
        };
        for name in ["ce_id", "CE_type", "Oncebox-attempt", "traceparent", "TraceParent"] {
            refused("kafka:orders", &with(name, b""), &options(), "is the host's");
        }
        refused("kafka:orders", &with("", b""), &options(), "a header's name is empty");
        refused("kafka:orders", &with("a\0", b""), &options(), "a header's name");
        refused("kafka:orders", &with("a", &[0; 64 << 10]), &options(), "65537 bytes");
        let many = Outgoing { headers: vec![("a".to_owned(), Vec::new()); 51], ..message() };
        refused("kafka:orders", &many, &options(), "51 headers, more than 50");
        for name in ["ce", "cé_", "once", "trace"] {
            check("kafka:orders", &with(name, b"1"), &options()).expect(name);
        }
    }

    #[test]
    fn a_year_is_the_longest_wait_and_the_past_is_now() {
        let due_of = |due: GuestDue| {
            check("kafka:orders", &message(), &Options { due, ..options() }).map(|it| it.due)
        };
        let year = Duration::from_millis(366 * DAY_MS);
        assert_eq!(due_of(GuestDue::After(366 * DAY_MS)), Ok(Due::After(year)));
        for too_far in [
            GuestDue::After(366 * DAY_MS + 1),
            GuestDue::After(u64::MAX),
            GuestDue::At(i64::MAX),
            GuestDue::At((now().as_millis() as u64 + 367 * DAY_MS) as i64),
        ] {
            let reason = due_of(too_far).expect_err("too far");
            assert!(reason.contains("366 days"), "{reason}");
        }
        assert_eq!(due_of(GuestDue::At(i64::MIN)), Ok(Due::At(0)));
        assert_eq!(due_of(GuestDue::At(1_700_000_000_000)), Ok(Due::At(1_700_000_000_000)));
    }
}
