//! The wire format, and compiled schemas of all formats.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{Fault, Format, RegisteredSchema, avro, json, protobuf, registry};

/// A payload as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded {
    /// Compact JSON. With a JSON Schema, the JSON as it was sent.
    pub json: Vec<u8>,
    /// Schema id of the payload.
    pub schema_id: u32,
    /// Full name of the Avro record or the Protobuf message. For an Avro union, the name of the
    /// branch in the payload.
    pub name: Option<String>,
}

/// Splits a payload into its schema id and its body.
pub(crate) fn split(payload: &[u8]) -> Result<(u32, &[u8]), Fault> {
    match payload {
        [0, a, b, c, d, body @ ..] => Ok((u32::from_be_bytes([*a, *b, *c, *d]), body)),
        [] | [0, ..] => Err(Fault::TooShort),
        _ => Err(Fault::NotInWireFormat),
    }
}

/// A compiled schema, by which payloads are decoded.
#[derive(Debug)]
pub(crate) enum CompiledSchema {
    Avro(avro::AvroSchema),
    Protobuf(protobuf::ProtobufSchema),
    Json,
}

impl CompiledSchema {
    /// Compiles a schema. The error is the reason for which it cannot be used. The call blocks, for
    /// up to a second.
    pub(crate) fn new(schema: &RegisteredSchema) -> Result<Self, String> {
        check_sizes(schema)?;
        // Third-party parsers read hostile text here, and may panic.
        let compiled = catch_unwind(|| match schema.format {
            Format::Avro => {
                avro::AvroSchema::parse(&schema.text, &schema.references).map(Self::Avro)
            }
            Format::Protobuf => protobuf::ProtobufSchema::parse(&schema.text, &schema.references)
                .map(Self::Protobuf),
            Format::Json => Ok(Self::Json),
        });
        let odd = |_| Err("it cannot be read".to_owned());
        compiled
            .unwrap_or_else(odd)
            .map_err(|why| format!("it is no {} schema: {why}", schema.format))
    }

    /// Decodes the body of a payload and returns its JSON, with the name of its type.
    pub(crate) fn decode(&self, body: &[u8]) -> Result<(Vec<u8>, Option<String>), String> {
        match self {
            Self::Avro(schema) => schema.decode(body),
            Self::Protobuf(schema) => {
                let decoded = catch_unwind(AssertUnwindSafe(|| schema.decode(body)));
                decoded
                    .unwrap_or_else(|_| Err("it cannot be read".to_owned()))
                    .map(|(json, name)| (json, Some(name)))
            }
            Self::Json => json::check(body).map(|()| (body.to_vec(), None)),
        }
    }
}

