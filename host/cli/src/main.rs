//! `oncebox`, the only binary.

fn main() -> std::process::ExitCode {
    oncebox_cli::main()
}
