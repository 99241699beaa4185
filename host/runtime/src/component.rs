//! A component that passed every check, compiled and linked.

use std::sync::Arc;

use wasmtime::{
    Engine,
    component::{Component, Linker, types::ComponentItem},
};

use crate::{
    bindings::{HandlerPre, batch::BatchHandlerPre, oncebox::handler::types},
    error::LoadError,
    state::State,
};

/// The interface of a component that takes one message at a time.
pub(crate) const SINGLE: &str = "oncebox:handler/incoming-handler@0.1.0";
/// The interface of a component that takes the messages of a transaction together. One that exports
/// both is run as this.
pub(crate) const BATCH: &str = "oncebox:handler/incoming-batch-handler@0.1.0";

/// Interfaces of the contract that a component may import, without their version.
pub(crate) const CONTRACT: &[&str] = &["types", "context", "sql", "log", "config"];

/// Parts of WASI 0.2 that are linked, as far as stock toolchains import them. What they
/// reach is empty: no files, no sockets, no environment.
const WASI: &[&str] =
    &["wasi:io/", "wasi:cli/", "wasi:clocks/", "wasi:random/", "wasi:filesystem/", "wasi:sockets/"];

/// A component, compiled and linked. Clones share it.
#[derive(Clone)]
pub struct LoadedComponent {
    inner: Arc<Inner>,
}

struct Inner {
    digest: [u8; 32],
    size: usize,
    imports: Vec<String>,
    pre: World,
}

/// What a component exports, ready to be instantiated.
pub(crate) enum World {
    /// One message at a time.
    Single(HandlerPre<State>),
    /// All messages of a transaction in one call.
    Batch(BatchHandlerPre<State>),
}

impl LoadedComponent {
    /// SHA-256 of the uploaded bytes, the version's identity.
    pub fn digest(&self) -> [u8; 32] {
        self.inner.digest
    }

    /// What the component imports, which is everything it can reach.
    pub fn imports(&self) -> &[String] {
        &self.inner.imports
    }

    /// Bytes of the upload.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Bytes of its compiled code.
    pub fn code_bytes(&self) -> usize {
        let component = match &self.inner.pre {
            World::Single(pre) => pre.instance_pre().component(),
            World::Batch(pre) => pre.instance_pre().component(),
        };
        let range = component.image_range();
        range.end as usize - range.start as usize
    }

    /// Whether there is another clone of it: a handler, which may be running.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn engine(&self) -> &Engine {
        match &self.inner.pre {
            World::Single(pre) => pre.engine(),
            World::Batch(pre) => pre.engine(),
        }
    }

    /// Whether it takes the messages of a transaction together.
    pub fn takes_batches(&self) -> bool {
        matches!(self.inner.pre, World::Batch(_))
    }

    pub(crate) fn world(&self) -> &World {
        &self.inner.pre
    }

    /// Check imports and exports against the contract, and link.
    pub(crate) fn link(
        linker: &Linker<State>,
        component: &Component,
        digest: [u8; 32],
        size: usize,
    ) -> Result<Self, LoadError> {
        let imports = imports(linker.engine(), component);
        let unknown: Vec<String> = imports.iter().filter(|name| !is_given(name)).cloned().collect();
        if !unknown.is_empty() {
            return Err(LoadError::UnknownImports(unknown));
        }
        let instance = linker
            .instantiate_pre(component)
            .map_err(|error| LoadError::WrongImport(one_line(&error)))?;
        let export = check_export(linker.engine(), component)?;
        let wrong = |error: wasmtime::Error| LoadError::WrongExport(export, one_line(&error));
        let pre = match export {
            BATCH if imports.iter().any(|name| name.starts_with("oncebox:handler/context@")) => {
                return Err(LoadError::ContextOfBatch);
            }
            BATCH => World::Batch(BatchHandlerPre::new(instance).map_err(wrong)?),
            _ => World::Single(HandlerPre::new(instance).map_err(wrong)?),
        };
        Ok(Self { inner: Arc::new(Inner { digest, size, imports, pre }) })
    }
}

fn imports(engine: &Engine, component: &Component) -> Vec<String> {
    component.component_type().imports(engine).map(|(name, _)| name.to_owned()).collect()
}

/// Which interface it exports. The handler function must be there and have the contract's type;
/// otherwise the first message would find out.
fn check_export(engine: &Engine, component: &Component) -> Result<&'static str, LoadError> {
    let world = component.component_type();
    let find = |wanted: &'static str| {
        world
            .exports(engine)
            .find(|(name, _)| is_same_interface(name, wanted))
            .map(|(_, it)| (wanted, it))
    };
    let Some((name, export)) = find(BATCH).or_else(|| find(SINGLE)) else {
        return Err(LoadError::MissingExport(
            world.exports(engine).map(|(name, _)| name.to_owned()).collect(),
        ));
    };
    let wrong = |reason: String| LoadError::WrongExport(name, reason);
    let ComponentItem::ComponentInstance(interface) = export.ty else {
        return Err(wrong("it is not an interface".to_owned()));
    };
    let function = if name == BATCH { "handle-batch" } else { "handle" };
    let Some(ComponentItem::ComponentFunc(handle)) =
        interface.get_export(engine, function).map(|export| export.ty)
    else {
        return Err(wrong(format!("it has no function `{function}`")));
    };
    let instance = world.instance_type();
    let typechecked = match name {
        BATCH => handle.typecheck::<(&[types::Message],), (Vec<Answer>,)>(&instance),
        _ => handle.typecheck::<(types::Message,), (Answer,)>(&instance),
    };
    typechecked.map(|()| name).map_err(|error| wrong(one_line(&error)))
}

type Answer = Result<Option<String>, types::Failure>;

/// Whether handlers are given an interface of this name; its type is the linker's affair.
pub(crate) fn is_given(import: &str) -> bool {
    let (interface, version) = import.split_once('@').unwrap_or((import, ""));
    let contract =
        interface.strip_prefix("oncebox:handler/").is_some_and(|name| CONTRACT.contains(&name));
    (contract && version.starts_with("0.1."))
        || (WASI.iter().any(|name| interface.starts_with(name)) && version.starts_with("0.2."))
}

/// Equal but for the last number of the version, which never changes a type.
pub(crate) fn is_same_interface(name: &str, wanted: &str) -> bool {
    let stem = |text: &str| text.rsplit_once('.').map(|(stem, _)| stem.to_owned());
    stem(name) == stem(wanted)
}

/// An error with its causes, in one line.
pub(crate) fn one_line(error: &wasmtime::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}
