//! Which bytes of a pool are free: known in memory only, and found out anew whenever the pool is opened.
//!
//! Small buffers have a list for each length; they are cut from runs, and put back into the list of their length. Large
//! ones are spans, which grow together with their neighbours. Where many small ones lie free side by side and something
//! else is wanted, they are made spans again ([`Allocator::coalesce`]). Threads that only put new records cut them from
//! runs of their own ([`ThreadCaches`]), which go back when nothing else is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::sync::{CachePadded, STRIPE_COUNT, thread_stripe};
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{Mutex, MutexGuard, PoisonError, SCHEDULE_EXPLORATION, spin_loop, yield_now};
use crate::mem::epoch::RetireEpoch;
use crate::mem::region::PAGE;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::{BUFFER_ALIGN, OFFSET_END};

/// Buffers up to this length are small.
const SMALL_MAX: u64 = 4096;
const SIZE_CLASSES: usize = (SMALL_MAX / BUFFER_ALIGN) as usize;
/// What small buffers are cut from.
const RUN: u64 = 64 << 10;
/// Number of leaves that are cut from space at a time.
const LEAF_GROUP: u64 = 16;
/// Number of retired buffers that wait for readers together.
const RETIRED_BATCH_LEN: usize = if SCHEDULE_EXPLORATION { 1 } else { 128 };
/// How often the readers are looked for before there is no space; the last times others get the processor first,
/// because a reader that is in the way and does not go on has none.
const EPOCH_WAIT_ROUNDS: usize = if SCHEDULE_EXPLORATION { 2 } else { 10_000 };
const EPOCH_WAIT_YIELDS: usize = if SCHEDULE_EXPLORATION { 0 } else { 64 };

/// Maximum number of free ranges that are sorted and joined at every lack of space. More ranges are joined only after
/// enough bytes were freed that a share of the pool (1 / `COALESCE_POOL_SHARE`) may have become free, or after one
/// refused request per `COALESCE_RANGES_PER_FAILURE` ranges. So a request that fails in a large fragmented pool has a
/// bounded cost.
const COALESCE_ALWAYS_MAX: usize = 4096;
const COALESCE_POOL_SHARE: u64 = 64;
const COALESCE_RANGES_PER_FAILURE: usize = 64;
/// While the log is replayed, a pool above its limit grows by this part of its length.
const REPLAY_GROWTH_SHARE: u64 = 16;

/// The length of the runs that threads take for themselves, and of a pool that has any.
const THREAD_CACHE_RUN_LEN: u64 = 16 << 10;
const THREAD_CACHE_POOL_MIN: u64 = 256 * THREAD_CACHE_RUN_LEN;

/// When a pool cannot grow any more, thread caches get runs only if a run of this length is free: runs that were
/// taken back from thread caches for lack of space do not return there.
const THREAD_CACHE_SPAN_MIN: u64 = 2 * STRIPE_COUNT as u64 * THREAD_CACHE_RUN_LEN;

/// A buffer, or a leaf: where it begins and how long it is.
pub(crate) type PoolRange = (u64, u64);

/// Unreachable buffers that readers may still read.
struct RetiredBatch {
    since: RetireEpoch,
    records: Vec<PoolRange>,
    leaves: Vec<u64>,
}

/// Counts of one moment, in bytes but for the leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolUsage {
    /// The length of the pool.
    pub(crate) len: u64,
    /// Free, with what waits for readers, without leaves.
    pub(crate) free_bytes: u64,
    /// Leaves that are cut out and not in use; those that wait for readers, too.
    pub(crate) free_leaves: usize,
}

