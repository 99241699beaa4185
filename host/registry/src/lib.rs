//! Payloads in the wire format of a schema registry, as JSON.
//!
//! A payload begins with a byte 0 and four bytes of a schema's id, big-endian; then comes a message
//! by that schema ([wire format]). Schemas are fetched once and kept. [`Decoder::prepare`] sees to
//! that and is the only thing that waits; [`Decoder::decode`] is plain computing.
//!
//! The JSON is the plainest that loses nothing, so that a JSON pointer finds what is meant:
//!
//! | Avro | JSON |
//! | --- | --- |
//! | `null`, `boolean` | the same |
//! | `int`, `long` | an integer, exact, also beyond 2^53 |
//! | `float`, `double` | a number; `"NaN"`, `"Infinity"`, `"-Infinity"` |
//! | `string`, `enum` | a string, the symbol |
//! | `bytes`, `fixed` | base64 |
//! | `array`; `map`, `record` | an array; an object |
//! | union | the value itself, without the name of its branch |
//! | logical type `decimal` | its digits as a string, with all of its scale: `"-12.30"` |
//! | `uuid` | a string |
//! | `date`, `time-…`, `timestamp-…`, `local-timestamp-…` | the integer that it is |
//! | `duration` | `{"months": …, "days": …, "millis": …}` |
//! | other logical types | as the type beneath |
//!
//! | Protobuf | JSON |
//! | --- | --- |
//! | message | [its canonical JSON][protobuf json]: names in lowerCamelCase, 64-bit integers as strings, enums as names, bytes in base64, well-known types as they are written there |
//! | fields that have no presence | are there also with their default value: `0`, `""`, `[]` |
//! | fields that have presence (`optional`, messages, members of a `oneof`) | are there if they were sent |
//! | unknown fields, extensions | are left out |
//!
//! With a JSON Schema the payload is JSON behind the five bytes, and is passed on as it is. Whether
//! it is valid by its schema is not looked at.
//!
//! Neither payloads nor schemas are trusted. Schemas are bounded in size, in nesting and in number;
//! what is decoded is bounded to 1,000,000 values, 16 MiB of JSON and a depth of 64 (Protobuf and
//! JSON: 100). Beyond that, it is a [`Fault`].
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
pub use registry::{Format, Lookup, RegisteredSchema, RegistryError, SchemaRegistry};
