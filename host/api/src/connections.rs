//! The connections of one listener, under bounds that leave room for clients with a token.
//!
//! A listener has a number of places, and one peer holds half of them at most. A connection that
//! comes when there is no room takes the place of one in an earlier phase. First are connections
//! that have not sent a whole head, then those whose request is not authenticated. Last are those
//! that an authenticated client keeps open between its requests. Within a phase, the peer with most
//! connections in it loses its oldest. An authenticated request is never cut off for another
//! connection. Where all places hold such requests, the new connection is refused.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use oncebox_model::hooks::{self, Defect};
use tokio_util::sync::CancellationToken;

/// Largest number of connections of one listener.
const CONNECTIONS_MAX: usize = 256;

/// An address of IPv4, or the first 64 bits of an address of IPv6: one site of IPv6 has all
/// addresses below them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Peer(IpAddr);

impl Peer {
    fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
            }
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    /// During the handshake or the head of a request, without an authenticated request before.
    NoHead,
    /// After the head of a request; its token is not known to be valid.
    NotAuthenticated,
    /// After the answer to an authenticated request, until the head of the next one is whole.
    Idle,
    /// During a request with a valid token, until its answer is sent.
    Authenticated,
}

impl ConnectionPhase {
    /// Phases in which a connection may be closed for another, in this order.
    const CLOSED: [Self; 3] = [Self::NoHead, Self::NotAuthenticated, Self::Idle];

    /// Returns the label, in metrics, of a connection that is closed for another.
    fn reason(self) -> &'static str {
        match self {
            Self::NoHead => "no_head",
            Self::NotAuthenticated => "not_authenticated",
            Self::Idle => "idle",
            Self::Authenticated => "authenticated",
        }
    }
}

/// Label, in metrics, of a connection that is closed at once, because no other may be closed for
/// it.
const REFUSED: &str = "refused";

struct ConnectionPlace {
    peer: Peer,
    phase: ConnectionPhase,
    /// Value of [`Places::clock`] at the last change of the phase.
    since: u64,
    closing: CancellationToken,
}

#[derive(Default)]
struct Places {
    all: HashMap<u64, ConnectionPlace>,
    /// Count of connections and of changes of their phases; it orders both.
    clock: u64,
}

/// Room for a new connection.
#[derive(Debug, PartialEq, Eq)]
enum ConnectionRoom {
    Free,
    /// The place of this connection, which is then closed.
    Of(u64),
    None,
}

impl Places {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Finds room for a connection of a peer.
    fn room(&self, peer: Peer, max: usize) -> ConnectionRoom {
        let of_peer = self.all.values().filter(|place| place.peer == peer).count();
        let found = if of_peer >= max / 2 {
            self.closable(|place| place.peer == peer)
        } else if self.all.len() >= max {
            self.closable(|_| true)
        } else {
            return ConnectionRoom::Free;
        };
        found.map_or(ConnectionRoom::None, ConnectionRoom::Of)
    }

    /// Finds the first connection to close, among those that `among` accepts.
    fn closable(&self, among: impl Fn(&ConnectionPlace) -> bool) -> Option<u64> {
        if hooks::sabotage(Defect::StrangersKeepTheirPlaces) {
            return None;
        }
        ConnectionPhase::CLOSED.into_iter().find_map(|phase| {
            let those =
                || self.all.iter().filter(|(_, place)| place.phase == phase && among(place));
            let mut of_peers: HashMap<Peer, usize> = HashMap::new();
            those().for_each(|(_, place)| *of_peers.entry(place.peer).or_default() += 1);
            those()
                .min_by_key(|(_, place)| (Reverse(of_peers[&place.peer]), place.since))
                .map(|(number, _)| *number)
        })
    }

    fn change(&mut self, number: u64, to: impl FnOnce(ConnectionPhase) -> ConnectionPhase) {
        let since = self.tick();
        // A connection that was closed for another has no place.
        if let Some(place) = self.all.get_mut(&number) {
            (place.phase, place.since) = (to(place.phase), since);
        }
    }
}

