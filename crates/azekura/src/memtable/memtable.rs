//! The memtable, its iterator, and the accounting of the memory that all memtables of a database use.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::BlobPointer;
use crate::base::checksum::key_hash;
use crate::base::key::split_expiry;
use crate::base::key_range::{KeyBoundary, KeyRange, RangeTombstone};
use crate::base::version_edit::FileNumber;
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::range_filter::{SkippingIter, seek_before, seek_behind};
use crate::iter::range_tombstones::RangeTombstones;
use crate::mem::arena::{AppendError, Arena, ArenaRef, ArenaWriter};
use crate::mem::atomic::{
    AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, SCHEDULE_EXPLORATION, subtract_counted, try_lock,
};
use crate::mem::chunk_pool::ChunkPool;
use crate::mem::epoch::{EpochCell, Pin};
use crate::memtable::hash_index::{HashIndexWriter, HashLookup, MemtableHashIndex};
use crate::memtable::recent_records::RecentRecords;
use crate::memtable::record::{MemtableRecords, record_len};
use crate::memtable::tree::{MemtableInsertPosition, MemtableLeafCopy, MemtableSeekTarget, MemtableTree};

/// Number of versions of a key that a lookup reads through the version chain before it searches the ordered index.
const CHAIN_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 32 };

/// Upper bound of the memory that one record takes in both indexes, in bytes. Leaves of the ordered index and
/// segments of the hash index may be half full.
const INDEX_BYTES_MAX: u64 = 64;
/// Records longer than this, in bytes, can leave a considerable part of a chunk of the arena unused.
const LONG_RECORD_LEN: u64 = 4 << 10;

/// The newest records of a tree, in memory. Thread safe: a lock admits one writer at a time; readers never wait.
pub(crate) struct Memtable {
    records: MemtableRecords,
    tree: MemtableTree,
    hashes: MemtableHashIndex,
    hash_seed: u64,
    /// Whether only keys with equal bytes are equal. If not, keys are hashed in canonical form or not at all.
    equality_is_bytewise: bool,
    memory: Arc<MemtableMemory>,
    /// Whether there are range deletes. Readers look at `range_tombstones` only then.
    has_range_deletes: AtomicBool,
    range_tombstones: EpochCell<RangeTombstones>,
    /// Set by the first call of [`find_recent_key`](Memtable::find_recent_key).
    recent: OnceLock<RecentRecords>,
    write_state: MemtableWriteState,
}

/// State that each insertion writes. It has cache lines of its own, because lookups do not read it.
#[repr(align(128))]
struct MemtableWriteState {
    writer: Mutex<MemtableWriter>,
    len: AtomicU64,
    /// Records that are tombstones.
    tombstones: AtomicU64,
    lowest: AtomicU64,
    highest: AtomicU64,
    /// The lowest and the highest sequence number of a range delete; 0 if there is none.
    lowest_range_delete: AtomicU64,
    highest_range_delete: AtomicU64,
    /// Bytes of the range tombstones.
    range_tombstone_bytes: AtomicU64,
    /// Number of records that [`Memtable::count_covered`] has counted.
    covered_records: AtomicU64,
    /// Bytes of blob files that records point to.
    referenced_blob_bytes: AtomicU64,
    /// Records whose key has a newer one, and the bytes of blob files that they point to.
    superseded: AtomicU64,
    superseded_blob_bytes: AtomicU64,
    /// Bytes charged to [`MemtableMemory`]; `sealed` tells that they no longer count as active.
    charged: AtomicU64,
    sealed: AtomicBool,
}

struct MemtableWriter {
    arena: ArenaWriter,
    hashes: HashIndexWriter,
    position: MemtableInsertPosition,
    scratch: Vec<u8>,
    /// Number of records that point into each logical file.
    blob_pointer_counts: BTreeMap<FileNumber, u64>,
}

impl Memtable {
    /// Returns an empty memtable; it owns about 2 KiB until the first insertion.
    pub(crate) fn new(order: KeyOrder, hash_seed: u64) -> Memtable {
        Memtable::with_memory_tracker(Arc::default(), order, hash_seed)
    }

    /// As [`Memtable::new`]; the bytes that the memtable allocates are added to `memory`.
    pub(crate) fn with_memory_tracker(memory: Arc<MemtableMemory>, order: KeyOrder, hash_seed: u64) -> Memtable {
        let (arena, writer) = Arena::new(Arc::clone(&memory.chunks));
        let (hashes, scratch, pointers) = (HashIndexWriter::default(), Vec::new(), BTreeMap::new());
        let position = MemtableInsertPosition::default();
        let writer = MemtableWriter { arena: writer, hashes, position, scratch, blob_pointer_counts: pointers };
        Memtable {
            equality_is_bytewise: order.equality_is_bytewise(),
            records: MemtableRecords::new(arena, order),
            tree: MemtableTree::new(),
            hashes: MemtableHashIndex::new(),
            hash_seed,
            memory,
            has_range_deletes: AtomicBool::new(false),
            range_tombstones: EpochCell::new(Arc::default()),
            recent: OnceLock::new(),
            write_state: MemtableWriteState {
                writer: Mutex::new(writer),
                len: AtomicU64::new(0),
                tombstones: AtomicU64::new(0),
                lowest: AtomicU64::new(u64::MAX),
                highest: AtomicU64::new(0),
                lowest_range_delete: AtomicU64::new(0),
                highest_range_delete: AtomicU64::new(0),
                range_tombstone_bytes: AtomicU64::new(0),
                covered_records: AtomicU64::new(0),
                referenced_blob_bytes: AtomicU64::new(0),
                superseded: AtomicU64::new(0),
                superseded_blob_bytes: AtomicU64::new(0),
                charged: AtomicU64::new(0),
                sealed: AtomicBool::new(false),
            },
        }
    }

