//! Tokens of the API, which name their callers and limit them. A token is random and shown once;
//! the database keeps its hash.

use std::fmt;

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{audit::Subject, handles::Tokens};

/// Rights of a token. Each role includes the rights of the ones before it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, sqlx::Type,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum TokenRole {
    /// Right to read everything but tokens.
    Viewer,
    /// Right to roll back, end deployments and change shares.
    Operator,
    /// Right to upload and deploy.
    Deployer,
    /// Right to make tenants, consumers and tokens.
    Admin,
}

/// A token to be made.
#[derive(Debug, Clone)]
pub struct NewToken<'a> {
    /// Name of its holder; the audit log keeps it as the actor.
    pub name: &'a str,
    /// Rights of the token.
    pub role: TokenRole,
    /// The only tenant that it reaches; all without one.
    pub tenant: Option<&'a str>,
    /// Time at which it expires, if ever.
    pub expires_at: Option<DateTime<Utc>>,
}

/// A token's row, without the token.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
pub struct Token {
    /// Key.
    pub token_id: i64,
    /// Name of its holder.
    pub name: String,
    /// Rights of the token.
    pub role: TokenRole,
    /// The only tenant that it reaches; all without one.
    pub tenant: Option<String>,
    /// Time at which it was made.
    pub created_at: DateTime<Utc>,
    /// Actor that made it.
    pub created_by: String,
    /// Time at which it expires, if ever.
    pub expires_at: Option<DateTime<Utc>>,
    /// Time at which an operator revoked it, if so.
    pub revoked_at: Option<DateTime<Utc>>,
}

/// The token itself, on its way to the caller that asked for it.
pub struct TokenSecret(String);

impl TokenSecret {
    /// Generates `obx_` and 64 hexadecimal digits. The prefix lets scanners find leaked tokens.
    fn generate() -> Self {
        Self(format!("{PREFIX}{}", hex::encode(rand::random::<[u8; 32]>())))
    }

    /// Returns the text of the token. Its holder has the rights of the token.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSecret(…)")
    }
}

/// Result of the check of a presented token.
#[derive(Debug, Clone)]
pub enum Shown {
    /// A valid token.
    Good(Token),
    /// A token that has expired.
    Expired,
    /// A token that was revoked.
    Revoked,
    /// A text that is no token of this installation.
    Unknown,
}

const PREFIX: &str = "obx_";

/// Names that no person of a provider gets: in the audit log they are a host, a visitor of
/// `oncebox dev`, and most often whoever works on the host's machine.
const RESERVED: [&str; 3] = ["oncebox", "dev", "root"];

const TOKEN: &str = "SELECT k.token_id, k.name, k.role, t.name AS tenant, k.created_at, \
    k.created_by, k.expires_at, k.revoked_at \
    FROM oncebox.token k LEFT JOIN oncebox.tenant t USING (tenant_id) ";

pub(crate) fn select<'q, Row>(
    condition: &str,
) -> sqlx::query::QueryAs<'q, sqlx::Postgres, Row, <sqlx::Postgres as sqlx::Database>::Arguments>
where
    Row: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow>,
{
    sqlx::query_as(sqlx::AssertSqlSafe([TOKEN, condition].concat()))
}

