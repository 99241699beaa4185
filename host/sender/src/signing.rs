//! Signatures, as Standard Webhooks 1.0 defines them
//! (<https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>).

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Beginning of a secret's text.
const PREFIX: &str = "whsec_";
/// Bytes of a secret.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The secrets of an endpoint: one, or two while a new one replaces the old one. Each request is
/// signed with all of them, and a receiver takes it if one signature fits the secret that it knows.
#[derive(Clone)]
pub struct SigningKeys {
    keys: Vec<Hmac<Sha256>>,
}

/// A text that is no secret. It is not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a signing secret is `whsec_` and 24 to 64 bytes in base64")]
pub struct SigningKeyFault;

impl SigningKeys {
    /// Reads the present secret and, during a rotation, the one that it replaces. Each is `whsec_`
    /// and 24 to 64 bytes in base64.
    ///
    /// # Errors
    ///
    /// A [`SigningKeyFault`] where one of them is none.
    pub fn new(current: &str, previous: Option<&str>) -> Result<Self, SigningKeyFault> {
        let keys = std::iter::once(current).chain(previous).map(key);
        Ok(Self { keys: keys.collect::<Result<_, _>>()? })
    }

    /// Returns the value of `webhook-signature` for a message: `v1,` and the HMAC-SHA-256 of
    /// `id.timestamp.body` in base64, once for each secret, the present one first. `timestamp` is
    /// in seconds since the Unix epoch.
    pub(crate) fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let head = format!("{id}.{timestamp}.");
        let signature = |key: &Hmac<Sha256>| {
            let mac = key.clone().chain_update(&head).chain_update(body).finalize();
            format!("v1,{}", STANDARD.encode(mac.into_bytes()))
        };
        self.keys.iter().map(signature).collect::<Vec<_>>().join(" ")
    }
}

fn key(secret: &str) -> Result<Hmac<Sha256>, SigningKeyFault> {
    let bytes = secret.strip_prefix(PREFIX).and_then(|text| STANDARD.decode(text).ok());
    let bytes = bytes.filter(|bytes| SECRET_BYTES.contains(&bytes.len()));
    Ok(Hmac::new_from_slice(&bytes.ok_or(SigningKeyFault)?)
        .expect("HMAC takes a key of any length"))
}

impl fmt::Debug for SigningKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKeys").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const NEW: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const BY_OLD: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
    const BY_NEW: &str = "v1,O4Gjv1HqPqsMrjmczoggs/sWA8gZD0VyHG+fLh4+ktI=";

    fn signature(current: &str, previous: Option<&str>) -> String {
        let keys = SigningKeys::new(current, previous).unwrap();
        keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#)
    }

    // What could go wrong: receivers with the public libraries refuse every message. The first
    // vector is that of these libraries' tests.
    #[test]
    fn signatures_are_those_of_standard_webhooks() {
        assert_eq!(signature(OLD, None), BY_OLD);
        assert_eq!(signature(NEW, None), BY_NEW);
    }

    #[test]
    fn a_rotation_signs_with_both_secrets() {
        assert_eq!(signature(NEW, Some(OLD)), format!("{BY_NEW} {BY_OLD}"));
    }

    #[test]
    fn id_time_and_body_are_all_signed() {
        let keys = SigningKeys::new(NEW, None).unwrap();
        let all = [
            keys.sign("a", 1, b"x"),
            keys.sign("b", 1, b"x"),
            keys.sign("a", 2, b"x"),
            keys.sign("a", 1, b"y"),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn what_is_no_secret_is_refused_and_not_repeated() {
        let short = format!("whsec_{}", STANDARD.encode([7; 23]));
        let long = format!("whsec_{}", STANDARD.encode([7; 65]));
        let bare = OLD.trim_start_matches("whsec_");
        for text in ["", "whsec_", "whsec_!", bare, &short, &long, "WHSEC_MfKQ9r8GKYqr"] {
            for fault in [SigningKeys::new(text, None), SigningKeys::new(NEW, Some(text))] {
                assert_eq!(fault.unwrap_err(), SigningKeyFault, "{text}");
            }
        }
        let longest = format!("whsec_{}", STANDARD.encode([7; 64]));
        assert!(SigningKeys::new(&longest, None).is_ok());
        let shown = format!("{:?}", SigningKeys::new(NEW, Some(OLD)).unwrap());
        assert_eq!(shown, "SigningKeys { keys: 2, .. }");
    }
}
