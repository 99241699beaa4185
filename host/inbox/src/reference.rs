//! Payloads that messages refer to. They are fetched before the transaction of their message
//! begins, and no row keeps them: a message that runs again is fetched again.

use std::sync::Arc;

use futures::future::BoxFuture;
use oncebox_model::{
    handler::{Answer, Handler, Run},
    hooks,
    message::Message,
    outcome::Failure,
    policy::ReferencePolicy,
    reference::{
        FetchBounds, FetchError, FetchedPayload, ReferenceError, ReferenceFault, ReferenceFetcher,
    },
    tx::Tx,
};
use tokio::time::Instant;

use crate::consumer::ConsumerInbox;

/// The end of a fetch.
pub(crate) type Fetched = Result<FetchedPayload, FetchError>;

impl ConsumerInbox {
    /// Sets the fetcher of payloads that messages refer to. Only the first call has an effect.
    pub fn fetch_with(&self, fetcher: Arc<dyn ReferenceFetcher>) {
        let _ = self.fetcher.set(fetcher); // a consumer has one for as long as it runs
    }

    /// Returns whether a message refers to its payload, or has something else in the place of the
    /// reference.
    pub(crate) fn refers(&self, message: &Message) -> bool {
        let reference = self.policy.reference.as_ref();
        reference.is_some_and(|reference| !matches!(reference.find(message), Ok(None)))
    }

    /// Fetches the payload that a message refers to. Dropping the future ends the fetch. The caller
    /// holds no admission and no connection meanwhile, and no other fetched payload where the fetch
    /// waits for memory.
    pub(crate) async fn fetch(&self, message: &Message, waits_for_memory: bool) -> Fetched {
        let began = Instant::now();
        let fetched = match &self.policy.reference {
            Some(policy) => self.fetch_object(policy, message, waits_for_memory).await,
            None => Err(nothing_fetched()),
        };
        hooks::point("reference:fetch:after");
        self.count_fetch(&fetched, began.elapsed());
        fetched
    }

    async fn fetch_object(
        &self,
        policy: &ReferencePolicy,
        message: &Message,
        waits_for_memory: bool,
    ) -> Fetched {
        let (Some(reference), Some(fetcher)) = (policy.find(message)?, self.fetcher.get()) else {
            return Err(nothing_fetched());
        };
        let (bytes_max, timeout) = (policy.bytes_max, policy.timeout());
        fetcher.fetch(&reference, FetchBounds { bytes_max, timeout, waits_for_memory }).await
    }
}

/// Returns the error of a process that has no stores.
fn nothing_fetched() -> FetchError {
    let text = "this process fetches no payloads; run the message on a host, or without \
        `reference` in the policy";
    ReferenceError::new(ReferenceFault::NotAllowed, text).into()
}

/// Stands for the handler of a message whose payload was not fetched. The message fails in its
/// place in the batch, as if a handler had failed, and no code of the tenant runs.
pub(crate) struct Unfetched {
    version: i32,
    failure: Failure,
}

impl Unfetched {
    /// Returns it for the handler that the message would have gone to.
    pub(crate) fn instead_of(handler: &dyn Handler, failure: Failure) -> Arc<dyn Handler> {
        Arc::new(Self { version: handler.version(), failure })
    }
}

impl Handler for Unfetched {
    fn version(&self) -> i32 {
        self.version
    }

    fn handle<'a>(&'a self, _tx: &'a Tx, _run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async { Err(self.failure.clone()) })
    }
}
