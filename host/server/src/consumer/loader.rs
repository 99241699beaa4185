//! Loads a consumer's deployments as handlers that can run.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use oncebox_control::{Consumer, Control, Deployment, DeploymentRole, Tenant, limits};
use oncebox_model::{handler::Handler, policy::Policy};
use oncebox_runtime::{HandlerSettings, Recorder};

use crate::{
    compile::Compilations,
    consumer::router::{Counts, Routes, RunnableDeployment},
};

/// The loader that makes handlers of the host's components.
pub struct Loader {
    control: Control,
    components: Compilations,
    recorder: Option<Recorder>,
    counts: Arc<Counts>,
}

impl Loader {
    /// Creates the loader of a host.
    pub fn new(control: Control, components: Compilations) -> Self {
        Self { control, components, recorder: None, counts: Arc::default() }
    }

    /// Returns this loader with a recorder, where there is one, that records everything handlers
    /// do.
    pub fn recorded_by(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Returns the store that components are loaded from.
    pub fn components(&self) -> &Compilations {
        &self.components
    }

    /// Returns the outcomes of canaries' runs, and of the runs they are compared with.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Loads every live deployment of a consumer, compiled. It returns all of them or an error: a
    /// host that cannot run a deployment goes on with those it has. A shadow that fails to load is
    /// left out.
    pub async fn load(
        &self,
        tenant: &Tenant,
        consumer: &Consumer,
        policy: &Policy,
    ) -> Result<Arc<Routes>> {
        let deployments = self.control.deployments().live(consumer.consumer_id).await?;
        let compared: Vec<_> = deployments
            .live
            .iter()
            .filter(|d| d.role == DeploymentRole::Canary)
            .map(|d| d.slot.clone())
            .collect();
        let mut loaded = Vec::new();
        for deployment in deployments.live.into_iter().chain(deployments.pinned) {
            let counts = compared.contains(&deployment.slot).then(|| self.counts.clone());
            let counts = counts.filter(|_| deployment.role != DeploymentRole::Shadow);
            let deployed = self.deployed(tenant, &deployment, policy, counts).await;
            if let (DeploymentRole::Shadow, Err(error)) = (deployment.role, &deployed) {
                // Live deployments do not wait for a candidate on trial.
                tracing::warn!(
                    deployment = deployment.deployment_id,
                    error = format!("{error:#}"),
                    "failed to load a shadow; it is not run"
                );
                continue;
            }
            let deployed = deployed.with_context(|| {
                format!(
                    "failed to load handler `{}` for event type {}",
                    deployment.handler, deployment.slot
                )
            })?;
            loaded.push((deployment, deployed));
        }
        Ok(Arc::new(Routes::new(deployments.generation, loaded)))
    }

    async fn deployed(
        &self,
        tenant: &Tenant,
        deployment: &Deployment,
        policy: &Policy,
        counts: Option<Arc<Counts>>,
    ) -> Result<Arc<RunnableDeployment>> {
        let limits = limits(policy, &deployment.limits)?;
        let deadline = Duration::from_millis(limits.deadline_ms);
        let component = self.components.loaded(&deployment.digest).await?;
        // A row may be older than the rule that refuses such a deployment.
        component.check_grant(deployment.may_emit())?;
        let config = deployment.settings.as_object().into_iter().flatten();
        let settings = HandlerSettings {
            version: deployment.version_id,
            limits,
            config: config
                .map(|(key, value)| {
                    (key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned))
                })
                .collect(),
            random_key: self.control.tenant_databases().credentials(tenant)?.random_key,
            may_emit: deployment.may_emit(),
        };
        let handler = self.components.runtime().handler(&component, settings);
        let handler: Box<dyn Handler> = match &self.recorder {
            Some(recorder) => Box::new(handler.recorded_by(recorder.clone())),
            None => Box::new(handler),
        };
        Ok(RunnableDeployment::new(deployment, deadline, handler, counts))
    }
}
