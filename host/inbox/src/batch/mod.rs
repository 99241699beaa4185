//! One transaction: claim, handle, complete, commit.

// The protocol: one transaction, in order, and its repetition.
pub(crate) mod process;
// What follows an aborted transaction.
mod plan;
// A message with the handler that runs it.
pub(crate) mod routed;
// What the open transaction knows, and which messages run next.
pub(crate) mod state;
// The claim: inbox rows for the new messages, in the open transaction.
pub(crate) mod claim;
// Order within the transaction.
mod order;
// One call of a handler, and its result.
pub(crate) mod call;
// Messages that run before the statements of those before them are answered.
mod ahead;
// Several messages in one call of a handler.
mod group;
// The messages that handlers emit, and their cancelling.
pub(crate) mod outgoing;
// The last statement of the host before COMMIT.
pub(crate) mod complete;
// Rollback, savepoints and the errors of the host's statements.
pub(crate) mod statements;
// Reasons why a transaction ends without a commit.
pub(crate) mod abort;
// Failures recorded in a transaction of their own.
mod failed;
// The result of a committed transaction.
pub(crate) mod settled;
// The place of a message in a replay, and its end there.
pub(crate) mod replay_turn;
// Messages that are replayed.
pub(crate) mod replayed;
// Messages that are stored without a run.
mod store;
// The protocol in a transaction that is always rolled back, for `oncebox test`.
pub(crate) mod rehearsal;
