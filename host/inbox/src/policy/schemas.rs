//! JSON Schemas of payloads, by event type.
//!
//! Whoever writes a policy is not trusted with the host's time: a schema is bounded in size, refers to nothing outside
//! of itself and never to itself, so that looking at a payload costs at most the schema's size times the payload's.

use std::collections::BTreeMap;

use jsonschema::{PatternOptions, Validator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::message::Message;

/// What payloads of an event type have to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PayloadSchema {
    /// A JSON Schema of draft 2020-12, or of the one that its `$schema` names: JSON as a text, or a table.
    pub json_schema: Value,
}

/// Bytes of a schema, as JSON.
const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Values in a schema whose references are replaced by what they refer to.
const SCHEMA_VALUES_MAX: usize = 20_000;
/// Bytes of a compiled pattern.
const PATTERN_BYTES_MAX: usize = 1 << 20;
/// Bytes of the text that says what is wrong with a payload.
const FAULT_BYTES_MAX: usize = 400;

impl PayloadSchema {
    /// The schema, ready to be looked at.
    pub(super) fn compile(&self) -> Result<Validator, String> {
        let schema = match &self.json_schema {
            Value::String(text) if text.len() > SCHEMA_BYTES_MAX => return Err(too_large()),
            Value::String(text) => serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?,
            value => value.clone(),
        };
        if schema.to_string().len() > SCHEMA_BYTES_MAX {
            return Err(too_large());
        }
        let mut left = SCHEMA_VALUES_MAX;
        bounded(&schema, &schema, &mut Vec::new(), &mut left)?;
        let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
        let compiled = jsonschema::options().offline().with_pattern_options(patterns).build(&schema);
        compiled.map_err(|error| {
            cut(match error.instance_path().as_str() {
                "" => format!("it is no JSON Schema: {error}"),
                path => format!("it is no JSON Schema: at `{path}`: {error}"),
            })
        })
    }
}

fn too_large() -> String {
    format!("it is larger than {} KiB", SCHEMA_BYTES_MAX >> 10)
}

/// Refuse what cannot be looked at within bounds. `within` are the references that are being followed.
fn bounded<'s>(root: &'s Value, value: &'s Value, within: &mut Vec<&'s str>, left: &mut usize) -> Result<(), String> {
    *left = left.checked_sub(1).ok_or("with its references replaced by what they refer to, it is too large")?;
    match value {
        Value::Array(elements) => elements.iter().try_for_each(|element| bounded(root, element, within, left)),
        Value::Object(members) => members.iter().try_for_each(|(key, member)| match (key.as_str(), member) {
            ("$ref", Value::String(reference)) => {
                if within.contains(&reference.as_str()) {
                    return Err(format!("`$ref` \"{reference}\" leads back to itself; schemas of trees cannot be used"));
                }
                let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
                let target = target.ok_or_else(|| format!("`$ref` \"{reference}\" is not within the schema; use `#/$defs/…`"))?;
                within.push(reference);
                bounded(root, target, within, left)?;
                within.pop();
                Ok(())
            }
            ("$dynamicRef" | "$recursiveRef", Value::String(_)) => Err(format!("`{key}` cannot be used")),
            // References would be looked for in what it names.
            ("$id" | "id", Value::String(_)) if !std::ptr::eq(value, root) => Err(format!("`{key}` can only be said of the whole schema")),
            _ => bounded(root, member, within, left),
        }),
        _ => Ok(()),
    }
}

/// The schemas of a policy, compiled.
#[derive(Debug, Default)]
pub(crate) struct Schemas(BTreeMap<String, Result<Validator, String>>);

impl Schemas {
    /// Those of a policy.
    pub(crate) fn new(schemas: &BTreeMap<String, PayloadSchema>) -> Self {
        Self(schemas.iter().map(|(event_type, schema)| (event_type.clone(), schema.compile())).collect())
    }

    /// What is wrong with a message's payload, by the schema of its event type. A tombstone has none.
    pub(crate) fn fault(&self, message: &Message) -> Option<String> {
        let payload = message.record.payload.as_deref().filter(|_| !self.0.is_empty())?;
        let validator = match self.of(&message.event_type)? {
            Ok(validator) => validator,
            // It was accepted, by another version of this program.
            Err(error) => return Some(cut(format!("its schema cannot be used: {error}"))),
        };
        let payload: Value = match serde_json::from_slice(payload) {
            Ok(payload) => payload,
            Err(error) => return Some(format!("it is no JSON, in line {} at {}", error.line(), error.column())),
        };
        let error = validator.validate(&payload).err()?;
        let path = error.instance_path();
        let path = if path.as_str().is_empty() { "/" } else { path.as_str() };
        // Not the value: what is in a payload is nobody's business who reads logs.
        Some(cut(format!("{path}: {}", error.masked()).replace(|c: char| c.is_control(), " ")))
    }

