//! The engine: its features, the limits of every instance, and the clock that makes a spinning
//! guest yield.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use crate::{compiler::Compiler, error::LoadError};

/// Interval of the epoch. A spinning guest yields to its neighbours once in each.
const EPOCH: Duration = Duration::from_millis(1);

/// Polls of tasks after which a busy executor checks connections and timers. A guest that computes
/// takes one [`EPOCH`] for each poll.
const POLLS_BETWEEN_EVENTS: u32 = 8;

/// Most linear memories of one component. QuickJS has three.
pub(crate) const MEMORIES_MAX: u32 = 4;
/// Most linear memories of one core module.
pub(crate) const MEMORIES_OF_MODULE_MAX: u32 = 1;
/// Most tables of one core module.
pub(crate) const TABLES_OF_MODULE_MAX: u32 = 1;
/// Most tables of one component.
pub(crate) const TABLES_MAX: u32 = 8;
/// Most core instances of one component. Python has about thirty.
pub(crate) const CORE_INSTANCES_MAX: u32 = 64;
/// Most elements of one table. SpiderMonkey needs 7,697.
pub(crate) const TABLE_ELEMENTS_MAX: usize = 20_000;

/// Settings of the runtime, which the operator makes.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// Most instances at the same time. Further messages wait, which counts against their deadline:
    /// keep it above the number of partitions and retry workers of a host.
    pub instances_max: u32,
    /// Most bytes of one linear memory, whatever a consumer's policy allows.
    pub memory_bytes_max: usize,
    /// Most bytes of an uploaded component.
    pub component_bytes_max: usize,
    /// Folder that keeps compiled code between runs. It must belong to the host alone, since its
    /// content is executed. With none, every start compiles.
    pub cache_dir: Option<PathBuf>,
    /// Switch that reserves no more address space than memories can use, for machines with a limit
    /// on virtual memory. Guests then check every access and run about a third slower.
    pub small_virtual_memory: bool,
    /// Switch that counts a guest's instructions, for a [`crate::Recorder`]. It makes guests
    /// slower.
    pub count_fuel: bool,
    /// Most compilations at the same time. A single large component uses every core already.
    pub compilations_max: usize,
    /// Child process that compiles. With none the host compiles by itself, and a component that
    /// makes the compiler spin or crash takes the host with it.
    pub compiler: Option<Compiler>,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            instances_max: 64,
            memory_bytes_max: 128 << 20,
            component_bytes_max: 64 << 20,
            cache_dir: None,
            small_virtual_memory: false,
            count_fuel: false,
            compilations_max: 1,
            compiler: None,
        }
    }
}

/// Builds the executor for a process that runs guests beside its own work. Tasks that wait for an
/// answer get it soon, however much guests compute.
///
/// # Errors
///
/// An error of the operating system.
pub fn executor() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .event_interval(POLLS_BETWEEN_EVENTS)
        .build()
}

/// Starts the engine and its ticker thread, which ends with the engine's last clone.
pub(crate) fn start(config: &RuntimeConfig) -> Result<Engine, LoadError> {
    // With the kernel's page map the pool clears only written pages between two instances.
    let compiled = CompileSettings::of(config);
    let with_pool = |has_page_map| {
        let mut settings = compiled.settings();
        settings
            .allocation_strategy(InstanceAllocationStrategy::Pooling(pool(config, has_page_map)));
        Engine::new(&settings)
    };
    let engine = with_pool(true)
        .or_else(|_| with_pool(false))
        .map_err(|error| LoadError::Engine(format!("{error:#}")))?;
    let weak = engine.weak();
    let ticker = move || {
        while let Some(engine) = weak.upgrade() {
            engine.increment_epoch();
            drop(engine);
            std::thread::sleep(EPOCH);
        }
    };
    std::thread::Builder::new()
        .name("epoch".to_owned())
        .spawn(ticker)
        .map_err(|error| LoadError::Engine(error.to_string()))?;
    Ok(engine)
}

/// The settings that decide how code is compiled, for the child process. Two engines with equal
/// settings have equal fingerprints, however they allocate instances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompileSettings {
    memory_bytes_max: usize,
    small_virtual_memory: bool,
    count_fuel: bool,
}

impl CompileSettings {
    pub(crate) fn of(config: &RuntimeConfig) -> Self {
        let RuntimeConfig { memory_bytes_max, small_virtual_memory, count_fuel, .. } = *config;
        Self { memory_bytes_max, small_virtual_memory, count_fuel }
    }

    /// Makes an engine that compiles and runs nothing. It reserves no address space and has no
    /// clock.
    pub(crate) fn engine(&self) -> wasmtime::Result<Engine> {
        Engine::new(&self.settings())
    }

    fn settings(&self) -> Config {
        let mut settings = Config::new();
        settings.epoch_interruption(true);
        settings.consume_fuel(self.count_fuel);
        settings.concurrency_support(false);
        settings.relaxed_simd_deterministic(true);
        // The pool hands a stack from one tenant to the next.
        settings.async_stack_zeroing(true);
        if self.small_virtual_memory {
            settings.memory_reservation(self.memory_bytes_max as u64);
            settings.memory_guard_size(0);
            settings.memory_reservation_for_growth(0);
        }
        settings
    }
}

/// Returns the limits of the pool. Every total is the number of instances times the limit of one
/// component. So a holder of a permit finds everything that it needs.
fn pool(config: &RuntimeConfig, has_page_map: bool) -> PoolingAllocationConfig {
    let instances = config.instances_max.max(1);
    let memories = if config.small_virtual_memory { MEMORIES_MAX.min(3) } else { MEMORIES_MAX };
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(instances)
        .total_core_instances(instances * CORE_INSTANCES_MAX)
        .total_memories(instances * memories)
        .total_tables(instances * TABLES_MAX)
        .total_stacks(instances)
        .max_core_instances_per_component(CORE_INSTANCES_MAX)
        .max_memories_per_component(memories)
        .max_tables_per_component(TABLES_MAX)
        .max_memories_per_module(MEMORIES_OF_MODULE_MAX)
        .max_tables_per_module(TABLES_OF_MODULE_MAX)
        .table_elements(TABLE_ELEMENTS_MAX)
        .max_memory_size(config.memory_bytes_max)
        .async_stack_keep_resident(64 << 10)
        .decommit_batch_size(16);
    keep_resident(&mut pool, has_page_map);
    pool
}

/// Sets the bytes that stay mapped between two instances. Without the page map the pool clears all
/// of them, written or not, so fewer stay.
fn keep_resident(pool: &mut PoolingAllocationConfig, has_page_map: bool) {
    let (memory, table, scan) = match has_page_map {
        true => (1 << 20, 64 << 10, Enabled::Yes),
        false => (128 << 10, 8 << 10, Enabled::No),
    };
    pool.linear_memory_keep_resident(memory).table_keep_resident(table).pagemap_scan(scan);
}
