//! The enqueued statements of a handler, whose answers come in order with a later statement's.

use super::{Enqueued, OpenStatement, Tx};

/// Most statements that are enqueued at a time.
const ENQUEUED_MAX: usize = 64;
/// Most bytes of enqueued statements. The buffers of a socket take as much while the server is still
/// busy with what came before, so that sending them never waits for it.
pub const ENQUEUED_BYTES_MAX: usize = 32 << 10;

impl Tx {
    /// Starts a statement of a handler that is to be enqueued; none where there is no room for it.
    /// `bytes` are those of its parameters. End it by [`OpenStatement::enqueued_by_run`].
    pub async fn enqueueable(&self, bytes: usize) -> Option<OpenStatement<'_>> {
        let state = self.state.lock().await;
        let is_room = state.enqueued.len() < ENQUEUED_MAX
            && state.enqueued_bytes + bytes <= ENQUEUED_BYTES_MAX;
        is_room.then(|| self.opened(state))
    }

    /// Takes the answers to the enqueued statements of the run under way, in order: the rows that
    /// each touched, none for one that failed.
    pub async fn take_answers(&self) -> Vec<Option<u64>> {
        std::mem::take(&mut self.state.lock().await.answers)
    }

    /// Returns whether an enqueued statement of an earlier run has failed.
    pub async fn has_earlier_failed(&self) -> bool {
        self.state.lock().await.earlier_failed
    }

    /// Returns whether an enqueued statement of an earlier run has no answer yet.
    pub async fn awaits_earlier(&self) -> bool {
        let state = self.state.lock().await;
        let is_earlier =
            |it: &Enqueued| matches!(it, Enqueued::Run { run, .. } if *run < state.run);
        state.enqueued.iter().any(is_earlier)
    }

    /// Condemns the connection where a handler's statements are enqueued that nobody waits for any
    /// more: a rollback would send them, and wait for them.
    pub async fn abandon_enqueued(&self) {
        let mut state = self.state.lock().await;
        state.in_flight |= state.enqueued.iter().any(|it| matches!(it, Enqueued::Run { .. }));
    }
}

impl OpenStatement<'_> {
    /// Ends a statement of a run, which is enqueued. `rows` is the number of rows that it must touch.
    pub fn enqueued_by_run(self, rows: Option<u64>, bytes: usize) {
        let run = self.state.run;
        self.enqueued(Enqueued::Run { run, rows }, bytes);
    }
}
