//! The interface between the inbox and a handler: a component or plain Rust.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::{
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    outgoing::{Outbox, Output},
    tx::Tx,
};

/// The cause of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryKind {
    /// The first run, straight from the broker.
    Live,
    /// A later run, from the inbox.
    Retry,
    /// A run of a completed message, because an operator replays it.
    Replay,
    /// A trial run of a candidate, after the run of the live version; always rolled back.
    Shadow,
}

/// One run of one message.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// Message to handle.
    pub message: &'a Message,
    /// Number of this run among the runs of the message, from 1.
    pub attempt: u32,
    /// Cause of the run: live, retry, replay or shadow.
    pub kind: DeliveryKind,
    /// Time at which the host stops this call.
    pub deadline: Instant,
    /// Rights to emit outgoing messages, and to cancel those of the consumer.
    pub outbox: &'a Outbox,
    /// Whether the run may end before its enqueued statements are answered. The caller waits for
    /// them, and for an error among them it rolls back to before this run.
    pub may_run_ahead: bool,
}

/// One run of several messages in one call, each for the first time.
#[derive(Debug, Clone)]
pub struct BatchRun<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// Messages to handle, in the order of the partition; never empty.
    pub messages: &'a [&'a Message],
    /// Time at which the host stops this call.
    pub deadline: Instant,
    /// Rights to emit outgoing messages, and to cancel those of the consumer.
    pub outbox: &'a Outbox,
}

/// A handler's answer to one message: the result and the emitted messages, or a failure.
pub type Answer = Result<Output, Failure>;

/// The code that handles messages. Its SQL goes through `tx`, into the transaction that also holds
/// the claim. A handler can neither commit nor roll back.
pub trait Handler: Send + Sync + 'static {
    /// Returns the version that is recorded in the rows that the handler completes.
    fn version(&self) -> i32;

    /// Receives, after the commit, the disposition of a message that the handler ran for the first
    /// time.
    fn settled(&self, _disposition: Disposition) {}

    /// Returns whether its runs are counted for a comparison with another version, which needs the
    /// runs to go on. A circuit breaker never holds back the messages of such a handler.
    fn is_judged(&self) -> bool {
        false
    }

    /// Returns the time limit of one call, by the wall clock, where it is below the consumer's.
    fn deadline(&self) -> Option<Duration> {
        None
    }

    /// Returns whether its runs may emit and cancel outgoing messages: the grant of its deployment.
    /// Plain Rust handlers have it.
    fn may_emit(&self) -> bool {
        true
    }

    /// Handles one message. `Ok` may carry a JSON document, which the inbox row keeps, and outgoing
    /// messages, which the completion writes.
    ///
    /// The future is dropped at the deadline, if at all: everything it holds must be undone by a
    /// rollback.
    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer>;

    /// Returns whether the new messages of a transaction go to [`Handler::handle_batch`], all in
    /// one call.
    fn takes_batches(&self) -> bool {
        false
    }

    /// Handles several messages and returns one answer for each, in order. An error answers none of
    /// them and means that the call as a whole failed. The host calls it only where
    /// [`Handler::takes_batches`] is true; a single message may still go to [`Handler::handle`].
    fn handle_batch<'a>(
        &'a self,
        _tx: &'a Tx,
        _run: &'a BatchRun<'a>,
    ) -> BoxFuture<'a, Result<Vec<Answer>, Failure>> {
        Box::pin(async {
            Err(Failure::new(FailureKind::Other, "this handler takes one message at a time"))
        })
    }
}

/// The live handlers of one consumer, as loaded at one generation of its deployments.
pub trait Handlers: Send + Sync + 'static {
    /// Returns the handler for a message, by its event type and version and, where a canary runs,
    /// by its ordering key. `failed` is the version that failed the message before. That version
    /// takes the message again where its deployment says so.
    fn resolve(&self, message: &Message, failed: Option<i32>) -> Option<Arc<dyn Handler>>;
    /// Returns the candidate that shadows the handler of this message; none where there is none.
    fn shadow(&self, _message: &Message) -> Option<Arc<Shadow>> {
        None
    }
    /// Returns every handler that a message may go to; empty where that is unknown.
    fn all(&self) -> Vec<Arc<dyn Handler>> {
        Vec::new()
    }
    /// Returns the generation of deployments that this set was loaded at. The claim refuses a
    /// generation older than the consumer requires.
    fn generation(&self) -> i64;
}

/// Longest trial of a shadow's candidate with one message, including its undoing, where a
/// deployment says nothing.
pub const SHADOW_DURATION_DEFAULT: Duration = Duration::from_millis(250);

/// A candidate, and the share of messages it is tried on.
pub struct Shadow {
    /// Key of the deployment that the findings belong to.
    pub deployment_id: i64,
    /// The candidate; never a handler that takes batches.
    pub handler: Arc<dyn Handler>,
    /// Share of messages in percent, above 0 and at most 100.
    pub percent: f64,
    /// Longest trial of one message.
    pub duration: Duration,
}

impl Shadow {
    /// Returns whether a message is in the sample. A message is in the sample on every host or on
    /// none, and stays in it while the share grows.
    pub fn samples(&self, message_id: &str) -> bool {
        if self.percent >= 100.0 {
            return true;
        }
        let hash = Sha256::new().chain_update("shadow\0").chain_update(message_id).finalize();
        let share = hash.iter().take(4).fold(0, |sum: u32, byte| sum << 8 | u32::from(*byte));
        f64::from(share) < self.percent / 100.0 * 4_294_967_296.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Idle;

    impl Handler for Idle {
        fn version(&self) -> i32 {
            1
        }

        fn handle<'a>(&'a self, _tx: &'a Tx, _run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async { Ok(Output::default()) })
        }
    }

    fn sampled(percent: f64) -> Vec<bool> {
        let shadow = Shadow {
            deployment_id: 1,
            handler: Arc::new(Idle),
            percent,
            duration: SHADOW_DURATION_DEFAULT,
        };
        (0..20_000).map(|number| shadow.samples(&format!("message-{number}"))).collect()
    }

    #[test]
    fn a_sample_has_its_share_and_only_grows() {
        assert!(sampled(100.0).into_iter().all(|sampled| sampled));
        let (ten, thirty) = (sampled(10.0), sampled(30.0));
        let count = |sample: &[bool]| sample.iter().filter(|sampled| **sampled).count();
        assert!(
            (1_800..2_200).contains(&count(&ten)) && (5_700..6_300).contains(&count(&thirty)),
            "{} {}",
            count(&ten),
            count(&thirty)
        );
        assert!(ten.iter().zip(&thirty).all(|(ten, thirty)| !ten || *thirty));
    }
}
