//! Addresses for memory that will be needed, given out before the memory.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Lengths of regions are multiples of this, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Zeros from the allocator, aligned to a page.
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
        // SAFETY: `new` allocated it with this very layout, and the owner is going.
        unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, PAGE as usize)) }
    }
}

/// Addresses for all that a private region may become. Small ones come from the allocator, with memory, which costs no
/// call of the system.
pub(crate) enum AddressReservation {
    Zeros(ZeroedAllocation),
    Mapped(ReservedMapping),
}

impl AddressReservation {
    const SMALL: usize = 256 << 10;

    pub(crate) fn new(len: usize) -> Option<AddressReservation> {
        if len <= AddressReservation::SMALL {
            ZeroedAllocation::new(len).map(AddressReservation::Zeros)
        } else {
            ReservedMapping::new(len).map(AddressReservation::Mapped)
        }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        match self {
            AddressReservation::Zeros(zeros) => zeros.start,
            AddressReservation::Mapped(mapped) => mapped.start(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            AddressReservation::Zeros(zeros) => zeros.len,
            AddressReservation::Mapped(mapped) => mapped.len(),
        }
    }

    /// Gives memory to `from..to`, zeros that may be read and written.
    pub(crate) fn commit(&self, from: usize, to: usize) -> Option<()> {
        assert!(from <= to && to <= self.len());
        match self {
            AddressReservation::Zeros(_) => Some(()),
            AddressReservation::Mapped(mapped) => mapped.open(from, to),
        }
    }
}

use mapped::ReservedMapping;

/// Addresses without memory, which are given memory piece by piece.
#[cfg(all(unix, not(miri)))]
mod mapped {
    use std::ffi::c_void;
    use std::ptr::{self, NonNull};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use crate::mem::pages::HUGE_PAGE;

    pub(crate) struct ReservedMapping {
        /// The mapping, and where the reserve begins in it.
        base: NonNull<u8>,
        whole: usize,
        start: NonNull<u8>,
        len: usize,
    }

    impl ReservedMapping {
        pub(super) fn new(len: usize) -> Option<ReservedMapping> {
            let whole = len.checked_add(HUGE_PAGE)?;
            // SAFETY: a private anonymous mapping at an address of the system's choice touches nothing that exists.
            let base = unsafe { mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE).ok()? };
            let base = NonNull::new(base.cast::<u8>())?;
            // SAFETY: the mapping is longer than `len` by what aligning takes off.
            let start = unsafe { base.add(base.align_offset(HUGE_PAGE)) };
            Some(ReservedMapping { base, whole, start, len })
        }

        pub(super) fn start(&self) -> NonNull<u8> {
            self.start
        }

        pub(super) fn len(&self) -> usize {
            self.len
        }

        /// As [`AddressReservation::commit`](crate::mem::address_reservation::AddressReservation::commit), for a range
        /// that was looked at there.
        pub(super) fn open(&self, from: usize, to: usize) -> Option<()> {
            assert!(from <= to && to <= self.len);
            // SAFETY: the range lies in the mapping, which is ours; opened pages stay open, and no reference to those
            // that are not open exists.
            unsafe {
                let at: *mut c_void = self.start.add(from).as_ptr().cast();
                mprotect(at, to - from, MprotectFlags::READ | MprotectFlags::WRITE).ok()?;
                advise_huge(at, to - from);
            }
            Some(())
        }
    }

    /// # Safety
    /// The range is mapped.
    #[cfg(target_os = "linux")]
    unsafe fn advise_huge(start: *mut c_void, len: usize) {
        // SAFETY: passed on to the caller. The advice changes how the pages are backed, not what they hold; a system
        // without huge pages refuses it.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
    }

    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    unsafe fn advise_huge(_start: *mut c_void, _len: usize) {}

    impl Drop for ReservedMapping {
        fn drop(&mut self) {
            // SAFETY: the whole of one mapping of ours, and the owner is going. A failure leaves it mapped, no more.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.whole) };
        }
    }
}

/// Where there is no way to reserve addresses: memory at once.
#[cfg(any(not(unix), miri))]
mod mapped {
    use std::ptr::NonNull;

    use crate::mem::address_reservation::ZeroedAllocation;

    pub(crate) struct ReservedMapping(ZeroedAllocation);

    impl ReservedMapping {
        pub(super) fn new(len: usize) -> Option<ReservedMapping> {
            ZeroedAllocation::new(len).map(ReservedMapping)
        }

        pub(super) fn start(&self) -> NonNull<u8> {
            self.0.start
        }

        pub(super) fn len(&self) -> usize {
            self.0.len
        }

        pub(super) fn open(&self, _from: usize, _to: usize) -> Option<()> {
            Some(())
        }
    }
}
