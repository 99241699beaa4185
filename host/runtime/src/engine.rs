//! The engine: what is switched on, how much every instance may have, and the clock that
//! makes a spinning guest yield.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use crate::{compiler::Compiler, error::LoadError};

/// How often the epoch moves; a spinning guest yields to its neighbours that often.
const EPOCH: Duration = Duration::from_millis(1);

/// Polls of tasks after which the executor looks at connections and timers, when it is never idle.
/// A guest that computes takes as long as [`EPOCH`] for each.
const POLLS_BETWEEN_EVENTS: u32 = 8;

/// Linear memories of one component. QuickJS brings three.
pub(crate) const MEMORIES_MAX: u32 = 4;
/// Linear memories of one core module.
pub(crate) const MEMORIES_OF_MODULE_MAX: u32 = 1;
/// Tables of one core module.
pub(crate) const TABLES_OF_MODULE_MAX: u32 = 1;
/// Tables of one component.
pub(crate) const TABLES_MAX: u32 = 8;
/// Core instances of one component. Python brings about thirty.
pub(crate) const CORE_INSTANCES_MAX: u32 = 64;
/// Elements of one table. SpiderMonkey needs 7,697.
pub(crate) const TABLE_ELEMENTS_MAX: usize = 20_000;

/// What the operator decides about the runtime.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// Instances alive at the same time; further messages wait. Keep it above the number
    /// of partitions and retry workers of a host, since waiting counts against the deadline.
    pub instances_max: u32,
    /// Bytes of one linear memory, whatever a consumer's policy allows.
    pub memory_bytes_max: usize,
    /// Bytes of an uploaded component.
    pub component_bytes_max: usize,
    /// Where compiled code is kept between runs. It must belong to the host alone: its
    /// content is executed. None compiles at every start.
    pub cache_dir: Option<PathBuf>,
    /// Reserve no more address space than memories can use, for machines with a limit on
    /// virtual memory. Guests then check every access and run about a third slower.
    pub small_virtual_memory: bool,
    /// Count the instructions a guest executes, for a [`crate::Recorder`]. Guests run slower for
    /// it.
    pub count_fuel: bool,
    /// Components that are compiled at the same time. One uses every core already, where it is
    /// large.
    pub compilations_max: usize,
    /// The process that compiles. None compiles in this one, where a component that makes the
    /// compiler run away takes everything with it.
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

/// The executor for a process that runs guests beside work of its own: what waits for an answer
/// hears of it soon, however much guests compute.
pub fn executor() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .event_interval(POLLS_BETWEEN_EVENTS)
        .build()
}

/// The engine and its ticker, which ends with the engine's last clone.
pub(crate) fn start(config: &RuntimeConfig) -> Result<Engine, LoadError> {
    // With the kernel's page map only written pages are cleared between two instances.
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

/// What decides how code is compiled, for a process that does nothing else. Two engines with the
/// same settings have the same fingerprint, however they allocate instances.
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

    /// An engine that compiles and runs nothing: it reserves no address space and has no clock.
    pub(crate) fn engine(&self) -> wasmtime::Result<Engine> {
        Engine::new(&self.settings())
    }

    fn settings(&self) -> Config {
        let mut settings = Config::new();
        settings.epoch_interruption(true);
        settings.consume_fuel(self.count_fuel);
        settings.concurrency_support(false);
        settings.relaxed_simd_deterministic(true);
        // A stack of the pool goes from one tenant to the next.
        settings.async_stack_zeroing(true);
        if self.small_virtual_memory {
            settings.memory_reservation(self.memory_bytes_max as u64);
            settings.memory_guard_size(0);
            settings.memory_reservation_for_growth(0);
        }
        settings
    }
}

/// Every total is the number of instances times what one component may have, so whoever
/// holds a permit of the semaphore finds everything it needs.
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

/// Pages that stay mapped between two instances. Without the page map all of them are
/// cleared, written or not, so fewer are kept.
fn keep_resident(pool: &mut PoolingAllocationConfig, has_page_map: bool) {
    let (memory, table, scan) = match has_page_map {
        true => (1 << 20, 64 << 10, Enabled::Yes),
        false => (128 << 10, 8 << 10, Enabled::No),
    };
    pool.linear_memory_keep_resident(memory).table_keep_resident(table).pagemap_scan(scan);
}
