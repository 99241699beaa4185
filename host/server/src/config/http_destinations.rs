//! Settings of the hosts that outgoing messages may go to over HTTP.

use std::path::PathBuf;

use anyhow::{Context, Result};
use oncebox_sender::{AddressRange, AllowedHosts, Sender, SenderOptions};
use serde::Deserialize;

/// `[http_destinations]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpDestinationSettings {
    /// Hosts that endpoints of tenants may be on; empty for no HTTP destination.
    pub hosts_allowed: Vec<String>,
    /// Hosts among them for which `http:` is allowed.
    pub plain_http_hosts: Vec<String>,
    /// Ranges of addresses that are allowed although they are not of the public Internet.
    pub private_ranges_allowed: Vec<String>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
}

impl HttpDestinationSettings {
    /// Returns the sender to endpoints. Opens no connection.
    ///
    /// # Errors
    /// An entry of a list is none, or the certificates cannot be read.
    pub fn sender(&self) -> Result<Sender> {
        let hosts = |key: &str, entries: &[String]| {
            AllowedHosts::parse(entries).with_context(|| format!("`http_destinations.{key}`"))
        };
        let range = |entry: &String| {
            let range = entry.parse::<AddressRange>();
            range.context("`http_destinations.private_ranges_allowed`")
        };
        let ranges = self.private_ranges_allowed.iter().map(range).collect::<Result<_>>()?;
        Sender::new(SenderOptions {
            allowed_hosts: hosts("hosts_allowed", &self.hosts_allowed)?,
            plain_http_hosts: hosts("plain_http_hosts", &self.plain_http_hosts)?,
            private_ranges_allowed: ranges,
            ca_file: self.ca_file.clone(),
        })
        .context("`http_destinations.ca_file` (ONCEBOX_HTTP_DESTINATIONS_CA_FILE)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        let settings: HttpDestinationSettings = toml::from_str(text).expect("settings");
        settings.sender().err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    // What could go wrong: a host starts with a list that it reads in another way than the operator
    // meant it.
    #[test]
    fn settings_that_cannot_work_are_refused_by_their_names() {
        assert_eq!(fault(""), "");
        assert_eq!(fault("hosts_allowed = ['hooks.example', '*.example.com:8443']"), "");
        assert_eq!(fault("private_ranges_allowed = ['10.20.0.0/16']"), "");
        for (text, says) in [
            ("hosts_allowed = ['*']", "`http_destinations.hosts_allowed`: `*` is no entry"),
            ("hosts_allowed = ['https://a.example']", "`http_destinations.hosts_allowed`"),
            ("plain_http_hosts = ['a b']", "`http_destinations.plain_http_hosts`"),
            (
                "private_ranges_allowed = ['10.1.2.3/8']",
                "`http_destinations.private_ranges_allowed`",
            ),
            ("ca_file = '/nowhere.pem'", "`http_destinations.ca_file`"),
        ] {
            let fault = fault(text);
            assert!(fault.contains(says), "`{text}`: {fault}");
        }
    }
}