/// The free space of one pool. One thread at a time.
pub(crate) struct Allocator {
    len: u64,
    len_max: u64,
    /// The addresses that there are: what it may never exceed.
    address_len_max: u64,
    /// The log is being replayed: no reader is in the pool, and the limit does not hold.
    replaying: bool,
    grow_by: u64,
    /// It does not grow any more, whatever it may.
    is_closed: bool,
    /// There was nothing to grow by when it last tried.
    last_growth_failed: bool,
    /// Small free buffers of each length, by their offsets; what is there at all, as bits.
    classes: Vec<Vec<u64>>,
    nonempty_classes: [u64; SIZE_CLASSES / 64],
    small_bytes: u64,
    small_count: usize,
    run: (u64, u64),
    spans: BTreeMap<u64, u64>,
    spans_by_len: BTreeSet<(u64, u64)>,
    /// Bytes of `spans`.
    span_bytes: u64,
    free_leaves: Vec<u64>,
    /// A leaf for merging sparse leaves when there is no space: not available for anything else.
    merge_leaf: Option<u64>,
    /// Number of free leaves that are not available for anything else.
    reserved_leaves: usize,
    unsealed_retired: (Vec<PoolRange>, Vec<u64>),
    retired_batches: VecDeque<RetiredBatch>,
    /// Bytes of records in `open` and `waiting`.
    retired_bytes: u64,
    /// The first of `waiting` was waited for once, in vain.
    last_wait_failed: bool,
    /// Bytes that came back since the small ones were last gathered.
    freed_since_coalesce: u64,
    /// No free range has a free neighbour.
    is_coalesced: bool,
    /// Requests that found no space since the free ranges were last joined.
    failures_since_coalesce: usize,
}

impl Allocator {
    /// A pool of `len` bytes of which nothing is free. It grows by `grow_by` up to `len_max`, all of them whole pages.
    pub(crate) fn new(len: u64, len_max: u64, grow_by: u64) -> Allocator {
        Allocator {
            len,
            len_max: len_max.min(OFFSET_END) / PAGE * PAGE,
            address_len_max: len_max.min(OFFSET_END) / PAGE * PAGE,
            replaying: false,
            grow_by: grow_by.next_multiple_of(PAGE).max(PAGE),
            is_closed: false,
            last_growth_failed: false,
            classes: (0..SIZE_CLASSES).map(|_| Vec::new()).collect(),
            nonempty_classes: [0; SIZE_CLASSES / 64],
            small_bytes: 0,
            small_count: 0,
            run: (0, 0),
            spans: BTreeMap::new(),
            spans_by_len: BTreeSet::new(),
            span_bytes: 0,
            free_leaves: Vec::new(),
            merge_leaf: None,
            reserved_leaves: 0,
            unsealed_retired: (Vec::new(), Vec::new()),
            retired_batches: VecDeque::new(),
            retired_bytes: 0,
            last_wait_failed: false,
            freed_since_coalesce: 0,
            is_coalesced: false,
            failures_since_coalesce: usize::MAX / COALESCE_RANGES_PER_FAILURE,
        }
    }

    /// Lets the pool grow to `addresses` where its limit does not hold.
    pub(crate) fn set_addresses(&mut self, addresses: u64) {
        self.address_len_max = self.address_len_max.max(addresses.min(OFFSET_END) / PAGE * PAGE);
    }

    /// Records of the log are put until [`end_replay`](Allocator::end_replay): all of them were acknowledged, so the
    /// limit does not hold, and what they replace is free at once because no reader is there.
    pub(crate) fn begin_replay(&mut self) {
        self.replaying = true;
    }

    /// From now on the limit holds.
    pub(crate) fn end_replay(&mut self) {
        self.replaying = false;
    }

    /// Takes a buffer of `len` bytes, a multiple of [`BUFFER_ALIGN`] and not 0.
    ///
    /// # Errors
    /// `OutOfSpace` if there is none; whatever was free still is.
    pub(crate) fn allocate<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<u64> {
        debug_assert!(len > 0 && len.is_multiple_of(BUFFER_ALIGN));
        self.reclaim_retired(false);
        if self.exceeds_limit(len) {
            return Err(out_of_space(len));
        }
        if let Some(at) = self.find(len) {
            return Ok(at);
        }
        if self.freed_since_coalesce >= self.grow_by.max(self.len / 8)
            && self.small_bytes >= self.freed_since_coalesce / 2
        {
            self.coalesce();
            if let Some(at) = self.find(len) {
                return Ok(at);
            }
        }
        let grown = self.grow(backend, len);
        if let (Ok(()), Some(at)) = (&grown, self.find(len)) {
            return Ok(at);
        }
        self.reclaim_retired(true);
        if self.should_coalesce() {
            self.coalesce();
        }
        if let Some(at) = self.find(len) {
            return Ok(at);
        }
        if self.replaying {
            self.grow_beyond_limit(backend, len)?;
        }
        self.find(len).ok_or_else(|| {
            self.failures_since_coalesce += 1;
            grown.err().unwrap_or_else(|| out_of_space(len))
        })
    }

