//! Tenants that are being deleted. Any living host carries a deletion on, since the process that
//! began it may be gone.

use std::time::Duration;

use oncebox_control::Control;
use oncebox_model::InboxError;

/// Pause between two searches for tenants that are being deleted.
const LOOK: Duration = Duration::from_secs(5);

/// Carries on deletions of tenants, until this future is dropped. Every step may be interrupted and
/// done again.
pub(crate) async fn carry_on(control: Control) {
    let control = control.acting_as("oncebox");
    loop {
        tokio::time::sleep(LOOK).await;
        if let Err(error) = look(&control).await {
            tracing::debug!(%error, "tenants that are being deleted are not known");
        }
    }
}

async fn look(control: &Control) -> Result<(), InboxError> {
    for tenant in control.tenants().being_deleted().await? {
        if let Err(error) = control.tenants().remove(&tenant).await {
            tracing::warn!(tenant = tenant.name, %error, "a tenant is not deleted yet; it is tried \
                again");
        }
    }
    Ok(())
}
