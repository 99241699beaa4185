//! The failure of a message whose transaction is gone, recorded in another one.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    message::Message,
    outcome::Failure,
};

use crate::{
    admission::Admission,
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, ClaimRequest, Claimant, InitialStatus, claim},
        complete::{Completion, Execution, Lease, enqueue_completion},
        process::commit,
        settled::Settled,
    },
    consumer::ConsumerInbox,
    session::Transaction,
};

impl ConsumerInbox {
    /// Records a failure whose transaction is gone, in a new transaction and through a claim, or
    /// under the lease of its run. Writes nothing where another session has the message by then.
    pub(crate) async fn record(
        &self,
        admission: &Admission,
        request: &ClaimRequest,
        lease: Option<Lease>,
        generation: i64,
        failure: Failure,
    ) -> Result<Settled, InboxError> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let claim = match self.claim_again(&transaction, request, lease, generation).await {
            Ok(claim) => claim,
            Err(error) => {
                transaction.rollback().await;
                return Err(error);
            }
        };
        let Some(claim) = claim else {
            commit(transaction, Abort::Host).await.map_err(Abort::into_host_error)?;
            return Ok(Settled { unrecorded: Some(failure.kind), ..Settled::default() });
        };
        let message: &Message = &request.message;
        let mut completion = Completion::new(&self.policy);
        let mut results = Vec::new();
        if is_ours(&claim) {
            let version = request.version;
            let execution = Execution { version, ..Execution::of(message, lease) };
            let disposition = completion.failed(execution, &failure, &self.policy);
            results.push((0, disposition, Some(failure.kind)));
        } else if let ClaimOutcome::Waiting { is_due } = claim {
            // It ran and failed before its turn; it runs again in its turn.
            completion.waits(message, is_due);
        } else if claim == ClaimOutcome::Forgotten {
            completion.past_horizon(message, &self.policy);
        }
        enqueue_completion(&transaction, self.consumer_id, &completion).await?;
        self.due_after(&completion);
        commit(transaction, Abort::Host).await.map_err(Abort::into_host_error)?;
        self.tell_failures(std::iter::once(message), completion.recorded().into_iter());
        Ok(Settled { results, ..Settled::stored(vec![claim]) })
    }

    /// Claims a message whose first transaction is gone, or resumes its lease; returns none where
    /// the lease is lost.
    pub(super) async fn claim_again(
        &self,
        transaction: &Transaction<'_>,
        request: &ClaimRequest,
        lease: Option<Lease>,
        generation: i64,
    ) -> Result<Option<ClaimOutcome>, InboxError> {
        if let Some(lease) = lease {
            let id = &request.message.id;
            let is_ours = self.resume(transaction, generation, id, lease.epoch).await?;
            return Ok(is_ours.then_some(ClaimOutcome::New));
        }
        let claimant = Claimant { is_front: true, ..self.claimant(generation) };
        let claims = claim(transaction, claimant, &[request], InitialStatus::Completed).await?;
        Ok(claims.into_iter().next())
    }
}

/// Returns whether a failure is to be written into the row of a claim.
fn is_ours(claim: &ClaimOutcome) -> bool {
    *claim == ClaimOutcome::New || hooks::sabotage(Defect::FailureWrittenByUpsert)
}
