//! The replays of paused consumers whose tenants named databases of their own.
//!
//! A paused consumer is started for its replay. The row of the replay is in the database with the
//! inbox, and the supervisor's loop waits for no tenant's database. So a task beside it looks there,
//! only for tenants with a paused consumer, and tells the loop where it finds a change.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_control::{Control, DesiredState};
use oncebox_model::status::ConsumerState;
use tokio::{sync::Notify, task::JoinHandle, time::Instant};

/// Pause between two looks into a tenant's database.
const EVERY: Duration = Duration::from_secs(1);

/// The replays that run for paused consumers, by tenant.
#[derive(Default, Clone)]
pub(crate) struct OwnReplays(Arc<Mutex<HashMap<i32, KnownReplays>>>);

/// The replays that the last look into a tenant's database found.
#[derive(Default)]
struct KnownReplays {
    /// Consumers with a replay that is to run.
    consumers: BTreeSet<i32>,
    /// Time of the last look; none before the first.
    looked_at: Option<Instant>,
    /// The last look, which may be under way.
    look: Option<JoinHandle<()>>,
}

/// The paused consumers of a tenant.
struct PausedConsumers {
    tenant_id: i32,
    tenant: String,
    consumers: Vec<i32>,
}

impl OwnReplays {
    /// Marks the paused consumers with a replay that is to run, and begins the looks that are due.
    /// Waits for none of them; a look that finds a change notifies `changed`.
    pub(crate) fn mark(
        &self,
        control: &Control,
        changed: &Arc<Notify>,
        desired_states: &mut [DesiredState],
    ) {
        let paused = paused(desired_states);
        let mut known = self.known();
        known.retain(|tenant_id, _| paused.contains_key(tenant_id));
        for of in paused.into_values() {
            let replays = known.entry(of.tenant_id).or_default();
            if replays.is_due(Instant::now()) {
                replays.looked_at = Some(Instant::now());
                let look = self.clone().look(control.clone(), changed.clone(), of);
                replays.look = Some(tokio::spawn(look));
            }
        }
        for desired in desired_states.iter_mut().filter(|desired| is_asked(desired)) {
            let replays = known.get(&desired.tenant_id);
            desired.is_replayed =
                replays.is_some_and(|replays| replays.consumers.contains(&desired.consumer_id));
        }
    }

    /// Looks into a tenant's database. What was found before stays where it does not answer.
    async fn look(self, control: Control, changed: Arc<Notify>, of: PausedConsumers) {
        let PausedConsumers { tenant_id, tenant, consumers } = of;
        let found = match control.reconciliation().replayed_in_own(&tenant, &consumers).await {
            Ok(found) => BTreeSet::from_iter(found),
            Err(error) => {
                tracing::debug!(tenant, %error, "the replays of paused consumers are not known");
                return;
            }
        };
        if self.found(tenant_id, found) {
            changed.notify_one();
        }
    }

    /// Keeps what a look found. Returns whether it is a change.
    fn found(&self, tenant_id: i32, found: BTreeSet<i32>) -> bool {
        let mut known = self.known();
        // A tenant without a paused consumer by now is not asked for any more.
        let Some(replays) = known.get_mut(&tenant_id) else { return false };
        let is_change = replays.consumers != found;
        replays.consumers = found;
        is_change
    }

    fn known(&self) -> MutexGuard<'_, HashMap<i32, KnownReplays>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownReplays {
    /// Returns whether the next look is due. One that takes long is waited for.
    fn is_due(&self, now: Instant) -> bool {
        let is_idle = self.look.as_ref().is_none_or(JoinHandle::is_finished);
        is_idle && self.looked_at.is_none_or(|at| now.duration_since(at) >= EVERY)
    }
}

/// Returns whether a consumer's replay decides about its run, and is in a database of its tenant's
/// own.
fn is_asked(desired: &DesiredState) -> bool {
    desired.has_own_database
        && desired.state == ConsumerState::Paused
        && desired.tenant_state.is_active()
}

/// Returns the consumers that are asked for, by tenant.
fn paused(desired_states: &[DesiredState]) -> HashMap<i32, PausedConsumers> {
    let mut paused: HashMap<i32, PausedConsumers> = HashMap::new();
    for desired in desired_states.iter().filter(|desired| is_asked(desired)) {
        let of = paused.entry(desired.tenant_id).or_insert_with(|| PausedConsumers {
            tenant_id: desired.tenant_id,
            tenant: desired.tenant.clone(),
            consumers: Vec::new(),
        });
        of.consumers.push(desired.consumer_id);
    }
    paused
}

#[cfg(test)]
mod tests {
    use oncebox_control::RunMode;
    use oncebox_model::status::TenantState;

    use super::*;

    fn desired(consumer_id: i32, state: ConsumerState, has_own_database: bool) -> DesiredState {
        DesiredState {
            consumer_id,
            tenant_id: 7,
            tenant: "acme".to_owned(),
            name: format!("c{consumer_id}"),
            state,
            revision: 1,
            generation: 1,
            is_sought: false,
            is_replayed: false,
            has_own_database,
            tenant_state: TenantState::Active,
            tenant_revision: 1,
            quarantine: None,
        }
    }

    // What could go wrong: hosts ask the databases of tenants that have nothing paused, or a paused
    // consumer of the host's database loses the mark that its row gave it.
    #[test]
    fn only_paused_consumers_of_own_databases_are_asked_for() {
        let all = [
            desired(1, ConsumerState::Paused, true),
            desired(2, ConsumerState::Running, true),
            desired(3, ConsumerState::Paused, false),
            desired(4, ConsumerState::Paused, true),
        ];
        let of = paused(&all);
        assert_eq!(of.len(), 1);
        assert_eq!(of[&7].consumers, [1, 4]);
        let replayed =
            DesiredState { is_replayed: true, ..desired(3, ConsumerState::Paused, false) };
        assert!(!is_asked(&replayed) && replayed.run_mode() == RunMode::ReplayOnly);
    }

    // What could go wrong: a look brings back a tenant that nobody asks for, or the loop is told
    // again and again.
    #[test]
    fn a_change_is_told_once() {
        let replays = OwnReplays::default();
        assert!(!replays.found(7, BTreeSet::from([1])));
        replays.known().insert(7, KnownReplays::default());
        assert!(replays.found(7, BTreeSet::from([1])));
        assert!(!replays.found(7, BTreeSet::from([1])));
        assert!(replays.found(7, BTreeSet::new()));
    }
}
