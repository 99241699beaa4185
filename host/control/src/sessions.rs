//! Sessions of the console. A browser presents its token once and gets a session, whose secret is
//! in its cookie; the database keeps the hash of the secret.

use oncebox_model::error::InboxError;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    handles::Tokens,
    tokens::{Token, select, subject},
};

/// Hours after which a session expires.
pub const SESSION_HOURS: i32 = 12;

/// Largest number of sessions of one token. A further one ends the oldest.
const SESSIONS_MAX: i64 = 20;

impl Tokens<'_> {
    /// Starts a session of a valid token, and returns the only copy of its secret.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn start_session(&self, token: &Token) -> Result<String, InboxError> {
        const EXPIRED: &str = "DELETE FROM oncebox.console_session WHERE expires_at <= now()";
        const OLDEST: &str = "DELETE FROM oncebox.console_session WHERE hash IN (\
            SELECT hash FROM oncebox.console_session WHERE token_id = $1 \
            ORDER BY created_at DESC, hash OFFSET $2)";
        const INSERT: &str = "INSERT INTO oncebox.console_session (hash, token_id, expires_at) \
            VALUES ($1, $2, now() + make_interval(hours => $3))";
        let secret = hex::encode(rand::random::<[u8; 32]>());
        let mut tx = self.0.pool.begin().await?;
        sqlx::query(EXPIRED).execute(&mut *tx).await?;
        sqlx::query(OLDEST).bind(token.token_id).bind(SESSIONS_MAX - 1).execute(&mut *tx).await?;
        sqlx::query(INSERT)
            .bind(hash(&secret))
            .bind(token.token_id)
            .bind(SESSION_HOURS)
            .execute(&mut *tx)
            .await?;
        let details = json!({ "token_id": token.token_id });
        let by_holder = self.0.acting_as(token.name.clone());
        by_holder.audit().record(&mut tx, "session.start", subject(token), details).await?;
        tx.commit().await?;
        Ok(secret)
    }

    /// Returns the token of a session; `None` where the session is unknown or has expired, or its
    /// token was revoked or has expired.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn of_session(&self, secret: &str) -> Result<Option<Token>, InboxError> {
        const OF_SESSION: &str = "JOIN oncebox.console_session s USING (token_id) \
            WHERE s.hash = $1 AND s.expires_at > now() AND k.revoked_at IS NULL \
            AND coalesce(k.expires_at > now(), true)";
        Ok(select(OF_SESSION).bind(hash(secret)).fetch_optional(&self.0.pool).await?)
    }

    /// Ends a session. One that has ended is left as it is.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn end_session(&self, secret: &str) -> Result<(), InboxError> {
        const END: &str = "DELETE FROM oncebox.console_session WHERE hash = $1";
        sqlx::query(END).bind(hash(secret)).execute(&self.0.pool).await?;
        Ok(())
    }
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}
