//! JSON Schemas of payloads, by event type.
//!
//! The author of a policy is not trusted with the host's time. A schema is bounded in size, and
//! refers to nothing outside of itself and never to itself. Checking a payload therefore costs at
//! most the schema's size times the payload's.

use std::collections::BTreeMap;

use jsonschema::{PatternOptions, Validator, error::ValidationErrorKind as Kind};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::message::Message;

/// The schema that payloads of an event type must match.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PayloadSchema {
    /// JSON Schema of draft 2020-12, or of the draft that its `$schema` names: JSON as a text, or a
    /// table.
    pub json_schema: Value,
}

/// Maximum bytes of a schema, as JSON.
const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Maximum number of values in a schema whose references are replaced by their targets.
const SCHEMA_VALUES_MAX: usize = 5_000;
/// Deepest nesting of values in such a schema.
const DEPTH_MAX: usize = 128;
/// Maximum number of schemas of a policy.
const SCHEMAS_MAX: usize = 32;
/// Maximum number of patterns of a schema, and of all schemas of a policy together.
const PATTERNS_MAX: usize = 64;
/// Maximum number of values of all schemas of a policy together, references replaced.
const VALUES_MAX: usize = 20_000;
/// Maximum bytes of all schemas of a policy together, as JSON.
const BYTES_MAX: usize = 1 << 20;
/// Greatest product of a payload's bytes and its schema's values.
const COST_MAX: usize = 1 << 31;
/// Maximum bytes of a payload whose fault is located: locating it copies parts of the payload, once
/// for each branch.
const TOLD_BYTES_MAX: usize = 32 << 10;
/// Maximum bytes of a compiled pattern.
const PATTERN_BYTES_MAX: usize = 1 << 20;
/// Maximum bytes of the text that describes a payload's fault.
const FAULT_BYTES_MAX: usize = 400;

impl PayloadSchema {
    /// Returns the schema, with the cost of compiling it.
    fn measured(&self) -> Result<(Value, SchemaCost), String> {
        let schema = match &self.json_schema {
            Value::String(text) if text.len() > SCHEMA_BYTES_MAX => return Err(too_large()),
            Value::String(text) => {
                serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?
            }
            value => value.clone(),
        };
        let text = schema.to_string();
        if text.len() > SCHEMA_BYTES_MAX {
            return Err(too_large());
        }
        let mut walk = Walk {
            root: &schema,
            within: Vec::new(),
            depth: 0,
            values: 0,
            patterns: 0,
            unevaluated: false,
        };
        walk.check(&schema, SchemaPart::Schema)?;
        let cost = SchemaCost { bytes: text.len(), values: walk.values, patterns: walk.patterns };
        Ok((schema, cost))
    }

    /// Compiles the schema.
    fn compile(&self) -> Result<SchemaValidator, String> {
        let (schema, SchemaCost { values, .. }) = self.measured()?;
        let text = schema.to_string();
        let patterns =
            PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
        let compiled =
            jsonschema::options().offline().with_pattern_options(patterns).build(&schema);
        match compiled {
            Ok(validator) => Ok(SchemaValidator { validator, values, text }),
            Err(error) => Err(cut(match error.instance_path().as_str() {
                "" => format!("it is no JSON Schema: {error}"),
                path => format!("it is no JSON Schema: at `{path}`: {error}"),
            })),
        }
    }
}

/// The cost of compiling a schema, known before.
#[derive(Debug, Clone, Copy, Default)]
struct SchemaCost {
    bytes: usize,
    values: usize,
    patterns: usize,
}

