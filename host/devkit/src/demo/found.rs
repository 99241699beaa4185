//! The content of the database and of the receivers' ledgers at the end, compared with the content
//! that the input alone demands.

use std::{collections::BTreeMap, fmt::Debug};

use anyhow::Result;
use oncebox_control::Control;
use oncebox_model::policy::INGRESS_TOPIC;

use super::{
    TENANTS, TenantCount, effects,
    expected::Expected,
    ledger::{ReceiverLedger, delivery_of},
    progress::Progress,
};

/// The messages of one tenant that left the database, as their receivers have them.
pub(super) struct TenantLedgers {
    /// Ledger of a consumer of the tenant's topic.
    pub(super) events: ReceiverLedger,
    /// Ledger of the provider.
    pub(super) calls: ReceiverLedger,
}

/// Counts the inbox rows that are completed or parked so far.
pub(super) async fn settled(control: &Control) -> Result<u64> {
    let count: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM oncebox.inbox WHERE status IN ('completed', 'parked')",
    )
    .fetch_one(&control.pool)
    .await?;
    Ok(count as u64)
}

/// Counts the outgoing messages: those that a relay has still to send, and all others.
pub(super) async fn outgoing(control: &Control) -> Result<(u64, u64)> {
    const COUNT: &str = "SELECT count(*) FILTER (WHERE o.is_open), \
        count(*) FILTER (WHERE NOT o.is_open) \
        FROM (SELECT status IN ('received', 'in_progress', 'failed_retryable') AS is_open \
            FROM oncebox.outgoing) o";
    let (open, closed): (i64, i64) = sqlx::query_as(COUNT).fetch_one(&control.pool).await?;
    Ok((open as u64, closed as u64))
}

/// Compares each tenant's tables, and what left them, with the expected ones. Returns one row of
/// the report per tenant.
pub(super) async fn compare(
    control: &Control,
    expected: &[Expected],
    progress: &Progress,
    ledgers: &[TenantLedgers],
) -> Result<Vec<TenantCount>> {
    let mut rows = Vec::new();
    for (index, ((name, expected), ledgers)) in
        TENANTS.iter().zip(expected).zip(ledgers).enumerate()
    {
        let TenantLedgers { events, calls } = ledgers;
        let found = Expected {
            events: events.by_delivery(),
            calls: calls.by_delivery(),
            ..read(control, name).await?
        };
        let mut differences = compare_content(expected, &found);
        let conflicts = events.conflicts() + calls.conflicts();
        same("other messages under a known id", 0, conflicts, &mut differences);
        let undelivered = undelivered(control, name).await?;
        same("outgoing messages not delivered", 0, undelivered, &mut differences);
        let (rows_held, parked) = inbox(control, name).await?;
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
            events_expected: expected.events.len() as u64,
            events_found: events.distinct(),
            events_repeated: events.repeated(),
            calls_expected: expected.calls.len() as u64,
            calls_acted_on: calls.distinct(),
            calls_repeated: calls.repeated(),
            differences,
        });
    }
    Ok(rows)
}

/// Names everything in which a tenant differs from what is expected of it.
fn compare_content(expected: &Expected, found: &Expected) -> Vec<String> {
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
    diff("event", &expected.events, &found.events, &mut differences);
    diff("call of the provider", &expected.calls, &found.calls, &mut differences);
    differences
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

/// Counts the messages that came over HTTP, before any record of them.
pub(super) async fn over_http(control: &Control) -> Result<u64> {
    const COUNT: &str = "SELECT count(*) FROM oncebox.inbox WHERE topic = $1";
    let count: i64 = sqlx::query_scalar(COUNT).bind(INGRESS_TOPIC).fetch_one(&control.pool).await?;
    Ok(count.unsigned_abs())
}

async fn inbox(control: &Control, tenant: &str) -> Result<(u64, u64)> {
    const COUNT: &str = "SELECT count(*), count(*) FILTER (WHERE status = 'parked') FROM \
        oncebox.inbox_message WHERE tenant_name = $1";
    let (rows, parked): (i64, i64) =
        sqlx::query_as(COUNT).bind(tenant).fetch_one(&control.pool).await?;
    Ok((rows as u64, parked as u64))
}

/// Counts the outgoing messages of a tenant that their destinations have not confirmed.
async fn undelivered(control: &Control, tenant: &str) -> Result<u64> {
    const COUNT: &str = "SELECT count(*) FROM oncebox.outgoing o \
        JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id) \
        WHERE t.name = $1 AND o.status <> 'completed'";
    let count: i64 = sqlx::query_scalar(COUNT).bind(tenant).fetch_one(&control.pool).await?;
    Ok(count as u64)
}

/// Message id, event, action, repository and number of rows.
type AuditRow = (String, String, Option<String>, Option<i64>, i64);

/// Reads the tenant's tables, in the form of the expected ones, without what left them.
async fn read(control: &Control, tenant: &str) -> Result<Expected> {
    let schema = control.tenants().get(tenant).await?.schema_name;
    let sql = |text: &str| sqlx::AssertSqlSafe(text.replace("{schema}", &schema));
    let activity: Vec<(i64, i64, i64, i64)> = sqlx::query_as(sql(
        "SELECT repository, commits, pushes, stars FROM {schema}.repository_activity",
    ))
    .fetch_all(&control.pool)
    .await?;
    let issues: Vec<(i64, i64, Option<String>, i64)> =
        sqlx::query_as(sql("SELECT repository, number, state, events FROM {schema}.issue"))
            .fetch_all(&control.pool)
            .await?;
    let pull_requests: Vec<(i64, i64, Option<String>, i64)> =
        sqlx::query_as(sql("SELECT repository, number, state, events FROM {schema}.pull_request"))
            .fetch_all(&control.pool)
            .await?;
    let audit: Vec<AuditRow> =
        sqlx::query_as(sql("SELECT delivery, min(event), min(action), min(repository), count(*) \
            FROM {schema}.audit GROUP BY delivery"))
        .fetch_all(&control.pool)
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
                (delivery_of(&id), (event, action, repository, rows))
            })
            .collect(),
        ..Expected::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    // What could go wrong: an event that is missing, is there twice, or is of no delivery passes.
    #[test]
    fn whatever_left_or_did_not_is_a_difference() {
        let sent = |ids| ("comment.created".to_owned(), json!({ "comment": 7 }), ids);
        let of = |ids: &[(&str, i64)]| Expected {
            calls: ids.iter().map(|(id, ids)| ((*id).to_owned(), sent(*ids))).collect(),
            ..Expected::default()
        };
        let expected = of(&[("a", 1), ("b", 1), ("c", 1)]);
        assert_eq!(compare_content(&expected, &expected), [""; 0]);
        let found = compare_content(&expected, &of(&[("b", 2), ("c", 1), ("d", 1)]));
        let begins = [
            "call of the provider \"a\"",
            "call of the provider \"b\"",
            "call of the provider \"d\"",
        ];
        assert_eq!(found.len(), begins.len(), "{found:?}");
        assert!(found.iter().zip(begins).all(|(it, begin)| it.starts_with(begin)), "{found:?}");
    }
}
