//! Encoder of core modules, as compilers write them, into components.

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata, metadata};
use wit_parser::{PackageId, Resolve, SourceMap};

use crate::{
    error::EncodeError,
    load::{FileKind, kind},
};

/// The files of the contract by name. Modules without a world of their own, such as those of Go or
/// of text, need them, and so do new projects.
pub const WIT: &[(&str, &str)] = &[
    ("config.wit", include_str!("../../../wit/config.wit")),
    ("context.wit", include_str!("../../../wit/context.wit")),
    ("incoming-batch-handler.wit", include_str!("../../../wit/incoming-batch-handler.wit")),
    ("incoming-handler.wit", include_str!("../../../wit/incoming-handler.wit")),
    ("log.wit", include_str!("../../../wit/log.wit")),
    ("sql.wit", include_str!("../../../wit/sql.wit")),
    ("types.wit", include_str!("../../../wit/types.wit")),
    ("world.wit", include_str!("../../../wit/world.wit")),
];

/// The files of version 0.2 of the contract, which needs those of [`WIT`].
const WIT_0_2: &[(&str, &str)] = &[
    ("0.2/emit.wit", include_str!("../../../wit/0.2/emit.wit")),
    ("0.2/sql.wit", include_str!("../../../wit/0.2/sql.wit")),
    ("0.2/trace.wit", include_str!("../../../wit/0.2/trace.wit")),
    ("0.2/world.wit", include_str!("../../../wit/0.2/world.wit")),
];

/// Makes a component of a core module. A module without a world of its own gets the `handler`
/// world, or `batch-handler` when it exports that world's interface; of version 0.2 of the contract
/// when it imports anything of that. A module for WASI 0.1 gets the adapter to WASI 0.2.
///
/// # Errors
///
/// The reason for which the module cannot be encoded.
pub fn encode_component(core: &[u8]) -> Result<Vec<u8>, EncodeError> {
    encode(core, true)
}

/// Encodes a module like [`encode_component`], without validating the result. Hostile code decides
/// how long that validation takes.
pub(crate) fn encode_unchecked(core: &[u8]) -> Result<Vec<u8>, EncodeError> {
    encode(core, false)
}

fn encode(core: &[u8], validates: bool) -> Result<Vec<u8>, EncodeError> {
    match kind(core) {
        FileKind::Unknown => return Err(EncodeError::NotWasm),
        FileKind::Component => return Err(EncodeError::AlreadyComponent),
        FileKind::CoreModule => {}
    }
    let core = with_world(core)?;
    let mut encoder = ComponentEncoder::default();
    encoder.validate(validates).module(&core).map_err(invalid)?;
    encoder
        .adapter(WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER)
        .map_err(invalid)?;
    encoder.encode().map_err(invalid)
}

/// Returns the module with a world: its own, or the contract's.
fn with_world(core: &[u8]) -> Result<Vec<u8>, EncodeError> {
    let mut core = core.to_vec();
    let (stripped, _) = metadata::decode(&core).map_err(invalid)?;
    if stripped.is_none() {
        let mut resolve = Resolve::default();
        let mut package = push(&mut resolve, WIT)?;
        if ADDED.iter().any(|interface| names(&core, interface)) {
            package = push(&mut resolve, WIT_0_2)?;
        }
        let world = match (names(&core, BATCH), names(&core, ENQUEUE)) {
            (false, false) => "handler",
            (false, true) => "enqueuing-handler",
            (true, false) => "batch-handler",
            (true, true) => "enqueuing-batch-handler",
        };
        let world = resolve.select_world(&[package], Some(world)).map_err(invalid)?;
        embed_component_metadata(&mut core, &resolve, world, StringEncoding::UTF8)
            .map_err(invalid)?;
    }
    Ok(core)
}

/// Adds the package that some files of the contract make.
fn push(resolve: &mut Resolve, files: &[(&str, &str)]) -> Result<PackageId, EncodeError> {
    let mut sources = SourceMap::default();
    for (name, text) in files {
        sources.push_str(name, *text);
    }
    let group = sources.parse().map_err(|(_, error)| EncodeError::Invalid(error.to_string()))?;
    resolve.push_group(group).map_err(|error| EncodeError::Invalid(error.to_string()))
}

/// The interface that tells a module for batches, before its version.
const BATCH: &[u8] = b"oncebox:handler/incoming-batch-handler@";
/// The interfaces that tell a module for version 0.2 of the contract.
const ADDED: [&[u8]; 3] = [b"oncebox:handler/emit@", ENQUEUE, b"oncebox:handler/trace@"];
/// The interface that tells a module which enqueues statements.
const ENQUEUE: &[u8] = b"oncebox:handler/sql@0.2.";

/// Returns whether a module names an interface, so that it was written for a world with it.
fn names(core: &[u8], interface: &[u8]) -> bool {
    core.windows(interface.len()).any(|bytes| bytes == interface)
}

fn invalid(error: impl std::fmt::Display) -> EncodeError {
    EncodeError::Invalid(format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" "))
}
