//! The program `oncebox` with its fail points and sabotage switches. A program of the tests' own,
//! so that cargo builds it with them, and never mistakes one without the hooks for it.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncebox_cli::main()
}
