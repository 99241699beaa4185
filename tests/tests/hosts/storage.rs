//! The size of inboxes, as a host shows it.

use std::{collections::BTreeMap, fs, process::Command, time::Duration};

use oncebox_tests::{
    host::{HostFixture, HostProcess, Options},
    load::{Load, Work},
    services::target_dir,
    wait::{self, DEADLINE},
};
use serde_json::{Value, json};

/// A host that measures five times a second.
const QUICK: [(&str, &str); 1] = [("ONCEBOX_STORAGE_MEASURE_MS", "200")];
/// The metrics that the alert looks at.
const WATCHED: [&str; 3] =
    ["oncebox_storage_bytes", "oncebox_storage_forecast_bytes", "oncebox_storage_budget_bytes"];
const BUDGET: &str = "oncebox_storage_budget_bytes";

/// The series that the alert looks at, with their values.
async fn watched(host: &HostProcess) -> BTreeMap<String, String> {
    let mut series = BTreeMap::new();
    for metric in WATCHED {
        for sample in host.samples(metric).await {
            let (name, value) = sample.rsplit_once(' ').unwrap();
            series.insert(name.to_owned(), value.to_owned());
        }
    }
    series
}

/// What could go wrong: nobody sees how large an inbox is, the alert on its budget never fires, or
/// always; a budget that was taken away, or a consumer that was deleted, is shown for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_shows_sizes_and_its_alert_fires() {
    let options = Options { partitions: 1, static_members: false, ..Options::default() };
    let fixture = HostFixture::with(options).await.unwrap();
    let host = fixture.start("a", &QUICK).unwrap();
    let completed = ["consumer=\"payments\"", "status=\"completed\""];
    host.until_metric("oncebox_storage_messages", &completed, 0.0).await.unwrap();
    fixture.send(&Load::of([Work::Pay, Work::Pay, Work::Park])).await.unwrap();
    fixture.wait_settled().await.unwrap();
    let of = ["consumer=\"payments\""];
    for (status, messages) in [("completed", 2.0), ("parked", 1.0)] {
        let status = format!("status=\"{status}\"");
        let of = [of[0], status.as_str()];
        // S1-080.
        host.until_metric("oncebox_storage_messages", &of, messages).await.unwrap();
    }
    let bytes = host.metric("oncebox_storage_bytes", &of).await.unwrap();
    let per_day = host.metric("oncebox_storage_growth_bytes_per_day", &of).await.unwrap();
    let forecast = host.metric("oncebox_storage_forecast_bytes", &of).await.unwrap();
    // S3-012: three messages of today, in a class that levels off after nine days of such growth.
    assert!(
        bytes > 3.0 * 100.0 && per_day == bytes && (9.0..10.0).contains(&(forecast / bytes)),
        "{bytes}, {per_day} a day, {forecast}"
    );
    assert_eq!(host.metric(BUDGET, &[]).await, None);

    let tenant = fixture.tenant.name.as_str();
    let limit = async |budget: &str| {
        let limits = ["tenant", "limits", tenant, "--storage-budget-bytes", budget];
        fixture.ok(&limits).await.unwrap();
    };
    limit("1").await;
    host.until_metric(BUDGET, &[], 1.0).await.unwrap();
    let above = watched(&host).await;
    let told = format!("the inbox of tenant `{tenant}` is above its budget");
    let said = fixture.ok(&["storage"]).await.unwrap();
    assert!(said.contains(&told), "{said}");
    limit("1125899906842624").await;
    host.until_metric(BUDGET, &[], 1_125_899_906_842_624.0).await.unwrap();
    let within = watched(&host).await;
    let said = fixture.ok(&["storage", "--tenant", tenant]).await.unwrap();
    assert!(!said.contains("above") && said.contains(&format!("{tenant}/payments")), "{said}");
    rule_fires(tenant, &above, &within);

    limit("none").await;
    let discard = ["inbox", "discard", "--all", "--because", "a test"];
    let discard = [&discard[..], &["--tenant", tenant, "--consumer", "payments"]].concat();
    fixture.ok(&discard).await.unwrap();
    for (status, messages) in [("parked", 0.0), ("discarded", 1.0)] {
        let status = format!("status=\"{status}\"");
        let of = [of[0], status.as_str()];
        host.until_metric("oncebox_storage_messages", &of, messages).await.unwrap();
    }
    let delete = ["consumer", "delete", "payments", "--tenant", tenant, "--confirm", "payments"];
    fixture.ok(&delete).await.unwrap();
    let shown = async || {
        let mut shown = watched(&host).await;
        for series in host.samples("oncebox_storage_messages").await {
            shown.insert(series, String::new());
        }
        shown
    };
    wait::until(
        DEADLINE,
        Duration::from_millis(50),
        async || Ok(shown().await.is_empty()),
        async || format!("what is no more is still shown: {:?}", shown().await),
    )
    .await
    .unwrap();
    host.stop().await.unwrap();
}

/// Asks Prometheus' own evaluation whether the rule fires on what a host measured for three hours,
/// above the budget, and whether it ends when the budget is large enough.
fn rule_fires(tenant: &str, above: &BTreeMap<String, String>, within: &BTreeMap<String, String>) {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/alerts.yml");
    let expected = |at: &str, fires: bool| {
        let summary =
            format!("{tenant}: its inbox is above its storage budget, or will be in 30 days");
        let alert = json!({
            "exp_labels": { "tenant": tenant },
            "exp_annotations": {
                "summary": summary,
                "runbook": format!("oncebox storage --tenant {tenant}"),
            }
        });
        let alerts = if fires { vec![alert] } else { Vec::new() };
        json!({ "eval_time": at, "alertname": "OnceboxStorageBudget", "exp_alerts": alerts })
    };
    assert_eq!(above.len(), WATCHED.len(), "{above:?}");
    let series: Vec<Value> = above
        .iter()
        .map(|(series, above)| {
            let within = &within[series];
            json!({ "series": series, "values": format!("{above}x180 {within}x60") })
        })
        .collect();
    let file = json!({
        "rule_files": [fs::canonicalize(rules).unwrap()],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series,
            "alert_rule_test":
                [expected("60m", false), expected("150m", true), expected("200m", false)],
        }],
    });
    let folder = target_dir().join("test-hosts");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("storage-rules.json");
    fs::write(&path, serde_json::to_vec_pretty(&file).unwrap()).unwrap();
    let output = Command::new("promtool").args(["test", "rules"]).arg(&path).output();
    let output = output.expect("`promtool` is missing; run `scripts/install.sh tests`");
    let said = [output.stdout, output.stderr].concat();
    // S3-012.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}
