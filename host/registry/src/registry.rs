//! What is asked of a schema registry.

use futures::future::BoxFuture;

/// Bytes of one schema's text.
pub(crate) const TEXT_BYTES_MAX: usize = 256 << 10;
/// Bytes of the texts of a schema and all that it refers to.
pub(crate) const TEXTS_BYTES_MAX: usize = 1 << 20;
/// Schemas that a schema refers to, and those refer to.
pub(crate) const REFERENCES_MAX: usize = 32;

/// Where schemas are by their ids.
pub trait SchemaRegistry: Send + Sync + 'static {
    /// Look for a schema. An error is the registry's trouble: the same question may be answered
    /// later.
    fn schema(&self, id: u32) -> BoxFuture<'_, Result<Lookup, RegistryError>>;
}

/// What a registry has under an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// A schema.
    Found(RegisteredSchema),
    /// No schema.
    Unknown,
    /// Something that is not used, and why: what comes after "schema 7 cannot be used: ".
    Unusable(String),
}

/// A schema with all that it refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredSchema {
    /// The language of the text.
    pub format: Format,
    /// The schema as it was registered.
    pub text: String,
    /// Names and texts of the schemas that it refers to, and that those refer to. What is referred
    /// to stands before what refers to it. A name is a full name in Avro, and what stands in an
    /// `import` in Protobuf.
    pub references: Vec<(String, String)>,
}

/// A language of schemas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Apache Avro.
    Avro,
    /// Protocol Buffers.
    Protobuf,
    /// JSON Schema.
    Json,
}

/// Trouble with a registry. No text of these holds a password.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RegistryError {
    /// What the registry is reached by cannot be used.
    #[error("{0}")]
    Settings(String),
    /// There is no connection.
    #[error("the schema registry at `{url}` is not reachable: {why}")]
    Unreachable {
        /// Its base URL.
        url: String,
        /// What went wrong.
        why: String,
    },
    /// It took too long.
    #[error("the schema registry at `{url}` did not answer in time")]
    TimedOut {
        /// Its base URL.
        url: String,
    },
    /// It wants other credentials.
    #[error(
        "the schema registry at `{url}` refuses these credentials: it answers {status}; check its \
            user and password"
    )]
    Refused {
        /// Its base URL.
        url: String,
        /// The status: 401 or 403.
        status: u16,
    },
    /// It answers with an error.
    #[error("the schema registry at `{url}` answers {status}")]
    Failed {
        /// Its base URL.
        url: String,
        /// The status.
        status: u16,
    },
    /// What answers is no registry.
    #[error(
        "what answers at `{url}` is no schema registry; check its URL, with the path, such as \
            `/apis/ccompat/v7`"
    )]
    NoRegistry {
        /// Its base URL.
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
