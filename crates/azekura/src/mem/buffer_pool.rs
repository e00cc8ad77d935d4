//! Buffers for cached blocks and values, which are not cleared when they are used again.
//!
//! Blocks differ slightly in length and are allocated and freed one by one. A pool cuts their buffers from slabs of
//! one huge page each, in units of [`UNIT_LEN`] bytes; a bit for each unit tells whether it is used. If the pool has
//! no space, a buffer comes from the global allocator. That costs only a few more TLB misses.
//!
//! Large values would fragment the slabs. Their buffers come from the global allocator, and a pool keeps some of them
//! as spares when they are freed.
//!
//! A block of a mapped file is a buffer, too, so that readers need not distinguish them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::mapped_memory::MappedBytes;
use crate::mem::atomic::{Mutex, MutexGuard, lock};
use crate::mem::pages::{HUGE_PAGE, PageAllocation};

/// Buffers from a pool take a multiple of this, in bytes.
const UNIT_LEN: usize = 256;
const SLAB_UNITS: usize = HUGE_PAGE / UNIT_LEN;
/// Maximum length of a buffer from a slab, in bytes.
const SLAB_BUFFER_MAX: usize = 64 << 10;
/// Maximum length of a buffer that becomes a spare, in bytes.
const SPARE_LEN_MAX: usize = 1 << 20;
/// Capacities of such buffers have at most this many significant bits, so that a spare fits many lengths: at most an
/// eighth is unused.
const SPARE_LEN_BITS: u32 = 4;
/// The spares take at most this part of the pool's bytes, and at most [`SPARE_BYTES_MAX`].
const SPARE_BYTES_DIVISOR: u64 = 32;
const SPARE_BYTES_MAX: u64 = 16 << 20;
/// A large buffer comes from a slab if more than this part of a full pool is free, so that the pool does not keep
/// memory that only small buffers can use.
const FREE_SHARE_DIVISOR: usize = 8;
/// Number of slabs that are searched before a new one is allocated.
const SLABS_TRIED_MAX: usize = 8;
/// A slab is searched only while it may have a free run of at least this many units.
const FREE_RUN_MIN: usize = 4;
/// Memory in bytes that a buffer in a mapped file counts for. A cache with many small entries takes more for each of
/// them than it charges for an entry, up to this much while its maps grow.
const MAPPED_OVERHEAD: usize = 112;
/// Alignment of buffers from the global allocator, in bytes. A larger one would take the slower path of `malloc`.
const ALIGN: usize = 16;

/// Bytes with one owner that may grow up to their capacity in place.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
    /// Number of bytes from `start` that are initialized, at least `len`. All of a buffer from a pool are.
    initialized: usize,
    source: BufferSource,
}

/// Where the memory of a buffer comes from.
enum BufferSource {
    /// The global allocator.
    Allocator,
    /// The slab of the pool with this index.
    Slab(Arc<BufferPool>, u32),
    /// The global allocator. The buffer becomes a spare of the pool.
    Spare(Arc<BufferPool>),
    /// A mapped file, whose bytes never change. All of them are initialized.
    Mapped(#[expect(dead_code, reason = "keeps the mapping")] Arc<MappedBytes>),
}

// SAFETY: plain bytes with one owner, or of a mapped file; the pool or the mapping that they come from is thread safe.
unsafe impl Send for Buffer {}
// SAFETY: a shared buffer can only be read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Returns an empty buffer from the global allocator with a capacity of this many bytes.
    pub(crate) fn with_capacity(capacity: usize) -> Buffer {
        Buffer::allocated(capacity).unwrap_or_else(|layout| handle_alloc_error(layout))
    }

    fn allocated(capacity: usize) -> Result<Buffer, Layout> {
        let capacity = capacity.max(1);
        let layout = Layout::from_size_align(capacity, ALIGN).map_err(|_| Layout::new::<[u8; ALIGN]>())?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(layout)?;
        Ok(Buffer { start, len: 0, capacity, initialized: 0, source: BufferSource::Allocator })
    }

