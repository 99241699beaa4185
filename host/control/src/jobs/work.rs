//! A turn of a process on a job.

use std::time::Duration;

use oncebox_model::error::InboxError;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    lease::{AGAIN, JobLeft, LeasedJob},
    page::JobStep,
};
use crate::handles::Jobs;

/// Longest turn. Then the next job has its own.
const TURN: Duration = Duration::from_secs(2);
/// Longest wait for a page, and for the end of a turn. Both are over before the lease is.
const PAGE_TIME: Duration = Duration::from_secs(20);
const LEAVE_TIME: Duration = Duration::from_secs(5);

impl Jobs<'_> {
    /// Works on a leased job until it is over or waits, its turn is up, or `stop` is cancelled, and
    /// gives the lease back where it is not over. Returns the pause after which it goes on; none
    /// where it is over, or another process's.
    pub async fn work(&self, mut job: LeasedJob, stop: &CancellationToken) -> Option<Duration> {
        let until = Instant::now() + TURN;
        let left = loop {
            if stop.is_cancelled() || Instant::now() >= until {
                break JobLeft::Until(Duration::ZERO);
            }
            match timeout(PAGE_TIME, self.step(&mut job)).await {
                Ok(Ok(JobStep::Next(Duration::ZERO))) => {}
                Ok(Ok(JobStep::Next(pause))) => break JobLeft::Until(pause),
                Ok(Ok(JobStep::Done)) => {
                    let LeasedJob { job_id, tenant, changed, .. } = &job;
                    tracing::info!(job = job_id, tenant, messages = changed, "job done");
                    return None;
                }
                Ok(Ok(JobStep::Lost)) => return None,
                Ok(Err(error)) => break failed(&job, &error),
                Err(_) => break failed(&job, &silent()),
            }
        };
        let given_back = timeout(LEAVE_TIME, self.leave(&job, &left)).await;
        if let Err(error) = given_back.unwrap_or_else(|_| Err(silent())) {
            // Its lease runs out.
            tracing::debug!(job = job.job_id, tenant = job.tenant, %error, "lease not given back");
        }
        match left {
            JobLeft::Until(pause) => Some(pause),
            JobLeft::Failed(_) => Some(AGAIN),
            JobLeft::Paused(_) => None,
        }
    }
}

/// Logs a page that was rolled back, and returns what becomes of the job.
fn failed(job: &LeasedJob, error: &InboxError) -> JobLeft {
    let LeasedJob { job_id, tenant, .. } = job;
    tracing::warn!(job = job_id, tenant, %error, "a page of a job failed");
    JobLeft::of_error(error)
}

/// Returns the error of a database that does not answer.
fn silent() -> InboxError {
    InboxError::Unreachable(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))
}
