//! Compiling in a process of its own, so that a component that makes the compiler run away, take
//! all memory or crash ends that process and not the host.
//!
//! The child is the host's own program. It gets the component on standard input and the settings as
//! an argument, inherits neither environment nor files, may use so much memory and time and no
//! more, runs with a lower priority than handlers, and ends with its parent.

mod child;
mod parent;

use std::{path::PathBuf, time::Duration};

use wasmtime::Engine;

use crate::{engine::CompileSettings, error::LoadError};

pub use child::compile_stdin;

/// The hidden command of the program that ends in [`compile_stdin`]; its one argument is not for
/// people.
pub const COMPILE_SUBCOMMAND: &str = "compile-component";

/// First bytes of what the child writes; the fingerprint of its engine and the code follow.
const MAGIC: &[u8; 8] = b"oncecod1";
/// The child's status when the component is to blame; its reason is on standard output.
const REFUSED: u8 = 3;

/// The process that compiles, and what it may use.
#[derive(Debug, Clone)]
pub struct Compiler {
    /// The program, which takes [`COMPILE_SUBCOMMAND`]. Its output is executed, so it must be the
    /// host's own.
    pub program: PathBuf,
    /// Bytes of its address space.
    pub memory_bytes_max: u64,
    /// How long one component may take.
    pub duration_max: Duration,
}

impl Compiler {
    /// This very program, also when its file was replaced by a newer one since it started.
    pub fn own(memory_bytes_max: u64, duration_max: Duration) -> Self {
        Self { program: "/proc/self/exe".into(), memory_bytes_max, duration_max }
    }

    /// Compile for an engine. Blocks until the child has ended, which it does by the deadline.
    pub(crate) fn compile(
        &self,
        settings: &CompileSettings,
        engine: &Engine,
        component: &[u8],
    ) -> Result<Vec<u8>, LoadError> {
        parent::compile(self, settings, engine, component)
    }
}
