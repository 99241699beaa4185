//! Retention on this host: it removes the time partitions that are due, and measures what is due
//! and what was removed. Any host does all of it; a lock in each database keeps them apart.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oncebox_control::{
    ArchiveTotal, Control, DatabaseLabel, Forgotten, InboxDatabase, OtherProcess, RetentionBacklog,
    RetentionResult,
};
use oncebox_model::{InboxError, MessageStatus};
use tokio::{sync::Semaphore, task::JoinSet, time::sleep};

use crate::{
    config::{DailyWindow, RetentionSettings},
    context::answered,
};

/// Pause before the first run, so that a start is not slowed.
const FIRST: Duration = Duration::from_secs(10);
/// Pause between two looks at the clock while the window is closed.
const LOOK: Duration = Duration::from_secs(30);
/// Databases that are measured at a time.
const AT_ONCE: usize = 16;
/// Pause between two measurements.
const MEASURE: Duration = Duration::from_secs(60);

/// Removes and measures until aborted. Another run continues a removal that was interrupted at any
/// step.
pub(crate) async fn keep(control: Control, settings: RetentionSettings) {
    let has_failed = AtomicBool::new(false);
    let interval = Duration::from_millis(settings.interval_ms);
    let measure = measure(&control, interval, &has_failed);
    tokio::join!(remove(&control, &settings, &has_failed), measure);
}

/// Removes what is due, at every interval in which the window is open.
async fn remove(control: &Control, settings: &RetentionSettings, has_failed: &AtomicBool) {
    if !settings.enabled {
        return;
    }
    let interval = Duration::from_millis(settings.interval_ms);
    sleep(FIRST.min(interval)).await;
    loop {
        if !is_open(control, settings.window).await {
            sleep(LOOK.min(interval)).await;
            continue;
        }
        let RetentionResult { mut failed, .. } =
            control.retention().run_all(OtherProcess::Leave).await;
        failed.extend(control.retention().remove_outgoing(settings.outgoing_days).await.failed);
        has_failed.store(!failed.is_empty(), Ordering::Relaxed);
        if failed.is_empty()
            && let Ok(now) = control.now().await
        {
            metrics::gauge!("oncebox_retention_last_success_seconds").set(now.timestamp() as f64);
        }
        sleep(interval).await;
    }
}

/// Returns whether a run may begin, by the clock of the host's database.
async fn is_open(control: &Control, window: Option<DailyWindow>) -> bool {
    let Some(window) = window else { return true };
    match control.now().await {
        Ok(now) => window.contains(now),
        Err(error) => {
            tracing::debug!(%error, "the time of the database is not known");
            false
        }
    }
}

/// Sets the metrics from what the databases hold. One that does not answer is left out.
async fn measure(control: &Control, interval: Duration, has_failed: &AtomicBool) {
    sleep(FIRST.min(interval)).await;
    loop {
        match answered(control.tenant_databases().all()).await {
            Ok(databases) => {
                gauge(figures(control, databases).await, has_failed.load(Ordering::Relaxed));
            }
            Err(error) => tracing::debug!(%error, "the databases with an inbox are not known"),
        }
        sleep(MEASURE.min(interval)).await;
    }
}

/// Reads every database, sets the counters of their consumers, and returns the sum of what is to do.
async fn figures(control: &Control, databases: Vec<InboxDatabase>) -> RetentionBacklog {
    let (at_once, mut reads) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    for database in databases {
        let (control, at_once) = (control.clone(), at_once.clone());
        reads.spawn(async move {
            let _permit = at_once.acquire_owned().await;
            (database.label.clone(), read(&control, &database).await)
        });
    }
    let mut sum = RetentionBacklog::default();
    while let Some(read) = reads.join_next().await {
        match read {
            Ok((_, Ok((backlog, forgotten, archived)))) => {
                sum.due += backlog.due;
                sum.unfinished += backlog.unfinished;
                sum.failed += backlog.failed;
                forgotten.iter().for_each(count);
                archived.iter().for_each(count_archived);
            }
            Ok((DatabaseLabel { tenant, database }, Err(error))) => {
                tracing::debug!(tenant, database, %error, "retention not measured");
            }
            Err(error) => tracing::error!(%error, "retention not measured"),
        }
    }
    sum
}

async fn read(
    control: &Control,
    database: &InboxDatabase,
) -> Result<(RetentionBacklog, Vec<Forgotten>, Vec<ArchiveTotal>), InboxError> {
    let backlog = answered(control.retention().backlog(database)).await?;
    let forgotten = answered(control.retention().forgotten(database)).await?;
    Ok((backlog, forgotten, answered(control.archive().totals(database)).await?))
}

/// Sets the counters of a consumer. They count for the installation, whichever host removes.
fn count(forgotten: &Forgotten) {
    let Forgotten { tenant, consumer, completed, skipped, discarded } = forgotten;
    for (status, messages) in [
        (MessageStatus::Completed, completed),
        (MessageStatus::Skipped, skipped),
        (MessageStatus::Discarded, discarded),
    ] {
        metrics::counter!("oncebox_retention_removed_messages_total", "tenant" => tenant.clone(), "consumer" => consumer.clone(), "status" => status.as_str())
            .absolute(u64::try_from(*messages).unwrap_or(0));
    }
}

/// Sets the counters of a consumer's files in the archive. They count for the installation, too.
fn count_archived(total: &ArchiveTotal) {
    let ArchiveTotal { tenant, consumer, files, bytes } = total;
    metrics::counter!("oncebox_archive_files_total", "tenant" => tenant.clone(), "consumer" => consumer.clone())
        .absolute(u64::try_from(*files).unwrap_or(0));
    metrics::counter!("oncebox_archive_bytes_total", "tenant" => tenant.clone(), "consumer" => consumer.clone())
        .absolute(u64::try_from(*bytes).unwrap_or(0));
}

/// Sets the gauges of the sum over the databases.
fn gauge(backlog: RetentionBacklog, has_failed: bool) {
    let has_failed = has_failed || backlog.failed > 0;
    metrics::gauge!("oncebox_retention_due_partitions").set(backlog.due as f64);
    metrics::gauge!("oncebox_retention_unfinished_removals").set(backlog.unfinished as f64);
    metrics::gauge!("oncebox_retention_failed").set(if has_failed { 1.0 } else { 0.0 });
}
