//! `oncebox consumer …`

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use oncebox_inbox::{
    Admin,
    policy::{Ack, Policy},
};
use oncebox_kafka::{ConsumerConfig, Timing};

use super::output;

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
    List,
}

pub(super) async fn run(admin: &Admin, command: ConsumerCommand, json: bool) -> Result<()> {
    match command {
        ConsumerCommand::Create { name, tenant, policy } => {
            let text = std::fs::read_to_string(&policy).with_context(|| format!("failed to read the policy `{}`", policy.display()))?;
            let parsed = Policy::parse(&text).with_context(|| format!("the policy `{}` is not valid", policy.display()))?;
            check_kafka(&tenant, &name, &parsed).with_context(|| format!("the policy `{}` is not valid", policy.display()))?;
            let consumer = admin.create_consumer(&tenant, &name, &parsed).await?;
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
        ConsumerCommand::List => list(admin, json).await,
    }
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

async fn list(admin: &Admin, json: bool) -> Result<()> {
    let consumers = admin.consumers().await?;
    if json {
        return output::json(&consumers);
    }
    let mut rows = Vec::new();
    for consumer in &consumers {
        let policy = consumer.policy()?;
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
