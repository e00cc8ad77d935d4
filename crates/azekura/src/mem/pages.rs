//! Memory in big pieces, on huge pages where the system has them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The size and the alignment of a huge page, in bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Pieces of exactly [`HUGE_PAGE`] bytes that are kept for the next taker instead of going back to the system: the
/// first touch of fresh memory costs more than everything that an insert does with it.
const FREE_LIST_MAX: usize = 16;

/// The alignment of pieces that are smaller than a huge page: a cache line.
const SMALL_ALIGN: usize = 64;

static FREE_LIST: Mutex<Vec<PageAllocation>> = Mutex::new(Vec::new());

/// One piece of memory, owned; its bytes may be anything, so users write before they read.
///
/// Pieces of at least [`HUGE_PAGE`] bytes are aligned to it, come from the system directly and are advised to be huge;
/// what is never touched costs address space only. Smaller ones come from the allocator.
pub(in crate::mem) struct PageAllocation {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory with one owner, which coordinates reads and writes of its parts.
unsafe impl Send for PageAllocation {}
// SAFETY: a shared `PageAllocation` only tells its address and length.
unsafe impl Sync for PageAllocation {}

impl PageAllocation {
    /// `len` bytes, more than 0, aligned to at least 64; `None` if there is no memory.
    pub(in crate::mem) fn new(len: usize) -> Option<PageAllocation> {
        assert!(len > 0, "a piece of memory has at least one byte");
        if len < HUGE_PAGE {
            let layout = Layout::from_size_align(len, SMALL_ALIGN).ok()?;
            // SAFETY: the size is not zero.
            return NonNull::new(unsafe { alloc(layout) }).map(|start| PageAllocation { start, len });
        }
        if len == HUGE_PAGE
            && let Some(spare) = FREE_LIST.lock().unwrap_or_else(PoisonError::into_inner).pop()
        {
            return Some(spare);
        }
        system::map(len).map(|start| PageAllocation { start, len })
    }

    pub(in crate::mem) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(in crate::mem) fn len(&self) -> usize {
        self.len
    }

    /// Gives the ownership up; [`PageAllocation::from_raw`] takes it back.
    pub(in crate::mem) fn into_raw(self) -> NonNull<u8> {
        std::mem::ManuallyDrop::new(self).start
    }

    /// Takes back what [`PageAllocation::into_raw`] gave up.
    ///
    /// # Safety
    /// `start` comes from `into_raw` of a piece of `len` bytes, and this is the only time it is taken back.
    pub(in crate::mem) unsafe fn from_raw(start: NonNull<u8>, len: usize) -> PageAllocation {
        PageAllocation { start, len }
    }

    fn free(&self) {
        if self.len < HUGE_PAGE {
            // SAFETY: `new` allocated `start` with this very layout.
            unsafe {
                dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, SMALL_ALIGN));
            }
        } else {
            // SAFETY: `new` mapped `start` with this length, and the owner is going.
            unsafe { system::unmap(self.start, self.len) }
        }
    }
}

impl Drop for PageAllocation {
    fn drop(&mut self) {
        if self.len == HUGE_PAGE {
            let mut spares = FREE_LIST.lock().unwrap_or_else(PoisonError::into_inner);
            if spares.len() < FREE_LIST_MAX {
                return spares.push(PageAllocation { start: self.start, len: self.len });
            }
        }
        self.free();
    }
}

/// Gives the memory that is kept for reuse (at most 32 MiB) back to the system.
#[cfg(test)]
pub(crate) fn release_free_list() {
    let spares = std::mem::take(&mut *FREE_LIST.lock().unwrap_or_else(PoisonError::into_inner));
    for spare in spares {
        spare.free();
        std::mem::forget(spare); // dropping it would put it back
    }
}

#[cfg(all(unix, not(miri)))]
mod system {
    use std::ptr::NonNull;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use crate::mem::pages::HUGE_PAGE;

    /// The step of lengths given to the system; no system has larger base pages.
    const STEP: usize = 64 << 10;

    /// Fresh memory aligned to a huge page.
    pub(super) fn map(len: usize) -> Option<NonNull<u8>> {
        let len = len.checked_next_multiple_of(STEP)?;
        let whole = len.checked_add(HUGE_PAGE)?;
        // SAFETY: a private anonymous mapping at an address of the system's choice touches nothing that exists.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?
        };
        let head = base.align_offset(HUGE_PAGE);
        let tail = whole - head - len;
        // SAFETY: head + len + tail is the mapping; the parts before and behind the aligned middle are ours and unused.
        // A failure leaves address space behind, nothing else.
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
    /// `start` and `len` are those of one `map`, and nothing uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, len: usize) {
        // SAFETY: passed on to the caller. A failure leaves the memory mapped, nothing else.
        let _ = unsafe { munmap(start.as_ptr().cast(), len.next_multiple_of(STEP)) };
    }

    #[cfg(target_os = "linux")]
    fn advise_huge(start: *mut std::ffi::c_void, len: usize) {
        // SAFETY: the advice changes how the pages are backed, not what they hold. A system without huge pages refuses
        // it.
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
        // SAFETY: at least a huge page long, so the size is not zero.
        NonNull::new(unsafe { alloc(layout) })
    }

    /// # Safety
    /// `start` and `len` are those of one `map`, and nothing uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, len: usize) {
        // SAFETY: `map` allocated it with this very layout.
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
            // SAFETY: both bytes lie within the unit, and no other reference to it exists.
            unsafe {
                pages.start().write(7);
                pages.start().add(len - 1).write(9);
                assert_eq!(pages.start().add(len - 1).read(), 9);
            }
        }
        release_free_list();
    }

    #[test]
    #[cfg_attr(miri, ignore = "it stops where the memory ends")]
    fn impossible_sizes_are_refused() {
        assert!(PageAllocation::new(usize::MAX - 4096).is_none());
        assert!(PageAllocation::new(isize::MAX as usize - HUGE_PAGE).is_none());
    }
}
