//! The token of a plan: it names the consumer and the plan, and holds a secret that is shown once.

use oncebox_model::error::InboxError;
use sha2::{Digest, Sha256};

/// A token, `<tenant>/<consumer>/<number>-<secret>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReplayToken {
    pub(super) tenant: String,
    pub(super) consumer: String,
    pub(super) replay_id: i64,
    secret: String,
}

/// Generates the secret of a token: 32 hexadecimal digits.
pub(super) fn generate_secret() -> String {
    hex::encode(rand::random::<[u8; 16]>())
}

/// Returns the hash of a secret, which the plan's row keeps.
pub(super) fn hash_of(secret: &str) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}

impl ReplayToken {
    /// Creates the token of a plan.
    pub(super) fn new(tenant: &str, consumer: &str, replay_id: i64, secret: String) -> Self {
        Self { tenant: tenant.to_owned(), consumer: consumer.to_owned(), replay_id, secret }
    }

    /// Reads a token.
    ///
    /// # Errors
    /// `Invalid` where the text is none.
    pub(super) fn parse(text: &str) -> Result<Self, InboxError> {
        let parts: Vec<_> = text.trim().split('/').collect();
        let parsed = match parts[..] {
            [tenant, consumer, plan] => plan.split_once('-').and_then(|(id, secret)| {
                Some(Self::new(tenant, consumer, id.parse().ok()?, secret.to_owned()))
            }),
            _ => None,
        };
        parsed.ok_or_else(|| {
            InboxError::Invalid(
                "this is no token of a replay; `oncebox replay plan` prints one".to_owned(),
            )
        })
    }

    /// Returns the hash of its secret.
    pub(super) fn hash(&self) -> Vec<u8> {
        hash_of(&self.secret)
    }

    /// Returns the text that an operator gives back.
    pub(super) fn text(&self) -> String {
        format!("{}/{}/{}-{}", self.tenant, self.consumer, self.replay_id, self.secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_was_given() {
        let token = ReplayToken::new("acme", "order-events", 7, generate_secret());
        assert_eq!(ReplayToken::parse(&format!(" {}\n", token.text())).expect("a token"), token);
        assert_ne!(token.hash(), hash_of(&generate_secret()));
        for text in ["", "acme/orders", "acme/orders/x-1", "acme/orders/7", "a/b/7-s/more"] {
            let error = ReplayToken::parse(text).expect_err(text).to_string();
            assert!(error.contains("`oncebox replay plan`"), "{error}");
        }
    }
}