    /// Returns a range of a mapped file, without a copy.
    ///
    /// # Panics
    /// If the range is not in the file.
    pub(crate) fn mapped(file: &Arc<MappedBytes>, range: Range<usize>) -> Buffer {
        let bytes = &file.bytes()[range];
        let (start, len) = (NonNull::from(bytes).cast(), bytes.len());
        Buffer { start, len, capacity: len, initialized: len, source: BufferSource::Mapped(Arc::clone(file)) }
    }

    /// Whether the bytes are in a mapped file. A change copies them first.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.source, BufferSource::Mapped(_))
    }

    #[cfg(test)]
    fn is_pooled(&self) -> bool {
        matches!(self.source, BufferSource::Slab(..) | BufferSource::Spare(_))
    }

    #[cfg(test)]
    pub(crate) fn is_in_slab(&self) -> bool {
        matches!(self.source, BufferSource::Slab(..))
    }

    /// Memory held, in bytes. The operating system can take back the pages of a mapped file, so they do not count.
    pub(crate) fn memory(&self) -> usize {
        if self.is_mapped() { MAPPED_OVERHEAD } else { self.capacity }
    }

    /// Returns an empty buffer from the same source as this one, with a capacity of at least this many bytes; `None`
    /// if there is no memory.
    pub(crate) fn new_from_same_pool(&self, capacity: usize) -> Option<Buffer> {
        match &self.source {
            BufferSource::Slab(pool, _) | BufferSource::Spare(pool) => pool.buffer(capacity),
            BufferSource::Allocator | BufferSource::Mapped(_) => Buffer::allocated(capacity).ok(),
        }
    }

    /// Shortens the buffer to its first `len` bytes.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Copies the bytes if they are in a mapped file, because they must not be changed there.
    fn make_writable(&mut self) {
        if self.is_mapped() {
            *self = Buffer::from(&**self);
        }
    }

    /// Makes space for `more` bytes after the existing ones. The buffer moves if its capacity is too small.
    pub(crate) fn reserve(&mut self, more: usize) {
        let capacity = self.len + more;
        if capacity > self.capacity || self.is_mapped() {
            let mut larger = self.new_from_same_pool(capacity).unwrap_or_else(|| Buffer::with_capacity(capacity));
            larger.extend_from_slice(self);
            *self = larger;
        }
    }

    pub(crate) fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        debug_assert!(self.len + bytes.len() <= self.capacity && !self.is_mapped(), "space was reserved");
        // SAFETY: `reserve` made space for the bytes behind `len`, and no other reference to this memory exists.
        unsafe { self.start.add(self.len).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        self.len += bytes.len();
        self.initialized = self.initialized.max(self.len);
    }

    /// Grows the buffer to `len` bytes. The added bytes are arbitrary, for example those of another block, so the
    /// caller overwrites all of them before it reads any. Only memory that was never used is cleared.
    pub(crate) fn extend_for_overwrite(&mut self, len: usize) {
        self.reserve(len.saturating_sub(self.len));
        debug_assert!(self.len.max(len) <= self.capacity && !self.is_mapped(), "space was reserved");
        if len > self.initialized {
            // SAFETY: `reserve` made space for `len` bytes, and no other reference to this memory exists.
            unsafe { self.start.add(self.initialized).write_bytes(0, len - self.initialized) };
            self.initialized = len;
        }
        self.len = self.len.max(len);
        debug_assert!(
            self.len <= self.initialized && self.initialized <= self.capacity,
            "readable bytes are initialized"
        );
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are initialized, and the memory is not freed or unmapped while the buffer is
        // borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.make_writable();
        // SAFETY: the buffer has its memory for itself, because it is not in a mapped file any more. The first `len`
        // bytes are initialized, and no other reference to this memory exists.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::with_capacity(bytes.len());
        buffer.extend_from_slice(bytes);
        buffer
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Buffer {
        Buffer::from(bytes.as_slice())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Buffer { start, capacity, initialized, .. } = *self;
        match std::mem::replace(&mut self.source, BufferSource::Allocator) {
            BufferSource::Slab(pool, slab) => pool.free(slab, start, capacity),
            BufferSource::Spare(pool) => {
                pool.keep(Buffer { start, len: 0, capacity, initialized, source: BufferSource::Allocator });
            }
            BufferSource::Mapped(_) => {}
            // SAFETY: `allocated` allocated the memory with this layout, and the buffer is being dropped.
            BufferSource::Allocator => unsafe {
                dealloc(start.as_ptr(), Layout::from_size_align_unchecked(capacity, ALIGN));
            },
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} of {} bytes)", self.len, self.capacity)
    }
}