    /// Seals the memtable: its memory no longer counts as active. Only one thread at a time may call it, and only
    /// after the last insertion has returned.
    pub(crate) fn seal(&self) {
        if !self.write_state.sealed.swap(true, Ordering::Relaxed) {
            self.memory.seal(self.write_state.charged.load(Ordering::Relaxed), self.referenced_blob_bytes());
        }
    }

    /// Charges the bytes that were allocated since the last call.
    #[inline]
    fn charge(&self, _lock: &MutexGuard<'_, MemtableWriter>) {
        let range_deletes = self.write_state.range_tombstone_bytes.load(Ordering::Relaxed);
        let bytes = self.records.arena().bytes() + self.tree.bytes() + self.hashes.bytes() + range_deletes;
        let charged = self.write_state.charged.load(Ordering::Relaxed);
        debug_assert!(bytes >= charged, "the bytes of a memtable never decrease");
        if bytes != charged {
            self.write_state.charged.store(bytes, Ordering::Relaxed);
            self.memory.grow(bytes.saturating_sub(charged));
        }
    }

    /// Adds a record. Records of one key must be added in ascending order of their sequence numbers.
    ///
    /// # Errors
    /// `Full` if the memtable is full; `Invalid` if the key or the value is too long, or the sequence number is not
    /// larger than that of the key's newest record (checked only where keys are hashed); `Corruption` if the value of a
    /// record has no valid blob pointer or expiry time, as its kind requires; `OutOfSpace` if there is no memory;
    /// `Poisoned` if a comparator panicked in an earlier call. In case of an error the record is not in the memtable.
    pub(crate) fn insert(&self, entry: EntryRef<'_>) -> Result<(), AppendError> {
        let mut writer =
            self.write_state.writer.lock().map_err(|_| Error::new(ErrorKind::Poisoned, "a comparator panicked"))?;
        let inserted = self.insert_as(&mut writer, entry);
        self.charge(&writer); // includes the allocations of a failed insertion
        inserted
    }

