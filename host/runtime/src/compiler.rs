//! Compilation in a child process. A component that makes the compiler spin, take all memory or
//! crash ends that process and not the host.
//!
//! The child is the host's own program. It gets the component on standard input and the settings as
//! an argument, and inherits neither environment nor files. Its memory and time are limited, its
//! priority is below that of handlers, and it ends with its parent.

mod child;
mod parent;

use std::{path::PathBuf, time::Duration};

use wasmtime::Engine;

use crate::{engine::CompileSettings, error::LoadError};

pub use child::compile_stdin;

/// The hidden command of the program that calls [`compile_stdin`]. Its one argument is JSON from
/// the host.
pub const COMPILE_SUBCOMMAND: &str = "compile-component";

/// First bytes of the child's output. The fingerprint of its engine and the code follow.
const MAGIC: &[u8; 8] = b"oncecod1";
/// Exit status of the child when the component is to blame. The reason is on standard output.
const REFUSED: u8 = 3;

/// The program of the child process, and its limits.
#[derive(Debug, Clone)]
pub struct Compiler {
    /// Path of the program, which takes [`COMPILE_SUBCOMMAND`]. Its output is executed, so it must
    /// be the host's own.
    pub program: PathBuf,
    /// Most bytes of the child's address space.
    pub memory_bytes_max: u64,
    /// Longest time for one component.
    pub duration_max: Duration,
}

impl Compiler {
    /// Makes a compiler of the running program, even if a newer file has replaced it since its
    /// start.
    pub fn own(memory_bytes_max: u64, duration_max: Duration) -> Self {
        Self { program: "/proc/self/exe".into(), memory_bytes_max, duration_max }
    }

    /// Compiles a component for an engine. Blocks until the child has ended, at the latest at the
    /// deadline.
    pub(crate) fn compile(
        &self,
        settings: &CompileSettings,
        engine: &Engine,
        component: &[u8],
    ) -> Result<Vec<u8>, LoadError> {
        parent::compile(self, settings, engine, component)
    }
}
