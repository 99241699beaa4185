//! One run of a handler: its connection, and what went wrong in it.

use std::{cell::RefCell, collections::BTreeMap};

use postgres::Client;

#[cfg(feature = "emit")]
use super::outgoing::Outbox;
use super::{Delivery, End, Outcome, engine};
use crate::{Failure, Row, SqlError, Value, log::Level};

thread_local! {
    /// The run of the handler that this thread is in.
    static CURRENT: RefCell<Option<Run>> = const { RefCell::new(None) };
}

/// What a handler reaches while it runs.
pub(super) struct Run {
    pub(super) client: Client,
    pub(super) settings: BTreeMap<String, String>,
    pub(super) delivery: Delivery,
    pub(super) lines: Vec<(Level, String)>,
    pub(super) faults: Vec<Fault>,
    #[cfg(feature = "emit")]
    pub(super) outbox: Outbox,
    /// The error of an enqueued statement that no later call has answered yet.
    enqueued: Option<SqlError>,
    /// Savepoints that can be returned to, by the moment each was opened at.
    savepoints: Vec<u64>,
    /// Counts what happens, to tell what came before a savepoint from what came after.
    moment: u64,
}

/// Something that was not rolled back and fails the message.
pub(super) struct Fault {
    pub(super) cause: Cause,
    moment: u64,
}

/// What a fault is.
pub(super) enum Cause {
    /// The error of a statement.
    Sql(SqlError),
    /// What an enqueued statement said that the message ends with.
    Expected(Failure),
}

impl Run {
    pub(super) fn new(
        client: Client,
        settings: BTreeMap<String, String>,
        delivery: Delivery,
    ) -> Self {
        let (lines, faults, savepoints) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            client,
            settings,
            delivery,
            lines,
            faults,
            #[cfg(feature = "emit")]
            outbox: Outbox::default(),
            enqueued: None,
            savepoints,
            moment: 0,
        }
    }

    /// Does one thing, and remembers when it failed.
    pub(super) fn attempt<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.moment += 1;
        let result = work(self);
        if let Err(error) = &result {
            self.faults.push(Fault {
                cause: Cause::Sql(error.clone()),
                moment: self.moment,
            });
        }
        result
    }

    /// Runs a statement.
    pub(super) fn execute(&mut self, statement: &str, params: &[Value]) -> Result<u64, SqlError> {
        self.answer_enqueued()?;
        engine::execute(&mut self.client, statement, params)
    }

    /// Runs a query.
    pub(super) fn query(
        &mut self,
        statement: &str,
        params: &[Value],
    ) -> Result<Vec<Row>, SqlError> {
        self.answer_enqueued()?;
        engine::query(&mut self.client, statement, params)
    }

    /// Runs a statement whose error is answered by the next call. One that touches another number of
    /// rows than expected fails the message.
    pub(super) fn enqueue(
        &mut self,
        statement: &str,
        params: &[Value],
        expected: Option<(u64, Failure)>,
    ) -> Result<(), SqlError> {
        let cause = match self.execute(statement, params) {
            Ok(touched) => match expected {
                Some((rows, otherwise)) if rows != touched => Cause::Expected(otherwise),
                _ => return Ok(()),
            },
            Err(error @ SqlError::Database(_)) => {
                self.enqueued = Some(error.clone());
                Cause::Sql(error)
            }
            Err(error) => return Err(error),
        };
        let moment = self.moment;
        self.faults.push(Fault { cause, moment });
        Ok(())
    }

    /// Answers the error of an enqueued statement, once.
    fn answer_enqueued(&mut self) -> Result<(), SqlError> {
        self.enqueued.take().map_or(Ok(()), Err)
    }

    pub(super) fn open_savepoint(&mut self) -> Result<u64, SqlError> {
        self.answer_enqueued()?;
        let id = self.moment;
        engine::control(&mut self.client, &format!("SAVEPOINT guest_{id}"))?;
        self.savepoints.push(id);
        Ok(id)
    }

    /// Later savepoints are gone and what failed since is forgiven; this one stays.
    pub(super) fn roll_back_to(&mut self, id: u64) -> Result<(), SqlError> {
        self.check_savepoint(id)?;
        self.enqueued = None;
        engine::control(
            &mut self.client,
            &format!("ROLLBACK TO SAVEPOINT guest_{id}"),
        )?;
        self.savepoints.retain(|open| *open <= id);
        self.faults.retain(|fault| fault.moment <= id);
        #[cfg(feature = "emit")]
        self.outbox.undo_since(id);
        Ok(())
    }

    /// Keeps a message that is sent when the run is committed.
    #[cfg(feature = "emit")]
    pub(super) fn emit(&mut self, outgoing: crate::emit::Outgoing) -> Result<String, SqlError> {
        self.outbox.emit(outgoing, self.moment)
    }

    /// Withdraws messages by their token.
    #[cfg(feature = "emit")]
    pub(super) fn cancel(&mut self, token: &str) -> Result<bool, SqlError> {
        self.outbox.cancel(token, self.moment)
    }

    /// This savepoint and later ones are gone.
    pub(super) fn release(&mut self, id: u64) -> Result<(), SqlError> {
        self.check_savepoint(id)?;
        self.answer_enqueued()?;
        engine::control(&mut self.client, &format!("RELEASE SAVEPOINT guest_{id}"))?;
        self.savepoints.retain(|open| *open < id);
        Ok(())
    }

    fn check_savepoint(&self, id: u64) -> Result<(), SqlError> {
        match self.savepoints.contains(&id) {
            true => Ok(()),
            false => Err(SqlError::Refused(
                "this savepoint is gone: it was released, or an earlier one was released or rolled back".to_owned(),
            )),
        }
    }

    /// Commits or rolls back; answers what a deferred constraint said, if one failed.
    pub(super) fn end(&mut self, end: End) -> Option<Outcome> {
        let deferred = engine::control(&mut self.client, "SET CONSTRAINTS ALL IMMEDIATE");
        let is_kept = end == End::Commit && deferred.is_ok();
        let ended = engine::control(
            &mut self.client,
            if is_kept { "COMMIT" } else { "ROLLBACK" },
        );
        #[cfg(feature = "emit")]
        self.outbox.end(is_kept && ended.is_ok());
        let error = deferred.and(ended).err()?;
        Some(Outcome::failed(&error, ""))
    }
}

/// Calls a handler with this run as the thread's own, and hands the run back. When the handler
/// panics, the run is dropped, and its transaction with the connection.
pub(super) fn enter<T>(run: Run, call: impl FnOnce() -> T) -> (T, Run) {
    struct Leave;

    impl Drop for Leave {
        fn drop(&mut self) {
            CURRENT.take();
        }
    }

    let outer = CURRENT.replace(Some(run));
    assert!(outer.is_none(), "a handler runs already on this thread");
    let leave = Leave;
    let value = call();
    let run = CURRENT.take().expect("nothing but `Leave` takes it");
    drop(leave);
    (value, run)
}

/// The thread's run; none outside of a handler.
pub(super) fn with<T>(work: impl FnOnce(&mut Run) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|run| run.as_mut().map(work))
}
