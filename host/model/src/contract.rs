//! The interfaces that a host gives to a handler's component.

/// Interfaces of the contract that a component may import, without their version.
pub const CONTRACT: &[&str] = &["types", "context", "sql", "log", "config"];

/// Parts of WASI 0.2 that are linked, because stock toolchains import them. They give access to
/// nothing: no files, no sockets, no environment.
const WASI: &[&str] =
    &["wasi:io/", "wasi:cli/", "wasi:clocks/", "wasi:random/", "wasi:filesystem/", "wasi:sockets/"];

/// Returns whether handlers are given an interface of this name. None of these reaches anything but
/// the database and the host's own log.
pub fn is_given(import: &str) -> bool {
    let (interface, version) = import.split_once('@').unwrap_or((import, ""));
    let contract =
        interface.strip_prefix("oncebox:handler/").is_some_and(|name| CONTRACT.contains(&name));
    (contract && version.starts_with("0.1."))
        || (WASI.iter().any(|name| interface.starts_with(name)) && version.starts_with("0.2."))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a new interface passes for one that handlers are given.
    #[test]
    fn what_reaches_outside_is_not_given() {
        for inside in ["oncebox:handler/sql@0.1.0", "wasi:clocks/wall-clock@0.2.6"] {
            assert!(is_given(inside), "{inside}");
        }
        for outside in [
            "oncebox:handler/emit@0.1.0",
            "oncebox:handler/sql@0.2.0",
            "wasi:http/outgoing-handler@0.2.0",
            "env",
            "",
        ] {
            assert!(!is_given(outside), "{outside}");
        }
    }
}
