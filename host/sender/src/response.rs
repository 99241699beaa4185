//! What comes back.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, RETRY_AFTER};

/// Longest time that an answer's `retry-after` can ask for.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Most bytes of a content type; a longer one is dropped.
const CONTENT_TYPE_BYTES_MAX: usize = 255;

/// How the body of an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyEnd {
    /// It is whole.
    Whole,
    /// It was longer than the endpoint's bound, and is cut there.
    Cut,
    /// The total timeout ended it.
    Late,
    /// The connection broke.
    Broken,
}

/// The answer of an endpoint. It may repeat what the request held, secrets included, so that
/// `Debug` shows neither body nor content type.
#[derive(Clone, PartialEq, Eq)]
pub struct Response {
    /// Status code, from 100.
    pub status: u16,
    /// Content type, of at most 255 bytes of ASCII; none where the answer has none.
    pub content_type: Option<String>,
    /// Body up to the endpoint's bound.
    pub body: Vec<u8>,
    /// How the body ended. Only a whole one may be taken for the answer.
    pub body_end: BodyEnd,
    /// Time after which the endpoint wants to be asked again, at most [`RETRY_AFTER_MAX`].
    pub retry_after: Option<Duration>,
}

impl Response {
    /// Creates an answer without its body.
    pub(crate) fn of_head(status: u16, headers: &HeaderMap, now: SystemTime) -> Self {
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let content_type = text(CONTENT_TYPE).filter(|it| it.len() <= CONTENT_TYPE_BYTES_MAX);
        Self {
            status,
            content_type: content_type.map(ToOwned::to_owned),
            body: Vec::new(),
            body_end: BodyEnd::Whole,
            retry_after: text(RETRY_AFTER).and_then(|value| retry_after(value, now)),
        }
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response")
            .field("status", &self.status)
            .field("body_bytes", &self.body.len())
            .field("body_end", &self.body_end)
            .field("retry_after", &self.retry_after)
            .finish_non_exhaustive()
    }
}

/// Reads the value of `retry-after`: whole seconds, or a date of HTTP, of which the time from `now`
/// is returned (RFC 9110, section 10.2.3). A date in the past is no wait, a longer wait than
/// [`RETRY_AFTER_MAX`] is that one, and any other text is none.
pub fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim_ascii();
    let after = if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // Digits that are no u64 are more seconds than it holds.
        Duration::from_secs(value.parse().unwrap_or(u64::MAX))
    } else {
        let date = httpdate::parse_http_date(value).ok()?;
        date.duration_since(now).unwrap_or(Duration::ZERO)
    };
    Some(after.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use hyper::header::HeaderValue;

    use super::*;

    // What could go wrong: a destination stops its messages for a century, or a form of the date is
    // taken for no wait at all.
    #[test]
    fn a_wait_has_two_forms_and_a_bound() {
        // Sun, 06 Nov 1994 08:49:37 GMT
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (value, expected) in [
            ("0", seconds(0)),
            ("120", seconds(120)),
            (" 7 ", seconds(7)),
            ("86401", Some(RETRY_AFTER_MAX)),
            ("99999999999999999999999999", Some(RETRY_AFTER_MAX)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", seconds(60)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", seconds(60)),
            ("Sun Nov  6 08:50:37 1994", seconds(60)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", seconds(0)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", seconds(0)),
            ("Fri, 31 Dec 9999 23:59:59 GMT", Some(RETRY_AFTER_MAX)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("1 s", None),
            ("soon", None),
            ("Sun, 06 Nov 1994", None),
            ("Mon, 06 Nov 1994 08:50:37 GMT", None),
        ] {
            assert_eq!(retry_after(value, now), expected, "{value}");
        }
    }

    #[test]
    fn an_answer_shows_nothing_that_it_may_repeat() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/s3cr3t"));
        headers.insert(RETRY_AFTER, HeaderValue::from_static("3"));
        let mut response = Response::of_head(503, &headers, SystemTime::now());
        response.body = b"s3cr3t".to_vec();
        assert_eq!(response.content_type.as_deref(), Some("text/s3cr3t"));
        assert_eq!(response.retry_after, Some(Duration::from_secs(3)));
        let shown = format!("{response:?}");
        assert!(shown.contains("503") && !shown.contains("s3cr3t"), "{shown}");
        let long = HeaderValue::from_str(&"x".repeat(256)).unwrap();
        headers.insert(CONTENT_TYPE, long);
        assert_eq!(Response::of_head(200, &headers, SystemTime::now()).content_type, None);
    }
}
