//! A host's components: checked, compiled by a few workers, kept while they are of use.
//!
//! Whoever asks for a component, an upload, a deployment or a switch, asks for the same job:
//! nothing is compiled twice at a time. How far it is stands in its row, where other hosts and
//! people see it.

mod job;
mod kept;

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use anyhow::Result;
use oncebox_control::Admin;
use oncebox_runtime::{Inspected, LoadedComponent, Problem, Runtime};
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

pub use job::Failure;
use kept::Kept;

/// Uploads that wait for a worker. More wait in their rows.
const WAITING_MAX: usize = 256;
/// Uploads that are looked at at the same time; each may take a second and its size in memory.
const CHECKS_MAX: usize = 2;
/// How long an upload waits to be looked at.
const CHECK_WAIT: Duration = Duration::from_secs(30);
/// How often rows are looked at for what others left behind.
const SWEEP: Duration = Duration::from_secs(5);

/// The components of one host. Clones share them.
#[derive(Clone)]
pub struct Compilations {
    inner: Arc<Inner>,
}

struct Inner {
    admin: Admin,
    runtime: Runtime,
    workers_max: usize,
    /// The host's row, once it has one.
    host_id: OnceLock<i64>,
    checks: Semaphore,
    stop: CancellationToken,
    state: Mutex<State>,
}

/// SHA-256 of a component.
type Digest = Vec<u8>;
/// What became of a job; none while it waits or runs.
type Outcome = Option<Result<LoadedComponent, Failure>>;

#[derive(Default)]
struct State {
    jobs: HashMap<Digest, Job>,
    /// Jobs that a deployment waits for come first.
    urgent: VecDeque<Digest>,
    uploads: VecDeque<Digest>,
    workers: usize,
    kept: Kept,
}

struct Job {
    is_urgent: bool,
    is_running: bool,
    done: watch::Sender<Outcome>,
}

/// No worker is free and too much waits already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many components wait to be checked or compiled; try again in a minute")]
pub struct Busy;

impl Compilations {
    /// Nothing runs until something is asked for.
    pub fn new(admin: Admin, runtime: Runtime, workers_max: usize) -> Self {
        let inner = Inner {
            admin,
            runtime,
            workers_max: workers_max.max(1),
            host_id: OnceLock::new(),
            checks: Semaphore::new(CHECKS_MAX),
            stop: CancellationToken::new(),
            state: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// From now on rows name this host as the one that compiles.
    pub fn on_host(&self, host_id: i64) {
        let _ = self.inner.host_id.set(host_id); // a process is one host
    }

    /// What runs the components.
    pub fn runtime(&self) -> &Runtime {
        &self.inner.runtime
    }

    /// Look at an upload, off the threads that serve requests.
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

    /// Compile an upload when its turn comes; its row says how far it is. Busy leaves it queued in
    /// its row, where it is found later.
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

    /// A component that a deployment needs: kept, from the cache, or compiled before any upload.
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
                let done = state.ask(digest, true);
                self.work(&mut state);
                done
            };
            match done.wait_for(Option::is_some).await.map(|outcome| outcome.clone()) {
                Ok(Some(Ok(component))) => return Ok(component),
                // An upload's job left it to another host; this host needs it as well.
                Ok(Some(Err(Failure::Elsewhere | Failure::Done))) => {}
                Ok(Some(Err(failure))) => return Err(failure.into()),
                Ok(None) | Err(_) => {
                    return Err(Failure::Host("compiling was interrupted".to_owned()).into());
                }
            }
        }
    }

    /// Take over what other hosts left behind and let go what nobody needs, until told to stop.
    /// Then what is being compiled is given back.
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
        for digest in self.inner.admin.unfinished_components(WAITING_MAX as i64).await? {
            if self.submit(&digest).is_err() {
                break;
            }
        }
        let warm = self.inner.admin.warm_components().await?;
        self.inner.state().kept.let_go(&warm);
        Ok(())
    }

    /// One more worker, if there is work for it.
    fn work(&self, state: &mut State) {
        let waiting = state.urgent.len() + state.uploads.len();
        if state.workers < self.inner.workers_max && waiting > 0 {
            state.workers += 1;
            tokio::spawn(self.inner.clone().work());
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look_into_cache(&self, digest: &[u8]) -> Result<Option<LoadedComponent>> {
        let bytes = self.admin.component(digest).await?;
        // Whatever is wrong with it, the job says in better words.
        let found = self.runtime.load_cached(&bytes).await.ok().flatten();
        if let Some(component) = &found {
            self.state().kept.put(digest, component);
        }
        Ok(found)
    }

    /// One job after the other until none is left.
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
            // A task of its own: what panics in it ends the job and not the worker.
            let job = tokio::spawn({
                let (inner, digest) = (self.clone(), digest.clone());
                async move { inner.run(&digest, is_urgent).await }
            });
            let outcome = job
                .await
                .unwrap_or_else(|_| Err(Failure::Host("compiling was interrupted".to_owned())));
            self.state().end(&digest, outcome);
        }
    }
}

impl State {
    /// The job of a component; a new one, unless there is one.
    fn ask(&mut self, digest: &[u8], is_urgent: bool) -> watch::Receiver<Outcome> {
        let job = self.jobs.entry(digest.to_vec()).or_insert_with(|| {
            let queue = if is_urgent { &mut self.urgent } else { &mut self.uploads };
            queue.push_back(digest.to_vec());
            Job { is_urgent, is_running: false, done: watch::Sender::new(None) }
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

    fn end(&mut self, digest: &[u8], outcome: Result<LoadedComponent, Failure>) {
        if let Ok(component) = &outcome {
            self.kept.put(digest, component);
        }
        if let Some(job) = self.jobs.remove(digest) {
            job.done.send_replace(Some(outcome));
        }
    }
}
