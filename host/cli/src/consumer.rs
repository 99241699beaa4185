//! `oncebox consumer …`

mod change;
mod lag;
mod readiness;
mod secret;
mod seek;
mod show;
mod wait;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use oncebox_api::wire::{ConsumerBody, NewConsumer};
use oncebox_devkit::{
    api::{Api, path},
    output,
    policy_file::{policy_object, read_policy},
};
use oncebox_model::policy::Ack;

use super::arguments;

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
    /// Show a consumer, and how the hosts are with it
    Show(Named),
    /// A consumer's policy
    #[command(subcommand)]
    Policy(ConsumerPolicyCommand),
    /// The secret by which the consumer knows the senders of messages over HTTP
    #[command(subcommand)]
    Secret(secret::SecretCommand),
    /// Answer the seven parts of the baseline from facts; fails where one is not met
    Readiness(readiness::ReadinessArgs),
    /// Show the records that its group has not acked, by partition
    Lag(Named),
    /// Stop a consumer: hosts finish the batches that they run
    Pause(Waited),
    /// Let a consumer run again
    Resume(Waited),
    /// Read nothing more, finish what is in the inbox, then pause
    Drain(Waited),
    /// Let a consumer's group go on elsewhere; says first what that means
    Seek(seek::SeekArgs),
    /// Delete a consumer with its inbox, its deployments and its group
    Delete {
        #[command(flatten)]
        of: Waited,
        /// The consumer's name again: its inbox is deleted for good
        #[arg(long, value_name = "NAME")]
        confirm: String,
    },
}

#[derive(Subcommand)]
pub(super) enum ConsumerPolicyCommand {
    /// Print the policy as a file of it
    Show(Named),
    /// Say in sentences what it does, and answer what is asked of a consumer before it is relied on
    Explain(Named),
    /// Change the policy to what a file says; says what changes, and what follows
    Set(change::SetArgs),
}

/// A consumer that is there.
#[derive(Args)]
pub(super) struct Named {
    /// The consumer
    name: String,
    /// Its tenant
    #[arg(long)]
    tenant: String,
}

impl Named {
    /// Returns a path of the API, below the consumer.
    fn path(&self, below: &[&str]) -> String {
        path(&[&["tenants", &self.tenant, "consumers", &self.name], below].concat())
    }

    fn shown(&self) -> String {
        format!("`{}/{}`", self.tenant, self.name)
    }
}

/// A consumer, and how long to wait for the hosts.
#[derive(Args)]
pub(super) struct Waited {
    #[command(flatten)]
    of: Named,
    #[command(flatten)]
    patience: wait::Patience,
}

pub(super) async fn run(api: &Api, command: ConsumerCommand, json: bool) -> Result<()> {
    match command {
        ConsumerCommand::Create { name, tenant, policy } => {
            let parsed = read_policy(&tenant, &name, &policy, &|path| std::fs::read(path))?;
            let new = NewConsumer { name: name.clone(), policy: policy_object(&parsed)? };
            let consumer: ConsumerBody =
                api.post(&path(&["tenants", &tenant, "consumers"]), &new).await?;
            if json {
                return output::json(&consumer);
            }
            println!("consumer `{tenant}/{name}` created; it starts with its first deployment");
            println!("collapses: {}", parsed.collapses());
            consumer.warnings.iter().for_each(|warning| println!("warning: {warning}"));
            if parsed.ingress.is_some() {
                println!(
                    "it takes messages over HTTP once it has a secret: `oncebox consumer secret set \
                        {name} --tenant {tenant}`"
                );
            }
            if parsed.ack == Ack::AfterInsert {
                println!(
                    "warning: `after_insert` acks what has not run yet; the backlog is in the \
                        inbox, and the broker's lag no longer shows it"
                );
            }
            Ok(())
        }
        ConsumerCommand::List { tenant } => show::list(&all(api, tenant.as_deref()).await?, json),
        ConsumerCommand::Show(of) => show::one(api, &of, json).await,
        ConsumerCommand::Policy(ConsumerPolicyCommand::Show(of)) => {
            show::policy(api, &of, json).await
        }
        ConsumerCommand::Policy(ConsumerPolicyCommand::Explain(of)) => {
            show::explain(api, &of, json).await
        }
        ConsumerCommand::Policy(ConsumerPolicyCommand::Set(args)) => {
            change::set_policy(api, &args, json).await
        }
        ConsumerCommand::Secret(command) => secret::run(api, command, json).await,
        ConsumerCommand::Readiness(args) => readiness::run(api, &args, json).await,
        ConsumerCommand::Lag(of) => lag::run(api, &of, json).await,
        ConsumerCommand::Pause(of) => change::state(api, &of, "pause", wait::For::Rest, json).await,
        ConsumerCommand::Resume(of) => {
            change::state(api, &of, "resume", wait::For::Work, json).await
        }
        ConsumerCommand::Drain(of) => {
            change::state(api, &of, "drain", wait::For::Drained, json).await
        }
        ConsumerCommand::Seek(args) => seek::run(api, &args, json).await,
        ConsumerCommand::Delete { of, confirm } => change::delete(api, &of, &confirm, json).await,
    }
}

/// Returns the consumers of a tenant, or of all that the caller sees.
pub(super) async fn all(api: &Api, tenant: Option<&str>) -> Result<Vec<ConsumerBody>> {
    let tenants = match tenant {
        Some(tenant) => vec![tenant.to_owned()],
        None => arguments::tenants(api).await?.into_iter().map(|tenant| tenant.name).collect(),
    };
    let mut all = Vec::new();
    for tenant in tenants {
        all.extend(api.get::<Vec<ConsumerBody>>(&path(&["tenants", &tenant, "consumers"])).await?);
    }
    Ok(all)
}