/// Returns the faults of a policy's schemas, by event type; the event type is empty for a fault of
/// all schemas together. Compiles them only where each one, and all together, stay within their
/// bounds.
pub(super) fn faults(schemas: &BTreeMap<String, PayloadSchema>) -> Vec<(String, String)> {
    let of = |event_type: &String, fault: String| (event_type.clone(), fault);
    if schemas.len() > SCHEMAS_MAX {
        return vec![(
            String::new(),
            format!("there are {}; at most {SCHEMAS_MAX} can be looked at", schemas.len()),
        )];
    }
    let (mut found, mut sum) = (Vec::new(), SchemaCost::default());
    for (event_type, schema) in schemas {
        match schema.measured() {
            Ok((_, SchemaCost { bytes, values, patterns })) => {
                sum = SchemaCost {
                    bytes: sum.bytes + bytes,
                    values: sum.values + values,
                    patterns: sum.patterns + patterns,
                };
            }
            Err(fault) => found.push(of(event_type, fault)),
        }
    }
    for (what, has, most) in [
        ("bytes", sum.bytes, BYTES_MAX),
        ("values", sum.values, VALUES_MAX),
        ("patterns", sum.patterns, PATTERNS_MAX),
    ] {
        if has > most {
            found.push((
                String::new(),
                format!("together they have {has} {what}, and may have at most {most}"),
            ));
        }
    }
    if found.is_empty() {
        found.extend(
            schemas
                .iter()
                .filter_map(|(event_type, schema)| Some(of(event_type, schema.compile().err()?))),
        );
    }
    found
}

fn too_large() -> String {
    format!("it is larger than {} KiB", SCHEMA_BYTES_MAX >> 10)
}

/// Keywords whose value is data, and no schema.
const DATA: [&str; 5] = ["const", "default", "enum", "example", "examples"];
/// Keywords whose value holds schemas under names of its own.
const NAMED: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];

/// Keywords whose value is a schema, or a list of them.
const OF_SCHEMAS: [&str; 18] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
    "disallow",
];

/// Keywords whose effect depends on other keywords of their schema.
const UNEVALUATED: [&str; 2] = ["unevaluatedProperties", "unevaluatedItems"];
/// Keywords whose schemas apply to the value that the keyword itself applies to.
const IN_PLACE: [&str; 10] = [
    "$ref",
    "allOf",
    "anyOf",
    "dependencies",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "oneOf",
    "then",
];

/// The kind of a value within a schema.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SchemaPart {
    Schema,
    /// Schemas by name.
    Schemas,
    /// A value of unknown kind, to which a reference may lead.
    Unknown,
}

/// A walk through a schema as a payload takes it, each reference replaced by its target.
struct Walk<'s> {
    root: &'s Value,
    /// References that are being followed.
    within: Vec<&'s str>,
    depth: usize,
    values: usize,
    patterns: usize,
    /// True where a surrounding schema for this value has `unevaluatedProperties` or
    /// `unevaluatedItems`.
    unevaluated: bool,
}

