//! Copies of one furnished database, and the runs in them.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, Result};
use oncebox_control::{Control, Tenant};
use oncebox_inbox::{Budget, SessionSettings, Sessions};
use oncebox_model::policy::Ack;
use oncebox_runtime::{Recorder, RunRecord};

use super::{
    compare::Found,
    driver::{self, Delivery, Driver, Spec},
};
use crate::{
    messages::FileMessage,
    scratch::{Furnished, Scratch},
    tables::{self, OUTGOING, Snapshot, Table, outgoing_rows, outgoing_table},
};

/// State that the windows of one verification share.
pub(super) struct Bench {
    scratch: Scratch,
    tenant: Tenant,
    pub(super) tables: Vec<Table>,
    pub(super) initial: Snapshot,
    pub(super) messages: Arc<Vec<FileMessage>>,
    /// Cause of each message, by what the clean run sent; none before that.
    pub(super) causes: Vec<Option<usize>>,
    file: PathBuf,
    cache_dir: PathBuf,
    /// Path of this program, which is also the workers' program.
    pub(super) program: PathBuf,
}

impl Bench {
    /// Reads the furnished tables and closes the connections, so that the database can be copied.
    pub(super) async fn new(
        scratch: Scratch,
        cache_dir: PathBuf,
        furnished: Furnished,
        messages: Vec<FileMessage>,
    ) -> Result<Self> {
        let Furnished { control, tenant, .. } = furnished;
        let (tables, initial) = look(&control, &tenant).await?;
        control.pool.close().await;
        let file = scratch.dir.join("messages.jsonl");
        let lines: String =
            messages.iter().map(|message| format!("{}\n", message.json())).collect();
        std::fs::write(&file, lines)
            .with_context(|| format!("failed to write `{}`", file.display()))?;
        let program = std::env::current_exe().context("failed to find this program")?;
        Ok(Self {
            scratch,
            tenant,
            tables,
            initial,
            causes: vec![None; messages.len()],
            messages: Arc::new(messages),
            file,
            cache_dir,
            program,
        })
    }

    /// Runs `work` in a copy of its own and drops the copy. Returns the result and what the run
    /// left behind.
    pub(super) async fn in_copy<T>(
        &self,
        name: &str,
        work: impl AsyncFnOnce(Spec) -> Result<T>,
    ) -> Result<(T, Found)> {
        self.scratch.copy(name).await?;
        let worked = async {
            let answer = work(self.spec(name)?).await?;
            Ok((answer, self.found(name).await?))
        };
        let outcome = worked.await;
        self.scratch.drop_copy(name).await?;
        outcome
    }

    fn spec(&self, database: &str) -> Result<Spec> {
        Ok(Spec {
            url: self.scratch.url(database)?,
            key: self.scratch.key.clone(),
            cache_dir: self.cache_dir.clone(),
            messages: self.file.clone(),
            ack: Ack::AfterCommit,
            pause_ms: 0,
            partition: 0,
            next_offset: 0,
        })
    }

    async fn found(&self, database: &str) -> Result<Found> {
        let control = self.scratch.control(database)?;
        let (_, tables) = look(&control, &self.tenant).await?;
        let statuses = driver::rows(&control)
            .await?
            .into_iter()
            .map(|row| (row.message_id, row.status))
            .collect();
        control.pool.close().await;
        Ok(Found { tables, statuses })
    }

    /// Handles every message once, in order, in this process. Returns the recorded runs and what
    /// they left behind.
    pub(super) async fn clean_run(&self, name: &str) -> Result<(Vec<RunRecord>, Found)> {
        let recorder = Recorder::default();
        self.in_copy(name, async |spec| {
            let mut driver =
                Driver::open(&spec, self.messages.clone(), Some(recorder.clone())).await?;
            driver.deliver(&self.log(), true, |_| {}).await?;
            driver.finish().await?;
            driver.close().await;
            Ok(recorder.take())
        })
        .await
    }

    /// Returns a log that holds every message once, in order.
    pub(super) fn log(&self) -> Vec<Delivery> {
        (0..self.messages.len())
            .map(|message| Delivery { message, offset: message as i64, id: None })
            .collect()
    }

    /// Returns a log of the given messages, in their order. `true` marks a delivery under a second
    /// id.
    pub(super) fn log_of(
        &self,
        messages: impl IntoIterator<Item = (usize, bool)>,
    ) -> Vec<Delivery> {
        let delivery = |(offset, (message, is_second_id)): (i64, (usize, bool))| Delivery {
            message,
            offset,
            id: is_second_id.then(|| format!("{}~again", self.messages[message].id)),
        };
        (0..).zip(messages).map(delivery).collect()
    }
}

/// Returns the tenant's tables and their content. One more table stands for its outgoing messages.
async fn look(control: &Control, tenant: &Tenant) -> Result<(Vec<Table>, Snapshot)> {
    let sessions = Sessions::of(
        control.tenant_databases().session_target(tenant)?,
        &SessionSettings::default(),
        Budget::new(1),
    );
    let transaction = sessions.begin().await?;
    let tables = tables::read(transaction.tx()).await;
    let looked = match tables {
        Ok(tables) => {
            Snapshot::take(transaction.tx(), &tables).await.map(|snapshot| (tables, snapshot))
        }
        Err(error) => Err(error),
    };
    transaction.rollback().await;
    let (mut tables, mut snapshot) = looked?;
    snapshot.tables.insert(OUTGOING.to_owned(), outgoing_rows(&control.pool).await?);
    tables.push(outgoing_table());
    Ok((tables, snapshot))
}
