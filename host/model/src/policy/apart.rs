//! Work that occupies a processor for a while, off the threads that serve all tenants: compiling
//! the schemas of a policy.

use tokio::sync::Semaphore;

use super::Policy;
use crate::error::InboxError;

/// Maximum number of policies that are judged at once. Others wait, and hold nothing while they
/// wait.
const PLACES_MAX: usize = 2;

static PLACES: Semaphore = Semaphore::const_new(PLACES_MAX);

/// Does work on a policy off the executor, when one of a few places is free. A caller that stops
/// waiting gives its place back only when the work is done.
///
/// # Errors
///
/// [`InboxError::Invalid`] where the work panics.
pub async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, InboxError> {
    const BROKEN: &str = "judging the policy ended in an error of the host; please report it";
    let place = PLACES.acquire().await.map_err(|_| InboxError::Invalid(BROKEN.to_owned()))?;
    let worked = tokio::task::spawn_blocking(move || {
        let worked = work();
        drop(place);
        worked
    });
    worked.await.map_err(|_| InboxError::Invalid(BROKEN.to_owned()))
}

impl Policy {
    /// Runs [`Policy::check`] off the executor.
    ///
    /// # Errors
    ///
    /// [`InboxError::Policy`] with every key that is wrong; [`InboxError::Invalid`] where the check
    /// panics.
    pub async fn check_apart(&self) -> Result<(), InboxError> {
        let policy = self.clone();
        apart(move || policy.check()).await?
    }
}