impl<'s> Walk<'s> {
    /// Refuses a schema that no payload can be checked against within bounds.
    fn check(&mut self, value: &'s Value, place: SchemaPart) -> Result<(), String> {
        self.values += 1;
        if self.values > SCHEMA_VALUES_MAX {
            return Err(format!(
                "with its references replaced by what they refer to, it has more than \
                    {SCHEMA_VALUES_MAX} values"
            ));
        }
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!(
                "with its references replaced by what they refer to, it is nested more than \
                    {DEPTH_MAX} deep"
            ));
        }
        match value {
            Value::Array(elements) => elements.iter().try_for_each(|element| {
                // `allOf` and its like; also `items` of older drafts.
                self.check(element, place)
            })?,
            Value::Object(members) => {
                let around = self.unevaluated;
                if place == SchemaPart::Schema
                    && UNEVALUATED.iter().any(|keyword| members.contains_key(*keyword))
                {
                    if around {
                        return Err("`unevaluatedProperties` and `unevaluatedItems` cannot be \
                            within each other for one value"
                            .to_owned());
                    }
                    self.unevaluated = true;
                }
                for (key, member) in members {
                    // Members and elements of a payload are other values: for them the state starts
                    // as false.
                    let here = self.unevaluated;
                    self.unevaluated &=
                        place != SchemaPart::Schema || IN_PLACE.contains(&key.as_str());
                    self.check_member(value, key, member, place)?;
                    self.unevaluated = here;
                }
                self.unevaluated = around;
            }
            _ => {}
        }
        self.depth -= 1;
        Ok(())
    }

    fn check_member(
        &mut self,
        of: &'s Value,
        key: &'s str,
        member: &'s Value,
        place: SchemaPart,
    ) -> Result<(), String> {
        match (key, member) {
            _ if place == SchemaPart::Schemas => self.check(member, SchemaPart::Schema),
            ("pattern", Value::String(_)) => self.count_patterns(1),
            ("patternProperties", Value::Object(members)) => {
                self.count_patterns(members.len())?;
                self.check(member, SchemaPart::Schemas)
            }
            ("$ref", Value::String(reference)) => self.follow(reference),
            ("$dynamicRef" | "$recursiveRef", Value::String(_)) => {
                Err(format!("`{key}` cannot be used"))
            }
            // The validator would look for references in the schema that it names.
            ("$id" | "id", Value::String(_))
                if place == SchemaPart::Schema && !std::ptr::eq(of, self.root) =>
            {
                Err(format!("`{key}` can only be said of the whole schema"))
            }
            _ if place == SchemaPart::Schema && DATA.contains(&key) => Ok(()),
            (_, Value::Object(_)) if place == SchemaPart::Schema && NAMED.contains(&key) => {
                self.check(member, SchemaPart::Schemas)
            }
            _ if place == SchemaPart::Schema && OF_SCHEMAS.contains(&key) => {
                self.check(member, SchemaPart::Schema)
            }
            _ => self.check(member, SchemaPart::Unknown),
        }
    }

    fn count_patterns(&mut self, more: usize) -> Result<(), String> {
        self.patterns += more;
        if self.patterns > PATTERNS_MAX {
            Err(format!("it has more than {PATTERNS_MAX} patterns"))
        } else {
            Ok(())
        }
    }

    fn follow(&mut self, reference: &'s str) -> Result<(), String> {
        if self.within.contains(&reference) {
            return Err(format!(
                "`$ref` \"{reference}\" leads back to itself; schemas of trees cannot be used"
            ));
        }
        // An escaped reference would have to be read exactly as the validator reads it.
        let target = reference
            .strip_prefix('#')
            .filter(|pointer| !pointer.contains('%'))
            .and_then(|pointer| self.root.pointer(pointer));
        let target = target.ok_or_else(|| {
            format!("`$ref` \"{reference}\" is not within the schema; use `#/$defs/…`")
        })?;
        self.within.push(reference);
        self.check(target, SchemaPart::Schema)?;
        self.within.pop();
        Ok(())
    }
}

/// The compiled schemas of a policy. Compiling them occupies a processor for a while.
#[derive(Debug, Default)]
pub struct Schemas(BTreeMap<String, Result<SchemaValidator, String>>);

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct SchemaValidator {
    validator: Validator,
    /// Number of the schema's values, references replaced.
    values: usize,
    /// The schema as JSON, to tell which names of a payload are the schema's own.
    text: String,
}

impl Schemas {
    /// Compiles the schemas of a policy.
    pub fn new(schemas: &BTreeMap<String, PayloadSchema>) -> Self {
        Self(
            schemas
                .iter()
                .map(|(event_type, schema)| (event_type.clone(), schema.compile()))
                .collect(),
        )
    }

    /// Returns the fault of a message's payload, by the schema of its event type; none where it is
    /// valid. A tombstone has no fault.
    pub fn fault(&self, message: &Message) -> Option<String> {
        let payload = message.body().filter(|_| !self.0.is_empty())?;
        let schema = match self.of(&message.event_type)? {
            Ok(schema) => schema,
            // The schema was accepted by another version of this program.
            Err(error) => return Some(cut(format!("its schema cannot be used: {error}"))),
        };
        if payload.len().saturating_mul(schema.values) > COST_MAX {
            return Some(format!(
                "it has {} bytes, which is too much for a schema of {} values",
                payload.len(),
                schema.values
            ));
        }
        let bytes = payload.len();
        let payload: Value = match serde_json::from_slice(payload) {
            Ok(payload) => payload,
            Err(error) => {
                return Some(format!(
                    "it is no JSON, in line {} at {}",
                    error.line(),
                    error.column()
                ));
            }
        };
        if schema.validator.is_valid(&payload) {
            return None;
        }
        if bytes > TOLD_BYTES_MAX {
            return Some("it is not valid".to_owned());
        }
        schema.validator.validate(&payload).err().map(|error| schema.tell(&error))
    }