    /// Adds records until `is_due`, which is called after each of them, returns true. Returns the number of records
    /// added, and the error of the next one. Takes the lock once, and searches the ordered index once for keys that
    /// follow each other there.
    ///
    /// # Errors
    /// As [`Memtable::insert`].
    pub(crate) fn insert_run(
        &self,
        entries: &[EntryRef<'_>],
        is_due: impl Fn() -> bool,
    ) -> (usize, Result<(), AppendError>) {
        let Ok(mut writer) = self.write_state.writer.lock() else {
            return (0, Err(Error::new(ErrorKind::Poisoned, "a comparator panicked").into()));
        };
        writer.position.begin_run();
        for (added, entry) in entries.iter().enumerate() {
            let inserted = self.insert_as(&mut writer, *entry);
            self.charge(&writer);
            if inserted.is_err() {
                return (added, inserted);
            }
            if is_due() {
                return (added + 1, Ok(()));
            }
        }
        (entries.len(), Ok(()))
    }

    fn insert_as(&self, writer: &mut MemtableWriter, entry: EntryRef<'_>) -> Result<(), AppendError> {
        match entry.kind {
            RecordKind::BlobPointer | RecordKind::ExpiringBlobPointer => check_pointer(&entry)?,
            RecordKind::ExpiringPut => split_expiry(entry.kind, entry.value).map(drop)?,
            RecordKind::RangeDelete => return Err(Error::invalid("a range delete is not an entry").into()),
            RecordKind::Put | RecordKind::Delete | RecordKind::SingleDelete | RecordKind::Merge => {}
        }
        debug_assert!(!self.write_state.sealed.load(Ordering::Relaxed), "no record is inserted into a sealed memtable");
        let MemtableWriter { arena, hashes, position: ordered, scratch, blob_pointer_counts: pointers } = writer;
        let hash = self.hash_with(entry.user_key, scratch);
        if let Some(hash) = hash {
            self.hashes.prefetch(hash); // arrives while the ordered index is searched
        }
        self.tree.find_position(&self.records, entry.key(), ordered);
        let position = match hash {
            Some(hash) => {
                let position = self.hashes.find_position(hashes, hash, |at| self.is_key(at, entry.user_key));
                if position.is_none() {
                    self.hashes.mark_incomplete();
                }
                position
            }
            None => None,
        };
        let older = position.and_then(|position| position.older);
        if older.is_some_and(|older| self.records.get(older).seqno() >= entry.seqno) {
            return Err(Error::invalid("sequence numbers of a key must increase").into());
        }
        let at = self.records.append(arena, entry, older)?;
        self.tree.insert(&self.records, ordered, at.to_bits(), entry.user_key)?;
        if let Some(position) = position {
            self.hashes.put(hashes, position, at);
        }
        let MemtableWriteState { len, tombstones, lowest, highest, referenced_blob_bytes: pointed, .. } =
            &self.write_state;
        if entry.kind.without_expiry() == RecordKind::BlobPointer {
            let bytes = count_blob_pointer(pointers, &entry);
            pointed.store(pointed.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Release);
            self.memory.point_to(bytes);
        }
        if let Some(older) = older {
            self.count_superseded(older);
        }
        if entry.kind.is_tombstone() {
            tombstones.store(tombstones.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        len.store(len.load(Ordering::Relaxed) + 1, Ordering::Release);
        lowest.store(lowest.load(Ordering::Relaxed).min(entry.seqno.0), Ordering::Release);
        highest.store(highest.load(Ordering::Relaxed).max(entry.seqno.0), Ordering::Release);
        if let Some(recent) = self.recent.get() {
            recent.push(at.to_bits(), entry.seqno);
        }
        debug_assert!(self.tombstones() <= self.len(), "a tombstone is a record");
        debug_assert!(
            (self.smallest_seqno()..=self.largest_seqno()).contains(&entry.seqno),
            "the record is between the lowest and the highest sequence number"
        );
        Ok(())
    }

    /// Makes the memtable full once its records take `chunks_max` chunks of memory.
    #[cfg(test)]
    pub(crate) fn limit_chunks(&self, chunks_max: u32) {
        self.write_state.writer.lock().expect("no comparator panicked").arena.limit_chunks(chunks_max);
    }

    /// Counts a record whose key has a newer one now.
    fn count_superseded(&self, older: ArenaRef) {
        let MemtableWriteState { superseded, superseded_blob_bytes: bytes, .. } = &self.write_state;
        superseded.store(superseded.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        debug_assert!(
            superseded.load(Ordering::Relaxed) < self.len() + 1,
            "the newest record of a key is not superseded"
        );
        let older = self.records.get(older).entry();
        if let Ok(Some(pointer)) = BlobPointer::of_record(older.kind, older.value) {
            bytes.store(bytes.load(Ordering::Relaxed) + pointer.frame_len, Ordering::Relaxed);
        }
    }

    /// Adds a range delete. `snapshots`: the sequence numbers that readers read at, the last visible one last. Older
    /// range deletes that only readers between two of them would need are dropped.
    ///
    /// # Errors
    /// `Poisoned` if a comparator panicked in an earlier call.
    pub(crate) fn insert_range_delete(&self, range: KeyRange, seqno: SeqNo, snapshots: &[SeqNo]) -> Result<()> {
        let writer =
            self.write_state.writer.lock().map_err(|_| Error::new(ErrorKind::Poisoned, "a comparator panicked"))?;
        debug_assert!(
            !self.write_state.sealed.load(Ordering::Relaxed),
            "no range delete is added to a sealed memtable"
        );
        let old = self.range_tombstones.load_arc();
        debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
        debug_assert!(
            seqno.0 > self.write_state.highest.load(Ordering::Relaxed) && seqno > old.largest_seqno(),
            "a range delete is newer than everything before it"
        );
        let new = old.with_range_delete(range, seqno, snapshots, self.records.order());
        let MemtableWriteState { lowest_range_delete: lowest, highest_range_delete: highest, .. } = &self.write_state;
        if !self.has_range_deletes() {
            lowest.store(seqno.0, Ordering::Release);
        }
        highest.store(seqno.0, Ordering::Release);
        // Charged bytes never decrease, because the sums of all memtables are not lowered before the memtable is freed.
        let bytes = self.write_state.range_tombstone_bytes.load(Ordering::Relaxed).max(new.bytes());
        self.write_state.range_tombstone_bytes.store(bytes, Ordering::Relaxed);
        self.range_tombstones.store(Arc::new(new));
        self.has_range_deletes.store(true, Ordering::Release);
        self.charge(&writer);
        drop(writer);
        Ok(())
    }

    /// Copies records and range deletes above `after` to `copy`, which is empty. The caller prevents insertions.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory; `Poisoned` if a comparator panicked in an earlier call.
    pub(crate) fn copy_newer(self: &Arc<Self>, after: SeqNo, copy: &Memtable) -> Result<()> {
        debug_assert!(copy.is_empty(), "the copy has the records of one memtable");
        self.for_each_from_last(|entry| match entry.seqno > after {
            true => copy.insert(entry).map_err(AppendError::into_error),
            false => Ok(()),
        })?;
        let newer = |fragment: &RangeTombstone| {
            let seqnos: Arc<[SeqNo]> = fragment.seqnos.iter().copied().filter(|seqno| *seqno > after).collect();
            (!seqnos.is_empty()).then(|| RangeTombstone { range: fragment.range.clone(), seqnos })
        };
        let fragments: Vec<RangeTombstone> = self.range_tombstones_arc().iter().filter_map(newer).collect();
        let seqnos = || fragments.iter().flat_map(|fragment| fragment.seqnos.iter().copied());
        if let (Some(lowest), Some(highest)) = (seqnos().min(), seqnos().max()) {
            let set = RangeTombstones::from_fragments(fragments, self.records.order())?;
            copy.set_range_tombstones(set, lowest, highest);
        }
        Ok(())
    }

    /// Sets the range deletes of a memtable that has none.
    fn set_range_tombstones(&self, set: RangeTombstones, lowest: SeqNo, highest: SeqNo) {
        debug_assert!(!self.has_range_deletes(), "range deletes are added one by one, or all at once");
        let writer = self.write_state.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.write_state.lowest_range_delete.store(lowest.0, Ordering::Release);
        self.write_state.highest_range_delete.store(highest.0, Ordering::Release);
        self.write_state.range_tombstone_bytes.store(set.bytes(), Ordering::Relaxed);
        self.range_tombstones.store(Arc::new(set));
        self.has_range_deletes.store(true, Ordering::Release);
        self.charge(&writer);
    }

    /// Counts the records of `range`, up to `max`. Returns their number plus the results of all earlier calls.
    pub(crate) fn count_covered(self: &Arc<Self>, range: &KeyRange, max: u64) -> Result<u64> {
        let order = self.records.order();
        let (mut iter, mut count) = (self.iter(), 0);
        if self.has_records() {
            seek_behind(&mut iter, &range.start, order)?;
        }
        while count < max && iter.head().is_some_and(|(key, _)| range.end.cmp_key(key.user_key, order).is_gt()) {
            count += 1;
            iter.next()?;
        }
        Ok(self.write_state.covered_records.fetch_add(count, Ordering::Relaxed) + count)
    }

    /// Whether there are range deletes. A thread that has read a visible sequence number finds those up to it.
    #[inline]
    pub(crate) fn has_range_deletes(&self) -> bool {
        self.has_range_deletes.load(Ordering::Acquire)
    }

    /// The range deletes, for a pinned caller. A later call may return a set without sequence numbers that only an
    /// unregistered reader needs, which has resolved its own sequence number before.
    #[inline]
    pub(crate) fn range_tombstones<'a>(&'a self, pin: &'a Pin) -> &'a RangeTombstones {
        self.range_tombstones.load_pinned(pin)
    }

    /// The range deletes.
    pub(crate) fn range_tombstones_arc(&self) -> Arc<RangeTombstones> {
        self.range_tombstones.load_arc()
    }

    /// Returns the newest version of `key` that is not newer than `at`, tombstones included. `hash` is
    /// [`Memtable::hash_of`]`(key)`; with `None` the lookup searches the ordered index, which is slower.
    #[inline]
    pub(crate) fn get(&self, key: &[u8], hash: Option<u64>, at: SeqNo) -> Option<EntryRef<'_>> {
        let Some(hash) = hash else { return self.get_ordered(key, at) };
        match self.hashes.find(hash, |record| self.is_key(record, key)) {
            HashLookup::Hit(newest) => {
                let mut next = Some(newest);
                for _ in 0..CHAIN_MAX {
                    let Some(record) = next.map(|next| self.records.get(next)) else { break };
                    if record.seqno() <= at {
                        return Some(record.entry());
                    }
                    next = record.older();
                    debug_assert!(
                        next.is_none_or(|older| self.records.get(older).seqno() < record.seqno()),
                        "a version chain leads from newer to older records"
                    );
                }
                if next.is_none() && self.hashes.is_complete() { None } else { self.get_ordered(key, at) }
            }
            HashLookup::Miss if self.can_hash_key(key) => None,
            HashLookup::Miss | HashLookup::Unknown => self.get_ordered(key, at),
        }
    }

    /// Looks for the first key within `bounds` that has a record above `since`, among the last records. Returns
    /// `Some(None)` if there is no such key, and `None` if that is not known: because there are too many records above
    /// `since`, or because they are remembered only from this call on.
    pub(crate) fn find_recent_key(
        &self,
        (start, end): (Bound<&Vec<u8>>, Bound<&Vec<u8>>),
        since: SeqNo,
    ) -> Option<Option<Vec<u8>>> {
        let Some(recent) = self.recent.get() else {
            if !self.write_state.sealed.load(Ordering::Relaxed)
                && let Some(_writer) = try_lock(&self.write_state.writer)
            {
                self.recent.get_or_init(|| RecentRecords::new(self.largest_record_seqno()));
            }
            return None;
        };
        let range = KeyRange::between(start.map(Vec::as_slice), end.map(Vec::as_slice));
        let (order, mut first) = (self.records.order(), None::<&[u8]>);
        let record = |bits| self.records.get_by_bits(bits);
        let is_complete = recent.visit_above(
            since,
            |bits| record(bits).seqno(),
            |bits| {
                let key = record(bits).user_key();
                if range.contains(key, order) && first.is_none_or(|first| order.cmp(key, first).is_lt()) {
                    first = Some(key);
                }
            },
        );
        is_complete.then(|| first.map(<[u8]>::to_vec))
    }

    /// Prefetches the slot of the hash index that [`get`](Memtable::get) reads first.
    #[inline]
    pub(crate) fn prefetch_slot(&self, hash: u64) {
        self.hashes.prefetch(hash);
    }

    /// Prefetches the records that [`get`](Memtable::get) compares with the key.
    #[inline]
    pub(crate) fn prefetch_records(&self, hash: u64) {
        let _prefetched = self.hashes.find(hash, |record| {
            self.records.prefetch(record.to_bits());
            false
        });
    }

    /// [`Memtable::get`] through the ordered index. The first entry at or after (key, at) is the result if it has
    /// this key.
    #[cold]
    fn get_ordered(&self, key: &[u8], at: SeqNo) -> Option<EntryRef<'_>> {
        let mut leaf = MemtableLeafCopy::new();
        let n = self.tree.seek(&self.records, MemtableSeekTarget::LowerBound(InternalKey::new(key, at)), &mut leaf)?;
        let entry = self.records.get_by_bits(leaf.refs()[n]).entry();
        let found = self.records.keys_equal(entry.user_key, key).then_some(entry);
        debug_assert!(found.is_none_or(|found| found.seqno <= at), "the reader sees the record");
        found
    }

    /// Returns the hash to look `key` up with, or `None` if the key order does not allow hashing this key.
    #[inline]
    pub(crate) fn hash_of(&self, key: &[u8]) -> Option<u64> {
        self.hash_with(key, &mut Vec::new())
    }

    #[inline]
    fn hash_with(&self, key: &[u8], scratch: &mut Vec<u8>) -> Option<u64> {
        if self.equality_is_bytewise {
            return Some(key_hash(self.hash_seed, key));
        }
        self.records.order().hash_input(key, scratch).map(|bytes| key_hash(self.hash_seed, bytes))
    }

    /// Whether the hash index contains `key` if the memtable contains it.
    #[inline]
    fn can_hash_key(&self, key: &[u8]) -> bool {
        self.equality_is_bytewise || self.hash_of(key).is_some()
    }

    #[inline]
    fn is_key(&self, at: ArenaRef, key: &[u8]) -> bool {
        let stored = self.records.get(at).user_key();
        stored == key || !self.equality_is_bytewise && self.records.keys_equal(stored, key)
    }

    pub(crate) fn records(&self) -> &MemtableRecords {
        &self.records
    }

    pub(crate) fn tree(&self) -> &MemtableTree {
        &self.tree
    }

    /// Upper bound of the memory that a record adds, in bytes: the record, its share of both indexes, and its share
    /// of memory that is allocated ahead of use. A memtable takes up to 128 KiB more.
    pub(crate) fn bytes_max(key_len: usize, value_len: usize) -> u64 {
        let len = record_len(key_len, value_len);
        // Each chunk of the arena is twice as large as the previous one, and a long record can leave the end of a
        // chunk unused.
        let factor = if len > LONG_RECORD_LEN { 3 } else { 2 };
        factor * len + INDEX_BYTES_MAX
    }

    /// Bytes of memory that records and indexes take, as of the last insertion.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.write_state.charged.load(Ordering::Relaxed)
    }

    /// Bytes of blob files that the records point to.
    #[inline]
    pub(crate) fn referenced_blob_bytes(&self) -> u64 {
        self.write_state.referenced_blob_bytes.load(Ordering::Acquire)
    }

    /// Bytes that count towards the size at which the memtable is sealed. Bytes in blob files are among them, so that
    /// one key that is overwritten again and again does not fill the disk while its memtable stays small.
    #[inline]
    pub(crate) fn bytes_to_flush(&self) -> u64 {
        self.bytes().saturating_add(self.referenced_blob_bytes())
    }

    /// The number of records that newer ones of the memtable supersede, and the bytes of blob files that they point to.
    /// Only keys that are hashed count.
    pub(crate) fn superseded(&self) -> (u64, u64) {
        let MemtableWriteState { superseded, superseded_blob_bytes, .. } = &self.write_state;
        (superseded.load(Ordering::Relaxed), superseded_blob_bytes.load(Ordering::Relaxed))
    }

    /// Returns the number of records that point into each logical file, including records that newer ones shadow.
    pub(crate) fn blob_pointer_counts(&self) -> Vec<(FileNumber, u64)> {
        let writer = self.write_state.writer.lock();
        let writer = writer.unwrap_or_else(std::sync::PoisonError::into_inner);
        writer.blob_pointer_counts.iter().map(|(&logical, &count)| (logical, count)).collect()
    }

    /// Number of records, without range deletes.
    pub(crate) fn len(&self) -> u64 {
        self.write_state.len.load(Ordering::Acquire)
    }

    /// Number of records that are tombstones.
    pub(crate) fn tombstones(&self) -> u64 {
        self.write_state.tombstones.load(Ordering::Relaxed)
    }

    /// Whether there are records, other than range deletes.
    pub(crate) fn has_records(&self) -> bool {
        self.write_state.len.load(Ordering::Acquire) > 0
    }

    /// Whether there are neither records nor range deletes.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_records() && !self.has_range_deletes()
    }

