//! Counts the memory that each thread allocates, in tests.
//!
//! The threads of a process free what readers of any thread have released. A test that reads or writes a database runs
//! [in its own process](crate::testing::is_in_own_process).

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocated minus freed bytes of this thread, and the highest value since the last call of [`peak_bytes`].
    static BYTES: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn count(bytes: i64) {
    // A thread that ends may free memory after its thread-local values.
    let _ended = BYTES.try_with(|cell| {
        let (now, peak) = cell.get();
        cell.set((now + bytes, peak.max(now + bytes)));
    });
}

// SAFETY: every call is passed on to the system allocator, unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    /// # Safety
    /// As the same function of [`GlobalAlloc`].
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    /// As the same function of [`GlobalAlloc`].
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.alloc_zeroed(layout) }
    }

    /// # Safety
    /// As the same function of [`GlobalAlloc`].
    unsafe fn realloc(&self, start: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.realloc(start, layout, new_size) }
    }

    /// # Safety
    /// As the same function of [`GlobalAlloc`].
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.dealloc(start, layout) }
    }
}

/// Bytes that this thread has allocated and not freed. Memory that is mapped from the system does not count.
pub(crate) fn allocated_bytes() -> i64 {
    BYTES.get().0
}

/// The result of `call`, and the most bytes that it had allocated at one time on this thread.
pub(crate) fn peak_bytes<T>(call: impl FnOnce() -> T) -> (T, i64) {
    let (before, _) = BYTES.get();
    BYTES.set((before, before));
    let result = call();
    (result, BYTES.get().1 - before)
}
