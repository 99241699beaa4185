//! Upload of a component, and the wait until it is compiled, both with a sign of progress.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use axum::body::{Body, Bytes};
use futures::StreamExt;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oncebox_api::wire::VersionBody;
use oncebox_server::error_text::Unfit;
use sha2::{Digest, Sha256};

use super::api::{Api, Refused, path};
use crate::terminal;

/// Size of one chunk of an upload, bytes. The progress bar moves by chunks.
const CHUNK: usize = 64 << 10;
/// Pause between two requests for the state.
const POLL: Duration = Duration::from_millis(100);
/// Pause between two offers of this process to compile the version it waits for. The offer takes
/// over a compilation at once that no process works on any more.
const OFFER: Duration = Duration::from_secs(1);

/// A component to upload, with its names.
pub struct Upload<'a> {
    /// Name of the tenant.
    pub tenant: &'a str,
    /// Name of the handler.
    pub handler: &'a str,
    /// Name for operators: the component's file.
    pub name: String,
    /// The component.
    pub bytes: Bytes,
}

/// Reads a component's file.
pub fn read(path: &Path) -> Result<Bytes> {
    let bytes = std::fs::read(path)
        .with_context(|| format!("failed to read the component `{}`", path.display()))?;
    Ok(bytes.into())
}

impl Upload<'_> {
    /// Uploads the component, unless it is there, and waits until it can be deployed.
    pub async fn until_ready(&self, api: &Api) -> Result<VersionBody> {
        let version = self.send(api).await?;
        wait(api, self.tenant, &self.name, version).await
    }

    /// Uploads the component, unless it is there.
    pub async fn send(&self, api: &Api) -> Result<VersionBody> {
        let digest = hex::encode(Sha256::digest(&self.bytes));
        let path = path(&["tenants", self.tenant, "handlers", self.handler, "versions", &digest]);
        // A failed version is worth another try: the host may have caused the failure.
        if let Some(known) = known(api, &path).await?.filter(|known| known.state != "failed") {
            return Ok(known);
        }
        let sent = api.put(&path, self.bytes.len(), counted(self.bytes.clone(), &self.name)).await;
        sent.map_err(|error| unfit(&self.name, error))
    }
}

/// Returns a version, if it exists.
async fn known(api: &Api, path: &str) -> Result<Option<VersionBody>> {
    match api.get(path).await {
        Ok(known) => Ok(Some(known)),
        Err(error)
            if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Waits until a version is compiled, and shows a sign of life.
pub async fn wait(
    api: &Api,
    tenant: &str,
    name: &str,
    version: VersionBody,
) -> Result<VersionBody> {
    let bar = spinner();
    let version = wait_telling(api, tenant, name, version, |state| {
        terminal::tell(&bar, &format!("{name}: {state}"))
    })
    .await?;
    bar.finish_and_clear();
    Ok(version)
}

/// Waits until a version is compiled, and passes its state to `tell` several times a second.
pub async fn wait_telling(
    api: &Api,
    tenant: &str,
    name: &str,
    mut version: VersionBody,
    mut tell: impl FnMut(&str),
) -> Result<VersionBody> {
    let path =
        path(&["tenants", tenant, "handlers", &version.handler, "versions", &version.digest]);
    let mut offered: Option<Instant> = None;
    loop {
        match version.state.as_str() {
            "ready" => break,
            "failed" => {
                let reasons = version.problems.into_iter().map(|problem| problem.text).collect();
                return Err(Unfit::component(name, reasons).into());
            }
            state => tell(state),
        }
        if offered.is_none_or(|at| at.elapsed() >= OFFER) {
            api.compile(&version.digest);
            offered = Some(Instant::now());
        }
        tokio::time::sleep(POLL).await;
        version = api.get(&path).await?;
    }
    Ok(version)
}

/// Turns the API's problems with a component into an error that names its file.
fn unfit(name: &str, error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Refused>().map(Refused::problems) {
        Some(reasons) if !reasons.is_empty() => Unfit::component(name, reasons).into(),
        _ => error.context(format!("`{name}` was not uploaded")),
    }
}

/// Returns a body that moves a progress bar, which shows on a terminal only.
fn counted(bytes: Bytes, name: &str) -> Body {
    let bar = ProgressBar::with_draw_target(Some(bytes.len() as u64), ProgressDrawTarget::stderr());
    let style =
        ProgressStyle::with_template("{msg}: uploading {bar:30} {bytes}/{total_bytes}, {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    terminal::tell(&bar, name);
    let chunks = (0..bytes.len())
        .step_by(CHUNK)
        .map(move |start| bytes.slice(start..(start + CHUNK).min(bytes.len())));
    Body::from_stream(futures::stream::iter(chunks).map(move |chunk| {
        bar.inc(chunk.len() as u64);
        if bar.length().is_some_and(|length| bar.position() >= length) {
            bar.finish_and_clear();
        }
        Ok::<_, std::convert::Infallible>(chunk)
    }))
}

/// Returns a sign of life, which shows on a terminal only.
pub fn spinner() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(
        ProgressStyle::with_template("{spinner} {msg} {elapsed}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Shortens a digest for operators.
pub fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// Returns the version that the beginning of a digest names, once it is ready.
pub async fn find(api: &Api, tenant: &str, handler: &str, digest: &str) -> Result<VersionBody> {
    if digest.is_empty() {
        bail!("the version is empty; name one by the first digits of its digest");
    }
    let version =
        api.get(&path(&["tenants", tenant, "handlers", handler, "versions", digest])).await?;
    wait(api, tenant, digest, version).await
}
