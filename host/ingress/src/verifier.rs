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

/// What the headers of a request offer as a proof, before its body is read.
pub(crate) enum Proof {
    /// A token that is known; the body needs no signature.
    Token,
    /// Signatures of the body, with what is signed before it.
    Signatures {
        head: String,
        /// By a secret that both sides know.
        shared: Vec<Vec<u8>>,
        /// By a key of which the host knows the public part.
        public: Vec<Vec<u8>>,
    },
}

impl Verifier {
    /// Reads the secrets of a scheme. Leaves out one that is no secret of it, as after a change of
    /// the scheme. None where none is left.
    pub(crate) fn new(scheme: Verification, secrets: &[String]) -> Option<Self> {
        let keys: Vec<_> = secrets.iter().filter_map(|secret| key(scheme, secret)).collect();
        (!keys.is_empty()).then_some(Self { scheme, keys })
    }

    /// Reads the proof that the headers of a request offer, and refuses a request without one, with
    /// a token that is not known, or with a time that is too far away. `now` is in seconds since
    /// the Unix epoch.
    pub(crate) fn proof(&self, headers: &HeaderMap, now: u64) -> Result<Proof, Unverified> {
        let proof = match self.scheme {
            Verification::StandardWebhooks => standard(headers, now),
            Verification::Github => single(headers, "x-hub-signature-256")
                .and_then(|text| text.strip_prefix("sha256="))
                .and_then(|text| shared(String::new(), hex::decode(text).ok()?)),
            Verification::Shopify => single(headers, "x-shopify-hmac-sha256")
                .and_then(|text| shared(String::new(), STANDARD.decode(text).ok()?)),
            Verification::Stripe => stripe(headers, now),
            Verification::Slack => slack(headers, now),
            Verification::Bearer => self.token(headers),
        };
        proof.ok_or(Unverified)
    }

    /// Verifies a body by the proof that the headers offered.
    pub(crate) fn verify(&self, proof: &Proof, body: &[u8]) -> Result<(), Unverified> {
        let is_verified = match proof {
            Proof::Token => true,
            Proof::Signatures { head, shared, public } => {
                self.is_by_secret(&[head.as_bytes(), body], shared)
                    || self.is_by_public_key(&[head.as_bytes(), body], public)
            }
        };
        if is_verified { Ok(()) } else { Err(Unverified) }
    }

    fn token(&self, headers: &HeaderMap) -> Option<Proof> {
        let (scheme, token) = single(headers, header::AUTHORIZATION.as_str())?.split_once(' ')?;
        let hash: [u8; 32] = Sha256::digest(token.trim()).into();
        let is_known = self.keys.iter().any(|key| match key {
            Key::Token(known) => openssl::memcmp::eq(known, &hash),
            _ => false,
        });
        (scheme.eq_ignore_ascii_case("bearer") && is_known).then_some(Proof::Token)
    }

    /// Returns whether one of the secrets made one of the signatures. The time of a comparison tells
    /// nothing of the secret.
    fn is_by_secret(&self, parts: &[&[u8]], signatures: &[Vec<u8>]) -> bool {
        !signatures.is_empty()
            && self.keys.iter().any(|key| match key {
                Key::Shared(key) => {
                    let mac = parts.iter().fold(key.clone(), |mac, part| mac.chain_update(part));
                    let mac = mac.finalize().into_bytes();
                    signatures.iter().any(|signature| {
                        signature.len() == mac.len() && openssl::memcmp::eq(signature, &mac)
                    })
                }
                _ => false,
            })
    }

    fn is_by_public_key(&self, parts: &[&[u8]], signatures: &[Vec<u8>]) -> bool {
        let keys = self.keys.iter().filter_map(|key| match key {
            Key::Public(key) => Some(key),
            _ => None,
        });
        let keys: Vec<_> = keys.collect();
        if keys.is_empty() || signatures.is_empty() {
            return false;
        }
        let signed = parts.concat();
        let is_by = |key: &PKey<Public>, signature: &[u8]| {
            sign::Verifier::new_without_digest(key)
                .and_then(|mut verifier| verifier.verify_oneshot(signature, &signed))
                .unwrap_or(false)
        };
        keys.iter().any(|key| signatures.iter().any(|signature| is_by(key, signature)))
    }
}

fn shared(head: String, signature: Vec<u8>) -> Option<Proof> {
    Some(Proof::Signatures { head, shared: vec![signature], public: Vec::new() })
}

fn standard(headers: &HeaderMap, now: u64) -> Option<Proof> {
    let id = single(headers, "webhook-id")?;
    let time = single(headers, "webhook-timestamp").filter(|time| is_recent(time, now))?;
    let (mut shared, mut public) = (Vec::new(), Vec::new());
    for one in single(headers, "webhook-signature")?.split(' ').take(SIGNATURES_MAX) {
        let Some((version, text)) = one.split_once(',') else { continue };
        let Ok(signature) = STANDARD.decode(text) else { continue };
        match version {
            "v1" => shared.push(signature),
            "v1a" => public.push(signature),
            _ => {}
        }
    }
    let is_signed = !(shared.is_empty() && public.is_empty());
    is_signed.then(|| Proof::Signatures { head: format!("{id}.{time}."), shared, public })
}

fn stripe(headers: &HeaderMap, now: u64) -> Option<Proof> {
    let members = single(headers, "stripe-signature")?.split(',');
    let members: Vec<_> = members.filter_map(|member| member.trim().split_once('=')).collect();
    let all = |name: &'static str| {
        members.iter().filter(move |(of, _)| *of == name).map(|(_, value)| *value)
    };
    let time = all("t").next().filter(|time| is_recent(time, now))?;
    let signatures = all("v1").take(SIGNATURES_MAX).filter_map(|text| hex::decode(text).ok());
    let shared: Vec<_> = signatures.collect();
    (!shared.is_empty()).then(|| Proof::Signatures {
        head: format!("{time}."),
        shared,
        public: Vec::new(),
    })
}

fn slack(headers: &HeaderMap, now: u64) -> Option<Proof> {
    let time = single(headers, "x-slack-request-timestamp").filter(|time| is_recent(time, now))?;
    let signature = single(headers, "x-slack-signature")?.strip_prefix("v0=")?;
    shared(format!("v0:{time}:"), hex::decode(signature).ok()?)
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

/// Returns whether a text is a time in seconds that is near enough to now.
fn is_recent(text: &str, now: u64) -> bool {
    let is_number = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    is_number && text.parse::<u64>().is_ok_and(|time| time.abs_diff(now) <= TOLERANCE_S)
}

#[cfg(test)]
mod tests;
