//! Payloads in the wire format of a schema registry, as JSON.
//!
//! A payload begins with a byte 0 and four bytes of a schema's id, big-endian. A message by that
//! schema follows ([wire format]). [`Decoder::prepare`] fetches each schema once and keeps it; it
//! is the only function that waits. [`Decoder::decode`] only computes.
//!
//! The JSON is the simplest form that loses nothing, so that a JSON pointer finds every value:
//!
//! | Avro | JSON |
//! | --- | --- |
//! | `null`, `boolean` | `null`, `true` or `false` |
//! | `int`, `long` | an integer, exact, also beyond 2^53 |
//! | `float`, `double` | a number; `"NaN"`, `"Infinity"`, `"-Infinity"` |
//! | `string`, `enum` | a string, the symbol |
//! | `bytes`, `fixed` | base64 |
//! | `array`; `map`, `record` | an array; an object |
//! | union | the value alone, without the name of its branch |
//! | logical type `decimal` | its digits as a string, with its whole scale: `"-12.30"` |
//! | `uuid` | a string |
//! | `date`, `time-…`, `timestamp-…`, `local-timestamp-…` | the integer beneath |
//! | `duration` | `{"months": …, "days": …, "millis": …}` |
//! | other logical types | as the type beneath |
//!
//! | Protobuf | JSON |
//! | --- | --- |
//! | message | [its canonical JSON][protobuf json]: names in lowerCamelCase, 64-bit integers as strings, enums as names, bytes in base64, well-known types in the form given there |
//! | fields without presence | present, also with their default value: `0`, `""`, `[]` |
//! | fields with presence (`optional`, messages, members of a `oneof`) | present if they were sent |
//! | unknown fields, extensions | left out |
//!
//! With a JSON Schema the payload is JSON behind the five bytes, and is passed on unchanged. The
//! crate does not validate it against its schema.
//!
//! Neither payloads nor schemas are trusted. Schemas are bounded in size, in nesting and in number.
//! A payload is bounded to 1,000,000 values, 16 MiB of JSON and a depth of 64 (Protobuf and JSON:
//! 100). A payload beyond that is a [`Fault`].
//!
//! [wire format]:
//! https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
//! [protobuf json]: https://protobuf.dev/programming-guides/json/

mod avro;
mod decoder;
mod fault;
#[cfg(feature = "client")]
mod http;
mod json;
mod payload;
mod protobuf;
mod registry;

pub use decoder::Decoder;
pub use fault::Fault;
#[cfg(feature = "client")]
pub use http::{HttpRegistry, HttpRegistryOptions};
pub use payload::Decoded;
pub use registry::{Format, RegisteredSchema, RegistryError, SchemaLookup, SchemaRegistry};
