//! The plan: what is there, compared with what should be.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, bail, ensure};
use oncebox_api::wire;
use oncebox_model::policy::Policy;
use serde_json::{Value, json};

use super::{endpoint::EndpointSpec, file};
use crate::{
    api::{Api, Refused, path, with_query},
    migration::Migration,
    upload::short,
};

/// Action on the subject of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// It is not there yet.
    Create,
    /// It differs from the file.
    Change,
    /// It is as the file says.
    Keep,
}

/// One line of the plan.
pub struct PlanLine<'a> {
    /// Action of the line.
    pub sign: Sign,
    pub(super) what: What<'a>,
    /// Differences between what is there and what should be.
    details: Vec<String>,
}

/// Subject of a line.
pub(super) enum What<'a> {
    Tenant(&'a file::TenantSpec),
    Version { tenant: &'a str, handler: &'a str, source: &'a file::VersionSource },
    Migration { tenant: &'a str, migration: &'a Migration },
    Endpoint { tenant: &'a str, endpoint: &'a EndpointSpec },
    Consumer { tenant: &'a str, consumer: &'a file::ConsumerSpec },
    Deployment { tenant: &'a str, consumer: &'a str, deployment: &'a file::DeploymentSpec },
}

/// State of a tenant that is there, as the API reports it.
struct ExistingTenant {
    migrations: Vec<wire::MigrationBody>,
    consumers: HashMap<String, wire::ConsumerBody>,
}

/// Compares everything, and fails before anything is done if something cannot be changed. Each
/// tenant's changes are in the order in which they are carried out. Versions come before
/// migrations, so that a component that cannot be deployed stops everything before the tenant's
/// tables are touched.
pub async fn compare<'a>(api: &Api, tenants: &'a [file::TenantSpec]) -> Result<Vec<PlanLine<'a>>> {
    let mut changes = Vec::new();
    for tenant in tenants {
        let found = found(api, tenant).await?;
        changes.push(PlanLine::new(found.is_some(), What::Tenant(tenant)));
        let versions = versions(api, tenant, found.is_some()).await?;
        changes.extend(missing_versions(tenant, &versions));
        for migration in &tenant.migrations {
            changes.push(compare_migration(&tenant.name, migration, found.as_ref())?);
        }
        for endpoint in &tenant.endpoints {
            changes.push(compare_endpoint(api, &tenant.name, endpoint, found.is_some()).await?);
        }
        for consumer in &tenant.consumers {
            let known = found.as_ref().and_then(|found| found.consumers.get(&consumer.name));
            changes.push(compare_consumer(&tenant.name, consumer, known)?);
            let live: Vec<wire::DeploymentBody> = match known {
                Some(_) => {
                    api.get(&path(&[
                        "tenants",
                        &tenant.name,
                        "consumers",
                        &consumer.name,
                        "deployments",
                    ]))
                    .await?
                }
                None => Vec::new(),
            };
            for deployment in &consumer.deployments {
                changes.push(compare_deployment(
                    &tenant.name,
                    &consumer.name,
                    deployment,
                    &live,
                    &versions,
                )?);
            }
        }
    }
    Ok(changes)
}

async fn found(api: &Api, spec: &file::TenantSpec) -> Result<Option<ExistingTenant>> {
    let tenant = &spec.name;
    let database = match api.get::<wire::TenantBody>(&path(&["tenants", tenant])).await {
        Ok(found) => found.database,
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    if let Some(named) = spec.database.as_ref().filter(|named| Some(*named) != database.as_ref()) {
        let place = database
            .map_or_else(|| "the host's database".to_owned(), |name| format!("database `{name}`"));
        bail!(
            "tenant `{tenant}` is in {place}, and the file says `{named}`: a tenant stays where it \
                was created, so correct the file"
        );
    }
    let migrations: Vec<wire::MigrationBody> =
        api.get(&path(&["tenants", tenant, "migrations"])).await?;
    let consumers: Vec<wire::ConsumerBody> =
        api.get(&path(&["tenants", tenant, "consumers"])).await?;
    Ok(Some(ExistingTenant {
        migrations,
        consumers: consumers
            .into_iter()
            .map(|consumer| (consumer.name.clone(), consumer))
            .collect(),
    }))
}

pub fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404)
}

