//! The seam between the inbox and whatever does the work: a component or plain Rust.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::{
    message::Message,
    outcome::{Disposition, Failure, FailureKind},
    tx::Tx,
};

/// Why a message is being run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryKind {
    /// The first run, straight from the broker.
    Live,
    /// A later run, from the inbox.
    Retry,
    /// A trial run of a candidate, after the live version's; always rolled back.
    Shadow,
}

/// One run of one message.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// What to handle.
    pub message: &'a Message,
    /// Which run of this message this is, from 1.
    pub attempt: u32,
    /// Live, retry or shadow.
    pub kind: DeliveryKind,
    /// When the host stops this call.
    pub deadline: Instant,
}

/// One run of several messages in one call, each for the first time.
#[derive(Debug, Clone)]
pub struct BatchRun<'a> {
    /// The tenant's name.
    pub tenant: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// What to handle, in the order of the partition; never empty.
    pub messages: &'a [&'a Message],
    /// When the host stops this call.
    pub deadline: Instant,
}

/// What a handler says of one message.
pub type Answer = Result<Option<String>, Failure>;

/// Does the work of a message. Its SQL goes through `tx`, into the transaction that also
/// holds the claim; it can neither commit nor roll back.
pub trait Handler: Send + Sync + 'static {
    /// The version that is recorded in the rows it completes.
    fn version(&self) -> i32;

    /// Told after the commit what became of a message that it ran for the first time.
    fn settled(&self, _disposition: Disposition) {}

    /// Whether its runs are counted to be compared with another version's, which needs them to go
    /// on. Its messages are never held back by a circuit breaker.
    fn is_judged(&self) -> bool {
        false
    }

    /// Wall clock for one call, where it is to be less than the consumer's.
    fn deadline(&self) -> Option<Duration> {
        None
    }

    /// Handle one message. Ok may carry a JSON document, kept in the inbox row.
    ///
    /// The future is dropped at the deadline, or never: everything it holds must be
    /// undone by a rollback.
    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer>;

    /// Whether the new messages of a transaction go to [`Handler::handle_batch`], all in one call.
    fn takes_batches(&self) -> bool {
        false
    }

    /// Handle several messages. One answer for each, in order; an error speaks for none of them and
    /// says that the call as a whole failed. Only called where [`Handler::takes_batches`]; a single
    /// message may still go to [`Handler::handle`].
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
    /// The handler a message goes to, by its event type and version and, where a canary runs, by
    /// its ordering key. `failed` is the version that failed it before, which takes it again where
    /// its deployment says so.
    fn resolve(&self, message: &Message, failed: Option<i32>) -> Option<Arc<dyn Handler>>;
    /// The candidate that shadows the handler of this message, where there is one.
    fn shadow(&self, _message: &Message) -> Option<Arc<Shadow>> {
        None
    }
    /// Every handler that some message may go to; none where that is not known.
    fn all(&self) -> Vec<Arc<dyn Handler>> {
        Vec::new()
    }
    /// The generation of deployments this set was loaded at; the claim refuses older ones
    /// than the consumer requires.
    fn generation(&self) -> i64;
}

/// How long the candidate of a shadow may take for a message, its undoing included, where a deployment says
/// nothing.
pub const SHADOW_DURATION_DEFAULT: Duration = Duration::from_millis(250);

/// A candidate, and which messages it is tried on.
pub struct Shadow {
    /// The deployment that its findings belong to.
    pub deployment_id: i64,
    /// The candidate; never one that takes batches.
    pub handler: Arc<dyn Handler>,
    /// Share of messages, above 0 and at most 100.
    pub percent: f64,
    /// Longest trial of one message.
    pub duration: Duration,
}

impl Shadow {
    /// Whether a message is in the sample. The same message is in it on every host, and stays in it
    /// while the share grows.
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
            Box::pin(async { Ok(None) })
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
