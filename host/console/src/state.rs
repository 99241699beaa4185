//! The state of the console.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::oidc::Provider;
use axum::Router;
use oncebox_api::Api;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// The state that all pages share.
#[derive(Clone)]
pub(crate) struct Console(pub(crate) Arc<Shared>);

/// What is behind it.
pub(crate) struct Shared {
    /// The API, for sessions.
    pub(crate) api: Api,
    /// The API's routes, for everything else.
    pub(crate) routes: Router,
    /// Whether browsers may send the cookie over encrypted connections only.
    pub(crate) is_encrypted: bool,
    /// The identity provider, where there is one.
    pub(crate) provider: Option<Provider>,
    /// Key of the forms' tokens, where there are no sessions.
    pub(crate) form_key: String,
    /// Pages that follow changes.
    pub(crate) streams: Arc<Streams>,
    /// Room for looks at what has changed.
    pub(crate) refreshes: Semaphore,
    /// Room for uploads in memory.
    pub(crate) uploads: Semaphore,
    /// The end of the host.
    pub(crate) stop: CancellationToken,
}

/// Largest number of pages that follow changes at a time.
const STREAMS_MAX: usize = 64;

/// Largest number of these with one token.
const STREAMS_OF_TOKEN_MAX: usize = 8;

/// The pages that follow changes, by their tokens.
#[derive(Default)]
pub(crate) struct Streams(Mutex<HashMap<Option<i64>, usize>>);

impl Streams {
    /// Counts a page, until its permit is dropped; `None` where there is no room. Visitors of a host
    /// without tokens have all of it.
    pub(crate) fn enter(self: &Arc<Self>, token_id: Option<i64>) -> Option<StreamPermit> {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_token = streams.get(&token_id).copied().unwrap_or_default();
        let max = if token_id.is_some() { STREAMS_OF_TOKEN_MAX } else { STREAMS_MAX };
        if of_token >= max || streams.values().sum::<usize>() >= STREAMS_MAX {
            return None;
        }
        streams.insert(token_id, of_token + 1);
        Some(StreamPermit { streams: self.clone(), token_id })
    }
}

/// The place of a page that follows changes.
pub(crate) struct StreamPermit {
    streams: Arc<Streams>,
    token_id: Option<i64>,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut streams = self.streams.0.lock().unwrap_or_else(PoisonError::into_inner);
        match streams.get_mut(&self.token_id) {
            Some(of_token) if *of_token > 1 => *of_token -= 1,
            _ => drop(streams.remove(&self.token_id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_does_not_take_the_room_of_others() {
        let streams = Arc::new(Streams::default());
        let mut permits: Vec<_> = (0..8).map(|_| streams.enter(Some(1)).expect("room")).collect();
        assert!(streams.enter(Some(1)).is_none());
        assert!(streams.enter(Some(2)).is_some());
        permits.pop();
        assert!(streams.enter(Some(1)).is_some());
        drop(permits);
        let all: Vec<_> = (0..64).map(|n| streams.enter(Some(n)).expect("room")).collect();
        assert!(streams.enter(Some(100)).is_none() && streams.enter(None).is_none());
        drop(all);
        assert!(streams.0.lock().expect("a count").is_empty());
    }
}
