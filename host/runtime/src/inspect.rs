//! Inspection of uploads without compiling. The result is a report, or every problem that keeps the
//! component from running here.
//!
//! The inspection reads hostile bytes in the host's process. Its time is therefore proportional to
//! their size, and its recursion is bounded.

mod report;
mod resources;
mod scan;
mod verdict;

use std::panic::{AssertUnwindSafe, catch_unwind};

use oncebox_model::Problem;
use sha2::{Digest, Sha256};
use wasmtime::Engine;

pub use report::{ComponentReport, CustomSection, Tool};

use crate::{
    encode::encode_unchecked,
    engine::RuntimeConfig,
    error::EncodeError,
    load::{FileKind, kind},
    text::{bounded, printable},
};

/// Most bytes of a foreign text that a problem quotes.
const QUOTED_BYTES_MAX: usize = 300;

/// Limits on what a component may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Most bytes of the upload, and of the component made of it.
    pub component_bytes_max: usize,
    /// Most bytes of all linear memories together.
    pub memory_bytes_max: usize,
}

impl RuntimeConfig {
    /// Returns the limits for components under this configuration. A tenant's may be lower.
    pub fn allowance(&self) -> Allowance {
        Allowance {
            component_bytes_max: self.component_bytes_max,
            memory_bytes_max: self.memory_bytes_max,
        }
    }
}

/// An upload without a problem.
#[derive(Debug, Clone)]
pub struct Inspected {
    /// Component: the upload itself, or the component made of it.
    pub component: Vec<u8>,
    /// SHA-256 of the component.
    pub digest: [u8; 32],
    /// SHA-256 of the upload, if that was a core module.
    pub source_digest: Option<[u8; 32]>,
    /// Report of the component.
    pub report: ComponentReport,
}

/// Inspects an upload, and makes a component of a core module. Function bodies are checked for a
/// bounded time, and types of imports not at all: compiling finds the remaining problems.
///
/// # Errors
///
/// Every problem that was found.
pub fn inspect(bytes: &[u8], allowance: &Allowance) -> Result<Inspected, Vec<Problem>> {
    let core = match check_kind(bytes, allowance)? {
        FileKind::CoreModule => true,
        FileKind::Component | FileKind::Unknown => false,
    };
    let scan = scan::scan(bytes).map_err(|invalid| vec![damaged(&invalid)])?;
    let (component, scan) = match core {
        false => (bytes.to_vec(), scan),
        true => {
            let component = componentize(bytes)?;
            check_size(component.len(), allowance)?;
            let scan = scan::scan(&component)
                .map_err(|invalid| vec![not_componentized(&invalid.message)])?;
            (component, scan)
        }
    };
    let world = verdict::verdict(&scan, allowance)?;
    Ok(Inspected {
        digest: Sha256::digest(&component).into(),
        source_digest: core.then(|| Sha256::digest(bytes).into()),
        report: report::report(&scan, world, component.len()),
        component,
    })
}

/// Checks the kind of an upload by its first bytes, and its size.
fn check_kind(bytes: &[u8], allowance: &Allowance) -> Result<FileKind, Vec<Problem>> {
    if Engine::detect_precompiled(bytes).is_some() {
        let text = "this is precompiled machine code, which is never accepted; upload the \
            WebAssembly component it was made from";
        return Err(vec![Problem::new("precompiled", text)]);
    }
    match kind(bytes) {
        FileKind::Unknown => Err(vec![Problem::new("not_wasm", not_wasm(bytes))]),
        kind => check_size(bytes.len(), allowance).map(|()| kind),
    }
}

fn check_size(size: usize, allowance: &Allowance) -> Result<(), Vec<Problem>> {
    let max = allowance.component_bytes_max;
    if size <= max {
        return Ok(());
    }
    let text = format!(
        "the component has {size} bytes and {max} are allowed (`runtime.component_bytes_max`); \
         build it for release, without debug information"
    );
    Err(vec![Problem::new("too_large", text)])
}

/// Returns a text on what the file is instead. Most often the upload is the wrong file.
fn not_wasm(bytes: &[u8]) -> String {
    let instead = match bytes {
        [] => "the file is empty",
        [0, b'a', b's', b'm', ..] => {
            "this is WebAssembly of an unknown version or a file that was cut off"
        }
        [b'(', ..] => "this is WebAssembly as text; make a binary of it with `wasm-tools parse`",
        [0x7f, b'E', b'L', b'F', ..] => "this is a program for Linux, not WebAssembly",
        [0x1f, 0x8b, ..] => "this is a gzip file; unpack it first",
        [b'P', b'K', 3, 4, ..] => "this is a zip file; unpack it first",
        _ => "this is not a WebAssembly file",
    };
    format!("{instead}; upload the `.wasm` file that your compiler writes")
}

fn damaged(invalid: &scan::Invalid) -> Problem {
    let message = quoted(&invalid.message);
    let text = format!(
        "the file is not valid WebAssembly: {message} (at byte {}); it was damaged or cut off, or \
            uses a proposal \
         that is switched off here; build it again",
        invalid.offset
    );
    Problem::new("invalid_wasm", text)
}

/// Makes a component of a valid core module. The encoder is not made for hostile input: a module at
/// which it panics is refused.
fn componentize(core: &[u8]) -> Result<Vec<u8>, Vec<Problem>> {
    match catch_unwind(AssertUnwindSafe(|| encode_unchecked(core))) {
        Ok(Ok(component)) => Ok(component),
        Ok(Err(EncodeError::Invalid(reason))) => Err(vec![not_componentized(&reason)]),
        Ok(Err(other)) => Err(vec![not_componentized(&other.to_string())]),
        Err(_) => Err(vec![not_componentized("its component type cannot be read")]),
    }
}

fn not_componentized(reason: &str) -> Problem {
    let text = format!(
        "this is a core module and cannot be made a component: {}; build it against the `wit` \
            folder of this release with \
         `wit-bindgen`, or upload a component",
        quoted(reason)
    );
    Problem::new("core_module", text)
}

/// Makes a foreign text fit for quotation in a problem: bounded, printable and in one line.
fn quoted(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    printable(&bounded(&line, QUOTED_BYTES_MAX))
}
