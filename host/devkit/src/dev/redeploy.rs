//! Redeployment of components that change, through the API that any client uses.

use std::{path::Path, time::Duration};

use anyhow::Result;
use oncebox_api::wire;
use oncebox_server::error_text;
use tokio::time::Instant;

use super::files::{Changed, Files, POLL};
use crate::{
    api::Api,
    slot::{Slot, handler_name, wait_until_switched},
    upload::{Upload, short, wait_telling},
};

/// Longest wait for the host of this process to switch.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two lines about one compilation.
const TELL: Duration = Duration::from_secs(5);

/// The result of deploying a component.
pub(super) enum DeployOutcome {
    /// A new deployment, live with this digest and these grants.
    Now { deployment_id: i64, digest: String, grants: Vec<String> },
    /// No deployment: the component was live before.
    Before,
}

/// Redeploys components that change, for ever.
pub(super) async fn watch(api: Api, mut files: Files) {
    loop {
        tokio::time::sleep(POLL).await;
        for changed in files.changed(std::time::Instant::now()) {
            tell(&api, &changed).await;
        }
    }
}

async fn tell(api: &Api, changed: &Changed) {
    let started = Instant::now();
    let (file, event_type) = (changed.path.display(), &changed.event_type);
    match redeploy(api, changed).await {
        Ok(Some((digest, grants))) => {
            let took = started.elapsed().as_secs_f64();
            println!(
                "redeploy  {file} takes `{event_type}`, version {}, live after {took:.2} s",
                short(&digest)
            );
            tell_grants(&changed.path, &grants);
        }
        Ok(None) => println!("redeploy  {file} is what is live already"),
        Err(error) => {
            println!("refused   {}; what is live stays", error_text::lines(&error).join("; "))
        }
    }
}

/// Prints the rights that a component was given because it imports what needs them. A developer's
/// own machine grants them unasked.
pub(super) fn tell_grants(path: &Path, grants: &[String]) {
    if !grants.is_empty() {
        println!(
            "grants    {}: {}, which it imports; elsewhere, deploy it with `--grant`",
            path.display(),
            grants.join(", ")
        );
    }
}

/// Deploys a component that changed. Returns the digest and the grants of the new deployment.
async fn redeploy(api: &Api, changed: &Changed) -> Result<Option<(String, Vec<String>)>> {
    match deploy(api, changed).await? {
        DeployOutcome::Before => Ok(None),
        DeployOutcome::Now { deployment_id, digest, grants } => {
            wait_until_switched(api, &slot(&changed.event_type), deployment_id, SWITCH_TIMEOUT)
                .await?;
            Ok(Some((digest, grants)))
        }
    }
}

/// Uploads a component and deploys it, unless it is live.
pub(super) async fn deploy(api: &Api, changed: &Changed) -> Result<DeployOutcome> {
    let slot = slot(&changed.event_type);
    let (handler, name) = (handler_of(&changed.path), changed.path.display().to_string());
    let upload = Upload {
        tenant: &slot.tenant,
        handler: &handler,
        name,
        bytes: changed.bytes.clone().into(),
    };
    let version = compiled(api, &upload).await?;
    if slot
        .live(api, "stable")
        .await?
        .is_some_and(|live| live.digest == version.digest && live.handler == version.handler)
    {
        return Ok(DeployOutcome::Before);
    }
    let deployed = slot.deploy(api, &version).await?;
    Ok(DeployOutcome::Now {
        deployment_id: deployed.deployment_id,
        digest: version.digest,
        grants: deployed.grants,
    })
}

/// Uploads a component and waits until it is compiled. The first time may take a minute, so it
/// prints the progress.
async fn compiled(api: &Api, upload: &Upload<'_>) -> Result<wire::VersionBody> {
    let version = upload.send(api).await?;
    let started = Instant::now();
    let mut told: Option<Instant> = None;
    let tell = |state: &str| {
        if told.is_none_or(|at| at.elapsed() >= TELL) {
            println!("compiling {}: {}", upload.name, so_far(state, started.elapsed()));
            told = Some(Instant::now());
        }
    };
    wait_telling(api, upload.tenant, &upload.name, version, tell).await
}

/// Returns the progress of a compilation as text.
fn so_far(state: &str, since: Duration) -> String {
    match (state, since.as_secs()) {
        (_, 0) => "once; what is compiled is kept".to_owned(),
        ("compiling", seconds) => format!("{seconds} s so far"),
        (state, seconds) => format!("{state}, {seconds} s so far"),
    }
}

/// Returns the handler's name for a file. An event type, which may be the file's name, has dots;
/// they become hyphens.
pub(super) fn handler_of(path: &Path) -> String {
    handler_name(path).replace('.', "-")
}

fn slot(event_type: &str) -> Slot {
    Slot {
        tenant: "dev".to_owned(),
        consumer: "dev".to_owned(),
        event_type: event_type.to_owned(),
        event_versions: None,
    }
}
