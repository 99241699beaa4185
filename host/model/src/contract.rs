//! The interfaces that a host gives to a handler's component.

/// Interfaces of the contract's version 0.1 that a component may import, without their version.
pub const CONTRACT: &[&str] = &["types", "context", "sql", "log", "config"];
/// Interfaces that version 0.2 of the contract adds, without their version.
pub const CONTRACT_0_2: &[&str] = &["emit", "sql", "trace"];
/// The interface for outgoing messages, without its version.
pub const EMIT: &str = "oncebox:handler/emit";

/// Parts of WASI 0.2 that are linked, because stock toolchains import them. They give access to
/// nothing: no files, no sockets, no environment.
const WASI: &[&str] =
    &["wasi:io/", "wasi:cli/", "wasi:clocks/", "wasi:random/", "wasi:filesystem/", "wasi:sockets/"];

/// Returns whether handlers are given an interface of this name. Only one of these reaches anything
/// but the database, the host's own log and the operator's traces: see [`is_emit`].
pub fn is_given(import: &str) -> bool {
    let (interface, version) = parts(import);
    let contract = own(interface).is_some_and(|name| CONTRACT.contains(&name));
    (contract && version.starts_with("0.1."))
        || is_of_0_2(import)
        || (WASI.iter().any(|name| interface.starts_with(name)) && version.starts_with("0.2."))
}

/// Returns whether an import is an interface that version 0.2 of the contract adds.
pub fn is_of_0_2(import: &str) -> bool {
    let (interface, version) = parts(import);
    own(interface).is_some_and(|name| CONTRACT_0_2.contains(&name)) && version.starts_with("0.2.")
}

/// Returns whether an import is the interface for outgoing messages, which a handler is given only
/// where its deployment has the grant `emit`.
pub fn is_emit(import: &str) -> bool {
    let (interface, version) = parts(import);
    interface == EMIT && version.starts_with("0.2.")
}

/// Returns the name of an interface of the contract within its package.
fn own(interface: &str) -> Option<&str> {
    interface.strip_prefix("oncebox:handler/")
}

/// Splits the name of an import into the interface and its version, which may be empty.
fn parts(import: &str) -> (&str, &str) {
    import.split_once('@').unwrap_or((import, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a new interface passes for one that handlers are given.
    #[test]
    fn what_reaches_outside_is_not_given() {
        for inside in [
            "oncebox:handler/sql@0.1.0",
            "oncebox:handler/emit@0.2.0",
            "oncebox:handler/emit@0.2.7",
            "oncebox:handler/sql@0.2.0",
            "oncebox:handler/trace@0.2.0",
            "wasi:clocks/wall-clock@0.2.6",
        ] {
            assert!(is_given(inside), "{inside}");
        }
        for outside in [
            "oncebox:handler/emit@0.1.0",
            "oncebox:handler/emit@0.3.0",
            "oncebox:handler/sql@0.3.0",
            "oncebox:handler/emit",
            "oncebox:handler/emitter@0.2.0",
            "oncebox:handler/trace@0.1.0",
            "acme:handler/trace@0.2.0",
            "wasi:http/outgoing-handler@0.2.0",
            "env",
            "",
        ] {
            assert!(!is_given(outside), "{outside}");
        }
    }

    // What could go wrong: a component sends messages and its deployment needs no grant for it.
    #[test]
    fn the_import_that_needs_a_grant_is_known_in_every_patch() {
        for import in ["oncebox:handler/emit@0.2.0", "oncebox:handler/emit@0.2.19"] {
            assert!(is_emit(import), "{import}");
        }
        for import in [
            "oncebox:handler/sql@0.1.0",
            "oncebox:handler/trace@0.2.0",
            "acme:handler/emit@0.2.0",
            "wasi:io/poll@0.2.0",
        ] {
            assert!(!is_emit(import), "{import}");
        }
    }
}
