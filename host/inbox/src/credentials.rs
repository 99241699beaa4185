//! What the host logs in with for a tenant, and the secrets of its sessions.

use crate::{
    error::InboxError,
    keys::{Login, MasterKey},
    tenant::Tenant,
};

/// A tenant's secrets. Never shown, never logged.
#[derive(Clone)]
pub struct Credentials {
    /// Password of the login that handlers run as.
    pub guest_password: String,
    /// Password of the login that owns the tenant's schema.
    pub owner_password: String,
    /// What the host binds to every host function it calls in a tenant's session.
    pub secret: [u8; 32],
    /// Key of the streams that the tenant's guests get for randomness. Not rotated: a message that runs
    /// again gets the same stream.
    pub random_key: [u8; 32],
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(…)")
    }
}

impl MasterKey {
    /// The secrets of a tenant.
    pub fn credentials(&self, tenant: &Tenant) -> Result<Credentials, InboxError> {
        Ok(self.derived(&tenant.login, &tenant.owner_login))
    }

    /// Secrets that follow from the key and the logins' names.
    pub(crate) fn derived(&self, login: &str, owner_login: &str) -> Credentials {
        Credentials {
            guest_password: self.password(login, Login::Guest),
            owner_password: self.password(owner_login, Login::Owner),
            secret: self.secret(login),
            random_key: self.random_key(login),
        }
    }
}
