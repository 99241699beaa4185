//! `oncebox version attest`: the report of `oncebox verify --json`, stored with its version.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use oncebox_api::wire::{NewVerificationBody, VerificationBody};
use oncebox_devkit::{api::Api, output, upload::short};
use serde::{Deserialize, de::IgnoredAny};

use super::HandlerArgs;

#[derive(Args)]
pub(crate) struct AttestArgs {
    /// File with the output of `oncebox verify … --json`
    report: PathBuf,
    #[command(flatten)]
    of: HandlerArgs,
}

/// The members of a report that are stored.
#[derive(Deserialize)]
struct AttestedReport {
    digest: String,
    program_version: String,
    seed: u64,
    messages: BTreeMap<String, IgnoredAny>,
    windows: Vec<AttestedWindow>,
    findings: Vec<AttestedFinding>,
    is_passed: bool,
}

#[derive(Deserialize)]
struct AttestedWindow {
    is_failure: bool,
    killed: u32,
}

#[derive(Deserialize)]
struct AttestedFinding {
    level: String,
}

/// Stores the outcome with the version whose component was verified.
pub(super) async fn run(api: &Api, args: &AttestArgs, json: bool) -> Result<()> {
    let report = read(args)?;
    let path = args.of.path(&[&report.digest, "verifications"]);
    let stored: VerificationBody = api.post(&path, &outcome(&report)?).await?;
    if json {
        return output::json(&stored);
    }
    let VerificationBody { windows, windows_failed, killed, is_passed, .. } = stored;
    let verdict = if is_passed { "passed" } else { "did not pass" };
    let (version, handler) = (short(&report.digest), &args.of.handler);
    println!(
        "version {version} of handler `{handler}` {verdict}: {windows} windows, {windows_failed} \
            failed, {killed} workers killed"
    );
    Ok(())
}

fn read(args: &AttestArgs) -> Result<AttestedReport> {
    let file = args.report.display();
    let text = std::fs::read(&args.report)
        .with_context(|| format!("failed to read the report `{file}`"))?;
    serde_json::from_slice(&text).with_context(|| {
        format!("`{file}` is no report of this release; write one with `oncebox verify … --json`")
    })
}

fn outcome(report: &AttestedReport) -> Result<NewVerificationBody> {
    let count = |number: usize| i32::try_from(number).context("the report has too many entries");
    let failed = report.windows.iter().filter(|window| window.is_failure).count();
    let killed: usize = report.windows.iter().map(|window| window.killed as usize).sum();
    let warnings = report.findings.iter().filter(|finding| finding.level == "warning").count();
    Ok(NewVerificationBody {
        is_passed: report.is_passed,
        messages: count(report.messages.len())?,
        windows: count(report.windows.len())?,
        windows_failed: count(failed)?,
        killed: count(killed)?,
        warnings: count(warnings)?,
        seed: i64::try_from(report.seed).context("the report's seed is above 2^63 - 1")?,
        program_version: report.program_version.clone(),
    })
}
