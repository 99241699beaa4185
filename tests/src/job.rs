//! Jobs that a test starts and carries out itself, as a host does.

use std::time::Duration;

use anyhow::{Result, ensure};
use oncebox_control::{Action, Control, Job, JobAction, JobFilter, NewJob, OutgoingAction};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// A job on messages of a consumer's inbox.
pub fn inbox_job(action: Action, consumer: &str, filter: JobFilter) -> NewJob {
    NewJob {
        action: JobAction::Inbox(action),
        consumer: Some(consumer.to_owned()),
        filter,
        reason: "a test".to_owned(),
        rate: None,
    }
}

/// A job on outgoing messages of every consumer.
pub fn outgoing_job(action: OutgoingAction, filter: JobFilter) -> NewJob {
    NewJob {
        action: JobAction::Outgoing(action),
        consumer: None,
        filter,
        reason: "a test".to_owned(),
        rate: None,
    }
}

/// The filter of these ids.
pub fn these(ids: &[&str]) -> JobFilter {
    let ids = ids.iter().map(|id| (*id).to_owned()).collect();
    JobFilter { ids: Some(ids), ..JobFilter::default() }
}

/// The filter of a reason.
pub fn of_reason(reason: &str) -> JobFilter {
    JobFilter { reason: Some(reason.to_owned()), ..JobFilter::default() }
}

/// Starts a job and works on it until it is over.
pub async fn carry_out(control: &Control, tenant: &str, new: &NewJob) -> Result<Job> {
    let job = control.jobs().start(tenant, new).await?;
    work_off(control, tenant, job.job_id).await
}

/// Works on a job until it is over, or waits for the host that does.
pub async fn work_off(control: &Control, tenant: &str, job_id: i64) -> Result<Job> {
    let jobs = control.jobs();
    let database = control.tenant_databases().get(&control.tenants().get(tenant).await?)?;
    let began = Instant::now();
    loop {
        let job = jobs.show(tenant, job_id).await?;
        if job.state != "running" {
            ensure!(job.state == "done", "{job:?}");
            return Ok(job);
        }
        ensure!(began.elapsed() < Duration::from_secs(300), "never over: {job:?}");
        match jobs.lease(&database, "a test", Some(job_id)).await? {
            Some(leased) => drop(jobs.work(leased, &CancellationToken::new()).await),
            None => sleep(Duration::from_millis(20)).await,
        }
    }
}
