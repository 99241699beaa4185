//! What takes a processor for a while, off the threads that serve everybody: compiling the schemas
//! of a policy.

use tokio::sync::Semaphore;

use super::Policy;
use crate::error::InboxError;

/// Policies that are judged at the same time. Others wait, and hold nothing meanwhile.
const PLACES_MAX: usize = 2;

static PLACES: Semaphore = Semaphore::const_new(PLACES_MAX);

/// Do work on a policy off the executor, when one of a few places is free. Whoever goes away
/// meanwhile leaves its place when the work is done.
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
    /// [`Policy::check`], off the executor.
    pub async fn check_apart(&self) -> Result<(), InboxError> {
        let policy = self.clone();
        apart(move || policy.check()).await?
    }
}
