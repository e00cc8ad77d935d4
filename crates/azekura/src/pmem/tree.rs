//! The persistent B+ tree of one pool: its shared state, its locks, and point reads.

use crate::base::checksum::{key_hash, location_seed};
use crate::base::key::KEY_LEN_MAX;
use crate::base::version_edit::ExpiryTimes;
use crate::base::{Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{PartitionReaders, ReadMoment};
use crate::mem::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, SCHEDULE_EXPLORATION, fence, lock, try_lock,
};
use crate::mem::epoch::Pin;
use crate::mem::region::Region;
use crate::mem::slice::Slice;
use crate::pmem::allocator::{Allocator, PoolUsage, ThreadCaches};
use crate::pmem::inner::{InnerTree, LeafTarget};
use crate::pmem::leaf::{LEAF_LEN, LeafAddr, LeafCheckSeed, LeafCommitWord, LeafOrderCache, PoolLeaf, SLOTS, set_bits};
use crate::pmem::pending_range_deletes::PendingRangeDeletes;
use crate::pmem::persistence::{PersistenceBackend, SplitStats};
use crate::pmem::record::{LeafSlot, PoolRecord};
use crate::pmem::versions::{RetainedVersions, poisoned};
use crate::vfs::fs::PersistenceLevel;

/// Offset of the first leaf, in bytes.
pub(crate) const HEAD_LEAF_OFFSET: u64 = 4096;

/// Number of leaf locks. A leaf uses the lock that its offset selects.
const LEAF_LOCK_STRIPES: usize = if SCHEDULE_EXPLORATION { 2 } else { 64 };

/// Number of low bits of a sort word that contain the index of a record.
const INDEX_BITS: u32 = 6;

/// Length of the part of a leaf that contains the commit word and the fingerprints, in bytes.
const LEAF_HEADER_LEN: u64 = 64;

/// Number of bytes to prefetch of a record whose slot does not contain its length.
const VALUE_PREFETCH_LEN: u64 = 192;

/// Size limits of a pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PoolOptions {
    /// Maximum length of the pool, in bytes.
    pub(crate) len_max: u64,
    /// Number of bytes by which a pool grows.
    pub(crate) grow_by: u64,
    /// Number of slots of a leaf that are used, 4..=48.
    pub(crate) slots_per_leaf: usize,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions { len_max: 4 << 30, grow_by: 4 << 20, slots_per_leaf: SLOTS }
    }
}

/// Steps that concurrent threads rely on. A test skips one of them and checks that the failure is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeStep {
    /// Raise `structure_version` when keys move to another leaf.
    StructureVersion,
    /// Raise the version of a leaf's cached order before its slots are overwritten.
    LeafOrderVersion,
    /// Wait for pinned readers before space is reused.
    EpochReclaim,
    /// Retain the versions that a snapshot needs.
    RetainVersions,
    /// Count the retirements of records that iterators may have found.
    CountRetirements,
    /// Hide the records that a pending range delete covers.
    HideCovered,
    /// Keep the sequence number through which a mapped pool contains the WAL below pending range deletes.
    KeepBelowPending,
}

/// State that the leaves of one stripe share.
#[repr(align(64))]
pub(crate) struct LeafLockStripe {
    lock: Mutex<()>,
    /// Raised before a slot or a fingerprint of the stripe's leaves is overwritten. If a reader loads the same
    /// version before and after it reads a leaf by one commit word, it has read one state of the leaf.
    slot_version: AtomicU64,
    /// Records added to the leaves of this stripe minus records removed, modulo 2^64. Changed with the lock held.
    record_delta: AtomicU64,
}

/// What `structure_lock` protects: the inner nodes, and the locks of two leaves at a time.
pub(crate) struct StructureLock(());

/// Proves that the thread holds `structure_lock`.
pub(crate) type StructureGuard<'a> = MutexGuard<'a, StructureLock>;

