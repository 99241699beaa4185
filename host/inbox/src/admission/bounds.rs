//! Bounds over which transactions wait.

use std::time::Duration;

/// Bounds that all tenants of a host share. Over them, transactions wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBounds {
    /// Most transactions that run at once.
    pub transactions_max: usize,
    /// Most bytes that instances of handlers have together, each counted with what its consumer
    /// allows.
    pub memory_bytes_max: u64,
    /// Most transactions of one tenant at once, where its limits have no bound and the host has
    /// other tenants; none for the host's bound.
    pub tenant_transactions_max: Option<usize>,
    /// Longest call of a handler, whatever its consumer's policy says; none for the policy's bound.
    pub deadline_max: Option<Duration>,
}

impl HostBounds {
    /// Makes bounds on what all tenants have together, and none on one tenant's part.
    pub fn new(transactions_max: usize, memory_bytes_max: u64) -> Self {
        Self {
            transactions_max,
            memory_bytes_max,
            tenant_transactions_max: None,
            deadline_max: None,
        }
    }
}

/// Caps of a consumer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConsumerCaps {
    /// Most transactions at once; none for the tenant's bound.
    pub transactions_max: Option<usize>,
    /// Most messages a second; none for as many as come.
    pub messages_per_second: Option<u32>,
}
