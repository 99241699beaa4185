//! A candidate runs on live messages after the live version has committed, in a transaction that is
//! always rolled back, and its effects are compared with the live ones.
//!
//! 1. The live run of a sampled message has its row changes captured in its own transaction
//!    ([`capture`], and the triggers that `shadow_install` keeps on the tenant's tables).
//! 2. After COMMIT it goes into a bounded queue ([`queue`]); a full one drops it.
//! 3. A task per consumer takes it from there ([`trial`]): it undoes exactly those changes, so that
//!    the candidate starts from the rows that the live run saw ([`undo`]), runs the candidate,
//!    captures its changes the same way, compares ([`compare`]) and rolls back. It gives way to
//!    everything.
//! 4. What differs is summed up and, within bounds, kept ([`tally`]).

mod capture;
mod compare;
mod composite;
mod net;
mod queue;
mod table;
mod tally;
mod trial;
mod undo;

pub(crate) use capture::begin;
pub(crate) use queue::{Queue, Sampled};
