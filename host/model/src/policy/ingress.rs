//! Messages that come over HTTP instead of Kafka.

use std::ops::RangeInclusive;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::{Collision, IdSource, IdentityPolicy, Policy, TypeSource};

/// Name that rows of messages over HTTP have in place of a topic. No topic that a tenant may read
/// has it by default.
pub const INGRESS_TOPIC: &str = "oncebox-ingress";
/// Header in which a message over HTTP has the policy's own event type. No request sets it.
pub const INGRESS_TYPE_HEADER: &str = "oncebox-event-type";

/// Beginning of a secret of Standard Webhooks.
pub const SYMMETRIC_PREFIX: &str = "whsec_";
/// Beginning of a public key of Standard Webhooks.
pub const PUBLIC_PREFIX: &str = "whpk_";
/// Most characters of a secret.
const SECRET_BYTES_MAX: usize = 512;

/// A text that is no secret of a scheme. It is not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SecretFault(&'static str);

/// The rules for messages over HTTP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IngressPolicy {
    /// How a request proves that it comes from a sender that knows the consumer's secret.
    pub verify: Verification,
    /// Event type of a request in which no source of the policy and none of the scheme yields one;
    /// none to refuse it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// Bytes of a request's body. Over it, the request is refused.
    #[serde(default = "IngressPolicy::body_bytes_max")]
    pub body_bytes_max: usize,
    /// Verified requests a second on one host. Over it, they are refused with the time to wait.
    #[serde(default = "IngressPolicy::requests_per_second")]
    pub requests_per_second: u32,
}

/// The scheme by which requests are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verification {
    /// Standard Webhooks 1.0: HMAC-SHA-256 with a secret `whsec_…`, or Ed25519 with a public key
    /// `whpk_…`, over id, time and body.
    StandardWebhooks,
    /// GitHub: HMAC-SHA-256 over the body.
    Github,
    /// Shopify: HMAC-SHA-256 over the body.
    Shopify,
    /// Stripe: HMAC-SHA-256 over time and body.
    Stripe,
    /// Slack: HMAC-SHA-256 over time and body.
    Slack,
    /// The secret itself, as a bearer token.
    Bearer,
}

impl Verification {
    /// Every scheme.
    pub const ALL: [Self; 6] = [
        Self::StandardWebhooks,
        Self::Github,
        Self::Shopify,
        Self::Stripe,
        Self::Slack,
        Self::Bearer,
    ];

