//! Memory of one instance, counted over all its memories and tables.

use wasmtime::ResourceLimiter;

/// Bytes a table takes per element.
const TABLE_ELEMENT_BYTES: usize = std::mem::size_of::<usize>();

/// Refuses growth beyond a total, and remembers that it did: the guest itself only aborts,
/// which would look like a bug of its own.
pub(crate) struct MemoryLimiter {
    used: usize,
    max: usize,
    exceeded: bool,
}

impl MemoryLimiter {
    pub(crate) fn new(max: usize) -> Self {
        Self { used: 0, max, exceeded: false }
    }

    /// Whether the guest ever asked for more than it may have.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.exceeded
    }

    /// Bytes the guest has; memory is never given back, so also the most it had.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Bytes the guest may have.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    fn grow(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> bool {
        let total = self.used.saturating_add(desired.saturating_sub(current));
        if total > self.max || maximum.is_some_and(|maximum| desired > maximum) {
            self.exceeded = true;
            return false;
        }
        self.used = total;
        true
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(self.grow(current, desired, maximum))
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.exceeded = true;
        Ok(())
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let bytes = |elements: usize| elements.saturating_mul(TABLE_ELEMENT_BYTES);
        Ok(self.grow(bytes(current), bytes(desired), maximum.map(bytes)))
    }

    fn table_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.exceeded = true;
        Ok(())
    }
}
