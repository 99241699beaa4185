//! (c-emit), (c-quiet): the host with a component that has the effect of (c), and emits an outgoing
//! message of each message, or none. Both are built here, and differ in the emit alone.

use std::process::Command;

use anyhow::{Context, Result};
use oncebox_model::policy::Policy;
use oncebox_tests::guests::{Emit, End, Step, component};
use serde_json::json;

use super::{
    Setting,
    host::{self, CONSUMER, control, deploy_with, policy},
};
use crate::{
    sent::{SENT, sent_topic},
    servers::{Database, Servers},
};

/// Type of the outgoing messages.
pub const EMITTED_TYPE: &str = "order.accepted";

const INSERT: &str = "INSERT INTO orders (id, account, amount, note) SELECT \
    $1::json->>'order_id', ($1::json->>'account')::int, ($1::json->>'amount')::bigint, \
    $1::json->>'note'";
const UPDATE: &str = "UPDATE account SET balance = balance + ($1::json->>'amount')::bigint, \
    n = n + 1 WHERE id = ($1::json->>'account')::int";
/// Instructions that make the id of the guest's message its key. Messages come without one, and an
/// emit has the key of the message.
const ID_AS_KEY: &str = "(i32.store8 offset=24 (local.get $message) (i32.const 1)) \
    (i64.store offset=28 (local.get $message) (i64.load (local.get $message)))";

pub(super) async fn command(setting: &Setting<'_>, emits: bool) -> Result<Command> {
    let Setting { servers, database, .. } = *setting;
    let policy = policy(setting.topic, setting.group, setting.batch)?;
    let topic = emits.then(|| sent_topic(setting.group));
    create(servers, database, &policy, topic.as_deref()).await?;
    host::program(servers, database, setting.programs, setting.log)
}

/// Creates a consumer, makes a component live that emits to a topic, or emits nothing, and returns
/// the consumer's key.
pub async fn create(
    servers: &Servers,
    database: &Database,
    policy: &Policy,
    topic: Option<&str>,
) -> Result<i32> {
    let (control, tenant) = (control(servers, database)?, &servers.tenant.name);
    let limits = json!({ "destinations_allowed": [format!("kafka:{SENT}*")] });
    let limits = limits.as_object().context("limits are an object")?;
    control.tenants().set_limits(tenant, limits).await?;
    let created = control.consumers().create(tenant, CONSUMER, policy).await?;
    let grants = topic.map(|_| "emit".to_owned()).into_iter().collect();
    deploy_with(&control, servers, &guest(topic), grants).await?;
    control.pool.close().await;
    Ok(created.consumer_id)
}

/// Returns the component.
fn guest(topic: Option<&str>) -> Vec<u8> {
    let mut steps = vec![
        Step::ExecuteWithPayload(INSERT.to_owned()),
        Step::GiveUpOnError,
        Step::ExecuteWithPayload(UPDATE.to_owned()),
        Step::GiveUpOnError,
    ];
    if let Some(topic) = topic {
        steps.push(Step::Wat(ID_AS_KEY.to_owned()));
        steps.push(Step::Emit(Emit::to(format!("kafka:{topic}"), EMITTED_TYPE)));
    }
    component(&steps, &End::Ok)
}
