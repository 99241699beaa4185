//! Replays of a fixture's consumers: planned, started and worked on.

use std::process::Output;

use oncebox_control::{ReplayFilter, ReplayJob, ReplayStart};
use oncebox_inbox::{ConsumerInbox, replay};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::inbox::{InboxFixture, TestConsumer};

/// The lines of a policy whose consumer may be replayed, in the simplest way.
pub const PROJECTION: &str = "payload = 'all'\nreplay = { kind = 'projection' }";

/// Plans a replay of these messages, and starts it with all that any kind asks for.
pub async fn begin(
    fixture: &InboxFixture,
    consumer: &TestConsumer,
    filter: &ReplayFilter,
) -> ReplayJob {
    let (tenant, name) = (&consumer.row.tenant, &consumer.row.name);
    let plan = fixture.control.replays().plan(tenant, name, filter).await.expect("a plan");
    let start = start_of(plan.token, plan.found);
    fixture.control.replays().start(tenant, name, &start).await.expect("a start")
}

/// A start with all that any kind asks for.
pub fn start_of(token: String, found: i64) -> ReplayStart {
    ReplayStart {
        token,
        reason: "a test".to_owned(),
        confirm: Some(found),
        reset_done: true,
        effects_suppressed: true,
    }
}

/// Works on the consumer's replay until this host has none any more.
pub async fn work_off(host: &ConsumerInbox) {
    let stop = CancellationToken::new();
    while replay::work_off(host, &stop).await.expect("no fault of the host") {}
}

/// A replay as it is now.
pub async fn job(fixture: &InboxFixture, consumer: &TestConsumer, replay_id: i64) -> ReplayJob {
    let (tenant, name) = (&consumer.row.tenant, &consumer.row.name);
    fixture.control.replays().show(tenant, name, replay_id).await.expect("the replay").job
}

/// Takes away what the messages did, as an operator who resets a projection: after a replay each
/// completed message has its effect once more.
pub async fn reset(fixture: &InboxFixture, consumer: &TestConsumer) {
    let TestConsumer { tenant, row, .. } = consumer;
    let delete =
        format!("DELETE FROM {}.effect WHERE consumer = '{}'", tenant.schema_name, row.name);
    fixture.execute(delete).await;
}

/// Runs a host in a process of its own, which works on the replay of `acme/orders` until none is
/// left, or dies at a fail point.
pub async fn run_worker(program: &str, fixture: &InboxFixture, fail_point: Option<&str>) -> Output {
    let mut worker = Command::new(program);
    worker
        .env("ONCEBOX_TEST_URL", fixture.url())
        .env("ONCEBOX_TEST_KEY", fixture.master_key())
        .env_remove("ONCEBOX_FAILPOINT");
    if let Some(point) = fail_point {
        worker.env("ONCEBOX_FAILPOINT", point);
    }
    worker.output().await.expect("a worker")
}

/// The lease of a worker that died runs out, as it does with the time.
pub async fn end_leases(fixture: &InboxFixture) {
    fixture
        .execute(
            "UPDATE oncebox.replay SET locked_until = now() - interval '1 s' WHERE locked_until \
                IS NOT NULL",
        )
        .await;
}
