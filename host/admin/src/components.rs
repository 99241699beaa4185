//! What the API asks of whoever can look into components, which is not this crate's business.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use oncebox_inbox::policy::Policy;
use serde_json::Value;

use crate::error::Problem;

/// An upload that can be kept.
#[derive(Debug, Clone)]
pub struct Checked {
    /// Bytes of the component: what was uploaded, or what was made of an uploaded core module.
    pub component: Bytes,
    /// Its SHA-256.
    pub digest: [u8; 32],
    /// SHA-256 of the core module, where that was uploaded.
    pub source_digest: Option<[u8; 32]>,
    /// What it is: imports, languages, sizes.
    pub report: Value,
    /// It was compiled as well; otherwise that is asked for when it is kept.
    pub is_compiled: bool,
}

/// Why an upload is not kept.
#[derive(Debug, Clone)]
pub enum Unchecked {
    /// Everything that keeps it from running here.
    Refused(Vec<Problem>),
    /// Nobody has time to look at it, for this reason.
    Busy(String),
}

/// What became of looking at an upload.
pub type Checking<'a> = Pin<Box<dyn Future<Output = Result<Checked, Unchecked>> + Send + 'a>>;

/// The runtime and the broker's client, as far as the API needs them.
pub trait Components: Send + Sync {
    /// Look at an upload.
    fn check(&self, upload: Bytes) -> Checking<'_>;

    /// A component was kept, and is to be compiled. Returns at once; the rows tell what became of
    /// it.
    fn submit(&self, digest: [u8; 32]);

    /// Whether a policy asks for something that the broker's client or the host refuses.
    fn check_policy(&self, tenant: &str, consumer: &str, policy: &Policy) -> Result<(), String>;
}
