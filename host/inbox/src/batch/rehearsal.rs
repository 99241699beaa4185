//! The protocol without its commit: what the inbox would make of a message, seen from inside a
//! transaction that is always rolled back.

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

/// An open transaction into which messages are delivered, each as if it were alone.
pub struct Rehearsal<'a> {
    consumer: &'a ConsumerInbox,
    transaction: Option<Transaction<'a>>,
}

/// What the inbox would record of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rehearsed {
    /// It is in the inbox already, so nothing ran.
    Duplicate {
        /// The state of its row.
        status: String,
    },
    /// It ran, and its effect stays in the transaction.
    Completed {
        /// The JSON document that its row would keep.
        result: Option<String>,
    },
    /// It ran and its effect is undone.
    Failed {
        /// What its row would say.
        failure: Failure,
        /// The status of its row.
        status: &'static str,
        /// The transaction did not survive it: what earlier messages did is gone as well.
        is_transaction_lost: bool,
    },
    /// Nobody ran it; its row would be parked.
    Parked {
        /// Why.
        reason: String,
    },
}

impl ConsumerInbox {
    /// Begin a transaction that is always rolled back.
    pub async fn rehearse(&self) -> Result<Rehearsal<'_>, InboxError> {
        Ok(Rehearsal { consumer: self, transaction: Some(self.sessions.begin().await?) })
    }
}

impl<'a> Rehearsal<'a> {
    /// The transaction, to look into between two deliveries.
    pub fn tx(&self) -> &Tx {
        self.transaction().tx()
    }

    /// Undo everything.
    pub async fn end(mut self) {
        if let Some(transaction) = self.transaction.take() {
            transaction.rollback().await;
        }
    }

    /// Deliver a record: decode, claim, handle, complete, check deferred constraints.
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
        // No row refers to a version that may not be in this database.
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

    /// What stands between a handler's ok and COMMIT. Some: it was refused, and is to be undone.
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
            // For the next message. Constraints that are only deferrable are deferred by this as
            // well: they are checked at the end of a message here, and at the end of a statement in
            // a host.
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

    async fn complete(&self, completion: &Completion) -> Result<(), InboxError> {
        complete(self.transaction(), self.consumer.consumer_id, completion).await
    }

    /// The transaction is gone with everything in it; the next message begins in a new one.
    async fn lost(&mut self, ran: Ran<'_>, failure: Failure) -> Result<Rehearsed, InboxError> {
        if let Some(transaction) = self.transaction.take() {
            transaction.rollback().await;
        }
        self.transaction = Some(self.consumer.sessions.begin().await?);
        let status = Completion::default().failed(ran, &failure, &self.consumer.policy).status();
        Ok(Rehearsed::Failed { failure, status, is_transaction_lost: true })
    }

    fn transaction(&self) -> &Transaction<'a> {
        self.transaction.as_ref().expect("taken only to be replaced, or by the end, which consumes")
    }
}
