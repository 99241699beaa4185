//! The turn of a pair's task: when it may lease, how many messages, and for how long.

use std::time::Duration;

use oncebox_kafka::OUTGOING_MAX;
use oncebox_model::{
    error::InboxError,
    outgoing::{AnswerMode, Destination},
};
use tokio::time::Instant;

use crate::{
    breaker::Admission,
    directory::Directory,
    endpoints::{EndpointUse, Endpoints},
    pair_state::PairEnd,
    store::LEASE,
};

/// Messages of a pair that are under way at most, for Kafka: the client sends them together.
const AT_ONCE_KAFKA: usize = 500;
/// Messages of a pair that are under way at most, for an inbox: each takes a transaction.
const AT_ONCE_INBOX: usize = 8;
/// Messages of a pair that are under way at most, for an endpoint that is not there.
const AT_ONCE_NOWHERE: usize = 8;
/// Pause after a lease, as a multiple of the time that it took, and the longest one. What is
/// committed meanwhile is leased together: a busy database has fewer leases, each of more messages.
const PAUSE: u32 = 3;
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// Time of a lease beyond the longest request to an endpoint, for the marks.
const LEASE_MARGIN: Duration = Duration::from_secs(15);

/// What a task may lease now, and for how long.
#[derive(Clone)]
pub(crate) struct LeaseTerms {
    /// Most messages.
    pub(crate) most: usize,
    /// Length of the lease.
    pub(crate) lease: Duration,
    /// Longest time of one send.
    pub(crate) send_max: Duration,
    /// The endpoint, where the destination is one and is there.
    pub(crate) endpoint: Option<EndpointUse>,
}

/// The turn of a task that has something under way, or nothing.
pub(crate) enum Turn {
    /// It may lease.
    Lease(LeaseTerms),
    /// It has enough under way.
    Full,
    /// It may lease after this time.
    Wait(Duration),
    /// It has to end.
    End(PairEnd),
}

/// The pause of a task after a lease.
pub(crate) struct LeasePause {
    /// Earliest moment of the next lease.
    pub(crate) lease_at: Instant,
    /// Earliest end of the task, after which another one may lease.
    pub(crate) end_at: Instant,
    /// Whether the lease took as much as it may, so that more may be due.
    pub(crate) leaves_more: bool,
}

impl LeasePause {
    /// Returns a pause that is over.
    pub(crate) fn none() -> Self {
        let now = Instant::now();
        Self { lease_at: now, end_at: now, leaves_more: false }
    }

    /// Returns the pause after a lease that took so long. With `gathers` the next lease waits for it.
    pub(crate) fn after(took: Duration, gathers: bool, leaves_more: bool) -> Self {
        let now = Instant::now();
        let end_at = now + took.saturating_mul(PAUSE).min(PAUSE_MAX);
        Self { lease_at: if gathers { end_at } else { now }, end_at, leaves_more }
    }

    /// Returns the time until the next lease; none where that may be now.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.lease_at.checked_duration_since(Instant::now());
        left.filter(|left| !left.is_zero())
    }
}

impl LeaseTerms {
    /// Returns whether the answers of the endpoint go to an inbox.
    pub(crate) fn delivers_answers(&self) -> bool {
        let endpoint = self.endpoint.as_ref();
        endpoint.is_some_and(|endpoint| endpoint.settings.answer == AnswerMode::Delivered)
    }

    /// Gives back the rate of messages that were not leased.
    pub(crate) fn give_back(&self, messages: usize) {
        if let Some(EndpointUse { settings, state }) = &self.endpoint {
            state.give_back(settings, messages);
        }
    }
}

/// Returns what may be leased now for a tenant and a destination, beside what is under way. A task
/// that probes has one message under way.
pub(crate) async fn turn(
    (directory, endpoints): (&Directory, &Endpoints),
    (tenant_id, destination): (i32, Option<&Destination>),
    under_way: usize,
    probes: bool,
) -> Turn {
    let endpoint = match destination {
        Some(Destination::Http { endpoint }) => {
            match opened(directory, endpoints, tenant_id, endpoint).await {
                Ok(endpoint) => endpoint,
                Err(end) => return Turn::End(end),
            }
        }
        _ => None,
    };
    let admission = endpoint.as_ref().map(|endpoint| endpoint.state.admits());
    let most = match (admission, destination) {
        (Some(Admission::Wait(pause)), _) => return Turn::End(PairEnd::BreakerOpen(pause)),
        (Some(Admission::Probe), _) => 1,
        _ if probes => 1,
        (_, Some(Destination::Inbox { .. })) => AT_ONCE_INBOX,
        (_, Some(Destination::Http { .. })) => endpoint
            .as_ref()
            .map_or(AT_ONCE_NOWHERE, |endpoint| endpoint.settings.requests_max.max(1)),
        (_, Some(Destination::Kafka { .. }) | None) => AT_ONCE_KAFKA,
    };
    if under_way > most / 2 {
        return Turn::Full;
    }
    let (most, lease, send_max) = match &endpoint {
        None => (most - under_way, LEASE, OUTGOING_MAX),
        Some(EndpointUse { settings, state }) => {
            let taken = match state.take(settings, most - under_way) {
                Ok(taken) => taken,
                Err(time) => return Turn::Wait(time),
            };
            (taken, (settings.timeout + LEASE_MARGIN).max(LEASE), settings.timeout)
        }
    };
    Turn::Lease(LeaseTerms { most, lease, send_max, endpoint })
}

/// Returns an endpoint of a tenant as it is now; none where there is none.
async fn opened(
    directory: &Directory,
    endpoints: &Endpoints,
    tenant_id: i32,
    name: &str,
) -> Result<Option<EndpointUse>, PairEnd> {
    let database = |error: InboxError| PairEnd::Database(error.to_string());
    let tenant = directory.tenant(tenant_id).await.map_err(database)?;
    let Some(tenant) = tenant else { return Err(PairEnd::Resting) };
    let found = endpoints.get(tenant_id, &tenant.name, name).await;
    found.map_err(|error| match error {
        // Its settings cannot be used as they are: nothing is sent until they are mended.
        InboxError::Sealed(text) | InboxError::Invalid(text) => {
            PairEnd::Away { error: text, has_confirmed: false }
        }
        error => PairEnd::Database(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: commits that name a pair all the time make a lease for each, or a slow
    // database stops the pair.
    #[tokio::test(start_paused = true)]
    async fn a_pause_grows_with_its_lease_up_to_a_bound() {
        let after = |ms, gathers| LeasePause::after(Duration::from_millis(ms), gathers, false);
        assert_eq!(LeasePause::none().left(), None);
        assert_eq!(after(10, true).left(), Some(Duration::from_millis(30)));
        assert_eq!(after(1_000, true).left(), Some(PAUSE_MAX));
        // The next lease does not wait; another task does.
        assert_eq!(after(10, false).left(), None);
        assert_eq!(after(10, false).end_at, Instant::now() + Duration::from_millis(30));
    }
}
