//! Rust types and traits of the contract in `wit/`, of both its versions. The worlds of version 0.2
//! are those of 0.1 with more imports, so that a component of either has the same exports.

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

/// The import for statements that nobody waits for, which version 0.2 of the contract adds.
pub(crate) mod enqueuer {
    wasmtime::component::bindgen!({
        path: ["../../wit", "../../wit/0.2"],
        world: "oncebox:handler/enqueuer@0.2.0",
        imports: { default: async | trappable },
        with: {
            "oncebox:handler/types@0.1.0": super::oncebox::handler::types,
            "oncebox:handler/sql@0.1.0": super::oncebox::handler::sql,
        },
        additional_derives: [PartialEq],
    });
}

/// The import for outgoing messages, which version 0.2 of the contract adds to both worlds.
pub(crate) mod emitter {
    wasmtime::component::bindgen!({
        path: ["../../wit", "../../wit/0.2"],
        world: "oncebox:handler/emitter@0.2.0",
        imports: { default: async | trappable },
        additional_derives: [PartialEq],
    });
}

/// The import for spans, which version 0.2 of the contract adds to both worlds.
pub(crate) mod tracer {
    wasmtime::component::bindgen!({
        path: ["../../wit", "../../wit/0.2"],
        world: "oncebox:handler/tracer@0.2.0",
        imports: { default: trappable },
        with: { "oncebox:handler/trace.span": crate::host::trace::HandlerSpan },
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