    /// Returns the schema for an event type: of exactly this name, else of the longest `prefix.*`,
    /// else of `*`.
    fn of(&self, event_type: &str) -> Option<&Result<SchemaValidator, String>> {
        let mut prefixes = event_type.match_indices('.').map(|(end, _)| &event_type[..=end]).rev();
        let of_prefix = || prefixes.find_map(|prefix| self.0.get(&format!("{prefix}*")));
        self.0.get(event_type).or_else(of_prefix).or_else(|| self.0.get("*"))
    }
}

impl SchemaValidator {
    /// Describes where and how a payload is wrong, in the schema's words, since a payload's data
    /// must not appear in logs. Shows only names of members that the schema contains.
    fn tell(&self, error: &jsonschema::ValidationError<'_>) -> String {
        let known = |name: &str| self.text.contains(&Value::from(name).to_string());
        let step = |step: &str| {
            let name = step.replace("~1", "/").replace("~0", "~");
            let is_index = !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit());
            if is_index || known(&name) { step.to_owned() } else { "*".to_owned() }
        };
        let path = error
            .instance_path()
            .as_str()
            .split('/')
            .skip(1)
            .map(step)
            .collect::<Vec<_>>()
            .join("/");
        let what = match error.kind() {
            Kind::PropertyNames { .. } => "a name of a member is not valid".to_owned(),
            Kind::AdditionalProperties { .. } | Kind::UnevaluatedProperties { .. } => {
                "there are members that must not be there".to_owned()
            }
            _ => error.masked().to_string(),
        };
        cut(format!("/{path}: {what}").replace(|c: char| c.is_control(), " "))
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
    use crate::{payload_key::PayloadKey, record::Record};

    fn fault(schemas: Value, event_type: &str, payload: Option<&str>) -> Option<String> {
        let schemas: BTreeMap<String, PayloadSchema> =
            serde_json::from_value(schemas).expect("schemas of the test");
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
        let mut message = Message::undecodable(&record, &PayloadKey::new(&[1; 32]));
        message.event_type = event_type.to_owned();
        Schemas::new(&schemas).fault(&message)
    }

