//! Messages that are stored without a run: for a retry worker, or parked for an operator.

use oncebox_model::{error::InboxError, hooks, message::Message, outcome::Failure};

use crate::{
    admission::Admission,
    batch::{
        abort::Abort,
        claim::{ClaimOutcome, ClaimRequest, Claimant, InitialStatus, claim},
        process::commit,
        statements::{at_claim, rollback},
    },
    consumer::ConsumerInbox,
    partition::parking,
};

impl ConsumerInbox {
    /// Parks a message whose row PostgreSQL refuses, under its position in Kafka instead of its id.
    pub(crate) async fn park_unclaimable(
        &self,
        admission: &Admission,
        generation: i64,
        message: &Message,
        failure: &Failure,
    ) -> Result<ClaimOutcome, InboxError> {
        let parked = parking::unclaimable(message, self.sessions.payload_key(), failure);
        let claims = self
            .store_together(
                admission,
                generation,
                std::slice::from_ref(&parked),
                InitialStatus::Parked,
            )
            .await
            .map_err(Abort::into_host_error)?;
        claims
            .into_iter()
            .next()
            .ok_or_else(|| InboxError::Invalid("a claim of one message had no answer".to_owned()))
    }

    /// Stores messages that do not run yet, in a transaction of their own. Where PostgreSQL refuses
    /// the row of one of them, each gets its own transaction.
    pub(crate) async fn store(
        &self,
        admission: &Admission,
        generation: i64,
        requests: &[ClaimRequest],
        status: InitialStatus,
    ) -> Result<Vec<ClaimOutcome>, InboxError> {
        match self.store_together(admission, generation, requests, status).await {
            Err(Abort::AtClaim { .. }) => {}
            answer => return answer.map_err(Abort::into_host_error),
        }
        let mut claims = Vec::with_capacity(requests.len());
        for one in requests {
            match self
                .store_together(admission, generation, std::slice::from_ref(one), status)
                .await
            {
                Err(Abort::AtClaim { failure }) => claims.push(
                    self.park_unclaimable(admission, generation, &one.message, &failure).await?,
                ),
                answer => claims.extend(answer.map_err(Abort::into_host_error)?),
            }
        }
        Ok(claims)
    }

    /// Stores messages in one transaction, in the state that `status` names. New messages to be run
    /// wake the retry workers after the commit.
    async fn store_together(
        &self,
        admission: &Admission,
        generation: i64,
        requests: &[ClaimRequest],
        status: InitialStatus,
    ) -> Result<Vec<ClaimOutcome>, Abort> {
        let transaction = self.sessions.begin_admitted(admission).await?;
        let claims = match claim(
            &transaction,
            Claimant { is_front: true, ..self.claimant(generation) },
            &requests.iter().collect::<Vec<_>>(),
            status,
        )
        .await
        {
            Ok(claims) => claims,
            Err(error) => return rollback(transaction, at_claim(error)).await,
        };
        // `no_route` of the policy may skip or reject a message instead of parking it.
        if status == InitialStatus::Parked
            && let Err(error) = self.settle_unrouted(&transaction, requests, &claims).await
        {
            return rollback(transaction, Abort::Host(error)).await;
        }
        hooks::point("inbox:park:before");
        commit(transaction, Abort::Host).await?;
        hooks::point("inbox:park:after");
        match status {
            InitialStatus::Received => self.wakeup.now(),
            InitialStatus::Parked => {
                let kept = requests
                    .iter()
                    .zip(&claims)
                    .filter(|(_, claimed)| **claimed == ClaimOutcome::New);
                kept.for_each(|(request, _)| self.count_kept(request));
            }
            InitialStatus::Completed => {}
        }
        Ok(claims)
    }
}