/// Returns the versions of the handlers that a tenant's deployments name.
async fn versions(
    api: &Api,
    tenant: &file::TenantSpec,
    is_there: bool,
) -> Result<HashMap<String, Vec<wire::VersionBody>>> {
    let mut versions = HashMap::new();
    for deployment in
        tenant.consumers.iter().flat_map(|consumer| &consumer.deployments).filter(|_| is_there)
    {
        let handler = &deployment.handler;
        if !versions.contains_key(handler) {
            let found =
                api.get(&path(&["tenants", &tenant.name, "handlers", handler, "versions"])).await;
            let found: Vec<wire::VersionBody> = match found {
                Err(error) if is_missing(&error) => Vec::new(),
                found => found?,
            };
            versions.insert(handler.clone(), found);
        }
    }
    Ok(versions)
}

/// Returns the version that a source names, if it is there.
fn version_of<'v>(
    source: &file::VersionSource,
    handler: &str,
    versions: &'v HashMap<String, Vec<wire::VersionBody>>,
) -> Option<&'v wire::VersionBody> {
    versions.get(handler)?.iter().find(|version| match source {
        file::VersionSource::File { digest, .. } => {
            version.digest == *digest || version.source_digest.as_ref() == Some(digest)
        }
        file::VersionSource::Uploaded(prefix) => version.digest.starts_with(&prefix.to_lowercase()),
    })
}

fn missing_versions<'a>(
    tenant: &'a file::TenantSpec,
    versions: &HashMap<String, Vec<wire::VersionBody>>,
) -> Vec<PlanLine<'a>> {
    let mut missing: Vec<(&str, &file::VersionSource)> = Vec::new();
    for deployment in tenant.consumers.iter().flat_map(|consumer| &consumer.deployments) {
        let file::VersionSource::File { digest, .. } = &deployment.source else { continue };
        let is_ready = version_of(&deployment.source, &deployment.handler, versions)
            .is_some_and(|version| version.state == "ready");
        let is_named = missing.iter().any(|(handler, source)| {
            *handler == deployment.handler
                && matches!(source, file::VersionSource::File { digest: other, .. } if other == digest)
        });
        if !is_ready && !is_named {
            missing.push((&deployment.handler, &deployment.source));
        }
    }
    let version = |(handler, source)| {
        PlanLine::new(false, What::Version { tenant: &tenant.name, handler, source })
    };
    missing.into_iter().map(version).collect()
}

fn compare_migration<'a>(
    tenant: &'a str,
    migration: &'a Migration,
    found: Option<&ExistingTenant>,
) -> Result<PlanLine<'a>> {
    let applied = found.map_or(&[][..], |found| &found.migrations);
    migration.check(tenant, applied)?;
    let is_applied = applied.iter().any(|known| known.name == migration.name);
    Ok(PlanLine::new(is_applied, What::Migration { tenant, migration }))
}

/// Compares an endpoint. Its secrets are compared by the host, which names them and shows none.
async fn compare_endpoint<'a>(
    api: &Api,
    tenant: &'a str,
    endpoint: &'a EndpointSpec,
    is_there: bool,
) -> Result<PlanLine<'a>> {
    let line = PlanLine::new(false, What::Endpoint { tenant, endpoint });
    if !is_there {
        return Ok(line);
    }
    let path = path(&["tenants", tenant, "endpoints", &endpoint.name]);
    let path = with_query(&path, &[("dry_run", Some("true".to_owned()))]);
    let compared: Result<wire::EndpointChangeBody> = api.put_json(&path, &endpoint.settings).await;
    let compared =
        compared.with_context(|| format!("endpoint `{}` of tenant `{tenant}`", endpoint.name))?;
    let sign = match (compared.is_new, compared.changed.is_empty()) {
        (true, _) => Sign::Create,
        (false, true) => Sign::Keep,
        (false, false) => Sign::Change,
    };
    Ok(PlanLine { sign, details: compared.changed, ..line })
}

