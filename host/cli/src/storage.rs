//! `oncebox storage`

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::{
    BudgetExcessBody, ConsumerStorageBody, StorageBody, StorageDatabaseBody, TenantStorageBody,
};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

use super::arguments;

#[derive(Args)]
pub(super) struct StorageArgs {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
}

pub(super) async fn run(api: &Api, args: StorageArgs, json: bool) -> Result<()> {
    match arguments::named_or_own(api, args.tenant).await? {
        Some(tenant) => {
            let storage: TenantStorageBody =
                api.get(&path(&["tenants", &tenant, "storage"])).await?;
            if json {
                return output::json(&storage);
            }
            tenants(&[storage]);
        }
        None => {
            let storage: StorageBody = api.get(&path(&["storage"])).await?;
            if json {
                return output::json(&storage);
            }
            tenants(&storage.tenants);
            classes(&storage.databases);
            errors(&storage.databases);
        }
    }
    Ok(())
}

/// Prints each tenant with its sum and its budget, followed by its consumers.
fn tenants(tenants: &[TenantStorageBody]) {
    if tenants.iter().all(|tenant| tenant.consumers.is_empty()) {
        println!("there is no consumer yet");
        return;
    }
    let mut rows = Vec::new();
    for tenant in tenants {
        rows.push(tenant_row(tenant));
        rows.extend(tenant.consumers.iter().map(|consumer| consumer_row(tenant, consumer)));
    }
    let headings =
        ["CONSUMER", "MESSAGES", "SIZE", "PER DAY", "IN 30 DAYS", "LEVELS OFF AT", "BUDGET"];
    output::table(&headings, &rows);
    let is_sampled =
        tenants.iter().flat_map(|tenant| &tenant.consumers).any(|consumer| consumer.is_sampled);
    if is_sampled {
        println!("~: estimated, from a sample of each time partition");
    }
    tenants.iter().filter_map(excess).for_each(|line| println!("{line}"));
}

/// Returns the row of a tenant: its sums.
fn tenant_row(tenant: &TenantStorageBody) -> Vec<String> {
    let is_sampled = tenant.consumers.iter().any(|consumer| consumer.is_sampled);
    let levels: Option<Vec<_>> =
        tenant.consumers.iter().map(|consumer| consumer.levels_off_at_bytes).collect();
    vec![
        tenant.tenant.clone(),
        estimated(is_sampled, output::number(tenant.messages)),
        estimated(is_sampled, output::bytes(tenant.bytes)),
        estimated(is_sampled, output::bytes(tenant.bytes_per_day)),
        estimated(is_sampled, output::bytes(tenant.bytes_in_30_days)),
        level(is_sampled, levels.map(|levels| levels.iter().sum())),
        tenant.budget_bytes.map_or_else(|| "none".to_owned(), output::bytes),
    ]
}

fn consumer_row(tenant: &TenantStorageBody, consumer: &ConsumerStorageBody) -> Vec<String> {
    let is_sampled = consumer.is_sampled;
    vec![
        format!("{}/{}", tenant.tenant, consumer.consumer),
        estimated(is_sampled, output::number(consumer.messages)),
        estimated(is_sampled, output::bytes(consumer.bytes)),
        estimated(is_sampled, output::bytes(consumer.bytes_per_day)),
        estimated(is_sampled, output::bytes(consumer.bytes_in_30_days)),
        level(is_sampled, consumer.levels_off_at_bytes),
    ]
}

/// Marks a figure that comes of a sample.
fn estimated(is_sampled: bool, figure: String) -> String {
    if is_sampled { format!("~{figure}") } else { figure }
}

/// Returns the cell of the size at which an inbox levels off.
fn level(is_sampled: bool, bytes: Option<i64>) -> String {
    bytes.map_or_else(|| "never".to_owned(), |bytes| estimated(is_sampled, output::bytes(bytes)))
}

/// Returns the line of a tenant whose inbox is above its budget, or will be.
fn excess(tenant: &TenantStorageBody) -> Option<String> {
    let is_above = match tenant.budget_exceeded? {
        BudgetExcessBody::Now => "is above its budget",
        BudgetExcessBody::In30Days => "will be above its budget in 30 days",
    };
    Some(format!("the inbox of tenant `{}` {is_above}; messages go on", tenant.tenant))
}

/// Prints the exact sizes of time partitions, summed by retention class, with a column for the
/// tenant of a database where tenants have their own.
fn classes(databases: &[StorageDatabaseBody]) {
    let mut headings = vec!["CLASS", "PARTITIONS", "SIZE"];
    let has_tenants = databases.len() > 1;
    if has_tenants {
        headings.push("DATABASE OF");
    }
    let mut rows = Vec::new();
    for database in databases {
        let mut classes: BTreeMap<&str, (i64, i64)> = BTreeMap::new();
        for partition in &database.partitions {
            let (partitions, bytes) = classes.entry(&partition.class).or_default();
            (*partitions, *bytes) = (*partitions + 1, *bytes + partition.bytes);
        }
        for (class, (partitions, bytes)) in classes {
            let mut row = vec![class.to_owned(), output::number(partitions), output::bytes(bytes)];
            row.extend(has_tenants.then(|| database.label.name().unwrap_or_default().to_owned()));
            rows.push(row);
        }
    }
    println!();
    output::table(&headings, &rows);
}

/// Prints the databases that did not answer.
fn errors(databases: &[StorageDatabaseBody]) {
    for database in databases {
        if let Some(error) = &database.error {
            println!("{}: {error}", database.label);
        }
    }
}
