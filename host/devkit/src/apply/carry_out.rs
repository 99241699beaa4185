//! The plan, carried out step by step. A step that fails ends it. The steps before it stay, and the
//! next run goes on.

use anyhow::{Context, Result};
use oncebox_api::wire::{self, NewConsumer, NewDeploymentBody, NewTenant};

use super::{
    file,
    plan::{PlanLine, Sign, What},
};
use crate::{
    api::{Api, path},
    policy_file::policy_object,
    slot::Slot,
    upload::Upload,
};

/// What was made of a plan.
#[derive(Default)]
pub struct Applied {
    /// The deployments.
    pub deployed: Vec<(Slot, wire::DeploymentBody)>,
    /// Warnings about consumers that were created, as text for a reader.
    pub warnings: Vec<String>,
}

/// Carries out what is to be created or changed.
pub async fn carry_out(api: &Api, changes: &[PlanLine<'_>]) -> Result<Applied> {
    let mut applied = Applied::default();
    // The tenants and versions of all come first: a component that cannot be deployed stops
    // everything else.
    let (first, rest): (Vec<_>, Vec<_>) = changes
        .iter()
        .filter(|change| change.sign != Sign::Keep)
        .partition(|change| matches!(change.what, What::Tenant(_) | What::Version { .. }));
    for change in first.into_iter().chain(rest) {
        match &change.what {
            What::Tenant(tenant) => tenant_is_made(api, tenant).await?,
            What::Version { tenant, handler, source } => {
                version_is_made(api, tenant, handler, source).await?
            }
            What::Migration { tenant, migration } => {
                let made: Result<wire::MigrationBody> =
                    api.post(&path(&["tenants", tenant, "migrations"]), &migration.to_send()).await;
                made.with_context(|| format!("`{}`", migration.path.display()))?;
            }
            What::Endpoint { tenant, endpoint } => {
                let path = path(&["tenants", tenant, "endpoints", &endpoint.name]);
                let set: Result<wire::EndpointChangeBody> =
                    api.put_json(&path, &endpoint.settings).await;
                set.with_context(|| format!("endpoint `{}` of tenant `{tenant}`", endpoint.name))?;
            }
            What::Consumer { tenant, consumer } => {
                let new = NewConsumer {
                    name: consumer.name.clone(),
                    policy: policy_object(&consumer.policy)?,
                };
                let created: wire::ConsumerBody =
                    api.post(&path(&["tenants", tenant, "consumers"]), &new).await?;
                let named =
                    |warning: &String| format!("consumer `{tenant}/{}`: {warning}", created.name);
                applied.warnings.extend(created.warnings.iter().map(named));
            }
            What::Deployment { tenant, consumer, deployment } => {
                applied.deployed.push(deploy(api, tenant, consumer, deployment).await?)
            }
        }
    }
    Ok(applied)
}

async fn tenant_is_made(api: &Api, tenant: &file::TenantSpec) -> Result<()> {
    let _: wire::TenantBody = api
        .post(
            &path(&["tenants"]),
            &NewTenant {
                name: tenant.name.clone(),
                migrations: Vec::new(),
                database_url: None,
                database: tenant.database.clone(),
            },
        )
        .await?;
    Ok(())
}

async fn version_is_made(
    api: &Api,
    tenant: &str,
    handler: &str,
    source: &file::VersionSource,
) -> Result<()> {
    if let file::VersionSource::File { path, bytes, .. } = source {
        Upload { tenant, handler, name: path.display().to_string(), bytes: bytes.clone() }
            .until_ready(api)
            .await?;
    }
    Ok(())
}

async fn deploy(
    api: &Api,
    tenant: &str,
    consumer: &str,
    deployment: &file::DeploymentSpec,
) -> Result<(Slot, wire::DeploymentBody)> {
    let file::DeploymentSpec {
        event_type,
        event_versions,
        handler,
        source,
        settings,
        limits,
        requires_migration,
        retries,
        grants,
    } = deployment;
    let slot = Slot {
        tenant: tenant.to_owned(),
        consumer: consumer.to_owned(),
        event_type: event_type.clone(),
        event_versions: event_versions.clone(),
    };
    let new = NewDeploymentBody {
        event_type: event_type.clone(),
        event_versions: event_versions.clone(),
        handler: handler.clone(),
        version: match source {
            file::VersionSource::File { digest, .. } => digest.clone(),
            file::VersionSource::Uploaded(digest) => digest.clone(),
        },
        settings: settings.clone(),
        limits: limits.clone(),
        requires_migration: requires_migration.clone(),
        retries: *retries,
        grants: grants.clone(),
    };
    let deployed: Result<wire::DeploymentBody> = api.post(&slot.path(&["deployments"]), &new).await;
    let deployed = deployed.with_context(|| format!("failed to deploy to {}", slot.shown()))?;
    Ok((slot, deployed))
}
