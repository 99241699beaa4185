//! The allocator of a component that lives for one message.
//!
//! The first 256 KiB come from the module's own memory, one behind the other: an instance that needs no
//! more never asks the host to grow its memory, which costs more than all of its allocations. Only what
//! was allocated last is given back; the rest goes with the instance. Beyond that, and so for whatever
//! is large or long, the standard allocator does its work.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::UnsafeCell,
};

const ARENA_BYTES: usize = 256 << 10;

#[global_allocator]
static HEAP: Heap = Heap {
    arena: UnsafeCell::new([0; ARENA_BYTES]),
    used: UnsafeCell::new(0),
};

struct Heap {
    arena: UnsafeCell<[u8; ARENA_BYTES]>,
    used: UnsafeCell<usize>,
}

// SAFETY: a component has one thread.
unsafe impl Sync for Heap {}

impl Heap {
    fn start(&self) -> usize {
        self.arena.get() as usize
    }

    /// Whether this is what was allocated last in the arena.
    fn is_last(&self, block: *mut u8, size: usize) -> bool {
        // SAFETY: one thread, and no reference outlives this line.
        block as usize + size == self.start() + unsafe { *self.used.get() }
    }

    fn holds(&self, block: *mut u8) -> bool {
        (self.start()..self.start() + ARENA_BYTES).contains(&(block as usize))
    }
}

// SAFETY: blocks of the arena are aligned, do not overlap and stay where they are; those outside of it
// are the standard allocator's.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: one thread; the block lies inside the arena.
        unsafe {
            let used = &mut *self.used.get();
            let at = (self.start() + *used).next_multiple_of(layout.align()) - self.start();
            match at.checked_add(layout.size()) {
                Some(end) if end <= ARENA_BYTES => {
                    *used = end;
                    self.arena.get().cast::<u8>().add(at)
                }
                _ => System.alloc(layout),
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: one thread; a block outside of the arena is the standard allocator's.
        unsafe {
            if !self.holds(block) {
                System.dealloc(block, layout);
            } else if self.is_last(block, layout.size()) {
                *self.used.get() -= layout.size();
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above; what was allocated last grows and shrinks where it is, any other block is
        // copied, into one that does not overlap it.
        unsafe {
            if !self.holds(block) {
                return System.realloc(block, layout, size);
            }
            let at = block as usize - self.start();
            if self.is_last(block, layout.size()) && at + size <= ARENA_BYTES {
                *self.used.get() = at + size;
                return block;
            }
            let other = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !other.is_null() {
                block.copy_to_nonoverlapping(other, size.min(layout.size()));
            }
            other
        }
    }
}
