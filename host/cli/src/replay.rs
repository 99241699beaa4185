//! `oncebox replay …`

use anyhow::{Result, bail};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use oncebox_api::wire::{
    NewReplay, NewReplayPlan, NothingMore, ReplayBody, ReplayDetailBody, ReplayFilterBody,
    ReplayPlanBody,
};
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};

use super::inbox::members;

#[derive(Subcommand)]
pub(super) enum ReplayCommand {
    /// Count what a replay would run, and print the token that starts it
    Plan(PlanArgs),
    /// Start a planned replay
    Run(RunArgs),
    /// List replays, newest first
    List {
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// Only this consumer
        #[arg(long)]
        consumer: Option<String>,
    },
    /// Show how far a replay is, and what failed
    Status(OneArgs),
    /// Stop a replay before its next message
    Pause(OneArgs),
    /// Go on with a paused replay
    Resume(OneArgs),
    /// End a replay where it is; what it did stays
    Cancel(OneArgs),
}

/// Which completed messages of which consumer.
#[derive(Args)]
pub(super) struct PlanArgs {
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// Only messages of this event type
    #[arg(long)]
    event_type: Option<String>,
    /// Only messages that completed at this time or later, such as 2026-11-20T18:00:00Z
    #[arg(long, value_name = "TIME")]
    from: Option<DateTime<Utc>>,
    /// Only messages that completed before this time
    #[arg(long, value_name = "TIME")]
    to: Option<DateTime<Utc>>,
    /// Only the message with this id; may be given several times
    #[arg(long = "id", value_name = "MESSAGE")]
    ids: Vec<String>,
}

/// The start of a planned replay.
#[derive(Args)]
pub(super) struct RunArgs {
    /// The token that `oncebox replay plan` printed
    token: String,
    /// Why: kept with each replayed message and in the audit log
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Kind `audit`: the number of messages that the plan found
    #[arg(long, value_name = "MESSAGES")]
    confirm: Option<i64>,
    /// Kind `analytics`: the derived tables were reset
    #[arg(long)]
    reset_done: bool,
    /// Kinds `notification` and `workflow`: nothing that it emits is sent, and that is wanted
    #[arg(long)]
    effects_suppressed: bool,
}

/// One replay.
#[derive(Args)]
pub(super) struct OneArgs {
    /// The number of the replay
    replay_id: i64,
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
}

pub(super) async fn run(api: &Api, command: ReplayCommand, as_json: bool) -> Result<()> {
    match command {
        ReplayCommand::Plan(args) => {
            let path =
                path(&["tenants", &args.tenant, "consumers", &args.consumer, "replays", "plan"]);
            let plan: ReplayPlanBody = api.post(&path, &args.request()).await?;
            if as_json { output::json(&plan) } else { show_plan(&plan) }
        }
        ReplayCommand::Run(args) => {
            let (tenant, consumer) = consumer_of(&args.token)?;
            let path = path(&["tenants", tenant, "consumers", consumer, "replays"]);
            let replay: ReplayBody = api.post(&path, &args.request()).await?;
            if as_json { output::json(&replay) } else { show_replay(&replay) }
        }
        ReplayCommand::List { tenant, consumer } => {
            let path = path(&["tenants", &tenant, "replays"]);
            let replays: Vec<ReplayBody> =
                api.get(&with_query(&path, &[("consumer", consumer)])).await?;
            if as_json { output::json(&replays) } else { list(&replays) }
        }
        ReplayCommand::Status(args) => {
            let detail: ReplayDetailBody = api.get(&args.path(None)).await?;
            if as_json { output::json(&detail) } else { show_detail(&detail) }
        }
        ReplayCommand::Pause(args) => act(api, &args, "pause", as_json).await,
        ReplayCommand::Resume(args) => act(api, &args, "resume", as_json).await,
        ReplayCommand::Cancel(args) => act(api, &args, "cancel", as_json).await,
    }
}

impl PlanArgs {
    fn request(&self) -> NewReplayPlan {
        let ids = (!self.ids.is_empty()).then(|| self.ids.clone());
        let Self { event_type, from, to, .. } = self;
        let filter = ReplayFilterBody { event_type: event_type.clone(), from: *from, to: *to, ids };
        NewReplayPlan { filter }
    }
}

impl RunArgs {
    fn request(&self) -> NewReplay {
        NewReplay {
            token: self.token.clone(),
            reason: self.reason.clone(),
            confirm: self.confirm,
            reset_done: self.reset_done,
            effects_suppressed: self.effects_suppressed,
        }
    }
}

impl OneArgs {
    /// Returns the path of the replay, or of an action on it.
    fn path(&self, action: Option<&str>) -> String {
        let replay_id = self.replay_id.to_string();
        let parts: [&str; 6] =
            ["tenants", &self.tenant, "consumers", &self.consumer, "replays", &replay_id];
        path(&parts.into_iter().chain(action).collect::<Vec<_>>())
    }
}

/// Returns the tenant and the consumer that a token names.
fn consumer_of(token: &str) -> Result<(&str, &str)> {
    match token.split('/').collect::<Vec<_>>()[..] {
        [tenant, consumer, _] if !tenant.is_empty() && !consumer.is_empty() => {
            Ok((tenant, consumer))
        }
        _ => bail!("this is no token of a replay; `oncebox replay plan` prints one"),
    }
}

async fn act(api: &Api, args: &OneArgs, action: &str, as_json: bool) -> Result<()> {
    let replay: ReplayBody = api.post(&args.path(Some(action)), &NothingMore {}).await?;
    if as_json { output::json(&replay) } else { show_replay(&replay) }
}

