//! Parking the records and messages at the front of a batch that cannot be handled.

use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    policy::Collision,
};

use super::{PartitionInbox, parking, route::Route};
use crate::{
    admission::Admission,
    batch::claim::{ClaimOutcome, ClaimRequest, InitialStatus},
};

impl PartitionInbox {
    /// Parks all records at the front that are to be parked, and returns how many they are.
    pub(super) async fn park_front(
        &mut self,
        admission: &Admission,
        generation: i64,
        routes: &[Route],
    ) -> Result<usize, InboxError> {
        let parked: Vec<_> = routes
            .iter()
            .map_while(|route| match route {
                Route::Park(offered) => Some(offered.clone()),
                Route::Run(_) => None,
            })
            .collect();
        if !hooks::sabotage(Defect::UndecodableDropped) {
            self.park(admission, generation, &parked).await?;
        }
        Ok(parked.len())
    }

    /// Parks messages for an operator. A message whose id belongs to another payload is parked
    /// under an id of its own. Each delivery is counted by the claim of the row that keeps it.
    pub(super) async fn park(
        &mut self,
        admission: &Admission,
        generation: i64,
        parked: &[ClaimRequest],
    ) -> Result<(), InboxError> {
        let claims =
            self.consumer.store(admission, generation, parked, InitialStatus::Parked).await?;
        let claimed = parked.iter().map(|request| &request.message).zip(&claims);
        self.position.claimed(admission.turn(), claimed);
        self.made_progress |= claims.iter().any(ClaimOutcome::is_ours);
        let mut collisions = Vec::new();
        for (ClaimRequest { message, .. }, claimed) in parked.iter().zip(&claims) {
            if !parking::is_collision(&parked[0]) && self.collides(claimed) {
                collisions.push(parking::collision(message));
            } else {
                self.consumer.count_claim(message, claimed);
            }
        }
        if collisions.is_empty() {
            return Ok(());
        }
        Box::pin(self.park(admission, generation, &collisions)).await
    }

    /// Returns whether a message came with a known id and another payload. Such a message is no
    /// duplicate and must not be lost.
    pub(super) fn collides(&self, claimed: &ClaimOutcome) -> bool {
        let is_kept = self.consumer.policy.collision() != Collision::Ignore
            && !hooks::sabotage(Defect::CollisionsDropped);
        is_kept && matches!(claimed, ClaimOutcome::Duplicate { same_payload: false, .. })
    }
}
