//! What is sent: a message, and the request that it becomes.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT,
};

use crate::{
    endpoint::Endpoint,
    header::{HeaderFault, header_value, outside_header},
};

/// Most headers of a message, and most bytes of their names and values together.
const HEADERS_MAX: usize = 100;
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Most bytes of an id.
const ID_BYTES_MAX: usize = 255;

/// An outgoing message, as a request shows it.
#[derive(Clone)]
pub struct Request {
    /// Id of the message, the same with each attempt: 1 to 255 visible characters of ASCII, and no
    /// full stop, which separates the parts of what is signed.
    pub id: String,
    /// Source of the message, for CloudEvents: the consumer that emitted it.
    pub source: String,
    /// Event type.
    pub event_type: String,
    /// Content type of the body; none for a body without one.
    pub content_type: Option<String>,
    /// Further headers: at most 100, of at most 64 KiB together.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Body; empty for a message without a payload.
    pub body: Bytes,
    /// Trace context of the message, as the header `traceparent` has it.
    pub trace_parent: Option<String>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The output shows nothing that the tenant's handler wrote into body or headers.
        f.debug_struct("Request")
            .field("id", &self.id)
            .field("event_type", &self.event_type)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// Creates the HTTP request of a message for an endpoint, signed at `now`.
///
/// # Errors
///
/// A [`HeaderFault`] where a part of the message cannot be sent.
pub(crate) fn to_http(
    endpoint: &Endpoint,
    request: &Request,
    now: SystemTime,
) -> Result<hyper::Request<Full<Bytes>>, HeaderFault> {
    let mut headers = fixed_headers(endpoint, request)?;
    if let Some(keys) = &endpoint.signing_keys {
        let timestamp = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let signature = keys.sign(&request.id, timestamp, &request.body);
        for (name, value) in [
            ("webhook-id", request.id.clone()),
            ("webhook-timestamp", timestamp.to_string()),
            ("webhook-signature", signature),
        ] {
            let value = header_value(name, value.as_bytes())?;
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    headers.extend(endpoint.headers.clone());
    append_message_headers(&mut headers, endpoint, request)?;
    let mut http = hyper::Request::new(Full::new(request.body.clone()));
    *http.method_mut() = endpoint.method.as_http();
    *http.uri_mut() = endpoint.target.path.clone();
    *http.headers_mut() = headers;
    Ok(http)
}

/// Returns the headers that the sender sets itself. The connection is used once.
fn fixed_headers(endpoint: &Endpoint, request: &Request) -> Result<HeaderMap, HeaderFault> {
    let mut headers = HeaderMap::new();
    headers.insert(HOST, endpoint.authority.clone());
    headers.insert(
        USER_AGENT,
        HeaderValue::from_static(concat!("oncebox/", env!("CARGO_PKG_VERSION"))),
    );
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    // The client leaves out the length of an empty body, and some servers refuse such a request.
    headers.insert(CONTENT_LENGTH, HeaderValue::from(request.body.len()));
    if !is_id(&request.id) {
        let why = "has an id that is not 1 to 255 visible characters of ASCII without `.`";
        return Err(HeaderFault::new("idempotency-key", why));
    }
    for (name, value) in [
        ("idempotency-key", request.id.clone()),
        ("ce-specversion", "1.0".to_owned()),
        ("ce-id", percent_encoded(&request.id)),
        ("ce-source", percent_encoded(&request.source)),
        ("ce-type", percent_encoded(&request.event_type)),
    ] {
        headers.insert(HeaderName::from_static(name), header_value(name, value.as_bytes())?);
    }
    let optional = [
        (CONTENT_TYPE, &request.content_type),
        (HeaderName::from_static("traceparent"), &request.trace_parent),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            let value = header_value(name.as_str(), value.as_bytes())?;
            headers.insert(name, value);
        }
    }
    Ok(headers)
}

/// Adds the headers of a message. One that the endpoint has is refused: a handler must not replace
/// or double the credentials of its tenant's endpoint.
fn append_message_headers(
    headers: &mut HeaderMap,
    endpoint: &Endpoint,
    request: &Request,
) -> Result<(), HeaderFault> {
    let bytes = |(name, value): &(String, Vec<u8>)| name.len() + value.len();
    let all: usize = request.headers.iter().map(bytes).sum();
    if let Some((name, _)) = request.headers.get(HEADERS_MAX) {
        return Err(HeaderFault::new(name, "is beyond the 100 that a message may have"));
    }
    if let Some((name, _)) = request.headers.last().filter(|_| all > HEADER_BYTES_MAX) {
        return Err(HeaderFault::new(name, "ends headers of more than 64 KiB"));
    }
    for (name, value) in &request.headers {
        let (known, value) = outside_header(name, value)?;
        if endpoint.headers.contains_key(&known) {
            return Err(HeaderFault::new(name, "is one that the endpoint sets"));
        }
        // The relay's attributes come before the handler's headers.
        if known.as_str().starts_with("ce-") && headers.contains_key(&known) {
            return Err(HeaderFault::new(name, "is an attribute that the message has already"));
        }
        headers.append(known, value);
    }
    Ok(())
}

fn is_id(id: &str) -> bool {
    let is_of_id = |byte: u8| byte.is_ascii_graphic() && byte != b'.';
    (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(is_of_id)
}

/// Encodes a text as the value of a header of CloudEvents: visible characters of ASCII as they are,
/// but for `"` and `%`, and all other bytes with a percent sign (HTTP protocol binding 1.0.2,
/// section 3.1.3.2).
pub fn percent_encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        byte if byte.is_ascii_graphic() && !b"\"%".contains(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tests::{endpoint_with, request};

    fn fault(request: &Request) -> String {
        let endpoint = endpoint_with("https://hooks.example/in?x=1", |settings| {
            settings.headers = vec![("Authorization".to_owned(), "Bearer s3cr3t".to_owned())];
        });
        to_http(&endpoint, request, SystemTime::now()).unwrap_err().to_string()
    }

    #[test]
    fn a_request_says_what_it_is() {
        let keys = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let endpoint = endpoint_with("https://hooks.example:8443/in?x=1", |settings| {
            settings.headers = vec![("Authorization".to_owned(), "Bearer s3cr3t".to_owned())];
            settings.signing_keys = Some(crate::SigningKeys::new(keys, None).unwrap());
        });
        let message = Request {
            id: "msg_p5jXN8AQM9LWM0D4loKWxJek".to_owned(),
            event_type: "order paid/ü%\r\n".to_owned(),
            headers: vec![("x-a".to_owned(), b"1".to_vec()), ("X-A".to_owned(), b"2".to_vec())],
            body: Bytes::from_static(br#"{"test": 2432232314}"#),
            ..request()
        };
        let now = UNIX_EPOCH + Duration::from_secs(1_614_265_330);
        let http = to_http(&endpoint, &message, now).unwrap();
        assert_eq!(
            (http.method().as_str(), http.uri().to_string()),
            ("POST", "/in?x=1".to_owned())
        );
        for (name, value) in [
            ("host", "hooks.example:8443"),
            ("connection", "close"),
            ("content-length", "20"),
            ("idempotency-key", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("ce-specversion", "1.0"),
            ("ce-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("ce-source", "oncebox:acme/orders"),
            ("ce-type", "order%20paid/%C3%BC%25%0D%0A"),
            ("content-type", "application/json"),
            ("traceparent", "00-ab-cd-01"),
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("webhook-timestamp", "1614265330"),
            ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
            ("authorization", "Bearer s3cr3t"),
        ] {
            let values: Vec<_> = http.headers().get_all(name).iter().collect();
            assert_eq!(values, [value], "{name}");
        }
        let values: Vec<_> = http.headers().get_all("x-a").iter().collect();
        assert_eq!(values, ["1", "2"]);
    }

    #[test]
    fn an_unsigned_request_has_no_header_of_signatures() {
        let body = Bytes::new();
        let bare = Request { content_type: None, trace_parent: None, body, ..request() };
        let endpoint = endpoint_with("https://hooks.example", |_| {});
        let http = to_http(&endpoint, &bare, SystemTime::now()).unwrap();
        assert_eq!(http.headers()["content-length"], "0", "an empty body has its length too");
        let names = http.headers().keys().map(HeaderName::as_str);
        let unwanted = ["content-type", "traceparent"];
        let wrong: Vec<_> =
            names.filter(|name| name.starts_with("webhook-") || unwanted.contains(name)).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    // What could go wrong: a handler's header takes the place of the endpoint's, or ends the head
    // of the request.
    #[test]
    fn a_message_cannot_change_the_request() {
        let with = |name: &str, value: &[u8]| {
            fault(&Request { headers: vec![(name.to_owned(), value.to_vec())], ..request() })
        };
        assert!(with("AUTHORIZATION", b"x").ends_with("is one that the endpoint sets"));
        assert!(with("Host", b"evil.test").contains("is one that the sender sets"));
        assert!(with("x-a", b"1\r\nhost: evil.test").contains("line break"));
        assert!(with("x-a: 1\r\nhost", b"evil.test").contains("name that HTTP does not allow"));
        let time = |value: &[u8]| ("ce-time".to_owned(), value.to_vec());
        let doubled = Request { headers: vec![time(b"1"), time(b"2")], ..request() };
        assert!(fault(&doubled).ends_with("is an attribute that the message has already"));
        let typed = Request { content_type: Some("a/b\r\nx: y".to_owned()), ..request() };
        assert!(fault(&typed).starts_with("header `content-type` has a line break"));
        let traced = Request { trace_parent: Some("00\n".to_owned()), ..request() };
        assert!(fault(&traced).starts_with("header `traceparent` has a line break"));
    }

    #[test]
    fn an_id_stays_in_its_header_and_its_signature() {
        for id in ["", "a b", "a.b", "a\r\nhost: x", "ä", &"x".repeat(256)] {
            let text = fault(&Request { id: id.to_owned(), ..request() });
            assert!(text.starts_with("header `idempotency-key` has an id"), "{text}");
        }
    }

    #[test]
    fn headers_have_bounds() {
        let headers = |number: usize, bytes: usize| {
            let header = ("x-a".to_owned(), vec![b'x'; bytes]);
            Request { headers: vec![header; number], ..request() }
        };
        assert!(fault(&headers(101, 1)).contains("beyond the 100"));
        assert!(fault(&headers(2, 40 << 10)).contains("more than 64 KiB"));
        let endpoint = endpoint_with("https://hooks.example", |_| {});
        assert!(to_http(&endpoint, &headers(100, 100), SystemTime::now()).is_ok());
    }
}
