//! What is seen of messages from outside: the lines of a host's log, and the rules for alerts,
//! evaluated on what a host measures.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use oncebox_control::{ReplayFilter, ReplayStart};
use oncebox_model::record::Record;
use oncebox_tests::{
    host::{HostFixture, HostProcess, Options},
    inbox::{Guest, InboxFixture, deliver, record, step},
    load::{Load, Work},
    services::target_dir,
    wait::{self, DEADLINE},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpSocket};
use tracing_subscriber::fmt::MakeWriter;

/// What was logged.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn take(&self) -> Vec<String> {
        String::from_utf8_lossy(&std::mem::take(&mut *self.0.lock().unwrap()))
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        std::io::Write::write(&mut *self.0.lock().unwrap(), bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// What stands in every payload, and in nothing that a log has to say.
const SECRET: &str = "hunter2";

/// Lines that are about a consumer, a partition or a session, by a part of each.
const OF_NO_MESSAGE: &[&str] = &[
    "an earlier process died at this offset",
    "transaction aborted",
    "a transaction was dropped",
    "hosts were not told",
    "the database is less closed",
];

/// What could go wrong: a line of the log speaks of a message and does not say which, or shows what
/// is in it. Whatever may become of a message becomes of one, with every line that the host has to
/// say about it.
#[tokio::test]
async fn every_line_of_a_message_names_it_and_none_shows_its_payload() {
    let lines = Lines::default();
    let filter = tracing_subscriber::EnvFilter::new("trace");
    let logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_env_filter(filter)
        .with_writer(lines.clone())
        .finish();
    let _logging = tracing::subscriber::set_default(logging);
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let with =
        |offset, id: &str, script: &str| record(offset, id, &format!("{script}\n# {SECRET}"));
    let of_version = |mut record: Record, key: &str, version: i64| {
        record.key = Some(key.into());
        record.headers.push(("v".to_owned(), version.to_string().into_bytes()));
        record
    };
    let mut unrouted = with(6, "unrouted", "");
    unrouted.headers.push(("type".to_owned(), b"nobody".to_vec()));
    let no_id = Record { headers: Vec::new(), ..with(7, "", "") };
    let plain = vec![
        with(0, "done", "result 1"),
        with(1, "again", "before 2 retry 0"),
        with(2, "rejected", "reject"),
        with(3, "parked", "park"),
        with(4, "trapped", "trap"),
        with(5, "slow", "sleep 300"),
        unrouted,
        no_id,
        with(8, "done", "result 1"),
        with(9, "done", "result 2"),
    ];
    let schema =
        "[schemas.'*']\njson_schema = { type = 'object', properties.account.type = 'integer' }";
    let invalid = vec![
        record(0, "invalid", &format!("{{\"account\": \"{SECRET}\"}}")),
        record(1, "no json", SECRET),
    ];
    let versions = vec![
        of_version(with(0, "k1", ""), "k", 1),
        of_version(with(1, "k3", ""), "k", 3),
        of_version(with(2, "k1 once more", ""), "k", 1),
        of_version(with(3, "k2", ""), "k", 2),
    ];
    let old = vec![Record { timestamp_ms: 1_000, ..with(0, "old", "") }];
    let leased = vec![with(0, "leased", ""), with(1, "kills", "")];
    const QUICK: &str = "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }";
    const GUARDED: &str = "order = 'key'\nsequence = { version = { header = 'v' }, first = 1 \
        }\nretry = { backoff_min_ms = 1, backoff_max_ms = 1 }";
    for (name, policy, log) in [
        (
            "plain",
            &*format!(
                "{QUICK}\nlimits = {{ deadline_ms = 500 }}\nbatch = {{ duration_ms = 5000 }}"
            ),
            plain,
        ),
        ("invalid", schema, invalid),
        ("versions", GUARDED, versions),
        ("old", "replay = { past_horizon = 'park_by_time' }", old),
        ("leased", "ack = 'after_insert'", leased),
    ] {
        let consumer = fixture.consumer(&tenant, name, policy).await;
        let host = fixture.host(&consumer);
        deliver(&host, &log).await;
        if name == "leased" {
            // Its workers die: three times of one, once of the other.
            let mut dying = Guest::connect(&fixture, &consumer).await;
            for deaths in [2, 1, 1] {
                assert_eq!(dying.lease(50).await.unwrap().len(), deaths);
                fixture
                    .until("SELECT count(*) > 0 FROM oncebox.inbox WHERE locked_until < now()")
                    .await;
                if deaths == 2 {
                    step(&host).await.unwrap();
                }
            }
        }
        fixture.retry_until_settled(&host).await;
    }
    let texts: Vec<String> = fixture
        .rows()
        .await
        .into_iter()
        .map(|row| format!("message_id={:?}", row.message_id))
        .collect();
    let said = lines.take();
    let shown: Vec<_> = said.iter().filter(|line| line.contains(SECRET)).collect();
    // S1-093.
    assert!(shown.is_empty(), "{shown:#?}");

    let ours = |line: &&String| {
        line.contains(" oncebox_inbox::") && !OF_NO_MESSAGE.iter().any(|part| line.contains(part))
    };
    let of_messages: Vec<_> = said.iter().filter(ours).collect();
    let nameless: Vec<_> = of_messages
        .iter()
        .filter(|line| !texts.iter().any(|text| line.contains(text.as_str())))
        .collect();
    // S0-039.
    assert!(nameless.is_empty(), "{nameless:#?}");
    for event in [
        "message failed",
        "message parked",
        "duplicate skipped",
        "more than half of its deadline",
        "lease taken over",
    ] {
        assert!(
            of_messages.iter().any(|line| line.contains(event)),
            "nothing says `{event}`: {of_messages:#?}"
        );
    }
    fixture.finish().await;
}

/// Seconds between two values of a series, as a Prometheus that scrapes every fifteen has them.
const STEP_S: usize = 15;
/// Values of each phase.
const STEPS: usize = 12;

/// Each series of a host's metrics, with its value.
async fn scrape(host: &HostProcess) -> BTreeMap<String, String> {
    let answer = host.metrics().await.unwrap();
    let lines = answer.lines().filter(|line| line.starts_with("oncebox_"));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(series, value)| (series.to_owned(), value.to_owned()))
        .collect()
}

