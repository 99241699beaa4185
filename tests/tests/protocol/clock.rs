//! The database's clock decides: a host whose own is days off does nothing else than its
//! neighbours.

use anyhow::{Context, Result, ensure};
use chrono::{DateTime, Utc};
use oncebox_tests::{
    host::{HostFixture, Options},
    load::{Load, Work},
};
use serde_json::Value;

const DAY_S: i64 = 86_400;

/// What could go wrong: a host whose clock is ahead takes new messages for forgotten ones and parks
/// them; one whose clock is behind runs again what the inbox may have forgotten; a seek says so of
/// the wrong records. D10.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_clock_is_days_off_forgets_no_sooner_and_no_later() {
    for days in [40, -40] {
        days_off(days).await.with_context(|| format!("{days} days ahead")).unwrap();
    }
}

async fn days_off(days: i64) -> Result<()> {
    let fixture =
        HostFixture::with(Options { static_members: false, ..Options::default() }).await?;
    fixture
        .execute(r#"UPDATE oncebox.consumer SET policy = policy || '{"replay": {"past_horizon": "park_by_time"}}' WHERE consumer_id = {consumer}"#)
        .await?;
    let ahead = (days * DAY_S).to_string();
    let clock = [("ONCEBOX_CLOCK_AHEAD_S", ahead.as_str())];
    let host = fixture.start_ready("a", &clock).await?;
    // That it is off, the doctor says.
    let said = fixture.command(&["doctor", "--json"], &clock)?;
    let report: Value = serde_json::from_slice(&said.stdout)?;
    let findings = report["findings"].as_array().context("findings")?;
    ensure!(
        findings
            .iter()
            .any(|finding| finding["check"] == "clock" && finding["severity"] == "warning"),
        "{report}"
    );

    let now: DateTime<Utc> = sqlx::query_scalar("SELECT now()").fetch_one(&fixture.pool).await?;
    let load = Load::of([Work::Pay; 20]);
    fixture.send(&load).await?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    let parked = fixture
        .number(
            "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = \
        {consumer} AND reason = 'horizon'",
        )
        .await?;
    ensure!(parked == 0, "{parked} new messages were taken for forgotten ones");

    let tenant = fixture.tenant.name.clone();
    let seek =
        ["consumer", "seek", "payments", "--tenant", &tenant, "--to", "end", "--yes", "--json"];
    let said = fixture.command(&seek, &clock)?;
    ensure!(said.status.success(), "{said:?}");
    let plan: Value = serde_json::from_slice(&said.stdout)?;
    let horizon: DateTime<Utc> = plan["horizon"].as_str().context("a horizon")?.parse()?;
    let remembered = (now - horizon).num_days();
    ensure!(
        (6..=367).contains(&remembered)
            && [7, 30, 366].iter().any(|days| (days - remembered).abs() <= 1),
        "{remembered} days: {plan}"
    );
    host.stop().await
}
