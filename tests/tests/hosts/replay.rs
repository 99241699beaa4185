//! A replay on host processes: a paused consumer is started for it alone, a host that dies hands it
//! on, and the consumer is at rest again when it ends.

use std::time::Duration;

use anyhow::{Result, ensure};
use oncebox_control::{ReplayFilter, ReplayStart};
use oncebox_tests::{
    host::{HostFixture, Options},
    load::{Load, Work},
    wait::{self, DEADLINE},
};

const CONSUMER: &str = "payments";
const MESSAGES: usize = 60;

/// What could go wrong: no host works on the replay of a paused consumer, or it reads new messages
/// in it; the replay ends with its host, or a message is replayed twice; the consumer goes on after
/// the replay. S1-110.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_consumer_is_started_for_its_replay_and_rests_again() {
    replay_while_paused(false).await.unwrap();
}

/// What could go wrong: hosts look for the replay in their own database, and it is in the tenant's.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_in_a_tenants_own_database_starts_its_paused_consumer() {
    replay_while_paused(true).await.unwrap();
}

async fn replay_while_paused(own_database: bool) -> Result<()> {
    let policy = "payload = 'all'\nreplay = { kind = 'analytics' }";
    let fixture = HostFixture::with(Options { policy, own_database, ..Options::default() }).await?;
    let [first, _second] =
        [fixture.start_ready("a", &[]).await?, fixture.start_ready("b", &[]).await?];
    fixture.send(&Load::of((0..MESSAGES).map(|_| Work::Sleeps(20)))).await?;
    fixture.wait_settled().await?;
    let tenant = fixture.tenant.name.clone();
    fixture.control.consumers().pause(&tenant, CONSUMER).await?;
    until_at_rest(&fixture, 2).await?;
    fixture
        .execute("DELETE FROM {schema}.ledger_entry; UPDATE {schema}.account SET balance = 0")
        .await?;
    let replays = fixture.control.replays();
    let plan = replays.plan(&tenant, CONSUMER, &ReplayFilter::default()).await?;
    ensure!(plan.found == MESSAGES as i64, "the plan found {}", plan.found);
    let start = ReplayStart {
        token: plan.token,
        reason: "a test".to_owned(),
        reset_done: true,
        ..ReplayStart::default()
    };
    replays.start(&tenant, CONSUMER, &start).await?;
    // What comes while it is paused is not read.
    fixture.send(&Load::of([Work::Pay]).named("new")).await?;
    fixture.until("SELECT coalesce(max(replayed), 0) FROM oncebox.replay", 5).await?;
    first.kill().await?;
    // A lease of its own runs out, as it does with the time; the other host renews its own.
    const RUN_OUT: &str = "UPDATE oncebox.replay SET locked_until = now() - interval '1 s' \
        WHERE locked_until IS NOT NULL";
    fixture.execute(RUN_OUT).await?;
    fixture.until("SELECT count(*) FROM oncebox.replay WHERE state = 'done'", 1).await?;
    let done = replays.show(&tenant, CONSUMER, plan.replay_id).await?.job;
    ensure!((done.replayed, done.failed, done.suppressed) == (MESSAGES as i64, 0, 0), "{done:?}");
    until_at_rest(&fixture, 1).await?;
    ensure!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE message_id LIKE 'new-%'").await?
            == 0,
        "a paused consumer read a message"
    );
    fixture.control.consumers().resume(&tenant, CONSUMER).await?;
    fixture.wait_settled().await?;
    fixture.check().await
}

/// Waits until the consumer is stopped on as many hosts. They say so in the host's database.
async fn until_at_rest(fixture: &HostFixture, hosts: i64) -> Result<()> {
    const AT_REST: &str = "SELECT count(*) FROM oncebox.host_consumer c JOIN oncebox.consumer o \
        USING (consumer_id) WHERE c.status = 'stopped' AND c.status_revision = o.revision";
    let pool = &fixture.control.pool;
    wait::until(
        DEADLINE,
        Duration::from_millis(100),
        async || Ok(sqlx::query_scalar::<_, i64>(AT_REST).fetch_one(pool).await? >= hosts),
        async || format!("the consumer never rested on {hosts} hosts"),
    )
    .await
}