/// Cuts buffers from huge pages, up to a limit, and keeps large ones. Thread safe.
pub(crate) struct BufferPool {
    /// Maximum number of slabs.
    limit: usize,
    slabs: Mutex<BufferSlabs>,
    /// Maximum number of bytes of spares.
    spare_bytes_max: usize,
    spares: Mutex<SpareBuffers>,
}

/// Unused large buffers of the global allocator, the oldest first.
#[derive(Default)]
struct SpareBuffers {
    buffers: VecDeque<Buffer>,
    /// Sum of their capacities.
    bytes: usize,
}

#[derive(Default)]
struct BufferSlabs {
    all: Vec<Option<BufferSlab>>,
    /// Indexes of `all` that are empty.
    vacant_indexes: Vec<u32>,
    /// Number of free units of all slabs.
    free_units: usize,
    /// Indexes of the slabs that may have space, the most likely ones first.
    candidates: VecDeque<u32>,
}

/// A slab: one huge page.
struct BufferSlab {
    pages: PageAllocation,
    /// A bit for each unit, set if it is used.
    used_units: Box<[u64; SLAB_UNITS / 64]>,
    /// Number of units from the start that are initialized: a buffer is cleared when its units are first used.
    initialized_units: usize,
    /// Number of free units.
    free_units: usize,
    /// Upper bound of the length of a run of free units.
    free_run_bound: usize,
    /// Whether `candidates` contains the slab.
    is_candidate: bool,
}

impl BufferPool {
    /// Returns a pool that maps at most `bytes`. A pool of less than one huge page allocates from the global
    /// allocator only.
    pub(crate) fn new(bytes: u64) -> Arc<BufferPool> {
        let limit = usize::try_from(bytes / HUGE_PAGE as u64).unwrap_or(usize::MAX);
        let spare_bytes = if limit == 0 { 0 } else { (bytes / SPARE_BYTES_DIVISOR).min(SPARE_BYTES_MAX) };
        Arc::new(BufferPool {
            limit,
            slabs: Mutex::default(),
            spare_bytes_max: usize::try_from(spare_bytes).unwrap_or(usize::MAX),
            spares: Mutex::default(),
        })
    }

    /// Maximum number of bytes that the pool keeps in unused buffers, besides free parts of slabs.
    pub(crate) fn spare_bytes_max(&self) -> u64 {
        self.spare_bytes_max as u64
    }

    /// Returns an empty buffer with a capacity of at least this many bytes, from the pool if possible, otherwise from
    /// the global allocator; `None` if there is no memory.
    pub(crate) fn buffer(self: &Arc<BufferPool>, capacity: usize) -> Option<Buffer> {
        if capacity > SLAB_BUFFER_MAX && capacity <= SPARE_LEN_MAX.min(self.spare_bytes_max) {
            return self.large_buffer(capacity);
        }
        BufferPool::allocate(self, capacity).or_else(|| Buffer::allocated(capacity).ok())
    }

    /// A spare of this capacity or a little more, a new buffer that will become one, or free space of a slab.
    fn large_buffer(self: &Arc<BufferPool>, capacity: usize) -> Option<Buffer> {
        let units = capacity.div_ceil(UNIT_LEN);
        let in_slab = self.lock().allocate_in_free_share(units, self.limit);
        if let Some(found) = in_slab {
            return Some(self.slab_buffer(units, found));
        }
        let step = 1 << (capacity.ilog2() + 1 - SPARE_LEN_BITS);
        let rounded = capacity.next_multiple_of(step);
        let spare = lock(&self.spares).take(rounded);
        let mut buffer = spare.or_else(|| Buffer::allocated(rounded).ok())?;
        debug_assert!(matches!(buffer.source, BufferSource::Allocator) && buffer.is_empty(), "a spare has no content");
        buffer.source = BufferSource::Spare(Arc::clone(self));
        Some(buffer)
    }

