//! A message on its way through a transaction, with the handler that runs it.

use std::sync::Arc;

use oncebox_model::{
    handler::{DeliveryKind, Handler, Shadow},
    hooks,
};

use crate::batch::{
    claim::ClaimRequest,
    complete::{Execution, Lease},
    replay_turn::ReplayTurn,
};

/// A message and the handler that runs it.
pub(crate) struct Routed {
    pub(crate) request: ClaimRequest,
    /// Lease that the message runs under; none for a live message, which the transaction claims.
    pub(crate) lease: Option<Lease>,
    pub(crate) handler: Arc<dyn Handler>,
    /// Generation of the handlers that `handler` was chosen from; a claim with a stale one is
    /// refused.
    pub(crate) generation: i64,
    /// Candidate version to be tried on the message after the commit; set where the message is in
    /// its sample.
    pub(crate) shadow: Option<Arc<Shadow>>,
    /// Place in a replay; none for a live or leased message. Such a message has no lease.
    pub(crate) replay: Option<ReplayTurn>,
}

impl Routed {
    /// Creates a message that comes from no partition, lease or replay.
    pub(crate) fn new(request: ClaimRequest, handler: Arc<dyn Handler>, generation: i64) -> Self {
        Self { request, lease: None, handler, generation, shadow: None, replay: None }
    }

    /// Returns whether the transaction claims the message: it is neither leased nor replayed.
    pub(crate) fn is_live(&self) -> bool {
        self.lease.is_none() && self.replay.is_none()
    }

    /// Returns the execution of the message, by the version that the request names.
    pub(crate) fn execution(&self) -> Execution<'_> {
        let version = self.request.version;
        Execution { version, ..Execution::of(&self.request.message, self.lease) }
    }

    /// Returns the number of the attempt, from 1, and the kind of the delivery.
    pub(crate) fn attempt(&self) -> (u32, DeliveryKind) {
        match self.lease {
            Some(Lease { attempt, .. }) => (attempt, DeliveryKind::Retry),
            None if self.replay.is_some() => (1, DeliveryKind::Replay),
            None => (1, DeliveryKind::Live),
        }
    }

    /// Passes the fail point before the call of a live message's handler.
    pub(crate) fn point_before_call(&self) {
        if self.is_live() {
            hooks::point("inbox:handle:before");
        }
    }

    /// Passes the fail point after a live message's failure was rolled back.
    pub(crate) fn point_after_failure(&self) {
        if self.is_live() {
            hooks::point("inbox:fail:after");
        }
    }

    /// Passes the fail point after the call of the handler.
    pub(crate) fn point_after_call(&self) {
        hooks::point(match self.lease {
            Some(_) => "retry:handle:after",
            None if self.replay.is_some() => "replay:handle:after",
            None => "inbox:handle:after",
        });
    }
}
