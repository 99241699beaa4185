//! Tenants that are being deleted. Any living host carries a deletion on, since the process that
//! began it may be gone.

use std::time::Duration;

use oncebox_control::Control;
use oncebox_model::InboxError;

/// Pause between two searches for tenants that are being deleted.
const LOOK: Duration = Duration::from_secs(5);

/// Carries on deletions of tenants, until this future is dropped. Every step may be interrupted and
/// done again.
pub(crate) async fn carry_on(admin: Control) {
    let admin = admin.acting_as("oncebox");
    loop {
        tokio::time::sleep(LOOK).await;
        if let Err(error) = look(&admin).await {
            tracing::debug!(%error, "tenants that are being deleted are not known");
        }
    }
}

async fn look(admin: &Control) -> Result<(), InboxError> {
    for tenant in admin.tenants().being_deleted().await? {
        if let Err(error) = admin.tenants().remove(&tenant).await {
            tracing::warn!(tenant = tenant.name, %error, "a tenant is not deleted yet; it is tried \
                again");
        }
    }
    Ok(())
}