/// What Prometheus says of the rules, when it scraped each of these for a while, one after the
/// other.
struct Watch {
    phases: Vec<BTreeMap<String, String>>,
    expected: Vec<Value>,
}

impl Watch {
    /// At the end of this phase these alerts of a rule fire, by their labels and annotations.
    fn expects(&mut self, phase: usize, rule: &str, alerts: &[Value]) {
        let at = (phase * STEPS + STEPS - 1) * STEP_S;
        self.expected.push(
            json!({ "eval_time": format!("{at}s"), "alertname": rule, "exp_alerts": alerts }),
        );
    }

    /// Run Prometheus' own evaluation.
    fn check(&self, name: &str) {
        let mut series: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (number, phase) in self.phases.iter().enumerate() {
            for (name, value) in phase {
                let values = series.entry(name).or_default();
                values.resize(number * STEPS, "_");
                values.resize((number + 1) * STEPS, value);
            }
        }
        let input: Vec<_> = series
            .iter()
            .map(|(name, values)| json!({ "series": name, "values": values.join(" ") }))
            .collect();
        let interval = format!("{STEP_S}s");
        let file = json!({
            "rule_files": [rules()],
            "evaluation_interval": interval,
            "tests": [{ "interval": interval, "input_series": input, "alert_rule_test": self.expected }],
        });
        let folder = target_dir().join("test-hosts");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("{name}-rules.json"));
        fs::write(&path, serde_json::to_vec_pretty(&file).unwrap()).unwrap();
        evaluate(&path);
    }
}

/// Runs a file of tests of the rules.
fn evaluate(path: &Path) {
    let output = Command::new("promtool").args(["test", "rules"]).arg(path).output();
    let output = output.expect("`promtool` is missing; run `scripts/install.sh tests`");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "`{}`: {said}", path.display());
}

fn rules() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/alerts.yml").canonicalize().unwrap()
}

/// The names of the rules in a file of them.
fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