    /// The lowest sequence number of a record or range delete; 0 if the memtable is empty.
    pub(crate) fn smallest_seqno(&self) -> SeqNo {
        let lowest = self.write_state.lowest.load(Ordering::Acquire);
        let range_delete = self.write_state.lowest_range_delete.load(Ordering::Acquire);
        let lowest = if range_delete > 0 { lowest.min(range_delete) } else { lowest };
        SeqNo(if lowest == u64::MAX { 0 } else { lowest })
    }

    /// The highest sequence number of a record or range delete; 0 if the memtable is empty.
    pub(crate) fn largest_seqno(&self) -> SeqNo {
        self.largest_record_seqno().max(SeqNo(self.write_state.highest_range_delete.load(Ordering::Acquire)))
    }

    /// The highest sequence number of a record; 0 if there is none.
    pub(crate) fn largest_record_seqno(&self) -> SeqNo {
        SeqNo(self.write_state.highest.load(Ordering::Acquire))
    }
}

impl Drop for Memtable {
    fn drop(&mut self) {
        self.seal();
        self.memory.free(self.write_state.charged.load(Ordering::Relaxed));
    }
}

#[cold]
fn check_pointer(entry: &EntryRef<'_>) -> Result<()> {
    BlobPointer::of_record(entry.kind, entry.value).map(drop)
}

