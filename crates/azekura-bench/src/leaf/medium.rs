//! A shared mapping of a file, and the instructions that make stores to it persistent where the memory is.
//!
//! They are executed for what they cost; on a file in ordinary memory they make nothing persistent.
#![allow(unsafe_code)]

use crate::failure::Result;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::OpenOptions;
use std::ops::Range;
use std::path::Path;
use std::ptr::{self, NonNull};

/// What a flush writes back, in bytes.
const LINE: usize = 64;

/// What was done to a medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Bytes stored.
    pub(crate) stored: u64,
    /// Lines flushed.
    pub(crate) lines: u64,
    pub(crate) fences: u64,
}

impl Counts {
    /// What came since.
    pub(crate) fn since(self, before: Counts) -> Counts {
        Counts {
            stored: self.stored - before.stored,
            lines: self.lines - before.lines,
            fences: self.fences - before.fences,
        }
    }

    pub(crate) fn add(&mut self, more: Counts) {
        self.stored += more.stored;
        self.lines += more.lines;
        self.fences += more.fences;
    }
}

/// The numbers of the lines of a range.
pub(crate) fn lines(at: usize, len: usize) -> Range<usize> {
    at / LINE..(at + len).div_ceil(LINE)
}

/// Mapped memory with one owner.
pub(crate) struct Medium {
    start: NonNull<u8>,
    len: usize,
    flush: Flush,
    counts: Counts,
}

impl Medium {
    /// Maps a new file of that length, a multiple of a page.
    pub(crate) fn create(path: &Path, len: usize) -> Result<Medium> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(len as u64)?;
        // SAFETY: the kernel chooses a fresh range of addresses, so no memory in use is touched.
        let start =
            unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)? };
        let start = NonNull::new(start.cast::<u8>()).ok_or("the null page was mapped")?;
        Ok(Medium { start, len, flush: Flush::best(), counts: Counts::default() })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// The instruction that flushes a line.
    pub(crate) fn flushes_by(&self) -> &'static str {
        self.flush.name()
    }

    /// # Panics
    /// If the range is out of bounds, as do all that follow.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        self.check(at, len);
        // SAFETY: within the mapping, which lives as long as `self`; only `&mut self` changes it, and the file is new
        // and nobody else's.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at, 8).try_into().expect("eight bytes"))
    }

    pub(crate) fn store(&mut self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        self.counts.stored += bytes.len() as u64;
        // SAFETY: within the mapping; `bytes` is not in it, for that would borrow `self`.
        unsafe { self.start.as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn copy(&mut self, from: usize, to: usize, len: usize) {
        self.check(from, len);
        self.check(to, len);
        self.counts.stored += len as u64;
        // SAFETY: both are within the mapping; they may overlap.
        unsafe { self.start.as_ptr().add(to).copy_from(self.start.as_ptr().add(from), len) }
    }

    /// Writes back the lines of a range.
    pub(crate) fn flush(&mut self, at: usize, len: usize) {
        self.check(at, len);
        self.counts.lines += lines(at, len).count() as u64;
        for line in lines(at, len).map(|line| line * LINE) {
            // SAFETY: mappings are whole pages, so the line is within.
            unsafe { self.flush.line(self.start.as_ptr().add(line)) }
        }
    }

    /// What was flushed before is persistent before what is stored behind.
    pub(crate) fn fence(&mut self) {
        self.counts.fences += 1;
        fence();
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} + {len} of {}", self.len);
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        // SAFETY: this very range was mapped, and nothing that borrowed it is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// How a line is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    #[cfg(target_arch = "x86_64")]
    Clwb,
    #[cfg(target_arch = "x86_64")]
    Clflush,
    #[cfg(not(target_arch = "x86_64"))]
    Nothing,
}

#[cfg(target_arch = "x86_64")]
impl Flush {
    fn best() -> Flush {
        // Every processor of this architecture has leaf 0, which says whether there is a leaf 7.
        let has_leaf = std::arch::x86_64::__cpuid(0).eax >= 7;
        match has_leaf && std::arch::x86_64::__cpuid_count(7, 0).ebx & (1 << 24) != 0 {
            true => Flush::Clwb,
            false => Flush::Clflush,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Flush::Clwb => "clwb",
            Flush::Clflush => "clflush",
        }
    }

    /// # Safety
    /// The address is in mapped memory.
    unsafe fn line(self, at: *mut u8) {
        match self {
            // SAFETY: the processor has the instruction, and it changes no byte.
            Flush::Clwb => unsafe { std::arch::asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags)) },
            // SAFETY: every processor of this architecture has it, and it changes no byte.
            Flush::Clflush => unsafe { std::arch::x86_64::_mm_clflush(at) },
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Flush {
    fn best() -> Flush {
        Flush::Nothing
    }

    fn name(self) -> &'static str {
        "nothing"
    }

    /// # Safety
    /// None: it does nothing.
    unsafe fn line(self, _: *mut u8) {}
}

#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: every processor of this architecture has the instruction.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_in_the_file_and_lines_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let mut medium = Medium::create(&path, 8192).unwrap();
        medium.store(60, b"0123456789");
        medium.copy(60, 63, 10);
        medium.flush(60, 13);
        medium.fence();
        assert_eq!(medium.bytes(58, 16), b"\0\x000120123456789\0");
        assert_eq!(medium.counts(), Counts { stored: 20, lines: 2, fences: 1 });
        medium.flush(128, 64);
        assert_eq!(medium.counts().lines, 3);
        assert_eq!(&std::fs::read(&path).unwrap()[60..73], b"0120123456789");
        assert!(Medium::create(&path, 8192).is_err(), "the file is there already");
    }

    #[test]
    #[should_panic(expected = "8190 + 3")]
    fn nothing_lies_behind_the_end() {
        let dir = tempfile::tempdir().unwrap();
        Medium::create(&dir.path().join("pool"), 8192).unwrap().bytes(8190, 3);
    }
}
