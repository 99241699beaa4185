//! Parking: a record or message that cannot be handled becomes a row that an operator sees.
//!
//! It is never dropped and never stops its partition. Where messages run in order, a parked message
//! holds back later messages of its key. A record that cannot be decoded, a collision or a message
//! whose row PostgreSQL refuses has no known place in the order, and holds back none.

use oncebox_model::{
    Reason,
    error::InboxError,
    identity::Undecodable,
    message::Message,
    outcome::{Disposition, Failure},
    payload_key::PayloadKey,
    record::Record,
};

use crate::{
    batch::{
        claim::{ClaimOutcome, ClaimRequest},
        complete::unrouted as unrouted_disposition,
    },
    consumer::ConsumerInbox,
    metrics::Parked,
    session::Transaction,
};

/// Returns the row of a record without a usable id or event type, with its raw bytes.
pub fn undecodable(record: &Record, key: &PayloadKey, undecodable: &Undecodable) -> ClaimRequest {
    ClaimRequest {
        message: Message::undecodable(record, key),
        version: None,
        reason: Some(format!("{}: {undecodable}", Reason::Undecodable)),
        ordering: None,
    }
}

/// Returns the row of a message that no deployment takes, under its own id.
pub fn unrouted(message: Message, ordering: Option<i64>) -> ClaimRequest {
    ClaimRequest { message, version: None, reason: Some(NO_ROUTE.to_owned()), ordering }
}

/// Returns the row of a message that is older than the inbox remembers, under its own id.
pub fn past_horizon(message: Message, ordering: Option<i64>) -> ClaimRequest {
    ClaimRequest { message, version: None, reason: Some(Reason::Horizon.to_string()), ordering }
}

/// Returns the row of a message whose payload does not match its schema, under its own id.
pub fn invalid(message: Message, ordering: Option<i64>, fault: &str) -> ClaimRequest {
    ClaimRequest {
        message,
        version: None,
        reason: Some(format!("{}: {fault}", Reason::Schema)),
        ordering,
    }
}

/// Returns the row of a message whose payload has more bytes than the policy allows, under its own
/// id. The claim keeps neither payload nor headers of it.
pub fn too_large(message: Message, ordering: Option<i64>, bytes_max: usize) -> ClaimRequest {
    let reason = too_large_reason(&message.record, bytes_max);
    ClaimRequest { message, version: None, reason: Some(reason), ordering }
}

/// Returns the reason in the row of a message whose payload is too large.
pub(crate) fn too_large_reason(record: &Record, bytes_max: usize) -> String {
    let bytes = record.payload_bytes();
    format!(
        "{}: {bytes} bytes are more than the {bytes_max} of `limits.payload_bytes_max`",
        Reason::TooLarge
    )
}

/// Returns whether a message is parked because no deployment takes it.
pub fn is_unrouted(offered: &ClaimRequest) -> bool {
    offered.reason.as_deref() == Some(NO_ROUTE)
}

/// Returns whether a message is parked because its id belongs to another payload. The id of such a
/// row holds the payload's hash, so it cannot collide again.
pub(crate) fn is_collision(offered: &ClaimRequest) -> bool {
    offered.reason.as_deref() == Some(COLLISION)
}

/// Reason in the row of a message whose id belongs to another payload.
const COLLISION: &str = Reason::Collision.as_str();

/// Reason in the row of a message that no deployment takes; the host function `settle_unrouted`
/// reads it too.
const NO_ROUTE: &str = Reason::NoRoute.as_str();

/// Statement that skips or rejects parked messages.
const SETTLE_UNROUTED: &str = "SELECT * FROM oncebox_host.settle_unrouted($1, $2, $3, $4)";

impl ConsumerInbox {
    /// Gives the messages that this transaction parked for want of a handler the state that the
    /// policy says instead.
    pub(crate) async fn settle_unrouted(
        &self,
        transaction: &Transaction<'_>,
        offered: &[ClaimRequest],
        claims: &[ClaimOutcome],
    ) -> Result<(), InboxError> {
        let disposition = unrouted_disposition(&self.policy);
        let ours = offered
            .iter()
            .zip(claims)
            .filter(|(offered, claimed)| is_unrouted(offered) && **claimed == ClaimOutcome::New);
        let ids: Vec<_> = ours.map(|(offered, _)| offered.message.id.as_str()).collect();
        if disposition == Disposition::Parked || ids.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(SETTLE_UNROUTED)
            .bind(transaction.secret())
            .bind(self.consumer_id)
            .bind(ids)
            .bind(disposition.status());
        transaction.rows(query).await?;
        Ok(())
    }

    /// Counts and logs a message that was stored without having run.
    pub(crate) fn count_kept(&self, offered: &ClaimRequest) {
        match unrouted_disposition(&self.policy) {
            Disposition::Parked => {}
            disposition if is_unrouted(offered) => {
                if disposition == Disposition::FailedTerminal {
                    self.count_failure(&offered.message.event_type, NO_ROUTE);
                }
                return self.count_run(&offered.message, disposition);
            }
            _ => {}
        }
        let ClaimRequest { message, reason, .. } = offered;
        let reason = reason.as_deref().unwrap_or_default();
        let collides_with = if reason == COLLISION {
            message.id.rsplit_once('#').map(|(known, _)| known)
        } else {
            None
        };
        let (id, event_type) = (&message.id, &message.event_type);
        self.log_parked(&Parked {
            trace_id: message.trace_id(),
            collides_with,
            ..Parked::new(id, event_type, reason)
        });
    }
}

/// Returns the row of a message that came with a known id and another payload, under an id with the
/// payload's hash.
pub fn collision(message: &Message) -> ClaimRequest {
    let mut newcomer = message.clone();
    let hash =
        message.payload_hash.map_or_else(|| "tombstone".to_owned(), |hash| hex::encode(&hash[..8]));
    newcomer.id = format!("{}#{hash}", message.id);
    ClaimRequest {
        message: newcomer,
        version: None,
        reason: Some(COLLISION.to_owned()),
        ordering: None,
    }
}

/// Returns the row of a message whose own row PostgreSQL refuses, under its position in Kafka.
pub fn unclaimable(message: &Message, key: &PayloadKey, failure: &Failure) -> ClaimRequest {
    ClaimRequest {
        message: Message::undecodable(&message.record, key),
        version: None,
        reason: Some(format!("{}: {}", Reason::Unclaimable, failure.kind.reason())),
        ordering: None,
    }
}
