//! Rust types and traits of the contract in `wit/`.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the WIT files, which hold the documentation"
)]

/// The world `batch-handler`. The interfaces that both worlds import are generated once.
pub(crate) mod batch {
    wasmtime::component::bindgen!({
        path: "../../wit",
        world: "batch-handler",
        imports: { default: async | trappable },
        exports: { default: async },
        with: {
            "oncebox:handler/types": super::oncebox::handler::types,
            "oncebox:handler/sql": super::oncebox::handler::sql,
            "oncebox:handler/log": super::oncebox::handler::log,
            "oncebox:handler/config": super::oncebox::handler::config,
        },
        additional_derives: [PartialEq],
    });
}

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "handler",
    imports: { default: async | trappable },
    exports: { default: async },
    with: { "oncebox:handler/sql.savepoint": crate::host::savepoint::Savepoint },
    additional_derives: [PartialEq],
});
