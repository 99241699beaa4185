//! References: a message may carry the place of its payload instead of the payload. The host
//! fetches the object at that place before the message runs, and hands it to the handler.

use std::{any::Any, ops::Deref, sync::Arc, time::Duration};

use futures::future::BoxFuture;

use crate::{
    outcome::{Failure, FailureKind},
    status::Reason,
};

/// Fetches objects for the messages of one consumer, under the rights of its tenant.
pub trait ReferenceFetcher: Send + Sync + 'static {
    /// Fetches the object that a reference names. It may wait for other fetches of the tenant, for
    /// any time; the bounds hold from then on. Dropping the future ends the fetch.
    ///
    /// # Errors
    ///
    /// A [`FetchError`] where there is no object to hand out.
    fn fetch<'a>(
        &'a self,
        reference: &'a str,
        bounds: FetchBounds,
    ) -> BoxFuture<'a, Result<FetchedPayload, FetchError>>;
}

/// The bounds of one fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchBounds {
    /// Most bytes of the object.
    pub bytes_max: usize,
    /// Longest exchange with the store, without waits for other fetches and for memory.
    pub timeout: Duration,
    /// Whether the fetch waits for memory of the host. One that does not wait ends as
    /// [`FetchError::NoMemory`]. Only a caller that holds no other fetched payload may wait:
    /// otherwise two callers could wait for each other.
    pub waits_for_memory: bool,
}

/// A payload that the host fetched. Its share of the host's memory is free when the last copy is
/// dropped.
#[derive(Clone)]
pub struct FetchedPayload(Arc<(Vec<u8>, Box<dyn Any + Send + Sync>)>);

impl FetchedPayload {
    /// Creates a payload of these bytes, with the share of memory that it holds.
    pub fn new(bytes: Vec<u8>, memory: Box<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new((bytes, memory)))
    }
}

impl Deref for FetchedPayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.0
    }
}

impl std::fmt::Debug for FetchedPayload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FetchedPayload({} bytes)", self.len())
    }
}

/// A fetch that handed out no object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Failure of the message: an attempt, or the reason to park it.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Fault of the host, its settings or its tenant's access key, which all messages meet. It
    /// costs no message an attempt.
    #[error("{0}")]
    Host(String),
    /// The host has no memory left for the object, and the fetch was not to wait.
    #[error("the host has no memory left for a fetched payload")]
    NoMemory,
}

/// The kind of a fetch that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReferenceFault {
    /// The reference cannot be read.
    Malformed,
    /// The tenant may not have what it names, or its keys do not open it.
    NotAllowed,
    /// There is no such object.
    Missing,
    /// The object has too many bytes.
    TooLarge,
    /// The store did not deliver it; another try may succeed.
    Unavailable,
}

impl ReferenceFault {
    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::Malformed, Self::NotAllowed, Self::Missing, Self::TooLarge, Self::Unavailable];

    /// Returns whether another try may succeed although nobody changes anything.
    pub fn may_pass(self) -> bool {
        self == Self::Unavailable
    }

    /// Returns the reason in the row of a message that failed so.
    pub fn reason(self) -> Reason {
        match self {
            Self::Malformed => Reason::ReferenceMalformed,
            Self::NotAllowed => Reason::ReferenceNotAllowed,
            Self::Missing => Reason::ReferenceMissing,
            Self::TooLarge => Reason::ReferenceTooLarge,
            Self::Unavailable => Reason::ReferenceUnavailable,
        }
    }
}

/// A fetch that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ReferenceError {
    /// Kind of the failure.
    pub fault: ReferenceFault,
    /// Text for readers, with what to do. It holds no key of a store.
    pub text: String,
}

impl ReferenceError {
    /// Creates an error of a kind with its text.
    pub fn new(fault: ReferenceFault, text: impl Into<String>) -> Self {
        Self { fault, text: text.into() }
    }
}

impl From<ReferenceError> for Failure {
    fn from(error: ReferenceError) -> Self {
        Self::new(FailureKind::Reference(error.fault), error.text)
    }
}
