//! Asking the processor for memory before it is needed.
#![allow(unsafe_code)]

/// Fetches the cache lines of `value` beside what is done next; only a hint.
#[inline]
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    let start: *const u8 = std::ptr::from_ref(value).cast();
    for line in (0..size_of_val(value)).step_by(64) {
        prefetch_line(start.wrapping_add(line));
    }
}

/// Fetches the line of an address, which need not be one.
#[inline]
pub(crate) fn prefetch_line(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch never faults, whatever the address; SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = at;
}
