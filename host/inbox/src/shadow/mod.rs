//! A candidate runs on live messages after the live version has committed, in a transaction that is
//! always rolled back. Its effects are compared with the live ones.
//!
//! 1. The row changes of a sampled message's live run are captured in its own transaction. That is
//!    done by [`capture`], and the triggers that `shadow_install` keeps on the tenant's tables.
//! 2. After COMMIT the message goes into a bounded queue ([`queue`]); a full queue drops it.
//! 3. A task per consumer takes it from the queue ([`trial`]). It undoes exactly those changes, so
//!    that the candidate starts from the rows that the live run saw ([`undo`]). It runs the
//!    candidate, captures its changes in this way too, compares them ([`compare`]) and rolls back.
//!    What the candidate emits is compared and goes nowhere. Its cancels get the answers of the
//!    live run ([`cancels`]).
//!    A trial gives way to every other transaction.
//! 4. The differences are summed up and, within bounds, kept ([`tally`]).

mod cancels;
mod capture;
mod compare;
mod composite;
mod net;
mod queue;
mod table;
mod tally;
mod trial;
mod undo;

use oncebox_model::{error::InboxError, tx::Tx};

pub(crate) use cancels::{Cancel, recorded};
pub(crate) use capture::Watch;
pub(crate) use queue::{LiveRun, Sampled, TrialQueue};

/// Begins to capture the changes of a live message that is in the sample of a candidate.
pub(crate) async fn watch(tx: &Tx, is_sampled: bool) -> Result<Option<Watch>, InboxError> {
    if is_sampled { capture::begin(tx).await.map(Some) } else { Ok(None) }
}
