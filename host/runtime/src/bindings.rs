//! The contract in `wit/`, as Rust types and traits.

#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated from the WIT files, which hold the documentation")]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "handler",
    imports: { default: async | trappable },
    exports: { default: async },
    with: { "oncebox:handler/sql.savepoint": crate::host::savepoint::Savepoint },
    additional_derives: [PartialEq],
});
