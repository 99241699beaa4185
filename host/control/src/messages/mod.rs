//! Messages, as operators see them and act on them.

// Rows of the inbox, newest first, and one of them.
pub(crate) mod list;
// A place in that list, from which the next page goes on.
pub(crate) mod cursor;
// How many are open.
pub(crate) mod stats;
// What became of one message.
pub(crate) mod history;
// What comes next for it, and the commands that bring it on.
pub(crate) mod next_step;
// Redrive, retry and discard.
pub(crate) mod bulk;
// Redrive one message with another payload.
pub(crate) mod edit;
// All that is kept of messages, one after the other.
pub(crate) mod export;
