//! The protocol without its commit: the result of a delivery, seen from inside a transaction that
//! is always rolled back.

use oncebox_model::{
    error::InboxError,
    handler::DeliveryKind,
    identity,
    outcome::{Failure, FailureKind},
    record::Record,
    tx::Tx,
};

use crate::{
    batch::{
        call::{Ended, Job, run},
        claim::{As, Claimed, Offered, claim},
        complete::{Completion, Ran, complete},
        process::{host_statement, refused, undo_message},
    },
    consumer::ConsumerInbox,
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
            None,
        ) {
            Ok(message) => message,
            Err((_, why)) => {
                return Ok(Rehearsed::Parked { reason: format!("undecodable: {why}") });
            }
        };
        let Some(handler) = handlers.resolve(&message, None) else {
            return Ok(Rehearsed::Parked { reason: "no_route".to_owned() });
        };
        // The row names no version, since this database may not have it.
        let offered = Offered { message, version: None, reason: None, ordering: None };
        let claimant = self.consumer.claimant(handlers.generation());
        let claims = claim(self.transaction(), claimant, &[&offered], As::Completed).await?;
        if let Some(Claimed::Known { status, .. }) = claims.into_iter().next() {
            self.complete(&Completion::default()).await?;
            return Ok(Rehearsed::Duplicate { status });
        }
        host_statement(self.tx(), "SAVEPOINT m").await?;
        let job = Job {
            tenant: &self.consumer.tenant,
            consumer: &self.consumer.name,
            handler: &handler,
            message: &offered.message,
            attempt: 1,
            kind: DeliveryKind::Live,
            deadline: self.consumer.deadline(&handler),
        };
        let ended = run(job, self.tx()).await;
        let ran = Ran::not(&offered.message);
        self.settle(ended, ran).await
    }

    /// Turns the result of a run into the result of the delivery. A failure is rolled back and
    /// completed as its row would be.
    async fn settle(
        &mut self,
        ended: Ended<Option<String>>,
        ran: Ran<'_>,
    ) -> Result<Rehearsed, InboxError> {
        let failure = match ended {
            Ended::Ok(result) => match self.finish(ran, result.clone()).await? {
                None => return Ok(Rehearsed::Completed { result }),
                Some(failure) => failure,
            },
            Ended::Failed(failure) | Ended::Contention(failure) => failure,
            Ended::Abandoned(failure) => return self.lost(ran, failure).await,
            Ended::Lost => {
                let failure = Failure::new(
                    FailureKind::Crashed,
                    "the connection to the database broke while the message ran",
                );
                return self.lost(ran, failure).await;
            }
            Ended::Stopped(why) => return Err(InboxError::Stopped { why }),
        };
        if undo_message(self.tx()).await.is_err() {
            return self.lost(ran, failure).await;
        }
        let mut completion = Completion::default();
        let status = completion.failed(ran, &failure, &self.consumer.policy).status();
        self.complete(&completion).await?;
        Ok(Rehearsed::Failed { failure, status, is_transaction_lost: false })
    }

    /// Completes a run that succeeded, and checks deferred constraints. Returns the failure where
    /// PostgreSQL refuses that; its effect is then to be undone.
    async fn finish(
        &self,
        ran: Ran<'_>,
        result: Option<String>,
    ) -> Result<Option<Failure>, InboxError> {
        let mut completion = Completion::default();
        completion.succeeded(ran, result, &self.consumer.policy);
        let finished = match self.complete(&completion).await {
            Ok(()) => host_statement(self.tx(), "SET CONSTRAINTS ALL IMMEDIATE").await,
            Err(error) => Err(error),
        };
        let Err(error) = finished else {
            // Constraints are deferred again for the next message, with those that are only
            // deferrable. Here such a constraint is checked at the end of a message, in a host at
            // the end of a statement.
            host_statement(self.tx(), "SET CONSTRAINTS ALL DEFERRED; RELEASE SAVEPOINT m").await?;
            return Ok(None);
        };
        match refused(&error) {
            Some(answer) => Ok(Some(Failure::new(
                FailureKind::Sql { sqlstate: answer.sqlstate },
                answer.message,
            ))),
            None => Err(error),
        }
    }

    /// Writes a completion into the open transaction.
    async fn complete(&self, completion: &Completion) -> Result<(), InboxError> {
        complete(self.transaction(), self.consumer.consumer_id, completion).await
    }

    /// Replaces a transaction that was lost with everything in it; the next message begins in a new
    /// one.
    async fn lost(&mut self, ran: Ran<'_>, failure: Failure) -> Result<Rehearsed, InboxError> {
        if let Some(transaction) = self.transaction.take() {
            transaction.rollback().await;
        }
        self.transaction = Some(self.consumer.sessions.begin().await?);
        let status = Completion::default().failed(ran, &failure, &self.consumer.policy).status();
        Ok(Rehearsed::Failed { failure, status, is_transaction_lost: true })
    }

    /// Returns the open transaction.
    fn transaction(&self) -> &Transaction<'a> {
        self.transaction.as_ref().expect("taken only to be replaced, or by the end, which consumes")
    }
}
