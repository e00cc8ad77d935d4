//! The free space of a pool. It is volatile: opening a pool computes it from the reachable leaves and records.
//!
//! Small free buffers are kept in one list for each length. They are cut from runs, and a freed buffer is added to
//! the list of its length. Large free ranges are spans, which are joined with adjacent spans. When a request finds no
//! space, adjacent small buffers are joined into spans again ([`Allocator::coalesce`]). Threads that put new records
//! cut buffers from runs of their own ([`ThreadCaches`]), which are drained when no other space is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::sync::{CachePadded, STRIPE_COUNT, thread_stripe};
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{Mutex, MutexGuard, SCHEDULE_EXPLORATION, lock, spin_loop, yield_now};
use crate::mem::epoch::RetireEpoch;
use crate::mem::pages::PAGE;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::{BUFFER_ALIGN, OFFSET_END};

/// Buffers up to this length in bytes are small.
const SMALL_MAX: u64 = 4096;
const SIZE_CLASSES: usize = (SMALL_MAX / BUFFER_ALIGN) as usize;
/// Length in bytes of a run, from which small buffers are cut.
const RUN: u64 = 64 << 10;
/// Number of leaves that are cut from free space at a time.
const LEAF_GROUP: u64 = 16;
/// Number of retired buffers in a batch. A batch is freed as a whole once no reader can read it.
const RETIRED_BATCH_LEN: usize = if SCHEDULE_EXPLORATION { 1 } else { 128 };
/// How often a request that finds no space checks whether the pinned readers have unpinned. In the last rounds it
/// yields the processor, because a reader that makes no progress may not be running.
const EPOCH_WAIT_ROUNDS: usize = if SCHEDULE_EXPLORATION { 2 } else { 10_000 };
const EPOCH_WAIT_YIELDS: usize = if SCHEDULE_EXPLORATION { 0 } else { 64 };

/// Maximum number of free ranges that are sorted and joined whenever a request finds no space. A larger number is
/// joined only after enough bytes were freed (1 / `COALESCE_POOL_SHARE` of the pool), or after one refused request
/// per `COALESCE_RANGES_PER_FAILURE` ranges. So a request that fails in a large fragmented pool has a bounded cost.
const COALESCE_ALWAYS_MAX: usize = 4096;
const COALESCE_POOL_SHARE: u64 = 64;
const COALESCE_RANGES_PER_FAILURE: usize = 64;
/// While the WAL is replayed, a pool above its limit grows by this share of its length.
const REPLAY_GROWTH_SHARE: u64 = 16;

/// Length in bytes of a run of a thread cache, and the minimum of the limit of a pool that uses thread caches.
const THREAD_CACHE_RUN_LEN: u64 = 16 << 10;
const THREAD_CACHE_POOL_MIN: u64 = 256 * THREAD_CACHE_RUN_LEN;

/// When a pool cannot grow any more, a thread cache gets a run only if a span of this length is free. So the runs
/// that were drained from thread caches for lack of space are not cached again.
const THREAD_CACHE_SPAN_MIN: u64 = 2 * STRIPE_COUNT as u64 * THREAD_CACHE_RUN_LEN;

/// Maximum number of free ranges that [`Allocator::check_invariants`] visits one by one.
const INVARIANT_RANGES_MAX: usize = 24;

/// Offset and length of a range, in bytes.
pub(crate) type PoolRange = (u64, u64);

/// Unreachable buffers and leaves that pinned readers may still read.
struct RetiredBatch {
    since: RetireEpoch,
    records: Vec<PoolRange>,
    leaves: Vec<u64>,
}

/// The space usage of a pool at one point in time. Lengths are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolUsage {
    /// The length of the pool.
    pub(crate) len: u64,
    /// Free bytes, including those that wait for readers, without leaves.
    pub(crate) free_bytes: u64,
    /// Leaves that are cut and not in use, including those that wait for readers.
    pub(crate) free_leaves: usize,
}

/// The free space of one pool. The caller serializes access.
pub(crate) struct Allocator {
    len: u64,
    len_max: u64,
    /// The size of the address range, which the pool never exceeds.
    address_len_max: u64,
    /// The WAL is being replayed: the pool has no reader, and `len_max` does not hold.
    replaying: bool,
    grow_by: u64,
    /// The pool does not grow any more, regardless of its limits.
    is_closed: bool,
    /// The backend could not grow at the last attempt.
    last_growth_failed: bool,
    /// Offsets of the small free buffers of each length. `nonempty_classes` has a bit for each list that has a
    /// buffer.
    classes: Vec<Vec<u64>>,
    nonempty_classes: [u64; SIZE_CLASSES / 64],
    small_bytes: u64,
    small_count: usize,
    run: (u64, u64),
    spans: BTreeMap<u64, u64>,
    spans_by_len: BTreeSet<(u64, u64)>,
    /// Total length of `spans`.
    span_bytes: u64,
    free_leaves: Vec<u64>,
    /// A leaf that is used only to merge sparse leaves when there is no space.
    merge_leaf: Option<u64>,
    /// Number of free leaves that are reserved.
    reserved_leaves: usize,
    unsealed_retired: (Vec<PoolRange>, Vec<u64>),
    retired_batches: VecDeque<RetiredBatch>,
    /// Bytes of records in `unsealed_retired` and `retired_batches`.
    retired_bytes: u64,
    /// A request already waited in vain for the first of `retired_batches`.
    last_wait_failed: bool,
    /// Bytes freed since the free ranges were last joined.
    freed_since_coalesce: u64,
    /// No free range is adjacent to another one.
    is_coalesced: bool,
    /// Requests that found no space since the free ranges were last joined.
    failures_since_coalesce: usize,
}

