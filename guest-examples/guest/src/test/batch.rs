//! Batches, by the host's rules.

use serde::de::DeserializeOwned;

use super::{Database, End, Outcome, session};
use crate::{BatchHandler, Message, batch::handle_batch};

impl Database {
    /// Runs a handler of batches, by the host's rules: when messages fail, what the call wrote
    /// is undone and the others are handled again without them; when a statement failed, each
    /// message is handled in a call of its own. One outcome for each message.
    pub fn run_batch<T: DeserializeOwned>(
        &mut self,
        handler: impl BatchHandler<T>,
        messages: &[Message],
    ) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = messages.iter().map(|_| None).collect();
        loop {
            let open: Vec<_> = (0..messages.len())
                .filter(|at| outcomes[*at].is_none())
                .collect();
            if open.is_empty() {
                return outcomes.into_iter().flatten().collect();
            }
            let batch: Vec<_> = open.iter().map(|at| messages[*at].clone()).collect();
            for (at, outcome) in open.iter().zip(self.call_batch(&handler, batch)) {
                outcomes[*at] = outcome;
            }
        }
    }

    /// One call, and what is settled by it: all messages, or those that failed alone.
    fn call_batch<T: DeserializeOwned>(
        &mut self,
        handler: &impl BatchHandler<T>,
        batch: Vec<Message>,
    ) -> Vec<Option<Outcome>> {
        self.begin();
        let answers = session::enter(self.take_run(&batch), || {
            handle_batch(handler, batch.clone())
        });
        let (answers, mut run) = answers;
        let outcomes: Vec<_> = answers
            .into_iter()
            .map(|answer| Outcome::of_wire(answer, &run.faults))
            .collect();
        if !run.faults.is_empty() && batch.len() > 1 {
            run.end(End::Rollback);
            self.put_back(run);
            return batch
                .iter()
                .flat_map(|message| self.call_batch(handler, vec![message.clone()]))
                .collect();
        }
        let are_ok = outcomes.iter().all(Outcome::is_ok);
        let deferred = run.end(if are_ok { End::Commit } else { End::Rollback });
        self.put_back(run);
        match (are_ok, deferred) {
            (true, None) => outcomes.into_iter().map(Some).collect(),
            // A deferred constraint is some message's; alone, it is the message's.
            (true, Some(failed)) if batch.len() == 1 => vec![Some(failed)],
            (true, Some(_)) => batch
                .iter()
                .flat_map(|message| self.call_batch(handler, vec![message.clone()]))
                .collect(),
            (false, _) => outcomes
                .into_iter()
                .map(|outcome| (!outcome.is_ok()).then_some(outcome))
                .collect(),
        }
    }
}
