//! A tenant's credentials: the passwords of its logins and the secret of its sessions. They are
//! random, and stored sealed under the master key. An older tenant has credentials derived from the
//! master key, until its first rotation.

use hmac::{Hmac, KeyInit, Mac};
use oncebox_model::{error::InboxError, payload_key::PayloadKey};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::tenants::{
    Tenant,
    keys::{Login, MasterKey, secret_hash},
};

/// Purpose under which `oncebox.tenant.credentials` is sealed, for the tenant's login.
pub(crate) const CREDENTIALS: &str = "credentials";

/// A tenant's secrets. Never shown, never logged.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Password of the login that handlers run as.
    pub guest_password: String,
    /// Password of the login that owns the tenant's schema.
    pub owner_password: String,
    /// Secret that the host binds to every host function it calls in a tenant's session.
    #[serde(with = "hex::serde")]
    pub secret: [u8; 32],
    /// Key of the random streams that the tenant's guests get, and of values derived from it. It is
    /// not rotated: a message that runs again gets an equal stream, and a payload that comes again
    /// an equal hash.
    #[serde(with = "hex::serde")]
    pub random_key: [u8; 32],
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(…)")
    }
}

impl Credentials {
    /// Generates random credentials, which tell nothing about any others.
    pub(crate) fn generate() -> Self {
        let password = || hex::encode(rand::random::<[u8; 32]>());
        Self {
            guest_password: password(),
            owner_password: password(),
            secret: rand::random(),
            random_key: rand::random(),
        }
    }

    /// Returns new passwords and a new secret, with the random key unchanged.
    pub(crate) fn rotated(&self) -> Self {
        Self { random_key: self.random_key, ..Self::generate() }
    }

    /// Returns the key of the hashes of the tenant's payloads. A rotation keeps it.
    pub fn payload_key(&self) -> PayloadKey {
        PayloadKey::new(&self.derive("payload hash"))
    }

    /// Returns the hash of a value under a key of the tenant for this purpose. A rotation keeps it.
    pub(crate) fn keyed_hash(&self, purpose: &str, value: &[u8]) -> [u8; 32] {
        PayloadKey::new(&self.derive(purpose)).hash(value)
    }

    /// Derives 32 bytes for a purpose from what no rotation changes.
    fn derive(&self, purpose: &str) -> [u8; 32] {
        let mac = Hmac::<Sha256>::new_from_slice(&self.random_key);
        let mac = mac.expect("HMAC takes a key of any length");
        mac.chain_update(purpose).finalize().into_bytes().into()
    }

    /// Seals the credentials under a master key, for the database.
    pub(crate) fn sealed(&self, key: &MasterKey, login: &str) -> Vec<u8> {
        let text = serde_json::to_vec(self).expect("texts and numbers are JSON");
        key.seal(CREDENTIALS, login, &text)
    }

    fn unsealed(key: &MasterKey, login: &str, sealed: &[u8]) -> Result<Self, InboxError> {
        let text = key.unseal(CREDENTIALS, login, sealed)?;
        serde_json::from_slice(&text).map_err(|_| {
            InboxError::Sealed(format!(
                "the credentials of `{login}` are of a form that this version does not know"
            ))
        })
    }
}

impl MasterKey {
    /// Returns the secrets of a tenant: unsealed, or derived where the row has none.
    ///
    /// # Errors
    /// `Sealed` where the key does not open them.
    pub fn credentials(&self, tenant: &Tenant) -> Result<Credentials, InboxError> {
        match &tenant.credentials {
            Some(sealed) => Credentials::unsealed(self, &tenant.login, sealed),
            None => self.derived(tenant),
        }
    }

    /// Derives the secrets of a tenant without sealed credentials from the key and the logins'
    /// names. Uses that key under which the tenant was created.
    fn derived(&self, tenant: &Tenant) -> Result<Credentials, InboxError> {
        let Tenant { name, login, owner_login, .. } = tenant;
        let key = self.each().find(|key| secret_hash(&key.secret(login)) == tenant.secret_hash);
        let key = key.ok_or_else(|| {
            InboxError::Sealed(format!(
                "tenant `{name}` was made under another master key; check `keys.master_key_file`"
            ))
        })?;
        Ok(Credentials {
            guest_password: key.password(login, Login::Guest),
            owner_password: key.password(owner_login, Login::Owner),
            secret: key.secret(login),
            random_key: key.random_key(login),
        })
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest;

    use super::*;

    #[test]
    fn are_kept_and_found_again_and_rotation_keeps_the_streams_of_guests() {
        let key = MasterKey::parse(&MasterKey::generate()).expect("a key");
        let made = Credentials::generate();
        let kept = made.sealed(&key, "oncebox_1");
        assert!(Credentials::unsealed(&key, "oncebox_1", &kept).expect("they open") == made);
        assert!(Credentials::unsealed(&key, "oncebox_2", &kept).is_err(), "another tenant's");
        let rotated = made.rotated();
        assert_eq!(rotated.random_key, made.random_key);
        assert!(rotated.secret != made.secret && rotated.guest_password != made.guest_password);
        assert!(
            rotated.owner_password != made.owner_password
                && rotated.owner_password != rotated.guest_password
        );
        assert_eq!(format!("{made:?}"), "Credentials(…)");
    }

    // D18. What could go wrong: the hash of a guessable payload tells what it was, two tenants'
    // hashes tell that they got the same payload, or a redelivery after a rotation passes for
    // another payload.
    #[test]
    fn the_payload_key_is_the_tenants_own_and_outlasts_a_rotation() {
        let (made, others) = (Credentials::generate(), Credentials::generate());
        let hash = |credentials: &Credentials| credentials.payload_key().hash(b"yes");
        assert_ne!(hash(&made), hash(&others));
        assert_eq!(hash(&made), hash(&made.rotated()));
        assert_ne!(hash(&made).to_vec(), Sha256::digest(b"yes").to_vec());
        let under_other_keys =
            [made.random_key, made.secret].map(|key| PayloadKey::new(&key).hash(b"yes"));
        assert!(!under_other_keys.contains(&hash(&made)), "a key of another purpose");
    }
}
