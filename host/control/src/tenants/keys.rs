//! The installation's one master key, the values derived from it, and earlier keys during a change
//! of the key.

use hmac::{Hmac, KeyInit, Mac};
use oncebox_model::error::InboxError;
use sha2::{Digest, Sha256};

/// The installation's master key: 32 bytes from a file or the environment.
#[derive(Clone)]
pub struct MasterKey {
    bytes: [u8; 32],
    /// Earlier keys, for values that are still sealed under them.
    previous: Vec<[u8; 32]>,
}

impl std::fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MasterKey(…)")
    }
}

/// The two roles a tenant logs in with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Login {
    /// DML on the tenant's tables; its sessions run handlers.
    Guest,
    /// Owns the tenant's schema; its sessions apply the tenant's DDL.
    Owner,
}

impl MasterKey {
    /// Parses a key from 64 hexadecimal digits.
    ///
    /// # Errors
    /// `Invalid` where the text is not 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<Self, InboxError> {
        let mut key = [0; 32];
        hex::decode_to_slice(text.trim(), &mut key).map_err(|_| {
            InboxError::Invalid(
                "the master key must be 64 hexadecimal digits; make one with \
                `openssl rand -hex 32`"
                    .into(),
            )
        })?;
        Ok(Self::of(key))
    }

    fn of(bytes: [u8; 32]) -> Self {
        Self { bytes, previous: Vec::new() }
    }

    /// Adds another key and its earlier keys, for values that this key does not open.
    pub fn with_previous(mut self, previous: &Self) -> Self {
        self.previous.extend(previous.all());
        self
    }

    fn all(&self) -> impl Iterator<Item = [u8; 32]> {
        std::iter::once(self.bytes).chain(self.previous.iter().copied())
    }

    /// Returns this key alone, then each earlier key alone.
    pub(crate) fn each(&self) -> impl Iterator<Item = Self> {
        self.all().map(Self::of)
    }

    /// Generates a random key, as 64 hexadecimal digits.
    pub fn generate() -> String {
        hex::encode(rand::random::<[u8; 32]>())
    }

    /// Derives the password of a tenant's login role.
    pub fn password(&self, login: &str, role: Login) -> String {
        hex::encode(self.derive(
            match role {
                Login::Guest => "guest password",
                Login::Owner => "owner password",
            },
            login,
        ))
    }

    /// Derives the secret that the host binds to every host function it calls in a tenant's
    /// session.
    pub fn secret(&self, login: &str) -> [u8; 32] {
        self.derive("session secret", login)
    }

    /// Derives the key of the random streams that a tenant's guests get.
    pub fn random_key(&self, login: &str) -> [u8; 32] {
        self.derive("guest randomness", login)
    }

    /// Derives 32 bytes for a purpose and a subject. They tell nothing about those of any other.
    pub(crate) fn derive(&self, purpose: &str, subject: &str) -> [u8; 32] {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.bytes).expect("HMAC takes a key of any length");
        mac.update(purpose.as_bytes());
        mac.update(&[0]);
        mac.update(subject.as_bytes());
        mac.finalize().into_bytes().into()
    }
}

/// Returns the hash of a secret, which the tenant's row stores.
pub(crate) fn secret_hash(secret: &[u8; 32]) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}