    /// Whether the pool is longer than its limit (the limit was lowered, or the log took more when it was replayed) and
    /// holds as much as it may: then free space is no space.
    fn exceeds_limit(&self, len: u64) -> bool {
        self.len > self.len_max && !self.replaying && self.used_bytes() + len > self.len_max
    }

    /// Bytes that are neither free nor about to be.
    fn used_bytes(&self) -> u64 {
        let leaves = (self.free_leaves.len() + self.merge_leaf.iter().len()) as u64 * LEAF_LEN;
        self.len - (self.span_bytes + self.small_bytes + (self.run.1 - self.run.0) + self.retired_bytes + leaves)
    }

    /// Whether joining the free ranges can help, and is worth its work by now.
    fn should_coalesce(&self) -> bool {
        let pieces = self.small_count + self.spans.len();
        let is_paid = || {
            self.freed_since_coalesce >= self.len / COALESCE_POOL_SHARE
                || self.failures_since_coalesce.saturating_mul(COALESCE_RANGES_PER_FAILURE) >= pieces
        };
        !self.is_coalesced && (pieces <= COALESCE_ALWAYS_MAX || is_paid())
    }

    /// As [`Allocator::allocate`], for a thread that has used up the run in its cache and may get another.
    pub(crate) fn allocate_or_refill_cache<M: PersistenceBackend>(
        &mut self,
        backend: &M,
        len: u64,
        shelf: &mut PoolRange,
    ) -> Result<u64> {
        self.reclaim_retired(false);
        let class = size_class(len);
        if self.exceeds_limit(THREAD_CACHE_RUN_LEN) {
            return self.allocate(backend, len);
        }
        if let Some(at) = self.pop(class) {
            return Ok(at);
        }
        let is_short = (self.last_growth_failed || self.len + self.grow_by > self.len_max)
            && self.longest() < THREAD_CACHE_SPAN_MIN;
        let found =
            if self.len_max >= THREAD_CACHE_POOL_MIN && !is_short { self.find(THREAD_CACHE_RUN_LEN) } else { None };
        let Some(at) = found else { return self.allocate(backend, len) };
        self.add_free_range(std::mem::replace(shelf, (at + len, THREAD_CACHE_RUN_LEN - len)));
        Ok(at)
    }

    /// Takes a leaf.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`].
    pub(crate) fn allocate_leaf<M: PersistenceBackend>(&mut self, backend: &M) -> Result<u64> {
        self.reclaim_retired(false);
        if self.free_leaves.is_empty() {
            self.carve_leaves(backend)?;
        }
        Ok(self.free_leaves.pop().expect("some were cut"))
    }

    /// Takes a leaf that is not reserved.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`].
    pub(crate) fn allocate_unreserved_leaf<M: PersistenceBackend>(&mut self, backend: &M) -> Result<u64> {
        self.reserve_leaves(backend, 1)?;
        self.reserved_leaves -= 1;
        self.allocate_leaf(backend)
    }

    /// Whether there is a leaf for making others denser.
    pub(crate) fn has_merge_leaf(&mut self) -> bool {
        self.reclaim_retired(false);
        self.merge_leaf.is_some()
    }

    /// The leaf that is there for making others denser; another one comes back for it.
    pub(crate) fn take_merge_leaf(&mut self) -> Option<u64> {
        self.reclaim_retired(false);
        self.merge_leaf.take()
    }

    /// Reserves `count` leaves for callers that will take at most this many.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`]; then none are.
    pub(crate) fn reserve_leaves<M: PersistenceBackend>(&mut self, backend: &M, count: usize) -> Result<()> {
        self.reclaim_retired(false);
        self.reserved_leaves += count;
        while self.free_leaves.len() < self.reserved_leaves {
            // Those that were cut are space for anything else again.
            self.carve_leaves(backend).inspect_err(|_| self.release_leaf_reservation(count))?;
        }
        Ok(())
    }

    /// Releases the leaves that were reserved and not taken.
    pub(crate) fn release_leaf_reservation(&mut self, count: usize) {
        self.reserved_leaves -= count;
        self.is_coalesced = false;
    }

