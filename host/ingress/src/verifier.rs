//! The verification of a request: that its sender knows a secret of the consumer, and that its body
//! is what the sender signed.

use axum::http::{HeaderMap, header};
use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use oncebox_model::policy::{PUBLIC_PREFIX, SYMMETRIC_PREFIX, Verification};
use openssl::{
    pkey::{Id, PKey, Public},
    sign,
};
use sha2::{Digest, Sha256};

/// Seconds by which the time that a sender signed may differ from the host's.
const TOLERANCE_S: u64 = 300;
/// Signatures of one request that are looked at.
const SIGNATURES_MAX: usize = 4;

/// A request that is not verified. Why is nobody's business but the sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unverified;

/// The secrets of a consumer, ready to verify.
pub(crate) struct Verifier {
    scheme: Verification,
    keys: Vec<Key>,
}

enum Key {
    /// Secret that signs by HMAC-SHA-256.
    Shared(Hmac<Sha256>),
    /// Public key of Ed25519.
    Public(PKey<Public>),
    /// SHA-256 of a bearer token.
    Token([u8; 32]),
}

impl Verifier {
    /// Reads the secrets of a scheme. None where one of them is no secret of it, as after a change
    /// of the scheme.
    pub(crate) fn new(scheme: Verification, secrets: &[String]) -> Option<Self> {
        let keys: Option<Vec<_>> = secrets.iter().map(|secret| key(scheme, secret)).collect();
        keys.filter(|keys| !keys.is_empty()).map(|keys| Self { scheme, keys })
    }

    /// Verifies a request. `now` is in seconds since the Unix epoch.
    pub(crate) fn verify(
        &self,
        headers: &HeaderMap,
        body: &[u8],
        now: u64,
    ) -> Result<(), Unverified> {
        let is_verified = match self.scheme {
            Verification::StandardWebhooks => self.is_standard(headers, body, now),
            Verification::Github => self.is_github(headers, body),
            Verification::Shopify => self.is_shopify(headers, body),
            Verification::Stripe => self.is_stripe(headers, body, now),
            Verification::Slack => self.is_slack(headers, body, now),
            Verification::Bearer => self.is_bearer(headers),
        };
        if is_verified == Some(true) { Ok(()) } else { Err(Unverified) }
    }

    fn is_standard(&self, headers: &HeaderMap, body: &[u8], now: u64) -> Option<bool> {
        let id = single(headers, "webhook-id")?;
        let time = single(headers, "webhook-timestamp")?;
        let head = format!("{id}.{time}.");
        let parts = [head.as_bytes(), body];
        let found = single(headers, "webhook-signature")?.split(' ').take(SIGNATURES_MAX);
        let signatures = found.filter_map(|one| {
            let (version, signature) = one.split_once(',')?;
            Some((version, STANDARD.decode(signature).ok()?))
        });
        let is_signed = signatures.into_iter().any(|(version, signature)| match version {
            "v1" => self.is_by_secret(&parts, &signature),
            "v1a" => self.is_by_public_key(&parts, &signature),
            _ => false,
        });
        Some(is_recent(time, now)? && is_signed)
    }

    fn is_github(&self, headers: &HeaderMap, body: &[u8]) -> Option<bool> {
        let signature = single(headers, "x-hub-signature-256")?.strip_prefix("sha256=")?;
        Some(self.is_by_secret(&[body], &hex::decode(signature).ok()?))
    }

    fn is_shopify(&self, headers: &HeaderMap, body: &[u8]) -> Option<bool> {
        let signature = single(headers, "x-shopify-hmac-sha256")?;
        Some(self.is_by_secret(&[body], &STANDARD.decode(signature).ok()?))
    }

    fn is_stripe(&self, headers: &HeaderMap, body: &[u8], now: u64) -> Option<bool> {
        let members = single(headers, "stripe-signature")?.split(',');
        let members = members.filter_map(|member| member.trim().split_once('='));
        let members: Vec<_> = members.collect();
        let all = |name: &'static str| {
            members.iter().filter(move |(of, _)| *of == name).map(|(_, value)| *value)
        };
        let time = all("t").next()?;
        let head = format!("{time}.");
        let signatures = all("v1").take(SIGNATURES_MAX);
        let is_signed = signatures
            .filter_map(|text| hex::decode(text).ok())
            .any(|signature| self.is_by_secret(&[head.as_bytes(), body], &signature));
        Some(is_recent(time, now)? && is_signed)
    }

    fn is_slack(&self, headers: &HeaderMap, body: &[u8], now: u64) -> Option<bool> {
        let time = single(headers, "x-slack-request-timestamp")?;
        let signature = single(headers, "x-slack-signature")?.strip_prefix("v0=")?;
        let head = format!("v0:{time}:");
        let signature = hex::decode(signature).ok()?;
        let is_signed = self.is_by_secret(&[head.as_bytes(), body], &signature);
        Some(is_recent(time, now)? && is_signed)
    }

    fn is_bearer(&self, headers: &HeaderMap) -> Option<bool> {
        let (scheme, token) = single(headers, header::AUTHORIZATION.as_str())?.split_once(' ')?;
        let hash: [u8; 32] = Sha256::digest(token.trim()).into();
        let is_known = self.keys.iter().any(|key| match key {
            Key::Token(known) => openssl::memcmp::eq(known, &hash),
            _ => false,
        });
        Some(scheme.eq_ignore_ascii_case("bearer") && is_known)
    }

    /// Returns whether one of the secrets signed the parts, in a time that tells nothing of it.
    fn is_by_secret(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        self.keys.iter().any(|key| match key {
            Key::Shared(key) => {
                let mac = parts.iter().fold(key.clone(), |mac, part| mac.chain_update(part));
                mac.verify_slice(signature).is_ok()
            }
            _ => false,
        })
    }

    fn is_by_public_key(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        let signed = parts.concat();
        self.keys.iter().any(|key| match key {
            Key::Public(key) => sign::Verifier::new_without_digest(key)
                .and_then(|mut verifier| verifier.verify_oneshot(signature, &signed))
                .unwrap_or(false),
            _ => false,
        })
    }
}

fn key(scheme: Verification, secret: &str) -> Option<Key> {
    scheme.check_secret(secret).ok()?;
    let shared = |bytes: &[u8]| Hmac::new_from_slice(bytes).ok().map(Key::Shared);
    match scheme {
        Verification::Bearer => Some(Key::Token(Sha256::digest(secret).into())),
        Verification::StandardWebhooks => match secret.strip_prefix(PUBLIC_PREFIX) {
            Some(text) => {
                let bytes = STANDARD.decode(text).ok()?;
                PKey::public_key_from_raw_bytes(&bytes, Id::ED25519).ok().map(Key::Public)
            }
            None => shared(&STANDARD.decode(secret.strip_prefix(SYMMETRIC_PREFIX)?).ok()?),
        },
        _ => shared(secret.as_bytes()),
    }
}

/// Returns the value of a header that a request has exactly once: of two values a sender may mean
/// one, and the host another.
pub(crate) fn single<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() {
        return None;
    }
    value.to_str().ok()
}

/// Returns whether a time in seconds is near enough to now. None where the text is no time.
fn is_recent(text: &str, now: u64) -> Option<bool> {
    let is_number = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    let time: u64 = text.parse().ok().filter(|_| is_number)?;
    Some(time.abs_diff(now) <= TOLERANCE_S)
}

#[cfg(test)]
mod tests;
