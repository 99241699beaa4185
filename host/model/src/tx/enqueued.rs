//! Statements that are enqueued: sent with a later one, and answered in order.
//!
//! Each has an owner. The error of a statement of the host, such as BEGIN, condemns the session. The
//! error of a handler's statement is one of its run, whichever statement it is answered with.

use sqlx::{Execute, Postgres};

use super::{OpenStatement, Tx, TxState, bounded};
use crate::{hooks, sqlstate};

/// An enqueued statement, by its owner.
#[derive(Debug, Clone, Copy)]
pub(super) enum Enqueued {
    /// The host. Its error condemns the session.
    Host,
    /// A run of a handler.
    Run {
        /// Number of the run.
        run: u64,
        /// Rows that the statement must touch.
        rows: Option<u64>,
    },
}

/// Most statements that are enqueued at a time.
const ENQUEUED_MAX: usize = 64;
/// Most bytes of enqueued statements. The buffers of a socket take as much while the server is still
/// busy with what came before, so that sending them never waits for it.
pub const ENQUEUED_BYTES_MAX: usize = 32 << 10;
/// Bytes of an enqueued statement beside its parameters.
const ENQUEUED_OVERHEAD: usize = 128;

/// SQLSTATEs of a prepared statement that has to be prepared again.
const STALE: [&str; 3] = [
    sqlstate::FEATURE_NOT_SUPPORTED,
    sqlstate::UNDEFINED_PREPARED_STATEMENT,
    sqlstate::INTERNAL_ERROR,
];

impl Tx {
    /// Enqueues a statement of the host: it is sent with the next one, which answers its error. At
    /// the fail point `point` it is sent at once, so that a host that is killed there has sent it.
    ///
    /// # Errors
    ///
    /// Fails where the statement has to be prepared first, and cannot be.
    pub async fn enqueue<'q>(
        &self,
        query: impl Execute<'q, Postgres>,
        point: Option<&'static str>,
    ) -> Result<(), sqlx::Error> {
        let mut statement = self.open().await;
        let connection = statement.connection();
        let enqueued = bounded(async {
            connection.enqueue(query).await?;
            if point.is_some_and(hooks::is_armed) {
                connection.send_enqueued().await
            } else {
                Ok(())
            }
        });
        match enqueued.await {
            Ok(()) => statement.enqueued(Enqueued::Host, 0),
            Err(error) => {
                statement.finish(Some(&error));
                return Err(error);
            }
        }
        point.into_iter().for_each(hooks::point);
        Ok(())
    }

    /// Starts a statement of a handler that is to be enqueued; none where there is no room for it.
    /// `bytes` are those of its parameters. End it by [`OpenStatement::enqueued_by_run`].
    pub async fn enqueueable(&self, bytes: usize) -> Option<OpenStatement<'_>> {
        let state = self.state.lock().await;
        let is_room = state.enqueued.len() < ENQUEUED_MAX
            && state.enqueued_bytes + bytes <= ENQUEUED_BYTES_MAX;
        is_room.then(|| self.opened(state))
    }

    /// Waits for the answers to what is enqueued.
    ///
    /// # Errors
    ///
    /// Returns the first error among the answers.
    pub async fn wait_for_enqueued(&self) -> Result<(), sqlx::Error> {
        if self.state.lock().await.enqueued.is_empty() {
            return Ok(());
        }
        let mut statement = self.asking().await;
        let mut answer = statement.connection().wait_for_enqueued().await;
        if let Err(error) = &answer
            && let Err(lost) = statement.clear_if_stale(error).await
        {
            answer = Err(lost);
        }
        statement.finish(answer.as_ref().err());
        answer
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

/// Returns whether a prepared statement fails with this error for ever: its result or types have
/// changed, or PostgreSQL has deallocated it without the driver's knowledge.
pub(super) fn is_stale(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| STALE.contains(&&*code))
}

impl OpenStatement<'_> {
    /// Ends a statement of a run, which is enqueued. `rows` is the number of rows that it must touch.
    pub fn enqueued_by_run(self, rows: Option<u64>, bytes: usize) {
        let run = self.state.run;
        self.enqueued(Enqueued::Run { run, rows }, bytes);
    }

    /// Ends the wait for statements that the host has enqueued. Their error is the caller's, and
    /// leaves the connection sound.
    pub fn finish_enqueued(mut self, error: Option<&sqlx::Error>) {
        self.is_cleared = true; // an error of COMMIT is one of code that it runs
        self.state.connection.take_enqueued_answers();
        self.state.enqueued.clear();
        self.finish(error);
    }

    /// Ends a statement that is enqueued: the database was asked nothing.
    fn enqueued(mut self, by: Enqueued, bytes: usize) {
        self.state.in_flight = false;
        self.state.statements += 1;
        self.state.note_answers(); // those of earlier ones may have been read
        self.state.enqueued.push_back(by);
        self.state.enqueued_bytes += bytes + ENQUEUED_OVERHEAD;
    }
}

impl TxState {
    /// Notes the answers to enqueued statements that have been read. What is enqueued behind a
    /// statement that failed is refused, and says nothing about its session.
    pub(super) fn note_answers(&mut self) {
        self.connection.take_failed_enqueued();
        let mut is_aborted = self.error.is_some();
        for answer in self.connection.take_enqueued_answers() {
            let Some(enqueued) = self.enqueued.pop_front() else { continue };
            match enqueued {
                Enqueued::Host => self.broken |= answer.is_none() && !is_aborted,
                Enqueued::Run { run, .. } if run == self.run => self.answers.push(answer),
                Enqueued::Run { rows, .. } => {
                    self.earlier_failed |= answer.is_none() || rows.is_some() && rows != answer;
                }
            }
            is_aborted |= answer.is_none();
        }
        if self.enqueued.is_empty() {
            self.enqueued_bytes = 0;
        }
    }
}
