//! Settings of the identity provider, where visitors of the console sign in.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use oncebox_console::OidcOptions;
use serde::Deserialize;

/// `[oidc]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OidcSettings {
    /// URL of the issuer; empty for none.
    pub issuer: String,
    /// Id of this installation at the provider.
    pub client_id: String,
    /// File with the secret; else ONCEBOX_OIDC_CLIENT_SECRET holds it. None for a public client.
    pub client_secret_file: Option<PathBuf>,
    /// Address of `/console/login/return`, as browsers reach it.
    pub redirect_url: String,
    /// Scopes asked for, besides `openid`.
    pub scopes: Vec<String>,
    /// Claim of the ID token with the person's name.
    pub name_claim: String,
    /// Claim with the person's groups.
    pub groups_claim: String,
    /// Rights of groups: `<group>=<role>` or `<group>=<role>@<tenant>`.
    pub grants: Vec<String>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
}

impl Default for OidcSettings {
    fn default() -> Self {
        Self {
            issuer: String::new(),
            client_id: String::new(),
            client_secret_file: None,
            redirect_url: String::new(),
            scopes: vec!["profile".to_owned(), "email".to_owned()],
            name_claim: "preferred_username".to_owned(),
            groups_claim: "groups".to_owned(),
            grants: Vec::new(),
            ca_file: None,
        }
    }
}

impl OidcSettings {
    /// Returns the options of the provider, where one is configured.
    ///
    /// # Errors
    /// A file cannot be read, or a grant is none.
    pub fn options(&self) -> Result<Option<OidcOptions>> {
        if self.issuer.is_empty() {
            let is_rest_set = !self.client_id.is_empty() || !self.grants.is_empty();
            ensure!(
                !is_rest_set,
                "`oidc.client_id` or `oidc.grants` is set and `oidc.issuer` is not"
            );
            return Ok(None);
        }
        let client_secret = match &self.client_secret_file {
            Some(file) => {
                let read = std::fs::read_to_string(file).with_context(|| {
                    format!("failed to read `oidc.client_secret_file`, `{}`", file.display())
                })?;
                ensure!(
                    !read.trim_end().is_empty(),
                    "`oidc.client_secret_file`, `{}`, is empty",
                    file.display()
                );
                Some(read.trim_end().to_owned())
            }
            None => std::env::var("ONCEBOX_OIDC_CLIENT_SECRET").ok().filter(|it| !it.is_empty()),
        };
        let authorities = self.ca_file.as_ref().map(|file| {
            std::fs::read(file)
                .with_context(|| format!("failed to read `oidc.ca_file`, `{}`", file.display()))
        });
        let grants = self
            .grants
            .iter()
            .map(|grant| grant.parse().map_err(|error: String| anyhow!("`oidc.grants`: {error}")));
        Ok(Some(OidcOptions {
            issuer: self.issuer.clone(),
            client_id: self.client_id.clone(),
            client_secret,
            redirect_url: self.redirect_url.clone(),
            scopes: self.scopes.clone(),
            name_claim: self.name_claim.clone(),
            groups_claim: self.groups_claim.clone(),
            grants: grants.collect::<Result<_>>()?,
            authorities: authorities.transpose()?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        let settings: OidcSettings = toml::from_str(text).expect("settings");
        settings.options().err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_their_names() {
        assert_eq!(fault(""), "");
        assert_eq!(fault("issuer = 'https://login.example'\ngrants = ['ops=admin']"), "");
        for (text, error) in [
            ("grants = ['ops=admin']", "`oidc.issuer` is not"),
            ("client_id = 'oncebox'", "`oidc.issuer` is not"),
            ("issuer = 'https://x'\ngrants = ['ops']", "`oidc.grants`: `ops` grants nothing"),
            ("issuer = 'https://x'\nca_file = '/nowhere'", "`oidc.ca_file`, `/nowhere`"),
            ("issuer = 'https://x'\nclient_secret_file = '/nowhere'", "`oidc.client_secret_file`"),
        ] {
            assert!(fault(text).contains(error), "{text}: {}", fault(text));
        }
    }
}
