//! Allocations, and transactions that can be undone, with the costs that libpmemobj had for them.
//!
//! Facts (pmemkv's reference, sections 1.6 and 1.7): an allocation has a header of 64 bytes and takes a multiple of 64,
//! 128 at least; what changes is written to the undo journal before, one entry of 24 bytes and the old bytes for each
//! range, in whole lines, closed by a fence; memory that a transaction allocated is only flushed.

use crate::failure::Result;
use crate::leaf::medium::{Counts, Medium, lines};
use std::collections::HashMap;
use std::ops::Range;

/// Before each allocation.
const HEADER: usize = 64;
/// Allocations take a multiple of this.
const STEP: usize = 64;
/// And no less than this.
const LEAST: usize = 128;
/// Of an entry of the journal, before the old bytes.
const ENTRY_HEADER: usize = 24;
/// The journal stands at the start of the pool.
const JOURNAL: Range<usize> = 4096..1 << 20;

/// A pool of persistent memory. Whoever changes it does so between [`begin`](Pool::begin) and
/// [`commit`](Pool::commit).
pub(crate) struct Pool {
    medium: Medium,
    /// Behind the last allocation.
    end: usize,
    /// What was freed, by length with the header.
    free: HashMap<usize, Vec<usize>>,
    /// Ranges that the transaction may store to.
    open: Vec<Range<usize>>,
    /// Freed when the transaction commits.
    leaving: Vec<usize>,
    /// Where the next entry of the journal begins.
    entry: usize,
}

impl Pool {
    pub(crate) fn new(medium: Medium) -> Pool {
        assert!(medium.len() > JOURNAL.end, "the journal has room");
        Pool {
            medium,
            end: JOURNAL.end,
            free: HashMap::new(),
            open: Vec::new(),
            leaving: Vec::new(),
            entry: JOURNAL.start,
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.medium.counts()
    }

    /// Bytes of allocations, what is free among them too.
    pub(crate) fn bytes_taken(&self) -> u64 {
        (self.end - JOURNAL.end) as u64
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        self.medium.bytes(at, len)
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        self.medium.u64(at)
    }

    pub(crate) fn begin(&mut self) {
        debug_assert!(self.open.is_empty() && self.leaving.is_empty(), "one transaction at a time");
        self.entry = JOURNAL.start;
    }

    /// Journals a range unless it was journaled, or allocated, in this transaction.
    pub(crate) fn snapshot(&mut self, at: usize, len: usize) {
        if self.covers(at, len) {
            return;
        }
        let taken = (ENTRY_HEADER + len).next_multiple_of(STEP);
        assert!(self.entry + taken <= JOURNAL.end, "the journal has room for the transaction");
        let mut header = [0; ENTRY_HEADER];
        header[..8].copy_from_slice(&(at as u64).to_le_bytes());
        header[8..16].copy_from_slice(&(len as u64).to_le_bytes());
        // Stands for the checksum of the entry.
        header[16..].copy_from_slice(&(at as u64 ^ len as u64).to_le_bytes());
        self.medium.store(self.entry, &header);
        self.medium.copy(at, self.entry + ENTRY_HEADER, len);
        self.medium.flush(self.entry, taken);
        self.medium.fence();
        self.entry += taken;
        self.open.push(at..at + len);
    }

    fn covers(&self, at: usize, len: usize) -> bool {
        self.open.iter().rev().any(|range| range.start <= at && at + len <= range.end)
    }

    /// Stores to a range that was journaled or allocated.
    pub(crate) fn store(&mut self, at: usize, bytes: &[u8]) {
        debug_assert!(self.covers(at, bytes.len()), "a store outside of the transaction");
        self.medium.store(at, bytes);
    }

    /// Memory that is all zeros.
    ///
    /// # Errors
    /// If the pool is full.
    pub(crate) fn allocate(&mut self, len: usize) -> Result<usize> {
        let taken = (HEADER + len).next_multiple_of(STEP).max(LEAST);
        let start = match self.free.get_mut(&taken).and_then(Vec::pop) {
            Some(start) => {
                self.medium.store(start, &vec![0; taken]);
                start
            }
            None if self.end + taken <= self.medium.len() => {
                self.end += taken;
                self.end - taken
            }
            None => return Err("the pool is full".into()),
        };
        self.medium.store(start, &(taken as u64).to_le_bytes());
        self.open.push(start..start + HEADER + len);
        Ok(start + HEADER)
    }

    /// Lines that a commit would flush now.
    pub(crate) fn lines_at_commit(&self) -> u64 {
        let open = self.open.iter().map(|range| lines(range.start, range.len()).count() as u64);
        open.sum::<u64>() + self.leaving.len() as u64
    }

    /// Gives an allocation back when the transaction commits.
    pub(crate) fn release(&mut self, at: usize) {
        self.leaving.push(at - HEADER);
    }

    pub(crate) fn commit(&mut self) {
        for range in std::mem::take(&mut self.open) {
            self.medium.flush(range.start, range.len());
        }
        for start in std::mem::take(&mut self.leaving) {
            let taken = self.medium.u64(start) as usize;
            self.medium.store(start + 8, &1u64.to_le_bytes());
            self.medium.flush(start, 16);
            self.free.entry(taken).or_default().push(start);
        }
        self.medium.fence();
        if self.entry > JOURNAL.start {
            // The journal counts no more.
            self.medium.store(JOURNAL.start, &[0; 8]);
            self.medium.flush(JOURNAL.start, 8);
            self.medium.fence();
        }
    }

    /// The instruction that flushes a line.
    pub(crate) fn flushes_by(&self) -> &'static str {
        self.medium.flushes_by()
    }
}