impl Allocator {
    /// The space of a pool of `len` bytes of which nothing is free. It grows by `grow_by` up to `len_max`, in whole
    /// pages.
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

    /// Sets the length up to which the pool may grow where its limit does not hold.
    pub(crate) fn set_addresses(&mut self, addresses: u64) {
        self.address_len_max = self.address_len_max.max(addresses.min(OFFSET_END) / PAGE * PAGE);
    }

    /// Begins the replay of the WAL, which lasts until [`end_replay`](Allocator::end_replay). The limit does not
    /// hold, because all records of the WAL were acknowledged. Retired space is free at once, because there is no
    /// reader.
    pub(crate) fn begin_replay(&mut self) {
        self.replaying = true;
    }

    /// Ends the replay of the WAL. From now on the limit holds.
    pub(crate) fn end_replay(&mut self) {
        self.replaying = false;
    }

    /// Checks the state in builds with debug assertions. Called after each change. Visits the free ranges one by one
    /// only if there are few.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        assert!(self.free_bytes() <= self.len, "no more is free than the pool has");
        assert!(self.run.0 <= self.run.1 && self.run.1 <= self.len, "the run is in the pool");
        assert!(self.small_count as u64 * BUFFER_ALIGN <= self.small_bytes, "each small buffer has a length");
        let has_small = self.nonempty_classes.iter().any(|classes| *classes != 0);
        assert_eq!(has_small, self.small_count > 0, "a class with a buffer has a bit");
        assert_eq!(self.spans.len(), self.spans_by_len.len(), "each span is listed by its length");
        assert!(self.spans.last_key_value().is_none_or(|(at, len)| at + len <= self.len), "spans are in the pool");
        if self.small_count + self.spans.len() + self.free_leaves.len() > INVARIANT_RANGES_MAX {
            return;
        }
        let small =
            || self.classes.iter().enumerate().flat_map(|(n, class)| class.iter().map(move |at| (*at, class_len(n))));
        assert_eq!(small().count(), self.small_count, "small buffers are counted");
        assert_eq!(small().map(|(_, len)| len).sum::<u64>(), self.small_bytes, "bytes of small buffers are counted");
        assert_eq!(self.spans.values().sum::<u64>(), self.span_bytes, "bytes of spans are counted");
        assert!(self.spans_by_len.iter().all(|(len, at)| self.spans.get(at) == Some(len)), "spans have one length");
        let leaves = self.free_leaves.iter().chain(&self.merge_leaf).map(|leaf| (*leaf, LEAF_LEN));
        let spans = self.spans.iter().map(|(at, len)| (*at, *len));
        let mut all: Vec<PoolRange> = small().chain(spans).chain(leaves).collect();
        all.push((self.run.0, self.run.1 - self.run.0));
        all.sort_unstable();
        assert!(all.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "free ranges are disjoint");
    }

    /// Allocates a buffer of `len` bytes, a multiple of [`BUFFER_ALIGN`] and not 0.
    ///
    /// # Errors
    /// `OutOfSpace` if there is none; then no free space was lost.
    pub(crate) fn allocate<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<u64> {
        let allocated = self.allocate_or_grow(backend, len);
        self.check_invariants();
        allocated
    }

    fn allocate_or_grow<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<u64> {
        debug_assert!(len > 0, "an empty buffer needs no space");
        debug_assert!(len.is_multiple_of(BUFFER_ALIGN), "lengths of buffers are aligned");
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

    /// Whether the pool is longer than its limit, because the limit was lowered or the replay of the WAL took more,
    /// and the records in it reach the limit. Then free ranges are not allocated.
    fn exceeds_limit(&self, len: u64) -> bool {
        self.len > self.len_max && !self.replaying && self.used_bytes() + len > self.len_max
    }

    /// Bytes that are neither free nor retired.
    fn used_bytes(&self) -> u64 {
        self.len - self.free_bytes()
    }

    /// Bytes that are free or retired, with the free leaves.
    fn free_bytes(&self) -> u64 {
        let leaves = (self.free_leaves.len() + self.merge_leaf.iter().len()) as u64 * LEAF_LEN;
        self.span_bytes + self.small_bytes + (self.run.1 - self.run.0) + self.retired_bytes + leaves
    }

    /// Whether joining the free ranges can help, and enough bytes were freed or enough allocations failed since the
    /// last time.
    fn should_coalesce(&self) -> bool {
        let range_count = self.small_count + self.spans.len();
        let is_worth_it = || {
            self.freed_since_coalesce >= self.len / COALESCE_POOL_SHARE
                || self.failures_since_coalesce.saturating_mul(COALESCE_RANGES_PER_FAILURE) >= range_count
        };
        !self.is_coalesced && (range_count <= COALESCE_ALWAYS_MAX || is_worth_it())
    }

    /// As [`Allocator::allocate`], for a thread whose cache is used up. May refill the cache with a new run.
    pub(crate) fn allocate_or_refill_cache<M: PersistenceBackend>(
        &mut self,
        backend: &M,
        len: u64,
        cache: &mut PoolRange,
    ) -> Result<u64> {
        debug_assert!(cache.1 < len, "the cache is used up");
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
        self.add_free_range(std::mem::replace(cache, (at + len, THREAD_CACHE_RUN_LEN - len)));
        Ok(at)
    }

    /// Allocates a leaf.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`].
    pub(crate) fn allocate_leaf<M: PersistenceBackend>(&mut self, backend: &M) -> Result<u64> {
        self.reclaim_retired(false);
        if self.free_leaves.is_empty() {
            self.carve_leaves(backend)?;
        }
        Ok(self.free_leaves.pop().expect("leaves were just cut"))
    }

    /// Allocates a leaf that is not reserved.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`].
    pub(crate) fn allocate_unreserved_leaf<M: PersistenceBackend>(&mut self, backend: &M) -> Result<u64> {
        self.reserve_leaves(backend, 1)?;
        self.reserved_leaves -= 1;
        self.allocate_leaf(backend)
    }

    /// Whether the leaf for merging sparse leaves is available.
    pub(crate) fn has_merge_leaf(&mut self) -> bool {
        self.reclaim_retired(false);
        self.merge_leaf.is_some()
    }

    /// Takes the leaf for merging sparse leaves. The next leaf that is freed and not needed for a reservation
    /// replaces it.
    pub(crate) fn take_merge_leaf(&mut self) -> Option<u64> {
        self.reclaim_retired(false);
        self.merge_leaf.take()
    }

    /// Reserves `count` leaves for callers that will take at most this many.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Allocator::allocate`]; then no leaf was reserved.
    pub(crate) fn reserve_leaves<M: PersistenceBackend>(&mut self, backend: &M, count: usize) -> Result<()> {
        self.reclaim_retired(false);
        self.reserved_leaves += count;
        while self.free_leaves.len() < self.reserved_leaves {
            // If this fails, the leaves that were cut are no longer reserved, and become free space when ranges are
            // joined.
            self.carve_leaves(backend).inspect_err(|_| self.release_leaf_reservation(count))?;
        }
        Ok(())
    }

    /// Ends the reservation of `count` leaves.
    pub(crate) fn release_leaf_reservation(&mut self, count: usize) {
        debug_assert!(count <= self.reserved_leaves, "a reservation ends once");
        self.reserved_leaves -= count;
        self.is_coalesced = false;
    }

    /// Runs `take`, an allocation that must not fail any more. If there is no space, the pool grows beyond its limit.
    ///
    /// # Errors
    /// `OutOfSpace` if the address range or the file system has no space either.
    pub(crate) fn allocate_beyond_limit<M: PersistenceBackend, T>(
        &mut self,
        backend: &M,
        take: impl Fn(&mut Allocator, &M) -> Result<T>,
    ) -> Result<T> {
        take(self, backend).or_else(|_| {
            let limit = std::mem::replace(&mut self.len_max, self.address_len_max);
            let allocated = take(self, backend);
            self.len_max = limit;
            allocated
        })
    }

    fn carve_leaves<M: PersistenceBackend>(&mut self, backend: &M) -> Result<()> {
        let (free_before, alignment) = (self.free_leaves.len(), LEAF_ALIGN - BUFFER_ALIGN);
        let (at, count) = match self.allocate(backend, LEAF_GROUP * LEAF_LEN + alignment) {
            Ok(at) => (at, LEAF_GROUP),
            // A retired leaf may have become free meanwhile.
            Err(_) if self.free_leaves.len() > free_before => return Ok(()),
            Err(_) => (self.allocate(backend, LEAF_LEN + alignment)?, 1),
        };
        let start = at.next_multiple_of(LEAF_ALIGN);
        let end = start + count * LEAF_LEN;
        debug_assert!(end <= at + count * LEAF_LEN + alignment, "aligned leaves fit in the buffer");
        self.add_free_range((at, start - at));
        self.add_free_range((end, at + count * LEAF_LEN + alignment - end));
        self.free_leaves.extend((0..count).rev().map(|n| start + n * LEAF_LEN));
        if count > 1 && self.merge_leaf.is_none() {
            self.merge_leaf = self.free_leaves.pop();
        }
        Ok(())
    }

    /// Frees space that no reader can read.
    pub(crate) fn free(&mut self, range: PoolRange) {
        self.freed_since_coalesce += range.1;
        self.is_coalesced = false;
        self.add_free_range(range);
        self.check_invariants();
    }

    pub(crate) fn free_leaf(&mut self, leaf: u64) {
        debug_assert!(leaf.is_multiple_of(LEAF_ALIGN) && leaf + LEAF_LEN <= self.len, "a leaf of this pool");
        debug_assert!(self.merge_leaf != Some(leaf), "a leaf is freed once");
        debug_assert!(self.free_leaves.last() != Some(&leaf), "a leaf is freed once");
        // Reservations of leaves take precedence over the leaf for merging.
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
        debug_assert!(range.0 + range.1 <= self.len, "the retired range is in the pool");
        self.retired_bytes += range.1;
        self.unsealed_retired.0.push(range);
        if self.unsealed_retired.0.len() >= RETIRED_BATCH_LEN {
            self.reclaim_retired(false);
        }
    }

    /// As [`Allocator::retire`], for a leaf. Its batch is sealed at once, because leaves are retired rarely and
    /// needed soon.
    pub(crate) fn retire_leaf(&mut self, leaf: u64) {
        if self.replaying {
            return self.free_leaf(leaf);
        }
        self.unsealed_retired.1.push(leaf);
        self.seal_retired_batch();
        self.reclaim_retired(false);
    }

    /// As [`Allocator::retire`], for many records and leaves.
    pub(crate) fn retire_all(&mut self, records: Vec<PoolRange>, leaves: Vec<u64>) {
        if self.replaying {
            records.into_iter().for_each(|range| self.free(range));
            return leaves.into_iter().for_each(|leaf| self.free_leaf(leaf));
        }
        self.seal_retired_batch();
        debug_assert!(self.unsealed_retired.0.is_empty(), "a sealed batch is not overwritten");
        self.retired_bytes += records.iter().map(|(_, len)| len).sum::<u64>();
        self.unsealed_retired = (records, leaves);
        self.seal_retired_batch();
        self.reclaim_retired(false);
    }

    /// Seals the current batch of retired space, so that it is freed after the current readers.
    pub(crate) fn seal_retired_batch(&mut self) {
        let (records, leaves) = std::mem::take(&mut self.unsealed_retired);
        if !records.is_empty() || !leaves.is_empty() {
            self.retired_batches.push_back(RetiredBatch { since: RetireEpoch::advance(), records, leaves });
        }
    }

    /// Frees the retired batches that no pinned reader can read any more. If `urgent`, seals the current batch and
    /// waits a bounded time for readers. Returns true if no sealed batch waits any more.
    pub(crate) fn reclaim_retired(&mut self, urgent: bool) -> bool {
        if urgent || self.unsealed_retired.0.len() >= RETIRED_BATCH_LEN {
            self.seal_retired_batch();
        }
        // The reader that the last request waited for may be asleep, so the next failing requests wait for a shorter
        // time.
        let mut waits_left = if !urgent {
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
                    debug_assert!(range.1 <= self.retired_bytes, "retired bytes are counted");
                    self.retired_bytes -= range.1;
                    self.free(range);
                }
                leaves.into_iter().for_each(|leaf| self.free_leaf(leaf));
            } else if waits_left > 0 {
                waits_left -= 1;
                if waits_left < EPOCH_WAIT_YIELDS { yield_now() } else { spin_loop() }
            } else {
                self.last_wait_failed |= urgent;
                break;
            }
        }
        self.retired_batches.is_empty()
    }

    /// Takes a buffer from the free space.
    fn find(&mut self, len: u64) -> Option<u64> {
        let used = self.used_bytes();
        let found = if len > SMALL_MAX { self.cut_span(len) } else { self.find_small(len) };
        let found_bytes = if found.is_some() { len } else { 0 };
        debug_assert_eq!(self.used_bytes(), used + found_bytes, "exactly the buffer is taken from the free space");
        debug_assert!(found.is_none_or(|at| at.is_multiple_of(BUFFER_ALIGN)), "buffers are aligned");
        debug_assert!(found.is_none_or(|at| at + len <= self.len), "buffers are in the pool");
        found
    }

    fn find_small(&mut self, len: u64) -> Option<u64> {
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
        let &(longest, at) = self.spans_by_len.last()?;
        self.remove_span(at, longest);
        let (old, end) = self.run;
        debug_assert!(end - old < len, "the rest of the old run is too short, and so it is small");
        self.add_free_range((old, end - old));
        let run = longest.min(RUN.max(len));
        self.run = (at, at + run);
        self.is_coalesced = false;
        self.add_free_range((at + run, longest - run));
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
        debug_assert!(self.nonempty_classes[class / 64] >> (class % 64) & 1 == 1, "a class with a buffer has a bit");
        if self.classes[class].is_empty() {
            self.nonempty_classes[class / 64] &= !(1 << (class % 64));
        }
        self.small_bytes -= class_len(class);
        self.small_count -= 1;
        Some(at)
    }

    /// The first class above `class` that has a buffer.
    fn next_nonempty_class(&self, class: usize) -> Option<usize> {
        let from = class + 1;
        (from / 64..SIZE_CLASSES / 64).find_map(|n| {
            let mask = if n == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
            let set = self.nonempty_classes[n] & mask;
            (set != 0).then(|| 64 * n + set.trailing_zeros() as usize)
        })
    }

    /// Adds a range to the free space.
    fn add_free_range(&mut self, (at, len): PoolRange) {
        if len == 0 {
            return;
        }
        debug_assert!(at.is_multiple_of(BUFFER_ALIGN) && len.is_multiple_of(BUFFER_ALIGN), "free ranges are aligned");
        debug_assert!(at + len <= self.len, "free ranges are in the pool");
        debug_assert!(
            self.spans.range(..at + len).next_back().is_none_or(|(start, its_len)| start + its_len <= at),
            "a range is freed once"
        );
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
        let (removed, was_listed) = (self.spans.remove(&at), self.spans_by_len.remove(&(len, at)));
        debug_assert_eq!(removed, Some(len), "the span exists");
        debug_assert!(was_listed, "each span is listed by its length");
        self.span_bytes -= len;
    }

    /// Joins all adjacent free ranges. Free leaves that are not reserved become ordinary free space.
    fn coalesce(&mut self) {
        let used = self.used_bytes();
        let mut all: Vec<PoolRange> = std::mem::take(&mut self.spans).into_iter().collect();
        self.spans_by_len.clear();
        for (class, list) in self.classes.iter_mut().enumerate() {
            all.extend(std::mem::take(list).into_iter().map(|at| (at, class_len(class))));
        }
        let reserved = self.reserved_leaves.min(self.free_leaves.len());
        all.extend(self.free_leaves.drain(reserved..).map(|leaf| (leaf, LEAF_LEN)));
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
        debug_assert!(all.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "free ranges are disjoint");
        all.dedup_by(|(at, len), before| {
            let joins = before.0 + before.1 == *at;
            before.1 += if joins { *len } else { 0 };
            joins
        });
        if spare.is_some() {
            // The leaf for merging is cut from the shortest range that has space for it.
            let least = all.iter().enumerate().filter(|(_, range)| first_leaf_in(**range).is_some());
            let least = least.min_by_key(|(_, (_, len))| *len).map(|(n, _)| n);
            least.into_iter().for_each(|n| self.add_free_at_open(all.swap_remove(n)));
        }
        all.into_iter().for_each(|range| self.add_free_range(range));
        self.is_coalesced = true;
        debug_assert_eq!(self.used_bytes(), used, "all joined ranges are free again");
        self.check_invariants();
    }

    /// Grows the pool by at least one step and `len` bytes, but not beyond its limit. Less growth may suffice,
    /// because the new range is joined with a free span at the end of the pool.
    fn grow<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<()> {
        if self.is_closed {
            return Err(Error::new(ErrorKind::Closed, "the database is closed"));
        }
        let wanted = self.len.saturating_add(len.max(self.grow_by));
        let to = wanted.checked_next_multiple_of(self.grow_by).unwrap_or(u64::MAX).min(self.len_max);
        self.grow_to(backend, to, len)
    }

    /// Grows the pool beyond its limit, by no more than `len` or a share of its length.
    fn grow_beyond_limit<M: PersistenceBackend>(&mut self, backend: &M, len: u64) -> Result<()> {
        let by = len.max((self.len / REPLAY_GROWTH_SHARE).min(self.grow_by));
        self.grow_to(backend, self.len.saturating_add(by).next_multiple_of(PAGE).min(self.address_len_max), len)
    }

    fn grow_to<M: PersistenceBackend>(&mut self, backend: &M, to: u64, len: u64) -> Result<()> {
        if to <= self.len {
            return Err(out_of_space(len));
        }
        debug_assert!(to <= self.address_len_max.max(self.len_max), "the pool stays in its addresses");
        debug_assert!(to.is_multiple_of(PAGE), "a pool has whole pages");
        let grown = backend.grow(to);
        self.last_growth_failed = grown.is_err();
        grown?;
        let from = std::mem::replace(&mut self.len, to);
        self.is_coalesced = false;
        self.add_free_range((from, to - from));
        Ok(())
    }

    /// Whether at least half of a pool that has grown is free.
    pub(crate) fn is_mostly_free(&self) -> bool {
        self.len > 2 * self.grow_by && self.used_bytes() <= self.len / 2
    }

    /// Shortens a pool that is [mostly free](Allocator::is_mostly_free) by free space at its end, unless that is less
    /// than a quarter of it. Returns the new length. The caller shortens the backend, which must not grow meanwhile. A
    /// third of the rest is free, so that the pool neither grows soon nor becomes mostly free again soon.
    pub(crate) fn cut_free_end(&mut self) -> Option<u64> {
        self.reclaim_retired(false);
        if self.replaying || self.is_closed || !self.is_mostly_free() {
            return None;
        }
        let range_count = self.small_count + self.spans.len();
        if range_count > COALESCE_ALWAYS_MAX && self.freed_since_coalesce < self.len / 8 {
            return None; // joining them costs more than was freed
        }
        if !self.is_coalesced {
            self.coalesce();
        }
        let (&at, &len) = self.spans.last_key_value().filter(|(at, len)| **at + **len == self.len)?;
        let target_len = self.used_bytes() + self.used_bytes() / 2;
        let to = at.max(target_len).next_multiple_of(self.grow_by).max(2 * PAGE);
        if to > self.len - self.len / 4 {
            return None;
        }
        debug_assert!(to >= at, "only free space is cut");
        let used = self.used_bytes();
        self.remove_span(at, len);
        self.len = to;
        self.add_free_range((at, to - at));
        debug_assert_eq!(self.used_bytes(), used, "only free space is cut");
        self.check_invariants();
        Some(to)
    }

    /// Length of the longest free span, in bytes.
    fn longest(&self) -> u64 {
        self.spans_by_len.last().map_or(0, |(len, _)| *len)
    }

    /// Stops the growth of the pool.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Changes the limit of the pool's length. A pool that is longer keeps its length.
    pub(crate) fn set_limit(&mut self, len_max: u64) {
        self.len_max = len_max.min(OFFSET_END) / PAGE * PAGE;
    }

    /// Adds a range that was found to be free when the pool was opened.
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

