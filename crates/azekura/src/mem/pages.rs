//! Large allocations, on huge pages where the system has them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// The size and the alignment of a huge page, in bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// The size of a page, in bytes. Lengths of regions and of pools are multiples of it.
pub(crate) const PAGE: u64 = 4096;

/// Alignment in bytes of allocations that are shorter than a huge page: a cache line.
const SMALL_ALIGN: usize = 64;

/// An owned allocation. Its bytes are uninitialized, so the owner writes before it reads.
///
/// An allocation of at least [`HUGE_PAGE`] bytes is aligned to that length, is mapped from the system, and is advised
/// to use huge pages; parts that are never touched cost only address space. A shorter one comes from the global
/// allocator.
pub(in crate::mem) struct PageAllocation {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory with one owner, which coordinates reads and writes of its parts.
unsafe impl Send for PageAllocation {}
// SAFETY: a shared `PageAllocation` only returns its address and its length.
unsafe impl Sync for PageAllocation {}

impl PageAllocation {
    /// Allocates `len` bytes, more than 0, aligned to at least 64 bytes; `None` if there is no memory.
    pub(in crate::mem) fn new(len: usize) -> Option<PageAllocation> {
        assert!(len > 0, "an allocation has at least one byte");
        if len < HUGE_PAGE {
            let layout = Layout::from_size_align(len, SMALL_ALIGN).ok()?;
            // SAFETY: the size is not zero.
            return NonNull::new(unsafe { alloc(layout) }).map(|start| PageAllocation { start, len });
        }
        let pages = system::map(len).map(|start| PageAllocation { start, len })?;
        debug_assert!(pages.start.addr().get().is_multiple_of(HUGE_PAGE), "a large allocation is on huge pages");
        Some(pages)
    }

    pub(in crate::mem) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(in crate::mem) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address and gives up the ownership; [`PageAllocation::from_raw`] restores it.
    pub(in crate::mem) fn into_raw(self) -> NonNull<u8> {
        std::mem::ManuallyDrop::new(self).start
    }

    /// Restores the ownership that [`PageAllocation::into_raw`] gave up.
    ///
    /// # Safety
    /// `start` must be from `into_raw` of an allocation of `len` bytes, and must be passed to this function only
    /// once.
    pub(in crate::mem) unsafe fn from_raw(start: NonNull<u8>, len: usize) -> PageAllocation {
        PageAllocation { start, len }
    }
}

impl Drop for PageAllocation {
    fn drop(&mut self) {
        if self.len < HUGE_PAGE {
            // SAFETY: `new` allocated `start` with this layout, and the owner, which is dropped, does not use it
            // afterwards.
            unsafe {
                dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, SMALL_ALIGN));
            }
        } else {
            // SAFETY: `new` mapped `start` with this length, and the owner, which is dropped, does not use it
            // afterwards.
            unsafe { system::unmap(self.start, self.len) }
        }
    }
}

#[cfg(all(unix, not(miri)))]
mod system {
    use std::ptr::NonNull;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use crate::mem::pages::HUGE_PAGE;

    /// Lengths passed to the system are multiples of this, in bytes; no system has larger base pages.
    const STEP: usize = 64 << 10;

    /// Maps fresh memory, aligned to a huge page.
    pub(super) fn map(len: usize) -> Option<NonNull<u8>> {
        let len = len.checked_next_multiple_of(STEP)?;
        let mapping_len = len.checked_add(HUGE_PAGE)?;
        // SAFETY: a private anonymous mapping at an address that the system chooses affects no existing memory.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapping_len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                .ok()?
        };
        let head = base.align_offset(HUGE_PAGE);
        let tail = mapping_len - head - len;
        // SAFETY: the mapping is head + len + tail bytes long. The parts before and after the aligned middle belong
        // to this mapping and are unused. If unmapping them fails, only address space is lost.
        let start = unsafe {
            let start = base.byte_add(head);
            let _ = if head > 0 { munmap(base, head) } else { Ok(()) };
            let _ = if tail > 0 { munmap(start.byte_add(len), tail) } else { Ok(()) };
            start
        };
        advise_huge(start, len);
        NonNull::new(start.cast())
    }

    /// # Safety
    /// `start` and `len` must be those of one call of `map`, and the memory must not be used any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, len: usize) {
        // SAFETY: the caller ensures that this is one whole mapping, which is not used any more. If unmapping fails,
        // only memory is lost.
        let _ = unsafe { munmap(start.as_ptr().cast(), len.next_multiple_of(STEP)) };
    }

    #[cfg(target_os = "linux")]
    fn advise_huge(start: *mut std::ffi::c_void, len: usize) {
        // SAFETY: the advice changes how the pages are backed, not their contents. A system without huge pages
        // rejects it.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
    }

    #[cfg(not(target_os = "linux"))]
    fn advise_huge(_start: *mut std::ffi::c_void, _len: usize) {}
}

#[cfg(any(not(unix), miri))]
mod system {
    use std::alloc::{Layout, alloc, dealloc};
    use std::ptr::NonNull;

    use crate::mem::pages::HUGE_PAGE;

    pub(super) fn map(len: usize) -> Option<NonNull<u8>> {
        let layout = Layout::from_size_align(len, HUGE_PAGE).ok()?;
        // SAFETY: the length is at least that of a huge page, so it is not zero.
        NonNull::new(unsafe { alloc(layout) })
    }

    /// # Safety
    /// `start` and `len` must be those of one call of `map`, and the memory must not be used any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, len: usize) {
        // SAFETY: `map` allocated the memory with this layout, and the caller does not use it any more.
        unsafe { dealloc(start.as_ptr(), Layout::from_size_align_unchecked(len, HUGE_PAGE)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_aligned_and_writable_to_its_end() {
        for len in [1, 63, 64, 4096, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE - 5] {
            let pages = PageAllocation::new(len).unwrap();
            let align = if len < HUGE_PAGE { SMALL_ALIGN } else { HUGE_PAGE };
            assert_eq!(pages.start().as_ptr() as usize % align, 0);
            // SAFETY: both bytes are within the allocation, and no other reference to it exists.
            unsafe {
                pages.start().write(7);
                pages.start().add(len - 1).write(9);
                assert_eq!(pages.start().add(len - 1).read(), 9);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri aborts when there is no memory")]
    fn impossible_sizes_are_refused() {
        assert!(PageAllocation::new(usize::MAX - 4096).is_none());
        // A 32-bit process may have this much memory.
        if cfg!(target_pointer_width = "64") {
            assert!(PageAllocation::new(isize::MAX as usize - HUGE_PAGE).is_none());
        }
    }
}
