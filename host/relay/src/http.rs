//! Sending to an endpoint over HTTP, and what its answer makes of the message.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use chrono::SecondsFormat;
use oncebox_model::{headers, outgoing::AnswerMode, payload_key::PayloadKey};
use oncebox_sender::{HostList, Request, Response, SendError, Sender, Verdict, percent_encoded};
use tokio::time::sleep;

use crate::{
    answer::{self, KeptAnswer},
    backoff::AGAIN,
    directory::{ConsumerFacts, TenantFacts},
    endpoints::EndpointUse,
    inbox,
    outcome::Sent,
    reason::OutgoingReason,
    record_headers::source,
    row::OutgoingRow,
    store::{AnswerMark, Store},
};

/// Rest of an endpoint that asks for fewer requests and does not say for how long.
const LIMITED_REST: Duration = Duration::from_secs(5);
/// Least time until the next attempt, whatever an endpoint asks for.
const AFTER_MIN: Duration = Duration::from_secs(1);

/// What a message to an endpoint is sent with.
pub(crate) struct HttpFacts<'a> {
    /// The host's sender; none where it sends to no endpoint.
    pub(crate) sender: Option<Arc<Sender>>,
    /// The endpoint; none where it is not there.
    pub(crate) endpoint: Option<&'a EndpointUse>,
    /// The tenant.
    pub(crate) tenant: &'a TenantFacts,
    /// Name of the consumer that emitted the message.
    pub(crate) emitter: &'a str,
    /// The database that holds message and inboxes.
    pub(crate) store: &'a Store,
    /// Key of the tenant's payload hashes, where answers are delivered.
    pub(crate) key: Option<&'a PayloadKey>,
}

/// What an answer is delivered with.
struct AnswerTarget<'a> {
    store: &'a Store,
    /// The consumer that gets the answer.
    consumer: &'a ConsumerFacts,
    key: &'a PayloadKey,
}

/// Sends a message to the endpoint of this name. Returns also the key of the consumer that has got
/// its answer.
pub(crate) async fn send(
    with: &HttpFacts<'_>,
    name: &str,
    row: &OutgoingRow,
) -> (Sent, Option<i32>) {
    let HttpFacts { tenant, emitter, .. } = *with;
    let Some(endpoint) = with.endpoint else {
        let text = format!(
            "tenant `{}` has no endpoint `{name}`; `oncebox endpoint set` makes it",
            tenant.name
        );
        return (Sent::parked(OutgoingReason::NoSuchEndpoint, text), None);
    };
    let Some(sender) = &with.sender else {
        let text = "the settings of this host allow no HTTP destination";
        return (Sent::parked(OutgoingReason::NotAllowed, text), None);
    };
    let names = (tenant.name.as_str(), emitter);
    if endpoint.settings.answer != AnswerMode::Delivered {
        return (request(sender, endpoint, row, names, None).await, None);
    }
    // Before the request: what nobody can be told of is not done.
    let receiver = endpoint.settings.answer_to.as_deref().unwrap_or(emitter);
    let Some(consumer) = tenant.by_name(receiver) else {
        let text = format!(
            "tenant `{}` has no consumer `{receiver}`, which gets the answers of the endpoint \
                `{name}`",
            tenant.name
        );
        return (Sent::parked(OutgoingReason::NoSuchConsumer, text), None);
    };
    if consumer.policy.is_none() {
        let text = format!(
            "the policy of consumer `{receiver}`, which gets the answers of the endpoint `{name}`, \
                is not readable"
        );
        return (Sent::away(OutgoingReason::DestinationAway, text), None);
    }
    let Some(key) = with.key else { return (Sent::Unsent, None) };
    let target = AnswerTarget { store: with.store, consumer, key };
    let sent = request(sender, endpoint, row, names, Some(target)).await;
    let receiver = matches!(sent, Sent::Marked { .. }).then_some(consumer.consumer_id);
    (sent, receiver)
}

/// Makes the request of a message. With `target` the answer is delivered there, and the row marked
/// with it.
async fn request(
    sender: &Sender,
    endpoint: &EndpointUse,
    row: &OutgoingRow,
    names: (&str, &str),
    target: Option<AnswerTarget<'_>>,
) -> Sent {
    let request = request_of(row, names);
    let result = sender.send(&endpoint.settings.endpoint, &request).await;
    let verdict = Verdict::of(&result);
    note(endpoint, row, &result, verdict);
    let response = match result {
        Ok(response) => response,
        Err(error) => return of_error(error),
    };
    match (verdict, target) {
        (Verdict::Delivered | Verdict::Refused, Some(target)) => {
            deliver(endpoint, row, names, target, response, verdict).await
        }
        (Verdict::Delivered, None) if endpoint.settings.answer == AnswerMode::Stored => {
            Sent::Answered(response.into())
        }
        (Verdict::Delivered, None) => Sent::Confirmed,
        (Verdict::Refused, None) => Sent::parked(OutgoingReason::Refused, answered(&response)),
        (Verdict::Again { after: Some(after) }, _) => {
            let after = after.max(AFTER_MIN);
            Sent::Later { reason: OutgoingReason::Failed, error: answered(&response), after }
        }
        (Verdict::Again { after: None }, _) => {
            Sent::failed(OutgoingReason::Failed, answered(&response))
        }
        (Verdict::RateLimited { after }, _) => {
            let after = after.map_or(LIMITED_REST, |after| after.max(AFTER_MIN));
            Sent::Limited { error: answered(&response), after }
        }
    }
}