    /// Keeps a buffer as a spare.
    fn keep(&self, buffer: Buffer) {
        debug_assert!(matches!(buffer.source, BufferSource::Allocator) && buffer.is_empty(), "a spare has no content");
        let freed = lock(&self.spares).add(buffer, self.spare_bytes_max);
        drop(freed); // after the lock is released
    }

    /// Memory mapped for slabs, in bytes.
    #[cfg(test)]
    pub(crate) fn mapped(&self) -> u64 {
        (self.lock().all.iter().flatten().count() * HUGE_PAGE) as u64
    }

    fn allocate(self: &Arc<BufferPool>, capacity: usize) -> Option<Buffer> {
        if self.limit == 0 || capacity > SLAB_BUFFER_MAX {
            return None;
        }
        let units = capacity.div_ceil(UNIT_LEN).max(1);
        let found = self.lock().allocate(units, self.limit)?;
        Some(self.slab_buffer(units, found))
    }

    fn slab_buffer(self: &Arc<BufferPool>, units: usize, (slab, start): (u32, NonNull<u8>)) -> Buffer {
        let capacity = units * UNIT_LEN;
        Buffer { start, len: 0, capacity, initialized: capacity, source: BufferSource::Slab(Arc::clone(self), slab) }
    }

    fn free(&self, slab: u32, start: NonNull<u8>, capacity: usize) {
        let free_slab = self.lock().free(slab, start, capacity);
        drop(free_slab); // after the lock is released, because it may unmap memory
    }

    /// Takes the lock, even if it is poisoned: no code under the lock can panic between two changes that belong
    /// together.
    fn lock(&self) -> MutexGuard<'_, BufferSlabs> {
        lock(&self.slabs)
    }
}

impl SpareBuffers {
    /// Takes the smallest buffer with a capacity of this to an eighth more.
    fn take(&mut self, capacity: usize) -> Option<Buffer> {
        let fits = capacity..=capacity + capacity / 8;
        let found = self.buffers.iter().enumerate().filter(|(_, spare)| fits.contains(&spare.capacity));
        let (at, _) = found.min_by_key(|(_, spare)| spare.capacity)?;
        let spare = self.buffers.remove(at)?;
        self.bytes -= spare.capacity;
        Some(spare)
    }

    /// Adds a buffer, and returns the oldest ones that exceed `bytes_max`.
    fn add(&mut self, buffer: Buffer, bytes_max: usize) -> Vec<Buffer> {
        self.bytes += buffer.capacity;
        self.buffers.push_back(buffer);
        let mut freed = Vec::new();
        while self.bytes > bytes_max {
            let oldest = self.buffers.pop_front().expect("the bytes are those of the buffers");
            self.bytes -= oldest.capacity;
            freed.push(oldest);
        }
        freed
    }
}

impl BufferSlabs {
    fn allocate(&mut self, units: usize, limit: usize) -> Option<(u32, NonNull<u8>)> {
        self.allocate_in_mapped(units).or_else(|| self.allocate_in_new(units, limit))
    }

    /// Allocates in a mapped slab, if more than a part of the units of all slabs is free.
    fn allocate_in_free_share(&mut self, units: usize, limit: usize) -> Option<(u32, NonNull<u8>)> {
        let is_large = self.free_units > limit.saturating_mul(SLAB_UNITS) / FREE_SHARE_DIVISOR;
        if is_large { self.allocate_in_mapped(units) } else { None }
    }

    fn allocate_in_mapped(&mut self, units: usize) -> Option<(u32, NonNull<u8>)> {
        for _ in 0..self.candidates.len().min(SLABS_TRIED_MAX) {
            let at = *self.candidates.front()?;
            let slab = self.all[at as usize].as_mut().expect("candidates exist");
            debug_assert!(slab.is_candidate, "a candidate is marked as one");
            if let Some(start) = slab.allocate(units) {
                self.free_units -= units;
                return Some((at, start));
            }
            self.candidates.pop_front();
            slab.is_candidate = slab.free_run_bound >= FREE_RUN_MIN;
            if slab.is_candidate {
                self.candidates.push_back(at);
            }
        }
        None
    }

