//! `oncebox inbox stats`

use anyhow::Result;
use oncebox_api::wire::InboxStats;
use oncebox_devkit::{
    api::{Api, path},
    output,
};
use oncebox_model::MessageStatus;

use super::{ago, consumers};

pub(super) async fn run(
    api: &Api,
    tenant: Option<String>,
    consumer: Option<String>,
    as_json: bool,
) -> Result<()> {
    let mut all: Vec<InboxStats> = Vec::new();
    for (tenant, consumer) in consumers(api, &tenant, &consumer).await? {
        all.push(api.get(&path(&["tenants", &tenant, "consumers", &consumer, "backlog"])).await?);
    }
    if as_json {
        return output::json(&all);
    }
    let cells = |stats: &InboxStats| {
        let messages = |status: MessageStatus| {
            stats
                .open
                .iter()
                .filter(|open| open.status == status)
                .map(|open| open.messages)
                .sum::<i64>()
        };
        let age = stats.oldest_pending_age_s.map(|age| ago(age as i64));
        let states = [
            MessageStatus::FailedRetryable,
            MessageStatus::Waiting,
            MessageStatus::FailedTerminal,
            MessageStatus::Parked,
        ]
        .map(|status| messages(status).to_string());
        let mut cells = vec![
            format!("{}/{}", stats.tenant, stats.consumer),
            stats.pending.to_string(),
            age.unwrap_or_default(),
        ];
        cells.extend(states);
        cells.push(
            stats.alerts.iter().map(|alert| alert.alert.as_str()).collect::<Vec<_>>().join(", "),
        );
        cells
    };
    let headings = [
        "CONSUMER",
        "PENDING",
        "OLDEST",
        "TO RETRY",
        "WAITING",
        "DEAD LETTERS",
        "PARKED",
        "ALERTS",
    ];
    output::table(&headings, &all.iter().map(cells).collect::<Vec<_>>());
    let reasons = all.iter().flat_map(|stats| stats.open.iter().map(move |open| (stats, open)));
    let stuck = reasons.filter(|(_, open)| open.status.is_dead());
    let lines: Vec<_> = stuck
        .map(|(stats, open)| {
            let reason = open.reason.clone().unwrap_or_default();
            vec![
                format!("{}/{}", stats.tenant, stats.consumer),
                open.status.to_string(),
                reason,
                open.messages.to_string(),
            ]
        })
        .collect();
    if !lines.is_empty() {
        println!();
        output::table(&["CONSUMER", "STATUS", "REASON", "MESSAGES"], &lines);
    }
    Ok(())
}
