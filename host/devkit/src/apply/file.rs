//! The file of `oncebox apply`, with everything that it names read and checked. No request is sent
//! yet.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use oncebox_api::wire::{GrantBody, RetriesBody};
use oncebox_model::policy::{Policy, toml_error};
use oncebox_server::brokers::check_kafka;
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::endpoint::{EndpointEntry, EndpointSpec};
use crate::{
    migration::{Migration, Open},
    policy_file::read_policy,
    slot::handler_name,
};

/// Content of the file, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<TenantEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    name: String,
    database: Option<String>,
    #[serde(default)]
    migrations: Vec<PathBuf>,
    #[serde(default)]
    consumer: Vec<ConsumerEntry>,
    #[serde(default)]
    endpoint: Vec<EndpointEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsumerEntry {
    name: String,
    policy: Option<Policy>,
    policy_file: Option<PathBuf>,
    #[serde(default)]
    deployment: Vec<DeploymentEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeploymentEntry {
    event_type: String,
    event_versions: Option<String>,
    handler: Option<String>,
    component: Option<PathBuf>,
    version: Option<String>,
    #[serde(default)]
    settings: Map<String, Value>,
    #[serde(default)]
    limits: Map<String, Value>,
    requires_migration: Option<String>,
    #[serde(default)]
    retries: RetriesBody,
    #[serde(default)]
    grants: Vec<GrantBody>,
}

/// A tenant as it should be.
#[derive(Debug)]
pub struct TenantSpec {
    pub name: String,
    /// Name of its database; none for the one that the host chooses.
    pub database: Option<String>,
    pub migrations: Vec<Migration>,
    pub endpoints: Vec<EndpointSpec>,
    pub consumers: Vec<ConsumerSpec>,
}

/// A consumer as it should be.
#[derive(Debug)]
pub struct ConsumerSpec {
    pub name: String,
    pub policy: Policy,
    pub deployments: Vec<DeploymentSpec>,
}

/// A deployment as it should be.
#[derive(Debug)]
pub struct DeploymentSpec {
    pub event_type: String,
    pub event_versions: Option<String>,
    pub handler: String,
    pub source: VersionSource,
    pub settings: Map<String, Value>,
    pub limits: Map<String, Value>,
    pub requires_migration: Option<String>,
    pub retries: RetriesBody,
    pub grants: Vec<GrantBody>,
}

/// Origin of a version.
#[derive(Clone)]
pub enum VersionSource {
    /// A file as it was read, with its SHA-256.
    File { path: PathBuf, bytes: axum::body::Bytes, digest: String },
    /// Beginning of the digest of a version that was uploaded before.
    Uploaded(String),
}

impl std::fmt::Debug for VersionSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { path, .. } => write!(f, "{}", path.display()),
            Self::Uploaded(digest) => f.write_str(digest),
        }
    }
}

/// Reads a file and the files that it names, relative to its folder.
pub fn read(path: &Path) -> Result<Vec<TenantSpec>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("failed to read `{}`", path.display()))?;
    parse(path, &text, &|path| std::fs::read(path))
}

/// Parses a text, and reads the files that it names with `open`.
pub fn parse(path: &Path, text: &str, open: Open<'_>) -> Result<Vec<TenantSpec>> {
    let shown = path.display();
    let file: File = toml::from_str(text)
        .map_err(|error| anyhow!("`{shown}` cannot be applied, {}", toml_error(text, &error)))?;
    let dir = path.parent().unwrap_or(Path::new(""));
    let cannot = || format!("`{shown}` cannot be applied");
    ensure!(
        !file.tenant.is_empty(),
        "{}: it names no tenant; one begins with `[[tenant]]`",
        cannot()
    );
    once(file.tenant.iter().map(|tenant| format!("tenant `{}`", tenant.name)))
        .with_context(cannot)?;
    file.tenant
        .into_iter()
        .map(|entry| tenant(dir, open, entry))
        .collect::<Result<_>>()
        .with_context(cannot)
}

