//! The Kafka binding of CloudEvents 1.0, binary and structured mode.
//! <https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md>

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::record::Record;

/// The attributes of an event that a record carries. Every part may be missing.
#[derive(Debug, Default)]
pub(crate) struct CloudEvent {
    pub(crate) id: Option<String>,
    pub(crate) source: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) dataschema: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) trace_parent: Option<String>,
    /// Data of the event exactly as written; only in structured mode.
    pub(crate) data: Option<Vec<u8>>,
    /// Attributes as headers of binary mode; only in structured mode.
    attributes: Option<Vec<(String, Vec<u8>)>>,
}

#[derive(Deserialize)]
struct Structured<'a> {
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    data_base64: Option<String>,
    #[serde(flatten)]
    attributes: BTreeMap<String, Value>,
}

/// Reads a record as an event, in binary or structured mode. Fails where the record claims to be an
/// event and is none.
pub(crate) fn read(record: &Record) -> Result<CloudEvent, String> {
    let content_type = text(record, "content-type");
    if content_type.as_deref().is_some_and(|t| {
        t.trim_start().to_ascii_lowercase().starts_with("application/cloudevents+json")
    }) {
        return structured(record);
    }
    Ok(CloudEvent {
        id: text(record, "ce_id"),
        source: text(record, "ce_source"),
        event_type: text(record, "ce_type"),
        dataschema: text(record, "ce_dataschema"),
        trace_parent: text(record, "ce_traceparent").or_else(|| text(record, "traceparent")),
        content_type,
        ..CloudEvent::default()
    })
}

fn text(record: &Record, name: &str) -> Option<String> {
    std::str::from_utf8(record.header(name)?).ok().map(str::to_owned)
}

fn structured(record: &Record) -> Result<CloudEvent, String> {
    let payload = record.payload.as_deref().ok_or("it has no value")?;
    let event: Structured<'_> =
        serde_json::from_slice(payload).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => "it is not a JSON object of attributes".to_owned(),
            _ => "it is not JSON".to_owned(),
        })?;
    let data = match (&event.data, &event.data_base64) {
        (_, Some(base64)) => {
            Some(STANDARD.decode(base64).map_err(|_| "`data_base64` is not base64")?)
        }
        (Some(raw), None) if raw.get() == "null" => None,
        (Some(raw), None) => Some(raw.get().as_bytes().to_vec()),
        (None, None) => None,
    };
    let attribute = |name: &str| event.attributes.get(name).and_then(attribute_text);
    Ok(CloudEvent {
        id: attribute("id"),
        source: attribute("source"),
        event_type: attribute("type"),
        dataschema: attribute("dataschema"),
        content_type: attribute("datacontenttype").or_else(|| Some("application/json".to_owned())),
        trace_parent: attribute("traceparent").or_else(|| text(record, "traceparent")),
        data: Some(data.unwrap_or_default()),
        attributes: Some(as_headers(&event.attributes)),
    })
}

fn as_headers(attributes: &BTreeMap<String, Value>) -> Vec<(String, Vec<u8>)> {
    let headers =
        attributes.iter().filter_map(|(name, value)| Some((name, attribute_text(value)?)));
    headers.map(|(name, value)| (format!("ce_{name}"), value.into_bytes())).collect()
}

fn attribute_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

impl CloudEvent {
    /// Returns `source` and `id` together, which identify an event; none where one is missing. The
    /// specification wants neither empty: then the result is empty, and no valid id.
    pub(crate) fn identity(&self) -> Option<String> {
        match (self.source.as_deref()?, self.id.as_deref()?) {
            ("", _) | (_, "") => Some(String::new()),
            // A URI has no space. A source that has one must not run into the id.
            (source, id) => Some(format!("{} {id}", source.replace(' ', "%20"))),
        }
    }

    /// Converts the record to binary mode, whichever mode it came in.
    pub(crate) fn unfold(self, mut record: Record) -> Record {
        if let Some(attributes) = self.attributes {
            record.headers.extend(attributes);
            record.payload = self.data;
        }
        record
    }
}
