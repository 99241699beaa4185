//! The proof that an inbox remembers for longer than brokers keep records, against real brokers.
//! What could go wrong: a consumer is made although a redelivery would have its effect again, one is
//! refused although nothing can run twice, a pattern hides the topic that is kept longest, nobody
//! hears of it when an operator of the brokers keeps a topic for longer, or the memory of a new
//! consumer is not raised where its owner wants that.

use std::time::Duration;

use anyhow::{Result, ensure};
use oncebox_tests::{
    host::{HostFixture, Options},
    program::{CommandOutput, WorkingDir},
    wait::{self, DEADLINE},
};
use serde_json::{Value, json};

const HOUR: &str = "3600000";
const WEEK: &str = "604800000";
const RUN: &str = "replay = { past_horizon = 'run' }";
const RAISE: &str = "replay = { horizon = 'raise' }";
/// Number of entries of the audit log about a raise of the consumer whose name stands for `{name}`.
const RAISES: &str = "SELECT count(*) FROM oncebox.audit WHERE action = 'consumer.raise' AND \
    subject LIKE '%/{name}'";

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

/// What could go wrong: a raise is silent; a bound of the policy is passed over; an existing
/// consumer passes since its policy says "raise", or its memory is raised after all; or a
/// contradiction passes since its records would be parked.
#[tokio::test(flavor = "multi_thread")]
async fn a_memory_that_is_too_short_is_raised_where_the_policy_says_so() {
    raised().await.unwrap();
}

async fn raised() -> Result<()> {
    const RAISED: &str = "warning: the memory is raised from `7d` to `30d` (`replay.horizon = \
        \"raise\"`): `retention.ms` of topic";
    const CLASS: &str = "SELECT retention_class::bigint FROM oncebox.consumer WHERE name = 'older'";
    let fixture = fixture().await?;
    let operator = Operator::of(&fixture)?;
    let topic = operator.topic.clone();
    let set = ["policy", "set", "--wait", "0", "--yes"];
    let audited = async |name: &str| fixture.number(&RAISES.replace("{name}", name)).await;

    keep(&fixture, HOUR).await?;
    passes(&operator.create("older", "").await?, false)?;
    keep(&fixture, WEEK).await?;
    // A new consumer gets the class itself.
    let said = operator.create("newer", RAISE).await?;
    ensure!(said.code == Some(0) && said.stdout.contains(RAISED), "{said:?}");
    let explained = operator.explain("newer").await?;
    ensure!(explained["verdict"] == "holds" && explained["retention"] == "30d", "{explained}");
    ensure!(explained["raise_to"].is_null() && explained["raise_bound"] == "1y", "{explained}");
    ensure!(audited("newer").await? == 1);
    let again = operator.with_policy(&set, "newer", &topic, RAISE).await?;
    ensure!(again.code == Some(0) && again.stdout.contains("is that already"), "{again:?}");

    // The class of an existing one stays, whatever its policy says.
    let run = "replay = { horizon = 'raise', past_horizon = 'run' }";
    let parts = ["`retention = \"30d\"` for a new consumer", "an existing one cannot be raised"];
    // S1-047.
    is_refused(&operator.with_policy(&set, "older", &topic, run).await?, &parts)?;
    let said = operator.with_policy(&set, "older", &topic, RAISE).await?;
    passes(&said, true)?;
    ensure!(!said.stdout.contains("is raised"), "{said:?}");
    let explained = operator.explain("older").await?;
    ensure!(explained["verdict"] == "parked" && explained["retention"] == "7d", "{explained}");
    ensure!(explained["raise_to"] == "30d", "{explained}");
    let described = explained["raise"].as_str().unwrap_or_default();
    ensure!(described.contains("would be raised from `7d` to `30d`"), "{explained}");
    ensure!(audited("older").await? == 0 && fixture.number(CLASS).await? == 1);

    // Factors that contradict what the brokers do, and a bound that does not suffice.
    let bounded = "replay = { horizon = 'raise', raise_max = '7d' }";
    let parts = ["needs a memory of 14 d", "`replay.raise_max` lets the memory be raised to `7d`"];
    is_refused(&operator.create("bounded", bounded).await?, &parts)?;
    for more in ["", RAISE] {
        let legal = format!("{more}\nfactors = {{ legal_max_days = 10 }}");
        let parts = [
            "`factors.legal_max_days` contradicts the longest redelivery: it is 10",
            "`retention.ms` of topic",
        ];
        // S1-046.
        is_refused(&operator.create("legal", &legal).await?, &parts)?;
        is_refused(&operator.with_policy(&set, "older", &topic, &legal).await?, &parts)?;
    }
    let factors = "retention = '30d'\nfactors = { replay_days = 9, legal_max_days = 50, \
        budget_bytes = 1000000 }";
    passes(&operator.create("factors", factors).await?, false)?;
    let explained = operator.explain("factors").await?;
    let inputs = explained["inputs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let decisive: Vec<_> = inputs
        .iter()
        .filter(|input| input["decides"] == true)
        .map(|input| (&input["factor"], &input["needs"], &input["allows"]))
        .collect();
    // S1-046: each factor is shown with its number, and those that decide are marked.
    ensure!(
        decisive
            == [
                (&json!("replay window"), &json!("18 d"), &Value::Null),
                (&json!("law"), &Value::Null, &json!("50 d")),
            ],
        "{explained}"
    );
    let words = ["retention", "explain", "factors", "--tenant", operator.tenant.as_str()];
    let table = operator.folder.run(&words, "").await?.stdout;
    for factor in ["broker retention", "dead letters", "effect risk", "id uniqueness", "cost"] {
        ensure!(table.lines().any(|line| line.starts_with(factor)), "{factor}: {table}");
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
    let run = r#"UPDATE oncebox.consumer SET policy = policy || '{"replay": {"past_horizon": "run", "horizon": "raise"}}' WHERE consumer_id = {consumer}"#;
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
    let raises = fixture.number(&RAISES.replace("{name}", "payments")).await?;
    ensure!(raises == 0, "a host raises nothing");

    // The gauges of a consumer that no longer runs here are gone.
    fixture.ok(&["consumer", "pause", "payments", "--tenant", &fixture.tenant.name]).await?;
    wait::until(
        DEADLINE,
        Duration::from_millis(100),
        async || Ok(host.samples(SHORT).await.is_empty()),
        async || "the gauge stays".to_owned(),
    )
    .await?;
    host.stop().await
}
