//! Tenants that are being moved to another database. Any living host carries a move on, since the
//! one that worked on it may be gone.

use std::time::Duration;

use oncebox_control::{Control, Tenant};

use crate::tenants::by_database::DatabaseTasks;

/// Pause between two searches for tenants that are being moved.
const LOOK: Duration = Duration::from_secs(1);

/// Pause after a try that failed.
const AGAIN: Duration = Duration::from_secs(3);

/// Carries on moves of tenants, until this future is dropped. Every step may be interrupted and
/// done again.
pub(crate) async fn carry_on(control: Control) {
    let mut tasks = DatabaseTasks::default();
    loop {
        tokio::time::sleep(LOOK).await;
        match control.tenants().being_moved().await {
            Ok(tenants) => {
                let control = control.clone();
                tasks.begin(tenants, move |tenant| carry(control.clone(), tenant));
            }
            Err(error) => tracing::debug!(%error, "tenants that are being moved are not known"),
        }
    }
}

async fn carry(control: Control, tenant: Tenant) {
    if let Err(error) = control.tenants().carry_move(&tenant).await {
        tracing::warn!(tenant = tenant.name, %error, "the move of a tenant is not over yet; it is \
            tried again");
        tokio::time::sleep(AGAIN).await;
    }
}
