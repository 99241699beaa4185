//! Delivering to the inbox of a consumer of the same tenant.
//!
//! The message becomes a row of the inbox with the status `received`, as one that another host
//! left: a retry worker of the consumer runs it. Its id is the outgoing message's, whatever the
//! consumer's policy says of ids; its ordering key and its version come from where that policy
//! says.
//!
//! The row is inserted and the outgoing message marked in one transaction of the database that
//! holds both. A crash before the COMMIT leaves neither, and one after it leaves both.

use oncebox_model::{
    error::InboxError,
    identity::{self, Undecodable},
    message::Message,
    ordering::ordering_hash,
    outgoing::DELIVERED_TOPIC,
    payload_key::PayloadKey,
    policy::{IdSource, IdentityPolicy, Policy, TypeSource},
    record::Record,
};

use crate::{
    directory::ConsumerFacts,
    outcome::Sent,
    reason::OutgoingReason,
    record_headers::record_headers,
    row::OutgoingRow,
    store::{AnswerMark, Delivered, Store},
};

/// Delivers a message of a tenant's consumer into the inbox of another one, or of the same one.
pub(crate) async fn deliver(
    store: &Store,
    row: &OutgoingRow,
    (tenant, emitter): (&str, &str),
    target: &ConsumerFacts,
    key: &PayloadKey,
) -> Sent {
    deliver_as(store, (row, row), (tenant, emitter), target, key, None).await
}

/// Delivers the message of a row, or the answer to it, which is a row that is nowhere stored.
pub(crate) async fn deliver_as(
    store: &Store,
    (row, delivered): (&OutgoingRow, &OutgoingRow),
    (tenant, emitter): (&str, &str),
    target: &ConsumerFacts,
    key: &PayloadKey,
    answer: Option<&AnswerMark>,
) -> Sent {
    let Some(policy) = &target.policy else {
        let text = format!("the policy of consumer `{}` is not readable", target.name);
        return Sent::failed(OutgoingReason::Failed, text);
    };
    let message = match message_of(delivered, (tenant, emitter), policy, key) {
        Ok(message) => message,
        Err(fault) => {
            let text = format!("by the policy of consumer `{}`: {fault}", target.name);
            return Sent::parked(OutgoingReason::Undecodable, text);
        }
    };
    let ordering = ordering_hash(target.consumer_id, policy.order, &message);
    match store.deliver(row, target.consumer_id, &message, ordering, answer).await {
        Ok(Delivered::Done(delay_s)) => Sent::Marked { delay_s },
        Ok(Delivered::Lost) => Sent::Lost,
        Ok(Delivered::NoConsumer) => Sent::failed(
            OutgoingReason::Failed,
            format!("the tenant's database does not show consumer `{}` yet", target.name),
        ),
        Err(error) if error.is_of_row() => Sent::parked(OutgoingReason::Refused, error.to_string()),
        Err(error @ InboxError::InFlightElsewhere) => {
            Sent::failed(OutgoingReason::Failed, error.to_string())
        }
        Err(error) => Sent::away(OutgoingReason::DestinationAway, error.to_string()),
    }
}

/// Returns the message as the consumer with this policy gets it.
fn message_of(
    row: &OutgoingRow,
    (tenant, emitter): (&str, &str),
    policy: &Policy,
    key: &PayloadKey,
) -> Result<Message, Undecodable> {
    let record = Record {
        topic: DELIVERED_TOPIC.into(),
        topic_id: None,
        partition: 0,
        offset: row.position,
        timestamp_ms: row.created_at.timestamp_millis(),
        key: row.key.clone(),
        headers: record_headers(row, tenant, emitter),
        payload: row.payload.clone(),
    };
    let identity = IdentityPolicy {
        id: vec![IdSource::Header("ce_id".to_owned())],
        event_type: vec![TypeSource::Header("ce_type".to_owned())],
        ordering_key: policy.identity.ordering_key.clone(),
        scoped_by_event_type: false,
    };
    let (sequence, reference) = (policy.sequence.as_ref(), policy.reference.as_ref());
    let decoded = identity::decode(record, &identity, sequence, reference, None, key);
    decoded.map_err(|(_, fault)| fault)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::fixture::row;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{text}")).unwrap()
    }

    fn decoded(row: &OutgoingRow, text: &str) -> Result<(Message, Option<i64>), Undecodable> {
        let key = PayloadKey::new(&[1; 32]);
        let policy = policy(text);
        let message = message_of(row, ("acme", "orders"), &policy, &key)?;
        let ordering = ordering_hash(5, policy.order, &message);
        Ok((message, ordering))
    }

    // What could go wrong: the id comes from the payload by the policy of the receiver, so that a
    // second delivery of another message passes for a duplicate.
    #[test]
    fn an_id_is_the_outgoing_messages_whatever_the_policy_says() {
        let row = row();
        for text in
            ["", "[identity]\nid = [{json_pointer = '/total'}]\nscoped_by_event_type = true"]
        {
            let (message, ordering) = decoded(&row, text).unwrap();
            assert_eq!(
                (message.id.as_str(), message.event_type.as_str()),
                (&*row.id, "order.paid")
            );
            assert_eq!((message.source.as_str(), ordering), ("oncebox:acme/orders", None));
            assert_eq!(message.content_type.as_deref(), Some("application/json"));
            assert_eq!((message.record.offset, message.record.partition), (99, 0));
            assert_eq!(message.record.payload, row.payload);
            assert!(message.payload_hash.is_some());
        }
    }

    #[test]
    fn order_and_version_are_by_the_policy_of_the_receiver() {
        let row = row();
        let (message, by_key) = decoded(&row, "order = 'key'").unwrap();
        assert_eq!(message.ordering_key.as_deref(), Some(&b"k"[..]));
        let (_, by_partition) = decoded(&row, "order = 'partition'").unwrap();
        assert!(by_key.is_some() && by_partition.is_some() && by_key != by_partition);
        let bare = OutgoingRow { key: None, ..row.clone() };
        assert_eq!(decoded(&bare, "order = 'key'").unwrap().1, None);
        let pointer = "order = 'key'\n[identity]\nordering_key = {json_pointer = '/total'}";
        assert_eq!(decoded(&row, pointer).unwrap().0.ordering_key.as_deref(), Some(&b"5"[..]));
        let sequence = "order = 'key'\n[sequence]\nversion = {header = 'version'}";
        assert_eq!(decoded(&row, sequence).map(|_| ()), Err(Undecodable::NoVersion));
    }

    #[test]
    fn headers_of_the_handler_reach_the_receiver() {
        let row = row();
        let (message, _) = decoded(&row, "").unwrap();
        assert_eq!(message.record.header("mine"), Some(&b"1"[..]));
        assert_eq!(message.record.header("ce_causationid"), Some(&b"cause-1"[..]));
        assert_eq!(message.record.headers.len(), 9);
    }
}
