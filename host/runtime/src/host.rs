//! The host's side of what a component may import, one file per interface.

pub(crate) mod clock;
mod config;
mod context;
pub(crate) mod emit;
pub(crate) mod log;
pub(crate) mod random;
pub(crate) mod savepoint;
pub mod sql;
pub(crate) mod trace;
pub(crate) mod wasi;

use wasmtime::{
    Engine,
    component::{HasSelf, Linker},
};

use crate::{
    bindings::{
        Handler, emitter::Emitter, enqueuer::oncebox::handler0_2_0::sql as enqueuer,
        oncebox::handler::types, tracer::Tracer,
    },
    state::StoreState,
};

/// Links everything that a component may import. A component takes only what it imports.
pub(crate) fn linker(engine: &Engine) -> wasmtime::Result<Linker<StoreState>> {
    let mut linker = Linker::new(engine);
    Handler::add_to_linker::<_, HasSelf<StoreState>>(&mut linker, |state| state)?;
    // Its world also has the types of version 0.1, which are linked already.
    enqueuer::add_to_linker::<_, HasSelf<StoreState>>(&mut linker, |state| state)?;
    Emitter::add_to_linker::<_, HasSelf<StoreState>>(&mut linker, |state| state)?;
    Tracer::add_to_linker::<_, HasSelf<StoreState>>(&mut linker, |state| state)?;
    wasi::link(&mut linker)?;
    Ok(linker)
}

impl types::Host for StoreState {}
