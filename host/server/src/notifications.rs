//! Notifications of deployments. Each is only a hint: a host that misses one finds the change with
//! its next poll.

use std::{sync::Arc, time::Duration};

use oncebox_control::{CHANNEL, Control};
use sqlx::postgres::PgListener;
use tokio::sync::Notify;

/// Pause before a listener that failed is started again.
const TROUBLE: Duration = Duration::from_secs(1);

/// Forwards notifications of deployments to `notify`, until this future is dropped.
pub(crate) async fn listen(control: Control, notify: Arc<Notify>) {
    loop {
        if let Err(error) = listen_once(&control, &notify).await {
            tracing::debug!(%error, "nobody tells of deployments for now");
        }
        tokio::time::sleep(TROUBLE).await;
    }
}

async fn listen_once(control: &Control, notify: &Notify) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(&control.pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        listener.recv().await?;
        notify.notify_one();
    }
}