/// Counts a blob pointer that [`check_pointer`] has validated. Returns the bytes that it points to.
#[cold]
fn count_blob_pointer(pointers: &mut BTreeMap<FileNumber, u64>, entry: &EntryRef<'_>) -> u64 {
    let Ok(Some(pointer)) = BlobPointer::of_record(entry.kind, entry.value) else { return 0 };
    *pointers.entry(pointer.logical_file).or_default() += 1;
    pointer.frame_len
}

/// Sums of the memory that memtables have allocated, in bytes, and the chunks of flushed memtables that the next ones
/// use again; memtables of one database share an instance. A memtable adds to the sums when it allocates, which is once
/// in many insertions. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct MemtableMemory {
    /// Bytes of memtables that accept records.
    active: AtomicU64,
    /// The spare chunks, and the bytes of all existing memtables, including sealed ones and flushed ones that iterators
    /// hold.
    chunks: Arc<ChunkPool>,
    /// Bytes of blob files that the records of memtables that accept records point to.
    active_blobs: AtomicU64,
}

impl MemtableMemory {
    /// As long as there are spare chunks, they and the memtables take at most `budget` bytes together.
    pub(crate) fn new(budget: u64) -> MemtableMemory {
        MemtableMemory { chunks: ChunkPool::new(budget), ..MemtableMemory::default() }
    }