fn check_sizes(schema: &RegisteredSchema) -> Result<(), String> {
    let texts =
        || std::iter::once(&schema.text).chain(schema.references.iter().map(|(_, text)| text));
    if texts().any(|text| text.len() > registry::TEXT_BYTES_MAX) {
        return Err(format!(
            "it is larger than {} KiB, or one that it refers to is",
            registry::TEXT_BYTES_MAX >> 10
        ));
    }
    if texts().map(String::len).sum::<usize>() > registry::TEXTS_BYTES_MAX {
        return Err(format!(
            "with what it refers to it is larger than {} KiB",
            registry::TEXTS_BYTES_MAX >> 10
        ));
    }
    if schema.references.len() > registry::REFERENCES_MAX {
        return Err(format!("it refers to more than {} schemas", registry::REFERENCES_MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pseudo-random generator (xorshift64) with a fixed seed in each test.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        /// Returns random bytes, most of them small, as lengths and field numbers are.
        fn bytes(&mut self) -> Vec<u8> {
            let length = self.next() % if self.next().is_multiple_of(2) { 8 } else { 64 };
            (0..length)
                .map(|_| self.next())
                .map(|n| if n & 0x700 == 0 { n as u8 } else { n as u8 % 16 / 2 })
                .collect()
        }
    }

    const AVRO: &str = r#"{"type":"record","name":"R","fields":[
        {"name":"a","type":["null","R","int",{"type":"array","items":["R","null","long"]}]},
        {"name":"b","type":{"type":"map","values":["string","double","boolean",
            {"type":"bytes","logicalType":"decimal","precision":9,"scale":3},
            {"type":"enum","name":"E","symbols":["A","B"]},{"type":"fixed","name":"F","size":2}]}}]}"#;
    const PROTOBUF: &str = r#"syntax = "proto3";
        import "google/protobuf/any.proto";
        import "google/protobuf/struct.proto";
        import "google/protobuf/wrappers.proto";
        import "google/protobuf/timestamp.proto";
        import "google/protobuf/field_mask.proto";
        message M { M m = 1; repeated M n = 2; map<int32, M> o = 3; google.protobuf.Any p = 4; google.protobuf.Value q = 5;
            google.protobuf.DoubleValue r = 6; google.protobuf.Timestamp s = 7; google.protobuf.FieldMask t = 8;
            repeated sint64 u = 9; oneof w { string x = 10; bytes y = 11; fixed32 z = 12; } enum E { A = 0; } E e = 13; }"#;

    fn compile(format: Format, text: &str) -> CompiledSchema {
        CompiledSchema::new(&RegisteredSchema {
            format,
            text: text.to_owned(),
            references: Vec::new(),
        })
        .expect("a schema of the test")
    }

    #[test]
    fn whatever_the_bytes_are_there_is_an_answer() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for schema in [
            compile(Format::Avro, AVRO),
            compile(Format::Protobuf, PROTOBUF),
            compile(Format::Json, "{}"),
        ] {
            let mut decoded = 0;
            for _ in 0..20_000 {
                let mut payload = random.bytes();
                match &schema {
                    CompiledSchema::Avro(_) => {}
                    CompiledSchema::Protobuf(_) => {
                        payload.iter_mut().take(1).for_each(|index| *index = 0)
                    }
                    CompiledSchema::Json => payload
                        .iter_mut()
                        .for_each(|byte| *byte = b"[]{}\",: 1e-\\untrue"[usize::from(*byte) % 18]),
                }
                // `CompiledSchema::decode` would hide a panic.
                let answer = match &schema {
                    CompiledSchema::Avro(schema) => schema.decode(&payload).map(|(json, _)| json),
                    CompiledSchema::Protobuf(schema) => {
                        schema.decode(&payload).map(|(json, _)| json)
                    }
                    CompiledSchema::Json => schema.decode(&payload).map(|(json, _)| json),
                };
                let Ok(json) = answer else { continue };
                decoded += 1;
                serde_json::from_slice::<serde_json::Value>(&json).expect("what decodes is JSON");
            }
            assert!(decoded > 10, "{decoded} of {schema:?} decode");
        }
    }

    #[test]
    fn whatever_a_schema_is_there_is_an_answer() {
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        for (format, text) in [(Format::Avro, AVRO), (Format::Protobuf, PROTOBUF)] {
            for _ in 0..5_000 {
                let mut text = text.as_bytes().to_vec();
                for _ in 0..1 + random.next() % 4 {
                    let (from, to) =
                        (random.next() as usize % text.len(), random.next() as usize % text.len());
                    match random.next() % 3 {
                        0 => text[to] = text[from],
                        1 => drop(text.remove(from)),
                        _ => text.extend_from_within(from.min(to)..from.max(to)),
                    }
                }
                let text = String::from_utf8(text).expect("of ASCII");
                let answer = match format {
                    Format::Avro => avro::AvroSchema::parse(&text, &[]).map(CompiledSchema::Avro),
                    _ => protobuf::ProtobufSchema::parse(&text, &[]).map(CompiledSchema::Protobuf),
                };
                if let Ok(schema) = answer {
                    let _ = schema.decode(&random.bytes());
                }
            }
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let found = |text: usize, references: &[usize]| {
            let references =
                references.iter().map(|size| (String::new(), " ".repeat(*size))).collect();
            check_sizes(&RegisteredSchema {
                format: Format::Avro,
                text: " ".repeat(text),
                references,
            })
        };
        assert_eq!(found(256 << 10, &[256 << 10; 3]), Ok(()));
        assert_eq!(
            found((256 << 10) + 1, &[]),
            Err("it is larger than 256 KiB, or one that it refers to is".to_owned())
        );
        assert_eq!(
            found(1, &[(256 << 10) + 1]),
            Err("it is larger than 256 KiB, or one that it refers to is".to_owned())
        );
        assert_eq!(
            found(1, &[256 << 10; 4]),
            Err("with what it refers to it is larger than 1024 KiB".to_owned())
        );
        assert_eq!(found(1, &[1; 33]), Err("it refers to more than 32 schemas".to_owned()));
    }
}
