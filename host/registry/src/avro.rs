//! Avro ([specification](https://avro.apache.org/docs/1.12.0/specification/)), decoded straight
//! into JSON.
//!
//! A schema is a list of nodes that point at each other, so that recursive types are nothing
//! special; whoever follows them counts.

mod decimal;
mod parse;
mod read;

/// A schema that payloads can be decoded by.
#[derive(Debug)]
pub(crate) struct Schema {
    nodes: Vec<Node>,
    root: usize,
}

/// A type; where it has others within, their places in the list.
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
    /// In bytes, or in a fixed number of them.
    Decimal {
        scale: usize,
        size: Option<usize>,
    },
    /// The sixteen bytes of a UUID.
    Uuid,
    Duration,
}
