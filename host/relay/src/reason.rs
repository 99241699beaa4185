//! The reasons of an outgoing message's status.

/// Reason of the status of an outgoing message, as its row and the metrics show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutgoingReason {
    /// The tenant's limits do not allow the destination, or not any more. Parked.
    NotAllowed,
    /// The destination is none that this host knows. Parked.
    UnknownDestination,
    /// The tenant has no consumer of that name, or it is being deleted. Parked.
    NoSuchConsumer,
    /// The consumer's policy makes no message of it. Parked.
    Undecodable,
    /// The record is larger than the brokers take. Parked.
    TooLarge,
    /// The destination refuses the message, and would again. Parked; completed where the refusal
    /// was delivered as an answer.
    Refused,
    /// The tenant has no endpoint of that name. Parked.
    NoSuchEndpoint,
    /// The endpoint asks for fewer requests. Repeated, without counting.
    RateLimited,
    /// The brokers do not know the topic. Repeated, then parked.
    UnknownTopic,
    /// The brokers give no right to write to the topic. Parked.
    NoRight,
    /// It failed too often, for too long. Parked.
    Expired,
    /// The destination did not confirm it in time, or the client failed for good while it was under
    /// way; it may have arrived. Repeated.
    Unconfirmed,
    /// The relay that had leased it did not report in time; it may have arrived. Repeated.
    LeaseExpired,
    /// The destination is away. Repeated, without counting.
    DestinationAway,
    /// No client could be made with the settings of the consumer or of the endpoint. Repeated,
    /// without counting.
    NoClient,
    /// It failed on its way, or at the endpoint; it may have arrived, unless it was for an inbox.
    /// Repeated.
    Failed,
}

impl OutgoingReason {
    /// All reasons.
    pub const ALL: [Self; 16] = [
        Self::NotAllowed,
        Self::UnknownDestination,
        Self::NoSuchConsumer,
        Self::Undecodable,
        Self::TooLarge,
        Self::Refused,
        Self::NoSuchEndpoint,
        Self::RateLimited,
        Self::UnknownTopic,
        Self::NoRight,
        Self::Expired,
        Self::Unconfirmed,
        Self::LeaseExpired,
        Self::DestinationAway,
        Self::NoClient,
        Self::Failed,
    ];

    /// Returns the reason as rows and metrics hold it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::UnknownDestination => "unknown_destination",
            Self::NoSuchConsumer => "no_such_consumer",
            Self::Undecodable => "undecodable",
            Self::TooLarge => "too_large",
            Self::Refused => "refused",
            Self::NoSuchEndpoint => "no_such_endpoint",
            Self::RateLimited => "rate_limited",
            Self::UnknownTopic => "unknown_topic",
            Self::NoRight => "no_right",
            Self::Expired => "expired",
            Self::Unconfirmed => "unconfirmed",
            Self::LeaseExpired => "lease_expired",
            Self::DestinationAway => "destination_away",
            Self::NoClient => "no_client",
            Self::Failed => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    // What could go wrong: two reasons share a name, or one that a function writes is none of
    // these.
    #[test]
    fn names_are_distinct_and_those_of_the_functions_are_among_them() {
        let names: BTreeSet<_> = OutgoingReason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), OutgoingReason::ALL.len());
        let mark = include_str!("../../inbox/sql/mark_outgoing.sql");
        let reclaim = include_str!("../../inbox/sql/reclaim_outgoing.sql");
        for (text, reason) in [
            (mark, OutgoingReason::Expired),
            (mark, OutgoingReason::Unconfirmed),
            (mark, OutgoingReason::Failed),
            (reclaim, OutgoingReason::LeaseExpired),
        ] {
            assert!(text.contains(&format!("'{}'", reason.as_str())), "{reason:?}");
        }
    }
}
