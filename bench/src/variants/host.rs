//! (c), (c1), (c2), (c3), (e), (g): the shipped `oncebox` program, configured by its environment.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use oncebox_control::{Control, MasterKey, NewDeployment};
use oncebox_devkit::local::free_port;
use oncebox_model::policy::{Policy, RowForm};

use super::{Batch, Programs, Setting, Variant};
use crate::servers::{Database, Servers};

/// Name of the consumer.
pub const CONSUMER: &str = "orders";

pub(super) async fn command(
    setting: &Setting<'_>,
    batch: Batch,
    rows: RowForm,
    component: &[u8],
) -> Result<Command> {
    let control = create_consumer(setting, batch, rows).await?;
    deploy(&control, setting.servers, component).await?;
    program(setting.servers, setting.database, setting.programs, setting.log)
}

/// Returns the command of a host on a database that holds its consumers already.
pub fn program(
    servers: &Servers,
    database: &Database,
    programs: &Programs,
    log: &Path,
) -> Result<Command> {
    let mut command = Command::new(programs.bin.join("oncebox"));
    for (variable, _) in std::env::vars().filter(|(variable, _)| variable.starts_with("ONCEBOX_")) {
        command.env_remove(variable);
    }
    command
        .arg("serve")
        .current_dir(log.parent().unwrap_or(&programs.root))
        .env("ONCEBOX_DATABASE_URL", &database.url)
        .env("ONCEBOX_KAFKA_BROKERS", servers.kafka.bootstrap())
        .env("ONCEBOX_MASTER_KEY", &servers.master_key)
        .env("ONCEBOX_HTTP_LISTEN", format!("127.0.0.1:{}", free_port()?))
        .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
        .env("ONCEBOX_RUNTIME_CACHE_DIR", programs.root.join("target/bench/cache"))
        .env("ONCEBOX_LOG_FORMAT", "text");
    Ok(command)
}

/// Creates the consumer. Its policy has the defaults but for the batch and the form of rows.
pub(super) async fn create_consumer(
    setting: &Setting<'_>,
    batch: Batch,
    rows: RowForm,
) -> Result<Control> {
    let control = control(setting.servers, setting.database)?;
    let policy = Policy { inbox: rows, ..policy(setting.topic, setting.group, batch)? };
    control.consumers().create(&setting.servers.tenant.name, CONSUMER, &policy).await?;
    Ok(control)
}

/// Returns the administration of a run's database.
pub fn control(servers: &Servers, database: &Database) -> Result<Control> {
    Ok(Control::new(database.url.parse()?, MasterKey::parse(&servers.master_key)?, "bench"))
}

/// Makes a component live.
pub async fn deploy(control: &Control, servers: &Servers, component: &[u8]) -> Result<()> {
    deploy_with(control, servers, component, Vec::new()).await
}

/// Makes a component live, with these grants.
pub async fn deploy_with(
    control: &Control,
    servers: &Servers,
    component: &[u8],
    grants: Vec<String>,
) -> Result<()> {
    let new = NewDeployment { grants, ..NewDeployment::stable("order.placed", "order", "") };
    control.versions().deploy_compiled(&servers.tenant.name, CONSUMER, new, component).await?;
    Ok(())
}

/// Creates a consumer with a policy, makes the component of (c) live, and returns the consumer's
/// key.
pub async fn create(
    servers: &Servers,
    programs: &Programs,
    database: &Database,
    policy: &Policy,
) -> Result<i32> {
    let component = programs.component(&Variant::Component);
    let component = std::fs::read(&component)
        .with_context(|| format!("failed to read `{}`", component.display()))?;
    create_with(servers, database, &component, policy).await
}

/// Creates a consumer with a policy, makes a component live, and returns the consumer's key.
pub async fn create_with(
    servers: &Servers,
    database: &Database,
    component: &[u8],
    policy: &Policy,
) -> Result<i32> {
    let control = control(servers, database)?;
    let created = control.consumers().create(&servers.tenant.name, CONSUMER, policy).await?;
    deploy(&control, servers, component).await?;
    control.pool.close().await;
    Ok(created.consumer_id)
}

/// Creates a consumer that no host runs, for claims that the benchmark makes itself.
pub async fn create_claimant(servers: &Servers, database: &Database) -> Result<()> {
    let control = control(servers, database)?;
    control
        .consumers()
        .create(&servers.tenant.name, CONSUMER, &policy("orders", "orders", Batch::DEFAULT)?)
        .await?;
    Ok(())
}

/// Returns a policy with the defaults but for the batch.
pub fn policy(topic: &str, group: &str, batch: Batch) -> Result<Policy> {
    policy_with(topic, group, batch, "")
}

/// Returns a policy with the defaults but for the batch and further lines.
pub fn policy_with(topic: &str, group: &str, batch: Batch, more: &str) -> Result<Policy> {
    let Batch { messages_max, duration_ms } = batch;
    let policy = format!(
        "topics = ['{topic}']\nack = 'after_commit'\n\
         identity = {{ id = [{{ header = 'message-id' }}], event_type = [{{ header = 'event-type' \
         }}] }}\n\
         batch = {{ messages_max = {messages_max}, duration_ms = {duration_ms} }}\n\
         kafka = {{ group = '{group}' }}\n\
         {more}"
    );
    Ok(Policy::parse(&policy)?)
}

/// Returns the reason why the host refuses transactions of this size; `None` where it accepts them.
pub fn refuses(batch: Batch) -> Option<String> {
    policy("t", "g", batch).err().map(|error| error.to_string())
}
