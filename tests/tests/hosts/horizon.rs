//! The proof that an inbox remembers for longer than brokers keep records, against real brokers.
//! What could go wrong: a consumer is made although a redelivery would have its effect again, one is
//! refused although nothing can run twice, a pattern hides the topic that is kept longest, or nobody
//! hears of it when an operator of the brokers keeps a topic for longer.

use std::time::Duration;

use anyhow::{Result, ensure};
use oncebox_tests::{
    host::{HostFixture, Options},
    program::{CommandOutput, WorkingDir},
    wait,
};
use serde_json::Value;

const HOUR: &str = "3600000";
const WEEK: &str = "604800000";
const RUN: &str = "replay = { past_horizon = 'run' }";

async fn fixture() -> Result<HostFixture> {
    HostFixture::with(Options { static_members: false, ..Options::default() }).await
}

/// Lets the brokers keep the records of the fixture's topic for a time.
async fn keep(fixture: &HostFixture, retention_ms: &str) -> Result<()> {
    let settings = [("retention.ms", retention_ms), ("segment.ms", HOUR)];
    fixture.kafka().set_topic(&fixture.topic, &settings).await
}

/// An operator's folder, with the names that its commands need.
struct Operator {
    folder: WorkingDir,
    tenant: String,
    topic: String,
}

impl Operator {
    fn of(fixture: &HostFixture) -> Result<Self> {
        let (tenant, topic) = (fixture.tenant.name.clone(), fixture.topic.clone());
        Ok(Self { folder: fixture.folder()?, tenant, topic })
    }

    /// Run a command about a consumer with a policy on a topic.
    async fn with_policy(
        &self,
        verb: &[&str],
        name: &str,
        topic: &str,
        more: &str,
    ) -> Result<CommandOutput> {
        let policy = format!("topics = ['{topic}']\nack = 'after_commit'\n{more}\n");
        self.folder.write("policy.toml", policy)?;
        let of = [name, "--tenant", self.tenant.as_str(), "--policy", "policy.toml"];
        self.folder.run(&[&["consumer"], verb, &of].concat(), "").await
    }

    async fn create(&self, name: &str, more: &str) -> Result<CommandOutput> {
        self.with_policy(&["create"], name, &self.topic, more).await
    }

    async fn explain(&self, name: &str) -> Result<Value> {
        let words = ["retention", "explain", name, "--tenant", self.tenant.as_str(), "--json"];
        self.folder.run(&words, "").await?.json()
    }

    async fn verdict(&self, name: &str) -> Result<String> {
        Ok(self.explain(name).await?["verdict"].as_str().unwrap_or_default().to_owned())
    }
}

fn passes(said: &CommandOutput, is_warned: bool) -> Result<()> {
    let warns = said.stdout.contains("warning: the inbox forgets too soon: `retention.ms` of ");
    ensure!(said.code == Some(0) && warns == is_warned, "{said:?}");
    Ok(())
}

