//! The seven parts of the baseline, answered on a real host, PostgreSQL and Kafka. What could go
//! wrong: a consumer that fails a part passes the gate, one that meets all does not, or what nobody
//! knows is taken for a yes.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use oncebox_control::NewDeployment;
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_model::policy::{IdSource, Policy};
use oncebox_tests::{
    guests::{self, End, Step},
    host::{HostFixture, Options},
    load::{Load, Work},
    program::WorkingDir,
    temp_dir::TempDir,
    wait::{self, DEADLINE},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::task::spawn_blocking;

const HOUR: &str = "3600000";
const WEEK: &str = "604800000";
/// The consumer of the fixture, which comes to meet all parts.
const SOUND: &str = "payments";
const EVENT_TYPE: &str = "payment.captured";
const MESSAGES: i64 = 3;

/// The declaration without which one part is not known.
const DECLARED: &str = "effects = { outside = 'none' }";

/// Consumers that fail one part each, with the lines of their policies.
const UNSOUND: [(&str, &str); 5] = [
    (
        "by-position",
        "identity = { id = [{ header = 'none' }, 'position'], event_type = [{ header = 'type' }] }",
    ),
    ("forgetful", "replay = { allowed = false, past_horizon = 'run' }"),
    ("recordless", "payload = 'none'"),
    ("undeclared", "effects = {}"),
    ("silent", "alerts = { pending_age_s = 0, parked = 0, dead_letters = 0, collisions = 0 }"),
];

/// An operator's folder, with the tenant that its commands name.
struct Gate {
    folder: WorkingDir,
    tenant: String,
}

/// The answers to the parts, with the facts of each, and the exit code.
struct Answered {
    parts: BTreeMap<String, String>,
    report: Value,
    code: Option<i32>,
}

impl Gate {
    async fn readiness(&self, consumer: &str, more: &[&str]) -> Result<Answered> {
        let words = ["consumer", "readiness", consumer, "--tenant", self.tenant.as_str(), "--json"];
        let said = self.folder.run(&[&words, more].concat(), "").await?;
        let report = said.json()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let parts = report["parts"].as_array().context("no parts")?;
        let parts = parts.iter().map(|part| (text(&part["part"]), text(&part["answer"]))).collect();
        Ok(Answered { parts, report, code: said.code })
    }

    /// Runs a command that succeeds.
    async fn ok(&self, words: &[&str]) -> Result<String> {
        let said = self.folder.run(words, "").await?;
        ensure!(said.code == Some(0), "{words:?}: {}{}", said.stdout, said.stderr);
        Ok(said.stdout)
    }

    /// Deploys a guest of one log line to the sound consumer, and returns its digest.
    async fn deploy(&self, file: &str, line: &str) -> Result<String> {
        let bytes = guests::component(&[Step::Log(line.to_owned())], &End::Ok);
        self.folder.write(file, &bytes)?;
        let of =
            ["--tenant", self.tenant.as_str(), "--consumer", SOUND, "--event-type", EVENT_TYPE];
        self.ok(&[&["deploy", file, "--handler", "ledger"], &of[..]].concat()).await?;
        Ok(hex::encode(Sha256::digest(&bytes)))
    }

    /// Stores a report as `oncebox verify --json` writes it.
    async fn attest(&self, digest: &str, is_passed: bool) -> Result<()> {
        let window = |is_failure: bool| json!({ "is_failure": is_failure, "killed": 1 });
        let report = json!({
            "digest": digest, "program_version": "0.1.0", "seed": 1, "findings": [],
            "messages": { "m-1": "completed" }, "is_passed": is_passed,
            "windows": [window(false), window(!is_passed)],
        });
        self.folder.write("report.json", report.to_string())?;
        let of = ["--tenant", self.tenant.as_str(), "--handler", "ledger"];
        self.ok(&[&["version", "attest", "report.json"], &of[..]].concat()).await.map(drop)
    }

    /// Fails unless exactly this part is not met, with this answer.
    async fn fails_only(&self, consumer: &str, part: &str, answer: &str) -> Result<()> {
        let answered = self.readiness(consumer, &[]).await?;
        let unmet: Vec<_> = answered
            .parts
            .iter()
            .filter(|(_, answer)| *answer != "met")
            .map(|(part, answer)| (part.as_str(), answer.as_str()))
            .collect();
        ensure!(unmet == [(part, answer)], "`{consumer}`: {unmet:?}: {:#}", answered.report);
        ensure!(answered.code == Some(1), "`{consumer}` passes the gate");
        Ok(())
    }
}

/// Waits until a consumer meets all parts.
async fn until_sound(gate: &Gate) -> Result<()> {
    wait::until(
        DEADLINE,
        Duration::from_millis(300),
        async || Ok(gate.readiness(SOUND, &[]).await?.code == Some(0)),
        async || match gate.readiness(SOUND, &[]).await {
            Ok(answered) => format!("the sound consumer is not ready: {:#}", answered.report),
            Err(error) => format!("{error:#}"),
        },
    )
    .await
}

/// Makes the consumers that fail a part, each with the version of the sound one.
async fn make_unsound(fixture: &HostFixture, digest: &str) -> Result<()> {
    let tenant = fixture.tenant.name.as_str();
    for (name, lines) in UNSOUND {
        let identity = match lines.starts_with("identity") {
            true => "",
            false => "identity = { id = [{ header = 'id' }], event_type = [{ header = 'type' }] }",
        };
        let effects = if lines.starts_with("effects") { "" } else { DECLARED };
        let topic = &fixture.topic;
        let policy =
            format!("topics = ['{topic}']\nack = 'after_commit'\n{identity}\n{effects}\n{lines}");
        fixture.control.consumers().create(tenant, name, &Policy::parse(&policy)?).await?;
        let new = NewDeployment::stable(EVENT_TYPE, "ledger", digest);
        fixture.control.deployments().deploy(tenant, name, &new).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_passes_when_it_meets_all_parts_and_only_then() {
    let folder = TempDir::new("readiness");
    let options = PostgresOptions::new(folder.path()).tcp(true);
    let postgres = spawn_blocking(move || PrivatePostgres::start(options)).await.unwrap().unwrap();
    gate(postgres.url()).await.unwrap();
    drop(postgres);
}

/// The shared server is made for speed and not for crashes, which the gate notices.
async fn gate(postgres: String) -> Result<()> {
    let options = Options {
        postgres: Some(postgres),
        partitions: 1,
        static_members: false,
        policy: DECLARED,
        ..Options::default()
    };
    let fixture = HostFixture::with(options).await?;
    let kept = async |ms: &str| {
        let settings = [("retention.ms", ms), ("segment.ms", HOUR)];
        fixture.kafka().set_topic(&fixture.topic, &settings).await
    };
    kept(HOUR).await?;
    let gate = Gate { folder: fixture.folder()?, tenant: fixture.tenant.name.clone() };

    // Nothing has run, and nobody looked into the component.
    let answered = gate.readiness(SOUND, &[]).await?;
    let expected = [
        ("crash_tests", "not_met"),
        ("durable_dedup", "met"),
        ("external_idempotency", "not_known"),
        ("observability", "not_met"),
        ("replay_policy", "met"),
        ("stable_id", "not_known"),
        ("transactional_effect", "met"),
    ];
    let found: Vec<_> = answered.parts.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    // S1-129.
    ensure!(found == expected && answered.code == Some(1), "{:#}", answered.report);

    let digest = gate.deploy("good.wasm", "one").await?;
    make_unsound(&fixture, &digest).await?;
    let host = fixture.start_ready("a", &[]).await?;
    fixture.send(&Load::of((0..MESSAGES).map(|_| Work::Pay))).await?;
    let all = MESSAGES * (UNSOUND.len() as i64 + 1);
    let completed = "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed'";
    fixture.until(completed, all).await?;
    gate.attest(&digest, true).await?;

    // Nobody has read the host's metrics yet.
    gate.fails_only(SOUND, "observability", "not_met").await?;
    // A part can be required alone.
    let (other, alone) = ("stable_id,crash_tests", "observability");
    let other = gate.readiness(SOUND, &["--require", other]).await?;
    let alone = gate.readiness(SOUND, &["--require", alone]).await?;
    ensure!((other.code, alone.code) == (Some(0), Some(1)), "{:#}", other.report);
    // One that meets all.
    host.metrics().await.context("the host has no metrics")?;
    until_sound(&gate).await?;
    let shown = gate.ok(&["consumer", "readiness", SOUND, "--tenant", &gate.tenant]).await?;
    let last = format!("consumer `{}/{SOUND}` meets all seven parts", gate.tenant);
    ensure!(shown.lines().last() == Some(last.as_str()), "{shown}");

    unsound(&fixture, &gate, kept).await?;
    host.stop().await
}

/// For each part a consumer that does not meet it.
async fn unsound(
    fixture: &HostFixture,
    gate: &Gate,
    kept: impl AsyncFn(&str) -> Result<()>,
) -> Result<()> {
    // S1-129.
    gate.fails_only("by-position", "stable_id", "not_met").await?;
    gate.fails_only("recordless", "replay_policy", "not_met").await?;
    gate.fails_only("silent", "observability", "not_met").await?;
    gate.fails_only("undeclared", "external_idempotency", "not_known").await?;
    kept(WEEK).await?;
    gate.fails_only("forgetful", "durable_dedup", "not_met").await?;
    kept(HOUR).await?;
    fixture.execute("ALTER TABLE oncebox.guard DISABLE TRIGGER guard").await?;
    gate.fails_only(SOUND, "transactional_effect", "not_met").await?;
    fixture.execute("ALTER TABLE oncebox.guard ENABLE TRIGGER guard").await?;
    let reach = "CREATE FOREIGN DATA WRAPPER way; CREATE SERVER outside FOREIGN DATA WRAPPER way; \
        GRANT USAGE ON FOREIGN SERVER outside TO \"{login}\"";
    fixture.execute(reach).await?;
    gate.fails_only(SOUND, "external_idempotency", "not_met").await?;
    fixture.execute("DROP FOREIGN DATA WRAPPER way CASCADE").await?;
    // A mapping for everybody lets every login through that gets the server.
    let mapping = "CREATE FOREIGN DATA WRAPPER way; CREATE SERVER outside FOREIGN DATA WRAPPER \
        way; CREATE USER MAPPING FOR PUBLIC SERVER outside";
    fixture.execute(mapping).await?;
    gate.fails_only(SOUND, "external_idempotency", "not_met").await?;
    fixture.execute("DROP FOREIGN DATA WRAPPER way CASCADE").await?;
    // A warning of `doctor`: rows that no claim knows.
    fixture.execute("CREATE TABLE oncebox.inbox_7d_20000101000000 (a int)").await?;
    gate.fails_only(SOUND, "durable_dedup", "not_known").await?;
    fixture.execute("DROP TABLE oncebox.inbox_7d_20000101000000").await?;
    gate.ok(&["consumer", "pause", SOUND, "--tenant", &gate.tenant]).await?;
    gate.fails_only(SOUND, "observability", "not_met").await?;
    gate.ok(&["consumer", "resume", SOUND, "--tenant", &gate.tenant]).await?;
    until_sound(gate).await?;
    // What came under another identity says nothing about the present one.
    let row = fixture.control.consumers().get(&gate.tenant, "by-position").await?;
    let mut policy = row.policy()?;
    policy.identity.id = vec![IdSource::Header("id".to_owned())];
    fixture.control.consumers().set_policy(&gate.tenant, "by-position", policy, true).await?;
    let answered = gate.readiness("by-position", &[]).await?;
    ensure!(answered.parts["stable_id"] == "not_known", "{:#}", answered.report);

    // Another version is another thing to verify, and its last outcome counts.
    let next = gate.deploy("next.wasm", "two").await?;
    gate.fails_only(SOUND, "crash_tests", "not_met").await?;
    gate.attest(&next, true).await?;
    until_sound(gate).await?;
    gate.attest(&next, false).await?;
    gate.fails_only(SOUND, "crash_tests", "not_met").await?;
    let report = gate.readiness(SOUND, &[]).await?.report;
    ensure!(report.to_string().contains("failed in 1 of 2 windows"), "{report:#}");
    let audit = fixture.ok(&["audit", "--tenant", &gate.tenant]).await?;
    ensure!(audit.matches("version.attest").count() == 3, "{audit}");
    Ok(())
}
