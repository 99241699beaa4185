//! From a verified request to a record, which becomes a message as one of Kafka does.

use axum::http::{HeaderMap, HeaderName};
use bytes::Bytes;
use oncebox_model::{
    policy::{INGRESS_TOPIC, INGRESS_TYPE_HEADER, IngressPolicy},
    record::{Headers, Record},
};

/// Bytes of headers that a message keeps at most.
const HEADERS_BYTES_MAX: usize = 32 << 10;
/// Header of the ordering key, as CloudEvents names it over HTTP.
const KEY_HEADER: &str = "ce-partitionkey";

/// Headers of the connection, or with which someone could ask again in the sender's name. No
/// message keeps them.
const DROPPED: [&str; 22] = [
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "stripe-signature",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
    "webhook-signature",
    "x-hub-signature",
    "x-hub-signature-256",
    "x-real-ip",
    "x-shopify-hmac-sha256",
    "x-slack-signature",
];

/// Headers above the bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadersTooLarge;

/// Returns the record of a request that came at this moment, in microseconds since the Unix epoch.
pub(crate) fn record(
    headers: &HeaderMap,
    body: Bytes,
    ingress: &IngressPolicy,
    now_us: i64,
) -> Result<Record, HeadersTooLarge> {
    let signs_id = ingress.verify.signs_id();
    let kept = headers.iter().filter(|(name, _)| is_kept(name, signs_id));
    let key = headers.get(KEY_HEADER).filter(|_| !signs_id);
    let key = key.map(|value| value.as_bytes().to_vec());
    let mut kept: Headers =
        kept.map(|(name, value)| (recorded(name), value.as_bytes().to_vec())).collect();
    if kept.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > HEADERS_BYTES_MAX
    {
        return Err(HeadersTooLarge);
    }
    if let Some(event_type) = &ingress.event_type {
        kept.push((INGRESS_TYPE_HEADER.to_owned(), event_type.clone().into_bytes()));
    }
    Ok(Record {
        topic: INGRESS_TOPIC.into(),
        topic_id: None,
        partition: 0,
        offset: now_us,
        timestamp_ms: now_us / 1_000,
        key,
        headers: kept,
        payload: Some(body.into()),
    })
}

/// Returns whether a message keeps a header: not one with a name that only the record has, and none
/// of a CloudEvent where the sender `signs_id`: it would say another id than the signed one.
fn is_kept(name: &HeaderName, signs_id: bool) -> bool {
    let name = name.as_str();
    let is_of = |prefix: &str| name.starts_with(prefix);
    !(DROPPED.contains(&name)
        || is_of("x-forwarded-")
        || is_of("ce_")
        || signs_id && is_of("ce-")
        || name == INGRESS_TYPE_HEADER)
}

