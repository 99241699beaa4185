//! The sessions of each tenant, shared by its consumers for as long as one of them runs.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use anyhow::Result;
use oncebox_control::{Control, DesiredState, Tenant};
use oncebox_inbox::Sessions;
use oncebox_model::InboxError;

use crate::{context::HostContext, tenants::budgets::Budgets};

/// The sessions by tenant, also those of earlier revisions that are still in use.
#[derive(Default)]
pub(crate) struct TenantSessions(Mutex<HashMap<i32, Vec<KnownSessions>>>);

struct KnownSessions {
    /// The tenant's revision that they were made for.
    made_for: i64,
    /// The revision whose credentials they log in with.
    renewed_for: i64,
    sessions: Weak<Sessions>,
}

impl TenantSessions {
    /// Returns the sessions of a tenant at its row's revision. It makes new ones after a change.
    pub(crate) fn of(&self, host: &HostContext, tenant: &Tenant) -> Result<Arc<Sessions>> {
        let mut known = self.known();
        known.retain(|tenant_id, known| {
            known.retain(|known| known.sessions.strong_count() > 0);
            if known.is_empty() {
                host.budgets.forget(*tenant_id);
            }
            !known.is_empty()
        });
        let known = known.entry(tenant.tenant_id).or_default();
        if let Some(sessions) = known
            .iter()
            .find(|known| known.made_for == tenant.revision)
            .and_then(|known| known.sessions.upgrade())
        {
            return Ok(sessions);
        }
        let sessions = Sessions::of(
            host.control.tenant_databases().session_target(tenant)?,
            &host.settings,
            host.budgets.of_tenant(tenant).clone(),
        );
        known.push(KnownSessions {
            made_for: tenant.revision,
            renewed_for: tenant.revision,
            sessions: Arc::downgrade(&sessions),
        });
        Ok(sessions)
    }

    /// Gives running sessions the present credentials, and the scheduler the present limits. After
    /// a change, consumers that are stopping still need connections. Waiting transactions are
    /// admitted by the present limits.
    pub(crate) async fn renew(
        &self,
        control: &Control,
        budgets: &Budgets,
        desired_states: &[DesiredState],
    ) -> Result<(), InboxError> {
        for desired in desired_states.iter().filter(|desired| self.are_behind(desired)) {
            let tenant = match control.tenants().get(&desired.tenant).await {
                Err(InboxError::NotFound(_)) => continue,
                tenant => tenant?,
            };
            budgets.of_tenant(&tenant).scheduler().set_limits(
                tenant.tenant_id,
                tenant.revision,
                &tenant.name,
                &tenant.limits,
            );
            // A failure for one tenant must not stop the others.
            match control.tenant_databases().credentials(&tenant) {
                Ok(credentials) => self.renewed(&tenant, |sessions| {
                    sessions.renew(&credentials.guest_password, credentials.secret);
                }),
                Err(error) => {
                    tracing::error!(tenant = tenant.name, %error, "sessions go on with the \
                        credentials before");
                    self.renewed(&tenant, |_| {});
                }
            }
        }
        Ok(())
    }

    fn are_behind(&self, desired: &DesiredState) -> bool {
        self.known()
            .get(&desired.tenant_id)
            .into_iter()
            .flatten()
            .any(|known| known.renewed_for < desired.tenant_revision)
    }

    fn renewed(&self, tenant: &Tenant, renew: impl Fn(&Sessions)) {
        for known in self.known().get_mut(&tenant.tenant_id).into_iter().flatten() {
            if let Some(sessions) = known.sessions.upgrade() {
                renew(&sessions);
            }
            known.renewed_for = tenant.revision;
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<i32, Vec<KnownSessions>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