/// What could go wrong: a rule does not fire where it should, fires where it should not, or says too
/// late that all is well; what it tells an operator names another consumer; or a rule has no test.
/// S1-058, S1-092, S1-094, S1-096, S1-098, S1-100, S1-101.
#[test]
fn every_rule_fires_in_a_test_and_rests_in_one() {
    let tests = rules().with_file_name("alerts_test.yml");
    // S1-058, S1-092, S1-094, S1-096, S1-098, S1-100, S1-101.
    evaluate(&tests);
    let (tests, rules) = (fs::read_to_string(tests).unwrap(), fs::read_to_string(rules()).unwrap());
    let lines: Vec<_> = tests.lines().map(str::trim).collect();
    let (mut fires, mut rests) = (BTreeSet::new(), BTreeSet::new());
    for pair in lines.windows(2) {
        if let Some(name) = pair[0].strip_prefix("alertname: ") {
            let found = if pair[1] == "exp_alerts: []" { &mut rests } else { &mut fires };
            found.insert(name);
        }
    }
    assert_eq!(fires, names(&rules), "each rule has a test in which it fires");
    assert_eq!(rests, names(&rules), "each rule has a test in which it does not");
}

/// What could go wrong: an alert never fires, for an expression that is empty or a label that is
/// not there; or it fires of itself, or goes on for ever.
#[tokio::test(flavor = "multi_thread")]
async fn the_rules_fire_on_what_a_host_measures_and_end_with_it() {
    let fixture = HostFixture::new().await.unwrap();
    const POLICY: &str = r#"UPDATE oncebox.consumer SET policy = policy || '{"alerts": {"pending_age_s": 1, "parked": 1, "dead_letters": 2, "collisions": 1}, "retry": {"attempts_max": 20, "backoff_min_ms": 600000, "backoff_max_ms": 600000, "jitter": "none", "lease_ms": 10000, "workers": 2}}' WHERE consumer_id = {consumer}"#;
    fixture.execute(POLICY).await.unwrap();
    let tenant = fixture.tenant.name.clone();
    let named = ["--tenant", &tenant, "--consumer", "payments"];
    const STUCK: &str = "INSERT INTO oncebox.job (tenant_id, consumer_id, action, state, filter, \
        actor, reason, estimate, is_counted_whole, note, due_at) SELECT tenant_id, consumer_id, \
        'retry', 'paused', '{}', 'test', 'a test', 1, true, '3 hosts ended', now() - interval \
        '1 hour' FROM oncebox.consumer WHERE consumer_id = {consumer}; \
        NOTIFY oncebox_deployments, 'job '";
    let host = fixture.start("a", &[]).unwrap();
    let until_jobs = async |state: &str, jobs| {
        host.until_metric("oncebox_jobs", &[&format!("state=\"{state}\"")], jobs).await.unwrap()
    };
    let until = async |alert: &str, value| {
        host.until_metric("oncebox_alert", &[&format!("alert=\"{alert}\"")], value).await.unwrap()
    };
    let states = async |expected: [f64; 4]| {
        for (name, value) in
            ["pending_age_s", "parked", "dead_letters", "collisions"].into_iter().zip(expected)
        {
            until(name, value).await;
        }
    };
    let mut watch = Watch { phases: Vec::new(), expected: Vec::new() };

    // Quiet: what comes completes.
    fixture.send(&Load::of([Work::Pay, Work::Pay])).await.unwrap();
    fixture.wait_settled().await.unwrap();
    states([0.0; 4]).await;
    watch.phases.push(scrape(&host).await);

    // One waits for its retry, one is parked, and two are dead letters.
    fixture
        .send(&Load::of([Work::Fails(2), Work::Park, Work::Reject, Work::Reject]).named("bad"))
        .await
        .unwrap();
    states([1.0, 1.0, 1.0, 0.0]).await;
    // S1-076.
    host.until_metric("oncebox_inbox_messages", &["status=\"failed_retryable\""], 1.0)
        .await
        .unwrap();
    // And a job that hosts paused.
    fixture.execute(STUCK).await.unwrap();
    until_jobs("paused", 1.0).await;
    let idle_s = host.metric("oncebox_job_idle_seconds", &[]).await.unwrap();
    assert!((3_600.0..3_900.0).contains(&idle_s), "{idle_s}");
    watch.phases.push(scrape(&host).await);

    // A person has seen to them.
    let job_id = fixture.number("SELECT job_id FROM oncebox.job").await.unwrap().to_string();
    fixture.ok(&["job", "resume", &job_id, "--tenant", &tenant]).await.unwrap();
    host.until_metric("oncebox_job_messages_total", &["action=\"retry\""], 1.0).await.unwrap();
    until_jobs("paused", 0.0).await;
    until_jobs("running", 0.0).await;
    assert_eq!(host.metric("oncebox_job_idle_seconds", &[]).await, Some(0.0));
    fixture
        .ok(&[&["inbox", "discard", "--all", "--because", "a test"], &named[..]].concat())
        .await
        .unwrap();
    states([0.0; 4]).await;
    watch.phases.push(scrape(&host).await);

    let fires = |alert: &str| {
        let summary = format!("{tenant}/payments: `{alert}` of its policy is reached");
        let runbook = format!("oncebox inbox stats --tenant {tenant} --consumer payments");
        json!({
            "exp_labels": { "tenant": tenant, "consumer": "payments", "alert": alert },
            "exp_annotations": { "summary": summary, "runbook": runbook },
        })
    };
    let text = fs::read_to_string(rules()).unwrap();
    let names = names(&text);
    assert!(names.contains(&"OnceboxInbox") && names.len() >= 7, "{names:?}");
    let of_inbox = ["dead_letters", "parked", "pending_age_s"].map(fires);
    let of_job = json!({
        "exp_labels": { "tenant": tenant },
        "exp_annotations": {
            "summary": format!("{tenant}: a job has not gone on for ten minutes, and no operator \
                paused it"),
            "runbook": format!("oncebox job list --tenant {tenant}"),
        },
    });
    for phase in 0..watch.phases.len() {
        for name in &names {
            let alerts = match (phase, *name) {
                (1, "OnceboxInbox") => &of_inbox[..],
                (1, "OnceboxJobIdle") => std::slice::from_ref(&of_job),
                _ => &[],
            };
            watch.expects(phase, name, alerts);
        }
    }
    // S0-041, S0-050, S1-095, S1-097, S2-014.
    watch.check(&tenant);
    host.stop().await.unwrap();
}

