//! Checks of a new deployment.

use oncebox_model::{
    error::InboxError,
    event_versions,
    policy::{Limits, OF_CONSUMER, Policy},
};
use serde_json::{Map, Value, json};
use sqlx::PgConnection;

use super::{
    DeploymentRole, Grant, Guard, NewDeployment, Slot,
    deploy::{Change, distinct},
    version::{self, Version},
};
use crate::{consumers::Consumer, control::check_name, hosts::HEARTBEAT_TIMEOUT};

/// Checks the parts of a deployment that need no query: names, event versions, share, guard and
/// names of grants.
pub(super) fn check(new: &NewDeployment) -> Result<(), InboxError> {
    check_name("handler", &new.handler)?;
    check_event_type(&new.slot.event_type)?;
    if let Some(versions) = &new.slot.event_versions {
        event_versions::parse(versions)?;
    }
    match (new.role, new.percent) {
        (DeploymentRole::Stable, None) => {}
        (DeploymentRole::Stable, Some(_)) => {
            return Err(InboxError::Invalid("`percent` is for a canary or a shadow".to_owned()));
        }
        (_, None) => {
            return Err(InboxError::Invalid(format!(
                "a {} needs `percent`, the share that it takes",
                new.role.name()
            )));
        }
        (_, Some(percent)) => check_percent(percent)?,
    }
    for grant in &new.grants {
        grant.parse::<Grant>()?;
    }
    new.guard.as_ref().map_or(Ok(()), check_guard)
}

fn check_event_type(event_type: &str) -> Result<(), InboxError> {
    if event_type.is_empty() {
        return Err(InboxError::Invalid(
            "the event type is empty; use `*` for those that no other deployment takes".to_owned(),
        ));
    }
    let stem = event_type.strip_suffix(".*").unwrap_or(event_type);
    if event_type != "*" && (stem.contains('*') || stem.is_empty()) {
        return Err(InboxError::Invalid(format!(
            "`{event_type}` is no event type: `*` stands alone or after the last dot, as in \
                `orders.*`"
        )));
    }
    if event_type.len() > 512 || event_type.chars().any(char::is_control) {
        return Err(InboxError::Invalid(
            "an event type has at most 512 bytes and no control characters".to_owned(),
        ));
    }
    Ok(())
}

pub(super) fn check_percent(percent: f64) -> Result<(), InboxError> {
    if percent > 0.0 && percent <= 100.0 {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`percent` is {percent}; it must be more than 0 and at most 100"
    )))
}

fn check_guard(guard: &Guard) -> Result<(), InboxError> {
    if !(0.0..=100.0).contains(&guard.margin_percent) {
        return Err(InboxError::Invalid(format!(
            "`guard.margin_percent` is {}; it must be 0 to 100",
            guard.margin_percent
        )));
    }
    for (key, value, max) in
        [("window_s", guard.window_s, 86_400), ("messages_min", guard.messages_min, 1_000_000)]
    {
        if value == 0 || value > max {
            return Err(InboxError::Invalid(format!(
                "`guard.{key}` is {value}; it must be 1 to {max}"
            )));
        }
    }
    Ok(())
}

/// Checks that every limit of a deployment is at most its consumer's.
pub(crate) fn check_limits(limits: &Map<String, Value>, policy: &Policy) -> Result<(), InboxError> {
    let allowed = json!(policy.limits);
    for (key, value) in limits {
        if OF_CONSUMER.contains(&key.as_str()) {
            let text = format!(
                "`limits.{key}` is a limit of the consumer, over all of its deployments; set it in \
                    its policy"
            );
            return Err(InboxError::Invalid(text));
        }
        let bound = allowed.get(key).and_then(Value::as_u64);
        let bound =
            bound.ok_or_else(|| InboxError::Invalid(format!("`limits.{key}` is not a limit")))?;
        match value.as_u64() {
            Some(wanted) if wanted > 0 && wanted <= bound => {}
            _ => {
                return Err(InboxError::Invalid(format!(
                    "`limits.{key}` is {value}; it must be 1 to the consumer's own {bound}"
                )));
            }
        }
    }
    Ok(())
}

