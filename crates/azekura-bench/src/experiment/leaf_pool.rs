//! Allocations and undo transactions on a mapped file, with the costs that libpmemobj had in 2017.
//!
//! An allocation has a header of 64 bytes and takes a multiple of 64, at least 128. Each range that changes is written
//! to the undo journal first: 24 bytes and the old bytes, in whole lines, followed by a fence. Memory that a
//! transaction allocated is only flushed. Flushes and fences are executed for their cost; on ordinary memory they make
//! nothing persistent.
#![allow(unsafe_code)]

use crate::error::Result;
use anyhow::bail;
use derive_more::{AddAssign, Sub};
use memmap2::MmapMut;
use procfs::{CpuInfo, Current};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::ops::Range;
use std::path::Path;

/// Bytes that a flush writes back.
const LINE: usize = 64;
/// Header before each allocation.
const HEADER: usize = 64;
/// Allocations take a multiple of this.
const STEP: usize = 64;
/// The smallest allocation.
const ALLOCATION_LEN_MIN: usize = 128;
/// Header of a journal entry, before the old bytes.
const ENTRY_HEADER: usize = 24;
/// The journal is stored at the start of the pool.
const JOURNAL: Range<usize> = 4096..1 << 20;

/// Operations on the mapped memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, AddAssign, Sub)]
pub(crate) struct StoreCounts {
    /// Bytes stored.
    pub(crate) stored: u64,
    /// Lines flushed.
    pub(crate) lines: u64,
    pub(crate) fences: u64,
}

/// The lines of a range.
fn lines(range: &Range<usize>) -> Range<usize> {
    range.start / LINE..range.end.div_ceil(LINE)
}

/// A pool on a file. It is changed only between [`LeafPool::begin`] and [`LeafPool::commit`].
pub(crate) struct LeafPool {
    memory: MmapMut,
    has_clwb: bool,
    pub(crate) counts: StoreCounts,
    /// End of the last allocation.
    end: usize,
    /// Freed allocations, by length with the header.
    free: HashMap<usize, Vec<usize>>,
    /// Ranges that the transaction may store to.
    open: Vec<Range<usize>>,
    /// Freed when the transaction commits.
    leaving: Vec<usize>,
    /// Where the next journal entry begins.
    entry: usize,
}

impl LeafPool {
    /// Maps a new file of that length, a multiple of a page.
    pub(crate) fn create(path: &Path, len: usize) -> Result<LeafPool> {
        assert!(len > JOURNAL.end, "the journal has room");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(len as u64)?;
        // SAFETY: the file is new and in a directory of this run; no other process changes it.
        let memory = unsafe { MmapMut::map_mut(&file)? };
        let has_clwb = CpuInfo::current()?.flags(0).is_some_and(|flags| flags.contains(&"clwb"));
        let (counts, end, entry) = (StoreCounts::default(), JOURNAL.end, JOURNAL.start);
        let (free, open, leaving) = (HashMap::new(), Vec::new(), Vec::new());
        Ok(LeafPool { memory, has_clwb, counts, end, free, open, leaving, entry })
    }