/// What could go wrong: nobody is told that messages of a consumer with effects outside are
/// replayed, or the alert goes on when that is over, or fires for a replay that is none of those.
/// S1-100.
#[tokio::test(flavor = "multi_thread")]
async fn the_rule_fires_while_a_consumer_with_outside_effects_is_replayed() {
    const KIND: &str = r#"UPDATE oncebox.consumer SET policy = jsonb_set(policy, '{replay,kind}', '"workflow"'), policy_revision = revision + 1, revision = revision + 1 WHERE consumer_id = {consumer}"#;
    const RUNS: &str = "SELECT count(*) FROM oncebox.host_consumer c JOIN oncebox.consumer o USING \
        (consumer_id) WHERE c.status_revision = o.revision AND c.status IN ('running', 'idle')";
    const DONE: &str = "SELECT count(*) FROM oncebox.replay WHERE state = 'done'";
    let policy = "payload = 'all'\nreplay = { kind = 'projection' }";
    let fixture = HostFixture::with(Options { policy, ..Options::default() }).await.unwrap();
    let tenant = fixture.tenant.name.clone();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&Load::of([Work::Sleeps(1_000), Work::Sleeps(1_000)])).await.unwrap();
    fixture.wait_settled().await.unwrap();
    let mut watch = Watch { phases: vec![scrape(&host).await], expected: Vec::new() };
    for (done, kind) in (1..).zip(["projection", "workflow"]) {
        if kind == "workflow" {
            fixture.execute(KIND).await.unwrap();
            fixture.until(RUNS, 1).await.unwrap();
        }
        let replays = fixture.control.replays();
        let plan = replays.plan(&tenant, "payments", &ReplayFilter::default()).await.unwrap();
        let start = ReplayStart {
            token: plan.token,
            reason: "a test".to_owned(),
            effects_suppressed: true,
            ..ReplayStart::default()
        };
        replays.start(&tenant, "payments", &start).await.unwrap();
        let label = format!("kind=\"{kind}\"");
        host.until_metric("oncebox_replay_running", &[&label], 1.0).await.unwrap();
        watch.phases.push(scrape(&host).await);
        fixture.until(DONE, done).await.unwrap();
        host.until_metric("oncebox_replay_running", &[&label], 0.0).await.unwrap();
        watch.phases.push(scrape(&host).await);
    }
    let fires = json!({
        "exp_labels": { "tenant": tenant, "consumer": "payments", "kind": "workflow" },
        "exp_annotations": {
            "summary": format!("{tenant}/payments: its messages are replayed, and it is there for \
                effects outside (workflow); what it emits is not sent, what its statements write is"),
            "runbook": format!("oncebox replay list --tenant {tenant} --consumer payments"),
        },
    });
    for phase in 0..watch.phases.len() {
        let alerts: &[Value] = if phase == 3 { std::slice::from_ref(&fires) } else { &[] };
        watch.expects(phase, "OnceboxReplayOfEffects", alerts);
    }
    // S1-100.
    watch.check(&format!("{tenant}-replay"));
    host.stop().await.unwrap();
}

