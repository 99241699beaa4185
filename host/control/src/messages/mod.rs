//! Messages: what operators read of them and do with them.

// A position in a list of rows, from which the next page continues.
pub(crate) mod cursor;
// Filters of rows.
pub(crate) mod filter;
// Rows of the inbox, newest first, and one of them.
pub(crate) mod list;
// Counts of open messages.
pub(crate) mod stats;
// The history of one message.
pub(crate) mod history;
// The next step of a message, and the commands for it.
pub(crate) mod next_step;
// Redrive, retry and discard.
pub(crate) mod bulk;
// Redrive one message with another payload.
pub(crate) mod edit;
// One message with what its policy masks.
pub(crate) mod unmask;
// Messages with everything that is kept of them, page by page.
pub(crate) mod export;