    /// As `take`, for what must not fail any more: if need be the pool gets longer than it may be.
    ///
    /// # Errors
    /// `OutOfSpace` if that is not enough.
    pub(crate) fn allocate_beyond_limit<M: PersistenceBackend, T>(
        &mut self,
        backend: &M,
        take: impl Fn(&mut Allocator, &M) -> Result<T>,
    ) -> Result<T> {
        take(self, backend).or_else(|_| {
            let limit = std::mem::replace(&mut self.len_max, self.address_len_max);
            let taken = take(self, backend);
            self.len_max = limit;
            taken
        })
    }

    fn carve_leaves<M: PersistenceBackend>(&mut self, backend: &M) -> Result<()> {
        let (there, gap) = (self.free_leaves.len(), LEAF_ALIGN - BUFFER_ALIGN);
        let (at, count) = match self.allocate(backend, LEAF_GROUP * LEAF_LEN + gap) {
            Ok(at) => (at, LEAF_GROUP),
            // A leaf that waited may have come back meanwhile.
            Err(_) if self.free_leaves.len() > there => return Ok(()),
            Err(_) => (self.allocate(backend, LEAF_LEN + gap)?, 1),
        };
        let start = at.next_multiple_of(LEAF_ALIGN);
        let end = start + count * LEAF_LEN;
        self.add_free_range((at, start - at));
        self.add_free_range((end, at + count * LEAF_LEN + gap - end));
        self.free_leaves.extend((0..count).rev().map(|n| start + n * LEAF_LEN));
        if count > 1 && self.merge_leaf.is_none() {
            self.merge_leaf = self.free_leaves.pop();
        }
        Ok(())
    }

    /// Frees space that was never published.
    pub(crate) fn free(&mut self, range: PoolRange) {
        self.freed_since_coalesce += range.1;
        self.is_coalesced = false;
        self.add_free_range(range);
    }

    pub(crate) fn free_leaf(&mut self, leaf: u64) {
        // Leaves that were promised come first.
        if self.merge_leaf.is_none() && self.free_leaves.len() >= self.reserved_leaves {
            self.merge_leaf = Some(leaf);
            return;
        }
        self.freed_since_coalesce += LEAF_LEN;
        self.is_coalesced = false;
        self.free_leaves.push(leaf);
    }

    /// Frees unreachable space once all current readers have unpinned.
    pub(crate) fn retire(&mut self, range: PoolRange) {
        if self.replaying {
            return self.free(range);
        }
        self.retired_bytes += range.1;
        self.unsealed_retired.0.push(range);
        if self.unsealed_retired.0.len() >= RETIRED_BATCH_LEN {
            self.reclaim_retired(false);
        }
    }

    /// As [`Allocator::retire`], for a leaf. These come seldom, and are wanted soon.
    pub(crate) fn retire_leaf(&mut self, leaf: u64) {
        if self.replaying {
            return self.free_leaf(leaf);
        }
        self.unsealed_retired.1.push(leaf);
        self.seal_retired_batch();
        self.reclaim_retired(false);
    }

    fn seal_retired_batch(&mut self) {
        let (records, leaves) = std::mem::take(&mut self.unsealed_retired);
        if !records.is_empty() || !leaves.is_empty() {
            self.retired_batches.push_back(RetiredBatch { since: RetireEpoch::advance(), records, leaves });
        }
    }

    /// Takes back what waited for readers that have left; all of it, if they leave soon, if it is `urgent`. True if
    /// nothing waits any more.
    pub(crate) fn reclaim_retired(&mut self, urgent: bool) -> bool {
        if urgent || self.unsealed_retired.0.len() >= RETIRED_BATCH_LEN {
            self.seal_retired_batch();
        }
        // A reader that was waited for in vain may be asleep: not every request that fails waits as long again.
        let mut patience = if !urgent {
            0
        } else if self.last_wait_failed {
            EPOCH_WAIT_YIELDS
        } else {
            EPOCH_WAIT_ROUNDS
        };
        while let Some(first) = self.retired_batches.front() {
            if first.since.all_unpinned() {
                let RetiredBatch { records, leaves, .. } =
                    self.retired_batches.pop_front().expect("there is a first one");
                self.last_wait_failed = false;
                for range in records {
                    self.retired_bytes -= range.1;
                    self.free(range);
                }
                leaves.into_iter().for_each(|leaf| self.free_leaf(leaf));
            } else if patience > 0 {
                patience -= 1;
                if patience < EPOCH_WAIT_YIELDS { yield_now() } else { spin_loop() }
            } else {
                self.last_wait_failed |= urgent;
                break;
            }
        }
        self.retired_batches.is_empty()
    }

