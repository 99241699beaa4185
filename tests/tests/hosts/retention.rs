//! Retention as hosts do it by themselves, with two of them at work.

use std::{fs, process::Command, time::Duration};

use oncebox_tests::{
    aging::age,
    host::{HostFixture, HostProcess, Options},
    load::{Load, Work},
    s3::{S3Server, SECRET_ACCESS_KEY},
    services::target_dir,
    wait::DEADLINE,
};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use tokio::time::{Instant, sleep};

/// A host that looks at what is due five times a second.
const QUICK: [(&str, &str); 1] = [("ONCEBOX_RETENTION_INTERVAL_MS", "200")];

async fn fixture() -> HostFixture {
    let options = Options { partitions: 1, static_members: false, ..Options::default() };
    HostFixture::with(options).await.unwrap()
}

/// Puts what is in the inbox twelve days back. Returns the name of its partition.
async fn aged(fixture: &HostFixture) -> String {
    let pool =
        PgPoolOptions::new().max_connections(1).connect(fixture.database_url()).await.unwrap();
    let name = age(&pool, "true", 12).await;
    pool.close().await;
    name
}

async fn until_gone(fixture: &HostFixture, name: &str) {
    let deadline = Instant::now() + DEADLINE;
    let dropped = format!(
        "SELECT count(*) FROM oncebox.removal WHERE partition_name = '{name}' AND state = 'dropped'"
    );
    while fixture.number(&dropped).await.unwrap() == 0 {
        assert!(Instant::now() < deadline, "`{name}` is not removed");
        sleep(Duration::from_millis(50)).await;
    }
}

fn lines(hosts: &[&HostProcess], holds: &str) -> usize {
    hosts.iter().map(|host| host.log_lines(holds)).sum()
}

/// Waits until a host has written the line that follows the removal.
async fn until_told(hosts: &[&HostProcess]) {
    let deadline = Instant::now() + DEADLINE;
    while lines(hosts, "time partition removed") == 0 {
        assert!(Instant::now() < deadline, "no host says that it removed a time partition");
        sleep(Duration::from_millis(50)).await;
    }
}

/// What could go wrong: hosts remove nothing by themselves, or one partition is removed or archived
/// by two of them; nobody can tell what went; the group is set back and what was forgotten runs
/// again. S4-013, S1-090.
#[tokio::test(flavor = "multi_thread")]
async fn hosts_remove_what_is_due_and_say_so() {
    let (fixture, archive) = (fixture().await, S3Server::start().await);
    let variables = archive.variables();
    let of_archive = variables.iter().map(|(name, value)| (*name, value.as_str()));
    let settings: Vec<_> = QUICK.into_iter().chain(of_archive).collect();
    let hosts = ["a", "b"].map(|name| fixture.start(name, &settings).unwrap());
    fixture.send(&Load::of([Work::Pay, Work::Pay, Work::Pay, Work::Park])).await.unwrap();
    fixture.wait_settled().await.unwrap();
    let name = aged(&fixture).await;
    until_gone(&fixture, &name).await;
    let both = [&hosts[0], &hosts[1]];
    until_told(&both).await;
    // S1-090, S3-001, S4-013.
    assert_eq!(lines(&both, "time partition removed"), 1, "one line, by the host that did it");
    assert_eq!(lines(&both, "time partition archived"), 1, "before that, by the same");
    assert_eq!(lines(&both, &name), 2);
    assert_eq!(lines(&both, SECRET_ACCESS_KEY), 0);
    let effects = "SELECT count(*) FROM {schema}.ledger_entry";
    assert_eq!(fixture.number(effects).await.unwrap(), 3);
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox").await.unwrap(),
        1,
        "the parked"
    );
    for host in both {
        // S0-027: the database has counted them before they went.
        let removed = "oncebox_retention_removed_messages_total";
        host.until_metric(removed, &["status=\"completed\""], 3.0).await.unwrap();
        host.until_metric("oncebox_retention_due_partitions", &[], 0.0).await.unwrap();
        host.until_metric("oncebox_retention_failed", &[], 0.0).await.unwrap();
        host.until_metric("oncebox_archive_files_total", &[], 1.0).await.unwrap();
        assert!(host.metric("oncebox_retention_last_success_seconds", &[]).await > Some(1e9));
    }
    let status: Value =
        serde_json::from_str(&fixture.ok(&["retention", "status", "--json"]).await.unwrap())
            .unwrap();
    let removal = &status["databases"][0]["removals"][0];
    assert_eq!(removal["partition"], name);
    assert_eq!((&removal["removed"], &removal["moved"]), (&json!(3), &json!(1)));
    let status = fixture.ok(&["retention", "status"]).await.unwrap();
    // S3-007.
    assert!(status.contains(&name) && status.contains("dropped"), "{status}");
    let plan = fixture.ok(&["retention", "plan"]).await.unwrap();
    assert!(plan.contains("nothing is due; the next partition goes at "), "{plan}");

    archive_is_read(&fixture, &settings).await;

    // The group is set back to the beginning.
    for host in hosts {
        host.stop().await.unwrap();
    }
    // The brokers may take a moment until the group has no member.
    let deadline = Instant::now() + DEADLINE;
    while let Err(error) = fixture.reset_offsets(0).await {
        assert!(Instant::now() < deadline, "{error:#}");
        sleep(Duration::from_millis(200)).await;
    }
    let host = fixture.start("c", &settings).unwrap();
    let parked = "SELECT count(*) FROM oncebox.inbox WHERE reason = 'horizon'";
    fixture.until(parked, 3).await.unwrap();
    assert_eq!(fixture.number(effects).await.unwrap(), 3, "what was forgotten runs again");
    host.stop().await.unwrap();
}

