//! Settings of the addresses that the host listens on.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use serde::Deserialize;

/// `[http]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSettings {
    /// Address of `/healthz`, `/readyz` and `/metrics`.
    pub listen: SocketAddr,
    /// Whether the configuration names the address; `oncebox dev` takes a free one otherwise.
    #[serde(skip)]
    pub is_chosen: bool,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9464)), is_chosen: false }
    }
}

/// `[api]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiSettings {
    /// Address of the API.
    pub listen: SocketAddr,
    /// Whether the configuration names the address; `oncebox dev` takes a free one otherwise.
    #[serde(skip)]
    pub is_chosen: bool,
    /// File with the certificate and those that signed it, PEM.
    pub tls_certificate_file: Option<PathBuf>,
    /// File with the certificate's private key, PEM.
    pub tls_key_file: Option<PathBuf>,
    /// Longest request other than an upload, in milliseconds.
    pub request_timeout_ms: u64,
    /// Whether the console is served beside the API.
    pub console: bool,
    /// Whether requests need a token; only `oncebox dev` does without.
    #[serde(skip, default = "tokens")]
    pub mode: oncebox_api::Mode,
}

fn tokens() -> oncebox_api::Mode {
    oncebox_api::Mode::Tokens
}

impl Default for ApiSettings {
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 9465));
        Self {
            listen,
            is_chosen: false,
            tls_certificate_file: None,
            tls_key_file: None,
            request_timeout_ms: 30_000,
            console: true,
            mode: tokens(),
        }
    }
}

impl ApiSettings {
    /// Returns the certificate and its key. One without the other is an error.
    pub fn certificate(&self) -> Result<Option<(&Path, &Path)>> {
        pair("api", self.tls_certificate_file.as_deref(), self.tls_key_file.as_deref())
    }
}

/// `[ingress]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IngressSettings {
    /// Address at which messages over HTTP come; none for a host that takes none.
    pub listen: Option<SocketAddr>,
    /// File with the certificate and those that signed it, PEM.
    pub tls_certificate_file: Option<PathBuf>,
    /// File with the certificate's private key, PEM.
    pub tls_key_file: Option<PathBuf>,
}

impl IngressSettings {
    /// Returns the certificate and its key. One without the other is an error.
    pub fn certificate(&self) -> Result<Option<(&Path, &Path)>> {
        pair("ingress", self.tls_certificate_file.as_deref(), self.tls_key_file.as_deref())
    }
}

/// Returns a certificate and its key, which a section has both or neither of.
fn pair<'p>(
    section: &str,
    certificate: Option<&'p Path>,
    key: Option<&'p Path>,
) -> Result<Option<(&'p Path, &'p Path)>> {
    let (has, lacks) = match (certificate, key) {
        (Some(certificate), Some(key)) => return Ok(Some((certificate, key))),
        (None, None) => return Ok(None),
        (Some(_), None) => ("tls_certificate_file", "tls_key_file"),
        (None, Some(_)) => ("tls_key_file", "tls_certificate_file"),
    };
    bail!("`{section}.{has}` is set and `{section}.{lacks}` is not; TLS needs both")
}
