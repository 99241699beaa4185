//! Errors of loading and encoding. Each text is one line that says what to do.

use std::path::PathBuf;

use oncebox_model::Problem;

use crate::text::{FAILURE_BYTES, bounded, printable};

/// The reason for which a file cannot be loaded as a handler, or the runtime cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file larger than the configured maximum.
    #[error("the component has {size} bytes, more than the {max} of `component_bytes_max`")]
    TooLarge {
        /// Bytes of the file.
        size: usize,
        /// Most bytes of a component.
        max: usize,
    },
    /// A file that does not begin like WebAssembly.
    #[error("this is not a WebAssembly file")]
    NotWasm,
    /// Machine code of some wasmtime, which would run outside every sandbox.
    #[error(
        "this is precompiled machine code, which is never accepted; upload the component it was \
            made from"
    )]
    Precompiled,
    /// A core module where a component is needed.
    #[error(
        "this is a core module, not a component; run `oncebox component encode <file> -o <out>`"
    )]
    CoreModule,
    /// A file that is damaged, uses a proposal that is switched off, or needs more than a slot of
    /// the pool has.
    #[error("this component cannot be compiled: {0}")]
    Invalid(String),
    /// Imports outside the contract.
    #[error("imports that handlers are not given: {}; a handler has no network, no files and no \
        environment", quoted(.0))]
    UnknownImports(Vec<String>),
    /// The import for outgoing messages, in a deployment without the grant for it. Holds the
    /// import's name.
    #[error(
        "the component imports `{0}`, with which it sends messages, and its deployment does not \
            grant that; deploy it with `oncebox deploy --grant emit`"
    )]
    EmitNotGranted(String),
    /// An import of the contract with another type.
    #[error(
        "an import differs from the host's: {0}; build the component against the `wit` folder of \
            this release"
    )]
    WrongImport(String),
    /// A component without the handler interface. Holds the names of its exports.
    #[error("the export `{}` or `{}` is missing; the component exports {}", crate::component::SINGLE, crate::component::BATCH, quoted(.0))]
    MissingExport(Vec<String>),
    /// An import of `context`, which is about one message, in a component that takes several.
    #[error(
        "the component exports `{}` and imports `context`, which speaks of one message; take what \
            it needs from the messages",
        crate::component::BATCH
    )]
    ContextOfBatch,
    /// A handler interface with another type.
    #[error(
        "the export `{0}` differs from the host's: {1}; build the component against the `wit` \
            folder of this release"
    )]
    WrongExport(&'static str, String),
    /// An engine that cannot start on this machine.
    #[error(
        "the WebAssembly engine cannot start: {0}; where virtual memory is limited, set \
            `small_virtual_memory`"
    )]
    Engine(String),
    /// A folder for compiled code that cannot be used.
    #[error("the folder for compiled code, `{}`, cannot be used: {reason}", .path.display())]
    Cache {
        /// Path of the folder.
        path: PathBuf,
        /// Reason, in one line.
        reason: String,
    },
    /// A compilation that takes longer than allowed.
    #[error("compiling takes longer than the {} s of `runtime.compile_timeout_ms`; split large \
        functions or build without the parts that are not used", .0.as_secs_f64())]
    CompileTimeout(std::time::Duration),
    /// A compilation that takes more memory than allowed.
    #[error(
        "compiling takes more than the {0} bytes of `runtime.compile_memory_bytes_max`; split \
            large functions or build without the parts that are not used"
    )]
    CompileMemory(u64),
    /// A crash of the compiler.
    #[error(
        "the compiler failed on this component ({0}); please report it, and try another version of \
            your toolchain"
    )]
    CompilerCrashed(String),
    /// A compiler process that could not run, or was killed from outside.
    #[error("the compiler cannot be run: {0}")]
    Compiler(String),
    /// A compilation whose task ended early.
    #[error("compiling was interrupted")]
    Interrupted,
}

impl LoadError {
    /// Returns the problem to report for the upload. Returns none where the host failed: the
    /// component may load later.
    pub fn problem(&self) -> Option<Problem> {
        let code = match self {
            Self::TooLarge { .. } => "too_large",
            Self::NotWasm => "not_wasm",
            Self::Precompiled => "precompiled",
            Self::CoreModule => "core_module",
            Self::Invalid(_) => "cannot_be_compiled",
            Self::UnknownImports(_) => "import_not_given",
            Self::EmitNotGranted(_) => "emit_not_granted",
            Self::WrongImport(_) => "wrong_import",
            Self::MissingExport(_) => "missing_export",
            Self::ContextOfBatch => "context_in_batch",
            Self::WrongExport(..) => "wrong_export",
            Self::CompileTimeout(_) => "compiling_takes_too_long",
            Self::CompileMemory(_) => "compiling_takes_too_much_memory",
            Self::CompilerCrashed(_) => "compiler_crashed",
            Self::Engine(_) | Self::Cache { .. } | Self::Compiler(_) | Self::Interrupted => {
                return None;
            }
        };
        Some(Problem::new(code, bounded(&printable(&self.to_string()), FAILURE_BYTES)))
    }
}

/// The reason for which a core module cannot become a component.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// A file that does not begin like WebAssembly.
    #[error("this is not a WebAssembly file")]
    NotWasm,
    /// A file that is a component already.
    #[error("this is a component already")]
    AlreadyComponent,
    /// A module that the encoder refuses.
    #[error("this core module cannot be made a component: {0}")]
    Invalid(String),
}

/// Returns the names in backticks, or the word for none.
fn quoted(names: &[String]) -> String {
    if names.is_empty() {
        return "nothing".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
