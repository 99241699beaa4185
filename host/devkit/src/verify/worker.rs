//! A worker process, which runs a handler and may be killed at any step, and the side that gives it
//! orders.
//!
//! They speak in lines of JSON: the worker reads a [`Spec`] and then orders from standard input,
//! and answers on standard output. When its input ends, the worker ends.

use std::{
    os::unix::process::ExitStatusExt, path::Path, process::Stdio, sync::Arc, time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use oncebox_model::hooks;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use super::driver::{Delivery, Driver, Spec};
use crate::messages;

/// The subcommand that makes a process a worker.
pub const SUBCOMMAND: &str = "verify-worker";
/// Silence after which a worker counts as stuck.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Order to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum WorkOrder {
    /// Deliveries to settle.
    Deliver { deliveries: Vec<Delivery>, each: bool },
    /// Death at a point, the nth time the worker passes it from now.
    Arm { point: String, nth: u64 },
    /// Run of the due messages.
    Finish,
}

/// Answer of a worker.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Number of deliveries that are settled: the ack.
    Settled(usize),
    /// End of an order that is carried out.
    Done,
    /// Error of an order that cannot be carried out.
    Failed(String),
}

/// Runs this process as a worker.
pub async fn run() -> Result<()> {
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let spec = orders
        .next_line()
        .await?
        .context("`verify-worker` is told what to do by `oncebox verify`")?;
    let spec: Spec = serde_json::from_str(&spec)?;
    let messages = Arc::new(messages::read(&spec.messages)?);
    let mut driver = Driver::open(&spec, messages, None).await?;
    answer(&Answer::Done);
    while let Some(order) = orders.next_line().await? {
        match carry_out(&mut driver, serde_json::from_str(&order)?).await {
            Ok(()) => answer(&Answer::Done),
            Err(error) => answer(&Answer::Failed(oncebox_server::error_text::one_line(&error))),
        }
    }
    driver.close().await;
    Ok(())
}

async fn carry_out(driver: &mut Driver, order: WorkOrder) -> Result<()> {
    match order {
        WorkOrder::Deliver { deliveries, each } => {
            driver.deliver(&deliveries, each, |count| answer(&Answer::Settled(count))).await
        }
        WorkOrder::Arm { point, nth } => {
            ensure!(hooks::arm(&point, nth), "there is no fail point `{point}`");
            Ok(())
        }
        WorkOrder::Finish => driver.finish().await,
    }
}

/// Prints an answer as one whole line: what is printed is acked, what is not printed is not.
fn answer(answer: &Answer) {
    println!("{}", serde_json::to_string(answer).unwrap_or_default()); // these enums always serialize
}

/// Handle of a worker process. Dropping it kills the process.
pub(super) struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

/// End of an order, with the number of its deliveries that were acked by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Done(usize),
    Killed(usize),
}

impl Ended {
    pub(super) fn settled(self) -> usize {
        match self {
            Self::Done(settled) | Self::Killed(settled) => settled,
        }
    }
}

impl Worker {
    /// Starts a process and waits until it has loaded the handler.
    pub(super) async fn start(program: &Path, spec: &Spec) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .arg(SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        // The worker gets all its settings by the spec, so it gets none of a host's. A sabotage,
        // which only the test suite's program knows, stays: the suite sees by it that a
        // verification would notice.
        for (name, _) in std::env::vars()
            .filter(|(name, _)| name.starts_with("ONCEBOX_") && name != "ONCEBOX_SABOTAGE")
        {
            command.env_remove(name);
        }
        let mut child = command.spawn().context("failed to start a worker process")?;
        let orders = child.stdin.take().context("a worker has no input")?;
        let answers =
            BufReader::new(child.stdout.take().context("a worker has no output")?).lines();
        let mut worker = Self { child, orders, answers };
        worker.send(&serde_json::to_string(spec)?).await?;
        match worker.wait().await? {
            Ended::Done(_) => Ok(worker),
            Ended::Killed(_) => bail!("a worker was killed before it began"),
        }
    }

    /// Sends deliveries and waits until the worker has settled them or is killed.
    pub(super) async fn deliver(&mut self, deliveries: &[Delivery], each: bool) -> Result<Ended> {
        self.order(&WorkOrder::Deliver { deliveries: deliveries.to_vec(), each }).await
    }

    /// Sends an order and waits until the worker has carried it out or is killed.
    pub(super) async fn order(&mut self, order: &WorkOrder) -> Result<Ended> {
        self.send(&serde_json::to_string(order)?).await?;
        self.wait().await
    }

    async fn send(&mut self, line: &str) -> Result<()> {
        self.orders
            .write_all(format!("{line}\n").as_bytes())
            .await
            .context("a worker does not listen")
    }

    async fn wait(&mut self) -> Result<Ended> {
        let mut settled = 0;
        loop {
            let line = timeout(SILENCE_MAX, self.answers.next_line())
                .await
                .context("a worker is stuck")??;
            match line.map(|line| serde_json::from_str(&line)).transpose()? {
                Some(Answer::Settled(count)) => settled = count,
                Some(Answer::Done) => return Ok(Ended::Done(settled)),
                Some(Answer::Failed(error)) => bail!("{error}"),
                None => return self.died(settled).await,
            }
        }
    }

    async fn died(&mut self, settled: usize) -> Result<Ended> {
        let status =
            timeout(SILENCE_MAX, self.child.wait()).await.context("a worker is stuck")??;
        if status.signal() == Some(libc::SIGKILL) {
            return Ok(Ended::Killed(settled));
        }
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.as_mut() {
            let _ = stderr.read_to_string(&mut said).await; // unreadable counts as silent
        }
        bail!("a worker ended with {status}: {}", said.lines().last().unwrap_or("it said nothing"))
    }

    /// Closes the worker's input and waits until the worker has given up its partition and ended.
    pub(super) async fn stop(self) -> Result<()> {
        let Self { mut child, orders, .. } = self;
        drop(orders);
        timeout(SILENCE_MAX, child.wait()).await.context("a worker does not end")??;
        Ok(())
    }
}
