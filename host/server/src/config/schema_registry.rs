//! Settings of the schema registry.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, Result, ensure};
use oncebox_registry::{Decoder, HttpRegistry, HttpRegistryOptions};
use serde::Deserialize;

/// `[schema_registry]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchemaRegistrySettings {
    /// URL below which `/schemas/ids/…` is; empty for none.
    pub url: String,
    /// User of basic authentication; empty for none.
    pub username: String,
    /// File with the user's password; else ONCEBOX_SCHEMA_REGISTRY_PASSWORD holds it.
    pub password_file: Option<PathBuf>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
}

impl SchemaRegistrySettings {
    /// Returns the decoder of payloads, where a registry is configured.
    pub fn decoder(&self) -> Result<Option<Decoder>> {
        if self.url.is_empty() {
            return Ok(None);
        }
        let options = HttpRegistryOptions {
            url: self.url.clone(),
            credentials: self.credentials()?,
            ca_file: self.ca_file.clone(),
        };
        let registry = HttpRegistry::new(&options)
            .context("`schema_registry` (ONCEBOX_SCHEMA_REGISTRY_URL) cannot be used")?;
        Ok(Some(Decoder::new(Arc::new(registry))))
    }

    fn credentials(&self) -> Result<Option<(String, String)>> {
        if self.username.is_empty() {
            ensure!(
                self.password_file.is_none(),
                "`schema_registry.password_file` is set and `schema_registry.username` is not"
            );
            return Ok(None);
        }
        let password = match &self.password_file {
            Some(file) => {
                let read = std::fs::read_to_string(file);
                read.with_context(|| {
                    format!(
                        "failed to read `schema_registry.password_file`, \
                    `{}`",
                        file.display()
                    )
                })?
                .trim_end()
                .to_owned()
            }
            None => std::env::var("ONCEBOX_SCHEMA_REGISTRY_PASSWORD").context(
                "`schema_registry.username` is set; set ONCEBOX_SCHEMA_REGISTRY_PASSWORD or \
                    `schema_registry.password_file` too",
            )?,
        };
        Ok(Some((self.username.clone(), password)))
    }
}
