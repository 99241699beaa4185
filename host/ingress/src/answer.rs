//! The answers, and the count of them.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use metrics::counter;
use serde_json::json;

/// Every outcome, as metrics name it.
const OUTCOMES: [&str; 15] = [
    "stored",
    "known",
    "challenge",
    "unverified",
    "too_large",
    "headers_too_large",
    "unfinished",
    "no_message",
    "collision",
    "rate_limited",
    "full",
    "busy",
    "closed",
    "unusable",
    "unavailable",
];

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The message is stored, and will run.
    Stored {
        /// Its id.
        id: String,
        /// Its status: `received`, or `waiting` behind another message of its key.
        status: String,
    },
    /// The inbox had a message under this id.
    Known {
        /// The id.
        id: String,
        /// Status of that message.
        status: String,
    },
    /// A question of the sender, which is no message.
    Challenge(String),
    /// The request is refused, and nothing is stored.
    Refused(Refusal),
}

/// Why a request is refused. Nothing is stored, as far as the host knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No such consumer, or a request that none of its secrets verifies. One answer for both.
    Unverified,
    /// Body above the policy's bound.
    TooLarge(usize),
    /// Headers above the host's bound.
    HeadersTooLarge,
    /// Body that did not come in time.
    Unfinished,
    /// A verified request that is no message, and why.
    NoMessage(String),
    /// Id under which the inbox has another payload.
    Collision(String),
    /// More requests a second than the policy takes.
    RateLimited {
        /// Seconds until there is room.
        seconds: u64,
    },
    /// The memory for bodies is full.
    Full,
    /// The host is at work on other messages of the tenant, or another transaction has this one.
    Busy,
    /// The consumer takes nothing now: its tenant is suspended, it is deleted, or its inbox is
    /// moved.
    Closed,
    /// The consumer's policy or secret cannot be used.
    Unusable,
    /// The database does not let the host store the message, or did not answer COMMIT.
    Unavailable,
}

impl Answer {
    /// Counts the answer and returns it.
    pub(crate) fn counted(self) -> Self {
        counter!("oncebox_ingress_requests_total", "outcome" => self.outcome()).increment(1);
        self
    }

    /// Begins the series of all outcomes, so that each is seen to rise from its first one.
    pub(crate) fn begin_counts() {
        for outcome in OUTCOMES {
            counter!("oncebox_ingress_requests_total", "outcome" => outcome).increment(0);
        }
    }

    fn outcome(&self) -> &'static str {
        match self {
            Self::Stored { .. } => "stored",
            Self::Known { .. } => "known",
            Self::Challenge(_) => "challenge",
            Self::Refused(refusal) => refusal.code(),
        }
    }
}

impl Refusal {
    fn code(&self) -> &'static str {
        match self {
            Self::Unverified => "unverified",
            Self::TooLarge(_) => "too_large",
            Self::HeadersTooLarge => "headers_too_large",
            Self::Unfinished => "unfinished",
            Self::NoMessage(_) => "no_message",
            Self::Collision(_) => "collision",
            Self::RateLimited { .. } => "rate_limited",
            Self::Full => "full",
            Self::Busy => "busy",
            Self::Closed => "closed",
            Self::Unusable => "unusable",
            Self::Unavailable => "unavailable",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Unverified => StatusCode::UNAUTHORIZED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Unfinished => StatusCode::REQUEST_TIMEOUT,
            Self::NoMessage(_) | Self::Collision(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Full | Self::Busy | Self::Closed | Self::Unusable | Self::Unavailable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// Returns the seconds after which the sender may try again; none where that would not help.
    fn retry_after(&self) -> Option<u64> {
        match self {
            Self::RateLimited { seconds } => Some(*seconds),
            Self::Full | Self::Busy => Some(1),
            Self::Unavailable => Some(5),
            Self::Closed | Self::Unusable => Some(60),
            _ => None,
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::Unverified => "there is no such consumer, or its secret does not verify this \
                request"
                .to_owned(),
            Self::TooLarge(most) => format!("the body is over {most} bytes"),
            Self::HeadersTooLarge => "the headers are over 32768 bytes".to_owned(),
            Self::Unfinished => "the body was not whole in time".to_owned(),
            Self::NoMessage(why) => why.clone(),
            Self::Collision(id) => {
                format!("`{id}` is the id of another message, with another body")
            }
            Self::RateLimited { .. } => "more requests than the consumer takes".to_owned(),
            Self::Full => "the host has no room for the body now".to_owned(),
            Self::Busy => "the host is at work on other messages, or on this one".to_owned(),
            Self::Unusable => {
                "the policy or the secret of the consumer cannot be used; the host's log says so"
                    .to_owned()
            }
            Self::Closed => "the consumer takes no messages now".to_owned(),
            Self::Unavailable => "the host cannot store messages now; its log says why".to_owned(),
        }
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        match self {
            Self::Stored { id, status } => json_response(
                StatusCode::ACCEPTED,
                "application/json",
                &json!({ "id": id, "status": status }),
            ),
            Self::Known { id, status } => json_response(
                StatusCode::OK,
                "application/json",
                &json!({ "id": id, "status": status }),
            ),
            Self::Challenge(text) => (StatusCode::OK, text).into_response(),
            Self::Refused(refusal) => {
                let body = json!({
                    "type": format!("urn:oncebox:problem:{}", refusal.code()),
                    "title": refusal.code().replace('_', " "),
                    "status": refusal.status().as_u16(), "code": refusal.code(),
                    "detail": refusal.detail(),
                });
                let mut response =
                    json_response(refusal.status(), "application/problem+json", &body);
                if let Some(seconds) = refusal.retry_after() {
                    response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
                }
                response
            }
        }
    }
}

fn json_response(
    status: StatusCode,
    content_type: &'static str,
    body: &serde_json::Value,
) -> Response {
    let content_type = HeaderValue::from_static(content_type);
    (status, [(header::CONTENT_TYPE, content_type)], body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an outcome is added whose series begins with its first request, or one
    // that the documentation does not name.
    #[test]
    fn every_outcome_has_a_series_and_its_words() {
        const DOCS: &str = include_str!("../../../docs/ingress.md");
        let text = String::new;
        let refusals = [
            Refusal::Unverified,
            Refusal::TooLarge(1),
            Refusal::HeadersTooLarge,
            Refusal::Unfinished,
            Refusal::NoMessage(text()),
            Refusal::Collision(text()),
            Refusal::RateLimited { seconds: 1 },
            Refusal::Full,
            Refusal::Busy,
            Refusal::Closed,
            Refusal::Unusable,
            Refusal::Unavailable,
        ];
        for refusal in &refusals {
            let code = refusal.code();
            assert!(DOCS.contains(&format!("`{code}`")), "{code}");
            assert!(!refusal.detail().is_empty() || matches!(refusal, Refusal::NoMessage(_)));
        }
        let answers = [
            Answer::Stored { id: text(), status: text() },
            Answer::Known { id: text(), status: text() },
            Answer::Challenge(text()),
        ];
        let all = answers.into_iter().chain(refusals.map(Answer::Refused));
        assert_eq!(all.map(|answer| answer.outcome()).collect::<Vec<_>>(), OUTCOMES);
    }
}
