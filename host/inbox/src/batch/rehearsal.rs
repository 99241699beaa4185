//! The protocol without its commit: the result of a delivery, seen from inside a transaction that
//! is always rolled back.

use oncebox_model::{
    error::InboxError,
    identity,
    outcome::{Disposition, Failure, FailureKind},
    policy::Dedup,
    record::Record,
    tx::Tx,
};

use crate::{
    admission::batch_sizer::SavepointMode,
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, ClaimRequest},
        complete::{Completion, Execution, Recorded, enqueue_completion},
        routed::Routed,
        settled::Settled,
        state::BatchState,
        statements::{at_completion, at_constraints, host_statement},
    },
    consumer::ConsumerInbox,
    partition::parking::too_large_reason,
    session::Transaction,
};

/// An open transaction that messages are delivered into, each as if it were alone.
pub struct Rehearsal<'a> {
    consumer: &'a ConsumerInbox,
    transaction: Option<Transaction<'a>>,
}

/// Result that the inbox would record for a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rehearsed {
    /// Duplicate: the message has a row already, so no handler ran.
    Duplicate {
        /// Status of its row.
        status: String,
    },
    /// Success; the effect stays in the transaction.
    Completed {
        /// Result that its row would keep, as JSON.
        result: Option<String>,
    },
    /// Failure; the effect is undone.
    Failed {
        /// Failure that its row would record.
        failure: Failure,
        /// Status that its row would have.
        status: &'static str,
        /// True where the transaction was lost, with the effects of earlier messages.
        is_transaction_lost: bool,
    },
    /// Parked: no handler ran.
    Parked {
        /// Reason that its row would have.
        reason: String,
    },
}

impl ConsumerInbox {
    /// Begins a transaction that is always rolled back.
    ///
    /// # Errors
    ///
    /// Returns an error where no session of the tenant can begin a transaction.
    pub async fn rehearse(&self) -> Result<Rehearsal<'_>, InboxError> {
        Ok(Rehearsal { consumer: self, transaction: Some(self.sessions.begin().await?) })
    }
}

impl<'a> Rehearsal<'a> {
    /// Returns the transaction, to inspect it between two deliveries.
    pub fn tx(&self) -> &Tx {
        self.transaction().tx()
    }

    /// Rolls everything back.
    pub async fn end(mut self) {
        if let Some(transaction) = self.transaction.take() {
            transaction.rollback().await;
        }
    }

    /// Delivers a record: decodes, claims, handles and completes it, then checks deferred
    /// constraints.
    ///
    /// # Errors
    ///
    /// Returns an error for a fault of the host or its database. A failure of the message is a
    /// [`Rehearsed::Failed`].
    pub async fn deliver(&mut self, record: Record) -> Result<Rehearsed, InboxError> {
        let handlers = self.consumer.handlers();
        let message = match identity::decode(
            record,
            &self.consumer.policy.identity,
            self.consumer.policy.sequence.as_ref(),
            self.consumer.policy.reference.as_ref(),
            None,
            self.consumer.sessions.payload_key(),
        ) {
            Ok(message) => message,
            Err((_, why)) => {
                return Ok(Rehearsed::Parked {
                    reason: format!("{}: {why}", oncebox_model::Reason::Undecodable),
                });
            }
        };
        let Some(handler) = handlers.resolve(&message, None) else {
            return Ok(Rehearsed::Parked { reason: oncebox_model::Reason::NoRoute.to_string() });
        };
        let bytes_max = self.consumer.policy.limits.payload_bytes_max;
        if message.record.payload_bytes() > bytes_max {
            let reason = too_large_reason(&message.record, bytes_max);
            return Ok(Rehearsed::Parked { reason });
        }
        if self.consumer.refers(&message) {
            let reason = oncebox_model::Reason::ReferenceUnavailable;
            return Ok(Rehearsed::Parked {
                reason: format!(
                    "{reason}: nothing is fetched here; give the message its payload instead of \
                        the reference"
                ),
            });
        }
        // The row names no version, since this database may not have it.
        let request = ClaimRequest { message, version: None, reason: None, ordering: None };
        let generation = handlers.generation();
        let routed = Routed::new(request, handler, generation);
        let batch = std::slice::from_ref(&routed);
        let state = match BatchState::open(self.consumer, self.transaction(), batch).await {
            Ok(Some(state)) => state,
            Ok(None) => return Err(InboxError::InFlightElsewhere),
            Err(Abort::AtClaim { failure }) => {
                let text = format!("PostgreSQL refuses its inbox row: {}", failure.text);
                return Err(InboxError::Invalid(text));
            }
            Err(abort) => return Err(abort.into_host_error()),
        };
        // The claim stands before the savepoint: a row is of a transaction only at its top level.
        host_statement(self.tx(), "SAVEPOINT delivery").await?;
        match self.run(state).await {
            Ok(rehearsed) => {
                // Constraints are deferred again for the next message, with those that are only
                // deferrable. Here such a constraint is checked at the end of a message, in a host
                // at the end of a statement.
                const END: &str = "SET CONSTRAINTS ALL DEFERRED; RELEASE SAVEPOINT delivery";
                host_statement(self.tx(), END).await?;
                Ok(rehearsed)
            }
            Err(abort) => self.aborted(&routed, abort).await,
        }
    }