    /// Returns the name in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::StandardWebhooks => "standard_webhooks",
            Self::Github => "github",
            Self::Shopify => "shopify",
            Self::Stripe => "stripe",
            Self::Slack => "slack",
            Self::Bearer => "bearer",
        }
    }

    /// Checks that a text can be a secret of the scheme.
    ///
    /// # Errors
    ///
    /// A [`SecretFault`] with what the scheme's secrets are. It does not repeat the text.
    pub fn check_secret(self, text: &str) -> Result<(), SecretFault> {
        let is_base64_of = |text: &str, bytes: RangeInclusive<usize>| {
            STANDARD.decode(text).is_ok_and(|key| bytes.contains(&key.len()))
        };
        let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        let is_plain =
            text.trim() == text && text.chars().all(|c| c == ' ' || c.is_ascii_graphic());
        let (is_secret, fault) = match self {
            Self::StandardWebhooks => (
                match (text.strip_prefix(SYMMETRIC_PREFIX), text.strip_prefix(PUBLIC_PREFIX)) {
                    (Some(key), _) => is_base64_of(key, 24..=64),
                    (_, Some(key)) => is_base64_of(key, 32..=32),
                    _ => false,
                },
                SecretFault(
                    "a secret of `standard_webhooks` is `whsec_` and 24 to 64 bytes in base64, or \
                        `whpk_` and the 32 bytes of an Ed25519 public key",
                ),
            ),
            Self::Bearer => (
                is_visible && (32..=SECRET_BYTES_MAX).contains(&text.len()),
                SecretFault("a secret of `bearer` is 32 to 512 visible ASCII characters"),
            ),
            Self::Github | Self::Shopify | Self::Stripe | Self::Slack => (
                is_plain && (16..=SECRET_BYTES_MAX).contains(&text.len()),
                SecretFault(
                    "a signing secret is 16 to 512 ASCII characters, with no space at either end",
                ),
            ),
        };
        if is_secret { Ok(()) } else { Err(fault) }
    }

    /// Returns whether senders sign the id of an event with its body. Then nothing in the headers of
    /// a CloudEvent counts, which nobody signs.
    pub fn signs_id(self) -> bool {
        match self {
            Self::StandardWebhooks | Self::Stripe | Self::Slack => true,
            Self::Github | Self::Shopify | Self::Bearer => false,
        }
    }

    /// Returns the scheme's own place of the id of an event, which its sender repeats when it sends
    /// the event again.
    pub fn id(self) -> IdSource {
        let header = |name: &str| IdSource::Header(name.to_owned());
        match self {
            Self::StandardWebhooks => header("webhook-id"),
            Self::Github => header("x-github-delivery"),
            Self::Shopify => header("x-shopify-webhook-id"),
            Self::Stripe => IdSource::JsonPointer("/id".to_owned()),
            Self::Slack => IdSource::JsonPointer("/event_id".to_owned()),
            Self::Bearer => header("idempotency-key"),
        }
    }

    /// Returns the scheme's own place of the event type; none where the scheme has none.
    pub fn event_type(self) -> Option<TypeSource> {
        let header = |name: &str| TypeSource::Header(name.to_owned());
        match self {
            Self::StandardWebhooks | Self::Stripe => {
                Some(TypeSource::JsonPointer("/type".to_owned()))
            }
            Self::Github => Some(header("x-github-event")),
            Self::Shopify => Some(header("x-shopify-topic")),
            Self::Slack => Some(TypeSource::JsonPointer("/event/type".to_owned())),
            Self::Bearer => None,
        }
    }
}

impl IngressPolicy {
    fn body_bytes_max() -> usize {
        1 << 20
    }

    fn requests_per_second() -> u32 {
        100
    }

    /// Returns the sources of a request's identity: those of the policy that a request can have,
    /// then the scheme's own. A position would make each request a message of its own, and there is
    /// no topic.
    pub fn identity(&self, of: &IdentityPolicy) -> IdentityPolicy {
        let ids = of.id.iter().filter(|source| **source != IdSource::Position).cloned();
        let types = of.event_type.iter().filter(|source| **source != TypeSource::Topic).cloned();
        let own =
            self.event_type.as_ref().map(|_| TypeSource::Header(INGRESS_TYPE_HEADER.to_owned()));
        IdentityPolicy {
            id: ids.chain([self.verify.id()]).collect(),
            event_type: types.chain(self.verify.event_type()).chain(own).collect(),
            ordering_key: of.ordering_key.clone(),
            scoped_by_event_type: of.scoped_by_event_type,
        }
    }