    /// A buffer from what is free.
    fn find(&mut self, len: u64) -> Option<u64> {
        if len > SMALL_MAX {
            return self.cut_span(len);
        }
        let class = size_class(len);
        if let Some(at) = self.pop(class) {
            return Some(at);
        }
        if let Some(at) = self.cut_run(len) {
            return Some(at);
        }
        if let Some(larger) = self.next_nonempty_class(class) {
            let at = self.pop(larger).expect("its bit is set");
            self.add_free_range((at + len, (larger - class) as u64 * BUFFER_ALIGN));
            return Some(at);
        }
        let &(most, at) = self.spans_by_len.last()?;
        self.remove_span(at, most);
        // What is left of the old run is less than `len`, which is small.
        let (old, end) = self.run;
        self.add_free_range((old, end - old));
        let run = most.min(RUN.max(len));
        self.run = (at, at + run);
        self.is_coalesced = false;
        self.add_free_range((at + run, most - run));
        self.cut_run(len)
    }

    fn cut_run(&mut self, len: u64) -> Option<u64> {
        let (at, end) = self.run;
        (end - at >= len).then(|| {
            self.run.0 += len;
            at
        })
    }

    fn cut_span(&mut self, len: u64) -> Option<u64> {
        let &(whole, at) = self.spans_by_len.range((len, 0)..).next()?;
        self.remove_span(at, whole);
        self.add_free_range((at + len, whole - len));
        Some(at)
    }

    fn pop(&mut self, class: usize) -> Option<u64> {
        let at = self.classes[class].pop()?;
        if self.classes[class].is_empty() {
            self.nonempty_classes[class / 64] &= !(1 << (class % 64));
        }
        self.small_bytes -= class_len(class);
        self.small_count -= 1;
        Some(at)
    }

    /// The first class behind `class` that has a buffer.
    fn next_nonempty_class(&self, class: usize) -> Option<usize> {
        let from = class + 1;
        (from / 64..SIZE_CLASSES / 64).find_map(|n| {
            let mask = if n == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
            let set = self.nonempty_classes[n] & mask;
            (set != 0).then(|| 64 * n + set.trailing_zeros() as usize)
        })
    }

