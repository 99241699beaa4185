//! The databases of tenants outside the host's: kept up to date, with the state that the host's database
//! holds.
//!
//! All of it is done beside the supervisor's loop, in a task for each tenant. A database that is
//! unavailable delays the tenants in it only.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use oncebox_control::{Control, SourceVersion};
use oncebox_model::InboxError;
use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinSet},
    time::Instant,
};

use crate::error_text;

/// Pause between two polls of the host's database for changes.
const POLL: Duration = Duration::from_millis(500);
/// Pause between two checks of a tenant's database without a change: it may have been altered from
/// outside.
const LOOK: Duration = Duration::from_secs(60);
/// Pause between two full preparations of a tenant's database, which also make its partitions ahead
/// of time.
const PREPARE: Duration = Duration::from_secs(600);
/// Longest pause after a check that failed.
const AGAIN_MAX: Duration = Duration::from_secs(15);
/// Most tenants of one database that are checked at a time.
const AT_ONCE: usize = 8;

/// This host's knowledge of a tenant's database.
struct KnownDatabase {
    state: String,
    look_due: Instant,
    prepare_due: Instant,
    failures: u32,
    is_busy: bool,
}

/// A finished check: the tenant with the state it had to bring there, whether it was a full
/// preparation, and its result.
type CheckedDatabase = (SourceVersion, bool, Result<(), InboxError>);

/// Keeps the tenants' databases up to date until aborted. Another host's next check repeats work
/// that was interrupted.
pub(crate) async fn keep(control: Control) {
    let mut known: HashMap<String, KnownDatabase> = HashMap::new();
    let mut checks: JoinSet<CheckedDatabase> = JoinSet::new();
    let mut turns: HashMap<String, Arc<Semaphore>> = HashMap::new();
    loop {
        match control.tenant_databases().dedicated_tenants().await {
            Ok(dedicated) => begin(&control, &mut known, &mut checks, &mut turns, dedicated),
            Err(error) => tracing::debug!(%error, "the tenants' own databases are not known"),
        }
        let poll = Instant::now() + POLL;
        while let Ok(Some(checked)) = tokio::time::timeout_at(poll, checks.join_next()).await {
            end(&mut known, checked);
        }
        tokio::time::sleep_until(poll).await;
    }
}

/// Begins the checks that are due.
fn begin(
    control: &Control,
    known: &mut HashMap<String, KnownDatabase>,
    checks: &mut JoinSet<CheckedDatabase>,
    turns: &mut HashMap<String, Arc<Semaphore>>,
    dedicated: Vec<SourceVersion>,
) {
    let now = Instant::now();
    let present: HashSet<&str> = dedicated.iter().map(|source| source.tenant.as_str()).collect();
    known.retain(|tenant, _| present.contains(tenant.as_str()));
    turns.retain(|_, turns| Arc::strong_count(turns) > 1);
    for source in dedicated {
        let of = known.entry(source.tenant.clone()).or_insert_with(|| KnownDatabase::new(now));
        let has_changed = of.failures == 0 && of.state != source.state;
        if of.is_busy || (!has_changed && of.look_due > now) {
            continue;
        }
        of.is_busy = true;
        let from_the_ground = of.prepare_due <= now;
        let new = || Arc::new(Semaphore::new(AT_ONCE));
        let turns = turns.entry(source.database.clone()).or_insert_with(new).clone();
        let control = control.clone();
        checks.spawn(async move {
            let _permit = turns.acquire_owned().await;
            let checked = look(&control, &source.tenant, from_the_ground).await;
            (source, from_the_ground, checked)
        });
    }
}

async fn look(control: &Control, tenant: &str, from_the_ground: bool) -> Result<(), InboxError> {
    let tenant = match control.tenants().get(tenant).await {
        Err(InboxError::NotFound(_)) => return Ok(()), // deleted meanwhile
        tenant => tenant?,
    };
    // A tenant that is being deleted gets no full preparation.
    if from_the_ground && !tenant.state.is_deleting() {
        control.tenant_databases().prepare(&tenant).await
    } else {
        control.tenant_databases().replicate(&tenant).await
    }
}

fn end(known: &mut HashMap<String, KnownDatabase>, checked: Result<CheckedDatabase, JoinError>) {
    let (source, from_the_ground, checked) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            // A bug of ours. No database counts as known any more, so all are checked again.
            tracing::error!(%error, "a look at a tenant's own database did not come to its end");
            return known.clear();
        }
    };
    let Some(of) = known.get_mut(&source.tenant) else { return };
    of.is_busy = false;
    let is_there = checked.is_ok();
    metrics::gauge!("oncebox_tenant_database_up", "tenant" => source.tenant.clone())
        .set(if is_there { 1.0 } else { 0.0 });
    match checked {
        Ok(()) => of.succeeded(source, from_the_ground),
        Err(error) => of.failed(&source.tenant, &error.into()),
    }
}

impl KnownDatabase {
    fn new(now: Instant) -> Self {
        Self { state: String::new(), look_due: now, prepare_due: now, failures: 0, is_busy: false }
    }

    fn succeeded(&mut self, source: SourceVersion, from_the_ground: bool) {
        if self.failures > 0 {
            tracing::info!(tenant = source.tenant, "the tenant's own database is in order again");
        }
        let now = Instant::now();
        (self.state, self.failures, self.look_due) = (source.state, 0, now + LOOK);
        if from_the_ground {
            self.prepare_due = now + PREPARE;
        }
    }

    fn failed(&mut self, tenant: &str, error: &anyhow::Error) {
        self.failures += 1;
        let pause = (POLL * 2_u32.saturating_pow(self.failures - 1)).min(AGAIN_MAX);
        let now = Instant::now();
        (self.look_due, self.prepare_due) = (now + pause, now);
        let error = error_text::one_line(error);
        if self.failures == 1 {
            tracing::warn!(
                tenant,
                error,
                "the tenant's own database is not in order; it is checked again and again"
            );
        } else {
            tracing::debug!(
                tenant,
                error,
                pause_ms = pause.as_millis() as u64,
                "the tenant's own database is still not in order"
            );
        }
    }
}