fn is_refused(said: &CommandOutput, parts: &[&str]) -> Result<()> {
    let all = parts.iter().all(|part| said.stderr.contains(part));
    ensure!(said.code == Some(1) && said.stdout.is_empty() && all, "{parts:?}: {said:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_that_is_too_short_is_refused() {
    refused().await.unwrap();
}

async fn refused() -> Result<()> {
    let fixture = fixture().await?;
    let operator = Operator::of(&fixture)?;
    let of_topic = format!("topic `{}` is ", operator.topic);

    keep(&fixture, HOUR).await?;
    passes(&operator.create("first", RUN).await?, false)?;
    ensure!(operator.verdict("first").await? == "holds");

    keep(&fixture, WEEK).await?;
    let refusal = [
        of_topic.as_str(),
        "604800000 (7 d), which needs a memory of 14 d, and `retention = \"7d\"`",
        "choose `retention = \"30d\"`",
        "`replay.past_horizon = \"park\"`",
        "a shorter `retention.ms` of topic",
    ];
    // S1-047.
    is_refused(&operator.create("second", RUN).await?, &refusal)?;
    passes(&operator.create("third", "").await?, true)?;
    passes(&operator.create("fourth", &format!("retention = '30d'\n{RUN}")).await?, false)?;
    for (name, verdict) in [("first", "too_short"), ("third", "parked"), ("fourth", "holds")] {
        let found = operator.verdict(name).await?;
        ensure!(found == verdict, "`{name}`: {found}");
    }
    let explained = operator.explain("first").await?;
    ensure!(explained["needed_ms"] == 1_209_600_000_u64, "{explained}");
    ensure!(explained["remembered_ms"] == 604_800_000_u64, "{explained}");

    // Another key of a consumer that is too short already may change.
    let set = ["policy", "set", "--wait", "0", "--yes"];
    let topic = operator.topic.as_str();
    is_refused(&operator.with_policy(&set, "third", topic, RUN).await?, &refusal)?;
    let other_key = format!("batch.messages_max = 7\n{RUN}");
    passes(&operator.with_policy(&set, "first", topic, &other_key).await?, false)?;

    keep(&fixture, "-1").await?;
    let for_ever = ["-1 (for ever), which needs a memory for ever", "`retention = \"permanent\"`"];
    is_refused(&operator.create("fifth", &format!("retention = '1y'\n{RUN}")).await?, &for_ever)?;
    let pattern = format!("^{}$", topic.replace('.', "\\."));
    is_refused(&operator.with_policy(&["create"], "fifth", &pattern, RUN).await?, &for_ever)?;
    passes(&operator.create("fifth", &format!("retention = 'permanent'\n{RUN}")).await?, false)?;
    ensure!(operator.verdict("fifth").await? == "holds");

    // A topic that does not exist keeps nothing, and no question makes it.
    let missing = format!("{topic}.missing");
    for name in ["sixth", "seventh"] {
        passes(&operator.with_policy(&["create"], name, &missing, RUN).await?, false)?;
        let explained = operator.explain(name).await?;
        ensure!(explained["verdict"] == "unknown", "{explained}");
        let conclusion = explained["conclusion"].as_str().unwrap_or_default();
        ensure!(conclusion.contains("the brokers know no such topic yet"), "{explained}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_notices_that_a_topic_is_kept_for_longer() {
    noticed().await.unwrap();
}

async fn noticed() -> Result<()> {
    const SHORT: &str = "oncebox_consumer_horizon_short";
    let fixture = fixture().await?;
    keep(&fixture, WEEK).await?;
    let run = r#"UPDATE oncebox.consumer SET policy = policy || '{"replay": {"past_horizon": "run"}}' WHERE consumer_id = {consumer}"#;
    fixture.execute(run).await?;
    let host = fixture.start_ready("a", &[("ONCEBOX_KAFKA_HORIZON_CHECK_MS", "500")]).await?;
    let of = [fixture.tenant.name.as_str()];
    // S1-047.
    host.until_metric(SHORT, &of, 1.0).await?;
    host.until_metric("oncebox_consumer_horizon_needed_seconds", &of, 1_209_600.0).await?;
    host.until_metric("oncebox_consumer_horizon_remembered_seconds", &of, 604_800.0).await?;
    keep(&fixture, HOUR).await?;
    host.until_metric(SHORT, &of, 0.0).await?;
    keep(&fixture, WEEK).await?;
    host.until_metric(SHORT, &of, 1.0).await?;
    let lines = (host.log_lines("horizon too short"), host.log_lines("horizon no longer short"));
    ensure!(lines == (2, 1), "each change is one line: {lines:?}");

    // The gauges of a consumer that no longer runs here are gone.
    fixture.ok(&["consumer", "pause", "payments", "--tenant", &fixture.tenant.name]).await?;
    wait::until(
        Duration::from_secs(30),
        Duration::from_millis(100),
        async || Ok(host.samples(SHORT).await.is_empty()),
        async || "the gauge stays".to_owned(),
    )
    .await?;
    host.stop().await
}