fn tenant(dir: &Path, open: Open<'_>, entry: TenantEntry) -> Result<TenantSpec> {
    let TenantEntry { name, database, migrations, consumer, endpoint } = entry;
    let migrations: Vec<_> = migrations
        .iter()
        .map(|path| Migration::read(&dir.join(path), open))
        .collect::<Result<_>>()?;
    once(
        migrations
            .iter()
            .map(|migration| format!("migration `{}` of tenant `{name}`", migration.name)),
    )?;
    once(consumer.iter().map(|consumer| format!("consumer `{name}/{}`", consumer.name)))?;
    once(endpoint.iter().map(|entry| format!("endpoint `{}` of tenant `{name}`", entry.name())))?;
    let endpoints =
        endpoint.into_iter().map(|entry| entry.read(dir, open, &name)).collect::<Result<_>>()?;
    let consumers = consumer
        .into_iter()
        .map(|entry| consumer_of(dir, open, &name, entry))
        .collect::<Result<_>>()?;
    Ok(TenantSpec { name, database, migrations, endpoints, consumers })
}

fn consumer_of(
    dir: &Path,
    open: Open<'_>,
    tenant: &str,
    entry: ConsumerEntry,
) -> Result<ConsumerSpec> {
    let ConsumerEntry { name, policy, policy_file, deployment } = entry;
    let subject = format!("{tenant}/{name}");
    let policy = match (policy, policy_file) {
        (Some(policy), None) => {
            let sound = policy
                .check()
                .map_err(Into::into)
                .and_then(|()| check_kafka(tenant, &name, &policy));
            sound.with_context(|| format!("the policy of consumer `{subject}` is not valid"))?;
            policy
        }
        (None, Some(path)) => read_policy(tenant, &name, &dir.join(path), open)?,
        _ => bail!("consumer `{subject}` needs either `policy` or `policy_file`"),
    };
    let deployments: Vec<_> = deployment
        .into_iter()
        .map(|entry| deployment_of(dir, open, &subject, entry))
        .collect::<Result<_>>()?;
    once(deployments.iter().map(|d| {
        format!("deployment of {} of `{subject}`", slot(&d.event_type, d.event_versions.as_deref()))
    }))?;
    Ok(ConsumerSpec { name, policy, deployments })
}

fn deployment_of(
    dir: &Path,
    open: Open<'_>,
    consumer: &str,
    entry: DeploymentEntry,
) -> Result<DeploymentSpec> {
    let DeploymentEntry {
        event_type,
        event_versions,
        handler,
        component,
        version,
        settings,
        limits,
        requires_migration,
        retries,
        mut grants,
    } = entry;
    let subject = format!(
        "the deployment of {} of `{consumer}`",
        slot(&event_type, event_versions.as_deref())
    );
    let (source, from_file) = match (component, version) {
        (Some(path), None) => {
            (VersionSource::read(&dir.join(&path), open)?, Some(handler_name(&path)))
        }
        (None, Some(digest)) => (VersionSource::Uploaded(digest), None),
        _ => bail!("{subject} needs either `component`, a file, or `version`, a digest"),
    };
    let handler = handler
        .or(from_file)
        .with_context(|| format!("{subject} needs `handler`, whose version it names"))?;
    let scalar = |value: &Value| value.is_string() || value.is_number() || value.is_boolean();
    if let Some((key, _)) = settings.iter().find(|(_, value)| !scalar(value)) {
        bail!("setting `{key}` of {subject} is neither a string, a number nor true or false");
    }
    grants.sort_unstable();
    grants.dedup();
    Ok(DeploymentSpec {
        event_type,
        event_versions,
        handler,
        source,
        settings,
        limits,
        requires_migration,
        retries,
        grants,
    })
}

impl VersionSource {
    fn read(path: &Path, open: Open<'_>) -> Result<Self> {
        let bytes = open(path)
            .with_context(|| format!("failed to read the component `{}`", path.display()))?;
        Ok(Self::File {
            path: path.to_owned(),
            digest: hex::encode(Sha256::digest(&bytes)),
            bytes: bytes.into(),
        })
    }
}

/// Describes the messages that a deployment takes, for operators.
pub fn slot(event_type: &str, event_versions: Option<&str>) -> String {
    event_versions.map_or_else(
        || format!("`{event_type}`"),
        |versions| format!("`{event_type}` in versions `{versions}`"),
    )
}