/// The places of one listener.
#[derive(Clone)]
pub(crate) struct Connections {
    listener: &'static str,
    max: usize,
    places: Arc<Mutex<Places>>,
}

impl Connections {
    /// Creates the places of a listener. The name is a label of its metrics.
    pub(crate) fn new(listener: &'static str) -> Self {
        let connections = Self { listener, max: CONNECTIONS_MAX, places: Arc::default() };
        // A series that begins with its first connection would not be seen to rise.
        ConnectionPhase::CLOSED
            .into_iter()
            .map(ConnectionPhase::reason)
            .chain([REFUSED])
            .for_each(|reason| connections.count(reason, 0));
        connections
    }

    /// Gives a place to a connection from an address, and closes another connection for it if
    /// necessary. Returns `None` where there is no room.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<Arc<Connection>> {
        let peer = Peer::of(address);
        let mut places = self.places();
        match places.room(peer, self.max) {
            ConnectionRoom::Free => {}
            ConnectionRoom::Of(number) => {
                if let Some(closed) = places.all.remove(&number) {
                    closed.closing.cancel();
                    self.count(closed.phase.reason(), 1);
                }
            }
            ConnectionRoom::None => {
                self.count(REFUSED, 1);
                return None;
            }
        }
        let (number, closing) = (places.tick(), CancellationToken::new());
        places.all.insert(
            number,
            ConnectionPlace {
                peer,
                phase: ConnectionPhase::NoHead,
                since: number,
                closing: closing.clone(),
            },
        );
        drop(places);
        Some(Arc::new(Connection {
            number,
            of: self.clone(),
            closing,
            is_answered: AtomicBool::new(false),
        }))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, reason: &'static str, connections: u64) {
        metrics::counter!("oncebox_http_connections_closed_total", "listener" => self.listener, "reason" => reason).increment(connections);
    }
}

/// A connection that has a place. The task that serves it reports its phases; dropping it frees the
/// place.
pub(crate) struct Connection {
    number: u64,
    of: Connections,
    closing: CancellationToken,
    /// Whether all of an answer was handed over to be sent.
    is_answered: AtomicBool,
}

impl Connection {
    /// Waits until the connection is closed for another.
    pub(crate) async fn closed(&self) {
        self.closing.cancelled().await;
    }

    /// Reports that the head of a request was read.
    pub(crate) fn requested(&self) {
        self.is_answered.store(false, Ordering::Relaxed);
        self.of.places().change(self.number, |_| ConnectionPhase::NotAuthenticated);
    }

    /// Reports that the request's token is valid.
    pub(crate) fn authenticated(&self) {
        self.of.places().change(self.number, |_| ConnectionPhase::Authenticated);
    }

    /// Reports that all of the answer was handed over to be sent.
    pub(crate) fn answered(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }

