//! Tenants that are being deleted. Any living host carries a deletion on, since the process that
//! began it may be gone.

use std::time::Duration;

use oncebox_control::{Control, Tenant};

use crate::tenants::by_database::DatabaseTasks;

/// Pause between two searches for tenants that are being deleted.
const LOOK: Duration = Duration::from_secs(5);

/// Carries on deletions of tenants, until this future is dropped. Every step may be interrupted and
/// done again.
pub(crate) async fn carry_on(control: Control) {
    let control = control.acting_as("oncebox");
    let mut tasks = DatabaseTasks::default();
    loop {
        tokio::time::sleep(LOOK).await;
        match control.tenants().being_deleted().await {
            Ok(tenants) => {
                let control = control.clone();
                tasks.begin(tenants, move |tenant| remove(control.clone(), tenant));
            }
            Err(error) => tracing::debug!(%error, "tenants that are being deleted are not known"),
        }
    }
}

async fn remove(control: Control, tenant: Tenant) {
    if let Err(error) = control.tenants().remove(&tenant).await {
        tracing::warn!(tenant = tenant.name, %error, "a tenant is not deleted yet; it is tried \
            again");
    }
}
