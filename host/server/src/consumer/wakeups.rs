//! One task for all consumers of a host, which wakes retry workers and closes unused connections.

use std::{sync::Arc, time::Duration};

use oncebox_inbox::DuePoller;
use tokio_util::sync::CancellationToken;

use crate::tenants::budgets::Budgets;

/// Longest time that a tenant's connection stays unused before it is closed.
const UNUSED: Duration = Duration::from_secs(30);
/// Pause between two searches for unused connections.
const SWEEP: Duration = Duration::from_secs(5);

/// Notifies retry workers of due messages, and closes unused connections, until told to stop.
pub(crate) async fn run(
    due_poller: Arc<DuePoller>,
    budgets: Arc<Budgets>,
    stop: CancellationToken,
) {
    let sweeping = async {
        loop {
            tokio::time::sleep(SWEEP).await;
            budgets.close_unused(UNUSED).await;
        }
    };
    tokio::select! {
        () = due_poller.run(stop.clone()) => {}
        () = sweeping => {}
    }
}
