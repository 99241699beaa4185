//! Limit on the memory of one instance, over all its memories and tables.

use wasmtime::ResourceLimiter;

/// Bytes of a table's element.
const TABLE_ELEMENT_BYTES: usize = std::mem::size_of::<usize>();

/// A limiter that refuses growth beyond a total. It records the refusal: the guest itself only
/// aborts, which would look like a bug of its own.
pub(crate) struct MemoryLimiter {
    used: usize,
    max: usize,
    exceeded: bool,
}

impl MemoryLimiter {
    pub(crate) fn new(max: usize) -> Self {
        Self { used: 0, max, exceeded: false }
    }

    /// Returns whether the guest has ever asked for more than its limit.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.exceeded
    }

    /// Returns the bytes that the guest has. Memory never shrinks, so this is also the maximum.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Returns the most bytes that the guest may have.
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