fn compare_consumer<'a>(
    tenant: &'a str,
    consumer: &'a file::ConsumerSpec,
    known: Option<&wire::ConsumerBody>,
) -> Result<PlanLine<'a>> {
    if let Some(known) = known {
        let name = || format!("consumer `{tenant}/{}`", consumer.name);
        // The policy is read and written again, so that settings that came later count with their
        // defaults.
        let policy: Policy = serde_json::from_value(known.policy.clone())
            .with_context(|| format!("the policy of {} is not readable", name()))?;
        let mut wanted = consumer.policy.clone();
        wanted.keep_memory(&policy);
        let different = differences(&without_secrets(&policy), &without_secrets(&wanted));
        ensure!(
            different.is_empty(),
            "the policy of {} is another: {}; change it with `oncebox consumer policy set`, which \
                says what follows for messages",
            name(),
            different.join(", ")
        );
    }
    let line = PlanLine::new(known.is_some(), What::Consumer { tenant, consumer });
    let details = if known.is_none() { raise_to_come(&consumer.policy) } else { None };
    Ok(PlanLine { details: details.into_iter().collect(), ..line })
}

/// Describes the raise that the creation of a consumer may make.
fn raise_to_come(policy: &Policy) -> Option<String> {
    let bound = policy.raise_bound().filter(|bound| *bound > policy.retention)?;
    Some(format!(
        "where `retention` is too short, its memory would be raised, to `{}` at most",
        bound.name()
    ))
}

/// Returns a policy in which only the names of Kafka's properties count. Their values may be
/// passwords, which the API does not show.
fn without_secrets(policy: &Policy) -> Value {
    let mut policy = json!(policy);
    for (_, value) in
        policy.pointer_mut("/kafka/properties").and_then(Value::as_object_mut).into_iter().flatten()
    {
        *value = "…".into();
    }
    policy
}

/// Returns the paths at which two values differ, with both values.
fn differences(before: &Value, after: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare_at("", before, after, &mut found);
    found
}

fn compare_at(path: &str, before: &Value, after: &Value, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare_at(
                    &path,
                    before.get(key).unwrap_or(&Value::Null),
                    after.get(key).unwrap_or(&Value::Null),
                    found,
                );
            }
        }
        _ if before == after => {}
        _ => found.push(format!("`{path}` {before} → {after}")),
    }
}

fn compare_deployment<'a>(
    tenant: &'a str,
    consumer: &'a str,
    deployment: &'a file::DeploymentSpec,
    live: &[wire::DeploymentBody],
    versions: &HashMap<String, Vec<wire::VersionBody>>,
) -> Result<PlanLine<'a>> {
    let what = What::Deployment { tenant, consumer, deployment };
    let version = version_of(&deployment.source, &deployment.handler, versions);
    if let (file::VersionSource::Uploaded(prefix), None) = (&deployment.source, version) {
        bail!(
            "handler `{}` of tenant `{tenant}` has no version `{prefix}`; `oncebox version list` \
                shows those there are",
            deployment.handler
        );
    }
    let is_slot = |d: &&wire::DeploymentBody| {
        d.role == "stable"
            && d.event_type == deployment.event_type
            && d.event_versions == deployment.event_versions
    };
    let Some(now) = live.iter().find(is_slot) else { return Ok(PlanLine::new(false, what)) };
    let mut details = Vec::new();
    let mut say = |name: &str, before: String, after: String| {
        if before != after {
            details.push(format!("{name} {before} → {after}"));
        }
    };
    say("handler", now.handler.clone(), deployment.handler.clone());
    let new_digest = version.map(|version| version.digest.as_str()).or(match &deployment.source {
        file::VersionSource::File { digest, .. } => Some(digest.as_str()),
        file::VersionSource::Uploaded(_) => None,
    });
    say(
        "version",
        short(&now.digest).to_owned(),
        new_digest.map_or_else(String::new, |digest| short(digest).to_owned()),
    );
    say(
        "requires_migration",
        shown(now.requires_migration.as_ref()),
        shown(deployment.requires_migration.as_ref()),
    );
    say("retries", now.retries.clone(), name_of(deployment.retries).to_owned());
    let granted: Vec<_> = deployment.grants.iter().map(|grant| grant.name().to_owned()).collect();
    say("grants", listed(&now.grants), listed(&granted));
    for (name, before, after) in [
        ("settings", &now.settings, &deployment.settings),
        ("limits", &now.limits, &deployment.limits),
    ] {
        let different = differences(&Value::Object(before.clone()), &Value::Object(after.clone()));
        details.extend(different.into_iter().map(|line| format!("{name} {line}")));
    }
    let sign = if details.is_empty() { Sign::Keep } else { Sign::Change };
    Ok(PlanLine { sign, what, details })
}