    /// Runs everything between claim and COMMIT, then checks deferred constraints as COMMIT would.
    async fn run(&self, mut state: BatchState<'_>) -> Result<Rehearsed, Abort> {
        let transaction = self.transaction();
        if let Some(status) = state.claims[0].known_status() {
            let status = status.to_owned();
            self.complete(state).await?;
            return Ok(Rehearsed::Duplicate { status });
        }
        if state.claims[0] == ClaimOutcome::Forgotten {
            self.complete(state).await?;
            return Ok(Rehearsed::Parked { reason: oncebox_model::Reason::Horizon.to_string() });
        }
        while let Some(next) = state.next() {
            let mode = SavepointMode::Savepoints;
            self.consumer.handle_next(transaction, &mut state, next, mode).await?;
        }
        let result = state.completion.result().map(str::to_owned);
        let mut settled = self.complete(state).await?;
        if let Some(Recorded { failure, disposition, .. }) = settled.failures.pop() {
            return Ok(Rehearsed::failed(failure, disposition));
        }
        host_statement(self.tx(), "SET CONSTRAINTS ALL IMMEDIATE").await.map_err(at_constraints)?;
        Ok(Rehearsed::Completed { result })
    }

    /// Writes the completion, and waits for the answer: no COMMIT follows that would bring it.
    async fn complete(&self, state: BatchState<'_>) -> Result<Settled, Abort> {
        let transaction = self.transaction();
        let settled = state.complete(transaction).await?;
        transaction.wait_for_enqueued().await.map_err(|error| at_completion(error.into()))?;
        Ok(settled)
    }

    /// Writes the completion of a failure, and waits for the answer.
    async fn write(&self, completion: &Completion) -> Result<(), InboxError> {
        let transaction = self.transaction();
        enqueue_completion(transaction, self.consumer.consumer_id, completion).await?;
        Ok(transaction.wait_for_enqueued().await?)
    }

    /// Undoes a delivery whose transaction would be aborted, and records its failure as the host
    /// does in a transaction of its own.
    async fn aborted(&mut self, routed: &Routed, abort: Abort) -> Result<Rehearsed, InboxError> {
        let failure = match abort {
            Abort::Contention { failure }
            | Abort::AtCommit { failure }
            | Abort::Abandoned { failure, .. } => failure,
            Abort::Host(InboxError::LostInHandler { .. } | InboxError::LostInOutage { .. }) => {
                let text = "the connection to the database broke while the message ran";
                return self.lost(routed, Failure::new(FailureKind::Crashed, text)).await;
            }
            abort => return Err(abort.into_host_error()),
        };
        const UNDO: &str = "ROLLBACK TO SAVEPOINT delivery; RELEASE SAVEPOINT delivery";
        // A statement that was cut off condemns its connection.
        if self.tx().is_broken().await {
            return self.lost(routed, failure).await;
        }
        if host_statement(self.tx(), UNDO).await.is_err() {
            return self.lost(routed, failure).await;
        }
        self.tx().recovered().await;
        let mut completion = Completion::new(&self.consumer.policy);
        if self.consumer.policy.dedup == Dedup::Off {
            // Only the record of a failure has a row, and a message that has one gets no other.
            let Routed { request, generation, .. } = routed;
            let claim =
                self.consumer.claim_again(self.transaction(), request, None, *generation).await?;
            if let Some(status) = claim.as_ref().and_then(ClaimOutcome::known_status) {
                let status = status.to_owned();
                self.write(&completion).await?;
                return Ok(Rehearsed::Duplicate { status });
            }
        }
        let execution = Execution::of(&routed.request.message, None);
        let disposition = completion.failed(execution, &failure, &self.consumer.policy);
        self.write(&completion).await?;
        Ok(Rehearsed::failed(failure, disposition))
    }

    /// Replaces a transaction that was lost with everything in it; the next message begins in a new
    /// one.
    async fn lost(&mut self, routed: &Routed, failure: Failure) -> Result<Rehearsed, InboxError> {
        if let Some(transaction) = self.transaction.take() {
            transaction.rollback().await;
        }
        self.transaction = Some(self.consumer.sessions.begin().await?);
        let execution = Execution::of(&routed.request.message, None);
        let policy = &self.consumer.policy;
        let status = Completion::new(policy).failed(execution, &failure, policy).status();
        Ok(Rehearsed::Failed { failure, status, is_transaction_lost: true })
    }

    /// Returns the open transaction.
    fn transaction(&self) -> &Transaction<'a> {
        self.transaction.as_ref().expect("taken only to be replaced, or by the end, which consumes")
    }
}

impl Rehearsed {
    /// Returns the result of a message whose failure its row would record.
    fn failed(failure: Failure, disposition: Disposition) -> Self {
        Self::Failed { failure, status: disposition.status(), is_transaction_lost: false }
    }
}