/// The offset of the first leaf that fits in a range.
fn first_leaf_in((at, len): PoolRange) -> Option<u64> {
    let leaf = at.next_multiple_of(LEAF_ALIGN);
    (leaf + LEAF_LEN <= at + len).then_some(leaf)
}

fn size_class(len: u64) -> usize {
    debug_assert!((BUFFER_ALIGN..=SMALL_MAX).contains(&len), "the length of a small buffer");
    (len / BUFFER_ALIGN) as usize - 1
}

fn class_len(class: usize) -> u64 {
    (class as u64 + 1) * BUFFER_ALIGN
}

#[cold]
fn out_of_space(len: u64) -> Error {
    Error::new(ErrorKind::OutOfSpace, format!("the pool is as large as it may be and has no {len} bytes left"))
}

/// Longer buffers, in bytes, are not cut from thread caches.
const CACHED_LEN_MAX: u64 = 1024;

/// Runs from which threads cut small buffers without locking the allocator, so that they do not wait for each other.
/// Thread safe. Lock order: a thread cache before the allocator.
#[derive(Default)]
pub(crate) struct ThreadCaches([ThreadCache; STRIPE_COUNT]);

type ThreadCache = CachePadded<Mutex<PoolRange>>;

fn lock_cache(cache: &ThreadCache) -> MutexGuard<'_, PoolRange> {
    lock(&cache.0)
}