/// Asks the program for the files of the archive, and for a message in it.
async fn archive_is_read(fixture: &HostFixture, settings: &[(&str, &str)]) {
    let folder = settings
        .iter()
        .fold(fixture.folder().unwrap(), |folder, (name, value)| folder.with(name, value));
    let listed = folder.run(&["archive", "list", "--json"], "").await.unwrap();
    let listed = listed.json().unwrap();
    let file = &listed["files"][0];
    assert_eq!(file["messages"], 3, "{listed}");
    let (tenant, id) = (fixture.tenant.name.as_str(), file["last_id"].as_str().unwrap());
    let find = ["archive", "find", id, "--tenant", tenant, "--json"];
    let found = folder.run(&find, "").await.unwrap().json().unwrap();
    // S0-029: it is there as it stood in the inbox.
    assert_eq!((&found[0]["message_id"], &found[0]["file"]), (&json!(id), &file["path"]));
    assert_eq!(found[0]["status"], "completed");
    let table = folder.run(&["archive", "list"], "").await.unwrap().stdout;
    assert!(table.starts_with("messages are archived at `s3://kept/below/here`"), "{table}");
    let absent = folder.run(&["archive", "find", "absent", "--tenant", tenant], "").await.unwrap();
    assert!(absent.stderr.contains("has no message"), "{absent:?}");
    // Someone who works on the database without the hosts' settings.
    let refused = fixture.folder().unwrap().run(&["retention", "run"], "").await.unwrap();
    assert!(refused.stderr.contains("has no `archive.location`"), "{refused:?}");
    let ended = fixture.ok(&["archive", "off"]).await.unwrap();
    assert!(ended.starts_with("messages are no longer archived at `s3://"), "{ended}");
}

/// What could go wrong: retention fails for weeks, and nobody hears of it. S1-099.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_fails_is_told_and_tried_again() {
    let fixture = fixture().await;
    // One that is told to remove nothing.
    let never = [QUICK[0], ("ONCEBOX_RETENTION_ENABLED", "false")];
    let host = fixture.start("a", &never).unwrap();
    fixture.send(&Load::of([Work::Pay])).await.unwrap();
    fixture.wait_settled().await.unwrap();
    fixture.execute("CREATE SCHEMA of_a_person").await.unwrap();
    // Someone's report hangs on the very table.
    let pool =
        PgPoolOptions::new().max_connections(1).connect(fixture.database_url()).await.unwrap();
    let name = oncebox_tests::aging::old_partition(&pool, 12).await;
    pool.close().await;
    let report = format!("CREATE VIEW of_a_person.report AS SELECT count(*) FROM oncebox.{name}");
    fixture.execute(&report).await.unwrap();
    assert_eq!(aged(&fixture).await, name);
    host.until_metric("oncebox_retention_due_partitions", &[], 1.0).await.unwrap();
    // It looks a second time, and so has come by a run that others would have made.
    let pool =
        PgPoolOptions::new().max_connections(1).connect(fixture.database_url()).await.unwrap();
    oncebox_tests::aging::old_partition(&pool, 40).await;
    pool.close().await;
    host.until_metric("oncebox_retention_due_partitions", &[], 2.0).await.unwrap();
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.removal").await.unwrap(), 0);
    host.stop().await.unwrap();
    let host = fixture.start("b", &QUICK).unwrap();
    host.until_metric("oncebox_retention_failed", &[], 1.0).await.unwrap();
    host.wait_log("retention failed").await.unwrap();
    let failing = host.samples("oncebox_retention_failed").await;
    let error = "SELECT count(*) FROM oncebox.removal WHERE error LIKE '%depend%'";
    fixture.until(error, 1).await.unwrap();
    let status = fixture.ok(&["retention", "status"]).await.unwrap();
    assert!(status.contains("depend"), "{status}");

    fixture.execute("DROP SCHEMA of_a_person CASCADE").await.unwrap();
    until_gone(&fixture, &name).await;
    host.until_metric("oncebox_retention_failed", &[], 0.0).await.unwrap();
    let mended = host.samples("oncebox_retention_failed").await;
    host.stop().await.unwrap();
    rule_fires(&failing, &mended);
}

/// Asks Prometheus' own evaluation whether the rule fires on what a host measured for three hours,
/// and ends with it.
fn rule_fires(failing: &[String], mended: &[String]) {
    let of = |samples: &[String]| {
        let (series, value) = samples[0].rsplit_once(' ').unwrap();
        (series.to_owned(), value.to_owned())
    };
    let ((series, bad), (_, good)) = (of(failing), of(mended));
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/alerts.yml");
    let expected = |at: &str, fires: bool| {
        let alert = json!({
            "exp_annotations": {
                "summary": "what is past its retention is not removed; the inbox grows",
                "runbook": "oncebox retention status",
            }
        });
        let alerts = if fires { vec![alert] } else { Vec::new() };
        json!({ "eval_time": at, "alertname": "OnceboxRetentionFailing", "exp_alerts": alerts })
    };
    let file = json!({
        "rule_files": [fs::canonicalize(rules).unwrap()],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": [{ "series": series, "values": format!("{bad}x180 {good}x60") }],
            "alert_rule_test":
                [expected("60m", false), expected("150m", true), expected("200m", false)],
        }],
    });
    let folder = target_dir().join("test-hosts");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("retention-rules.json");
    fs::write(&path, serde_json::to_vec_pretty(&file).unwrap()).unwrap();
    let output = Command::new("promtool").args(["test", "rules"]).arg(&path).output();
    let output = output.expect("`promtool` is missing; run `scripts/install.sh tests`");
    let said = [output.stdout, output.stderr].concat();
    // S1-099.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}