    #[test]
    fn a_payload_is_told_where_it_is_wrong_and_not_what_it_says() {
        let schema = r#"{"type": "object", "required": ["account"], "properties": {"amount": {"type": "integer"}}}"#;
        let schemas = json!({ "orders.placed": { "json_schema": schema } });
        let found = |payload| fault(schemas.clone(), "orders.placed", payload);
        assert_eq!(found(Some(r#"{"account": "a", "amount": 7}"#)), None);
        assert_eq!(
            found(Some(r#"{"account": "a", "amount": "hunter2"}"#)).as_deref(),
            Some("/amount: value is not of type \"integer\"")
        );
        assert_eq!(found(Some("{}")).as_deref(), Some("/: \"account\" is a required property"));
        assert_eq!(found(Some("{")).as_deref(), Some("it is no JSON, in line 1 at 1"));
        assert_eq!(found(None), None);
        assert_eq!(fault(schemas, "orders.paid", Some("{")), None);
    }

    #[test]
    fn names_that_are_data_are_not_told() {
        let schema = json!({ "type": "object", "properties": { "accounts": { "additionalProperties": { "type": "integer" } } },
            "additionalProperties": false });
        let found = |payload: &str| {
            fault(json!({ "*": { "json_schema": schema } }), "t", Some(payload)).expect("not valid")
        };
        assert_eq!(
            found(r#"{"accounts": {"alice@example.com": "hunter2"}}"#),
            "/accounts/*: value is not of type \"integer\""
        );
        assert_eq!(
            found(r#"{"alice@example.com": 1}"#),
            "/: there are members that must not be there"
        );
        let names =
            json!({ "*": { "json_schema": { "propertyNames": { "pattern": "^[a-z]+$" } } } });
        assert_eq!(
            fault(names, "t", Some(r#"{"Alice": 1}"#)).as_deref(),
            Some("/: a name of a member is not valid")
        );
        let long = format!(r#"{{"accounts": 1, "x": "{}"}}"#, "x".repeat(TOLD_BYTES_MAX));
        assert_eq!(found(&long), "it is not valid");
        let costly = json!({ "*": { "json_schema": { "allOf": vec![true; 4_000] } } });
        let costly = fault(costly, "t", Some(&format!("[{}1]", "1,".repeat(300_000))));
        assert!(costly.is_some_and(|fault| fault.contains("too much for a schema")));
    }

    #[test]
    fn the_schema_nearest_to_an_event_type_is_its() {
        let wants = |kind: &str| json!({ "json_schema": { "type": kind } });
        let schemas = json!({ "*": wants("null"), "orders.*": wants("string"), "orders.eu.*": wants("boolean"), "orders.eu.placed": wants("object") });
        for (event_type, payload) in [
            ("x", "null"),
            ("orders.placed", "\"\""),
            ("orders.eu.paid", "true"),
            ("orders.eu.placed", "{}"),
        ] {
            assert_eq!(fault(schemas.clone(), event_type, Some(payload)), None, "{event_type}");
            assert!(fault(schemas.clone(), event_type, Some("[]")).is_some(), "{event_type}");
        }
    }

    /// Checks the bounds: a schema could overflow the host's stack, or keep it busy for ever.
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
        refused(
            json!({ "$defs": { "a": { "$id": "other" } } }),
            "can only be said of the whole schema",
        );
        refused(json!({ "$dynamicRef": "#a" }), "`$dynamicRef` cannot be used");
        let mut doubling = serde_json::Map::new();
        for n in 0..40 {
            let next = json!({ "$ref": format!("#/$defs/{}", n + 1) });
            doubling.insert(n.to_string(), json!({ "allOf": [next, next] }));
        }
        doubling.insert("40".to_owned(), json!(true));
        refused(json!({ "$ref": "#/$defs/0", "$defs": doubling }), "more than 5000 values");
        let mut unevaluated = json!({});
        for _ in 0..40 {
            unevaluated = json!({ "anyOf": [unevaluated], "unevaluatedProperties": false });
        }
        refused(unevaluated, "cannot be within each other");
        let referred = json!({ "$ref": "#/$defs/a", "unevaluatedItems": false, "$defs": { "a": { "unevaluatedProperties": false } } });
        refused(referred, "cannot be within each other");
        let patterns: serde_json::Map<_, _> =
            (0..65).map(|n| (n.to_string(), json!({ "pattern": n.to_string() }))).collect();
        refused(json!({ "properties": patterns }), "more than 64 patterns");
        refused(json!("x".repeat(SCHEMA_BYTES_MAX + 1)), "larger than 256 KiB");
        refused(json!("{"), "it is no JSON");
        refused(json!({ "type": "objct" }), "it is no JSON Schema");
        refused(json!({ "pattern": "(a" }), "it is no JSON Schema");
        refused(json!({ "pattern": "(?=a)b" }), "it is no JSON Schema");
        refused(json!({ "pattern": "((a{1000}){1000}){1000}" }), "it is no JSON Schema");
        // A circle that is hidden from the check and not from the validator.
        refused(
            json!({ "$ref": "#/$defs/a%41", "$defs": { "a%41": true, "aA": { "$ref": "#/$defs/a%41" } } }),
            "is not within the schema",
        );
        for hidden in ["default", "$ref", "properties", "dependencies"] {
            for named in NAMED {
                refused(
                    json!({ named: { hidden: { "not": { "$ref": "#" } } } }),
                    "leads back to itself",
                );
            }
        }
        refused(
            json!({ "$ref": "#/default", "default": { "$ref": "#/default" } }),
            "leads back to itself",
        );
        let chain = (0..5_000)
            .map(|n| (format!("{n:04}"), json!({ "$ref": format!("#/$defs/{:04}", n + 1) })));
        refused(
            json!({ "$defs": chain.collect::<serde_json::Map<_, _>>() }),
            "nested more than 128 deep",
        );

        let inner = json!({ "properties": { "a": { "unevaluatedProperties": false } }, "unevaluatedProperties": false });
        PayloadSchema { json_schema: inner }.compile().expect("of another value");
        let data = json!({ "examples": [{ "id": "a", "$ref": "x" }], "const": { "$id": "b" }, "enum": [{ "id": "c" }], "properties": { "id": { "type": "string" } } });
        PayloadSchema { json_schema: data }.compile().expect("data is no schema");
        let twice = json!({ "properties": { "a": { "$ref": "#/$defs/n" }, "b": { "$ref": "#/$defs/n" } }, "$defs": { "n": { "type": "integer" } } });
        PayloadSchema { json_schema: twice }.compile().expect("what is used twice is no loop");
    }
}