impl Tokens<'_> {
    /// Makes a token, and returns its row and the only copy of it.
    ///
    /// # Errors
    /// `Invalid` for a bad name or an expiry in the past, `NotFound` for an unknown tenant.
    pub async fn create(&self, new: &NewToken<'_>) -> Result<(Token, TokenSecret), InboxError> {
        check_token_name(new.name)?;
        if new.expires_at.is_some_and(|at| at <= Utc::now()) {
            return Err(InboxError::Invalid(
                "`expires_at` is in the past; a token needs a time to come, or none".to_owned(),
            ));
        }
        let tenant_id = match new.tenant {
            Some(tenant) => Some(self.0.tenants().get(tenant).await?.tenant_id),
            None => None,
        };
        let secret = TokenSecret::generate();
        let mut tx = self.0.pool.begin().await?;
        const INSERT: &str = "INSERT INTO oncebox.token (name, hash, role, tenant_id, expires_at, \
            created_by) \
            VALUES ($1, $2, $3, $4, $5, $6) RETURNING token_id";
        let token_id: i64 = sqlx::query_scalar(INSERT)
            .bind(new.name)
            .bind(hash(&secret.0))
            .bind(new.role)
            .bind(tenant_id)
            .bind(new.expires_at)
            .bind(&self.0.actor)
            .fetch_one(&mut *tx)
            .await?;
        let token: Token =
            select("WHERE k.token_id = $1").bind(token_id).fetch_one(&mut *tx).await?;
        let details =
            json!({ "token_id": token_id, "role": token.role, "expires_at": token.expires_at });
        self.0.audit().record(&mut tx, "token.create", subject(&token), details).await?;
        tx.commit().await?;
        Ok((token, secret))
    }

    /// Makes a token that nobody holds, for the sessions of a person whom an identity provider
    /// named. The actor is the provider; its tokens that have expired are deleted.
    ///
    /// # Errors
    /// As those of [`Self::create`]. `Conflict` for a name that the audit log has for somebody else.
    pub async fn create_for_sessions(&self, new: &NewToken<'_>) -> Result<Token, InboxError> {
        const IS_TAKEN: &str = "SELECT EXISTS (SELECT FROM oncebox.token \
            WHERE name = $1 AND created_by <> $2 AND revoked_at IS NULL)";
        let is_taken = RESERVED.contains(&new.name)
            || sqlx::query_scalar(IS_TAKEN)
                .bind(new.name)
                .bind(&self.0.actor)
                .fetch_one(&self.0.pool)
                .await?;
        if is_taken {
            return Err(InboxError::conflict(format!(
                "`{}` is the name of a token or of a host, and the audit log would not tell which; \
                    sign in under another name, or revoke that token",
                new.name
            )));
        }
        const EXPIRED: &str = "DELETE FROM oncebox.token \
            WHERE created_by = $1 AND expires_at <= now()";
        sqlx::query(EXPIRED).bind(&self.0.actor).execute(&self.0.pool).await?;
        let (token, _) = self.create(new).await?;
        Ok(token)
    }

    /// Returns the tokens that reach one tenant only, or all tokens, including expired and revoked
    /// ones.
    ///
    /// # Errors
    /// `NotFound` for an unknown tenant.
    pub async fn list(&self, tenant: Option<&str>) -> Result<Vec<Token>, InboxError> {
        if let Some(tenant) = tenant {
            self.0.tenants().get(tenant).await?;
        }
        let list = select("WHERE $1::text IS NULL OR t.name = $1 ORDER BY k.token_id");
        Ok(list.bind(tenant).fetch_all(&self.0.pool).await?)
    }

    /// Revokes a token; with a tenant, only one that reaches this tenant alone. The token is
    /// refused from the commit on. A token that was revoked before is returned unchanged.
    ///
    /// # Errors
    /// `NotFound` where there is no such token.
    pub async fn revoke(&self, tenant: Option<&str>, token_id: i64) -> Result<Token, InboxError> {
        const ONE: &str =
            "WHERE k.token_id = $1 AND ($2::text IS NULL OR t.name = $2) FOR UPDATE OF k";
        let mut tx = self.0.pool.begin().await?;
        let found: Option<Token> =
            select(ONE).bind(token_id).bind(tenant).fetch_optional(&mut *tx).await?;
        let mut token = found.ok_or_else(|| {
            InboxError::NotFound(format!(
                "there is no token {token_id} here; `oncebox token list` shows those there are"
            ))
        })?;
        if token.revoked_at.is_some() {
            tx.rollback().await?;
            return Ok(token);
        }
        const REVOKE: &str =
            "UPDATE oncebox.token SET revoked_at = now() WHERE token_id = $1 RETURNING revoked_at";
        token.revoked_at = sqlx::query_scalar(REVOKE).bind(token_id).fetch_one(&mut *tx).await?;
        self.0
            .audit()
            .record(&mut tx, "token.revoke", subject(&token), json!({ "token_id": token_id }))
            .await?;
        tx.commit().await?;
        Ok(token)
    }

    /// Returns the row of a presented token, or the reason for which it is refused. The token is
    /// found by its hash. The time of the index lookup reveals at most something of the hash of a
    /// guess. That says nothing of the hash of any token, and there are 2^256 of them.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn authenticate(&self, shown: &str) -> Result<Shown, InboxError> {
        if !is_token(shown) {
            return Ok(Shown::Unknown);
        }
        const EXPIRED: &str = "SELECT expires_at <= now() FROM oncebox.token WHERE token_id = $1";
        let found: Option<Token> =
            select("WHERE k.hash = $1").bind(hash(shown)).fetch_optional(&self.0.pool).await?;
        let Some(token) = found else { return Ok(Shown::Unknown) };
        if token.revoked_at.is_some() {
            return Ok(Shown::Revoked);
        }
        if token.expires_at.is_none() {
            return Ok(Shown::Good(token));
        }
        // The database's clock decides, as everywhere.
        let expired: Option<bool> = sqlx::query_scalar(EXPIRED)
            .bind(token.token_id)
            .fetch_optional(&self.0.pool)
            .await?
            .flatten();
        Ok(if expired == Some(false) { Shown::Good(token) } else { Shown::Expired })
    }
}

fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token).to_vec()
}

/// Returns whether a text has the form of a token. Other texts need no lookup.
fn is_token(text: &str) -> bool {
    let digits = text.strip_prefix(PREFIX);
    digits.is_some_and(|digits| {
        digits.len() == 64 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    })
}

pub(crate) fn subject(token: &Token) -> Subject {
    match &token.tenant {
        Some(tenant) => Subject::of(tenant, &token.name),
        None => Subject::platform(&token.name),
    }
}

fn check_token_name(name: &str) -> Result<(), InboxError> {
    let sound = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= 63
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._@-".contains(c));
    if sound {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`{name}` cannot be the name of a token; use a letter or digit, then up to 62 of A-Z, a-z, \
            0-9, `.`, `_`, `@` and `-`"
    )))
}