/// Notes what came of a request: for the breaker, for the metrics, and in the log where a repeated
/// request was refused.
fn note(
    endpoint: &EndpointUse,
    row: &OutgoingRow,
    result: &Result<Response, SendError>,
    verdict: Verdict,
) {
    let EndpointUse { settings, state } = endpoint;
    match (result, verdict) {
        (Err(error), _) if error.is_refusal() => return, // the endpoint was not asked
        (_, Verdict::Again { .. }) => state.failed(settings),
        _ => state.succeeded(),
    }
    state.count(match verdict {
        Verdict::Delivered => "delivered",
        Verdict::Refused => "refused",
        Verdict::Again { .. } => "failed",
        Verdict::RateLimited { .. } => "rate_limited",
    });
    if !row.may_have_arrived {
        return;
    }
    let is_refused = verdict == Verdict::Refused;
    state.count_repeated(settings.receiver_deduplicates, is_refused);
    if let Ok(response) = result
        && is_refused
    {
        tracing::warn!(
            endpoint = settings.endpoint.authority(),
            outgoing_id = row.id,
            status = response.status,
            attempt = row.attempts,
            receiver_deduplicates = settings.receiver_deduplicates,
            "an endpoint refused a repeated request; it may not recognise the Idempotency-Key"
        );
    }
}

/// Delivers an answer to a consumer, and marks the message with it. What may pass is tried again:
/// the request would be repeated else.
async fn deliver(
    endpoint: &EndpointUse,
    row: &OutgoingRow,
    names: (&str, &str),
    target: AnswerTarget<'_>,
    response: Response,
    verdict: Verdict,
) -> Sent {
    let refusal = (verdict == Verdict::Refused).then(|| answered(&response));
    let mark = AnswerMark { status: response.status, refusal };
    let event_type = endpoint.settings.answer_event_type.as_deref();
    let message = answer::message_of(row, names, event_type, &KeptAnswer::from(response));
    let (AnswerTarget { store, consumer, key }, rows) = (target, (row, &message));
    let mut pauses = AGAIN.into_iter();
    loop {
        let sent = inbox::deliver_as(store, rows, names, consumer, key, Some(&mark)).await;
        let is_final = matches!(sent, Sent::Marked { .. } | Sent::Lost | Sent::Parked { .. });
        match pauses.next() {
            Some(pause) if !is_final => sleep(pause).await,
            _ => return of_delivery(sent),
        }
    }
}

/// Returns what the delivery of an answer makes of the message. Whatever failed, the endpoint has
/// answered: the reason says that the message has arrived.
fn of_delivery(sent: Sent) -> Sent {
    match sent {
        Sent::Away { error, .. } => Sent::failed(OutgoingReason::Failed, error),
        Sent::Parked { reason: OutgoingReason::Refused, error } => {
            Sent::parked(OutgoingReason::Undecodable, error)
        }
        other => other,
    }
}

/// Returns what an attempt without an answer makes of the message.
fn of_error(error: SendError) -> Sent {
    let text = error.to_string();
    if let SendError::AddressRefused { endpoint, address, kind } = &error {
        // The text that tenants read does not have the address.
        tracing::warn!(
            endpoint,
            %address,
            %kind,
            "an endpoint has an address that is not of the public Internet; nothing is sent to it"
        );
    }
    match error {
        SendError::HostNotAllowed { list, .. } => {
            let advice = match list {
                HostList::Operator => "`[http_destinations] hosts_allowed` of the hosts",
                HostList::Tenant => "`oncebox tenant limits --endpoint-hosts-allowed`",
            };
            Sent::parked(OutgoingReason::NotAllowed, format!("{text}; {advice} allows it"))
        }
        SendError::PlainHttp { .. }
        | SendError::AddressRefused { .. }
        | SendError::PeerDiffers { .. } => Sent::parked(OutgoingReason::NotAllowed, text),
        error if error.is_refusal() => Sent::parked(OutgoingReason::Refused, text),
        error if error.may_have_arrived() => Sent::failed(OutgoingReason::Unconfirmed, text),
        _ => Sent::away(OutgoingReason::DestinationAway, text),
    }
}

