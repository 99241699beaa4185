//! Sessions of browsers, for the pages of the console. A session has the rights of its token.

use std::sync::Arc;

use axum::http::request::Parts;
use chrono::{TimeDelta, Utc};
use oncebox_control::NewToken;
use oncebox_model::InboxError;

use crate::{
    Api, Mode, Principal,
    connections::Connection,
    error::{ApiError, Code},
    origin,
};

pub use oncebox_control::{SESSION_HOURS, TokenRole};

/// A person whom an identity provider named, and the rights that the configuration grants.
#[derive(Debug, Clone)]
pub struct Person<'a> {
    /// Name of the person; the audit log keeps it as the actor.
    pub name: &'a str,
    /// Name of the provider; the audit log keeps it as the maker of the person's token.
    pub provider: &'a str,
    /// Rights of the person.
    pub role: TokenRole,
    /// The only tenant that the person reaches; all without one.
    pub tenant: Option<&'a str>,
}

impl Api {
    /// Starts a session of a token, and returns the only copy of its secret.
    ///
    /// # Errors
    /// `Unauthenticated` for a token that is not valid.
    pub async fn start_session(&self, token: &str) -> Result<String, ApiError> {
        let token = self.check_token(token.trim()).await?;
        Ok(self.control().tokens().start_session(&token).await.map_err(logged)?)
    }

    /// Starts a session of a person, and returns the only copy of its secret. The session has a
    /// token of its own, which expires with it.
    ///
    /// # Errors
    /// `Invalid` for a name that no token can have, `NotFound` for an unknown tenant.
    pub async fn start_session_of(&self, person: &Person<'_>) -> Result<String, ApiError> {
        let control = self.control().acting_as(person.provider);
        let new = NewToken {
            name: person.name,
            role: person.role,
            tenant: person.tenant,
            expires_at: Some(Utc::now() + TimeDelta::hours(SESSION_HOURS.into())),
        };
        let token = control.tokens().create_for_sessions(&new).await.map_err(logged)?;
        Ok(control.tokens().start_session(&token).await.map_err(logged)?)
    }

    /// Ends a session.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn end_session(&self, secret: &str) -> Result<(), ApiError> {
        Ok(self.control().tokens().end_session(secret).await.map_err(logged)?)
    }

    /// Returns the principal of a page's request: that of its session, or of a host without tokens.
    /// `None` where it has no valid session.
    ///
    /// # Errors
    /// `Forbidden` for a request to a host without tokens that a page of another site sent.
    pub async fn of_session(
        &self,
        parts: &Parts,
        secret: Option<&str>,
    ) -> Result<Option<Principal>, ApiError> {
        let principal = match (self.mode(), secret) {
            (Mode::Open, _) => {
                match origin::is_navigation(parts) {
                    true => origin::check_loopback(parts)?,
                    false => origin::check(parts)?,
                }
                Some(Principal::open())
            }
            (Mode::Tokens, Some(secret)) => {
                let token = self.control().tokens().of_session(secret).await.map_err(logged)?;
                token.map(Principal::of_token)
            }
            (Mode::Tokens, None) => None,
        };
        if principal.is_some()
            && let Some(connection) = parts.extensions.get::<Arc<Connection>>()
        {
            connection.authenticated();
        }
        Ok(principal)
    }
}

/// Checks that no page of another site sent a request.
///
/// # Errors
/// `Forbidden`, with the header that names the other site.
pub fn check_site(parts: &Parts) -> Result<(), ApiError> {
    origin::check_site(parts).map_err(|why| {
        ApiError::new(Code::Forbidden, format!("{why}; send the form from a page of this host"))
    })
}

/// Logs an error of the database, which no request of the API has met.
fn logged(error: InboxError) -> InboxError {
    tracing::error!(error = %error, "console session failed");
    error
}
