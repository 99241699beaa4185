//! The key under which a tenant's payloads are hashed.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Key of one tenant's payload hashes. Payloads are often guessable, and the plain hash of a
/// guessable payload tells what it was. Without the key, a hash tells nothing.
#[derive(Clone)]
pub struct PayloadKey(Hmac<Sha256>);

impl PayloadKey {
    /// Creates the key from its bytes.
    pub fn new(bytes: &[u8; 32]) -> Self {
        Self(Hmac::new_from_slice(bytes).expect("HMAC takes a key of any length"))
    }

    /// Computes the HMAC-SHA-256 of a payload, as the inbox row keeps it.
    pub fn hash(&self, payload: &[u8]) -> [u8; 32] {
        self.0.clone().chain_update(payload).finalize().into_bytes().into()
    }

    /// Computes the hash of a payload together with the reference in a header of its message, so
    /// that another reference is another payload. No text has the separator's byte.
    pub fn hash_with_reference(&self, payload: &[u8], reference: &[u8]) -> [u8; 32] {
        const SEPARATOR: [u8; 1] = [0xff];
        let hash = self.0.clone().chain_update(payload).chain_update(SEPARATOR);
        hash.chain_update(reference).finalize().into_bytes().into()
    }
}

impl std::fmt::Debug for PayloadKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PayloadKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest;

    use super::*;

    // D18. What could go wrong: the hash of a guessable payload tells what it was, or the key is
    // printed.
    #[test]
    fn a_hash_depends_on_the_key_and_is_not_the_plain_one() {
        let (one, other) = (PayloadKey::new(&[1; 32]), PayloadKey::new(&[2; 32]));
        let payload = b"{\"born\":\"1970-01-01\"}";
        assert_eq!(one.hash(payload), PayloadKey::new(&[1; 32]).hash(payload));
        assert_ne!(one.hash(payload), other.hash(payload));
        assert_ne!(one.hash(payload), one.hash(b""));
        assert_ne!(one.hash(payload), <[u8; 32]>::from(Sha256::digest(payload)));
        let by = |reference: &[u8]| one.hash_with_reference(payload, reference);
        assert!(by(b"s3://b/1") != by(b"s3://b/2") && by(b"") != one.hash(payload));
        assert_eq!(format!("{one:?}"), "PayloadKey(…)");
    }

    // RFC 4231, test case 2, with the key padded to 32 bytes as HMAC pads it.
    #[test]
    fn a_hash_is_hmac_sha_256() {
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let known = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let hash = PayloadKey::new(&key).hash(b"what do ya want for nothing?");
        let shown: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(shown, known);
    }
}
