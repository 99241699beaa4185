//! The compilation of one component: from its row to a component that has started once.

use std::time::{Duration, Instant};

use oncebox_control::{Begun, CompilationClaim, Compiled};
use oncebox_model::InboxError;
use oncebox_runtime::{LoadError, LoadedComponent, Problem};
use tokio::time::sleep;

use super::pool::Inner;

/// Pause between two heartbeats of a compilation.
const BEAT: Duration = Duration::from_secs(5);

/// The reason that a job produced no component.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileFailure {
    /// Defects of the component; a retry cannot help.
    #[error("{}", .0.iter().map(|problem| problem.text.as_str()).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Problem>),
    /// A compilation on another host.
    #[error("another host compiles it")]
    Elsewhere,
    /// An earlier compilation; an upload needs no more than that.
    #[error("it was compiled before")]
    Done,
    /// A failure of this host; a later try may succeed.
    #[error("{0}")]
    Host(String),
}

impl From<InboxError> for CompileFailure {
    fn from(error: InboxError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<LoadError> for CompileFailure {
    fn from(error: LoadError) -> Self {
        error
            .problem()
            .map_or_else(|| Self::Host(error.to_string()), |problem| Self::Refused(vec![problem]))
    }
}

impl Inner {
    pub(super) async fn run(
        &self,
        digest: &[u8],
        is_urgent: bool,
    ) -> Result<LoadedComponent, CompileFailure> {
        let host_id = self.host_id.get().copied();
        match self.control.versions().begin_compiling(digest, host_id).await? {
            Begun::Yours(claim) => self.compile(digest, host_id, claim).await,
            // The row is not this host's to change, but a deployment needs the code here too.
            Begun::Ready | Begun::Elsewhere if is_urgent => self.load(digest).await,
            Begun::Ready => Err(CompileFailure::Done),
            Begun::Elsewhere => Err(CompileFailure::Elsewhere),
            Begun::Failed(problems) => Err(CompileFailure::Refused(problems)),
        }
    }

    /// Compiles a component and writes the result into its row.
    async fn compile(
        &self,
        digest: &[u8],
        host_id: Option<i64>,
        mut claim: CompilationClaim,
    ) -> Result<LoadedComponent, CompileFailure> {
        let start = Instant::now();
        let outcome = tokio::select! {
            outcome = self.load(digest) => outcome,
            () = self.stop.cancelled() => Err(CompileFailure::Host("the host ends".to_owned())),
            never = self.beat(digest, host_id, &mut claim) => match never {},
        };
        let compile_ms = start.elapsed().as_millis() as i64;
        let ended = match &outcome {
            Ok(_) => Compiled::Ready { compile_ms },
            Err(CompileFailure::Refused(problems)) => Compiled::Failed(problems.clone()),
            Err(_) => Compiled::GivenBack,
        };
        // A result that cannot be written now is lost; another host takes the row over when the
        // claim's session has ended.
        let written = self.control.versions().end_compiling(digest, host_id, &ended).await;
        drop(claim);
        let digest = hex::encode(&digest[..digest.len().min(6)]);
        match (&outcome, written) {
            (_, Err(error)) => {
                tracing::warn!(%error, digest, "failed to write how a compilation ended")
            }
            (Ok(_), _) => tracing::info!(digest, compile_ms, "component ready"),
            (Err(CompileFailure::Host(error)), _) => tracing::warn!(
                error,
                digest,
                "a component could not be compiled now and is queued again"
            ),
            (Err(failure), _) => tracing::info!(%failure, digest, "component refused"),
        }
        outcome
    }

    async fn load(&self, digest: &[u8]) -> Result<LoadedComponent, CompileFailure> {
        let bytes = self.control.versions().component(digest).await?;
        let component = self.runtime.load(&bytes).await?;
        drop(bytes);
        match self.runtime.probe(&component).await {
            Ok(()) => Ok(component),
            Err(problem) => Err(CompileFailure::Refused(vec![problem])),
        }
    }

    async fn beat(
        &self,
        digest: &[u8],
        host_id: Option<i64>,
        claim: &mut CompilationClaim,
    ) -> std::convert::Infallible {
        loop {
            sleep(BEAT).await;
            // A heartbeat that fails is sent again the next time.
            let _ = self.control.versions().compiling_goes_on(digest, host_id, claim).await;
        }
    }
}