/// The locks of two leaves, which may be one lock.
pub(crate) type TwoLeavesGuard<'a> = (MutexGuard<'a, ()>, Option<MutexGuard<'a, ()>>);

/// Position and result of the merging of sparse leaves ([`PoolTree::merge_sparse_leaves`]).
#[derive(Default)]
pub(crate) struct LeafMergeProgress {
    /// A key of the leaf to continue with; `None` for the first leaf.
    pub(crate) next_key: Option<Vec<u8>>,
    /// Number of leaves visited since one was freed. Once it exceeds the number of leaves, nothing is tried until
    /// `state` changes.
    pub(crate) visited_without_gain: u64,
    /// The number of records, the number of leaves, and whether a leaf to shift records to was available, at the last
    /// visit.
    pub(crate) state: (u64, u64, bool),
}

/// The expiry times of the records, and the progress of [`PoolTree::sweep_expired`]. Thread safe.
#[derive(Default)]
pub(crate) struct PoolExpiry {
    /// Of all records that the last pass left and that were put since. Records that were replaced or removed since
    /// are still counted.
    pub(crate) times: Mutex<ExpiryTimes>,
    pub(crate) sweep: Mutex<SweepProgress>,
}

#[derive(Default)]
pub(crate) struct SweepProgress {
    pub(crate) is_running: bool,
    /// A key of the leaf to continue with; `None` for the first leaf.
    pub(crate) next_key: Option<Vec<u8>>,
    /// The pass removes what has expired at this time.
    pub(crate) limit_ms: u64,
}

impl PoolExpiry {
    /// The state of a pool whose records have these expiry times.
    pub(crate) fn new(times: ExpiryTimes) -> PoolExpiry {
        PoolExpiry { times: Mutex::new(times), ..PoolExpiry::default() }
    }

    /// Counts a record that was put.
    pub(crate) fn add(&self, expires_ms: u64) {
        lock(&self.times).add(expires_ms);
    }
}

/// A B+ tree on a persistence backend. Readers never wait. A writer waits only for writers of the same stripe of
/// leaves.
pub(crate) struct PoolTree<M> {
    pub(crate) backend: M,
    pub(crate) file_id: [u8; 16],
    pub(crate) check_seed: LeafCheckSeed,
    hash_seed: u64,
    pub(crate) key_order: KeyOrder,
    bytes_identify_keys: bool,
    pub(crate) slots_per_leaf: usize,
    /// Maps keys to leaves. Its leaf values are the words of [`LeafAddr`]s.
    pub(crate) inner: InnerTree,
    pub(crate) leaf_orders: LeafOrderCache,
    /// Held by a thread that changes `inner`, and by a thread that locks two leaves.
    pub(crate) structure_lock: Mutex<StructureLock>,
    /// True while the WAL is replayed: there are no readers.
    pub(crate) replaying: AtomicBool,
    /// Set with `structure_lock` held. From then on the pool does not change, and no read of it begins.
    closed: AtomicBool,
    /// Raised when keys have moved to another leaf, before they are removed from their old leaf.
    pub(crate) structure_version: AtomicU64,
    stripes: Box<[LeafLockStripe]>,
    pub(crate) allocator: Mutex<Allocator>,
    pub(crate) thread_caches: ThreadCaches,
    pub(crate) versions: RetainedVersions,
    pub(crate) range_deletes: PendingRangeDeletes,
    /// Number of times that records were retired which an iterator does not read, but may have found in a leaf: those
    /// that are newer than its sequence number, and expired ones. An iterator that finds another number than when it
    /// read a leaf reads the leaf again. Raised when the records are not in their leaves any more, before they are
    /// retired.
    pub(crate) retirements: AtomicU64,
    /// Number of records at open.
    pub(crate) records_at_open: AtomicU64,
    pub(crate) leaf_count: AtomicU64,
    /// Number of reserved leaves whose reservations have ended and which `allocator` still counts as reserved.
    pub(crate) released_leaf_reservations: AtomicUsize,
    pub(crate) split_stats: SplitStats,
    pub(crate) merge_progress: Mutex<LeafMergeProgress>,
    pub(crate) expiry: PoolExpiry,
    /// How many times packing shifted records from one leaf to the leaf before it.
    #[cfg(test)]
    pub(crate) shifts: AtomicU64,
    #[cfg(test)]
    skipped_step: std::sync::OnceLock<TreeStep>,
}

