//! (c), (e), (g): the shipped `oncebox` program, configured by its environment.

use std::process::Command;

use anyhow::Result;
use oncebox_control::{Control, MasterKey, NewDeployment};
use oncebox_devkit::local::free_port;
use oncebox_model::policy::Policy;

use super::{Batch, Setting};
use crate::servers::{Database, Servers};

/// Name of the consumer.
pub const CONSUMER: &str = "orders";

pub(super) async fn command(
    setting: &Setting<'_>,
    batch: Batch,
    component: &[u8],
) -> Result<Command> {
    let admin = create_consumer(setting, batch).await?;
    deploy(&admin, setting.servers, component).await?;
    let mut command = Command::new(setting.programs.bin.join("oncebox"));
    for (variable, _) in std::env::vars().filter(|(variable, _)| variable.starts_with("ONCEBOX_")) {
        command.env_remove(variable);
    }
    command
        .arg("serve")
        .current_dir(setting.log.parent().unwrap_or(&setting.programs.root))
        .env("ONCEBOX_DATABASE_URL", &setting.database.url)
        .env("ONCEBOX_KAFKA_BROKERS", setting.servers.kafka.bootstrap())
        .env("ONCEBOX_MASTER_KEY", &setting.servers.master_key)
        .env("ONCEBOX_HTTP_LISTEN", format!("127.0.0.1:{}", free_port()?))
        .env("ONCEBOX_API_LISTEN", "127.0.0.1:0")
        .env("ONCEBOX_RUNTIME_CACHE_DIR", setting.programs.root.join("target/bench/cache"))
        .env("ONCEBOX_LOG_FORMAT", "text");
    Ok(command)
}

/// Creates the consumer. Its policy has the defaults but for the batch.
pub(super) async fn create_consumer(setting: &Setting<'_>, batch: Batch) -> Result<Control> {
    let admin = admin(setting.servers, setting.database)?;
    admin
        .consumers()
        .create(
            &setting.servers.tenant.name,
            CONSUMER,
            &policy(setting.topic, setting.group, batch)?,
        )
        .await?;
    Ok(admin)
}

/// Returns the administration of a run's database.
pub fn admin(servers: &Servers, database: &Database) -> Result<Control> {
    Ok(Control::new(database.url.parse()?, MasterKey::parse(&servers.master_key)?, "bench"))
}

/// Makes a component live.
pub async fn deploy(admin: &Control, servers: &Servers, component: &[u8]) -> Result<()> {
    admin
        .versions()
        .deploy_compiled(
            &servers.tenant.name,
            CONSUMER,
            NewDeployment::stable("order.placed", "order", ""),
            component,
        )
        .await?;
    Ok(())
}

/// Creates a consumer that no host runs, for claims that the benchmark makes itself.
pub async fn create_claimant(servers: &Servers, database: &Database) -> Result<()> {
    let admin = admin(servers, database)?;
    admin
        .consumers()
        .create(&servers.tenant.name, CONSUMER, &policy("orders", "orders", Batch::DEFAULT)?)
        .await?;
    Ok(())
}

/// Returns a policy with the defaults but for the batch.
pub fn policy(topic: &str, group: &str, batch: Batch) -> Result<Policy> {
    let Batch { messages_max, duration_ms } = batch;
    let policy = format!(
        "topics = ['{topic}']\nack = 'after_commit'\n\
         identity = {{ id = [{{ header = 'message-id' }}], event_type = [{{ header = 'event-type' \
         }}] }}\n\
         batch = {{ messages_max = {messages_max}, duration_ms = {duration_ms} }}\n\
         kafka = {{ group = '{group}' }}"
    );
    Ok(Policy::parse(&policy)?)
}

/// Returns the reason why the host refuses transactions of this size; `None` where it accepts them.
pub fn refuses(batch: Batch) -> Option<String> {
    policy("t", "g", batch).err().map(|error| error.to_string())
}
