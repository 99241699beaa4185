//! The interface of a schema registry.

use futures::future::BoxFuture;

/// Most bytes of one schema's text.
pub(crate) const TEXT_BYTES_MAX: usize = 256 << 10;
/// Most bytes of the texts of a schema and all its references together.
pub(crate) const TEXTS_BYTES_MAX: usize = 1 << 20;
/// Most references of a schema, direct and indirect.
pub(crate) const REFERENCES_MAX: usize = 32;

/// A source of schemas by their ids.
pub trait SchemaRegistry: Send + Sync + 'static {
    /// Looks up a schema.
    ///
    /// # Errors
    ///
    /// An error of the registry, not of the schema. A later lookup of the id may succeed.
    fn schema(&self, id: u32) -> BoxFuture<'_, Result<SchemaLookup, RegistryError>>;
}

/// The result of a lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchemaLookup {
    /// A schema with its references.
    Found(RegisteredSchema),
    /// No schema.
    Unknown,
    /// A schema that cannot be used, with the reason: the text after "schema 7 cannot be used: ".
    Unusable(String),
}

/// A schema with all its references.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredSchema {
    /// Language of the text.
    pub format: Format,
    /// Text of the schema, as it was registered.
    pub text: String,
    /// Names and texts of the references, direct and indirect. Each stands behind those that it
    /// refers to itself. A name is a full name in Avro, and the path of an `import` in Protobuf.
    pub references: Vec<(String, String)>,
}

/// A schema language.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Apache Avro.
    Avro,
    /// Protocol Buffers.
    Protobuf,
    /// JSON Schema.
    Json,
}

/// An error of a registry. No text contains a password.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RegistryError {
    /// Options by which the registry cannot be reached.
    #[error("{0}")]
    Settings(String),
    /// A connection that cannot be made, or was lost.
    #[error("the schema registry at `{url}` is not reachable: {why}")]
    Unreachable {
        /// Base URL of the registry.
        url: String,
        /// Error of the connection, with its causes.
        why: String,
    },
    /// An answer that did not arrive by its deadline.
    #[error("the schema registry at `{url}` did not answer in time")]
    TimedOut {
        /// Base URL of the registry.
        url: String,
    },
    /// Credentials that the registry refuses.
    #[error(
        "the schema registry at `{url}` refuses these credentials: it answers {status}; check its \
            user and password"
    )]
    Refused {
        /// Base URL of the registry.
        url: String,
        /// HTTP status: 401 or 403.
        status: u16,
    },
    /// An answer with a status of a temporary error, such as 429 or 500.
    #[error("the schema registry at `{url}` answers {status}")]
    Failed {
        /// Base URL of the registry.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// A server that is no schema registry.
    #[error(
        "what answers at `{url}` is no schema registry; check its URL, with the path, such as \
            `/apis/ccompat/v7`"
    )]
    NoRegistry {
        /// Base URL of the registry.
        url: String,
    },
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Avro => "Avro",
            Self::Protobuf => "Protobuf",
            Self::Json => "JSON",
        })
    }
}