    fn allocate_in_new(&mut self, units: usize, limit: usize) -> Option<(u32, NonNull<u8>)> {
        if self.all.len() - self.vacant_indexes.len() >= limit {
            return None;
        }
        let mut slab = BufferSlab::new()?;
        let start = slab.allocate(units)?;
        self.free_units += SLAB_UNITS - units;
        let at = self.vacant_indexes.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() as u32 - 1
        });
        debug_assert!(self.all[at as usize].is_none(), "a new slab replaces no other one");
        debug_assert!(self.all.len() - self.vacant_indexes.len() <= limit, "the pool maps no more than its limit");
        self.all[at as usize] = Some(slab);
        self.candidates.push_front(at);
        Some((at, start))
    }

    /// Frees the units of a buffer. Returns the slab if it is completely free and there is another candidate.
    fn free(&mut self, at: u32, start: NonNull<u8>, capacity: usize) -> Option<BufferSlab> {
        let slot = &mut self.all[at as usize];
        let slab = slot.as_mut().expect("the slab of a buffer exists");
        debug_assert!(capacity.is_multiple_of(UNIT_LEN), "buffers of a pool have whole units");
        slab.free(start, capacity / UNIT_LEN);
        self.free_units += capacity / UNIT_LEN;
        if !slab.is_candidate {
            slab.is_candidate = true;
            self.candidates.push_front(at);
        }
        if slab.free_units < SLAB_UNITS || self.candidates.len() < 2 {
            return None;
        }
        self.candidates.retain(|other| *other != at);
        self.vacant_indexes.push(at);
        self.free_units -= SLAB_UNITS;
        slot.take()
    }
}

impl BufferSlab {
    fn new() -> Option<BufferSlab> {
        let pages = PageAllocation::new(HUGE_PAGE)?;
        Some(BufferSlab {
            pages,
            used_units: Box::new([0; SLAB_UNITS / 64]),
            initialized_units: 0,
            free_units: SLAB_UNITS,
            free_run_bound: SLAB_UNITS,
            is_candidate: true,
        })
    }

    fn allocate(&mut self, units: usize) -> Option<NonNull<u8>> {
        if units > self.free_run_bound {
            return None;
        }
        let Some(first) = self.find_free_run(units) else {
            self.free_run_bound = units - 1;
            return None;
        };
        debug_assert!(first + units <= SLAB_UNITS, "the units are in the slab");
        debug_assert!(units <= self.free_units, "the units are free");
        self.set(first, units, true);
        self.free_units -= units;
        self.free_run_bound = self.free_run_bound.min(self.free_units);
        self.initialize(first + units);
        // SAFETY: `first` is less than `SLAB_UNITS`, so the address is within the slab.
        Some(unsafe { self.pages.start().add(first * UNIT_LEN) })
    }

    /// Clears the units before `end` that no buffer has used yet.
    fn initialize(&mut self, end: usize) {
        debug_assert!(end <= SLAB_UNITS, "the units are in the slab");
        if let Some(more) = end.checked_sub(self.initialized_units) {
            // SAFETY: the units are in the slab, and no buffer has them, because a buffer's units are initialized.
            unsafe { self.pages.start().add(self.initialized_units * UNIT_LEN).write_bytes(0, more * UNIT_LEN) };
            self.initialized_units = end;
        }
    }

    fn free(&mut self, start: NonNull<u8>, units: usize) {
        let first = (start.addr().get() - self.pages.start().addr().get()) / UNIT_LEN;
        debug_assert!(first + units <= SLAB_UNITS, "the buffer is in the slab");
        self.set(first, units, false);
        self.free_units += units;
        debug_assert!(self.free_units <= SLAB_UNITS, "units are freed once");
        self.free_run_bound = self.free_units;
    }

    /// Returns the index of the first of `units` consecutive free units.
    fn find_free_run(&self, units: usize) -> Option<usize> {
        let mut run = 0; // free units right before `at`
        for (word, &used) in self.used_units.iter().enumerate() {
            if used == u64::MAX {
                run = 0;
                continue;
            }
            let mut at = 0;
            while at < 64 {
                let free = ((used >> at).trailing_zeros() as usize).min(64 - at);
                run += free;
                if run >= units {
                    return Some(word * 64 + at + free - run);
                }
                at += free;
                if at < 64 {
                    at += (used >> at).trailing_ones() as usize;
                    run = 0;
                }
            }
        }
        None
    }

