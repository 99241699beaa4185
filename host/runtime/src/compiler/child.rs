//! The child's side of the compiler: from standard input to standard output.

use std::{
    io::{self, Read, Write},
    process::ExitCode,
};

use super::{MAGIC, REFUSED};
use crate::{cache::fingerprint, component::one_line, engine::CompileSettings};

/// Compiles the component on standard input for an engine with these settings, given as JSON.
pub fn compile_stdin(settings: &str) -> ExitCode {
    match compile(settings) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compile(settings: &str) -> io::Result<ExitCode> {
    let settings: CompileSettings = serde_json::from_str(settings)?;
    let engine = settings.engine().map_err(io::Error::other)?;
    let mut component = Vec::new();
    io::stdin().lock().read_to_end(&mut component)?;
    let mut out = io::stdout().lock();
    match engine.precompile_component(&component) {
        Ok(code) => {
            out.write_all(MAGIC)?;
            out.write_all(fingerprint(&engine).as_bytes())?;
            out.write_all(&code)?;
            out.flush()?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            out.write_all(one_line(&error).as_bytes())?;
            out.flush()?;
            Ok(ExitCode::from(REFUSED))
        }
    }
}
