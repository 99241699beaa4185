//! Settings of the stores from which payloads are fetched.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Result, ensure};
use oncebox_control::{FetchLimits, ObjectReader, StoreSettings, Stores, check_name};
use serde::Deserialize;

/// Longest `stall_ms`.
const STALL_MS_MAX: u64 = 600_000;
/// Largest `fetches_max` and `consumer_fetches_max`.
const FETCHES_MAX: usize = 1_000;
/// Least and most memory for fetched payloads, bytes.
const MEMORY_BYTES: std::ops::RangeInclusive<usize> = 1 << 20..=1 << 40;

/// `[references]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReferenceSettings {
    /// Milliseconds after which a fetch without progress is given up.
    pub stall_ms: u64,
    /// Most fetches of one tenant from one store at a time on this host.
    pub fetches_max: usize,
    /// Most fetches of one consumer at a time on this host.
    pub consumer_fetches_max: usize,
    /// Memory of this host for fetched payloads, bytes.
    pub memory_bytes: usize,
    /// Memory of this host for the fetched payloads of one tenant, bytes.
    pub tenant_memory_bytes: usize,
    /// The stores that exist, by name. A tenant has a bucket and keys of its own in each.
    pub stores: BTreeMap<String, ReferenceStore>,
}

/// `[references.stores.<name>]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReferenceStore {
    /// URL of a server that speaks S3; empty for that of AWS.
    pub endpoint: String,
    /// Region of the buckets.
    pub region: String,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether an endpoint on another machine may be without TLS.
    pub allow_http: bool,
    /// Whether the endpoint may have an address of a private network, or of this machine.
    pub allow_private: bool,
}

impl Default for ReferenceSettings {
    fn default() -> Self {
        let limits = FetchLimits::default();
        Self {
            stall_ms: limits.stall.as_millis() as u64,
            fetches_max: limits.fetches_max,
            consumer_fetches_max: limits.consumer_fetches_max,
            memory_bytes: limits.memory_bytes,
            tenant_memory_bytes: limits.tenant_memory_bytes,
            stores: BTreeMap::new(),
        }
    }
}

impl Default for ReferenceStore {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            region: "us-east-1".to_owned(),
            ca_file: None,
            allow_http: false,
            allow_private: false,
        }
    }
}

impl ReferenceSettings {
    /// Returns the stores. Opens none.
    ///
    /// # Errors
    /// A setting cannot be used.
    pub fn stores(&self) -> Result<Stores> {
        ensure!(
            (1..=STALL_MS_MAX).contains(&self.stall_ms),
            "`references.stall_ms` (ONCEBOX_REFERENCES_STALL_MS) is {}; it must be 1 to \
                {STALL_MS_MAX}",
            self.stall_ms
        );
        let (fetches, memory) = (1..=FETCHES_MAX, MEMORY_BYTES);
        for (key, value, range) in [
            ("fetches_max", self.fetches_max, &fetches),
            ("consumer_fetches_max", self.consumer_fetches_max, &fetches),
            ("memory_bytes", self.memory_bytes, &memory),
            ("tenant_memory_bytes", self.tenant_memory_bytes, &memory),
        ] {
            ensure!(
                range.contains(&value),
                "`references.{key}` (ONCEBOX_REFERENCES_{}) is {value}; it must be {} to {}",
                key.to_uppercase(),
                range.start(),
                range.end()
            );
        }
        let mut stores = BTreeMap::new();
        for (name, store) in &self.stores {
            check_name("store", name)?;
            if let Err(error) = ObjectReader::check_endpoint(&store.endpoint, store.allow_http) {
                anyhow::bail!("`references.stores.{name}.endpoint` {error}");
            }
            stores.insert(name.clone(), store.settings());
        }
        let limits = FetchLimits {
            stall: Duration::from_millis(self.stall_ms),
            fetches_max: self.fetches_max,
            consumer_fetches_max: self.consumer_fetches_max,
            memory_bytes: self.memory_bytes,
            tenant_memory_bytes: self.tenant_memory_bytes,
        };
        Ok(Stores::new(stores, limits))
    }
}

impl ReferenceStore {
    fn settings(&self) -> StoreSettings {
        StoreSettings {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            ca_file: self.ca_file.clone(),
            allow_http: self.allow_http,
            allow_private: self.allow_private,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        let settings: ReferenceSettings = toml::from_str(text).expect("settings");
        settings.stores().err().map(|error| error.to_string()).unwrap_or_default()
    }

    // What could go wrong: a host starts with a store that it can never read, or with one over
    // which payloads cross a network in the clear.
    #[test]
    fn settings_that_cannot_work_are_refused_by_their_names() {
        assert_eq!(fault("[stores.docs]\nendpoint = 'https://s3.example:9000'"), "");
        assert_eq!(fault("[stores.docs]"), "");
        for (text, says) in [
            ("stall_ms = 0", "`references.stall_ms`"),
            ("fetches_max = 0", "`references.fetches_max`"),
            ("consumer_fetches_max = 0", "ONCEBOX_REFERENCES_CONSUMER_FETCHES_MAX"),
            ("memory_bytes = 1000", "`references.memory_bytes`"),
            ("tenant_memory_bytes = 0", "`references.tenant_memory_bytes`"),
            ("[stores.Docs]", "`Docs` cannot be the name of a store"),
            (
                "[stores.docs]\nendpoint = 'http://s3.example'",
                "`references.stores.docs.endpoint` has no TLS",
            ),
            (
                "[stores.docs]\nendpoint = 's3.example'",
                "`references.stores.docs.endpoint` is no URL of a server",
            ),
        ] {
            let fault = fault(text);
            assert!(fault.contains(says), "`{text}`: {fault}");
        }
    }
}