    /// Returns the numbers with the greatest value of each, by key.
    pub(super) fn ranges(&self) -> [(&'static str, u64, u64); 2] {
        [
            ("ingress.body_bytes_max", self.body_bytes_max as u64, 8 << 20),
            ("ingress.requests_per_second", self.requests_per_second.into(), 10_000),
        ]
    }

    /// Describes what comes over HTTP, as a sentence.
    pub(super) fn explain(&self, policy: &Policy) -> String {
        let identity = self.identity(&policy.identity);
        let ids: Vec<_> = identity.id.iter().map(IdSource::explain).collect();
        format!(
            "It takes messages over HTTP, too, of at most {} bytes and at most {} a second on one \
                host, from senders that its secret verifies as `{}` says. Their id is {}. A \
                request without an id is refused{}.",
            self.body_bytes_max,
            self.requests_per_second,
            self.verify.name(),
            ids.join(", else "),
            match policy.collision() {
                Collision::Park => ", and so is one under a known id with another body",
                Collision::Ignore => "",
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test")
    }

    // What could go wrong: a request gets its position as its id, so that each one is new; or a
    // source of the policy loses against the scheme's, so that one event by Kafka and by HTTP has
    // two ids.
    #[test]
    fn the_policys_sources_come_first_and_a_position_never() {
        let text = "[identity]\nid = ['position', {header = 'x-id'}]\nscoped_by_event_type = true\n\
            [ingress]\nverify = 'github'\nevent_type = 'push'";
        let policy = policy(text);
        let ingress = policy.ingress.as_ref().expect("a section `ingress`");
        let identity = ingress.identity(&policy.identity);
        let header = |name: &str| name.to_owned();
        assert_eq!(
            identity.id,
            [IdSource::Header(header("x-id")), IdSource::Header(header("x-github-delivery"))]
        );
        assert_eq!(
            identity.event_type,
            [
                TypeSource::Cloudevents,
                TypeSource::Header(header("x-github-event")),
                TypeSource::Header(header(INGRESS_TYPE_HEADER))
            ]
        );
        assert!(identity.scoped_by_event_type);
        let said = policy.explain().join("\n");
        assert!(said.contains("over HTTP") && said.contains("`x-github-delivery`"), "{said}");
    }

    // What could go wrong: a policy is taken that refuses every request, or that promises what it
    // cannot keep.
    #[test]
    fn what_cannot_work_is_named() {
        let problems = |before: &str, ingress: &str| {
            let text = format!(
                "topics = ['t']\nack = 'after_commit'\n{before}\n[ingress]\nverify = \
                    'bearer'\n{ingress}"
            );
            Policy::parse(&text).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(problems("", "").ok(), Some(()));
        for (before, ingress, says) in [
            ("dedup = 'off'", "", "`ingress` needs `dedup = \"inbox\"`"),
            ("wire_format = 'confluent'", "", "`ingress` needs `wire_format = \"plain\"`"),
            ("", "event_type = ''", "`ingress.event_type` is empty"),
            ("", "event_type = \"a\\u0000b\"", "`ingress.event_type` has a text of 3 bytes"),
            ("", "body_bytes_max = 0", "`ingress.body_bytes_max` is 0"),
            ("", "body_bytes_max = 8388609", "`ingress.body_bytes_max` is 8388609"),
            ("limits = { payload_bytes_max = 100 }", "", "is over `limits.payload_bytes_max`"),
            ("", "requests_per_second = 10001", "`ingress.requests_per_second` is 10001"),
            ("", "secret = 'x'", "unknown key `ingress.secret`"),
        ] {
            let said = problems(before, ingress).expect_err(says);
            assert!(said.contains(says), "`{before}` `{ingress}`: {said}");
        }
    }

    // What could go wrong: a secret that anyone guesses is taken, or one that no sender can have.
    #[test]
    fn secrets_are_those_of_the_scheme() {
        let standard = Verification::StandardWebhooks;
        let secret =
            |prefix: &str, bytes: usize| format!("{prefix}{}", STANDARD.encode(vec![7; bytes]));
        for good in [secret("whsec_", 24), secret("whsec_", 64), secret("whpk_", 32)] {
            assert_eq!(standard.check_secret(&good), Ok(()), "{good}");
        }
        let short = "x".repeat(23);
        for bad in
            ["", "whsec_", "whsec_!", &secret("whsec_", 23), &secret("whpk_", 31), &secret("", 32)]
        {
            let fault = standard.check_secret(bad).expect_err("no secret").to_string();
            assert!(bad.is_empty() || !fault.contains(bad) || bad == "whsec_", "{fault}");
        }
        for scheme in Verification::ALL.into_iter().filter(|scheme| *scheme != standard) {
            let least = if scheme == Verification::Bearer { 32 } else { 16 };
            for (text, is_good) in [
                ("x".repeat(least), true),
                ("x".repeat(512), true),
                ("x".repeat(least - 1), false),
                ("x".repeat(513), false),
                (format!("{short}\n{short}"), false),
                (format!("{short} {short}"), scheme != Verification::Bearer),
                (format!(" {short}{short}"), false),
                (format!("{short}é{short}"), false),
            ] {
                assert_eq!(scheme.check_secret(&text).is_ok(), is_good, "{} {text}", scheme.name());
            }
        }
    }

    #[test]
    fn schemes_have_the_names_of_the_policy() {
        for scheme in Verification::ALL {
            let text = format!("[ingress]\nverify = '{}'", scheme.name());
            assert_eq!(policy(&text).ingress.expect("a section `ingress`").verify, scheme);
        }
    }
}
