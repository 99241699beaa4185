//! `oncebox`, the only binary.

fn main() -> std::process::ExitCode {
    oncebox_server::cli::main()
}