    /// Reports that all data handed over was sent.
    pub(crate) fn flushed(&self) {
        if self.is_answered.swap(false, Ordering::Relaxed) {
            self.of.places().change(self.number, |phase| {
                if phase == ConnectionPhase::Authenticated {
                    ConnectionPhase::Idle
                } else {
                    ConnectionPhase::NoHead
                }
            });
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.of.places().all.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 8;

    /// A listener with few places, and the connections that have them.
    struct TestListener(Connections, Vec<(String, Arc<Connection>)>);

    impl TestListener {
        fn new() -> Self {
            Self(Connections { max: MAX, ..Connections::new("test") }, Vec::new())
        }

        /// Opens connections from an address, each in the phase of a letter: `h`ead not whole,
        /// `u`nauthenticated, `i`dle, `a`uthenticated. Returns how many were admitted.
        fn come(&mut self, from: &str, phases: &str) -> usize {
            let before = self.1.len();
            for phase in phases.chars() {
                let Some(connection) = self.0.admit(from.parse().expect("an address")) else {
                    continue;
                };
                if phase != 'h' {
                    connection.requested();
                }
                if matches!(phase, 'i' | 'a') {
                    connection.authenticated();
                }
                if phase == 'i' {
                    connection.answered();
                    connection.flushed();
                }
                self.1.push((format!("{from} {phase}"), connection));
            }
            self.1.len() - before
        }

        /// Returns the connections that were closed for others since the last call, in the order in
        /// which they came.
        fn closed(&mut self) -> Vec<String> {
            let closed = self.1.extract_if(.., |(_, connection)| connection.closing.is_cancelled());
            closed.map(|(name, _)| name).collect()
        }
    }

    #[test]
    fn a_peer_has_half_of_the_places_and_closes_its_own() {
        let mut listener = TestListener::new();
        assert_eq!((listener.come("10.0.0.1", "aiuh"), listener.come("10.0.0.1", "h")), (4, 1));
        assert_eq!(listener.closed(), ["10.0.0.1 h"]);
        assert_eq!(listener.come("10.0.0.1", "aaa"), 3);
        assert_eq!(listener.closed(), ["10.0.0.1 i", "10.0.0.1 u", "10.0.0.1 h"]);
        assert_eq!(listener.come("10.0.0.1", "a"), 0, "nothing is closed for it");
        assert_eq!(
            (listener.come("10.0.0.2", "h"), listener.closed().len()),
            (1, 0),
            "others have the other half"
        );
    }

    #[test]
    fn who_sends_no_head_gives_way_first_and_whoever_has_most_of_them() {
        let mut listener = TestListener::new();
        assert_eq!(
            (
                listener.come("10.0.0.1", "u"),
                listener.come("10.0.0.2", "h"),
                listener.come("10.0.0.3", "hhh")
            ),
            (1, 1, 3)
        );
        assert_eq!((listener.come("10.0.0.4", "a"), listener.come("10.0.0.5", "aa")), (1, 2));
        assert_eq!(
            (listener.come("10.0.0.6", "a"), listener.closed()),
            (1, vec!["10.0.0.3 h".to_owned()])
        );
        assert_eq!((listener.come("10.0.0.7", "aaaa"), listener.closed().len()), (4, 4));
        assert_eq!(listener.come("10.0.0.8", "h"), 0, "only authenticated requests are left");
        assert!(listener.closed().is_empty());
    }

    #[test]
    fn those_that_send_heads_are_closed_in_order_of_what_they_are_worth() {
        let mut listener = TestListener::new();
        assert_eq!(
            (
                listener.come("10.0.0.1", "iu"),
                listener.come("10.0.0.2", "ui"),
                listener.come("10.0.0.3", "aaaa")
            ),
            (2, 2, 4)
        );
        assert_eq!((listener.come("10.0.0.4", "aaaa"), listener.come("10.0.0.5", "h")), (4, 0));
        assert_eq!(listener.closed(), ["10.0.0.1 i", "10.0.0.1 u", "10.0.0.2 u", "10.0.0.2 i"]);
    }

    #[test]
    fn a_place_is_free_when_its_connection_ends() {
        let mut listener = TestListener::new();
        assert_eq!(listener.come("10.0.0.1", "aaaa") + listener.come("10.0.0.2", "aaaa"), MAX);
        assert_eq!(listener.come("10.0.0.3", "h"), 0);
        listener.1.pop();
        assert_eq!(listener.come("10.0.0.3", "h"), 1);
        // The place of a connection that was closed for another is not given back twice.
        assert_eq!((listener.come("10.0.0.4", "a"), listener.closed().len()), (1, 1));
        assert_eq!(listener.0.places().all.len(), MAX);
    }

    #[test]
    fn a_site_of_ipv6_is_one_peer() {
        let of = |address: &str| Peer::of(address.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
