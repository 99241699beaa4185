//! `oncebox job …`, and the commands that start a job and follow it.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use oncebox_api::wire::{JobBody, JobEstimateBody, NewJobBody, NothingMore};
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};
use oncebox_model::MessageStatus;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::inbox::members;

#[derive(Subcommand)]
pub(super) enum JobCommand {
    /// List jobs, newest first
    List {
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// Only jobs on this consumer
        #[arg(long)]
        consumer: Option<String>,
    },
    /// Show how far a job is, and what it left out
    Show(JobArgs),
    /// Show the progress of a job until it is over
    Wait(JobArgs),
    /// Stop a job after the page under way
    Pause(JobArgs),
    /// Go on with a paused job
    Resume(JobArgs),
    /// End a job where it is; what it changed stays
    Cancel(JobArgs),
}

/// One job.
#[derive(Args)]
pub(super) struct JobArgs {
    /// The number of the job
    job_id: i64,
    /// The tenant
    #[arg(long)]
    tenant: String,
}

/// How a command carries out a job.
#[derive(Clone, Default, Args)]
pub(super) struct StartArgs {
    /// Only count the messages, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// At most this many messages per second
    #[arg(long, value_name = "MESSAGES")]
    rate: Option<u32>,
    /// Print the job and leave it to the hosts
    #[arg(long)]
    detach: bool,
}

