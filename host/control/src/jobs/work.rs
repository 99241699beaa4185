//! A turn of a process on a job.

use std::time::Duration;

use oncebox_model::error::InboxError;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    lease::{JobLeft, LeasedJob},
    page::JobStep,
};
use crate::handles::Jobs;

/// Longest turn. Then the next job has its own.
const TURN: Duration = Duration::from_secs(2);

impl Jobs<'_> {
    /// Works on a leased job until it is over, its turn is up, or `stop` is cancelled, and gives
    /// the lease back where it is not over.
    pub async fn work(&self, mut job: LeasedJob, stop: &CancellationToken) {
        let until = Instant::now() + TURN;
        let left = loop {
            if stop.is_cancelled() || Instant::now() >= until {
                break JobLeft::Free;
            }
            match self.step(&mut job).await {
                Ok(JobStep::Next(pause)) => {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = sleep(pause) => {}
                    }
                }
                Ok(JobStep::Done) => {
                    let LeasedJob { job_id, tenant, changed, .. } = &job;
                    tracing::info!(job = job_id, tenant, messages = changed, "job done");
                    return;
                }
                Ok(JobStep::Lost) => return,
                Err(error) => break failed(&job, &error),
            }
        };
        if let Err(error) = self.leave(&job, &left).await {
            // Its lease runs out.
            tracing::debug!(job = job.job_id, tenant = job.tenant, %error, "lease not given back");
        }
    }
}

/// Logs a page that was rolled back, and returns what becomes of the job.
fn failed(job: &LeasedJob, error: &InboxError) -> JobLeft {
    let LeasedJob { job_id, tenant, .. } = job;
    tracing::warn!(job = job_id, tenant, %error, "a page of a job failed");
    match error {
        InboxError::Invalid(_) | InboxError::NotFound(_) => JobLeft::Paused(error.to_string()),
        _ => JobLeft::Failed(error.to_string()),
    }
}
