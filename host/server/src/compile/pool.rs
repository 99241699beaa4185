//! The queue of components that wait to be compiled, and the workers that compile them.
//!
//! An upload, a deployment and a switch that need one component share one job: nothing is compiled
//! twice at a time. The component's row holds the state of the job, for other hosts and for
//! operators.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use anyhow::Result;
use oncebox_control::Control;
use oncebox_runtime::{Inspected, LoadedComponent, Problem, WasmRuntime};
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{cache::Kept, job::CompileFailure};

/// Most uploads that wait for a worker in memory. More wait in their rows.
const WAITING_MAX: usize = 256;
/// Uploads that are checked at a time. Each may take a second, and its size in memory.
const CHECKS_MAX: usize = 2;
/// Longest wait of an upload for its check.
const CHECK_WAIT: Duration = Duration::from_secs(30);
/// Pause between two searches for rows that other hosts left unfinished.
const SWEEP: Duration = Duration::from_secs(5);

/// The components of one host. Clones share them.
#[derive(Clone)]
pub struct Compilations {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) control: Control,
    pub(super) runtime: WasmRuntime,
    workers_max: usize,
    /// Id of the host's row, once it has one.
    pub(super) host_id: OnceLock<i64>,
    checks: Semaphore,
    pub(super) stop: CancellationToken,
    state: Mutex<Queue>,
}

/// SHA-256 of a component.
pub(super) type Digest = Vec<u8>;
/// The result of a job; none while it waits or runs.
type Outcome = Option<Result<LoadedComponent, CompileFailure>>;

#[derive(Default)]
struct Queue {
    jobs: HashMap<Digest, CompileJob>,
    /// Jobs that a deployment waits for; they run first.
    urgent: VecDeque<Digest>,
    uploads: VecDeque<Digest>,
    workers: usize,
    kept: Kept,
}

struct CompileJob {
    is_urgent: bool,
    is_running: bool,
    done: watch::Sender<Outcome>,
}

/// The error of a full queue: no worker is free, and too many components wait already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many components wait to be checked or compiled; try again in a minute")]
pub struct Busy;