    fn set(&mut self, first: usize, units: usize, used: bool) {
        let (mut at, end) = (first, first + units);
        while at < end {
            let len = (64 - at % 64).min(end - at);
            let bits = (u64::MAX >> (64 - len)) << (at % 64);
            let word = &mut self.used_units[at / 64];
            debug_assert_eq!(*word & bits, if used { 0 } else { bits }, "units are allocated once and freed once");
            *word = if used { *word | bits } else { *word & !bits };
            at += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    fn filled(pool: &Arc<BufferPool>, len: usize, byte: u8) -> Buffer {
        let mut buffer = pool.buffer(len).unwrap();
        buffer.extend_for_overwrite(len);
        buffer.fill(byte);
        buffer
    }

    #[test]
    fn buffers_of_all_lengths_never_overlap() {
        let pool = BufferPool::new(3 * HUGE_PAGE as u64);
        let mut rng = SeededRng::new(5);
        let mut buffers: Vec<(Buffer, u8)> = Vec::new();
        for round in 0..if cfg!(miri) { 60 } else { 20_000usize } {
            if buffers.len() > 300 || (!buffers.is_empty() && rng.chance_one_in(3)) {
                let (buffer, byte) = buffers.swap_remove(rng.below(buffers.len()));
                assert!(buffer.iter().all(|b| *b == byte));
            } else {
                let longest = rng.pick(&[300, 5000, 40_000]);
                let len = rng.below(longest);
                let mut buffer = filled(&pool, len, round as u8);
                assert!(buffer.capacity >= len && buffer.as_ptr().addr().is_multiple_of(ALIGN));
                if round % 5 == 0 {
                    buffer.extend_from_slice(&[round as u8; 700]);
                    assert_eq!(buffer.len(), len + 700);
                }
                buffers.push((buffer, round as u8));
            }
            assert!(pool.mapped() <= 3 * HUGE_PAGE as u64);
        }
        buffers.clear();
        assert!(pool.mapped() <= HUGE_PAGE as u64, "at most one free slab is kept");
    }

    /// Miri fails the test if a byte is read that was never written.
    #[test]
    fn bytes_of_grown_buffers_are_initialized() {
        let sum = |buffer: &Buffer| buffer.iter().map(|byte| usize::from(*byte)).sum::<usize>();
        for pool in [BufferPool::new(0), BufferPool::new(HUGE_PAGE as u64)] {
            let mut buffer = pool.buffer(700).unwrap();
            buffer.extend_for_overwrite(300);
            assert_eq!(sum(&buffer), 0, "memory that was never used is cleared");
            buffer.fill(1);
            buffer.truncate(100);
            buffer.extend_for_overwrite(50);
            assert_eq!((buffer.len(), sum(&buffer)), (100, 100));
            buffer.extend_for_overwrite(500);
            assert_eq!(sum(&buffer), 300, "bytes that are initialized are not cleared");
            let grown = 2 * buffer.capacity;
            buffer.extend_from_slice(&[2; 7]);
            buffer.extend_for_overwrite(grown);
            assert_eq!((sum(&buffer), buffer.len()), (314, grown));
            drop(buffer);
            let mut again = pool.buffer(2000).unwrap();
            again.extend_for_overwrite(2000);
            assert_eq!(again.is_pooled(), sum(&again) > 0, "a pool does not clear bytes again");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too long")]
    fn large_buffers_are_used_again_within_bounds() {
        let pool = BufferPool::new(64 << 20); // at most 2 MiB of spares
        assert_eq!(pool.spare_bytes_max(), 2 << 20);
        let address = |buffer: &Buffer| buffer.as_ptr().addr();
        for len in [SLAB_BUFFER_MAX + 1, 100_000, 1 << 18, SPARE_LEN_MAX] {
            let first = filled(&pool, len, 7);
            assert!(first.capacity >= len && first.capacity <= len + len / 8, "{len}");
            let (at, capacity) = (address(&first), first.capacity);
            drop(first);
            let mut again = pool.buffer(capacity - 1).unwrap();
            assert_eq!((address(&again), again.len()), (at, 0), "the spare is used");
            again.extend_for_overwrite(len);
            assert_eq!(again[len - 1], 7, "and not cleared");
        }
        let many: Vec<Buffer> = (0..20).map(|_| filled(&pool, 300_000, 1)).collect();
        drop(many);
        let spares = lock(&pool.spares);
        assert!(spares.bytes <= 2 << 20 && spares.buffers.len() == 6, "{} of {}", spares.buffers.len(), spares.bytes);
        assert!(spares.buffers.iter().all(|spare| spare.capacity == 320 << 10), "the oldest were freed");
        assert_eq!(spares.bytes, spares.buffers.len() * (320 << 10));
        drop(spares);
        let longer = filled(&pool, 290_000, 2);
        assert_eq!(longer.capacity, 320 << 10, "a spare that is up to an eighth longer is used");
        assert_eq!(filled(&pool, 250_000, 2).capacity, 256 << 10, "these are too long");
        let longer = filled(&pool, SPARE_LEN_MAX + 1, 3);
        assert!(!longer.is_pooled(), "too long to be kept");
    }

    #[test]
    fn full_pool_falls_back_to_allocator() {
        let pool = BufferPool::new(HUGE_PAGE as u64);
        let mut buffers: Vec<Buffer> =
            (0..HUGE_PAGE / SLAB_BUFFER_MAX).map(|_| filled(&pool, SLAB_BUFFER_MAX, 1)).collect();
        assert!(buffers.iter().all(|buffer| buffer.is_pooled()));
        assert!(!filled(&pool, 1, 2).is_pooled(), "the pool is full");
        buffers.pop();
        assert!(filled(&pool, SLAB_BUFFER_MAX, 3).is_pooled());
        assert!(!BufferPool::new(HUGE_PAGE as u64 - 1).buffer(10).unwrap().is_pooled());
        assert!(pool.buffer(usize::MAX - 3).is_none());
    }

    /// A full cache evicts one block for each block that it inserts; the lengths of the blocks differ slightly.
    #[test]
    #[cfg_attr(miri, ignore = "too long")]
    fn reallocated_blocks_stay_in_huge_pages() {
        for slabs in [4, 16] {
            let pool = BufferPool::new((slabs * HUGE_PAGE) as u64);
            let mut rng = SeededRng::new(9);
            let budget = slabs * HUGE_PAGE * 15 / 16;
            let mut buffers: VecDeque<Buffer> = VecDeque::new();
            let (mut bytes, mut outside) = (0, 0);
            for _ in 0..60_000 {
                let buffer = pool.buffer(4000 + rng.below(600)).unwrap();
                bytes += buffer.capacity;
                outside += usize::from(!buffer.is_pooled());
                buffers.push_back(buffer);
                while bytes > budget {
                    let at = rng.below(buffers.len());
                    bytes -= buffers.swap_remove_back(at).unwrap().capacity;
                }
            }
            assert!(outside < 60_000 / 20, "{outside} of 60,000 buffers did not fit into {slabs} slabs");
        }
    }

    #[test]
    fn mapped_bytes_are_copied_by_changes() {
        let file = MappedBytes::copied(b"0123456789");
        let block = Buffer::mapped(&file, 2..7);
        assert_eq!((&*block, block.memory(), block.is_mapped()), (&b"23456"[..], MAPPED_OVERHEAD, true));
        assert_eq!(block.as_ptr(), file.bytes()[2..].as_ptr());
        type Change = fn(&mut Buffer);
        let changes: [(Change, &[u8]); 4] = [
            (|buffer| buffer.extend_from_slice(b"xy"), b"23456xy"),
            (|buffer| buffer[0] = b'x', b"x3456"),
            (|buffer| buffer.truncate(3), b"234"),
            (
                |buffer| {
                    buffer.truncate(1);
                    buffer.extend_for_overwrite(3);
                    buffer[1..].copy_from_slice(b"xy");
                },
                b"2xy",
            ),
        ];
        for (change, wanted) in changes {
            let mut changed = Buffer::mapped(&file, 2..7);
            change(&mut changed);
            assert_eq!(&*changed, wanted);
        }
        let weak = Arc::downgrade(&file);
        drop(file);
        assert_eq!((&*block, weak.strong_count()), (&b"23456"[..], 1), "the block keeps the mapping");
        drop(block);
        assert_eq!(weak.strong_count(), 0);
    }
}
