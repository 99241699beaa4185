//! A visit: one request for a page, with the principal of its session.

use axum::http::request::Parts;
use oncebox_api::{Principal, wire::Role};
use sha2::{Digest, Sha256};

use crate::{client::Client, fields::Fields, state::Console};

/// A request for a page, with its visitor.
#[derive(Clone)]
pub(crate) struct Visit {
    pub(crate) console: Console,
    pub(crate) client: Client,
    /// Token that a form of this visitor carries.
    pub(crate) form_token: [u8; 16],
    /// Path of the page, with its query.
    pub(crate) target: String,
    pub(crate) params: Fields,
    pub(crate) query: Fields,
    /// Secret of the session, if there is one.
    pub(crate) session: Option<String>,
    /// Head of the request.
    pub(crate) parts: Parts,
}

impl Visit {
    pub(crate) fn principal(&self) -> &Principal {
        &self.client.principal
    }

    /// Returns a parameter of the path.
    pub(crate) fn param(&self, name: &str) -> &str {
        self.params.get(name).unwrap_or_default()
    }

    /// Returns whether the visitor's role is enough for an action.
    pub(crate) fn may(&self, role: Role, is_platform: bool) -> bool {
        let principal = self.principal();
        principal.role() >= role && !(is_platform && principal.tenant().is_some())
    }

    /// Returns whether the session is still valid.
    pub(crate) async fn is_valid(&self) -> bool {
        let session = self.session.as_deref();
        matches!(self.console.0.api.of_session(&self.parts, session).await, Ok(Some(_)))
    }
}

/// Returns the token of forms of a session. Nothing about the session follows from it.
pub(crate) fn form_token(secret: &str) -> [u8; 16] {
    let mut token = [0; 16];
    token.copy_from_slice(&Sha256::digest(format!("form {secret}"))[..16]);
    token
}

/// Returns a path of the console that a form or a link names, or the first page.
pub(crate) fn local_target(target: Option<&str>) -> &str {
    let is_local = |target: &&str| {
        let rest = target.strip_prefix("/console");
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']))
            && target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
    };
    target.filter(is_local).unwrap_or("/console")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_stays_within_the_console() {
        for target in ["/console", "/console/hosts", "/console?a=b", "/console/jobs?x=/%2F"] {
            assert_eq!(local_target(Some(target)), target);
        }
        for target in [
            "//evil.example",
            "https://evil.example",
            "/consolex",
            "/v1",
            "",
            "/console\\@x",
            "/console/\n",
        ] {
            assert_eq!(local_target(Some(target)), "/console", "{target}");
        }
        assert_eq!(local_target(None), "/console");
    }
}