fn show_plan(plan: &ReplayPlanBody) -> Result<()> {
    plan_lines(plan).iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Returns what a plan says, a line each, with the command that starts it.
fn plan_lines(plan: &ReplayPlanBody) -> Vec<String> {
    let least = if plan.is_counted_whole { "" } else { "at least " };
    let mut lines = vec![format!(
        "{least}{} would run, by the kind `{}`",
        counted(plan.found, "message"),
        plan.kind
    )];
    if plan.without_payload > 0 {
        lines.push(format!(
            "{least}{} cannot run, since no payload is stored (`payload = \"all\"` stores them)",
            counted(plan.without_payload, "message")
        ));
    }
    if plan.sampled_outgoing > 0 {
        lines.push(format!(
            "of the first {}, {} caused {}; a replay emits them again and sends none",
            counted(plan.sampled, "message"),
            plan.sampled_emitting,
            counted(plan.sampled_outgoing, "outgoing message")
        ));
    }
    let more = match plan.kind.as_str() {
        "audit" => format!(" --confirm {}", plan.found),
        "analytics" => " --reset-done".to_owned(),
        "notification" | "workflow" => " --effects-suppressed".to_owned(),
        _ => String::new(),
    };
    lines.push(format!("until {} this starts it:", output::time(plan.expires_at)));
    lines.push(format!("  oncebox replay run {} --reason <text>{more}", plan.token));
    lines
}

fn counted(count: i64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

fn show_replay(replay: &ReplayBody) -> Result<()> {
    let mut value = serde_json::to_value(replay)?;
    if let Some(object) = value.as_object_mut()
        && object.get("filter").is_some_and(|filter| *filter == no_filter())
    {
        object.remove("filter");
    }
    members(&value);
    Ok(())
}

/// Returns a filter that restricts nothing, as the answer has it.
fn no_filter() -> serde_json::Value {
    serde_json::json!({ "event_type": null, "from": null, "to": null, "ids": null })
}

fn show_detail(detail: &ReplayDetailBody) -> Result<()> {
    show_replay(&detail.replay)?;
    if detail.failures.is_empty() {
        return Ok(());
    }
    println!();
    let rows: Vec<_> = detail
        .failures
        .iter()
        .map(|failure| {
            vec![
                output::time(failure.at),
                failure.message_id.clone(),
                failure.reason.clone(),
                failure.error.clone().unwrap_or_default(),
            ]
        })
        .collect();
    output::table(&["FAILED", "MESSAGE", "REASON", "ERROR"], &rows);
    Ok(())
}

fn list(replays: &[ReplayBody]) -> Result<()> {
    let cells = |replay: &ReplayBody| {
        vec![
            replay.replay_id.to_string(),
            format!("{}/{}", replay.tenant, replay.consumer),
            replay.state.clone(),
            replay.kind.clone(),
            replay.found.to_string(),
            replay.replayed.to_string(),
            replay.failed.to_string(),
            replay.suppressed.to_string(),
            replay.began_at.map(output::time).unwrap_or_default(),
            replay.reason.clone().unwrap_or_default(),
        ]
    };
    output::table(
        &[
            "REPLAY",
            "CONSUMER",
            "STATE",
            "KIND",
            "FOUND",
            "REPLAYED",
            "FAILED",
            "SUPPRESSED",
            "BEGAN",
            "REASON",
        ],
        &replays.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(kind: &str) -> ReplayPlanBody {
        let time = "2026-11-20T18:38:52Z";
        serde_json::from_value(serde_json::json!({
            "replay_id": 7, "token": "acme/orders/7-ab", "expires_at": time, "kind": kind,
            "emit": "suppressed", "found": 3, "without_payload": 1, "is_counted_whole": true,
            "until": time, "sampled": 3, "sampled_emitting": 2, "sampled_outgoing": 4,
        }))
        .expect("a plan")
    }

    // What could go wrong: an operator copies a command that is refused, or does not see what is
    // not sent. S1-058.
    #[test]
    fn a_plan_ends_with_the_command_that_starts_it() {
        for (kind, more) in [
            ("cache", ""),
            ("audit", " --confirm 3"),
            ("analytics", " --reset-done"),
            ("workflow", " --effects-suppressed"),
        ] {
            let lines = plan_lines(&plan(kind));
            let last = lines.last().expect("a command");
            assert_eq!(
                last.trim(),
                format!("oncebox replay run acme/orders/7-ab --reason <text>{more}")
            );
        }
        let lines = plan_lines(&plan("cache")).join("\n");
        assert!(lines.contains("3 messages would run") && lines.contains("1 message cannot run"));
        assert!(lines.contains("2 caused 4 outgoing messages"), "{lines}");
        let partly = ReplayPlanBody { is_counted_whole: false, ..plan("cache") };
        assert!(plan_lines(&partly)[0].starts_with("at least 3"));
    }

    #[test]
    fn a_token_names_its_consumer() {
        assert_eq!(consumer_of("acme/orders/7-ab").expect("a token"), ("acme", "orders"));
        for text in ["", "acme/orders", "/orders/7-ab", "a/b/c/d"] {
            assert!(consumer_of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_action_has_the_path_of_its_replay() {
        let args =
            OneArgs { replay_id: 7, tenant: "acme".to_owned(), consumer: "orders".to_owned() };
        let path = args.path(Some("pause"));
        assert!(path.ends_with("/tenants/acme/consumers/orders/replays/7/pause"), "{path}");
        assert!(args.path(None).ends_with("/replays/7"));
    }
}