/// Checks that a version gets what it imports, from its deployment and from every host.
pub(super) async fn check_imports(
    connection: &mut PgConnection,
    version: &Version,
    grants: &[String],
) -> Result<(), InboxError> {
    check_grants(version, grants)?;
    check_hosts(connection, version).await
}

/// Checks that a version gets the grants that its imports need. A component that nothing inspected
/// has no known imports; a host checks them when it loads it.
fn check_grants(version: &Version, grants: &[String]) -> Result<(), InboxError> {
    let is_given = |grant: &Grant| grants.iter().any(|given| given == grant.name());
    let missing = Grant::ALL.into_iter().filter(|grant| !is_given(grant));
    for grant in missing {
        if !version.imports(grant.interface()) {
            continue;
        }
        let text = format!(
            "version `{}` imports `{}`, and the deployment has no grant for it; deploy it with \
                `--grant {grant}` where its handler may do so",
            &hex::encode(&version.digest)[..12],
            grant.interface()
        );
        return Err(InboxError::Conflict { code: "grant_missing", text });
    }
    Ok(())
}

/// Checks that every live host gives the version what it imports. A host of release 0.1.0, which
/// tells no release, does not know `sql` of version 0.2.
async fn check_hosts(connection: &mut PgConnection, version: &Version) -> Result<(), InboxError> {
    if !version.imports_of("oncebox:handler/sql@0.2.") {
        return Ok(());
    }
    let old = format!(
        "SELECT name FROM oncebox.host WHERE seen_at > now() - {HEARTBEAT_TIMEOUT} AND version IS \
            NULL ORDER BY name LIMIT 1"
    );
    let old: Option<String> =
        sqlx::query_scalar(sqlx::AssertSqlSafe(old)).fetch_optional(connection).await?;
    let Some(host) = old else { return Ok(()) };
    let text = format!(
        "version `{}` imports `oncebox:handler/sql@0.2.0` (`enqueue`), which the host `{host}` of an \
            earlier release does not have; deploy it when all hosts are of this release",
        &hex::encode(&version.digest)[..12]
    );
    Err(InboxError::Conflict { code: "host_too_old", text })
}

/// Checks that the component's initial memory fits the limit. Otherwise it would fail every
/// message.
pub(super) fn check_memory(version: &Version, limits: &Limits) -> Result<(), InboxError> {
    let needed = version
        .report
        .as_ref()
        .and_then(|report| report["memory_bytes_min"].as_u64())
        .unwrap_or_default();
    let allowed = limits.memory_bytes as u64;
    if needed <= allowed {
        return Ok(());
    }
    let text = format!(
        "the component begins with {needed} bytes of memory; `limits.memory_bytes` allows {allowed}"
    );
    Err(InboxError::Conflict { code: "component_refused", text })
}

pub(super) async fn check_migration(
    connection: &mut PgConnection,
    consumer: &Consumer,
    new: &NewDeployment,
) -> Result<(), InboxError> {
    let Some(name) = &new.requires_migration else { return Ok(()) };
    const HELD: &str =
        "SELECT EXISTS (SELECT FROM oncebox.tenant_migration WHERE tenant_id = $1 AND name = $2)";
    let held: bool =
        sqlx::query_scalar(HELD).bind(consumer.tenant_id).bind(name).fetch_one(connection).await?;
    if held {
        return Ok(());
    }
    let text = format!(
        "the schema of tenant `{0}` does not hold migration `{name}`; apply it with `oncebox \
            tenant schema apply {0}` first",
        consumer.tenant
    );
    Err(InboxError::Conflict { code: "migration_missing", text })
}

