//! SQL session of one run: its calls, its caps, its savepoints and its first failure.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use oncebox_model::{outcome::FailureKind, policy::Limits};

use super::stop::{SqlStop, limit};
use crate::bindings::oncebox::handler::sql::Error;

/// The SQL session of one run.
#[derive(Default)]
pub(crate) struct SqlSession {
    calls: u32,
    /// Hashes of the different texts, which may be large themselves.
    texts: HashSet<u64>,
    hasher: RandomState,
    /// Counter of calls, which orders failures and savepoints.
    moment: u64,
    /// First refusal, cap or unsupported value that was not rolled back.
    fault: Option<SqlFault>,
    /// Open savepoints, the outermost first.
    savepoints: Vec<OpenSavepoint>,
}

/// A failure that PostgreSQL does not know of. It fails the message even when the guest answers ok,
/// as a failed statement does.
#[derive(Debug, Clone)]
pub(crate) struct SqlFault {
    pub(crate) kind: FailureKind,
    pub(crate) text: String,
    moment: u64,
}

/// A savepoint that the guest can roll back to.
#[derive(Debug, Clone, Copy)]
struct OpenSavepoint {
    id: u64,
}

impl SqlSession {
    /// Counts a statement, and refuses it when a cap is reached.
    pub(crate) fn admit(&mut self, text: &str, limits: &Limits) -> Result<(), Error> {
        self.admit_call(limits)?;
        if text.len() > limits.statement_bytes_max {
            return Err(limit("statement_bytes_max", limits.statement_bytes_max));
        }
        self.texts.insert(self.hasher.hash_one(text));
        if self.texts.len() > limits.statement_texts_max {
            return Err(limit("statement_texts_max", limits.statement_texts_max));
        }
        Ok(())
    }

    /// Counts a call, of a statement or of a savepoint.
    pub(crate) fn admit_call(&mut self, limits: &Limits) -> Result<(), Error> {
        self.moment += 1;
        self.calls = self.calls.saturating_add(1);
        match self.calls > limits.statements_max {
            true => Err(limit("statements_max", limits.statements_max as usize)),
            false => Ok(()),
        }
    }

    /// Returns the moment of something that happens now and is no call of SQL. It lies after the
    /// opening of every open savepoint.
    pub(crate) fn next_moment(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Returns the answer for the guest. A lost connection ends the guest instead.
    pub(crate) fn answer<T>(
        &mut self,
        result: Result<T, SqlStop>,
    ) -> wasmtime::Result<Result<T, Error>> {
        match result {
            Ok(value) => Ok(Ok(value)),
            Err(SqlStop::Guest(error)) => {
                self.record(&error);
                Ok(Err(error))
            }
            Err(SqlStop::Host(lost)) => Err(lost.into()),
        }
    }

    /// Records the first fault. The transaction records PostgreSQL's own errors.
    fn record(&mut self, error: &Error) {
        let (kind, text) = match error {
            Error::Database(_) => return,
            Error::Refused(text) => (FailureKind::StatementRefused, text),
            Error::Limit(text) => (FailureKind::Limit, text),
            Error::Unsupported(text) => (FailureKind::Other, text),
        };
        self.fail(kind, text);
    }

    /// Records a fault, unless there is an earlier one.
    pub(crate) fn fail(&mut self, kind: FailureKind, text: &str) {
        self.fail_at(self.moment, kind, text);
    }

    /// Records a fault of a call that was made at a moment, unless there is an earlier one.
    pub(crate) fn fail_at(&mut self, moment: u64, kind: FailureKind, text: &str) {
        if self.fault.as_ref().is_none_or(|fault| fault.moment > moment) {
            self.fault = Some(SqlFault { kind, text: text.to_owned(), moment });
        }
    }

    /// Returns the moment of the last call.
    pub(crate) fn moment(&self) -> u64 {
        self.moment
    }

    pub(crate) fn fault(&self) -> Option<&SqlFault> {
        self.fault.as_ref()
    }

    /// Refuses a further savepoint when the cap is reached.
    pub(crate) fn may_open(&self, limits: &Limits) -> Result<(), Error> {
        match self.savepoints.len() >= limits.savepoints_max {
            true => Err(limit("savepoints_max", limits.savepoints_max)),
            false => Ok(()),
        }
    }

    /// Returns the id of the next savepoint: the moment at which it opens, which is unique.
    pub(crate) fn next_savepoint(&self) -> u64 {
        self.moment
    }

    pub(crate) fn opened(&mut self, id: u64) {
        self.savepoints.push(OpenSavepoint { id });
    }

    /// Returns whether the savepoint still exists. A savepoint ends with any that is older.
    pub(crate) fn is_open(&self, id: u64) -> bool {
        self.savepoints.iter().any(|open| open.id == id)
    }

    pub(crate) fn outermost(&self) -> Option<u64> {
        self.savepoints.first().map(|open| open.id)
    }

    /// Removes later savepoints, and the fault if it is younger than this one, which stays open.
    pub(crate) fn rolled_back(&mut self, id: u64) {
        self.savepoints.retain(|open| open.id <= id);
        self.fault.take_if(|fault| fault.moment > id);
    }

    /// Removes this savepoint and later ones.
    pub(crate) fn released(&mut self, id: u64) {
        self.savepoints.retain(|open| open.id < id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(session: &mut SqlSession) {
        session.admit_call(&Limits::default()).expect("below the cap");
        let answer = session.answer::<()>(Err(SqlStop::Guest(Error::Refused("x".to_owned()))));
        assert!(answer.expect("not the host's").is_err());
    }

    fn open(session: &mut SqlSession) -> u64 {
        session.admit_call(&Limits::default()).expect("below the cap");
        let id = session.next_savepoint();
        session.opened(id);
        id
    }

    #[test]
    fn rolling_back_forgives_what_came_after_the_savepoint_only() {
        let mut session = SqlSession::default();
        let savepoint = open(&mut session);
        fail(&mut session);
        session.rolled_back(savepoint);
        assert!(session.fault().is_none());
        fail(&mut session);
        let late = open(&mut session);
        session.rolled_back(late);
        assert!(session.fault().is_some());
    }

    #[test]
    fn savepoints_end_with_those_around_them() {
        let mut session = SqlSession::default();
        let (a, b, c) = (open(&mut session), open(&mut session), open(&mut session));
        session.rolled_back(b);
        assert_eq!([a, b, c].map(|id| session.is_open(id)), [true, true, false]);
        session.released(a);
        assert_eq!([a, b, c].map(|id| session.is_open(id)), [false, false, false]);
    }

    #[test]
    fn every_cap_names_its_setting() {
        let limits = Limits {
            statements_max: 3,
            statement_texts_max: 1,
            statement_bytes_max: 10,
            ..Limits::default()
        };
        let mut session = SqlSession::default();
        assert!(session.admit("select 1", &limits).is_ok());
        for (text, setting) in [
            ("select 2", "statement_texts_max"),
            ("select 12345", "statement_bytes_max"),
            ("select 1", "statements_max"),
        ] {
            match session.admit(text, &limits) {
                Err(Error::Limit(text)) => assert!(text.contains(setting), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
