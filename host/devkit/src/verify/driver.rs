//! The real inbox without a broker: the caller hands over records and learns how many are settled.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use oncebox_control::{Control, MasterKey};
use oncebox_inbox::{Budget, ConsumerInbox, PartitionInbox, SessionSettings, Sessions, retry};
use oncebox_model::{
    MessageStatus,
    policy::{Ack, Policy},
    record::Record,
};
use oncebox_runtime::{Recorder, RuntimeConfig, WasmRuntime};
use oncebox_server::{compile::Compilations, consumer::loader::Loader};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    messages::{FileMessage, IDENTITY},
    scratch::{CONSUMER, TENANT},
};

/// The topic that records claim to come from.
const TOPIC: &str = "verify";
/// Longest time that errors may last, and that the last retry may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Waiting time above which a row is left waiting, because its handler asked for the delay.
const WAITS_ON_PURPOSE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// Settings of every run of a verification. A worker reads them as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// URL of the database.
    pub(crate) url: String,
    /// Master key of the database.
    pub(crate) key: String,
    /// Directory of compiled code.
    pub(crate) cache_dir: PathBuf,
    /// Path of the message file.
    pub(crate) messages: PathBuf,
    /// Point at which a record counts as settled.
    pub(crate) ack: Ack,
    /// Pause of the handler after each of its statements, milliseconds.
    pub(crate) pause_ms: u64,
    /// Partition that records come from.
    pub(crate) partition: i32,
    /// Offset from which the broker would go on.
    pub(crate) next_offset: i64,
}

/// One record of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Delivery {
    /// Index of the message in the file.
    pub(crate) message: usize,
    /// Offset in the log.
    pub(crate) offset: i64,
    /// Message id in place of the file's.
    pub(crate) id: Option<String>,
}

/// Returns the policy that handlers are verified under: the default, but quick to retry, with
/// leases that run out soon. It has no breaker: a failure must show here, and no operator is there
/// to wait.
pub(crate) fn policy() -> Result<Policy> {
    Ok(Policy::parse(&format!(
        "topics = ['{TOPIC}']\nack = 'after_commit'\n{IDENTITY}\
         retry = {{ attempts_max = 5, backoff_min_ms = 1, backoff_max_ms = 20, lease_ms = 4600, \
         workers = 1 }}\n\
         breaker = {{ enabled = false }}\nlimits = {{ deadline_ms = 2000 }}\n"
    ))?)
}

/// A consumer at work on one partition.
pub(crate) struct Driver {
    inbox: Arc<ConsumerInbox>,
    partition: PartitionInbox,
    control: Control,
    messages: Arc<Vec<FileMessage>>,
    number: i32,
}

impl Driver {
    /// Loads the deployment and takes the partition.
    pub(crate) async fn open(
        spec: &Spec,
        messages: Arc<Vec<FileMessage>>,
        recorder: Option<Recorder>,
    ) -> Result<Self> {
        let options = spec.url.parse().context("failed to read the URL of the scratch database")?;
        let control = Control::new(options, MasterKey::parse(&spec.key)?, "verify");
        let runtime = runtime(&spec.cache_dir)?;
        let (tenant, consumer) = (
            control.tenants().get(TENANT).await?,
            control.consumers().get(TENANT, CONSUMER).await?,
        );
        let policy = Policy { ack: spec.ack, ..consumer.policy()? };
        let recorder = recorder.or_else(|| {
            (spec.pause_ms > 0).then(|| Recorder::pausing(Duration::from_millis(spec.pause_ms)))
        });
        let handlers = Loader::new(control.clone(), Compilations::new(control.clone(), runtime, 1))
            .recorded_by(recorder)
            .load(&tenant, &consumer, &policy)
            .await?;
        let sessions = Sessions::of(
            control.tenant_databases().session_target(&tenant)?,
            &SessionSettings::default(),
            Budget::new(4),
        );
        let owner = format!("verify/{}", std::process::id());
        let (tenant, name) = (TENANT.to_owned(), CONSUMER.to_owned());
        let inbox = ConsumerInbox::new(
            consumer.consumer_id,
            tenant,
            name,
            policy,
            owner,
            sessions,
            handlers,
        );
        let partition =
            PartitionInbox::open(inbox.clone(), TOPIC, spec.partition, spec.next_offset).await?;
        Ok(Self { inbox, partition, control, messages, number: spec.partition })
    }

    /// Hands records over until all are settled, and passes the count of settled ones to `settled`.
    /// With `each`, it hands them over one by one, so that none shares a transaction.
    pub(crate) async fn deliver(
        &mut self,
        deliveries: &[Delivery],
        each: bool,
        mut settled: impl FnMut(usize),
    ) -> Result<()> {
        let records: Vec<_> =
            deliveries.iter().map(|delivery| self.record(delivery)).collect::<Result<_>>()?;
        let deadline = Instant::now() + PATIENCE;
        let mut done = 0;
        while done < records.len() {
            let end = if each { done + 1 } else { records.len() };
            self.partition.ready(&records[done..end]).await;
            match self.partition.process(&records[done..end]).await {
                Ok(count) => {
                    done += count;
                    settled(done);
                }
                // The next round offers these records again, as a broker does.
                Err(_) if Instant::now() < deadline => sleep(POLL).await,
                Err(error) => return Err(error).context("records could not be settled"),
            }
        }
        Ok(())
    }

    fn record(&self, delivery: &Delivery) -> Result<Record> {
        let mut message = self
            .messages
            .get(delivery.message)
            .context("there is no such message in the file")?
            .clone();
        message.id = delivery.id.clone().unwrap_or(message.id);
        Ok(message.record(&TOPIC.into(), self.number, delivery.offset))
    }

    /// Runs due messages until none is left that will be due soon.
    pub(crate) async fn finish(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let never = CancellationToken::new();
        while Instant::now() < deadline {
            // An error is the host's and leaves the message where it was.
            if retry::step(&self.inbox, &never).await.unwrap_or(0) > 0 {
                continue;
            }
            if self.is_quiet().await? {
                return Ok(());
            }
            sleep(POLL).await;
        }
        bail!("messages were still open after {} s", PATIENCE.as_secs())
    }

    async fn is_quiet(&self) -> Result<bool> {
        let soon = chrono::Utc::now() + WAITS_ON_PURPOSE;
        let open = rows(&self.control).await?.into_iter().any(|row| match row.status {
            MessageStatus::Received | MessageStatus::InProgress => true,
            MessageStatus::FailedRetryable => row.next_attempt_at.is_none_or(|at| at < soon),
            _ => false,
        });
        Ok(!open)
    }

    /// Gives up the partition and closes the database connections.
    pub(crate) async fn close(self) {
        self.partition.close().await;
        self.control.pool.close().await;
    }
}

/// Returns a runtime with the settings that all processes of a verification have, so that compiled
/// code can be shared.
pub(crate) fn runtime(cache_dir: &Path) -> Result<WasmRuntime> {
    Ok(WasmRuntime::new(RuntimeConfig {
        instances_max: 4,
        cache_dir: Some(cache_dir.to_owned()),
        ..RuntimeConfig::default()
    })?)
}

/// Returns all rows of the inbox.
pub(crate) async fn rows(control: &Control) -> Result<Vec<oncebox_control::InboxRow>> {
    let filter = oncebox_control::Filter {
        limit: i64::from(i32::MAX),
        ..oncebox_control::Filter::default()
    };
    Ok(control.messages().inbox_list(&filter).await?)
}
