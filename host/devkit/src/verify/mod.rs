//! Verification of one handler: the crash windows and the deliveries of at-least-once. It really
//! kills real processes, and uses the real inbox and a throw-away database.

mod bench;
mod caused;
mod compare;
mod driver;
mod findings;
mod report;
mod windows;
mod worker;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use indicatif::{ProgressBar, ProgressStyle};
use oncebox_model::MessageStatus;
use sha2::{Digest, Sha256};

use self::{
    bench::Bench,
    compare::{Excluded, Found, Reference},
    report::VerifyReport,
    windows::{PlanInput, WindowResult},
};
use crate::{
    lint::{self, Level},
    messages::FileMessage,
    scratch::{Scratch, TriedHandler},
};

pub use worker::{SUBCOMMAND, run as work};

/// Windows that run at one time. Most of the time is spent waiting for processes to start and
/// leases to run out.
const AT_ONCE: usize = 3;

/// Input of a verification.
pub struct Request<'a> {
    /// Path of the component's file, for error texts.
    pub path: &'a Path,
    /// Name of the handler.
    pub handler: &'a str,
    /// The component.
    pub component: &'a [u8],
    /// The messages.
    pub messages: Vec<FileMessage>,
    /// SQL files with the handler's tables.
    pub schema: &'a [PathBuf],
    /// Settings that the handler reads.
    pub settings: &'a [(String, String)],
    /// Seed of orders and repetitions.
    pub seed: u64,
    /// Folder of compiled code; none for one that is deleted at the end.
    pub cache_dir: Option<PathBuf>,
}

/// Compiles the component, and returns the folder of compiled code.
async fn compile(request: &Request<'_>, scratch: &Scratch) -> Result<PathBuf> {
    let cache_dir = request.cache_dir.clone().unwrap_or_else(|| scratch.dir.join("cache"));
    let loaded = driver::runtime(&cache_dir)?.load(request.component).await;
    loaded.with_context(|| format!("`{}` cannot be run", request.path.display()))?;
    Ok(cache_dir)
}

/// Runs every window and reports the findings.
pub async fn verify(request: Request<'_>) -> Result<VerifyReport> {
    refuse_repeated_ids(&request.messages)?;
    let scratch = Scratch::start().await?;
    let cache_dir = compile(&request, &scratch).await?;
    let policy = driver::policy()?;
    let subject = TriedHandler {
        handler: request.handler,
        component: request.component,
        schema: request.schema,
        settings: request.settings,
        policy: &policy,
    };
    let furnished = scratch.furnish(&subject).await?;
    let mut bench = Bench::new(scratch, cache_dir, furnished, request.messages).await?;

    let (runs, first) =
        bench.clean_run("clean_1").await.context("the messages could not be handled even once")?;
    let (_, second) = bench.clean_run("clean_2").await?;
    let excluded = Excluded::find(&bench.tables, &first.tables, &second.tables);
    let completed: BTreeSet<String> = first
        .statuses
        .iter()
        .filter(|(_, status)| **status == MessageStatus::Completed)
        .map(|(id, _)| id.clone())
        .collect();
    refuse_vacuity(&first)?;
    let too_large = first.tables.too_large().map(str::to_owned).collect();
    let reference = Reference {
        tables: bench.tables.clone(),
        initial: bench.initial.clone(),
        found: first,
        excluded,
    };

    let caused = caused::find(&bench.messages, &runs);
    bench.causes = caused::causes(bench.messages.len(), &caused);
    let ids: Vec<_> = bench.messages.iter().map(|message| message.id.as_str()).collect();
    let plan = windows::plan(&PlanInput {
        ids: &ids,
        runs: &runs,
        completed: &completed,
        caused: &caused,
        causes: &bench.causes,
    });
    let bar = progress(plan.len());
    let rows = stream::iter(plan.into_iter().enumerate()).map(|(number, window)| {
        let (bench, reference, bar) = (&bench, &reference, &bar);
        async move {
            let name = window.name.clone();
            let row = windows::go(bench, reference, window, number, request.seed)
                .await
                .with_context(|| format!("in the window `{name}`"));
            bar.inc(1);
            row
        }
    });
    let rows: Vec<WindowResult> = rows.buffered(AT_ONCE).try_collect().await?;
    bar.finish_and_clear();

    let rows = findings::excuse_order(rows);
    let shown = findings::shown(&rows);
    let subject =
        lint::LintSubject { tables: &bench.tables, runs: &runs, completed: &completed, shown };
    let statements = lint::statements(&runs);
    let findings = findings::find(&subject, &rows, &reference, &statements);
    Ok(VerifyReport {
        digest: hex::encode(Sha256::digest(request.component)),
        seed: request.seed,
        messages: ids.len(),
        outcomes: reference.found.statuses.clone(),
        tables: bench.tables.clone(),
        excluded: reference.excluded,
        too_large,
        rows,
        statements,
        emits: runs.iter().any(|run| !run.outgoing.is_empty()),
        findings,
    })
}

/// Refuses a file that holds a message id twice: the second one would be a duplicate in the clean
/// run already.
fn refuse_repeated_ids(messages: &[FileMessage]) -> Result<()> {
    let mut seen = BTreeSet::new();
    match messages.iter().find(|message| !seen.insert(message.id.as_str())) {
        Some(message) => bail!(
            "message id `{}` is in the file twice; repetitions are made by `verify` itself",
            message.id
        ),
        None => Ok(()),
    }
}

/// Refuses a clean run that completes no message: without effects, every window would pass.
fn refuse_vacuity(clean: &Found) -> Result<()> {
    match clean.statuses.iter().next() {
        Some((id, status))
            if clean.statuses.values().all(|status| *status != MessageStatus::Completed) =>
        {
            bail!(
                "no message is completed by a clean run, so there is nothing to verify: `{id}` is \
                    `{status}`; `oncebox test` shows why"
            )
        }
        _ => Ok(()),
    }
}

/// Returns the progress bar of the windows. It is shown on a terminal only.
fn progress(windows: usize) -> ProgressBar {
    let bar = ProgressBar::new(windows as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos} of {len} windows") {
        bar.set_style(style);
    }
    bar.tick();
    bar
}

/// Returns the worst level of the findings.
fn worst(findings: &[lint::LintFinding]) -> Option<Level> {
    findings.iter().map(|finding| finding.level).min()
}
