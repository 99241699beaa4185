//! From uploaded bytes to what is known of them without compiling: everything that keeps a
//! component from running here, all at once, or a report.
//!
//! It runs in the host's process on what strangers send, so it does only what takes time in
//! proportion to the size, and what cannot recurse without bound.

mod judge;
mod needs;
mod report;
mod scan;

use std::panic::{AssertUnwindSafe, catch_unwind};

use oncebox_model::Problem;
use sha2::{Digest, Sha256};
use wasmtime::Engine;

pub use report::{CustomSection, Report, Tool};

use crate::{
    encode::encode_unchecked,
    engine::RuntimeConfig,
    error::EncodeError,
    load::{Kind, kind},
    text::{bounded, printable},
};

/// Bytes of a foreign text that are repeated in a problem.
const QUOTED_BYTES_MAX: usize = 300;

/// How much a component may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes of the upload, and of the component made of it.
    pub component_bytes_max: usize,
    /// Bytes of all linear memories together.
    pub memory_bytes_max: usize,
}

impl RuntimeConfig {
    /// What every component may ask for under this configuration; a tenant's limits may be lower.
    pub fn allowance(&self) -> Allowance {
        Allowance {
            component_bytes_max: self.component_bytes_max,
            memory_bytes_max: self.memory_bytes_max,
        }
    }
}

/// An upload in which no problem was found.
#[derive(Debug, Clone)]
pub struct Inspected {
    /// The component: what was uploaded, or what was made of it.
    pub component: Vec<u8>,
    /// SHA-256 of the component.
    pub digest: [u8; 32],
    /// SHA-256 of the upload, where that was a core module.
    pub source_digest: Option<[u8; 32]>,
    /// What it is.
    pub report: Report,
}

/// Look at an upload. A core module is made a component. Function bodies are checked for a bounded
/// time, and types of imports not at all: what is left is found when it is compiled.
pub fn inspect(bytes: &[u8], allowance: &Allowance) -> Result<Inspected, Vec<Problem>> {
    let core = match check_kind(bytes, allowance)? {
        Kind::CoreModule => true,
        Kind::Component | Kind::Unknown => false,
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
    let world = judge::judge(&scan, allowance)?;
    Ok(Inspected {
        digest: Sha256::digest(&component).into(),
        source_digest: core.then(|| Sha256::digest(bytes).into()),
        report: report::report(&scan, world, component.len()),
        component,
    })
}

/// What can be told from the first bytes.
fn check_kind(bytes: &[u8], allowance: &Allowance) -> Result<Kind, Vec<Problem>> {
    if Engine::detect_precompiled(bytes).is_some() {
        let text = "this is precompiled machine code, which is never accepted; upload the \
            WebAssembly component it was made from";
        return Err(vec![Problem::new("precompiled", text)]);
    }
    match kind(bytes) {
        Kind::Unknown => Err(vec![Problem::new("not_wasm", not_wasm(bytes))]),
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

/// What it may be instead: most often the wrong file was named.
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

/// The encoder is not made for hostile input. What it is given is valid, and what it panics at is
/// refused.
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

/// Foreign text in a line of ours.
fn quoted(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    printable(&bounded(&line, QUOTED_BYTES_MAX))
}
