//! The cancels of a live run. Its candidate gets the same answers: what the live version cancelled
//! is committed by then, and the database would answer that there is nothing to cancel.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use oncebox_model::{
    outgoing::{CancelOutgoing, Outbox},
    tx::Tx,
};

/// A cancel of a run: its token, and whether there was anything to cancel.
pub(crate) type Cancel = (String, bool);

/// Cancels that several owners share.
type Shared = Arc<Mutex<Vec<Cancel>>>;

/// The cancels of a live run that is in the sample of a candidate; nothing for any other run.
#[derive(Debug, Default)]
pub(crate) struct CancelRecord(Option<Shared>);

impl CancelRecord {
    /// Takes the cancels so far, in order.
    pub(crate) fn taken(&self) -> Vec<Cancel> {
        self.0.as_ref().map(|cancels| std::mem::take(&mut *lock(cancels))).unwrap_or_default()
    }
}

/// Returns the outbox of a live run, whose cancels are recorded where the run is in the sample of a
/// candidate.
pub(crate) fn recorded(outbox: Outbox, is_sampled: bool) -> (Outbox, CancelRecord) {
    if !is_sampled || !outbox.may_emit {
        return (outbox, CancelRecord::default());
    }
    let cancels = Shared::default();
    let recording = Recording { inner: outbox.canceller.clone(), cancels: cancels.clone() };
    (Outbox { canceller: Arc::new(recording), ..outbox }, CancelRecord(Some(cancels)))
}

/// Returns the outbox of a candidate's run, which gets the answers of the live run's cancels. The
/// database answers what the live run did not ask.
pub(super) fn replayed(outbox: Outbox, cancels: &[Cancel]) -> Outbox {
    let left = Mutex::new(cancels.to_vec());
    let replaying = Replaying { inner: outbox.canceller.clone(), left };
    Outbox { canceller: Arc::new(replaying), ..outbox }
}

fn lock(cancels: &Mutex<Vec<Cancel>>) -> MutexGuard<'_, Vec<Cancel>> {
    cancels.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records cancels with their answers.
struct Recording {
    inner: Arc<dyn CancelOutgoing>,
    cancels: Shared,
}

impl CancelOutgoing for Recording {
    fn cancel<'a>(
        &'a self,
        tx: &'a Tx,
        token: &'a str,
    ) -> BoxFuture<'a, Result<bool, sqlx::Error>> {
        Box::pin(async move {
            let is_cancelled = self.inner.cancel(tx, token).await?;
            lock(&self.cancels).push((token.to_owned(), is_cancelled));
            Ok(is_cancelled)
        })
    }
}

/// Repeats recorded answers, each once.
struct Replaying {
    inner: Arc<dyn CancelOutgoing>,
    left: Mutex<Vec<Cancel>>,
}

impl Replaying {
    /// Takes the next recorded answer for a token; none where none is left.
    fn next(&self, token: &str) -> Option<bool> {
        let mut left = lock(&self.left);
        let index = left.iter().position(|(known, _)| known == token)?;
        Some(left.remove(index).1)
    }
}

impl CancelOutgoing for Replaying {
    fn cancel<'a>(
        &'a self,
        tx: &'a Tx,
        token: &'a str,
    ) -> BoxFuture<'a, Result<bool, sqlx::Error>> {
        Box::pin(async move {
            match self.next(token) {
                Some(is_cancelled) => Ok(is_cancelled),
                None => self.inner.cancel(tx, token).await,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use oncebox_model::outgoing::CancelNothing;

    use super::*;

    // What could go wrong: the candidate is told another answer than the live version was, so that
    // equal versions differ.
    #[test]
    fn each_answer_is_repeated_once_and_in_order() {
        let cancels = [("a", true), ("b", false), ("a", false)];
        let left = cancels.map(|(token, answer)| (token.to_owned(), answer)).to_vec();
        let replaying = Replaying { inner: Arc::new(CancelNothing), left: Mutex::new(left) };
        let tokens = ["b", "a", "a", "a", "c"];
        let expected = [Some(false), Some(true), Some(false), None, None];
        assert_eq!(tokens.map(|token| replaying.next(token)), expected);
    }

    #[test]
    fn only_a_sampled_run_is_recorded() {
        let outbox = || Outbox { may_emit: true, ..Outbox::closed() };
        assert!(recorded(outbox(), false).1.0.is_none());
        assert!(recorded(Outbox::closed(), true).1.0.is_none());
        let (_, record) = recorded(outbox(), true);
        let cancels = record.0.as_ref().expect("a record");
        lock(cancels).push(("a".to_owned(), true));
        assert_eq!(record.taken(), [("a".to_owned(), true)]);
        assert!(record.taken().is_empty());
    }
}
