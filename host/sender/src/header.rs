//! Headers from outside: those of an endpoint, and those of a message.

use hyper::header::{HeaderName, HeaderValue};

use crate::text::shown;

/// Headers that the sender sets, and those that are about the connection.
const RESERVED: [&str; 18] = [
    "ce-id",
    "ce-source",
    "ce-specversion",
    "ce-type",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "http2-settings",
    "idempotency-key",
    "keep-alive",
    "te",
    "traceparent",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
];
/// Beginnings of the names of further ones.
const RESERVED_PREFIXES: [&str; 2] = ["proxy-", "webhook-"];

/// A header that cannot be sent. Its text shows no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("header `{name}` {why}")]
pub struct HeaderFault {
    /// Name of the header, cut and without control characters.
    pub name: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl HeaderFault {
    /// Creates the fault of a header.
    pub(crate) fn new(name: &str, why: &'static str) -> Self {
        Self { name: shown(name), why }
    }
}

/// Checks name and value of a header from outside.
///
/// # Errors
///
/// A [`HeaderFault`] where the name is none or reserved, or the value would end the header.
pub(crate) fn outside_header(
    name: &str,
    value: &[u8],
) -> Result<(HeaderName, HeaderValue), HeaderFault> {
    let known = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| HeaderFault::new(name, "has a name that HTTP does not allow"))?;
    if is_reserved(known.as_str()) {
        return Err(HeaderFault::new(name, "is one that the sender sets itself, or must not send"));
    }
    Ok((known, header_value(name, value)?))
}

/// Checks the value of a header.
///
/// # Errors
///
/// A [`HeaderFault`] where the value has a line break or another control character.
pub(crate) fn header_value(name: &str, value: &[u8]) -> Result<HeaderValue, HeaderFault> {
    HeaderValue::from_bytes(value).map_err(|_| {
        HeaderFault::new(name, "has a line break or another control character in its value")
    })
}

/// Returns whether a name, in lower case, is reserved. Gateways of old take an underscore for a
/// hyphen.
fn is_reserved(name: &str) -> bool {
    let name = name.replace('_', "-");
    RESERVED.contains(&name.as_str())
        || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(name: &str, value: &[u8]) -> String {
        outside_header(name, value).unwrap_err().to_string()
    }

    // What could go wrong: a handler adds a second request, another host or a body of another
    // length, or makes a signature of its own.
    #[test]
    fn a_header_of_the_sender_cannot_be_set() {
        for name in [
            "Host",
            "HOST",
            "Content-Length",
            "content_length",
            "Transfer-Encoding",
            "transfer_encoding",
            "Connection",
            "Keep-Alive",
            "TE",
            "Trailer",
            "Upgrade",
            "Expect",
            "Proxy-Authorization",
            "Proxy-Connection",
            "Idempotency-Key",
            "Webhook-Id",
            "webhook-signature",
            "webhook-timestamp",
            "webhook-anything",
            "webhook_signature",
            "Content-Type",
            "traceparent",
            "User-Agent",
            "ce-id",
            "ce_type",
        ] {
            assert!(fault(name, b"x").contains("is one that the sender sets"), "{name}");
        }
        for name in ["ce-time", "authorization", "x-host", "hosts", "x_y", "accept"] {
            assert!(outside_header(name, b"x").is_ok(), "{name}");
        }
    }

    #[test]
    fn a_name_or_a_value_stays_in_its_line() {
        for name in ["", "a b", "a:", "a\r\nhost", "a\n", "\u{e4}", "a\0", "(a)", ":authority"] {
            assert!(fault(name, b"x").contains("has a name that HTTP"), "{name:?}");
        }
        for value in [&b"a\r\nhost: b"[..], b"a\n b", b"a\rb", b"a\0b", b"\x7f", b"\x1b[0m"] {
            assert!(fault("x-note", value).contains("has a line break"), "{value:?}");
        }
        assert!(outside_header("x-note", "tab\tand ü".as_bytes()).is_ok());
        let hostile = fault("a\r\nset-cookie: secret", b"x");
        assert!(!hostile.contains('\n'), "{hostile}");
    }
}
