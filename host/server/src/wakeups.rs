//! What wakes the parts of a host that rest, and what lets them rest again: one task for all
//! consumers.

use std::{sync::Arc, time::Duration};

use oncebox_inbox::{Budget, Lookout};
use tokio_util::sync::CancellationToken;

/// How long a tenant's connection may be unused before it is closed.
const UNUSED: Duration = Duration::from_secs(30);
/// How often unused connections are looked for.
const SWEEP: Duration = Duration::from_secs(5);

/// Tell retry workers what is due, and close connections that nobody uses, until told to stop.
pub(crate) async fn run(lookout: Arc<Lookout>, budget: Arc<Budget>, stop: CancellationToken) {
    let sweeping = async {
        loop {
            tokio::time::sleep(SWEEP).await;
            budget.close_unused(UNUSED).await;
            metrics::gauge!("oncebox_database_connections").set(budget.in_use() as f64);
        }
    };
    tokio::select! {
        () = lookout.run(stop.clone()) => {}
        () = sweeping => {}
    }
}