fn answered(response: &Response) -> String {
    format!("the endpoint answered {}", response.status)
}

/// Returns the request of a message. It is the same with each attempt.
fn request_of(row: &OutgoingRow, (tenant, consumer): (&str, &str)) -> Request {
    let own = [
        ("ce-time", row.created_at.to_rfc3339_opts(SecondsFormat::Millis, true)),
        ("ce-correlationid", percent_encoded(&row.correlation_id)),
        ("ce-causationid", percent_encoded(&row.message_id)),
    ];
    let own = own.into_iter().map(|(name, value)| (name.to_owned(), value.into_bytes()));
    Request {
        id: row.id.clone(),
        source: source(tenant, consumer),
        event_type: row.event_type.clone(),
        content_type: row.content_type.clone(),
        headers: own.chain(headers::decode(&row.headers)).collect(),
        body: row.payload.clone().map(Bytes::from).unwrap_or_default(),
        trace_parent: row.trace_parent.clone(),
    }
}

#[cfg(test)]
mod tests {
    use oncebox_sender::SendStage;

    use super::*;
    use crate::row::fixture::row;

    // What could go wrong: a message that may have arrived passes for one that did not, and is
    // cancelled; or an outage of the network uses up the attempts of messages.
    #[test]
    fn an_error_parks_counts_or_waits_by_its_kind() {
        let endpoint = || "pay.example".to_owned();
        let late = |stage| SendError::TimedOut { endpoint: endpoint(), stage };
        let not_allowed =
            of_error(SendError::HostNotAllowed { endpoint: endpoint(), list: HostList::Tenant });
        let advised = matches!(
            &not_allowed,
            Sent::Parked { reason: OutgoingReason::NotAllowed, error }
                if error.contains("--endpoint-hosts-allowed")
        );
        assert!(advised, "{not_allowed:?}");
        let unconfirmed = of_error(late(SendStage::Answer));
        assert!(
            matches!(unconfirmed, Sent::Failed { reason: OutgoingReason::Unconfirmed, .. }),
            "{unconfirmed:?}"
        );
        for error in [
            late(SendStage::Lookup),
            late(SendStage::Connect),
            SendError::Unreachable { endpoint: endpoint(), why: "refused".to_owned() },
            SendError::Tls { endpoint: endpoint(), why: "expired".to_owned() },
        ] {
            assert!(of_error(error.clone()).is_away().is_some(), "{error:?}");
        }
        assert!(
            of_error(SendError::Broken { endpoint: endpoint(), why: String::new() })
                .is_away()
                .is_none()
        );
    }

    // What could go wrong: the provider has acted, the answer cannot be delivered, and the message
    // passes for one that was never sent, so that a cancel takes it.
    #[test]
    fn an_answer_that_is_not_delivered_was_an_answer_all_the_same() {
        let text = || "the database is away".to_owned();
        let away = of_delivery(Sent::away(OutgoingReason::DestinationAway, text()));
        assert_eq!(away, Sent::failed(OutgoingReason::Failed, text()));
        let odd = of_delivery(Sent::parked(OutgoingReason::Refused, text()));
        assert_eq!(odd, Sent::parked(OutgoingReason::Undecodable, text()));
        assert_eq!(of_delivery(Sent::Lost), Sent::Lost);
        let mark = include_str!("../../inbox/sql/mark_outgoing.sql");
        assert!(
            mark.contains("'http:%' AND coalesce(s.reason, '') = 'undecodable'"),
            "it has arrived"
        );
    }

    #[test]
    fn a_request_is_the_same_with_each_attempt() {
        let row = OutgoingRow { message_id: "cause 1\n".to_owned(), ..row() };
        let request = request_of(&row, ("acme", "orders"));
        assert_eq!((&request.id, request.source.as_str()), (&row.id, "oncebox:acme/orders"));
        assert_eq!(Some(request.body.to_vec()), row.payload);
        let headers: Vec<_> = request
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), std::str::from_utf8(value).unwrap()))
            .collect();
        assert_eq!(
            headers,
            [
                ("ce-time", "2026-03-01T10:20:30.456Z"),
                ("ce-correlationid", "chain-1"),
                ("ce-causationid", "cause%201%0A"),
                ("mine", "1"),
            ]
        );
        let again = OutgoingRow { attempts: 5, epoch: 9, may_have_arrived: true, ..row };
        assert_eq!(request_of(&again, ("acme", "orders")).headers, request.headers);
        let tombstone = OutgoingRow { payload: None, ..again };
        assert!(request_of(&tombstone, ("acme", "orders")).body.is_empty());
    }
}
