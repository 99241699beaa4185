//! Notifications of deployments and jobs. Each is only a hint: a host that misses one finds the
//! change with its next poll.

use std::{sync::Arc, time::Duration};

use oncebox_control::{CHANNEL, Control, JOB_NOTE};
use sqlx::postgres::PgListener;
use tokio::sync::Notify;

use crate::jobs::JobNotes;

/// Pause before a listener that failed is started again.
const TROUBLE: Duration = Duration::from_secs(1);

/// Forwards notifications of deployments to `notify`, and those of jobs to `jobs`, until this future
/// is dropped.
pub(crate) async fn listen(control: Control, notify: Arc<Notify>, jobs: Arc<JobNotes>) {
    loop {
        if let Err(error) = listen_once(&control, &notify, &jobs).await {
            tracing::debug!(%error, "nobody tells of deployments and jobs for now");
        }
        tokio::time::sleep(TROUBLE).await;
    }
}

async fn listen_once(
    control: &Control,
    notify: &Notify,
    jobs: &JobNotes,
) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(&control.pool).await?;
    listener.listen(CHANNEL).await?;
    loop {
        match listener.recv().await?.payload().strip_prefix(JOB_NOTE) {
            Some(database) => jobs.add(database),
            None => notify.notify_one(),
        }
    }
}