/// Checks that the slot has room for the role, and that the version may run in it.
pub(super) async fn check_slot(
    change: &mut Change<'_>,
    new: &NewDeployment,
    version: &Version,
) -> Result<(), InboxError> {
    let canary = change.live(&new.slot, DeploymentRole::Canary).await?;
    if new.role == DeploymentRole::Stable {
        return if canary.is_some() { Err(canary_runs(&new.slot)) } else { Ok(()) };
    }
    let stable = change
        .live(&new.slot, DeploymentRole::Stable)
        .await?
        .ok_or_else(|| nothing_live(&new.slot))?;
    let same_settings = stable.settings == Value::Object(new.settings.clone())
        && stable.limits == Value::Object(new.limits.clone())
        && stable.grants == distinct(&new.grants);
    if stable.version_id == version.version_id && same_settings {
        return Err(InboxError::conflict(format!("this version is live for {} already", new.slot)));
    }
    if new.role == DeploymentRole::Shadow {
        let live = version::by_id(change.connection, stable.version_id).await?;
        if let Some(batch) = [version, &live].into_iter().find(|version| version.takes_batches()) {
            let text = format!(
                "version `{}` takes the messages of a transaction in one call, so that no effect \
                    can be told to be of one message; a shadow needs handlers that take one \
                    message at a time",
                &hex::encode(&batch.digest)[..12]
            );
            return Err(InboxError::Invalid(text));
        }
    }
    if let Some(other) = change.live(&new.slot, new.role).await? {
        let text = format!(
            "the {} {} runs for {} already; end it first",
            new.role.name(),
            other.deployment_id,
            new.slot
        );
        return Err(InboxError::conflict(text));
    }
    Ok(())
}

pub(super) fn canary_runs(slot: &Slot) -> InboxError {
    InboxError::conflict(format!(
        "a canary runs for {slot}; promote it, end it or roll it back first"
    ))
}

pub(super) fn nothing_live(slot: &Slot) -> InboxError {
    InboxError::NotFound(format!(
        "nothing is live for {slot}; `oncebox deploy` makes a version live"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(report: Option<Value>) -> Version {
        Version {
            version_id: 1,
            handler: "h".to_owned(),
            digest: vec![7; 32],
            source_digest: None,
            size: 1,
            state: "ready".to_owned(),
            problems: json!([]),
            report,
            compile_ms: None,
            created_at: chrono::Utc::now(),
            created_by: "test".to_owned(),
        }
    }

    // What could go wrong: a version that sends messages goes live without the grant, and no host
    // can load it; or one that sends nothing is refused.
    #[test]
    fn a_version_gets_the_grants_that_it_imports() {
        let imports = |imports: &[&str]| version(Some(json!({ "imports": imports })));
        let sends = imports(&["oncebox:handler/sql@0.1.0", "oncebox:handler/emit@0.2.0"]);
        let error = check_grants(&sends, &[]).expect_err("no grant").to_string();
        assert!(error.contains("`--grant emit`") && error.contains("070707070707"), "{error}");
        let emit = [Grant::Emit.name().to_owned()];
        assert!(check_grants(&sends, &emit).is_ok());
        let near = imports(&["oncebox:handler/emitter@0.2.0", "oncebox:handler/sql@0.1.0"]);
        for silent in [near, imports(&[]), version(Some(json!({}))), version(None)] {
            assert!(check_grants(&silent, &[]).is_ok(), "{:?}", silent.report);
            assert!(check_grants(&silent, &emit).is_ok(), "a grant that is not used");
        }
    }

    // What could go wrong: a row holds a grant that no program knows, or two rows with the same
    // grants differ, so that a rollback goes from one to the other.
    #[test]
    fn grants_are_of_the_closed_list_and_equal_when_they_are_the_same() {
        let deployment = |grants: &[&str]| NewDeployment {
            grants: grants.iter().map(|grant| (*grant).to_owned()).collect(),
            ..NewDeployment::stable("*", "h", "")
        };
        assert!(check(&deployment(&["emit"])).is_ok());
        let error = check(&deployment(&["emit", "http"])).expect_err("unknown").to_string();
        assert!(error.contains("`http` is no grant of a deployment; there is `emit`"), "{error}");
        assert_eq!(distinct(&deployment(&["emit", "emit"]).grants), ["emit"]);
    }
}