    /// The one that is for an event type: of the same name, else of the longest `prefix.*`, else of `*`.
    fn of(&self, event_type: &str) -> Option<&Result<Validator, String>> {
        let mut prefixes = event_type.match_indices('.').map(|(end, _)| &event_type[..=end]).rev();
        let of_prefix = || prefixes.find_map(|prefix| self.0.get(&format!("{prefix}*")));
        self.0.get(event_type).or_else(of_prefix).or_else(|| self.0.get("*"))
    }
}

fn cut(mut text: String) -> String {
    if text.len() > FAULT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(FAULT_BYTES_MAX));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::message::Record;

    fn fault(schemas: Value, event_type: &str, payload: Option<&str>) -> Option<String> {
        let schemas: BTreeMap<String, PayloadSchema> = serde_json::from_value(schemas).expect("schemas of the test");
        let record = Record {
            topic: "t".into(),
            topic_id: None,
            partition: 0,
            offset: 0,
            timestamp_ms: 0,
            key: None,
            headers: Vec::new(),
            payload: payload.map(|payload| payload.as_bytes().to_vec()),
        };
        let mut message = crate::parking::undecodable(&record, &crate::identity::Undecodable::NoId).message;
        message.event_type = event_type.to_owned();
        Schemas::new(&schemas).fault(&message)
    }

    #[test]
    fn a_payload_is_told_where_it_is_wrong_and_not_what_it_says() {
        let schema = r#"{"type": "object", "required": ["account"], "properties": {"amount": {"type": "integer"}}}"#;
        let schemas = json!({ "orders.placed": { "json_schema": schema } });
        let found = |payload| fault(schemas.clone(), "orders.placed", payload);
        assert_eq!(found(Some(r#"{"account": "a", "amount": 7}"#)), None);
        assert_eq!(found(Some(r#"{"account": "a", "amount": "hunter2"}"#)).as_deref(), Some("/amount: value is not of type \"integer\""));
        assert_eq!(found(Some("{}")).as_deref(), Some("/: \"account\" is a required property"));
        assert_eq!(found(Some("{")).as_deref(), Some("it is no JSON, in line 1 at 1"));
        assert_eq!(found(None), None);
        assert_eq!(fault(schemas, "orders.paid", Some("{")), None);
    }

    #[test]
    fn the_schema_nearest_to_an_event_type_is_its() {
        let wants = |kind: &str| json!({ "json_schema": { "type": kind } });
        let schemas = json!({ "*": wants("null"), "orders.*": wants("string"), "orders.eu.*": wants("boolean"), "orders.eu.placed": wants("object") });
        for (event_type, payload) in [("x", "null"), ("orders.placed", "\"\""), ("orders.eu.paid", "true"), ("orders.eu.placed", "{}")] {
            assert_eq!(fault(schemas.clone(), event_type, Some(payload)), None, "{event_type}");
            assert!(fault(schemas.clone(), event_type, Some("[]")).is_some(), "{event_type}");
        }
    }

    /// What could go wrong: a schema overflows the host's stack, or keeps it busy for ever.
    #[test]
    fn a_schema_that_is_not_bounded_is_refused() {
        let refused = |schema: Value, why: &str| {
            let error = PayloadSchema { json_schema: schema }.compile().expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        refused(json!({ "$ref": "#" }), "leads back to itself");
        refused(
            json!({ "allOf": [{ "$ref": "#/$defs/a" }], "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
            "leads back",
        );
        refused(json!({ "$ref": "https://example.com/schema" }), "is not within the schema");
        refused(json!({ "$defs": { "a": { "$id": "other" } } }), "can only be said of the whole schema");
        refused(json!({ "$dynamicRef": "#a" }), "`$dynamicRef` cannot be used");
        let mut doubling = serde_json::Map::new();
        for n in 0..40 {
            let next = json!({ "$ref": format!("#/$defs/{}", n + 1) });
            doubling.insert(n.to_string(), json!({ "allOf": [next, next] }));
        }
        doubling.insert("40".to_owned(), json!(true));
        refused(json!({ "$ref": "#/$defs/0", "$defs": doubling }), "too large");
        refused(json!("x".repeat(SCHEMA_BYTES_MAX + 1)), "larger than 256 KiB");
        refused(json!("{"), "it is no JSON");
        refused(json!({ "type": "objct" }), "it is no JSON Schema");
        refused(json!({ "pattern": "(a" }), "it is no JSON Schema");
        refused(json!({ "pattern": "(?=a)b" }), "it is no JSON Schema");
        refused(json!({ "pattern": "((a{1000}){1000}){1000}" }), "it is no JSON Schema");
        let twice = json!({ "properties": { "a": { "$ref": "#/$defs/n" }, "b": { "$ref": "#/$defs/n" } }, "$defs": { "n": { "type": "integer" } } });
        PayloadSchema { json_schema: twice }.compile().expect("what is used twice is no loop");
    }
}
