//! The endpoints of the file of `oncebox apply`. Secrets are not in it: it names files, or
//! variables of the environment, that hold them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use oncebox_api::wire::NewEndpointBody;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::migration::{Open, read_text};

/// `[[tenant.endpoint]]`
#[derive(Deserialize)]
pub(super) struct EndpointEntry {
    name: String,
    url: TextOrSecret,
    #[serde(default)]
    headers: BTreeMap<String, TextOrSecret>,
    signing_secret: Option<SecretReference>,
    /// The other settings, as the API has them.
    #[serde(flatten)]
    settings: Map<String, Value>,
}

/// A text in the file, or a secret elsewhere.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "it is a text, or a secret elsewhere: `{ file = \"…\" }` or `{ env = \"…\" }`"
)]
enum TextOrSecret {
    Text(String),
    Secret(SecretReference),
}

/// Place of a secret.
#[derive(Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "a secret is `{ file = \"…\" }` or `{ env = \"…\" }`"
)]
enum SecretReference {
    /// A file, relative to the folder of the file of `apply`.
    File { file: PathBuf },
    /// A variable of the environment.
    Variable { env: String },
}

/// An endpoint as it should be.
#[derive(Debug)]
pub struct EndpointSpec {
    /// Name.
    pub name: String,
    /// Its settings, with the secrets.
    pub settings: NewEndpointBody,
}

impl EndpointEntry {
    /// Returns the name of the endpoint.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads the secrets and checks the form of the other settings.
    pub(super) fn read(self, dir: &Path, open: Open<'_>, tenant: &str) -> Result<EndpointSpec> {
        let Self { name, url, headers, signing_secret, mut settings } = self;
        let subject = || format!("endpoint `{name}` of tenant `{tenant}`");
        let mut values = Map::new();
        for (header, value) in headers {
            let value = value.read(dir, open).with_context(subject)?;
            values.insert(header, value.into());
        }
        settings.insert("url".to_owned(), json!(url.read(dir, open).with_context(subject)?));
        settings.insert("headers".to_owned(), values.into());
        if let Some(secret) = signing_secret {
            let secret = secret.read(dir, open).with_context(subject)?;
            settings.insert("signing_secret".to_owned(), secret.into());
        }
        let settings = serde_json::from_value(settings.into());
        Ok(EndpointSpec { settings: settings.with_context(subject)?, name })
    }
}

impl TextOrSecret {
    fn read(self, dir: &Path, open: Open<'_>) -> Result<String> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Secret(secret) => secret.read(dir, open),
        }
    }
}

impl SecretReference {
    fn read(self, dir: &Path, open: Open<'_>) -> Result<String> {
        let text = match self {
            Self::File { file } => {
                let path = dir.join(file);
                let read = read_text(&path, open);
                read.with_context(|| format!("failed to read a secret from `{}`", path.display()))?
            }
            Self::Variable { env } => {
                std::env::var(&env).with_context(|| format!("the secret in {env} is missing"))?
            }
        };
        Ok(text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<EndpointSpec> {
        let entry: EndpointEntry = toml::from_str(text)?;
        let open = |path: &Path| match path.to_str() {
            Some("dir/token") => Ok(b"s3cr3t\n".to_vec()),
            _ => Err(std::io::ErrorKind::NotFound.into()),
        };
        entry.read(Path::new("dir"), &open, "acme")
    }

    // What could go wrong: a secret is sent with the line break of its file, a misspelt setting
    // passes, or an error shows a secret.
    #[test]
    fn secrets_come_from_elsewhere_and_settings_are_checked() {
        let text = "name = 'pay'\nurl = 'https://pay.example'\nreceiver_deduplicates = true\n\
            timeout_ms = 2000\nheaders = { x-team = 'orders', authorization = { file = 'token' } }";
        let spec = read(text).expect("an endpoint");
        assert_eq!((spec.name.as_str(), spec.settings.timeout_ms), ("pay", 2_000));
        assert_eq!(spec.settings.headers["authorization"], "s3cr3t");
        assert_eq!(spec.settings.headers["x-team"], "orders");
        assert_eq!(spec.settings.signing_secret, None);
        assert!(!format!("{spec:?}").contains("s3cr3t"));
        for (more, says) in [
            ("timeout = 1", "unknown field `timeout`"),
            ("signing_secret = { file = 'none' }", "failed to read a secret from `dir/none`"),
            ("signing_secret = { env = 'ONCEBOX_NO_SUCH_SECRET' }", "ONCEBOX_NO_SUCH_SECRET"),
        ] {
            let error = format!("{:#}", read(&format!("{more}\n{text}")).expect_err(more));
            assert!(error.contains(says) && !error.contains("s3cr3t"), "{more}: {error}");
            assert!(error.starts_with("endpoint `pay` of tenant `acme`"), "{error}");
        }
        for (more, says) in [
            ("signing_secret = 's3cr3t'", "a secret is `{ file = "),
            ("signing_secret = { file = 'token', env = 'TOKEN' }", "a secret is `{ file = "),
            ("signing_secret = { path = 'token' }", "a secret is `{ file = "),
        ] {
            let error = read(&format!("{more}\n{text}")).expect_err(more).to_string();
            assert!(error.contains(says), "{more}: {error}");
        }
    }
}
