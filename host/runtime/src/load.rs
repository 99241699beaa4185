//! Loader of components: from uploaded bytes to a component that can run.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, SemaphorePermit};
use wasmtime::{
    Engine,
    component::{Component, Linker},
};

use crate::{
    cache::Cache,
    compiler::Compiler,
    component::{LoadedComponent, one_line},
    engine::{self, CompileSettings, RuntimeConfig},
    error::LoadError,
    handler::ComponentHandler,
    host,
    inspect::Allowance,
    settings::HandlerSettings,
    state::StoreState,
};

/// The runtime, which loads components and makes handlers of them. Clones share one engine and one
/// pool.
#[derive(Clone)]
pub struct WasmRuntime {
    inner: Arc<RuntimeInner>,
}

/// The engine and pools that clones of a runtime share.
struct RuntimeInner {
    engine: Engine,
    linker: Linker<StoreState>,
    instances: Arc<Semaphore>,
    compiling: Semaphore,
    cache: Option<Cache>,
    component_bytes_max: usize,
    memory_bytes_max: usize,
    counts_fuel: bool,
    compiler: Option<Compiler>,
    compile_settings: CompileSettings,
}

impl WasmRuntime {
    /// Starts the engine and links the host's interfaces.
    ///
    /// # Errors
    ///
    /// An engine that cannot start on this machine, or a cache folder that cannot be used.
    pub fn new(config: RuntimeConfig) -> Result<Self, LoadError> {
        let engine = engine::start(&config)?;
        let linker = host::linker(&engine).map_err(|error| LoadError::Engine(one_line(&error)))?;
        let inner = RuntimeInner {
            linker,
            instances: Arc::new(Semaphore::new(config.instances_max.max(1) as usize)),
            compiling: Semaphore::new(config.compilations_max.max(1)),
            cache: config.cache_dir.as_deref().map(Cache::open).transpose()?,
            component_bytes_max: config.component_bytes_max,
            memory_bytes_max: config.memory_bytes_max,
            counts_fuel: config.count_fuel,
            compile_settings: CompileSettings::of(&config),
            compiler: config.compiler,
            engine,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Checks, compiles and links a component, or takes its compiled code from the cache. This
    /// takes up to ten seconds for a Python or JavaScript runtime that is not cached.
    ///
    /// # Errors
    ///
    /// A problem of the component, or an error of the host: see [`LoadError::problem`].
    pub async fn load(&self, component: &[u8]) -> Result<LoadedComponent, LoadError> {
        check_kind(component, self.inner.component_bytes_max)?;
        if let Some(loaded) = self.load_cached(component).await? {
            return Ok(loaded);
        }
        let _permit = self.inner.compiling.acquire().await.map_err(|_| LoadError::Interrupted)?;
        let (inner, bytes) = (self.inner.clone(), component.to_vec());
        tokio::task::spawn_blocking(move || inner.load(&bytes))
            .await
            .map_err(|_| LoadError::Interrupted)?
    }

    /// Loads a component that was compiled before; returns none for any other. This takes
    /// milliseconds, and waits for no compilation.
    ///
    /// # Errors
    ///
    /// A cached component that cannot be linked.
    pub async fn load_cached(
        &self,
        component: &[u8],
    ) -> Result<Option<LoadedComponent>, LoadError> {
        if self.inner.cache.is_none() {
            return Ok(None);
        }
        let (inner, bytes) = (self.inner.clone(), component.to_vec());
        tokio::task::spawn_blocking(move || inner.load_cached(&bytes))
            .await
            .map_err(|_| LoadError::Interrupted)?
    }

    /// Returns the limits on what a component may ask for.
    pub fn allowance(&self) -> Allowance {
        Allowance {
            component_bytes_max: self.inner.component_bytes_max,
            memory_bytes_max: self.inner.memory_bytes_max,
        }
    }

    /// Waits for the permit of one instance, which lasts while it is held.
    pub(crate) async fn instance(&self) -> SemaphorePermit<'_> {
        self.inner.instances.acquire().await.expect("the semaphore is never closed")
    }

    pub(crate) fn memory_bytes_max(&self) -> usize {
        self.inner.memory_bytes_max
    }

    pub(crate) fn counts_fuel(&self) -> bool {
        self.inner.counts_fuel
    }

    /// Makes a handler that runs a component under these settings.
    pub fn handler(
        &self,
        component: &LoadedComponent,
        settings: HandlerSettings,
    ) -> ComponentHandler {
        ComponentHandler::new(
            self.inner.instances.clone(),
            component.clone(),
            settings,
            self.inner.counts_fuel,
        )
    }
}

impl RuntimeInner {
    fn load(&self, bytes: &[u8]) -> Result<LoadedComponent, LoadError> {
        // The previous holder of the permit may have compiled this very component.
        if let Some(loaded) = self.load_cached(bytes)? {
            return Ok(loaded);
        }
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        let component = self.compile(bytes, &digest)?;
        LoadedComponent::link(&self.linker, &component, digest, bytes.len())
    }

    fn load_cached(&self, bytes: &[u8]) -> Result<Option<LoadedComponent>, LoadError> {
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        let found = self.cache.as_ref().and_then(|cache| cache.read(&self.engine, &digest));
        found
            .map(|component| LoadedComponent::link(&self.linker, &component, digest, bytes.len()))
            .transpose()
    }

    fn compile(&self, bytes: &[u8], digest: &[u8; 32]) -> Result<Component, LoadError> {
        let invalid = |error: wasmtime::Error| LoadError::Invalid(one_line(&error));
        let code = match &self.compiler {
            Some(compiler) => compiler.compile(&self.compile_settings, &self.engine, bytes)?,
            None => self.engine.precompile_component(bytes).map_err(invalid)?,
        };
        if let Some(cache) = &self.cache
            && let Err(error) = cache.write(&self.engine, digest, &code)
        {
            tracing::warn!(%error, "compiled code not cached, the next start compiles it again");
        }
        // SAFETY: this process has just made the code, or a child process of this very program has.
        // Only the child can write to its output, and its fingerprint is this engine's. A tenant's
        // bytes went through a compiler, never around it. A compiler that writes wrong code would
        // do so in this process as well.
        unsafe { Component::deserialize(&self.engine, &code) }.map_err(invalid)
    }
}

/// Checks the size of a file, and its kind by its first bytes, before anything is parsed.
fn check_kind(bytes: &[u8], max: usize) -> Result<(), LoadError> {
    if bytes.len() > max {
        return Err(LoadError::TooLarge { size: bytes.len(), max });
    }
    if Engine::detect_precompiled(bytes).is_some() {
        return Err(LoadError::Precompiled);
    }
    match kind(bytes) {
        FileKind::Component => Ok(()),
        FileKind::CoreModule => Err(LoadError::CoreModule),
        FileKind::Unknown => Err(LoadError::NotWasm),
    }
}

/// The kind of a file, by its first bytes.
pub(crate) enum FileKind {
    CoreModule,
    Component,
    Unknown,
}

/// Returns the kind of a file, by magic number and layer: the first eight bytes of the format.
pub(crate) fn kind(bytes: &[u8]) -> FileKind {
    match bytes {
        [0, b'a', b's', b'm', _, _, 1, 0, ..] => FileKind::Component,
        [0, b'a', b's', b'm', _, _, 0, 0, ..] => FileKind::CoreModule,
        _ => FileKind::Unknown,
    }
}