/// The words for an action: done, and to be done.
pub(super) type Words = [&'static str; 2];

/// Returns the words for an action's name.
fn words(action: &str) -> Words {
    match action {
        "retry" => ["made due", "make due"],
        "discard" | "outgoing_discard" => [MessageStatus::Discarded.as_str(), "discard"],
        _ => ["redriven", "redrive"],
    }
}

pub(super) async fn run(api: &Api, command: JobCommand, as_json: bool) -> Result<()> {
    match command {
        JobCommand::List { tenant, consumer } => {
            let path = path(&["tenants", &tenant, "jobs"]);
            let jobs: Vec<JobBody> = api.get(&with_query(&path, &[("consumer", consumer)])).await?;
            if as_json { output::json(&jobs) } else { list(&jobs) }
        }
        JobCommand::Show(args) => {
            let job: JobBody = api.get(&args.path(None)).await?;
            if as_json { output::json(&job) } else { show(&job) }
        }
        JobCommand::Wait(args) => {
            let job = api.get(&args.path(None)).await?;
            follow(api, job, as_json).await
        }
        JobCommand::Pause(args) => act(api, &args, "pause", as_json).await,
        JobCommand::Resume(args) => act(api, &args, "resume", as_json).await,
        JobCommand::Cancel(args) => act(api, &args, "cancel", as_json).await,
    }
}

impl JobArgs {
    /// Returns the path of the job, or of an action on it.
    fn path(&self, action: Option<&str>) -> String {
        let job_id = self.job_id.to_string();
        let parts: [&str; 4] = ["tenants", &self.tenant, "jobs", &job_id];
        path(&parts.into_iter().chain(action).collect::<Vec<_>>())
    }
}

async fn act(api: &Api, args: &JobArgs, action: &str, as_json: bool) -> Result<()> {
    let job: JobBody = api.post(&args.path(Some(action)), &NothingMore {}).await?;
    if as_json { output::json(&job) } else { show(&job) }
}

/// Starts a job and shows its progress until it is over. It goes on where this command is broken
/// off.
pub(super) async fn start(
    api: &Api,
    tenant: &str,
    new: NewJobBody,
    args: &StartArgs,
    as_json: bool,
) -> Result<()> {
    let new = NewJobBody { rate: args.rate, ..new };
    if args.dry_run {
        let path = path(&["tenants", tenant, "jobs", "estimate"]);
        let estimate: JobEstimateBody = api.post(&path, &new).await?;
        if as_json {
            return output::json(&estimate);
        }
        let [_, to_do] = words(&new.action);
        let least = if estimate.is_counted_whole { "" } else { "at least " };
        println!("would {to_do} {least}{}", messages(estimate.messages));
        return Ok(());
    }
    let job: JobBody = api.post(&path(&["tenants", tenant, "jobs"]), &new).await?;
    match (args.detach, as_json) {
        (true, true) => output::json(&job),
        (true, false) => {
            let JobBody { job_id, tenant, .. } = &job;
            println!(
                "job {job_id}: hosts work on it; `oncebox job wait {job_id} --tenant {tenant}` shows how far it is"
            );
            Ok(())
        }
        (false, _) => follow(api, job, as_json).await,
    }
}

/// Time after which a job shows its progress.
const SILENT: Duration = Duration::from_secs(1);
/// Longest pause between two looks at a job.
const LOOK_MAX: Duration = Duration::from_millis(500);

/// Shows the progress of a job until hosts do not work on it any more.
async fn follow(api: &Api, mut job: JobBody, as_json: bool) -> Result<()> {
    let one = JobArgs { job_id: job.job_id, tenant: job.tenant.clone() };
    let (began, mut shown, mut pause) = (Instant::now(), 0, Duration::from_millis(20));
    while job.state == "running" {
        // Without a server, this process is a host of the job.
        api.carry_on(&job.tenant, job.job_id).await?;
        job = api.get(&one.path(None)).await?;
        if job.state != "running" {
            break;
        }
        if job.changed > shown && !as_json && began.elapsed() > SILENT {
            shown = job.changed;
            eprintln!("{}", progress(&job));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
    if as_json {
        output::json(&job)?;
    } else if job.state == "done" {
        result(&job).iter().for_each(|line| println!("{line}"));
    }
    let JobBody { job_id, tenant, changed, .. } = &job;
    match job.state.as_str() {
        "paused" => bail!(
            "job {job_id} is paused after {}{}; `oncebox job resume {job_id} --tenant {tenant}` \
                goes on with it",
            messages(*changed),
            job.note.as_ref().map_or_else(String::new, |note| format!(": {note}"))
        ),
        "cancelled" => bail!("job {job_id} was cancelled after {}", messages(*changed)),
        _ => Ok(()),
    }
}

/// Returns a line on how far a job is.
fn progress(job: &JobBody) -> String {
    let [done, _] = words(&job.action);
    let of = match job.is_counted_whole {
        // More may have come to be dead letters than were counted.
        _ if job.changed >= job.estimate => String::new(),
        true => format!(" of about {}", job.estimate),
        false => format!(" of at least {}", job.estimate),
    };
    format!("{done} {}{of} (job {})", job.changed, job.job_id)
}

/// Returns the lines on what a job did, and what it left out.
fn result(job: &JobBody) -> Vec<String> {
    let [done, to_do] = words(&job.action);
    let mut lines = match (job.changed, job.left_out.is_empty()) {
        (0, true) => vec![format!("there is nothing to {to_do}")],
        (changed, _) => vec![format!("{done} {}", messages(changed))],
    };
    lines.extend(
        job.left_out
            .iter()
            .map(|(reason, count)| format!("left out {}: {}", messages(*count), why(reason))),
    );
    lines
}

/// Returns what keeps a message from an action, for a reader.
fn why(reason: &str) -> &str {
    match reason {
        "undecodable" => "never understood, so there is no identity to run under",
        "no_record" => "no payload is stored; have it delivered again, then say it again",
        "unordered" => "a second payload under an id that is in order, so it has no place",
        "busy" => "being worked on; say it again for those",
        other => other,
    }
}

pub(super) fn messages(count: i64) -> String {
    if count == 1 { "1 message".to_owned() } else { format!("{count} messages") }
}

fn show(job: &JobBody) -> Result<()> {
    let mut value = serde_json::to_value(job)?;
    if let Some(filter) = value.get_mut("filter").and_then(Value::as_object_mut) {
        filter.retain(|_, member| !member.is_null());
    }
    if let Some(object) = value.as_object_mut() {
        object.retain(|_, member| !member.as_object().is_some_and(serde_json::Map::is_empty));
    }
    members(&value);
    Ok(())
}

fn list(jobs: &[JobBody]) -> Result<()> {
    let cells = |job: &JobBody| {
        let least = if job.is_counted_whole { "" } else { ">= " };
        vec![
            job.job_id.to_string(),
            job.consumer.clone().unwrap_or_else(|| "-".to_owned()),
            job.action.clone(),
            job.state.clone(),
            job.changed.to_string(),
            format!("{least}{}", job.estimate),
            job.left_out.values().sum::<i64>().to_string(),
            output::time(job.began_at),
            job.actor.clone(),
            job.reason.clone(),
        ]
    };
    output::table(
        &[
            "JOB", "CONSUMER", "ACTION", "STATE", "CHANGED", "ESTIMATE", "LEFT OUT", "BEGAN",
            "ACTOR", "REASON",
        ],
        &jobs.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(changed: i64, left_out: &[(&str, i64)]) -> JobBody {
        let left_out: serde_json::Map<_, _> = left_out
            .iter()
            .map(|(reason, count)| ((*reason).to_owned(), (*count).into()))
            .collect();
        serde_json::from_value(serde_json::json!({
            "job_id": 7, "tenant": "acme", "consumer": "orders", "action": "redrive",
            "state": "done", "filter": {}, "as_of": "2026-11-20T18:38:52Z", "actor": "cli",
            "reason": "mended", "estimate": 3, "is_counted_whole": true,
            "began_at": "2026-11-20T18:38:52Z", "changed": changed, "left_out": left_out,
            "pass": 2,
        }))
        .expect("a job")
    }

    // What could go wrong: a command says that all is done where messages were left out.
    #[test]
    fn the_result_says_what_was_left_out_and_why() {
        assert_eq!(result(&job(0, &[])), ["there is nothing to redrive"]);
        assert_eq!(result(&job(1, &[])), ["redriven 1 message"]);
        let lines = result(&job(0, &[("busy", 2), ("no_record", 1)]));
        assert_eq!(lines[0], "redriven 0 messages");
        assert!(lines[1].starts_with("left out 2 messages: being worked on"), "{lines:?}");
        assert!(lines[2].starts_with("left out 1 message: no payload"), "{lines:?}");
        assert_eq!(progress(&job(2, &[])), "redriven 2 of about 3 (job 7)");
        let partly = JobBody { is_counted_whole: false, ..job(2, &[]) };
        assert_eq!(progress(&partly), "redriven 2 of at least 3 (job 7)");
    }
}