/// Returns the name of a header in the record: attributes of a CloudEvent as Kafka's binding has
/// them, so that one event has one id over either way.
fn recorded(name: &HeaderName) -> String {
    match name.as_str().strip_prefix("ce-") {
        Some(attribute) => format!("ce_{attribute}"),
        None => name.as_str().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use oncebox_model::{
        PayloadKey,
        identity::{self, Undecodable},
        policy::Policy,
    };

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let parsed = pairs.iter().map(|(name, value)| {
            (HeaderName::try_from(*name).unwrap(), HeaderValue::try_from(*value).unwrap())
        });
        parsed.collect()
    }

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{text}")).unwrap()
    }

    /// Decodes a request by a policy: id, type and key.
    fn decoded(
        text: &str,
        pairs: &[(&str, &str)],
        body: &str,
    ) -> Result<(String, String, Option<Vec<u8>>), Undecodable> {
        let policy = policy(text);
        let ingress = policy.ingress.as_ref().unwrap();
        let body = Bytes::copy_from_slice(body.as_bytes());
        let record = record(&headers(pairs), body, ingress, 1_700_000_000_000_123).unwrap();
        let identity = ingress.identity(&policy.identity);
        let key = PayloadKey::new(&[1; 32]);
        identity::decode(record, &identity, None, None, None, &key)
            .map(|message| (message.id, message.event_type, message.ordering_key))
            .map_err(|(_, fault)| fault)
    }

    fn found(id: &str, event_type: &str) -> Result<(String, String, Option<Vec<u8>>), Undecodable> {
        Ok((id.to_owned(), event_type.to_owned(), None))
    }

    // S0-045. What could go wrong: an event gets another id over HTTP than by Kafka, or each
    // request its own.
    #[test]
    fn a_request_has_the_id_that_its_record_would_have() {
        let bearer = "[ingress]\nverify = 'bearer'\nevent_type = 'order'";
        // S0-045.
        assert_eq!(decoded(bearer, &[("Idempotency-Key", "o-1")], "{}"), found("o-1", "order"));
        assert_eq!(decoded(bearer, &[], "{}"), Err(Undecodable::NoId));
        let bare = "[ingress]\nverify = 'bearer'";
        assert_eq!(decoded(bare, &[("idempotency-key", "o-1")], "{}"), Err(Undecodable::NoType));
        let event = &[("ce-id", "7"), ("ce-source", "/s"), ("ce-type", "paid")];
        assert_eq!(decoded(bearer, event, "{}"), found("/s 7", "paid"));
        let structured = &[("content-type", "application/cloudevents+json")];
        let body = r#"{"id":"7","source":"/s","type":"paid","data":{}}"#;
        assert_eq!(decoded(bearer, structured, body), found("/s 7", "paid"));
        let by_pointer = "[identity]\nid = ['position', {json_pointer = '/id'}]\n[ingress]\nverify \
            = 'bearer'\nevent_type = 'order'";
        assert_eq!(decoded(by_pointer, &[], r#"{"id":"x"}"#), found("x", "order"));
        assert_eq!(
            decoded(by_pointer, &[("idempotency-key", "k")], r#"{"id":"x"}"#),
            found("x", "order"),
            "the policy's own source comes first"
        );
    }

    #[test]
    fn senders_have_their_own_ids_and_types() {
        for (scheme, pairs, body, id, event_type) in [
            (
                "github",
                &[("x-github-delivery", "d-1"), ("x-github-event", "push")][..],
                "{}",
                "d-1",
                "push",
            ),
            (
                "shopify",
                &[("x-shopify-webhook-id", "w-1"), ("x-shopify-topic", "orders/create")],
                "{}",
                "w-1",
                "orders/create",
            ),
            ("stripe", &[], r#"{"id":"evt_1","type":"charge.paid"}"#, "evt_1", "charge.paid"),
            ("slack", &[], r#"{"event_id":"Ev1","event":{"type":"message"}}"#, "Ev1", "message"),
            ("standard_webhooks", &[("webhook-id", "msg_1")], r#"{"type":"a.b"}"#, "msg_1", "a.b"),
        ] {
            let text = format!("[ingress]\nverify = '{scheme}'");
            assert_eq!(decoded(&text, pairs, body), found(id, event_type), "{scheme}");
        }
    }

    // What could go wrong: someone who holds a signed request sends it again under another id.
    #[test]
    fn an_id_beside_the_signed_one_does_not_count() {
        let forged =
            [("ce-id", "2"), ("ce-source", "/s"), ("ce-type", "t"), ("ce-partitionkey", "k")];
        let bodies = r#"{"id":"evt_1","event_id":"evt_1","type":"t","event":{"type":"t"}}"#;
        for (scheme, id, key) in [
            ("standard_webhooks", "msg_1", None),
            ("stripe", "evt_1", None),
            ("slack", "evt_1", None),
            ("github", "/s 2", Some(b"k".to_vec())),
        ] {
            let text = format!("[ingress]\nverify = '{scheme}'");
            let pairs = [&[("webhook-id", "msg_1"), ("x-github-event", "t")][..], &forged].concat();
            let expected = (id.to_owned(), "t".to_owned(), key);
            assert_eq!(decoded(&text, &pairs, bodies), Ok(expected), "{scheme}");
        }
        let raw = [("ce_id", "2"), ("ce_source", "/s"), ("ce_type", "t")];
        let bearer = "[ingress]\nverify = 'bearer'";
        assert_eq!(decoded(bearer, &raw, "{}"), Err(Undecodable::NoType), "names of the record");
    }

    // What could go wrong: a row keeps a credential, or a request sets what the host sets.
    #[test]
    fn credentials_and_the_hosts_own_header_are_not_kept() {
        let sent = headers(&[
            ("authorization", "Bearer s"),
            ("cookie", "s"),
            ("x-hub-signature-256", "sha256=00"),
            ("x-forwarded-for", "192.0.2.1"),
            ("oncebox-event-type", "forged"),
            ("content-type", "text/plain"),
            ("ce-partitionkey", "k"),
            ("x-mine", "1"),
        ]);
        let policy = policy("[ingress]\nverify = 'bearer'\nevent_type = 'order'");
        let record =
            record(&sent, Bytes::from_static(b"x"), policy.ingress.as_ref().unwrap(), 5).unwrap();
        let mut names: Vec<_> = record.headers.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["ce_partitionkey", "content-type", "oncebox-event-type", "x-mine"]);
        assert_eq!(record.header(INGRESS_TYPE_HEADER), Some(&b"order"[..]));
        assert_eq!(record.key.as_deref(), Some(&b"k"[..]));
    }

    #[test]
    fn headers_are_bounded() {
        let policy = policy("[ingress]\nverify = 'bearer'");
        let large = headers(&[("x-mine", &"x".repeat(HEADERS_BYTES_MAX))]);
        let record = record(&large, Bytes::new(), policy.ingress.as_ref().unwrap(), 5);
        assert_eq!(record.map(|_| ()), Err(HeadersTooLarge));
    }
}
