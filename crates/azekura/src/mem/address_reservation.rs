//! Addresses for memory that grows without moving.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

#[cfg(all(unix, not(miri)))]
use mapped::ReservedMapping;

use crate::mem::pages::PAGE;

/// Zeroed memory from the global allocator, aligned to a page.
pub(crate) struct ZeroedAllocation {
    start: NonNull<u8>,
    len: usize,
}

impl ZeroedAllocation {
    fn new(len: usize) -> Option<ZeroedAllocation> {
        let layout = Layout::from_size_align(len, PAGE as usize).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the size is not zero.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| ZeroedAllocation { start, len })
    }
}

impl Drop for ZeroedAllocation {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and its owner is being dropped.
        unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, PAGE as usize)) }
    }
}

/// Addresses for the maximum length of a private region. A small reservation is allocated with its memory by the
/// global allocator, which needs no system call. So is every reservation on systems where this module cannot reserve
/// addresses.
pub(crate) enum AddressReservation {
    Zeros(ZeroedAllocation),
    #[cfg(all(unix, not(miri)))]
    Mapped(ReservedMapping),
}

impl AddressReservation {
    #[cfg(all(unix, not(miri)))]
    const SMALL: usize = 256 << 10;

    pub(crate) fn new(len: usize) -> Option<AddressReservation> {
        #[cfg(all(unix, not(miri)))]
        if len > AddressReservation::SMALL {
            return ReservedMapping::new(len).map(AddressReservation::Mapped);
        }
        ZeroedAllocation::new(len).map(AddressReservation::Zeros)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        match self {
            AddressReservation::Zeros(zeros) => zeros.start,
            #[cfg(all(unix, not(miri)))]
            AddressReservation::Mapped(mapped) => mapped.start(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            AddressReservation::Zeros(zeros) => zeros.len,
            #[cfg(all(unix, not(miri)))]
            AddressReservation::Mapped(mapped) => mapped.len(),
        }
    }

    /// Commits memory for `from..to`: zeros that can be read and written.
    pub(crate) fn commit(&self, from: usize, to: usize) -> Option<()> {
        assert!(from <= to && to <= self.len());
        match self {
            AddressReservation::Zeros(_) => Some(()),
            #[cfg(all(unix, not(miri)))]
            AddressReservation::Mapped(mapped) => mapped.open(from, to),
        }
    }

    /// Gives the memory of `from..to`, which is committed, back to the system. It can be accessed like before, and
    /// contains zeros or the old bytes.
    pub(crate) fn release(&self, from: usize, to: usize) {
        assert!(from <= to && to <= self.len());
        match self {
            AddressReservation::Zeros(_) => {}
            #[cfg(all(unix, not(miri)))]
            AddressReservation::Mapped(mapped) => mapped.release(from, to),
        }
    }
}

/// Reserved addresses, to which memory is committed in parts.
#[cfg(all(unix, not(miri)))]
mod mapped {
    use std::ffi::c_void;
    use std::ptr::{self, NonNull};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use crate::mem::pages::HUGE_PAGE;

    pub(crate) struct ReservedMapping {
        /// Start of the mapping; `whole` is its length. The reservation of `len` bytes starts at `start`.
        base: NonNull<u8>,
        whole: usize,
        start: NonNull<u8>,
        len: usize,
    }

    impl ReservedMapping {
        pub(super) fn new(len: usize) -> Option<ReservedMapping> {
            let whole = len.checked_add(HUGE_PAGE)?;
            // SAFETY: a private anonymous mapping at an address that the system chooses affects no existing memory.
            let base = unsafe { mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE).ok()? };
            let base = NonNull::new(base.cast::<u8>())?;
            debug_assert!(base.align_offset(HUGE_PAGE) + len <= whole, "the aligned addresses are in the mapping");
            // SAFETY: the mapping is longer than `len` by `HUGE_PAGE`, and the alignment skips less than that.
            let start = unsafe { base.add(base.align_offset(HUGE_PAGE)) };
            Some(ReservedMapping { base, whole, start, len })
        }

        pub(super) fn start(&self) -> NonNull<u8> {
            self.start
        }

        pub(super) fn len(&self) -> usize {
            self.len
        }

        /// As [`AddressReservation::commit`](super::AddressReservation::commit), which has checked the range.
        pub(super) fn open(&self, from: usize, to: usize) -> Option<()> {
            assert!(from <= to && to <= self.len);
            // SAFETY: the range is within the mapping, which `self` owns. Committed pages stay accessible, and no
            // reference to a page that is not committed exists.
            unsafe {
                let at: *mut c_void = self.start.add(from).as_ptr().cast();
                mprotect(at, to - from, MprotectFlags::READ | MprotectFlags::WRITE).ok()?;
                advise_huge(at, to - from);
            }
            Some(())
        }

        /// As [`AddressReservation::release`](super::AddressReservation::release), which has checked the range.
        pub(super) fn release(&self, from: usize, to: usize) {
            assert!(from <= to && to <= self.len);
            // SAFETY: the range is within the mapping, which `self` owns, and which is private anonymous memory. The
            // region accesses it through atomics only.
            unsafe { advise_unneeded(self.start.add(from).as_ptr().cast(), to - from) };
        }
    }

    /// # Safety
    /// The range must be private anonymous memory, and may be accessed only through atomics.
    #[cfg(target_os = "linux")]
    unsafe fn advise_unneeded(start: *mut c_void, len: usize) {
        // SAFETY: the caller ensures that the range is mapped, and that no reference relies on its values. Afterwards
        // the pages are zero. If the call fails, they keep their bytes.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxDontNeed) };
    }

    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    unsafe fn advise_unneeded(_start: *mut c_void, _len: usize) {}

    /// # Safety
    /// The range must be mapped.
    #[cfg(target_os = "linux")]
    unsafe fn advise_huge(start: *mut c_void, len: usize) {
        // SAFETY: the caller ensures that the range is mapped. The advice changes how the pages are backed, not their
        // contents; a system without huge pages rejects it.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
    }

    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    unsafe fn advise_huge(_start: *mut c_void, _len: usize) {}

    impl Drop for ReservedMapping {
        fn drop(&mut self) {
            // SAFETY: this is the whole of one mapping that `self` owns, and the owner is being dropped. If unmapping
            // fails, only address space and memory are lost.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.whole) };
        }
    }
}
