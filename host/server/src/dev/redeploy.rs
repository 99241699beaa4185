//! A component that changes is made live, through the same API as anybody's.

use std::{path::Path, time::Duration};

use anyhow::Result;
use tokio::time::Instant;

use super::files::{Changed, Files, POLL};
use crate::{
    cli::{
        Api, SlotArgs, handler_name,
        upload::{Upload, short, wait_telling},
        wait_until_switched, wire,
    },
    report,
};

/// How long the host of this process may take to switch.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a compilation is told of.
const TELL: Duration = Duration::from_secs(5);

/// What became of a component.
pub(super) enum Deployed {
    /// It is live, with this digest.
    Now { deployment_id: i64, digest: String },
    /// It was live before.
    Before,
}

/// Redeploy what changes, for ever.
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
        Ok(Some(digest)) => {
            let took = started.elapsed().as_secs_f64();
            println!(
                "redeploy  {file} takes `{event_type}`, version {}, live after {took:.2} s",
                short(&digest)
            );
        }
        Ok(None) => println!("redeploy  {file} is what is live already"),
        Err(error) => {
            println!("refused   {}; what is live stays", report::lines(&error).join("; "))
        }
    }
}

async fn redeploy(api: &Api, changed: &Changed) -> Result<Option<String>> {
    match deploy(api, changed).await? {
        Deployed::Before => Ok(None),
        Deployed::Now { deployment_id, digest } => {
            wait_until_switched(api, &slot(&changed.event_type), deployment_id, SWITCH_TIMEOUT)
                .await?;
            Ok(Some(digest))
        }
    }
}

/// Upload a component and deploy it, unless it is live.
pub(super) async fn deploy(api: &Api, changed: &Changed) -> Result<Deployed> {
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
        return Ok(Deployed::Before);
    }
    let deployed = slot.deploy(api, &version).await?;
    Ok(Deployed::Now { deployment_id: deployed.deployment_id, digest: version.digest })
}

/// Upload a component and wait until it is compiled. The first time may take a minute, which is
/// told while it passes.
async fn compiled(api: &Api, upload: &Upload<'_>) -> Result<wire::Version> {
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

/// How far a compilation is.
fn so_far(state: &str, since: Duration) -> String {
    match (state, since.as_secs()) {
        (_, 0) => "once; what is compiled is kept".to_owned(),
        ("compiling", seconds) => format!("{seconds} s so far"),
        (state, seconds) => format!("{state}, {seconds} s so far"),
    }
}

/// The handler of a file; an event type, which may be the file's name, has dots.
pub(super) fn handler_of(path: &Path) -> String {
    handler_name(path).replace('.', "-")
}

fn slot(event_type: &str) -> SlotArgs {
    SlotArgs {
        tenant: "dev".to_owned(),
        consumer: "dev".to_owned(),
        event_type: event_type.to_owned(),
        event_versions: None,
    }
}
