//! Settings of running and compiling components.

use std::{path::PathBuf, time::Duration};

use oncebox_runtime::Compiler;
use serde::Deserialize;

/// `[runtime]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeSettings {
    /// Most component instances at a time; never less than the connections.
    pub instances_max: u32,
    /// Most transactions of all tenants at a time. None stands for the number of connections, which
    /// is also the upper limit.
    pub transactions_max: Option<usize>,
    /// Most transactions of one tenant at a time, where its limits say nothing and the host has
    /// other tenants. None stands for half of all.
    pub tenant_transactions_max: Option<usize>,
    /// Longest call of a handler, in milliseconds, whatever a policy says. A tenant's limits may
    /// say less.
    pub deadline_ms_max: u64,
    /// Most bytes of all guests' memory together; each instance counts with the limit of its
    /// consumer.
    pub memory_bytes_max: u64,
    /// Folder of the cache of compiled code; none keeps it in memory only.
    pub cache_dir: Option<PathBuf>,
    /// Largest component, in bytes.
    pub component_bytes_max: usize,
    /// Most components that are compiled at a time.
    pub compile_workers: usize,
    /// Address space of a process that compiles, in bytes.
    pub compile_memory_bytes_max: u64,
    /// Longest compilation, in milliseconds.
    pub compile_timeout_ms: u64,
}

impl Default for RuntimeSettings {
    fn default() -> Self {
        Self {
            instances_max: 128,
            transactions_max: None,
            tenant_transactions_max: None,
            deadline_ms_max: 60_000,
            memory_bytes_max: 4 << 30,
            cache_dir: None,
            component_bytes_max: 64 << 20,
            compile_workers: 1,
            compile_memory_bytes_max: 4 << 30,
            compile_timeout_ms: 300_000,
        }
    }
}

impl RuntimeSettings {
    /// Returns the process that compiles for this host: a second run of this program.
    pub fn compiler(&self) -> Compiler {
        Compiler::own(self.compile_memory_bytes_max, Duration::from_millis(self.compile_timeout_ms))
    }
}
