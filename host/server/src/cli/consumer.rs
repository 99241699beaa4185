//! `oncebox consumer …`

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_inbox::policy::{Ack, Policy};
use oncebox_kafka::{ConsumerConfig, Timing};

use super::{
    api::{Api, path},
    migration::{Open, read_text},
    output,
    wire::{Consumer, NewConsumer, Tenant},
};

#[derive(Subcommand)]
pub(super) enum ConsumerCommand {
    /// Create a consumer from its policy
    Create {
        /// Name: a-z, 0-9 and `-`
        name: String,
        /// The tenant
        #[arg(long)]
        tenant: String,
        /// TOML file with the policy
        #[arg(long)]
        policy: PathBuf,
    },
    /// List consumers
    List {
        /// Only this tenant's
        #[arg(long)]
        tenant: Option<String>,
    },
}

pub(super) async fn run(api: &Api, command: ConsumerCommand, json: bool) -> Result<()> {
    match command {
        ConsumerCommand::Create { name, tenant, policy } => {
            let parsed = read_policy(&tenant, &name, &policy, &|path| std::fs::read(path))?;
            let new = NewConsumer { name: name.clone(), policy: policy_object(&parsed)? };
            let consumer: Consumer = api.post(&path(&["tenants", &tenant, "consumers"]), &new).await?;
            if json {
                return output::json(&consumer);
            }
            println!("consumer `{tenant}/{name}` created; it starts with its first deployment");
            println!("collapses: {}", oncebox_inbox::collapses(&parsed.identity));
            if parsed.ack == Ack::AfterInsert {
                println!(
                    "warning: `after_insert` acks what has not run yet; the backlog is in the inbox, and the broker's lag no longer shows it"
                );
            }
            Ok(())
        }
        ConsumerCommand::List { tenant } => list(&all(api, tenant.as_deref()).await?, json),
    }
}

/// A policy of a file, checked.
pub(super) fn read_policy(tenant: &str, name: &str, path: &Path, open: Open<'_>) -> Result<Policy> {
    let text = read_text(path, open).with_context(|| format!("failed to read the policy `{}`", path.display()))?;
    let invalid = || format!("the policy `{}` is not valid", path.display());
    let policy = Policy::parse(&text).with_context(invalid)?;
    check_kafka(tenant, name, &policy).with_context(invalid)?;
    Ok(policy)
}

/// A policy as the API takes it.
pub(super) fn policy_object(policy: &Policy) -> Result<serde_json::Map<String, serde_json::Value>> {
    serde_json::from_value(serde_json::to_value(policy)?).context("a policy is an object")
}

/// What only the client of the broker knows: properties that are not a policy's to set.
pub(crate) fn check_kafka(tenant: &str, name: &str, policy: &Policy) -> Result<()> {
    let config = ConsumerConfig {
        tenant: tenant.to_owned(),
        consumer: name.to_owned(),
        topics: policy.topics.clone(),
        kafka: policy.kafka.clone(),
        host_properties: BTreeMap::new(),
        timing: Timing::default(),
    };
    Ok(config.check()?)
}

/// The consumers of a tenant, or of all.
pub(super) async fn all(api: &Api, tenant: Option<&str>) -> Result<Vec<Consumer>> {
    let tenants = match tenant {
        Some(tenant) => vec![tenant.to_owned()],
        None => api.get::<Vec<Tenant>>(&path(&["tenants"])).await?.into_iter().map(|tenant| tenant.name).collect(),
    };
    let mut all = Vec::new();
    for tenant in tenants {
        all.extend(api.get::<Vec<Consumer>>(&path(&["tenants", &tenant, "consumers"])).await?);
    }
    Ok(all)
}

fn list(consumers: &[Consumer], json: bool) -> Result<()> {
    if json {
        return output::json(&consumers);
    }
    let mut rows = Vec::new();
    for consumer in consumers {
        let readable = || format!("the policy of consumer `{}/{}` is not readable", consumer.tenant, consumer.name);
        let policy: Policy = serde_json::from_value(consumer.policy.clone()).with_context(readable)?;
        rows.push(vec![
            consumer.tenant.clone(),
            consumer.name.clone(),
            policy.topics.join(","),
            consumer.policy["ack"].as_str().unwrap_or_default().to_owned(),
            consumer.generation.to_string(),
            oncebox_inbox::collapses(&policy.identity).into_owned(),
        ]);
    }
    output::table(&["TENANT", "CONSUMER", "TOPICS", "ACK", "GENERATION", "COLLAPSES"], &rows);
    Ok(())
}