/// What could go wrong: connections that say nothing pile up at the port of health and metrics,
/// without a bound, or keep Prometheus and the orchestrator out, for whom a host that does not
/// answer is one to end.
#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_keep_no_probe_out() {
    let fixture = HostFixture::new().await.unwrap();
    let host = fixture.start_ready("a", &[]).await.unwrap();
    let refused = async |reason: &str| {
        let of = ["listener=\"metrics\"", &format!("reason=\"{reason}\"")];
        host.metric("oncebox_http_connections_closed_total", &of).await
    };
    assert_eq!(refused("no_head").await, Some(0.0));
    let mut half_open = Vec::new();
    for n in 0..600 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut stream = socket.connect(host.http()).await.unwrap();
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n").await; // it may have been closed already
        half_open.push(stream);
        if n % 50 == 49 {
            let ready = host.readiness_within(Duration::from_secs(20)).await;
            assert_eq!((ready, host.metrics().await.is_some()), (Some(200), true), "beside {n}");
        }
    }
    // One address has half of the 256 places; for each further connection of it one of its own was
    // closed.
    assert_eq!(
        (refused("no_head").await, refused("refused").await),
        (Some(600.0 - 128.0), Some(0.0))
    );
    drop(half_open);
    host.stop().await.unwrap();
}

/// What could go wrong: refused duplicates are counted where no operator looks, are forgotten with
/// the host that refused them, or cost a write each.
#[tokio::test(flavor = "multi_thread")]
async fn refused_duplicates_are_told_on_the_command_line() {
    const WRITES: &str = "CREATE SEQUENCE writes; CREATE FUNCTION count_write() RETURNS trigger \
        LANGUAGE plpgsql AS \
        $$ BEGIN PERFORM nextval('public.writes'); RETURN NULL; END $$; \
        CREATE TRIGGER count_write AFTER INSERT OR UPDATE ON oncebox.duplicates_refused FOR EACH \
        ROW EXECUTE FUNCTION count_write()";
    let fixture = HostFixture::new().await.unwrap();
    fixture.execute(WRITES).await.unwrap();
    let tenant = fixture.tenant.name.clone();
    let show = async |more: &[&str]| {
        fixture
            .ok(&[&["consumer", "show", "payments", "--tenant", &tenant], more].concat())
            .await
            .unwrap()
    };
    let refused = async || {
        let shown: Value = serde_json::from_str(&show(&["--json"]).await).unwrap();
        shown["duplicates"]["refused"].as_i64().unwrap()
    };
    let load = Load::of([Work::Pay; 100]);
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&load).await.unwrap();
    fixture.wait_settled().await.unwrap();
    let text = show(&[]).await;
    assert!(text.contains("\nduplicates refused: none since 2"), "{text}");

    for _ in 0..5 {
        fixture.send(&load).await.unwrap();
    }
    let counted = ["outcome=\"already_done\""];
    host.until_metric_reaches("oncebox_claims_total", &counted, 500.0).await.unwrap();
    assert_eq!(host.metric("oncebox_claims_total", &counted).await, Some(500.0));
    wait::until(
        DEADLINE,
        Duration::from_millis(200),
        async || Ok(refused().await >= 500),
        async || format!("{} of 500 duplicates are told", refused().await),
    )
    .await
    .unwrap();
    let text = show(&[]).await;
    assert!(
        text.contains("\nduplicates refused: 500 since 2") && text.contains(", the last at 2"),
        "{text}"
    );
    let writes = fixture.number("SELECT last_value FROM public.writes").await.unwrap();
    assert!(writes < 50, "{writes} writes for 500 duplicates");

    // What a host refused just before it ends is not lost, and its successor goes on.
    fixture.send(&load).await.unwrap();
    host.until_metric_reaches("oncebox_claims_total", &counted, 600.0).await.unwrap();
    host.stop().await.unwrap();
    assert_eq!(refused().await, 600);
    let host = fixture.start_ready("a", &[]).await.unwrap();
    fixture.send(&load).await.unwrap();
    host.until_metric_reaches("oncebox_claims_total", &counted, 100.0).await.unwrap();
    host.stop().await.unwrap();
    assert_eq!(refused().await, 700);
}
