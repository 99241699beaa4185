//! `oncebox doctor`

use anyhow::{Result, bail};
use oncebox_api::wire::{DoctorReport, FindingBody};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

/// Prints the findings, problems first, and fails if one is an error.
pub(super) async fn run(api: &Api, json: bool) -> Result<()> {
    let report: DoctorReport = api.get(&path(&["doctor"])).await?;
    if json {
        output::json(&report)?;
    } else {
        report.findings.iter().for_each(print);
    }
    let DoctorReport { errors, warnings, unknown, .. } = report;
    if errors > 0 {
        bail!(
            "the database does not hold what it should: {errors} errors, {warnings} warnings, \
                {unknown} unknown"
        );
    }
    if !json {
        println!("no errors, {warnings} warnings, {unknown} unknown");
    }
    Ok(())
}

fn print(finding: &FindingBody) {
    println!("{:<8} {}: {}", finding.severity, finding.check, finding.found);
    if finding.severity == "ok" {
        return;
    }
    println!("         in {}", finding.place);
    if let Some(sql) = &finding.sql {
        println!("         fix: {sql};");
    }
    if let Some(advice) = &finding.advice {
        println!("         {advice}");
    }
}
