//! Notifications of deployments. Only a hint that it is worth looking now: whoever misses one looks
//! a moment later by itself.

use std::{sync::Arc, time::Duration};

use oncebox_control::{Admin, CHANNEL};
use sqlx::postgres::PgListener;
use tokio::sync::Notify;

/// Pause before a listener that broke is started again.
const TROUBLE: Duration = Duration::from_secs(1);

/// Pass notifications on, until this is dropped.
pub(crate) async fn listen(admin: Admin, notify: Arc<Notify>) {
    loop {
        if let Err(error) = listen_once(&admin, &notify).await {
            tracing::debug!(%error, "nobody tells of deployments for now");
        }
        tokio::time::sleep(TROUBLE).await;
    }
}

async fn listen_once(admin: &Admin, notify: &Notify) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(&admin.pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        listener.recv().await?;
        notify.notify_one();
    }
}
