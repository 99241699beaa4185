//! The headers of a record, and of a message in an inbox: those of CloudEvents in binary mode, then
//! those of the handler.

use chrono::SecondsFormat;
use oncebox_model::{headers, record::Headers};

use crate::row::OutgoingRow;

/// Returns the headers of an outgoing message. Those that a handler may not set come first, and the
/// host refuses a handler's header of such a name when it emits.
pub(crate) fn record_headers(row: &OutgoingRow, tenant: &str, consumer: &str) -> Headers {
    let time = row.created_at.to_rfc3339_opts(SecondsFormat::Millis, true);
    let fixed = [
        ("ce_specversion", "1.0".to_owned()),
        ("ce_id", row.id.clone()),
        ("ce_source", source(tenant, consumer)),
        ("ce_type", row.event_type.clone()),
        ("ce_time", time),
        ("ce_correlationid", row.correlation_id.clone()),
        ("ce_causationid", row.message_id.clone()),
    ];
    let optional = [("content-type", &row.content_type), ("traceparent", &row.trace_parent)];
    let optional = optional.into_iter().filter_map(|(name, value)| Some((name, value.clone()?)));
    let named = fixed.into_iter().chain(optional);
    let mut all: Headers =
        named.map(|(name, value)| (name.to_owned(), value.into_bytes())).collect();
    all.extend(headers::decode(&row.headers));
    all
}

/// Returns the source of an outgoing message: the consumer whose handler emitted it.
pub(crate) fn source(tenant: &str, consumer: &str) -> String {
    format!("oncebox:{tenant}/{consumer}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::fixture::row;

    fn shown(row: &OutgoingRow) -> Vec<(String, String)> {
        let headers = record_headers(row, "acme", "orders");
        let text = |value: Vec<u8>| String::from_utf8(value).unwrap();
        headers.into_iter().map(|(name, value)| (name, text(value))).collect()
    }

    // What could go wrong: a receiver gets no id to deduplicate by, or another one with each
    // attempt, or a header of the handler hides one of the host.
    #[test]
    fn a_record_says_what_it_is_and_what_caused_it() {
        let row = row();
        let expected = [
            ("ce_specversion", "1.0"),
            ("ce_id", row.id.as_str()),
            ("ce_source", "oncebox:acme/orders"),
            ("ce_type", "order.paid"),
            ("ce_time", "2026-03-01T10:20:30.456Z"),
            ("ce_correlationid", "chain-1"),
            ("ce_causationid", "cause-1"),
            ("content-type", "application/json"),
            ("mine", "1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(shown(&row), expected);
        let again = OutgoingRow { attempts: 5, epoch: 9, ..row.clone() };
        assert_eq!(shown(&again), shown(&row), "a retry sends the same record");
    }

    #[test]
    fn what_the_message_lacks_has_no_header() {
        let bare = OutgoingRow { content_type: None, headers: Vec::new(), ..row() };
        let traced = OutgoingRow { trace_parent: Some("00-ab-cd-01".to_owned()), ..bare.clone() };
        assert_eq!(shown(&bare).len(), 7);
        let last = shown(&traced).pop();
        assert_eq!(last, Some(("traceparent".to_owned(), "00-ab-cd-01".to_owned())));
    }
}
