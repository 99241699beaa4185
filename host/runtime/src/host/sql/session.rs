//! What one run has sent so far, and what went wrong in it.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use oncebox_model::{outcome::FailureKind, policy::Limits};

use super::{Error, Stopped};

/// The SQL of one run.
#[derive(Default)]
pub(crate) struct Session {
    calls: u32,
    /// Hashes of the different texts; the texts themselves may be large.
    texts: HashSet<u64>,
    hasher: RandomState,
    /// Counts what happens, to tell what came before a savepoint from what came after.
    moment: u64,
    /// The first refusal, cap or unsupported value that was not rolled back.
    fault: Option<Fault>,
    savepoints: Vec<Open>,
}

/// A failure that PostgreSQL does not know of. It fails the message even when the guest
/// answers ok, as a failed statement would.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) kind: FailureKind,
    pub(crate) text: String,
    moment: u64,
}

/// A savepoint that can be returned to.
#[derive(Debug, Clone, Copy)]
struct Open {
    id: u64,
}

impl Session {
    /// Count a statement; refuse it when a cap is reached.
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

    /// Count a call, be it a statement or a savepoint's.
    pub(crate) fn admit_call(&mut self, limits: &Limits) -> Result<(), Error> {
        self.moment += 1;
        self.calls = self.calls.saturating_add(1);
        match self.calls > limits.statements_max {
            true => Err(limit("statements_max", limits.statements_max as usize)),
            false => Ok(()),
        }
    }

    /// What the guest is answered; a lost connection ends it instead.
    pub(crate) fn answer<T>(
        &mut self,
        result: Result<T, Stopped>,
    ) -> wasmtime::Result<Result<T, Error>> {
        match result {
            Ok(value) => Ok(Ok(value)),
            Err(Stopped::Guest(error)) => {
                self.record(&error);
                Ok(Err(error))
            }
            Err(Stopped::Host(lost)) => Err(lost.into()),
        }
    }

    /// Remember the first fault. PostgreSQL's own errors are remembered by the transaction.
    fn record(&mut self, error: &Error) {
        let (kind, text) = match error {
            Error::Database(_) => return,
            Error::Refused(text) => (FailureKind::StatementRefused, text),
            Error::Limit(text) => (FailureKind::Limit, text),
            Error::Unsupported(text) => (FailureKind::Other, text),
        };
        let moment = self.moment;
        self.fault.get_or_insert_with(|| Fault { kind, text: text.clone(), moment });
    }

    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    /// Whether one more savepoint may be open.
    pub(crate) fn may_open(&self, limits: &Limits) -> Result<(), Error> {
        match self.savepoints.len() >= limits.savepoints_max {
            true => Err(limit("savepoints_max", limits.savepoints_max)),
            false => Ok(()),
        }
    }

    /// The next savepoint's id: the moment it is opened at, which no other has.
    pub(crate) fn next_savepoint(&self) -> u64 {
        self.moment
    }

    pub(crate) fn opened(&mut self, id: u64) {
        self.savepoints.push(Open { id });
    }

    /// Whether the savepoint still exists; one ends with any that was opened before it.
    pub(crate) fn is_open(&self, id: u64) -> bool {
        self.savepoints.iter().any(|open| open.id == id)
    }

    pub(crate) fn outermost(&self) -> Option<u64> {
        self.savepoints.first().map(|open| open.id)
    }

    /// Later savepoints are gone and what failed since is forgiven; this one stays.
    pub(crate) fn rolled_back(&mut self, id: u64) {
        self.savepoints.retain(|open| open.id <= id);
        self.fault.take_if(|fault| fault.moment > id);
    }

    /// This savepoint and later ones are gone.
    pub(crate) fn released(&mut self, id: u64) {
        self.savepoints.retain(|open| open.id < id);
    }
}

/// The error for a cap, which names it as the policy does.
pub(super) fn limit(name: &str, max: usize) -> Error {
    Error::Limit(format!("the limit of {max} (`{name}`) is reached"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(session: &mut Session) {
        session.admit_call(&Limits::default()).expect("below the cap");
        let answer = session.answer::<()>(Err(Stopped::Guest(Error::Refused("x".to_owned()))));
        assert!(answer.expect("not the host's").is_err());
    }

    fn open(session: &mut Session) -> u64 {
        session.admit_call(&Limits::default()).expect("below the cap");
        let id = session.next_savepoint();
        session.opened(id);
        id
    }

    #[test]
    fn rolling_back_forgives_what_came_after_the_savepoint_only() {
        let mut session = Session::default();
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
        let mut session = Session::default();
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
        let mut session = Session::default();
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