    /// Makes a range free.
    fn add_free_range(&mut self, (at, len): PoolRange) {
        if len == 0 {
            return;
        }
        if len <= SMALL_MAX {
            let class = size_class(len);
            self.classes[class].push(at);
            self.nonempty_classes[class / 64] |= 1 << (class % 64);
            self.small_bytes += len;
            self.small_count += 1;
            return;
        }
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &its_len)) = self.spans.range(..at).next_back()
            && before + its_len == at
        {
            self.remove_span(before, its_len);
            start = before;
        }
        if let Some(&its_len) = self.spans.get(&end) {
            self.remove_span(end, its_len);
            end += its_len;
        }
        self.spans.insert(start, end - start);
        self.span_bytes += end - start;
        self.spans_by_len.insert((end - start, start));
    }

    fn remove_span(&mut self, at: u64, len: u64) {
        self.spans.remove(&at);
        self.span_bytes -= len;
        self.spans_by_len.remove(&(len, at));
    }

    /// Makes all that is free anew out of what lies side by side; free leaves count as any other space.
    fn coalesce(&mut self) {
        let mut all: Vec<PoolRange> = std::mem::take(&mut self.spans).into_iter().collect();
        self.spans_by_len.clear();
        for (class, list) in self.classes.iter_mut().enumerate() {
            all.extend(std::mem::take(list).into_iter().map(|at| (at, class_len(class))));
        }
        let promised = self.reserved_leaves.min(self.free_leaves.len());
        all.extend(self.free_leaves.drain(promised..).map(|leaf| (leaf, LEAF_LEN)));
        let (run, end) = std::mem::take(&mut self.run);
        all.push((run, end - run));
        self.nonempty_classes = [0; SIZE_CLASSES / 64];
        (
            self.small_bytes,
            self.small_count,
            self.span_bytes,
            self.freed_since_coalesce,
            self.failures_since_coalesce,
        ) = (0, 0, 0, 0, 0);
        let spare = self.merge_leaf.take();
        all.extend(spare.map(|leaf| (leaf, LEAF_LEN)));
        all.sort_unstable();
        all.dedup_by(|(at, len), before| {
            let joins = before.0 + before.1 == *at;
            before.1 += if joins { *len } else { 0 };
            joins
        });
        if spare.is_some() {
            // Where it is least in the way.
            let least = all.iter().enumerate().filter(|(_, range)| first_leaf_in(**range).is_some());
            let least = least.min_by_key(|(_, (_, len))| *len).map(|(n, _)| n);
            least.into_iter().for_each(|n| self.add_free_at_open(all.swap_remove(n)));
        }
        all.into_iter().for_each(|range| self.add_free_range(range));
        self.is_coalesced = true;
    }

    /// Makes the pool longer by one step, or so that there is a span of `len` bytes; by less, if it may not get longer:
    /// what is free at its end may make up for that.
    fn grow<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<()> {
        if self.is_closed {
            return Err(Error::new(ErrorKind::Closed, "the database is closed"));
        }
        let wanted = self.len.saturating_add(len.max(self.grow_by));
        let to = wanted.checked_next_multiple_of(self.grow_by).unwrap_or(u64::MAX).min(self.len_max);
        self.grow_to(backend, to, len)
    }

    /// The same above its limit, by no more than is needed and a part of its length.
    fn grow_beyond_limit<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<()> {
        let by = len.max((self.len / REPLAY_GROWTH_SHARE).min(self.grow_by));
        self.grow_to(backend, self.len.saturating_add(by).next_multiple_of(PAGE).min(self.address_len_max), len)
    }

    fn grow_to<M: PersistenceBackend>(&mut self, backend: &M, to: u64, len: u64) -> Result<()> {
        if to <= self.len {
            return Err(out_of_space(len));
        }
        let grown = backend.grow(to);
        self.last_growth_failed = grown.is_err();
        grown?;
        let from = std::mem::replace(&mut self.len, to);
        self.is_coalesced = false;
        self.add_free_range((from, to - from));
        Ok(())
    }

    /// The most bytes that are free side by side.
    fn longest(&self) -> u64 {
        self.spans_by_len.last().map_or(0, |(len, _)| *len)
    }

    /// It does not grow any more.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    /// From now on it grows up to `len_max` only; what it has got, it keeps.
    pub(crate) fn set_limit(&mut self, len_max: u64) {
        self.len_max = len_max.min(OFFSET_END) / PAGE * PAGE;
    }

    /// Makes a range free that was found to be so when the pool was opened.
    pub(crate) fn add_free_at_open(&mut self, (at, len): PoolRange) {
        if let (None, Some(leaf)) = (self.merge_leaf, first_leaf_in((at, len))) {
            self.merge_leaf = Some(leaf);
            self.add_free_range((at, leaf - at));
            return self.add_free_range((leaf + LEAF_LEN, at + len - (leaf + LEAF_LEN)));
        }
        self.add_free_range((at, len));
    }

    pub(crate) fn usage(&self) -> PoolUsage {
        let leaves: usize = self.retired_batches.iter().map(|waiting| waiting.leaves.len()).sum();
        PoolUsage {
            len: self.len,
            free_bytes: self.span_bytes + self.small_bytes + (self.run.1 - self.run.0) + self.retired_bytes,
            free_leaves: self.free_leaves.len() + self.merge_leaf.iter().len() + leaves + self.unsealed_retired.1.len(),
        }
    }
}

/// The first leaf that a range has place for.
fn first_leaf_in((at, len): PoolRange) -> Option<u64> {
    let leaf = at.next_multiple_of(LEAF_ALIGN);
    (leaf + LEAF_LEN <= at + len).then_some(leaf)
}

fn size_class(len: u64) -> usize {
    (len / BUFFER_ALIGN) as usize - 1
}

fn class_len(class: usize) -> u64 {
    (class as u64 + 1) * BUFFER_ALIGN
}

#[cold]
fn out_of_space(len: u64) -> Error {
    Error::new(ErrorKind::OutOfSpace, format!("the pool is as large as it may be and has no {len} bytes left"))
}

/// Longer buffers are not cut from thread caches.
const CACHED_LEN_MAX: u64 = 1024;

/// Runs from which threads cut small buffers without locking the allocator, so that they do not wait for each other.
/// Thread safe. A thread cache may be locked first, and then the allocator; never in the other order.
#[derive(Default)]
pub(crate) struct ThreadCaches([ThreadCache; STRIPE_COUNT]);