/// A pool in a directory of its own, for tests.
#[cfg(test)]
pub(crate) fn scratch(len: usize) -> (tempfile::TempDir, Pool) {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::new(Medium::create(&dir.path().join("pool"), len).unwrap());
    (dir, pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_costs_a_fence_and_fresh_memory_none() {
        let (_dir, mut pool) = scratch(2 << 20);
        pool.begin();
        let at = pool.allocate(32).unwrap();
        pool.snapshot(at, 32);
        pool.store(at, &[7; 32]);
        assert_eq!(pool.counts().fences, 0, "allocated here");
        let (before, due) = (pool.counts().lines, pool.lines_at_commit());
        pool.commit();
        assert_eq!((pool.counts().fences, pool.counts().lines - before), (1, due));
        pool.begin();
        let before = pool.counts();
        pool.snapshot(at, 32);
        pool.snapshot(at + 8, 8);
        assert_eq!(pool.counts().since(before), Counts { stored: 56, lines: 1, fences: 1 });
        pool.store(at, &[8; 32]);
        pool.commit();
        assert_eq!(pool.counts().since(before).fences, 3, "the entry, the commit, the end of the journal");
        assert_eq!(pool.bytes(at, 32), [8; 32]);
    }

    #[test]
    fn allocations_take_128_bytes_at_least_and_come_back_as_zeros() {
        let (_dir, mut pool) = scratch(2 << 20);
        pool.begin();
        let (small, large) = (pool.allocate(1).unwrap(), pool.allocate(65).unwrap());
        assert_eq!(pool.bytes_taken(), 128 + 192);
        pool.store(small, &[9]);
        pool.commit();
        pool.begin();
        pool.release(small);
        assert_ne!(pool.allocate(60).unwrap(), small, "not before the transaction commits");
        pool.commit();
        pool.begin();
        assert_eq!(pool.allocate(64).unwrap(), small);
        assert_eq!(pool.bytes(small, 64), [0; 64]);
        assert_eq!(pool.bytes_taken(), 128 + 192 + 128);
        pool.release(large);
        pool.commit();
        pool.begin();
        assert!(pool.allocate(2 << 20).is_err());
    }
}