/// A record in a leaf, and the index of its slot.
pub(crate) struct LeafEntry {
    pub(crate) slot_index: usize,
    pub(crate) record: PoolRecord,
}

/// The leaf to which a key belonged at one time.
#[derive(Clone, Copy)]
pub(crate) struct LeafGuess {
    /// The lowest pending range delete before the leaf was found: one that completes later leaves its records in
    /// unlinked leaves.
    pending: SeqNo,
    /// `structure_version` before the leaf was found.
    shape: u64,
    pub(crate) leaf: LeafAddr,
    pub(crate) fingerprint: u8,
}

#[cold]
fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

/// The seed of the checks in the leaves of a pool.
pub(crate) fn leaf_check_seed(file_id: &[u8; 16]) -> LeafCheckSeed {
    LeafCheckSeed(location_seed(file_id, 8))
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Makes the tree of an opened pool from `found`: the inner nodes, the free space, the number of records and the
    /// number of leaves.
    pub(crate) fn assemble(
        backend: M,
        file_id: [u8; 16],
        order: KeyOrder,
        options: &PoolOptions,
        found: (InnerTree, Allocator, u64, u64),
        readers: PartitionReaders,
    ) -> PoolTree<M> {
        let (inner, space, len, leaves) = found;
        let stripe = || LeafLockStripe {
            lock: Mutex::new(()),
            slot_version: AtomicU64::new(0),
            record_delta: AtomicU64::new(0),
        };
        PoolTree {
            check_seed: leaf_check_seed(&file_id),
            hash_seed: location_seed(&file_id, 16),
            file_id,
            bytes_identify_keys: order.equality_is_bytewise(),
            slots_per_leaf: options.slots_per_leaf.clamp(4, SLOTS),
            versions: RetainedVersions::new(order.clone(), readers, options.len_max),
            range_deletes: PendingRangeDeletes::new(),
            retirements: AtomicU64::new(0),
            key_order: order,
            inner,
            leaf_orders: LeafOrderCache::new(options.len_max.max(backend.region().len())),
            structure_lock: Mutex::new(StructureLock(())),
            replaying: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            structure_version: AtomicU64::new(0),
            stripes: (0..LEAF_LOCK_STRIPES).map(|_| stripe()).collect(),
            allocator: Mutex::new(space),
            thread_caches: ThreadCaches::default(),
            records_at_open: AtomicU64::new(len),
            leaf_count: AtomicU64::new(leaves),
            released_leaf_reservations: AtomicUsize::new(0),
            split_stats: SplitStats::default(),
            merge_progress: Mutex::default(),
            expiry: PoolExpiry::default(),
            #[cfg(test)]
            shifts: AtomicU64::new(0),
            #[cfg(test)]
            skipped_step: std::sync::OnceLock::new(),
            backend,
        }
    }

    #[inline]
    pub(crate) fn region(&self) -> &Region {
        self.backend.region()
    }

    #[inline]
    pub(crate) fn leaf(&self, addr: LeafAddr) -> PoolLeaf<'_> {
        PoolLeaf::from_addr(self.region(), addr)
    }

    #[inline]
    fn stripe_no(leaf: u64) -> usize {
        (leaf / LEAF_LEN) as usize % LEAF_LOCK_STRIPES
    }

    #[inline]
    pub(crate) fn slot_version(&self, leaf: u64) -> &AtomicU64 {
        &self.stripes[Self::stripe_no(leaf)].slot_version
    }

    /// Whether a thread holds the lock of a leaf. For assertions.
    fn is_leaf_locked(&self, leaf: u64) -> bool {
        SCHEDULE_EXPLORATION || try_lock(&self.stripes[Self::stripe_no(leaf)].lock).is_none()
    }

    /// Raises the versions of `leaf`, whose slots the caller overwrites next.
    pub(crate) fn begin_slot_write(&self, leaf: PoolLeaf<'_>) {
        debug_assert!(self.is_leaf_locked(leaf.offset), "a leaf is locked while its slots are overwritten");
        let changes = self.slot_version(leaf.offset);
        changes.store(changes.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if self.is_step_enabled(TreeStep::LeafOrderVersion) {
            self.leaf_orders.bump_version(leaf.order_id);
        }
        fence(Ordering::Release);
    }

    /// Counts records that were added to `leaf`, or removed from it if `by` is negative.
    pub(crate) fn add_to_record_count(&self, leaf: u64, by: i64) {
        debug_assert!(self.is_leaf_locked(leaf), "a leaf is locked while its records are counted");
        let records = &self.stripes[Self::stripe_no(leaf)].record_delta;
        records.store(records.load(Ordering::Relaxed).wrapping_add_signed(by), Ordering::Release);
    }

    /// Raises `structure_version`. The caller has moved keys to another leaf, and `inner` leads to that leaf already.
    pub(crate) fn bump_structure_version(&self) {
        if self.is_step_enabled(TreeStep::StructureVersion) {
            self.structure_version.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether a step is done. Only a test can skip one.
    #[cfg(not(test))]
    #[inline]
    pub(crate) fn is_step_enabled(&self, _step: TreeStep) -> bool {
        true
    }

    #[cfg(test)]
    pub(crate) fn is_step_enabled(&self, step: TreeStep) -> bool {
        self.skipped_step.get() != Some(&step)
    }

    /// Skips a step from now on.
    #[cfg(test)]
    pub(crate) fn skip_step(&self, step: Option<TreeStep>) {
        step.into_iter().for_each(|step| self.skipped_step.set(step).expect("one fault at a time"));
    }

    /// Locks a leaf against other writers.
    pub(crate) fn lock_stripe(&self, leaf: u64) -> Result<MutexGuard<'_, ()>> {
        self.stripes[Self::stripe_no(leaf)].lock.lock().map_err(poisoned)
    }

    /// Locks two leaves. Threads that do so do not wait for each other, because they hold `structure_lock`; a thread
    /// that holds only one leaf lock waits for no other lock of a leaf.
    pub(crate) fn lock_two_leaves(&self, _: &StructureGuard<'_>, a: u64, b: u64) -> Result<TwoLeavesGuard<'_>> {
        let second = if Self::stripe_no(a) == Self::stripe_no(b) { None } else { Some(self.lock_stripe(b)?) };
        Ok((self.lock_stripe(a)?, second))
    }

    /// Locks all leaves.
    pub(crate) fn lock_all_leaves(&self, _: &StructureGuard<'_>) -> Result<Vec<MutexGuard<'_, ()>>> {
        self.stripes.iter().map(|stripe| stripe.lock.lock().map_err(poisoned)).collect()
    }

    /// Locks the structure for a thread that splits leaves or merges sparse ones.
    ///
    /// # Errors
    /// `Closed` after [`stop_writes`](PoolTree::stop_writes).
    pub(crate) fn lock_structure(&self) -> Result<StructureGuard<'_>> {
        let structure = self.structure_lock.lock().map_err(poisoned)?;
        self.check_open().map(|()| structure)
    }

    #[inline]
    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(closed_error()),
        }
    }

    /// Pins the thread, so that the leaves and records that it finds are not reused. Every read of leaves and records
    /// needs such a pin: the database waits for the reads that began before [`stop_writes`](PoolTree::stop_writes),
    /// and then releases the file to other processes.
    ///
    /// # Errors
    /// `Closed` after `stop_writes`, because another process may have written the file.
    #[inline(always)]
    pub(crate) fn pin(&self) -> Result<Pin> {
        let pin = Pin::new();
        // The pin, `closed` and the epoch are accessed with SeqCst: either this load sees that `closed` was set, or the
        // thread that set it sees this pin.
        self.check_open().map(|()| pin)
    }

    /// Runs `work` while no leaf is split. A leaf can be split for a change that has no sequence number yet, so
    /// withholding sequence numbers does not prevent splits.
    pub(crate) fn with_structure_locked<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let _structure = self.structure_lock.lock().map_err(poisoned)?;
        work()
    }

    /// Stops all changes. When it returns, no thread changes the pool any more, neither by splitting a leaf nor by
    /// growing the pool for a change without a sequence number. The caller makes sure that no change with a sequence
    /// number is in progress.
    pub(crate) fn stop_writes(&self) {
        // A panic may have poisoned the lock. The state that it left is not repaired here.
        let structure = lock(&self.structure_lock);
        self.closed.store(true, Ordering::SeqCst);
        drop(structure);
        lock(&self.allocator).close();
    }

    /// Begins the replay of the WAL, which lasts until [`end_replay`](PoolTree::end_replay). There are no readers
    /// yet, so replaced records are not retained. The limit of the pool's length does not hold.
    pub(crate) fn begin_replay(&self) {
        self.replaying.store(true, Ordering::Release);
        lock(&self.allocator).begin_replay();
    }

    pub(crate) fn end_replay(&self) -> Result<()> {
        self.lock_allocator()?.end_replay();
        self.replaying.store(false, Ordering::Release);
        Ok(())
    }

    pub(crate) fn lock_allocator(&self) -> Result<MutexGuard<'_, Allocator>> {
        self.allocator.lock().map_err(poisoned)
    }

    /// The fingerprint of a key, one byte; 0 if the key order has no bytes to hash for it.
    #[inline]
    pub(crate) fn fingerprint(&self, key: &[u8]) -> u8 {
        if self.bytes_identify_keys {
            return key_hash(self.hash_seed, key) as u8;
        }
        self.key_order.hash_input(key, &mut Vec::new()).map_or(0, |bytes| key_hash(self.hash_seed, bytes) as u8)
    }

    #[inline]
    fn key_equals(&self, record: &PoolRecord, key: &[u8]) -> bool {
        if self.bytes_identify_keys {
            return record.key_len == key.len() && self.region().equals(record.key_offset, key);
        }
        let mut stored = Vec::new();
        record.read_key(self.region(), &mut stored);
        self.key_order.cmp(&stored, key).is_eq()
    }

    /// Finds the record of `key` among the slots of a leaf that are valid in `commit`.
    #[inline]
    pub(crate) fn find_in_leaf(
        &self,
        leaf: PoolLeaf<'_>,
        commit: LeafCommitWord,
        key: &[u8],
        fingerprint: u8,
    ) -> Result<Option<LeafEntry>> {
        for n in set_bits(leaf.match_fingerprint(commit, fingerprint)) {
            let slot = leaf.slot(n);
            self.prefetch_record(slot);
            let record = PoolRecord::read(self.region(), slot)?;
            if self.key_equals(&record, key) {
                return Ok(Some(LeafEntry { slot_index: n, record }));
            }
        }
        Ok(None)
    }

    /// Prefetches the record of a slot.
    #[inline]
    pub(crate) fn prefetch_record(&self, slot: LeafSlot) {
        self.region().prefetch(slot.offset(), slot.len().unwrap_or(VALUE_PREFETCH_LEN).min(VALUE_PREFETCH_LEN));
    }

    /// The newest record of `key` in the tree. A record that is found was in the tree at some time during the call,
    /// and stays readable while `pin` is held.
    #[inline]
    pub(crate) fn find_newest(&self, key: &[u8], pin: &Pin) -> Result<Option<PoolRecord>> {
        let fingerprint = self.fingerprint(key);
        loop {
            let shape = self.structure_version.load(Ordering::Acquire);
            let leaf = self.leaf(LeafAddr(self.inner.find_leaf(LeafTarget::Key(key), pin)));
            self.region().prefetch(leaf.offset, LEAF_LEN);
            let changes = self.slot_version(leaf.offset).load(Ordering::Acquire);
            if let Some(place) = self.find_in_leaf(leaf, leaf.commit_word(), key, fingerprint)? {
                return Ok(Some(place.record));
            }
            if self.is_unchanged(leaf.offset, changes, shape) {
                return Ok(None);
            }
        }
    }

    /// The leaf to which `key` belongs now. Prefetches its header.
    #[inline]
    pub(crate) fn guess_leaf(&self, key: &[u8], pin: &Pin) -> LeafGuess {
        let pending = self.range_deletes.first();
        let shape = self.structure_version.load(Ordering::Acquire);
        let leaf = LeafAddr(self.inner.find_leaf(LeafTarget::Key(key), pin));
        self.region().prefetch(leaf.offset(), LEAF_HEADER_LEN);
        LeafGuess { pending, shape, leaf, fingerprint: self.fingerprint(key) }
    }

    /// As [`get_at`](PoolTree::get_at). Searches the guessed leaf first, which is the only one unless keys have moved
    /// since the guess. `pin` was held at the guess.
    pub(crate) fn get_guessed(&self, key: &[u8], guess: LeafGuess, at: ReadMoment, pin: &Pin) -> Result<Option<Slice>> {
        let leaf = self.leaf(guess.leaf);
        let changes = self.slot_version(leaf.offset).load(Ordering::Acquire);
        let newest = match self.find_in_leaf(leaf, leaf.commit_word(), key, guess.fingerprint)? {
            Some(entry) => Some(entry.record),
            None if self.is_unchanged(leaf.offset, changes, guess.shape) => None,
            None => self.find_newest(key, pin)?,
        };
        self.visible_version(key, newest, at, guess.pending, Region::slice)
    }

    /// Whether the leaf and the structure are unchanged since these versions were loaded: then the slots read in
    /// between are one state of the right leaf.
    #[inline]
    pub(crate) fn is_unchanged(&self, leaf: u64, changes: u64, shape: u64) -> bool {
        fence(Ordering::Acquire);
        self.slot_version(leaf).load(Ordering::Relaxed) == changes
            && self.structure_version.load(Ordering::Relaxed) == shape
    }

    /// The value of `key` in the newest visible commit.
    ///
    /// # Errors
    /// `Corruption` if the bytes of the pool are not valid, `Closed` after [`stop_writes`](PoolTree::stop_writes).
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Slice>> {
        self.get_with(key, Region::slice)
    }

    /// The length of the value of `key` in bytes, as [`PoolTree::get`].
    pub(crate) fn size_of(&self, key: &[u8]) -> Result<Option<u32>> {
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        self.get_with(key, |_, _, len| len as u32)
    }

    fn get_with<T>(&self, key: &[u8], read: impl Fn(&Region, u64, usize) -> T) -> Result<Option<T>> {
        let pin = self.pin()?;
        let now_ms = || self.versions.readers().now_ms();
        loop {
            let at = self.versions.readers().visible();
            let pending = self.range_deletes.first();
            let newest = self.find_newest(key, &pin)?;
            if let Some(record) = newest.filter(|record| record.seqno <= at) {
                match self.is_hidden(key, &record, at, pending) {
                    Some(false) => return self.read_unexpired(&record, now_ms, &read),
                    Some(true) => return Ok(None),
                    None => continue,
                }
            }
            let version = self.versions.find(key, at);
            // The version that was visible at `at` may have been replaced or removed, the change published, and the
            // version dropped since. Then the lookup is repeated at a later sequence number.
            if self.versions.is_complete_since(at) {
                return version.map_or(Ok(None), |slot| self.read_version(slot, now_ms, &read));
            }
        }
    }

    /// The value of `key` as of `at`, the moment of a registered snapshot or iterator.
    pub(crate) fn get_at(&self, key: &[u8], at: impl Into<ReadMoment>) -> Result<Option<Slice>> {
        self.get_at_with(key, at.into(), Region::slice)
    }

    /// The length of the value of `key` in bytes, as [`PoolTree::get_at`].
    pub(crate) fn size_of_at(&self, key: &[u8], at: impl Into<ReadMoment>) -> Result<Option<u32>> {
        self.get_at_with(key, at.into(), |_, _, len| len as u32)
    }

    fn get_at_with<T>(&self, key: &[u8], at: ReadMoment, read: impl Fn(&Region, u64, usize) -> T) -> Result<Option<T>> {
        let pin = self.pin()?;
        let pending = self.range_deletes.first();
        let newest = self.find_newest(key, &pin)?;
        self.visible_version(key, newest, at, pending, read)
    }

    /// Reads the version of `key` that is visible at `at`: `newest`, or an older one. `pending` was the first pending
    /// range delete before the search. The caller is pinned.
    #[inline]
    fn visible_version<T>(
        &self,
        key: &[u8],
        newest: Option<PoolRecord>,
        at: ReadMoment,
        pending: SeqNo,
        read: impl Fn(&Region, u64, usize) -> T,
    ) -> Result<Option<T>> {
        if let Some(record) = newest.filter(|record| record.seqno <= at.seqno) {
            return match self.is_hidden(key, &record, at.seqno, pending) {
                Some(false) => self.read_unexpired(&record, || at.now_ms, &read),
                Some(true) => Ok(None),
                None => self.get_at_with(key, at, read),
            };
        }
        match self.versions.find(key, at.seqno) {
            Some(slot) => self.read_version(slot, || at.now_ms, &read),
            None => Ok(None),
        }
    }

    /// Whether a pending range delete hides `record` from a reader at `at`, as of
    /// [`hides`](PendingRangeDeletes::hides).
    #[inline]
    fn is_hidden(&self, key: &[u8], record: &PoolRecord, at: SeqNo, pending: SeqNo) -> Option<bool> {
        if pending > at || !self.is_step_enabled(TreeStep::HideCovered) {
            return Some(false);
        }
        self.range_deletes.hides(pending, key, record.seqno, at, &self.key_order)
    }

    /// Passes offset and length of the value of a visible record to `read`, unless the record has expired.
    #[inline]
    fn read_unexpired<T>(
        &self,
        record: &PoolRecord,
        now_ms: impl FnOnce() -> u64,
        read: &impl Fn(&Region, u64, usize) -> T,
    ) -> Result<Option<T>> {
        let (offset, len) = match record.kind {
            RecordKind::Put => (record.value_offset(), record.value_len),
            _ => match record.unexpired_value(self.region(), now_ms())? {
                Some(value) => value,
                None => return Ok(None),
            },
        };
        Ok(Some(read(self.region(), offset, len)))
    }

    fn read_version<T>(
        &self,
        slot: LeafSlot,
        now_ms: impl FnOnce() -> u64,
        read: &impl Fn(&Region, u64, usize) -> T,
    ) -> Result<Option<T>> {
        self.read_unexpired(&PoolRecord::read(self.region(), slot)?, now_ms, read)
    }

    /// Number of records in the tree.
    pub(crate) fn len(&self) -> u64 {
        let shares = self.stripes.iter().map(|stripe| stripe.record_delta.load(Ordering::Acquire));
        // The sum is not a snapshot: it may miss a record whose removal is counted in one stripe and whose insertion
        // in another is not yet.
        shares
            .fold(self.records_at_open.load(Ordering::Acquire), u64::wrapping_add)
            .cast_signed()
            .max(0)
            .cast_unsigned()
    }

    pub(crate) fn level(&self) -> PersistenceLevel {
        self.backend.level()
    }

    /// The space usage of the pool, and the number of leaves in use.
    pub(crate) fn usage(&self) -> Result<(PoolUsage, u64)> {
        let usage = self.lock_allocator()?.usage();
        let free = usage.free_bytes + self.thread_caches.bytes();
        Ok((PoolUsage { free_bytes: free, ..usage }, self.leaf_count.load(Ordering::Acquire)))
    }

    /// Compares the keys of two records.
    pub(crate) fn cmp_keys(&self, a: &PoolRecord, b: &PoolRecord) -> std::cmp::Ordering {
        if self.key_order.is_bytewise() {
            return self.region().cmp_within((a.key_offset, a.key_len), (b.key_offset, b.key_len));
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        a.read_key(self.region(), &mut left);
        b.read_key(self.region(), &mut right);
        self.key_order.cmp(&left, &right)
    }

    /// Compares the key of a record with `key`.
    pub(crate) fn cmp_key(&self, record: &PoolRecord, key: &[u8]) -> std::cmp::Ordering {
        if self.key_order.is_bytewise() {
            return self.region().cmp(record.key_offset, record.key_len, key);
        }
        let mut stored = Vec::with_capacity(record.key_len.min(KEY_LEN_MAX));
        record.read_key(self.region(), &mut stored);
        self.key_order.cmp(&stored, key)
    }

    /// Fills `out` with (key prefix, index) for each of `records`, sorted by key, and for one key from the newest to
    /// the oldest record. All keys share their first `common` bytes; a prefix is read from the bytes after them.
    pub(crate) fn sort_records(&self, records: &[PoolRecord], common: usize, out: &mut Vec<(u64, u32)>) {
        out.clear();
        let head = |record: &PoolRecord| {
            let rest = record.key_len.saturating_sub(common);
            self.region().prefix_u64(record.key_offset + (record.key_len - rest) as u64, rest)
        };
        let by_key = |a: &(u64, u32), b: &(u64, u32)| {
            let (a, b) = (&records[a.1 as usize], &records[b.1 as usize]);
            self.cmp_keys(a, b).then(b.seqno.cmp(&a.seqno))
        };
        if !self.key_order.is_bytewise() || records.len() > 1 << INDEX_BITS {
            out.extend(records.iter().zip(0..).map(|(record, n)| (head(record), n)));
            return out.sort_unstable_by(by_key);
        }
        // Sorting plain integers is fastest: the upper bits contain the key prefix, the lower `INDEX_BITS` bits the
        // index of the record.
        let mut packed = [0; 1 << INDEX_BITS];
        let packed = &mut packed[..records.len()];
        for ((n, record), word) in records.iter().enumerate().zip(packed.iter_mut()) {
            *word = head(record) >> INDEX_BITS << INDEX_BITS | n as u64;
        }
        packed.sort_unstable();
        let number = (1 << INDEX_BITS) - 1;
        out.extend(packed.iter().map(|word| (word >> INDEX_BITS, (word & number) as u32)));
        let mut rest = out.as_mut_slice();
        while let Some((first, _)) = rest.first() {
            let alike = rest.iter().take_while(|(head, _)| head == first).count();
            let (same, behind) = std::mem::take(&mut rest).split_at_mut(alike);
            if alike > 1 {
                same.sort_unstable_by(by_key);
            }
            rest = behind;
        }
        debug_assert!(
            self.key_order.is_custom() || out.is_sorted_by(|a, b| by_key(a, b).is_le()),
            "records are sorted by key, the newest first"
        );
    }
}
