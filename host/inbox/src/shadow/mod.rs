//! A candidate runs on live messages after the live version has committed, in a transaction that is
//! always rolled back, and its effects are compared with the live ones.
//!
//! 1. The live run of a sampled message has its row changes captured in its own transaction
//!    ([`capture`], and the triggers that [`install`] keeps on the tenant's tables).
//! 2. After COMMIT it goes into a bounded queue ([`queue`]); a full one drops it.
//! 3. A task per consumer takes it from there ([`trial`]): it undoes exactly those changes, so that
//!    the candidate starts from the rows that the live run saw ([`undo`]), runs the candidate,
//!    captures its changes the same way, compares ([`compare`]) and rolls back. It gives way to
//!    everything.
//! 4. What differs is summed up and, within bounds, kept ([`tally`], [`report`]).

mod capture;
mod compare;
mod composite;
mod install;
mod net;
mod queue;
mod report;
mod table;
mod tally;
mod trial;
mod undo;

use std::{sync::Arc, time::Duration};

use sha2::{Digest, Sha256};

pub(crate) use capture::begin;
pub(crate) use queue::{Queue, Sampled};
pub use report::{ShadowDifference, ShadowReport, ShadowSkipped, ShadowSum};

use crate::handler::Handler;

/// How long a candidate may take for a message, its undoing included, where a deployment says
/// nothing.
pub const DURATION_DEFAULT: Duration = Duration::from_millis(250);

/// A candidate, and which messages it is tried on.
pub struct Shadow {
    /// The deployment that its findings belong to.
    pub deployment_id: i64,
    /// The candidate; never one that takes batches.
    pub handler: Arc<dyn Handler>,
    /// Share of messages, above 0 and at most 100.
    pub percent: f64,
    /// Longest trial of one message.
    pub duration: Duration,
}

impl Shadow {
    /// Whether a message is in the sample. The same message is in it on every host, and stays in it
    /// while the share grows.
    pub fn samples(&self, message_id: &str) -> bool {
        if self.percent >= 100.0 {
            return true;
        }
        let hash = Sha256::new().chain_update("shadow\0").chain_update(message_id).finalize();
        let share = hash.iter().take(4).fold(0, |sum: u32, byte| sum << 8 | u32::from(*byte));
        f64::from(share) < self.percent / 100.0 * 4_294_967_296.0
    }
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;

    use super::*;
    use crate::{
        handler::{Answer, Run},
        tx::Tx,
    };

    struct Idle;

    impl Handler for Idle {
        fn version(&self) -> i32 {
            1
        }

        fn handle<'a>(&'a self, _tx: &'a Tx, _run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async { Ok(None) })
        }
    }

    fn sampled(percent: f64) -> Vec<bool> {
        let shadow = Shadow {
            deployment_id: 1,
            handler: Arc::new(Idle),
            percent,
            duration: DURATION_DEFAULT,
        };
        (0..20_000).map(|number| shadow.samples(&format!("message-{number}"))).collect()
    }

    #[test]
    fn a_sample_has_its_share_and_only_grows() {
        assert!(sampled(100.0).into_iter().all(|sampled| sampled));
        let (ten, thirty) = (sampled(10.0), sampled(30.0));
        let count = |sample: &[bool]| sample.iter().filter(|sampled| **sampled).count();
        assert!(
            (1_800..2_200).contains(&count(&ten)) && (5_700..6_300).contains(&count(&thirty)),
            "{} {}",
            count(&ten),
            count(&thirty)
        );
        assert!(ten.iter().zip(&thirty).all(|(ten, thirty)| !ten || *thirty));
    }
}