    /// Bytes of memtables that accept records.
    #[inline]
    pub(crate) fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// Bytes of blob files that the records of memtables that accept records point to.
    #[inline]
    pub(crate) fn active_blobs(&self) -> u64 {
        self.active_blobs.load(Ordering::Relaxed)
    }

    /// Bytes of all existing memtables, without spare chunks.
    pub(crate) fn total(&self) -> u64 {
        self.chunks.in_use()
    }

    /// The spare chunks.
    pub(crate) fn chunks(&self) -> &ChunkPool {
        &self.chunks
    }

    pub(in crate::memtable) fn grow(&self, bytes: u64) {
        self.chunks.add_in_use(bytes);
        self.active.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn point_to(&self, blob_bytes: u64) {
        self.active_blobs.fetch_add(blob_bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn seal(&self, bytes: u64, blob_bytes: u64) {
        subtract_counted(&self.active, bytes);
        subtract_counted(&self.active_blobs, blob_bytes);
    }

    pub(in crate::memtable) fn free(&self, bytes: u64) {
        self.chunks.subtract_in_use(bytes);
    }
}

/// Distance in entries at which the iterator prefetches records into the processor's cache.
const PREFETCH_DISTANCE: usize = 8;

/// An iterator over all versions of all keys. It reads copies of leaves, so concurrent insertions do not affect it:
/// it returns an entry that was inserted before its leaf was copied exactly once, and may miss an entry that is
/// inserted later.
pub(crate) struct MemtableIter {
    table: Arc<Memtable>,
    leaf: MemtableLeafCopy,
    /// Index in `leaf`; `None` = not valid.
    at: Option<usize>,
}

impl Memtable {
    /// Returns an iterator over the current records; it may or may not return records that are inserted later.
    pub(crate) fn iter(self: &Arc<Self>) -> MemtableIter {
        MemtableIter::new(Arc::clone(self))
    }

    /// Calls `visit` for each record from the last one to the first. Compares no keys, so each record is visited once
    /// also if a comparator contradicts itself. The caller prevents insertions meanwhile.
    pub(crate) fn for_each_from_last(
        self: &Arc<Self>,
        mut visit: impl FnMut(EntryRef<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut iter, mut refs) = (self.iter(), Vec::with_capacity(self.len() as usize));
        iter.seek_to_first()?;
        while let Some(at) = iter.at {
            refs.push(iter.leaf.refs()[at]);
            iter.next()?;
        }
        refs.into_iter().rev().try_for_each(|bits| visit(self.records().get_by_bits(bits).entry()))
    }
}

impl MemtableIter {
    pub(crate) fn new(table: Arc<Memtable>) -> MemtableIter {
        MemtableIter { table, leaf: MemtableLeafCopy::new(), at: None }
    }

    fn seek_to(&mut self, seek_target: MemtableSeekTarget<'_>) {
        self.at = self.table.tree().seek(self.table.records(), seek_target, &mut self.leaf);
        debug_assert!(self.at.is_none_or(|at| at < self.leaf.refs().len()), "a seek ends at an entry of the leaf");
        if let (Some(at), MemtableSeekTarget::LowerBound(_)) = (self.at, seek_target) {
            self.prefetch(at, at + PREFETCH_DISTANCE);
        }
    }

    /// Prefetches the records of the entries `from..to` that the leaf has.
    fn prefetch(&self, from: usize, to: usize) {
        for &bits in self.leaf.refs().iter().take(to).skip(from) {
            self.table.records().prefetch(bits);
        }
    }

    fn at(&self) -> usize {
        self.at.expect("the caller reads and moves an iterator only while it is valid")
    }

    /// Moves to the first entry of the right sibling leaf. Copies of leaves never overlap, because a split shortens
    /// the leaf with one store: a copy contains either all entries and the old right sibling, or only the entries
    /// that stayed and the new right sibling.
    #[cold]
    fn next_leaf(&mut self) {
        self.at = self.table.tree().right_of(self.table.records(), &mut self.leaf).then_some(0);
        self.prefetch(0, PREFETCH_DISTANCE);
    }
}

impl SkippingIter for MemtableIter {
    fn skip_forward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        if self.table.largest_record_seqno() >= seqno {
            return Ok(false);
        }
        seek_behind(self, boundary, order).map(|()| true)
    }

    fn skip_backward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        if self.table.largest_record_seqno() >= seqno {
            return Ok(false);
        }
        seek_before(self, boundary, order).map(|()| true)
    }
}

impl InternalIter for MemtableIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.at = self.table.tree().first(self.table.records(), &mut self.leaf).then_some(0);
        self.prefetch(0, PREFETCH_DISTANCE);
        Ok(())
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.seek_to(MemtableSeekTarget::Last);
        Ok(())
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.seek_to(MemtableSeekTarget::LowerBound(target));
        Ok(())
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.seek_to(MemtableSeekTarget::Before(target));
        Ok(())
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let next = self.at() + 1;
        if next < self.leaf.refs().len() {
            self.at = Some(next);
            self.prefetch(next + PREFETCH_DISTANCE - 1, next + PREFETCH_DISTANCE);
        } else {
            self.next_leaf();
        }
        Ok(())
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        match self.at().checked_sub(1) {
            Some(at) => {
                self.at = Some(at);
                if let Some(prefetched) = at.checked_sub(PREFETCH_DISTANCE) {
                    self.prefetch(prefetched, prefetched + 1);
                }
            }
            None => {
                let table = Arc::clone(&self.table);
                let key = table.records().get_by_bits(self.leaf.refs()[0]).key();
                self.seek_to(MemtableSeekTarget::Before(key));
            }
        }
        Ok(())
    }

    #[inline]
    fn valid(&self) -> bool {
        self.at.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        self.table.records().get_by_bits(self.leaf.refs()[self.at()]).entry()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::RecordKind;
    use crate::testing::{TestComparator, TestOrder};

    fn put(user_key: &[u8], seqno: u64) -> EntryRef<'_> {
        EntryRef { user_key, seqno: SeqNo(seqno), kind: RecordKind::Put, value: user_key }
    }

    #[test]
    fn empty_memtable_is_small_and_readable() {
        let table = Arc::new(Memtable::new(KeyOrder::bytewise(), 1));
        assert!(size_of::<Memtable>() < 3 << 10, "{}", size_of::<Memtable>());
        assert_eq!((table.bytes(), table.len(), table.is_empty()), (0, 0, true));
        assert_eq!((table.smallest_seqno(), table.largest_seqno()), (SeqNo(0), SeqNo(0)));
        assert_eq!(table.get(b"a", table.hash_of(b"a"), SeqNo::MAX), None);
        assert_eq!(table.get(b"a", None, SeqNo::MAX), None);
        table.insert(put(b"", 5)).unwrap();
        table.insert(put(b"a", 3)).unwrap();
        assert_eq!((table.len(), table.smallest_seqno(), table.largest_seqno()), (2, SeqNo(3), SeqNo(5)));
        assert!((16 << 10..32 << 10).contains(&table.bytes()), "{}", table.bytes());
    }

    #[test]
    fn refused_record_is_not_inserted() {
        let table = Memtable::new(KeyOrder::bytewise(), 1);
        table.insert(put(b"a", 7)).unwrap();
        for seqno in [6, 7] {
            assert_eq!(table.insert(put(b"a", seqno)).unwrap_err().into_error().kind(), ErrorKind::Invalid);
        }
        assert_eq!(table.insert(put(&[0; 70_000], 9)).unwrap_err().into_error().kind(), ErrorKind::Invalid);
        assert_eq!((table.len(), table.largest_seqno()), (1, SeqNo(7)));
        assert_eq!(table.get(b"a", None, SeqNo(6)), None);
    }

    #[test]
    fn copy_has_what_is_newer() {
        let order = KeyOrder::bytewise();
        let table = Arc::new(Memtable::new(order.clone(), 1));
        let range = |from: &str, to: &str| KeyRange {
            start: KeyBoundary::Before(from.as_bytes().into()),
            end: KeyBoundary::Before(to.as_bytes().into()),
        };
        table.insert(put(b"a", 1)).unwrap();
        table.insert_range_delete(range("a", "k"), SeqNo(2), &[SeqNo(1)]).unwrap();
        table.insert(put(b"b", 3)).unwrap();
        table.insert(put(b"a", 4)).unwrap();
        table.insert_range_delete(range("b", "z"), SeqNo(5), &[SeqNo(4)]).unwrap();
        table.insert(put(b"a", 6)).unwrap();
        for after in 0..=6 {
            let copy = Arc::new(Memtable::new(order.clone(), 1));
            table.copy_newer(SeqNo(after), &copy).unwrap();
            assert_eq!(copy.is_empty(), after == 6);
            let (lowest, highest) = (copy.smallest_seqno(), copy.largest_seqno());
            assert!(after == 6 || (lowest, highest) == (SeqNo(after + 1), SeqNo(6)), "{after}: {lowest}, {highest}");
            for at in after + 1..=6 {
                let found = |table: &Memtable, key: &[u8]| {
                    table
                        .get(key, table.hash_of(key), SeqNo(at))
                        .map(|entry| entry.seqno)
                        .filter(|seqno| seqno.0 > after)
                };
                let covered =
                    |table: &Memtable, key: &[u8]| table.range_tombstones_arc().covering_seqno(key, SeqNo(at), &order);
                for key in [b"a", b"b", b"c"] {
                    assert_eq!(found(&copy, key), found(&table, key), "{after} {at}");
                    let newer = covered(&table, key);
                    assert_eq!(covered(&copy, key), if newer.0 > after { newer } else { SeqNo::ZERO }, "{after} {at}");
                }
            }
        }
    }

    #[test]
    fn old_version_is_found_after_long_version_chain() {
        let table = Memtable::new(KeyOrder::bytewise(), 1);
        for seqno in 1..=200 {
            table.insert(put(b"a", seqno)).unwrap();
        }
        for at in 1..=200 {
            assert_eq!(table.get(b"a", table.hash_of(b"a"), SeqNo(at)), Some(put(b"a", at)));
        }
        assert_eq!(table.get(b"a", table.hash_of(b"a"), SeqNo(0)), None);
    }

    #[test]
    fn large_values_fit() {
        let table = Memtable::new(KeyOrder::bytewise(), 1);
        let value = vec![7; if cfg!(miri) { 300_000 } else { 9 << 20 }];
        for seqno in 1..=3 {
            table.insert(EntryRef { value: &value, ..put(b"a", seqno) }).unwrap();
            table.insert(put(b"b", 10 + seqno)).unwrap();
        }
        assert_eq!(table.get(b"a", table.hash_of(b"a"), SeqNo(2)).unwrap().value, value);
        let values_len = 3 * value.len() as u64;
        assert!((values_len..values_len + (64 << 10)).contains(&table.bytes()));
    }

    #[test]
    fn comparator_panic_leaves_memtable_readable() {
        let order = TestComparator::minimal(TestOrder::Bytes).with_hook(|a, b| assert!(a != b"bad" && b != b"bad"));
        let table = Memtable::new(KeyOrder::custom(Arc::new(order)), 1);
        table.insert(put(b"a", 1)).unwrap();
        let insert = std::panic::AssertUnwindSafe(|| table.insert(put(b"bad", 2)));
        assert!(std::panic::catch_unwind(insert).is_err());
        assert_eq!(table.insert(put(b"b", 3)).unwrap_err().into_error().kind(), ErrorKind::Poisoned);
        assert_eq!(table.get(b"a", None, SeqNo(9)), Some(put(b"a", 1)));
    }
}