impl Compilations {
    /// Creates the components of a host, with at least one worker. Nothing runs until a component
    /// is submitted or loaded.
    pub fn new(control: Control, runtime: WasmRuntime, workers_max: usize) -> Self {
        let inner = Inner {
            control,
            runtime,
            workers_max: workers_max.max(1),
            host_id: OnceLock::new(),
            checks: Semaphore::new(CHECKS_MAX),
            stop: CancellationToken::new(),
            state: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Sets the host's row, which rows of components name as the one that compiles.
    pub fn on_host(&self, host_id: i64) {
        let _ = self.inner.host_id.set(host_id); // a process is one host
    }

    /// Returns the runtime that runs the components.
    pub fn runtime(&self) -> &WasmRuntime {
        &self.inner.runtime
    }

    /// Checks an upload, off the threads that serve requests.
    ///
    /// # Errors
    /// [`Busy`] where no check was free for 30 s. The inner error lists what is wrong with the
    /// component.
    pub async fn check(&self, bytes: Vec<u8>) -> Result<Result<Inspected, Vec<Problem>>, Busy> {
        let _turn = timeout(CHECK_WAIT, self.inner.checks.acquire())
            .await
            .map_err(|_| Busy)?
            .map_err(|_| Busy)?;
        let allowance = self.inner.runtime.allowance();
        let checked =
            tokio::task::spawn_blocking(move || oncebox_runtime::inspect(&bytes, &allowance)).await;
        Ok(checked.unwrap_or_else(|_| {
            let text = "this component cannot be read: looking at it ended in an error of the \
                host; please report it";
            Err(vec![Problem::new("invalid_wasm", text)])
        }))
    }

    /// Queues an upload for compilation; its row holds the state.
    ///
    /// # Errors
    /// [`Busy`] where too many wait. The upload stays queued in its row, where [`Self::run`] finds
    /// it later.
    pub fn submit(&self, digest: &[u8]) -> Result<(), Busy> {
        let mut state = self.inner.state();
        if state.jobs.contains_key(digest) {
            return Ok(());
        }
        if state.uploads.len() >= WAITING_MAX {
            return Err(Busy);
        }
        state.ask(digest, false);
        self.work(&mut state);
        Ok(())
    }

    /// Returns a component that a deployment needs: kept in memory, from the cache, or compiled
    /// before any upload.
    ///
    /// # Errors
    /// The component does not fit, or this host could not compile it now.
    pub async fn loaded(&self, digest: &[u8]) -> Result<LoadedComponent> {
        if let Some(component) = self.inner.state().kept.get(digest) {
            return Ok(component);
        }
        if let Some(component) = self.inner.look_into_cache(digest).await? {
            return Ok(component);
        }
        loop {
            let mut done = {
                let mut state = self.inner.state();
                // A job may have ended since the first look.
                if let Some(component) = state.kept.get(digest) {
                    return Ok(component);
                }
                let done = state.ask(digest, true);
                self.work(&mut state);
                done
            };
            match done.wait_for(Option::is_some).await.map(|outcome| outcome.clone()) {
                Ok(Some(Ok(component))) => return Ok(component),
                // An upload's job left the component to another host; this host needs it as well.
                Ok(Some(Err(CompileFailure::Elsewhere | CompileFailure::Done))) => {}
                Ok(Some(Err(failure))) => return Err(failure.into()),
                Ok(None) | Err(_) => {
                    return Err(CompileFailure::Host("compiling was interrupted".to_owned()).into());
                }
            }
        }
    }

    /// Takes over jobs that other hosts left unfinished and forgets components that are not needed,
    /// until told to stop. It then returns running compilations to the queue.
    pub async fn run(&self, stop: CancellationToken) {
        while timeout(SWEEP, stop.cancelled()).await.is_err() {
            if let Err(error) = self.sweep().await {
                tracing::warn!(%error, "failed to look for components that wait to be compiled");
            }
        }
        self.inner.stop.cancel();
        while self.inner.state().workers > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn sweep(&self) -> Result<()> {
        for digest in
            self.inner.control.versions().unfinished_components(WAITING_MAX as i64).await?
        {
            if self.submit(&digest).is_err() {
                break;
            }
        }
        let warm = self.inner.control.versions().warm_components().await?;
        self.inner.state().kept.let_go(&warm);
        Ok(())
    }

    /// Starts one more worker, if a job waits and the limit allows it.
    fn work(&self, state: &mut Queue) {
        let waiting = state.urgent.len() + state.uploads.len();
        if state.workers < self.inner.workers_max && waiting > 0 {
            state.workers += 1;
            tokio::spawn(self.inner.clone().work());
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look_into_cache(&self, digest: &[u8]) -> Result<Option<LoadedComponent>> {
        let bytes = self.control.versions().component(digest).await?;
        // An error is dropped here: the job reports it in better words.
        let found = self.runtime.load_cached(&bytes).await.ok().flatten();
        if let Some(component) = &found {
            self.state().kept.put(digest, component);
        }
        Ok(found)
    }

    /// Runs one job after the other until none is left.
    async fn work(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state();
                match state.next() {
                    Some(next) if !self.stop.is_cancelled() => next,
                    _ => {
                        state.workers -= 1;
                        return;
                    }
                }
            };
            let (digest, is_urgent) = next;
            // A task of its own: a panic in it ends the job and not the worker.
            let job = tokio::spawn({
                let (inner, digest) = (self.clone(), digest.clone());
                async move { inner.run(&digest, is_urgent).await }
            });
            let outcome = job.await.unwrap_or_else(|_| {
                Err(CompileFailure::Host("compiling was interrupted".to_owned()))
            });
            self.state().end(&digest, outcome);
        }
    }
}

impl Queue {
    /// Subscribes to the job of a component, and queues one unless there is one. An urgent request
    /// moves a waiting upload's job to the urgent queue.
    fn ask(&mut self, digest: &[u8], is_urgent: bool) -> watch::Receiver<Outcome> {
        let job = self.jobs.entry(digest.to_vec()).or_insert_with(|| {
            let queue = if is_urgent { &mut self.urgent } else { &mut self.uploads };
            queue.push_back(digest.to_vec());
            CompileJob { is_urgent, is_running: false, done: watch::Sender::new(None) }
        });
        if is_urgent && !job.is_urgent {
            job.is_urgent = true;
            if !job.is_running {
                self.uploads.retain(|waiting| waiting != digest);
                self.urgent.push_back(digest.to_vec());
            }
        }
        job.done.subscribe()
    }

    fn next(&mut self) -> Option<(Digest, bool)> {
        let digest = self.urgent.pop_front().or_else(|| self.uploads.pop_front())?;
        let job = self.jobs.get_mut(&digest)?;
        job.is_running = true;
        Some((digest, job.is_urgent))
    }

    fn end(&mut self, digest: &[u8], outcome: Result<LoadedComponent, CompileFailure>) {
        if let Ok(component) = &outcome {
            self.kept.put(digest, component);
        }
        if let Some(job) = self.jobs.remove(digest) {
            job.done.send_replace(Some(outcome));
        }
    }
}
