//! The sessions of each tenant, shared by its consumers for as long as one of them runs.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use anyhow::Result;
use oncebox_inbox::{Sessions, Tenant};

use crate::supervisor::Supervisor;

/// By tenant: the revision that they were made for, and the sessions.
#[derive(Default)]
pub(crate) struct TenantSessions(Mutex<HashMap<i32, (i64, Weak<Sessions>)>>);

impl TenantSessions {
    /// The sessions of a tenant as its row is: with other credentials or limits they are made anew.
    pub(crate) fn of(&self, host: &Supervisor, tenant: &Tenant) -> Result<Arc<Sessions>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (_, sessions)| sessions.strong_count() > 0);
        if let Some((revision, sessions)) = known.get(&tenant.tenant_id)
            && *revision == tenant.revision
            && let Some(sessions) = sessions.upgrade()
        {
            return Ok(sessions);
        }
        let sessions = Sessions::of(&host.admin, tenant, &host.settings, host.budget.clone())?;
        known.insert(tenant.tenant_id, (tenant.revision, Arc::downgrade(&sessions)));
        Ok(sessions)
    }
}