/// Refuses a name that is there twice.
fn once(names: impl Iterator<Item = String>) -> Result<()> {
    let mut known = HashSet::new();
    for name in names {
        ensure!(known.insert(name.clone()), "{name} is there twice");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let dir =
            std::env::temp_dir().join(format!("oncebox-apply-{:016x}", rand::random::<u64>()));
        std::fs::create_dir_all(&dir).expect("a folder");
        std::fs::write(dir.join("1.sql"), "").expect("a file");
        std::fs::write(dir.join("a.wasm"), "").expect("a file");
        let path = dir.join("x.toml");
        std::fs::write(&path, text).expect("a file");
        let error = read(&path).err().map_or_else(
            || "none".to_owned(),
            |error| oncebox_server::error_text::one_line(&error),
        );
        std::fs::remove_dir_all(&dir).expect("the folder");
        error.replace(dir.to_str().expect("a path"), "DIR")
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        let policy = "policy = { topics = ['t'], ack = 'after_commit' }";
        let consumer =
            format!("[[tenant]]\nname = 'a'\n[[tenant.consumer]]\nname = 'c'\n{policy}\n");
        let deployment = format!("{consumer}[[tenant.consumer.deployment]]\nevent_type = 'e'\n");
        for (text, line) in [
            ("", ": it names no tenant; one begins with `[[tenant]]`".to_owned()),
            ("[[tenants]]", ", line 1: unknown field `tenants`, expected `tenant`".to_owned()),
            (
                "[[tenant]]\nname = 'a'\nmigration = []",
                ", line 3: unknown field `migration`, expected one of `name`, `database`, \
                    `migrations`, `consumer`, `endpoint`".to_owned(),
            ),
            ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", ": tenant `a` is there twice".to_owned()),
            (
                "[[tenant]]\nname = 'a'\n[[tenant.endpoint]]\nname = 'p'\nurl = { file = 'no' }",
                ": endpoint `p` of tenant `a`: failed to read a secret from `DIR/no`: No such file \
                    or directory (os error 2)".to_owned(),
            ),
            ("[[tenant]]\nname = 'a'\nmigrations = ['1.sql', '1.sql']", ": migration `1` of tenant \
                `a` is there twice".to_owned()),
            (
                "[[tenant]]\nname = 'a'\nmigrations = ['2.sql']",
                ": failed to read the migration `DIR/2.sql`: No such file or directory (os error \
                    2)".to_owned(),
            ),
            (
                "[[tenant]]\nname = 'a'\n[[tenant.consumer]]\nname = 'c'",
                ": consumer `a/c` needs either `policy` or `policy_file`".to_owned(),
            ),
            (
                &consumer.replace("'after_commit'", "'never'"),
                ", line 5: unknown variant `never`, expected `after_commit` or `after_insert`".to_owned(),
            ),
            (
                &consumer.replace(policy, "policy = 'orders.toml'"),
                ", line 5: invalid type: string, expected a table with a policy; `policy_file` \
                    names a file".to_owned(),
            ),
            (
                &consumer.replace("['t']", "[]"),
                ": the policy of consumer `a/c` is not valid: `topics` must name at least one \
                    topic".to_owned(),
            ),
            (&deployment, ": the deployment of `e` of `a/c` needs either `component`, a file, or \
                `version`, a digest".to_owned()),
            (
                &format!("{deployment}version = 'abcdef'"),
                ": the deployment of `e` of `a/c` needs `handler`, whose version it names".to_owned(),
            ),
            (
                &format!("{deployment}component = 'b.wasm'"),
                ": failed to read the component `DIR/b.wasm`: No such file or directory (os error \
                    2)".to_owned(),
            ),
            (
                &format!("{deployment}component = 'a.wasm'\nretries = 'never'"),
                ", line 9: unknown variant `never`, expected `live` or `pinned`".to_owned(),
            ),
            (
                &format!("{deployment}component = 'a.wasm'\ngrants = ['send']"),
                ", line 9: unknown variant `send`, expected `emit`".to_owned(),
            ),
            (
                &format!("{deployment}component = 'a.wasm'\nsettings = {{ x = [] }}"),
                ": setting `x` of the deployment of `e` of `a/c` is neither a string, a number nor \
                    true or false".to_owned(),
            ),
            (
                &format!("{deployment}component = \
                    'a.wasm'\n[[tenant.consumer.deployment]]\nevent_type = 'e'\ncomponent = \
                    'a.wasm'"),
                ": deployment of `e` of `a/c` is there twice".to_owned(),
            ),
        ] {
            assert_eq!(error(text), format!("`DIR/x.toml` cannot be applied{line}"), "{text}");
        }
        assert_eq!(error(&format!("{deployment}component = 'a.wasm'")), "none");
        let granted = format!("{deployment}component = 'a.wasm'\ngrants = ['emit', 'emit']");
        assert_eq!(error(&granted), "none");
    }
}
