//! Compiled and linked components, and the check of their imports and exports.

use std::sync::Arc;

use oncebox_model::contract::{is_emit, is_given};
use wasmtime::{
    Engine,
    component::{Component, Linker, types::ComponentItem},
};

use crate::{
    bindings::{HandlerPre, batch::BatchHandlerPre, oncebox::handler::types},
    error::LoadError,
    failure::GuestAnswer,
    state::StoreState,
};

/// Interface of a component that takes one message at a time.
pub(crate) const SINGLE: &str = "oncebox:handler/incoming-handler@0.1.0";
/// Interface of a component that takes the messages of a transaction together. A component that
/// exports both interfaces runs by this one.
pub(crate) const BATCH: &str = "oncebox:handler/incoming-batch-handler@0.1.0";

/// A compiled and linked component. Clones share it.
#[derive(Clone)]
pub struct LoadedComponent {
    inner: Arc<ComponentInner>,
}

/// The data that clones of a component share.
struct ComponentInner {
    digest: [u8; 32],
    size: usize,
    imports: Vec<String>,
    pre: LinkedWorld,
}

/// A linked component, ready to be instantiated, by the world that it exports.
pub(crate) enum LinkedWorld {
    /// A component that takes one message at a time.
    Single(HandlerPre<StoreState>),
    /// A component that takes all messages of a transaction in one call.
    Batch(BatchHandlerPre<StoreState>),
}

impl LoadedComponent {
    /// Returns the SHA-256 of the uploaded bytes, the version's identity.
    pub fn digest(&self) -> [u8; 32] {
        self.inner.digest
    }

    /// Returns the component's imports, which are everything that it can reach.
    pub fn imports(&self) -> &[String] {
        &self.inner.imports
    }

    /// Returns whether the component sends messages, which its deployment must grant.
    pub fn emits(&self) -> bool {
        self.inner.imports.iter().any(|import| is_emit(import))
    }

    /// Checks that the component sends messages only where its deployment has the grant `emit`. It
    /// comes before a handler is made of the component.
    ///
    /// # Errors
    ///
    /// The import that needs the grant.
    pub fn check_grant(&self, may_emit: bool) -> Result<(), LoadError> {
        match self.inner.imports.iter().find(|import| is_emit(import)) {
            Some(import) if !may_emit => Err(LoadError::EmitNotGranted(import.clone())),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the upload.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Returns the bytes of the compiled code.
    pub fn code_bytes(&self) -> usize {
        let component = match &self.inner.pre {
            LinkedWorld::Single(pre) => pre.instance_pre().component(),
            LinkedWorld::Batch(pre) => pre.instance_pre().component(),
        };
        let range = component.image_range();
        range.end as usize - range.start as usize
    }

    /// Returns whether another clone exists: a handler, which may be running.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn engine(&self) -> &Engine {
        match &self.inner.pre {
            LinkedWorld::Single(pre) => pre.engine(),
            LinkedWorld::Batch(pre) => pre.engine(),
        }
    }

    /// Returns whether the component takes the messages of a transaction together.
    pub fn takes_batches(&self) -> bool {
        matches!(self.inner.pre, LinkedWorld::Batch(_))
    }

    pub(crate) fn world(&self) -> &LinkedWorld {
        &self.inner.pre
    }

    /// Checks imports and exports against the contract, and links the component.
    pub(crate) fn link(
        linker: &Linker<StoreState>,
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
            BATCH => LinkedWorld::Batch(BatchHandlerPre::new(instance).map_err(wrong)?),
            _ => LinkedWorld::Single(HandlerPre::new(instance).map_err(wrong)?),
        };
        Ok(Self { inner: Arc::new(ComponentInner { digest, size, imports, pre }) })
    }
}

fn imports(engine: &Engine, component: &Component) -> Vec<String> {
    component.component_type().imports(engine).map(|(name, _)| name.to_owned()).collect()
}

/// Returns the handler interface that a component exports. Checks that its function exists and has
/// the contract's type; otherwise the first message would fail.
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
        BATCH => handle.typecheck::<(&[types::Message],), (Vec<GuestAnswer>,)>(&instance),
        _ => handle.typecheck::<(types::Message,), (GuestAnswer,)>(&instance),
    };
    typechecked.map(|()| name).map_err(|error| wrong(one_line(&error)))
}

/// Returns whether two names are equal except for the patch version, which never changes a type.
pub(crate) fn is_same_interface(name: &str, wanted: &str) -> bool {
    let stem = |text: &str| text.rsplit_once('.').map(|(stem, _)| stem.to_owned());
    stem(name) == stem(wanted)
}

/// Returns an error and its causes in one line.
pub(crate) fn one_line(error: &wasmtime::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}