impl ThreadCaches {
    /// Allocates a buffer of `len` bytes from the cache of this thread, or from `space`.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; thread caches may still contain free space.
    pub(crate) fn allocate<'s, M: PersistenceBackend>(
        &self,
        backend: &M,
        len: u64,
        space: impl FnOnce() -> Result<MutexGuard<'s, Allocator>>,
    ) -> Result<u64> {
        if len > CACHED_LEN_MAX {
            return space()?.allocate(backend, len);
        }
        let mut cache = lock_cache(&self.0[thread_stripe()]);
        debug_assert!(cache.0.is_multiple_of(BUFFER_ALIGN) && cache.1 < RUN, "a cache has a rest of one run");
        if cache.1 >= len {
            let at = cache.0;
            *cache = (at + len, cache.1 - len);
            return Ok(at);
        }
        space()?.allocate_or_refill_cache(backend, len, &mut cache)
    }

    /// Removes and returns all runs.
    pub(crate) fn drain(&self) -> Vec<PoolRange> {
        let runs = self.0.iter().map(|cache| std::mem::take(&mut *lock_cache(cache)));
        runs.filter(|(_, len)| *len > 0).collect()
    }

    /// Number of free bytes in the thread caches.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|cache| lock_cache(cache).1).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::mem::epoch::Pin;
    use crate::mem::epoch::tests::wait_until;
    use crate::pmem::persistence::PoolImage;
    use crate::testing::script::check_component_script;
    use crate::testing::seeded_rng::SeededRng;

    const LEN_MAX: u64 = 1 << 20;

    fn test_allocator() -> (PoolImage, Allocator) {
        (PoolImage::new(LEN_MAX).unwrap(), Allocator::new(0, LEN_MAX, 16 << 10))
    }

    /// Checks that allocated and free space add up to the whole pool, and that no byte is allocated twice.
    fn check(space: &Allocator, allocated: &BTreeMap<u64, u64>, leaves: usize) {
        let mut end = 0;
        for (&at, &len) in allocated {
            assert!(at >= end && at.is_multiple_of(BUFFER_ALIGN), "offset {at} is allocated twice");
            end = at + len;
        }
        let PoolUsage { len, free_bytes: free, free_leaves: leaves_free } = space.usage();
        assert!(end <= len);
        let allocated: u64 = allocated.values().sum();
        assert_eq!(allocated + free + (leaves_free - leaves) as u64 * LEAF_LEN, len, "bytes were lost");
    }

    #[test]
    fn allocator_neither_loses_nor_doubles_bytes() {
        let (image, mut space) = test_allocator();
        let mut rng = SeededRng::new(5);
        let mut allocated = BTreeMap::new();
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
                    Ok(at) => assert_eq!(allocated.insert(at, len), None),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        refused += 1;
                    }
                }
            } else if let Some((&at, &len)) = allocated.range(rng.below(LEN_MAX as usize) as u64..).next() {
                allocated.remove(&at);
                match (len, rng.below(2)) {
                    (LEAF_LEN, 0) => space.retire_leaf(at),
                    (LEAF_LEN, _) => space.free_leaf(at),
                    (_, 0) => space.retire((at, len)),
                    _ => space.free((at, len)),
                }
            }
            if round % 100 == 0 {
                check(&space, &allocated, 0);
            }
        }
        assert!(refused > 0, "the pool was never full");
        for (at, len) in std::mem::take(&mut allocated) {
            space.free((at, len));
        }
        // Other tests of this process may be pinned.
        wait_until(|| space.reclaim_retired(true));
        space.coalesce();
        assert_eq!((space.spans.len(), space.merge_leaf), (1, Some(0)), "the free space is one range again");
        assert_eq!(space.find(space.len - LEAF_LEN), Some(LEAF_LEN));
    }

    /// Regression: in a large fragmented pool, each failed request coalesced all free ranges.
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
        // A few freed bytes do not cause another join either.
        for (n, at) in all.iter().skip(1).step_by(2).take(20).enumerate() {
            space.free((*at, 48));
            assert!(space.allocate(&image, 4000).is_err());
            assert_eq!(space.failures_since_coalesce, 50 + n);
        }
        // Once enough bytes are freed, the ranges are joined and the request succeeds.
        all.iter().skip(41).step_by(2).for_each(|at| space.free((*at, 48)));
        assert!(space.allocate(&image, 4000).is_ok());
    }

    /// The script of the allocator, `testdata/scripts/allocator.txt`. Lengths are in bytes, or in KiB with `k`.
    ///
    /// - `pool MAX [GROW]`: an empty pool, which grows by GROW (16k). `limit MAX`, `close`, `replay`, `end-replay`.
    /// - `alloc NAME LEN`, `beyond NAME LEN` (if necessary, beyond the limit), `cache NAME LEN` (refills the cache of
    ///   a thread), `leaf NAME`, `unreserved NAME`, `merge-leaf NAME`; `fill NAME LEN` and `fill-leaves NAME`: as often
    ///   as possible; `reserve COUNT`, `release COUNT`.
    /// - `free NAME…`, `retire NAME…`; `free NAME*` and `free NAME*/STEP`: of a `fill`, every STEP-th. `pin`,
    ///   `unpin`: a reader. `coalesce`, `cut` (the free end).
    /// - `map`: what each byte of the pool is used for.
    struct AllocatorScript {
        image: PoolImage,
        space: Allocator,
        allocated: BTreeMap<String, PoolRange>,
        retired: Vec<PoolRange>,
        cache: PoolRange,
        pin: Option<Pin>,
    }

    impl AllocatorScript {
        fn new(len_max: u64, grow_by: u64) -> AllocatorScript {
            let (image, space) = (PoolImage::new(len_max).unwrap(), Allocator::new(0, len_max, grow_by));
            AllocatorScript { image, space, allocated: BTreeMap::new(), retired: Vec::new(), cache: (0, 0), pin: None }
        }

        fn run_command(&mut self, command: &str, words: &[&str], output: &mut String) {
            let len = |at: usize| words.get(at).map(|word| parse_len(word));
            match command {
                "pool" => *self = AllocatorScript::new(len(0).expect("MAX"), len(1).unwrap_or(16 << 10)),
                "limit" => self.space.set_limit(len(0).expect("MAX")),
                "close" => self.space.close(),
                "replay" => self.space.begin_replay(),
                "end-replay" => self.space.end_replay(),
                "fill" | "fill-leaves" => {
                    let what = if command == "fill" { "alloc" } else { "leaf" };
                    let one = |script: &mut AllocatorScript| script.allocate(what, len(1).unwrap_or(LEAF_LEN));
                    let all: Vec<PoolRange> = std::iter::from_fn(|| one(self).ok()).collect();
                    writeln!(output, "{} times", all.len()).unwrap();
                    self.allocated
                        .extend(all.into_iter().enumerate().map(|(n, range)| (format!("{}{n:05}", words[0]), range)));
                }
                "alloc" | "beyond" | "cache" | "leaf" | "unreserved" | "merge-leaf" => {
                    match self.allocate(command, len(1).unwrap_or(LEAF_LEN)) {
                        Ok(range) => {
                            assert!(
                                self.allocated.insert(words[0].into(), range).is_none(),
                                "{} is allocated",
                                words[0]
                            )
                        }
                        Err(error) => writeln!(output, "{}: {:?}", words[0], error.kind()).unwrap(),
                    }
                }
                "reserve" => {
                    if let Err(error) = self.space.reserve_leaves(&self.image, len(0).expect("COUNT") as usize) {
                        writeln!(output, "{:?}", error.kind()).unwrap();
                    }
                }
                "release" => self.space.release_leaf_reservation(len(0).expect("COUNT") as usize),
                "free" | "retire" => {
                    let names: Vec<String> = words.iter().flat_map(|word| self.named(word)).collect();
                    names.iter().for_each(|name| self.free(command, name));
                }
                "pin" => self.pin = Some(Pin::new()),
                "unpin" => {
                    self.pin = None;
                    self.reclaim();
                }
                "coalesce" => self.space.coalesce(),
                "cut" => {
                    let cut = self.space.cut_free_end();
                    if let Some(to) = cut {
                        self.image.shrink(to, &self.image.block_growth().unwrap());
                    }
                    writeln!(output, "{}", cut.map_or("no".into(), |to| format!("to {to}"))).unwrap();
                }
                "map" => self.show_map(output),
                other => panic!("there is no command {other:?}"),
            }
        }

        fn allocate(&mut self, how: &str, len: u64) -> Result<PoolRange> {
            let AllocatorScript { image, space, cache, .. } = self;
            let at = match how {
                "beyond" => space.allocate_beyond_limit(image, |space, image| space.allocate(image, len)),
                "cache" if cache.1 >= len => {
                    let (at, rest) = *cache;
                    *cache = (at + len, rest - len);
                    Ok(at)
                }
                "cache" => space.allocate_or_refill_cache(image, len, cache),
                "leaf" => space.allocate_leaf(image),
                "unreserved" => space.allocate_unreserved_leaf(image),
                "merge-leaf" => space.take_merge_leaf().ok_or_else(|| out_of_space(len)),
                _ => space.allocate(image, len),
            };
            at.map(|at| (at, len))
        }

        /// The names that a word stands for.
        fn named(&self, word: &str) -> Vec<String> {
            let Some((stem, rest)) = word.split_once('*') else { return vec![word.into()] };
            let step = rest.strip_prefix('/').map_or(1, |step| step.parse().expect("STEP"));
            self.allocated.keys().filter(|name| name.starts_with(stem)).step_by(step).cloned().collect()
        }

        fn free(&mut self, command: &str, name: &str) {
            let (at, len) = self.allocated.remove(name).unwrap_or_else(|| panic!("{name} is not allocated"));
            match (command, len) {
                ("free", LEAF_LEN) => return self.space.free_leaf(at),
                ("free", _) => return self.space.free((at, len)),
                (_, LEAF_LEN) => self.space.retire_leaf(at),
                _ => self.space.retire((at, len)),
            }
            self.retired.push((at, len));
            self.reclaim();
        }

        /// Frees what is retired, if the script has no pin. Other tests of this process may be pinned a moment longer.
        fn reclaim(&mut self) {
            if self.pin.is_none() {
                wait_until(|| self.space.reclaim_retired(true));
                self.retired.clear();
            }
        }

        fn show_map(&self, output: &mut String) {
            let space = &self.space;
            let classes = space.classes.iter().enumerate();
            let small =
                classes.flat_map(|(class, list)| list.iter().map(move |at| (*at, class_len(class), "free".into())));
            let spans = space.spans.iter().map(|(at, len)| (*at, *len, "span".into()));
            let leaves = space.free_leaves.iter().map(|at| (*at, LEAF_LEN, "free leaf".into()));
            let merge_leaf = space.merge_leaf.iter().map(|at| (*at, LEAF_LEN, "merge leaf".into()));
            let stem = |name: &str| name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
            let allocated = self.allocated.iter().map(|(name, (at, len))| (*at, *len, stem(name)));
            let retired = self.retired.iter().map(|(at, len)| (*at, *len, "retired".to_owned()));
            let (run, end) = space.run;
            let rest = [(run, end - run, "run".to_owned()), (self.cache.0, self.cache.1, "cache".to_owned())];
            let all = small.chain(spans).chain(leaves).chain(merge_leaf).chain(allocated).chain(retired).chain(rest);
            let mut all: Vec<(u64, u64, String)> = all.filter(|(_, len, _)| *len > 0).collect();
            all.sort();
            let mut end = 0;
            for group in all.chunk_by(|a, b| a.1 == b.1 && a.2 == b.2) {
                let (at, len, what) = &group[0];
                assert_eq!(*at, end, "the bytes before {what} are lost, or allocated twice");
                group.windows(2).for_each(|pair| assert_eq!(pair[0].0 + len, pair[1].0, "bytes of {what} are lost"));
                end = at + len * group.len() as u64;
                let count = if group.len() > 1 { format!(" * {}", group.len()) } else { String::new() };
                writeln!(output, "{at:>7} {what} {len}{count}").unwrap();
            }
            let PoolUsage { len, free_bytes, free_leaves } = space.usage();
            assert_eq!(end, len, "the bytes at the end are lost");
            writeln!(output, "{len:>7} bytes, {free_bytes} free, {free_leaves} free leaves").unwrap();
        }
    }

    fn parse_len(word: &str) -> u64 {
        let (number, unit) = word.strip_suffix('k').map_or((word, 1), |number| (number, 1 << 10));
        number.parse::<u64>().expect("a length") * unit
    }

    #[test]
    fn allocator_script() {
        let mut script = AllocatorScript::new(LEN_MAX, 16 << 10);
        check_component_script("allocator", |command, words, output| script.run_command(command, words, output));
    }
}
