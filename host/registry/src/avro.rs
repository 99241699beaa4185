//! Avro ([specification](https://avro.apache.org/docs/1.12.0/specification/)), decoded straight
//! into JSON.
//!
//! A schema is a list of nodes that refer to each other by index, so a recursive type needs no
//! special case. The reader bounds how far it follows the indexes.

mod decimal;
mod parse;
mod read;

/// A parsed Avro schema, by which payloads are decoded.
#[derive(Debug)]
pub(crate) struct AvroSchema {
    nodes: Vec<Node>,
    root: usize,
}

/// A type of a schema. Inner types are indexes into the list of nodes.
#[derive(Debug)]
enum Node {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed {
        name: String,
        size: usize,
    },
    Enum {
        name: String,
        symbols: Vec<String>,
    },
    Array(usize),
    Map(usize),
    Union(Vec<usize>),
    Record {
        name: String,
        fields: Vec<(String, usize)>,
    },
    /// A decimal of `size` bytes, or of any length where `size` is none.
    Decimal {
        scale: usize,
        size: Option<usize>,
    },
    /// A UUID of sixteen bytes.
    Uuid,
    Duration,
}