fn name_of(retries: wire::RetriesBody) -> &'static str {
    match retries {
        wire::RetriesBody::Live => "live",
        wire::RetriesBody::Pinned => "pinned",
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn shown(value: Option<&String>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| format!("`{value}`"))
}

impl<'a> PlanLine<'a> {
    fn new(is_there: bool, what: What<'a>) -> Self {
        Self { sign: if is_there { Sign::Keep } else { Sign::Create }, what, details: Vec::new() }
    }

    /// Returns the kind and the name of the subject.
    fn subject(&self) -> (&'static str, String) {
        match &self.what {
            What::Tenant(tenant) => ("tenant", tenant.name.clone()),
            What::Version { tenant, handler, source } => (
                "version",
                match source {
                    file::VersionSource::File { path, digest, .. } => {
                        format!("{tenant}/{handler} {} ({})", short(digest), path.display())
                    }
                    file::VersionSource::Uploaded(digest) => format!("{tenant}/{handler} {digest}"),
                },
            ),
            What::Migration { tenant, migration } => {
                ("migration", format!("{tenant} {}", migration.name))
            }
            What::Endpoint { tenant, endpoint } => {
                ("endpoint", format!("{tenant} {}", endpoint.name))
            }
            What::Consumer { tenant, consumer } => {
                ("consumer", format!("{tenant}/{}", consumer.name))
            }
            What::Deployment { tenant, consumer, deployment } => (
                "deployment",
                format!(
                    "{tenant}/{consumer} {}",
                    file::slot(&deployment.event_type, deployment.event_versions.as_deref())
                ),
            ),
        }
    }

    /// Returns the change as JSON.
    pub fn json(&self) -> Value {
        let (kind, name) = self.subject();
        let action = match self.sign {
            Sign::Create => "create",
            Sign::Change => "change",
            Sign::Keep => "unchanged",
        };
        json!({ "action": action, "kind": kind, "name": name, "details": self.details })
    }
}

impl std::fmt::Display for PlanLine<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sign = match self.sign {
            Sign::Create => '+',
            Sign::Change => '~',
            Sign::Keep => '=',
        };
        let (kind, name) = self.subject();
        write!(f, "{sign} {kind:<10} {name}")?;
        if self.details.is_empty() { Ok(()) } else { write!(f, ": {}", self.details.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named_by_their_path() {
        let before = json!({ "a": { "b": 1, "c": 2 }, "d": [1] });
        let after = json!({ "a": { "b": 1, "c": 3 }, "e": "x" });
        assert_eq!(
            differences(&before, &after),
            ["`a.c` 2 → 3", "`d` [1] → null", "`e` null → \"x\""]
        );
        assert!(differences(&before, &before).is_empty());
    }
}
