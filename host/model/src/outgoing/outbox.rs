//! The rights of a run to emit outgoing messages, and to cancel those of its consumer.

use std::{fmt, sync::Arc};

use futures::future::BoxFuture;

use super::{Destination, matches_destination};
use crate::tx::Tx;

/// What becomes of the emits and cancels of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutboxMode {
    /// They go with the transaction of the run.
    #[default]
    Open,
    /// The run is replayed: an emit gets its id and is dropped, and a cancel finds nothing.
    Suppressed,
    /// The run is replayed: an emit is refused, and a cancel finds nothing.
    Withheld,
}

impl OutboxMode {
    /// Returns whether the run is replayed, so that nothing of it is sent or cancelled.
    pub fn is_replay(self) -> bool {
        self != Self::Open
    }
}

/// What a handler may do with its consumer's outgoing messages.
#[derive(Clone)]
pub struct Outbox {
    /// What becomes of emits and cancels.
    pub mode: OutboxMode,
    /// Whether the handler may emit and cancel: the grant of its deployment.
    pub may_emit: bool,
    /// Destinations that the tenant may send to: whole destinations, or beginnings followed by `*`.
    pub allowed: Arc<[String]>,
    /// Withdraws outgoing messages of the consumer.
    pub canceller: Arc<dyn CancelOutgoing>,
}

impl Outbox {
    /// Creates an outbox that allows no destination and finds no message to cancel.
    pub fn closed() -> Self {
        Self {
            mode: OutboxMode::Open,
            may_emit: false,
            allowed: Arc::default(),
            canceller: Arc::new(CancelNothing),
        }
    }

    /// Returns whether the tenant may send to a destination.
    pub fn allows(&self, destination: &Destination) -> bool {
        let destination = destination.to_string();
        self.allowed.iter().any(|entry| matches_destination(entry, &destination))
    }
}

impl Default for Outbox {
    fn default() -> Self {
        Self::closed()
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, may_emit, allowed, canceller: _ } = self;
        f.debug_struct("Outbox")
            .field("mode", mode)
            .field("may_emit", may_emit)
            .field("allowed", allowed)
            .finish_non_exhaustive()
    }
}

/// Withdraws outgoing messages that are not being sent yet.
pub trait CancelOutgoing: Send + Sync {
    /// Cancels the outgoing messages of the consumer with this token, in the transaction of `tx`.
    /// Returns true if there was any.
    ///
    /// # Errors
    ///
    /// PostgreSQL's error, which aborts the transaction, or that of a lost connection.
    fn cancel<'a>(&'a self, tx: &'a Tx, token: &'a str)
    -> BoxFuture<'a, Result<bool, sqlx::Error>>;
}

/// Finds no message to cancel, for runs without an inbox.
#[derive(Debug, Clone, Copy, Default)]
pub struct CancelNothing;

impl CancelOutgoing for CancelNothing {
    fn cancel<'a>(
        &'a self,
        _tx: &'a Tx,
        _token: &'a str,
    ) -> BoxFuture<'a, Result<bool, sqlx::Error>> {
        Box::pin(std::future::ready(Ok(false)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: an empty list, or none, allows everything.
    #[test]
    fn nothing_is_allowed_but_what_the_list_says() {
        let destination = |text: &str| text.parse::<Destination>().expect("a destination");
        assert!(!Outbox::closed().allows(&destination("kafka:orders")));
        let allowed = ["kafka:acme.*".to_owned(), "inbox:billing".to_owned()];
        let outbox = Outbox { may_emit: true, allowed: Arc::new(allowed), ..Outbox::closed() };
        for (text, is_allowed) in [
            ("kafka:acme.orders", true),
            ("kafka:acme", false),
            ("inbox:billing", true),
            ("inbox:billing-2", false),
        ] {
            assert_eq!(outbox.allows(&destination(text)), is_allowed, "{text}");
        }
        assert!(!outbox.mode.is_replay() && OutboxMode::Withheld.is_replay());
        assert!(format!("{outbox:?}").contains("kafka:acme.*"));
    }
}
