//! The sealed part of an endpoint: URL, headers and signing secrets.

use std::time::Duration;

use oncebox_model::error::InboxError;
use oncebox_sender::{AllowedHosts, Endpoint, EndpointSettings, SigningKeys};
use serde::{Deserialize, Serialize};

use super::settings::TenantEndpoint;
use crate::tenants::{Tenant, keys::MasterKey};

/// Purpose under which `oncebox.endpoint.request` is sealed, for the login and the endpoint.
const REQUEST: &str = "endpoint request";
/// Most bytes of an answer's body that a host keeps.
pub(super) const ANSWER_BYTES_MAX: usize = 64 << 10;

/// What is sealed of an endpoint.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SealedRequest {
    /// URL.
    pub(super) url: String,
    /// Names and values of headers.
    pub(super) headers: Vec<(String, String)>,
    /// Signing secrets, the present one first; at most two.
    pub(super) signing_secrets: Vec<String>,
}

impl SealedRequest {
    /// Creates a request that has nothing, in place of one that nobody can open.
    pub(super) fn empty() -> Self {
        Self { url: String::new(), headers: Vec::new(), signing_secrets: Vec::new() }
    }

    /// Seals the request for one endpoint of one tenant: it opens for no other.
    pub(super) fn sealed(&self, key: &MasterKey, tenant: &Tenant, name: &str) -> Vec<u8> {
        let text = serde_json::to_vec(self).expect("texts are JSON");
        key.seal(REQUEST, &subject(tenant, name), &text)
    }

    /// Opens a sealed request.
    ///
    /// # Errors
    /// `Sealed` where no key of this process opens it.
    pub(super) fn unsealed(
        key: &MasterKey,
        tenant: &Tenant,
        name: &str,
        sealed: &[u8],
    ) -> Result<Self, InboxError> {
        let text = key.unseal(REQUEST, &subject(tenant, name), sealed)?;
        serde_json::from_slice(&text).map_err(|_| {
            InboxError::Sealed(format!(
                "the endpoint `{name}` of tenant `{}` is of a form that this version does not know",
                tenant.name
            ))
        })
    }

    /// Seals a sealed request under another key; none where that key has sealed it already.
    pub(super) fn anew(
        keys: &MasterKey,
        new: &MasterKey,
        tenant: &Tenant,
        name: &str,
        sealed: &[u8],
    ) -> Result<Option<Vec<u8>>, InboxError> {
        let subject = subject(tenant, name);
        // It is opened in any case: a name of a key does not prove that the text is whole.
        let text = keys.unseal(REQUEST, &subject, sealed)?;
        Ok((!new.has_sealed(sealed)).then(|| new.seal(REQUEST, &subject, &text)))
    }

    /// Returns the place to which requests go, for the tenant as it is now.
    ///
    /// # Errors
    /// `Invalid` with the setting that cannot be used. It shows no secret.
    pub(super) fn endpoint(
        &self,
        shown: &TenantEndpoint,
        tenant: &Tenant,
    ) -> Result<Endpoint, InboxError> {
        let hosts = AllowedHosts::parse(tenant.limits.endpoint_hosts_allowed()).map_err(invalid)?;
        let keys = match self.signing_secrets.as_slice() {
            [] => None,
            [current, previous @ ..] => {
                let previous = previous.first().map(String::as_str);
                Some(SigningKeys::new(current, previous).map_err(invalid)?)
            }
        };
        let millis = |ms: i32| Duration::from_millis(u64::try_from(ms).unwrap_or_default());
        Endpoint::new(EndpointSettings {
            method: shown.method.parse().map_err(invalid)?,
            headers: self.headers.clone(),
            signing_keys: keys,
            connect_timeout: millis(shown.connect_timeout_ms),
            total_timeout: millis(shown.timeout_ms),
            response_bytes_max: ANSWER_BYTES_MAX,
            ..EndpointSettings::new(self.url.clone(), hosts)
        })
        .map_err(invalid)
    }

    /// Returns scheme, host and port of the URL of an endpoint.
    pub(super) fn origin(&self, endpoint: &Endpoint) -> String {
        let is_plain =
            self.url.split_once(':').is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("http"));
        format!("{}://{}", if is_plain { "http" } else { "https" }, endpoint.authority())
    }
}

/// Returns the error for a setting that cannot be used.
pub(super) fn invalid(error: impl std::fmt::Display) -> InboxError {
    InboxError::Invalid(error.to_string())
}

fn subject(tenant: &Tenant, name: &str) -> String {
    format!("{}/{name}", tenant.login)
}
