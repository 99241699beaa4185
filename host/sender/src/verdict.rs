//! What a result means for the message.

use std::time::Duration;

use crate::{error::SendError, response::Response};

/// What the result of a request means for the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint has taken it (2xx), whatever became of the body of its answer.
    Delivered,
    /// The endpoint or a rule of the host refuses the message, and would again: 4xx but 408, 425
    /// and 429, a redirect, which is never followed, and every status that is none of HTTP's.
    Refused,
    /// The message may be sent again: 408, 425, 5xx, and errors of the network.
    Again {
        /// Time that the endpoint asks to wait; none where it does not say.
        after: Option<Duration>,
    },
    /// The endpoint asks for fewer requests, of all messages: 429, and 503 with `retry-after`.
    RateLimited {
        /// Time that the endpoint asks to wait; none where it does not say.
        after: Option<Duration>,
    },
}

impl Verdict {
    /// Returns the verdict on the result of a request.
    pub fn of(result: &Result<Response, SendError>) -> Self {
        match result {
            Ok(response) => Self::of_status(response.status, response.retry_after),
            Err(error) if error.is_refusal() => Self::Refused,
            Err(_) => Self::Again { after: None },
        }
    }

    /// Returns the verdict on a status, with the time that the answer asks to wait.
    pub fn of_status(status: u16, retry_after: Option<Duration>) -> Self {
        match status {
            200..=299 => Self::Delivered,
            429 => Self::RateLimited { after: retry_after },
            503 if retry_after.is_some() => Self::RateLimited { after: retry_after },
            408 | 425 | 500..=599 => Self::Again { after: retry_after },
            _ => Self::Refused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{address::AddressKind, error::SendStage, header::HeaderFault};

    // What could go wrong: a message that is refused for ever is sent for ever, or one that would
    // arrive in a minute is given up.
    #[test]
    fn every_status_has_a_verdict() {
        use Verdict::{Again, Delivered, RateLimited, Refused};
        let none = None;
        for status in 0..=u16::MAX {
            let expected = match status {
                200..=299 => Delivered,
                429 => RateLimited { after: none },
                408 | 425 | 500..600 => Again { after: none },
                _ => Refused,
            };
            assert_eq!(Verdict::of_status(status, none), expected, "{status}");
        }
        for status in [101, 301, 302, 303, 307, 308, 400, 401, 403, 404, 409, 410, 422, 451] {
            assert_eq!(Verdict::of_status(status, none), Refused, "{status}");
        }
    }

    #[test]
    fn a_wait_is_handed_on() {
        let after = Some(Duration::from_secs(7));
        assert_eq!(Verdict::of_status(429, after), Verdict::RateLimited { after });
        assert_eq!(Verdict::of_status(503, after), Verdict::RateLimited { after });
        assert_eq!(Verdict::of_status(500, after), Verdict::Again { after });
        assert_eq!(Verdict::of_status(425, after), Verdict::Again { after });
        assert_eq!(Verdict::of_status(404, after), Verdict::Refused);
        assert_eq!(Verdict::of_status(200, after), Verdict::Delivered);
    }

    #[test]
    fn a_rule_refuses_and_the_network_does_not() {
        let endpoint = || "hooks.example".to_owned();
        let again = Verdict::Again { after: None };
        for (error, expected) in [
            (SendError::PlainHttp { endpoint: endpoint() }, Verdict::Refused),
            (SendError::PeerDiffers { endpoint: endpoint() }, Verdict::Refused),
            (SendError::Header(HeaderFault::new("host", "is reserved")), Verdict::Refused),
            (
                SendError::AddressRefused {
                    endpoint: endpoint(),
                    address: "127.0.0.1".parse().unwrap(),
                    kind: AddressKind::Loopback,
                },
                Verdict::Refused,
            ),
            (SendError::Lookup { endpoint: endpoint(), why: String::new() }, again),
            (SendError::Tls { endpoint: endpoint(), why: String::new() }, again),
            (SendError::TimedOut { endpoint: endpoint(), stage: SendStage::Answer }, again),
            (SendError::Broken { endpoint: endpoint(), why: String::new() }, again),
        ] {
            assert_eq!(Verdict::of(&Err(error.clone())), expected, "{error:?}");
        }
    }
}
