//! The live deployments of a consumer, compiled: what the inbox asks for a handler.

use std::{collections::HashMap, sync::Arc};

use anyhow::{Context, Result};
use oncebox_inbox::{
    Admin, Consumer, Deployment, Tenant,
    handler::{Handler, Handlers},
    policy::Limits,
};
use oncebox_runtime::{HandlerSettings, LoadedComponent, Recorder, Runtime};
use tokio::sync::Mutex;

/// Takes every event type that has no deployment of its own.
const WILDCARD: &str = "*";

/// A consumer's handlers at one generation.
pub(crate) struct LoadedHandlers {
    generation: i64,
    by_type: HashMap<String, Arc<dyn Handler>>,
}

impl Handlers for LoadedHandlers {
    fn resolve(&self, event_type: &str) -> Option<Arc<dyn Handler>> {
        self.by_type.get(event_type).or_else(|| self.by_type.get(WILDCARD)).cloned()
    }

    fn generation(&self) -> i64 {
        self.generation
    }
}

/// Loads components once per digest, whoever deploys them.
pub(crate) struct Loader {
    admin: Admin,
    runtime: Runtime,
    loaded: Mutex<HashMap<Vec<u8>, LoadedComponent>>,
    recorder: Option<Recorder>,
}

impl Loader {
    pub(crate) fn new(admin: Admin, runtime: Runtime) -> Self {
        Self { admin, runtime, loaded: Mutex::default(), recorder: None }
    }

    /// The same, with everything that handlers do kept by a recorder, where there is one.
    pub(crate) fn recorded_by(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Everything that is live for a consumer, compiled. All of it or an error: a host that cannot
    /// run a deployment goes on with what it has.
    pub(crate) async fn load(&self, tenant: &Tenant, consumer: &Consumer, limits: &Limits) -> Result<Arc<dyn Handlers>> {
        let deployments = self.admin.deployments(consumer.consumer_id).await?;
        let mut by_type = HashMap::new();
        for deployment in &deployments.live {
            let loading = self.handler(tenant, deployment, limits).await;
            let handler = loading
                .with_context(|| format!("failed to load handler `{}` for event type `{}`", deployment.handler, deployment.event_type))?;
            by_type.insert(deployment.event_type.clone(), handler);
        }
        Ok(Arc::new(LoadedHandlers { generation: deployments.generation, by_type }))
    }

    async fn handler(&self, tenant: &Tenant, deployment: &Deployment, limits: &Limits) -> Result<Arc<dyn Handler>> {
        let component = self.component(&deployment.digest).await?;
        let config = deployment.settings.as_object().into_iter().flatten();
        let settings = HandlerSettings {
            version: deployment.version_id,
            limits: limits.clone(),
            config: config.map(|(key, value)| (key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned))).collect(),
            random_key: self.admin.random_key(&tenant.login),
        };
        let handler = self.runtime.handler(&component, settings);
        Ok(Arc::new(match &self.recorder {
            Some(recorder) => handler.recorded_by(recorder.clone()),
            None => handler,
        }))
    }

    async fn component(&self, digest: &[u8]) -> Result<LoadedComponent> {
        let mut loaded = self.loaded.lock().await;
        if let Some(component) = loaded.get(digest) {
            return Ok(component.clone());
        }
        let component = self.runtime.load(&self.admin.component(digest).await?).await?;
        loaded.insert(digest.to_vec(), component.clone());
        Ok(component)
    }
}
