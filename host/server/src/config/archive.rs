//! Settings of the archive.

use std::path::PathBuf;

use anyhow::{Context, Result};
use oncebox_control::{ArchiveOptions, ArchiveStore};
use serde::Deserialize;

/// `[archive]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArchiveSettings {
    /// Place to which messages go before retention removes them: `file://` and the path of a
    /// folder, or `s3://`, a bucket and perhaps a prefix. Empty for none.
    pub location: String,
    /// URL of a server that speaks S3; empty for that of AWS.
    pub endpoint: String,
    /// Region of the bucket.
    pub region: String,
    /// Id of the access key.
    pub access_key_id: String,
    /// File with the access key; else ONCEBOX_ARCHIVE_SECRET_ACCESS_KEY holds it.
    pub secret_access_key_file: Option<PathBuf>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether an endpoint on another machine may be without TLS.
    pub allow_http: bool,
}

impl Default for ArchiveSettings {
    fn default() -> Self {
        Self {
            location: String::new(),
            endpoint: String::new(),
            region: "us-east-1".to_owned(),
            access_key_id: String::new(),
            secret_access_key_file: None,
            ca_file: None,
            allow_http: false,
        }
    }
}

impl ArchiveSettings {
    /// Returns the place for messages, where one is configured. Opens nothing.
    ///
    /// # Errors
    /// A setting cannot be used, or the file with the access key cannot be read.
    pub fn store(&self) -> Result<Option<ArchiveStore>> {
        if self.location.is_empty() {
            return Ok(None);
        }
        let options = ArchiveOptions {
            location: self.location.clone(),
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            access_key_id: self.access_key_id.clone(),
            secret_access_key: self.secret_access_key()?,
            ca_file: self.ca_file.clone(),
            allow_http: self.allow_http,
        };
        let store = ArchiveStore::new(&options)
            .context("`archive` (ONCEBOX_ARCHIVE_LOCATION) cannot be used")?;
        Ok(Some(store))
    }

    fn secret_access_key(&self) -> Result<String> {
        let Some(file) = &self.secret_access_key_file else {
            return Ok(std::env::var("ONCEBOX_ARCHIVE_SECRET_ACCESS_KEY").unwrap_or_default());
        };
        let text = std::fs::read_to_string(file).with_context(|| {
            format!("failed to read `archive.secret_access_key_file`, `{}`", file.display())
        })?;
        Ok(text.trim_end().to_owned())
    }
}
