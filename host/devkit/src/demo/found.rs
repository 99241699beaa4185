//! The database's content at the end, compared with the content that the input alone demands.

use std::{collections::BTreeMap, fmt::Debug};

use anyhow::Result;
use oncebox_control::Control;

use super::{TENANTS, TenantCount, effects, expected::Expected, progress::Progress};

/// Counts the inbox rows that are completed or parked so far.
pub(super) async fn settled(admin: &Control) -> Result<u64> {
    let count: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM oncebox.inbox WHERE status IN ('completed', 'parked')",
    )
    .fetch_one(&admin.pool)
    .await?;
    Ok(count as u64)
}

/// Compares each tenant's tables with the expected ones. Returns one row of the report per tenant.
pub(super) async fn compare(
    admin: &Control,
    expected: &[Expected],
    progress: &Progress,
) -> Result<Vec<TenantCount>> {
    let mut rows = Vec::new();
    for (index, (name, expected)) in TENANTS.iter().zip(expected).enumerate() {
        let found = read(admin, name).await?;
        let mut differences = Vec::new();
        diff(
            "repository_activity",
            &expected.repository_activity,
            &found.repository_activity,
            &mut differences,
        );
        diff("issue", &expected.issues, &found.issues, &mut differences);
        diff("pull_request", &expected.pull_requests, &found.pull_requests, &mut differences);
        diff("audit", &expected.audit, &found.audit, &mut differences);
        let (rows_held, parked) = inbox(admin, name).await?;
        same("parked", progress.malformed(index), parked, &mut differences);
        same(
            "inbox rows",
            progress.events(index) + progress.malformed(index),
            rows_held,
            &mut differences,
        );
        rows.push(TenantCount {
            tenant: (*name).to_owned(),
            delivered: progress.delivered(index),
            distinct: progress.events(index),
            malformed: progress.malformed(index),
            parked,
            refused: progress.delivered(index).saturating_sub(rows_held),
            expected: effects(expected),
            found: effects(&found),
            differences,
        });
    }
    Ok(rows)
}

fn diff<K: Ord + Debug, V: PartialEq + Debug>(
    table: &str,
    expected: &BTreeMap<K, V>,
    found: &BTreeMap<K, V>,
    differences: &mut Vec<String>,
) {
    for (key, value) in expected {
        if found.get(key) != Some(value) {
            differences
                .push(format!("{table} {key:?}: expected {value:?}, found {:?}", found.get(key)));
        }
    }
    for key in found.keys().filter(|key| !expected.contains_key(key)) {
        differences.push(format!("{table} {key:?}: not expected"));
    }
}

fn same(what: &str, expected: u64, found: u64, differences: &mut Vec<String>) {
    if expected != found {
        differences.push(format!("{what}: expected {expected}, found {found}"));
    }
}

async fn inbox(admin: &Control, tenant: &str) -> Result<(u64, u64)> {
    const COUNT: &str = "SELECT count(*), count(*) FILTER (WHERE status = 'parked') FROM \
        oncebox.inbox_message WHERE tenant_name = $1";
    let (rows, parked): (i64, i64) =
        sqlx::query_as(COUNT).bind(tenant).fetch_one(&admin.pool).await?;
    Ok((rows as u64, parked as u64))
}

/// Message id, event, action, repository and number of rows.
type AuditRow = (String, String, Option<String>, Option<i64>, i64);

/// Reads the tenant's tables, in the form of the expected ones.
async fn read(admin: &Control, tenant: &str) -> Result<Expected> {
    let schema = admin.tenants().get(tenant).await?.schema_name;
    let sql = |text: &str| sqlx::AssertSqlSafe(text.replace("{schema}", &schema));
    let activity: Vec<(i64, i64, i64, i64)> = sqlx::query_as(sql(
        "SELECT repository, commits, pushes, stars FROM {schema}.repository_activity",
    ))
    .fetch_all(&admin.pool)
    .await?;
    let issues: Vec<(i64, i64, Option<String>, i64)> =
        sqlx::query_as(sql("SELECT repository, number, state, events FROM {schema}.issue"))
            .fetch_all(&admin.pool)
            .await?;
    let pull_requests: Vec<(i64, i64, Option<String>, i64)> =
        sqlx::query_as(sql("SELECT repository, number, state, events FROM {schema}.pull_request"))
            .fetch_all(&admin.pool)
            .await?;
    let audit: Vec<AuditRow> =
        sqlx::query_as(sql("SELECT delivery, min(event), min(action), min(repository), count(*) \
            FROM {schema}.audit GROUP BY delivery"))
        .fetch_all(&admin.pool)
        .await?;
    Ok(Expected {
        repository_activity: activity
            .into_iter()
            .map(|(r, commits, pushes, stars)| (r, (commits, pushes, stars)))
            .collect(),
        issues: issues.into_iter().map(|(r, n, state, events)| ((r, n), (state, events))).collect(),
        pull_requests: pull_requests
            .into_iter()
            .map(|(r, n, state, events)| ((r, n), (state, events)))
            .collect(),
        audit: audit
            .into_iter()
            .map(|(id, event, action, repository, rows)| {
                (delivery(&id), (event, action, repository, rows))
            })
            .collect(),
    })
}

/// Returns the delivery's own id, without the CloudEvents source that the message id begins with.
fn delivery(message_id: &str) -> String {
    message_id.rsplit(' ').next().unwrap_or(message_id).to_owned()
}