type ThreadCache = CachePadded<Mutex<PoolRange>>;

fn lock_cache(shelf: &ThreadCache) -> MutexGuard<'_, PoolRange> {
    shelf.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadCaches {
    /// Takes a buffer of `len` bytes from the cache of this thread, or from `space`.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; there may be space in thread caches.
    pub(crate) fn allocate<'s, M: PersistenceBackend>(
        &self,
        backend: &M,
        len: u64,
        space: impl FnOnce() -> Result<MutexGuard<'s, Allocator>>,
    ) -> Result<u64> {
        if len > CACHED_LEN_MAX {
            return space()?.allocate(backend, len);
        }
        let mut shelf = lock_cache(&self.0[thread_stripe()]);
        if shelf.1 >= len {
            let at = shelf.0;
            *shelf = (at + len, shelf.1 - len);
            return Ok(at);
        }
        space()?.allocate_or_refill_cache(backend, len, &mut shelf)
    }

    /// Takes all runs away.
    pub(crate) fn drain(&self) -> Vec<PoolRange> {
        let runs = self.0.iter().map(|shelf| std::mem::take(&mut *lock_cache(shelf)));
        runs.filter(|(_, len)| *len > 0).collect()
    }

    /// What is on them, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|shelf| lock_cache(shelf).1).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::epoch::Pin;
    use crate::mem::epoch::tests::wait_until;
    use crate::pmem::persistence::PoolImage;
    use crate::vfs::seeded_rng::SeededRng;

    const LEN_MAX: u64 = 1 << 20;

    fn test_allocator() -> (PoolImage, Allocator) {
        (PoolImage::new(LEN_MAX).unwrap(), Allocator::new(0, LEN_MAX, 16 << 10))
    }

    /// What is taken, with what is known to be free, is the whole pool, and nothing is taken twice.
    fn check(space: &Allocator, taken: &BTreeMap<u64, u64>, leaves: usize) {
        let mut end = 0;
        for (&at, &len) in taken {
            assert!(at >= end && at.is_multiple_of(BUFFER_ALIGN), "{at} is taken twice");
            end = at + len;
        }
        let PoolUsage { len, free_bytes: free, free_leaves: leaves_free } = space.usage();
        assert!(end <= len);
        let taken: u64 = taken.values().sum();
        assert_eq!(taken + free + (leaves_free - leaves) as u64 * LEAF_LEN, len, "bytes were lost");
    }

    #[test]
    fn allocator_neither_loses_nor_doubles_bytes() {
        let (image, mut space) = test_allocator();
        let mut rng = SeededRng::new(5, 0);
        let mut taken = BTreeMap::new();
        let mut refused = 0;
        for round in 0..20_000 {
            let len = match rng.below(20) {
                0 => 16 * (1 + rng.below(4000) as u64),
                1 => LEAF_LEN,
                _ => 16 * (1 + rng.below(40) as u64),
            };
            if rng.below(100) < if round / 2000 % 2 == 0 { 60 } else { 35 } {
                let at = if len == LEAF_LEN { space.allocate_leaf(&image) } else { space.allocate(&image, len) };
                match at {
                    Ok(at) => assert_eq!(taken.insert(at, len), None),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        refused += 1;
                    }
                }
            } else if let Some((&at, &len)) = taken.range(rng.below(LEN_MAX as usize) as u64..).next() {
                taken.remove(&at);
                match (len, rng.below(2)) {
                    (LEAF_LEN, 0) => space.retire_leaf(at),
                    (LEAF_LEN, _) => space.free_leaf(at),
                    (_, 0) => space.retire((at, len)),
                    _ => space.free((at, len)),
                }
            }
            if round % 100 == 0 {
                check(&space, &taken, 0);
            }
        }
        assert!(refused > 0, "it was never full");
        for (at, len) in std::mem::take(&mut taken) {
            space.free((at, len));
        }
        // Other tests of this process may be reading something.
        wait_until(|| space.reclaim_retired(true));
        space.coalesce();
        assert_eq!((space.spans.len(), space.merge_leaf), (1, Some(0)), "all of it lies side by side again");
        assert_eq!(space.find(space.len - LEAF_LEN), Some(LEAF_LEN));
    }

    #[test]
    fn freed_small_buffers_serve_other_lengths() {
        let (image, mut space) = test_allocator();
        let small: Vec<u64> = std::iter::from_fn(|| space.allocate(&image, 48).ok()).collect();
        // What is left of each run is too short.
        assert!(small.len() as u64 >= LEN_MAX / 48 - 2 * LEN_MAX / RUN, "{}", small.len());
        small.iter().for_each(|at| space.free((*at, 48)));
        let other: Vec<u64> = std::iter::from_fn(|| space.allocate(&image, 4000).ok()).collect();
        assert!(other.len() as u64 >= LEN_MAX / 4000 - 2 * LEN_MAX / RUN, "{}", other.len());
        other.iter().for_each(|at| space.free((*at, 4000)));
        space.allocate(&image, LEN_MAX).unwrap();
    }

    /// A request that failed in a large fragmented pool joined all free ranges, each time.
    #[test]
    fn full_allocator_fails_without_coalescing() {
        let (image, mut space) = test_allocator();
        let all: Vec<u64> = std::iter::from_fn(|| space.allocate(&image, 48).ok()).collect();
        all.iter().step_by(2).for_each(|at| space.free((*at, 48)));
        assert!(space.small_count > 2 * COALESCE_ALWAYS_MAX);
        for refused in 1..50 {
            assert!(space.allocate(&image, 4000).is_err());
            assert_eq!(space.failures_since_coalesce, refused, "the free ranges were joined again");
        }
        // Nor for each little that comes back.
        for (n, at) in all.iter().skip(1).step_by(2).take(20).enumerate() {
            space.free((*at, 48));
            assert!(space.allocate(&image, 4000).is_err());
            assert_eq!(space.failures_since_coalesce, 50 + n);
        }
        // What came back is space in the end.
        all.iter().skip(41).step_by(2).for_each(|at| space.free((*at, 48)));
        assert!(space.allocate(&image, 4000).is_ok());
    }

    #[test]
    fn growth_extends_free_span_at_pool_end() {
        let (image, mut space) = test_allocator();
        space.allocate(&image, 16 << 10).unwrap();
        let at = space.allocate(&image, LEN_MAX - (32 << 10)).unwrap();
        assert_eq!((space.usage().len, at), (LEN_MAX - (16 << 10), 16 << 10));
        space.free((at, LEN_MAX - (32 << 10)));
        assert_eq!(space.allocate(&image, LEN_MAX - (16 << 10)).unwrap(), 16 << 10);
        assert_eq!(space.usage(), PoolUsage { len: LEN_MAX, free_bytes: 0, free_leaves: 0 });
    }

    #[test]
    fn free_leaves_become_buffers_when_full() {
        let (image, mut space) = test_allocator();
        let leaves: Vec<u64> = std::iter::from_fn(|| space.allocate_leaf(&image).ok()).collect();
        assert!(leaves.iter().all(|leaf| leaf.is_multiple_of(LEAF_ALIGN)));
        assert!(leaves.len() as u64 >= LEN_MAX / (LEAF_LEN + LEAF_ALIGN), "{}", leaves.len());
        leaves.iter().for_each(|leaf| space.free_leaf(*leaf));
        space.allocate(&image, LEN_MAX / 2).unwrap();
    }

    #[test]
    fn reserved_leaves_are_not_allocated() {
        let (image, mut space) = test_allocator();
        space.reserve_leaves(&image, 100).unwrap();
        while space.allocate(&image, 16).is_ok() {}
        let mut leaves: Vec<u64> = (0..100).map(|_| space.allocate_leaf(&image).unwrap()).collect();
        assert_eq!(space.allocate_leaf(&image).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(space.reserve_leaves(&image, 1).unwrap_err().kind(), ErrorKind::OutOfSpace);
        space.release_leaf_reservation(100);
        leaves.drain(..).for_each(|leaf| space.free_leaf(leaf));
        space.allocate(&image, 16).unwrap();
    }

    #[test]
    fn retired_buffer_waits_for_pinned_reader() {
        let (image, mut space) = test_allocator();
        let at = space.allocate(&image, LEN_MAX - PAGE).unwrap();
        let pin = Pin::new();
        space.retire((at, LEN_MAX - PAGE));
        assert_eq!(space.allocate(&image, 2 * PAGE).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(space.usage().free_bytes, LEN_MAX, "it is counted");
        drop(pin);
        wait_until(|| space.allocate(&image, 2 * PAGE).is_ok());
    }
}
