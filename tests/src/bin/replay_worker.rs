//! A host's worker of replays, for tests that kill it: it works on the replay of `acme/orders`
//! until none is left.
//! Its handler does what the messages say, and emits what they say.

use std::sync::Arc;

use anyhow::Result;
use oncebox_control::{Control, MasterKey};
use oncebox_inbox::{Budget, ConsumerInbox, SessionSettings, Sessions, replay};
use oncebox_tests::{
    inbox::{PlainHandlers, ScriptControl},
    outgoing::emitter,
};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<()> {
    let key = MasterKey::parse(&std::env::var("ONCEBOX_TEST_KEY")?)?;
    let control = Control::new(std::env::var("ONCEBOX_TEST_URL")?.parse()?, key, "worker");
    let tenant = control.tenants().get("acme").await?;
    let row = control.consumers().get("acme", "orders").await?;
    let target = control.tenant_databases().session_target(&tenant)?;
    let sessions = Sessions::of(target, &SessionSettings::default(), Budget::new(8));
    let policy = row.policy()?;
    let control: Arc<ScriptControl> = Arc::default();
    let inbox = ConsumerInbox::new(
        row.consumer_id,
        row.tenant,
        row.name,
        policy,
        format!("worker-{}", std::process::id()),
        sessions,
        PlainHandlers::of(emitter(&control)),
    );
    let stop = CancellationToken::new();
    while replay::work_off(&inbox, &stop).await? {}
    Ok(())
}
