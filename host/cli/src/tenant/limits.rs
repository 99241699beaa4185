//! `oncebox tenant limits`

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::{TenantBody, TenantLimitsBody};
use oncebox_devkit::{
    api::{Api, path},
    output,
};
use serde_json::{Map, Value};

#[derive(Args)]
pub(crate) struct LimitsArgs {
    /// The tenant
    tenant: String,
    /// Its share of a busy host against the other tenants', 1 to 10000
    #[arg(long)]
    weight: Option<u32>,
    /// Database connections, or `none` for the host's own bound
    #[arg(long, value_name = "N|none", value_parser = limit)]
    connections_max: Option<Limit>,
    /// Transactions at the same time, or `none`
    #[arg(long, value_name = "N|none", value_parser = limit)]
    transactions_max: Option<Limit>,
    /// Bytes of guests' memory together, or `none`
    #[arg(long, value_name = "N|none", value_parser = limit)]
    memory_bytes_max: Option<Limit>,
    /// Longest call of a handler in milliseconds, whatever a policy says, or `none`
    #[arg(long, value_name = "MS|none", value_parser = limit)]
    deadline_ms_max: Option<Limit>,
    /// Messages a second, or `none` for as many as come
    #[arg(long, value_name = "N|none", value_parser = limit)]
    messages_per_second: Option<Limit>,
    /// Bytes that its inbox is meant to take, or `none`; above them there is an alert, and messages
    /// go on
    #[arg(long, value_name = "N|none", value_parser = limit)]
    storage_budget_bytes: Option<Limit>,
    /// Longest retention class that the tenant's tokens may choose for a new consumer: `7d`, `30d`,
    /// `1y`, `permanent`, or `none` for no bound
    #[arg(long, value_name = "CLASS|none")]
    retention_max: Option<String>,
    /// Topics that the tenant's tokens may name in policies, several separated by commas: whole
    /// names, or beginnings with a `*` behind them; or `none` for `oncebox.<tenant>.*` alone
    #[arg(long, value_name = "TOPICS|none")]
    topics_allowed: Option<String>,
    /// Destinations that its handlers may send outgoing messages to, several separated by commas:
    /// whole ones as `kafka:orders`, `inbox:billing` and `http:payments`, or beginnings with a `*`
    /// behind them as `kafka:acme.*`; or `none`
    #[arg(long, value_name = "DESTINATIONS|none")]
    destinations_allowed: Option<String>,
    /// Hosts that its endpoints may be on, several separated by commas, as far as the hosts'
    /// settings allow them too: `hooks.example`, `pay.example:8443`, `*.example.com`; or `none`
    #[arg(long, value_name = "HOSTS|none")]
    endpoint_hosts_allowed: Option<String>,
}

/// A number, or none.
#[derive(Debug, Clone, Copy)]
struct Limit(Option<u64>);

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        text => text
            .parse()
            .map(|number| Limit(Some(number)))
            .map_err(|_| "it must be a number, or `none`".to_owned()),
    }
}

pub(super) async fn run(api: &Api, args: LimitsArgs, json: bool) -> Result<()> {
    let LimitsArgs {
        tenant,
        weight,
        connections_max,
        transactions_max,
        memory_bytes_max,
        deadline_ms_max,
        messages_per_second,
        storage_budget_bytes,
        retention_max,
        topics_allowed,
        destinations_allowed,
        endpoint_hosts_allowed,
    } = args;
    let given = [
        ("weight", weight.map(|weight| Limit(Some(weight.into())))),
        ("connections_max", connections_max),
        ("transactions_max", transactions_max),
        ("memory_bytes_max", memory_bytes_max),
        ("deadline_ms_max", deadline_ms_max),
        ("messages_per_second", messages_per_second),
        ("storage_budget_bytes", storage_budget_bytes),
    ];
    let mut changes: Map<String, Value> = given
        .into_iter()
        .filter_map(|(name, limit)| Some((name.to_owned(), limit?.0.into())))
        .collect();
    if let Some(class) = retention_max {
        let class = (class != "none").then_some(class);
        changes.insert("retention_max".to_owned(), class.into());
    }
    for (name, names) in [
        ("topics_allowed", topics_allowed),
        ("destinations_allowed", destinations_allowed),
        ("endpoint_hosts_allowed", endpoint_hosts_allowed),
    ] {
        if let Some(names) = names {
            let names =
                (names != "none").then(|| names.split(',').map(str::trim).collect::<Vec<_>>());
            changes.insert(name.to_owned(), names.into());
        }
    }
    let row: TenantBody = if changes.is_empty() {
        api.get(&path(&["tenants", &tenant])).await?
    } else {
        api.patch(&path(&["tenants", &tenant, "limits"]), &changes).await?
    };
    if json {
        return output::json(&row.limits);
    }
    output::table(&["LIMIT", "VALUE"], &rows(&row));
    Ok(())
}

/// Returns one row for each limit.
pub(super) fn rows(tenant: &TenantBody) -> Vec<Vec<String>> {
    let limits: &TenantLimitsBody = &tenant.limits;
    let or_none =
        |limit: Option<u64>| limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
    [
        ("weight", limits.weight.to_string()),
        ("connections_max", or_none(limits.connections_max.map(|limit| limit as u64))),
        ("transactions_max", or_none(limits.transactions_max.map(|limit| limit as u64))),
        ("memory_bytes_max", or_none(limits.memory_bytes_max)),
        ("deadline_ms_max", or_none(limits.deadline_ms_max)),
        ("messages_per_second", or_none(limits.messages_per_second.map(u64::from))),
        ("storage_budget_bytes", or_none(limits.storage_budget_bytes)),
        ("retention_max", limits.retention_max.clone().unwrap_or_else(|| "none".to_owned())),
        (
            "topics_allowed",
            limits
                .topics_allowed
                .as_ref()
                .map_or_else(|| format!("oncebox.{}.*", tenant.name), |topics| topics.join(", ")),
        ),
        (
            "destinations_allowed",
            limits
                .destinations_allowed
                .as_ref()
                .map_or_else(|| "none".to_owned(), |destinations| destinations.join(", ")),
        ),
        (
            "endpoint_hosts_allowed",
            limits
                .endpoint_hosts_allowed
                .as_ref()
                .map_or_else(|| "none".to_owned(), |hosts| hosts.join(", ")),
        ),
    ]
    .map(|(name, value)| vec![name.to_owned(), value])
    .to_vec()
}
