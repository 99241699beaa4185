//! Secrets in the database: sealed under the master key, with AES-256-GCM.
//!
//! A sealed text names the key it needs. A host with another key can therefore report that, instead
//! of failing with a tag that does not fit. Each purpose and subject has its own key. A text that
//! is sealed for one tenant or one column does not open as another's, and no nonce is used twice
//! with a key.

use oncebox_model::error::InboxError;
use openssl::symm::{Cipher, decrypt_aead, encrypt_aead};

use crate::tenants::keys::MasterKey;

/// First byte of sealed bytes. The layout is: this byte, the key's name, the nonce, the text, the
/// tag.
const FORMAT: u8 = 1;
const NAME: usize = 4;
const NONCE: usize = 12;
const TAG: usize = 16;
const HEAD: usize = 1 + NAME + NONCE;

impl MasterKey {
    /// Returns a name for the key, which tells nothing of the key itself.
    pub fn name(&self) -> String {
        hex::encode(self.short_name())
    }

    fn short_name(&self) -> [u8; NAME] {
        let [a, b, c, d, ..] = self.derive("name of the key", "");
        [a, b, c, d]
    }

    /// Seals bytes. They open only with an equal purpose and an equal subject.
    pub(crate) fn seal(&self, purpose: &str, subject: &str, bytes: &[u8]) -> Vec<u8> {
        let nonce: [u8; NONCE] = rand::random();
        let mut tag = [0; TAG];
        let mut sealed = [&[FORMAT][..], &self.short_name(), &nonce].concat();
        let key = self.derive(&format!("seal {purpose}"), subject);
        let text = encrypt_aead(
            Cipher::aes_256_gcm(),
            &key,
            Some(&nonce),
            &data(purpose, subject),
            bytes,
            &mut tag,
        );
        sealed.extend(
            text.expect("AES-256-GCM takes any bytes with a key and a nonce of these lengths"),
        );
        sealed.extend(tag);
        sealed
    }

    /// Opens sealed bytes, with this key or an earlier one.
    pub(crate) fn unseal(
        &self,
        purpose: &str,
        subject: &str,
        sealed: &[u8],
    ) -> Result<Vec<u8>, InboxError> {
        let damaged = || {
            InboxError::Sealed(format!(
                "the {purpose} of `{subject}` is damaged; restore the row from a backup"
            ))
        };
        if sealed.len() < HEAD + TAG || sealed[0] != FORMAT {
            return Err(damaged());
        }
        let key = self
            .each()
            .find(|key| key.has_sealed(sealed))
            .ok_or_else(|| self.foreign(purpose, subject, sealed))?;
        let (head, rest) = sealed.split_at(HEAD);
        let (text, tag) = rest.split_at(rest.len() - TAG);
        let (nonce, key) = (&head[1 + NAME..], key.derive(&format!("seal {purpose}"), subject));
        decrypt_aead(Cipher::aes_256_gcm(), &key, Some(nonce), &data(purpose, subject), text, tag)
            .map_err(|_| damaged())
    }

    /// Returns whether the bytes are sealed under this very key, and not under an earlier one.
    pub(crate) fn has_sealed(&self, sealed: &[u8]) -> bool {
        sealed.get(1..1 + NAME).is_some_and(|name| name == self.short_name())
    }

    fn foreign(&self, purpose: &str, subject: &str, sealed: &[u8]) -> InboxError {
        let here =
            self.each().map(|key| format!("`{}`", key.name())).collect::<Vec<_>>().join(" and ");
        InboxError::Sealed(format!(
            "the {purpose} of `{subject}` is sealed under the master key `{}`, and here is {here}; \
                check `keys.master_key_file`, and \
             set `keys.previous_master_key_file` while the key is changed",
            hex::encode(&sealed[1..1 + NAME])
        ))
    }
}

/// Returns the data that the tag authenticates besides the text.
fn data(purpose: &str, subject: &str) -> Vec<u8> {
    [purpose.as_bytes(), &[0], subject.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> MasterKey {
        MasterKey::parse(&MasterKey::generate()).expect("a key")
    }

    fn refused(key: &MasterKey, subject: &str, sealed: &[u8]) -> String {
        key.unseal("credentials", subject, sealed).expect_err("it must not open").to_string()
    }

    #[test]
    fn opens_with_its_key_its_purpose_and_its_subject_only() {
        let (old, new) = (key(), key());
        let sealed = old.seal("credentials", "a", b"secret");
        assert_eq!(old.unseal("credentials", "a", &sealed).expect("it opens"), b"secret");
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_ne!(sealed, old.seal("credentials", "a", b"secret"), "a nonce was used twice");
        assert!(refused(&old, "b", &sealed).contains("of `b` is damaged"), "another tenant's");
        assert!(old.unseal("database url", "a", &sealed).is_err(), "another column's");
        let said = refused(&new, "a", &sealed);
        assert!(said.contains(&old.name()) && said.contains(&new.name()), "{said}");
        let both = new.with_previous(&old);
        assert_eq!(both.unseal("credentials", "a", &sealed).expect("the key before"), b"secret");
    }

    #[test]
    fn what_was_tampered_with_is_refused() {
        let key = key();
        let sealed = key.seal("credentials", "a", b"secret");
        for place in 0..sealed.len() {
            let mut other = sealed.clone();
            other[place] ^= 1;
            refused(&key, "a", &other);
            refused(&key, "a", &sealed[..place]);
        }
    }
}