    /// The instruction that flushes a line.
    pub(crate) fn flushes_by(&self) -> &'static str {
        match self.has_clwb {
            true => "clwb",
            false if cfg!(target_arch = "x86_64") => "clflush",
            false => "nothing",
        }
    }

    /// Bytes of allocations, freed ones included.
    pub(crate) fn bytes_taken(&self) -> u64 {
        (self.end - JOURNAL.end) as u64
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[at..at + len]
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at, 8).try_into().expect("eight bytes"))
    }

    pub(crate) fn begin(&mut self) {
        debug_assert!(self.open.is_empty() && self.leaving.is_empty(), "one transaction at a time");
        self.entry = JOURNAL.start;
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.counts.stored += bytes.len() as u64;
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes back the lines of a range.
    fn flush(&mut self, range: Range<usize>) {
        self.counts.lines += lines(&range).len() as u64;
        for line in lines(&range) {
            let address = self.memory[line * LINE..].as_ptr();
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the address is mapped, the processor has the instruction, and it changes no byte.
            unsafe {
                match self.has_clwb {
                    true => std::arch::asm!("clwb [{}]", in(reg) address, options(nostack, preserves_flags)),
                    false => std::arch::x86_64::_mm_clflush(address),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            std::hint::black_box(address);
        }
    }

    /// Orders earlier flushes before later stores.
    fn fence(&mut self) {
        self.counts.fences += 1;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every processor of this architecture has the instruction.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Writes a range to the journal, unless this transaction has journaled or allocated it.
    pub(crate) fn snapshot(&mut self, at: usize, len: usize) {
        if self.covers(at, len) {
            return;
        }
        let padded_len = (ENTRY_HEADER + len).next_multiple_of(STEP);
        assert!(self.entry + padded_len <= JOURNAL.end, "the journal has room for the transaction");
        // The last word takes the place of a checksum.
        let header = [at as u64, len as u64, at as u64 ^ len as u64].map(u64::to_le_bytes).concat();
        self.write(self.entry, &header);
        self.counts.stored += len as u64;
        self.memory.copy_within(at..at + len, self.entry + ENTRY_HEADER);
        self.flush(self.entry..self.entry + padded_len);
        self.fence();
        self.entry += padded_len;
        self.open.push(at..at + len);
    }

    fn covers(&self, at: usize, len: usize) -> bool {
        self.open.iter().rev().any(|range| range.start <= at && at + len <= range.end)
    }

    /// Stores to a range that was journaled or allocated.
    pub(crate) fn store(&mut self, at: usize, bytes: &[u8]) {
        debug_assert!(self.covers(at, bytes.len()), "a store outside of the transaction");
        self.write(at, bytes);
    }

    /// Allocates memory that is all zeros; an error if the pool is full.
    pub(crate) fn allocate(&mut self, len: usize) -> Result<usize> {
        let padded_len = (HEADER + len).next_multiple_of(STEP).max(ALLOCATION_LEN_MIN);
        let start = match self.free.get_mut(&padded_len).and_then(Vec::pop) {
            Some(start) => {
                self.write(start, &vec![0; padded_len]);
                start
            }
            None if self.end + padded_len <= self.memory.len() => {
                self.end += padded_len;
                self.end - padded_len
            }
            None => bail!("the pool is full"),
        };
        self.write(start, &(padded_len as u64).to_le_bytes());
        self.open.push(start..start + HEADER + len);
        Ok(start + HEADER)
    }

    /// Lines that a commit would flush now.
    pub(crate) fn lines_at_commit(&self) -> u64 {
        self.open.iter().map(|range| lines(range).len() as u64).sum::<u64>() + self.leaving.len() as u64
    }

    /// Frees an allocation when the transaction commits.
    pub(crate) fn release(&mut self, at: usize) {
        self.leaving.push(at - HEADER);
    }

    pub(crate) fn commit(&mut self) {
        for range in std::mem::take(&mut self.open) {
            self.flush(range);
        }
        for start in std::mem::take(&mut self.leaving) {
            self.write(start + 8, &1u64.to_le_bytes());
            self.flush(start..start + 16);
            self.free.entry(self.u64(start) as usize).or_default().push(start);
        }
        self.fence();
        if self.entry > JOURNAL.start {
            // Invalidates the journal.
            self.write(JOURNAL.start, &[0; 8]);
            self.flush(JOURNAL.start..JOURNAL.start + 8);
            self.fence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LeafPool, StoreCounts};

    #[test]
    fn only_journal_entries_cost_a_fence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let mut pool = LeafPool::create(&path, 2 << 20).unwrap();
        pool.begin();
        let at = pool.allocate(32).unwrap();
        pool.snapshot(at, 32);
        pool.store(at, &[7; 32]);
        assert_eq!(pool.counts.fences, 0, "allocated here");
        let (before, due) = (pool.counts.lines, pool.lines_at_commit());
        pool.commit();
        assert_eq!((pool.counts.fences, pool.counts.lines - before), (1, due));
        pool.begin();
        let before = pool.counts;
        pool.snapshot(at, 32);
        pool.snapshot(at + 8, 8);
        assert_eq!(pool.counts - before, StoreCounts { stored: 56, lines: 1, fences: 1 });
        pool.commit();
        assert_eq!(std::fs::read(&path).unwrap()[at..at + 32], [7; 32]);
        assert!(LeafPool::create(&path, 2 << 20).is_err(), "the file exists");
    }
}
