//! The interface to the runtime, which inspects and compiles components: this crate does neither.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use oncebox_model::policy::Policy;
use serde_json::Value;

use crate::error::ProblemBody;

/// An upload that can be kept.
#[derive(Debug, Clone)]
pub struct Checked {
    /// Bytes of the component: the upload itself, or the component made of an uploaded core module.
    pub component: Bytes,
    /// SHA-256 of the component.
    pub digest: [u8; 32],
    /// SHA-256 of the core module, if the upload was one.
    pub source_digest: Option<[u8; 32]>,
    /// Properties of the component: imports, languages, sizes.
    pub report: Value,
    /// Whether the check compiled the component too. Otherwise the API submits it after it is kept.
    pub is_compiled: bool,
}

/// The reason why an upload is not kept.
#[derive(Debug, Clone)]
pub enum Unchecked {
    /// All problems that keep the component from running here.
    Refused(Vec<ProblemBody>),
    /// No capacity for a check at present, with the reason.
    Busy(String),
}

/// A future of the result of a check.
pub type Checking<'a> = Pin<Box<dyn Future<Output = Result<Checked, Unchecked>> + Send + 'a>>;

/// The runtime and the broker's client, as far as the API needs them.
pub trait Components: Send + Sync {
    /// Checks an upload.
    ///
    /// # Errors
    ///
    /// [`Unchecked`] when the component cannot run here, or when there is no capacity for the
    /// check.
    fn check(&self, upload: Bytes) -> Checking<'_>;

    /// Submits a kept component for compilation. Returns at once; the rows show the result.
    fn submit(&self, digest: [u8; 32]);

    /// Checks that neither the broker's client nor the host refuses a policy.
    ///
    /// # Errors
    ///
    /// The reason of a refusal, as text for the caller.
    fn check_policy(&self, tenant: &str, consumer: &str, policy: &Policy) -> Result<(), String>;
}
