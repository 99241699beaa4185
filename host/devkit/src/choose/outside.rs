//! What this release does about effects outside of the database. All that `choose` says of it is
//! here.

/// Page about it.
pub(super) const PAGE: &str = "docs/inbox-and-outbox.md";

/// What a handler does.
pub(super) const HANDLER: &str = "a handler has no network: in the transaction of its effect it \
    inserts a row that says what is to be done into a table of its tenant, under an id that \
    `derive_id` makes from the message's";

/// What happens after the commit.
pub(super) const RELAY: &str = "Oncebox sends nothing yet: a program of yours, the relay, reads \
    that table and does what a row says, at least once";
