//! The memtable, and the memory that all memtables of a database use.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::checksum::key_hash;
use crate::base::version_edit::FileNumber;
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::mem::arena::{Arena, ArenaRef, ArenaWriter};
use crate::mem::atomic::{AtomicBool, AtomicU64, Mutex, Ordering, SCHEDULE_EXPLORATION};
use crate::memtable::hash_index::{HashIndexWriter, HashLookup, MemtableHashIndex};
use crate::memtable::record::{MemtableRecords, record_len};
use crate::memtable::tree::{MemtableLeafCopy, MemtableSeekTarget, MemtableTree};

/// Versions of a key that a lookup walks over one by one before it asks the ordered index.
const CHAIN_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 32 };

/// The most bytes that a record takes in both indexes: leaves of the ordered one and segments of the other may be half
/// full.
const INDEXES_MOST: u64 = 64;
/// Records above this are long: several of them do not fill a chunk.
const LONG: u64 = 4 << 10;

/// The newest records of a tree, in memory. Thread safe: writers take turns, readers never wait.
pub(crate) struct Memtable {
    records: MemtableRecords,
    tree: MemtableTree,
    hashes: MemtableHashIndex,
    hash_seed: u64,
    /// Whether different bytes may be the same key, hashed in canonical form or not at all.
    equality_is_bytewise: bool,
    memory: Arc<MemtableMemory>,
    write_state: MemtableWriteState,
}

/// What each insertion writes, on cache lines of its own, which readers have no need for.
#[repr(align(128))]
struct MemtableWriteState {
    writer: Mutex<MemtableWriter>,
    len: AtomicU64,
    lowest: AtomicU64,
    highest: AtomicU64,
    /// Bytes of blob files that records point to.
    referenced_blob_bytes: AtomicU64,
    /// Bytes that are charged, and whether as sealed.
    charged: AtomicU64,
    sealed: AtomicBool,
}

struct MemtableWriter {
    arena: ArenaWriter,
    hashes: HashIndexWriter,
    scratch: Vec<u8>,
    /// How many records point into each logical file.
    blob_pointer_counts: BTreeMap<FileNumber, u64>,
}

impl Memtable {
    /// An empty memtable; it owns about 2 KiB until the first insertion.
    pub(crate) fn new(order: KeyOrder, hash_seed: u64) -> Memtable {
        Memtable::with_memory_tracker(Arc::default(), order, hash_seed)
    }

    /// The same; what it allocates is added to `memory`.
    pub(crate) fn with_memory_tracker(memory: Arc<MemtableMemory>, order: KeyOrder, hash_seed: u64) -> Memtable {
        let (arena, writer) = Arena::new();
        let (hashes, scratch, pointers) = (HashIndexWriter::default(), Vec::new(), BTreeMap::new());
        let writer = MemtableWriter { arena: writer, hashes, scratch, blob_pointer_counts: pointers };
        Memtable {
            equality_is_bytewise: order.equality_is_bytewise(),
            records: MemtableRecords::new(arena, order),
            tree: MemtableTree::new(),
            hashes: MemtableHashIndex::new(),
            hash_seed,
            memory,
            write_state: MemtableWriteState {
                writer: Mutex::new(writer),
                len: AtomicU64::new(0),
                lowest: AtomicU64::new(u64::MAX),
                highest: AtomicU64::new(0),
                referenced_blob_bytes: AtomicU64::new(0),
                charged: AtomicU64::new(0),
                sealed: AtomicBool::new(false),
            },
        }
    }

    /// It takes no records any more: what it holds is no longer counted as active. For one thread at a time, beside no
    /// insertion.
    pub(crate) fn seal(&self) {
        if !self.write_state.sealed.swap(true, Ordering::Relaxed) {
            self.memory.seal(self.write_state.charged.load(Ordering::Relaxed));
        }
    }

    /// Charges what was allocated since the last time. The caller holds `writer`.
    #[inline]
    fn charge(&self) {
        let bytes = self.records.arena().bytes() + self.tree.bytes() + self.hashes.bytes();
        let charged = self.write_state.charged.load(Ordering::Relaxed);
        if bytes != charged {
            self.write_state.charged.store(bytes, Ordering::Relaxed);
            self.memory.grow(bytes.saturating_sub(charged));
        }
    }

    /// Adds a record. Those of one key must come with rising sequence numbers.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long, the sequence number does not rise (noticed only where keys are hashed),
    /// or the memtable is full; `Corruption` for a pointer that is none; `OutOfSpace` if there is no memory; `Poisoned`
    /// if a comparator panicked in an earlier call. In every case the record is not in.
    pub(crate) fn insert(&self, entry: EntryRef<'_>) -> Result<()> {
        let mut writer =
            self.write_state.writer.lock().map_err(|_| Error::new(ErrorKind::Poisoned, "a comparator panicked"))?;
        let inserted = self.insert_as(&mut writer, entry);
        self.charge(); // also what an insertion has allocated that failed
        inserted
    }

    fn insert_as(&self, writer: &mut MemtableWriter, entry: EntryRef<'_>) -> Result<()> {
        if entry.kind == RecordKind::BlobPointer {
            check_pointer(entry.value)?;
        }
        let MemtableWriter { arena, hashes, scratch, blob_pointer_counts: pointers } = writer;
        let hash = self.hash_with(entry.user_key, scratch);
        if let Some(hash) = hash {
            self.hashes.prefetch(hash); // arrives while the ordered index is searched
        }
        let ordered = self.tree.find_position(&self.records, entry.key());
        let place = match hash {
            Some(hash) => {
                let place = self.hashes.find_position(hashes, hash, |at| self.is_key(at, entry.user_key));
                if place.is_none() {
                    self.hashes.mark_incomplete();
                }
                place
            }
            None => None,
        };
        let older = place.and_then(|place| place.older);
        if older.is_some_and(|older| self.records.get(older).seqno() >= entry.seqno) {
            return Err(Error::invalid("sequence numbers of a key must rise"));
        }
        let at = self.records.append(arena, entry, older)?;
        self.tree.insert(&self.records, &ordered, at.to_bits(), entry.user_key)?;
        if let Some(place) = place {
            self.hashes.put(hashes, place, at);
        }
        let MemtableWriteState { len, lowest, highest, referenced_blob_bytes: pointed, .. } = &self.write_state;
        if entry.kind == RecordKind::BlobPointer {
            count_blob_pointer(pointers, pointed, entry.value);
        }
        len.store(len.load(Ordering::Relaxed) + 1, Ordering::Release);
        lowest.store(lowest.load(Ordering::Relaxed).min(entry.seqno.0), Ordering::Release);
        highest.store(highest.load(Ordering::Relaxed).max(entry.seqno.0), Ordering::Release);
        Ok(())
    }

    /// The newest version of `key` that is not newer than `at`, tombstones included. `hash` is
    /// [`Memtable::hash_of`]`(key)`; without it the ordered index is asked, which is slower.
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
                }
                if next.is_none() && self.hashes.is_complete() { None } else { self.get_ordered(key, at) }
            }
            HashLookup::Miss if self.can_hash_key(key) => None,
            HashLookup::Miss | HashLookup::Unknown => self.get_ordered(key, at),
        }
    }

    /// [`Memtable::get`] by the ordered index: the first entry at or behind (key, at) is it, if it has that key.
    #[cold]
    fn get_ordered(&self, key: &[u8], at: SeqNo) -> Option<EntryRef<'_>> {
        let mut leaf = MemtableLeafCopy::new();
        let n = self.tree.seek(&self.records, MemtableSeekTarget::LowerBound(InternalKey::new(key, at)), &mut leaf)?;
        let entry = self.records.get_by_bits(leaf.refs()[n]).entry();
        self.records.keys_equal(entry.user_key, key).then_some(entry)
    }

    /// The hash to look `key` up with, or `None` if the order of the keys does not allow hashing them.
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

    /// Whether every version of `key` that is in is in the hash index, too.
    #[inline]
    fn can_hash_key(&self, key: &[u8]) -> bool {
        self.equality_is_bytewise || self.hash_of(key).is_some()
    }

    #[inline]
    fn is_key(&self, at: ArenaRef, key: &[u8]) -> bool {
        let user = self.records.get(at).user_key();
        user == key || !self.equality_is_bytewise && self.records.keys_equal(user, key)
    }

    pub(crate) fn records(&self) -> &MemtableRecords {
        &self.records
    }

    pub(crate) fn tree(&self) -> &MemtableTree {
        &self.tree
    }

    /// The most bytes of memory that a record adds, with its share of both indexes and of what is allocated ahead of
    /// use; a memtable takes up to 128 KiB beside that.
    pub(crate) fn bytes_most(key_len: usize, value_len: usize) -> u64 {
        let len = record_len(key_len, value_len);
        // Each chunk of the arena is twice as large as the one before, and long records leave the ends unused.
        let times = if len > LONG { 3 } else { 2 };
        times * len + INDEXES_MOST
    }

    /// The bytes of memory that records and indexes take, as of the last insertion.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.write_state.charged.load(Ordering::Relaxed)
    }

    /// The bytes of blob files that its records point to.
    #[inline]
    pub(crate) fn referenced_blob_bytes(&self) -> u64 {
        self.write_state.referenced_blob_bytes.load(Ordering::Acquire)
    }

    /// How many of its records point into each logical file, those that newer ones hide too.
    pub(crate) fn blob_pointer_counts(&self) -> Vec<(FileNumber, u64)> {
        let writer = self.write_state.writer.lock();
        let writer = writer.unwrap_or_else(std::sync::PoisonError::into_inner);
        writer.blob_pointer_counts.iter().map(|(&logical, &count)| (logical, count)).collect()
    }

    /// The number of records.
    pub(crate) fn len(&self) -> u64 {
        self.write_state.len.load(Ordering::Acquire)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The lowest sequence number in it; 0 if it is empty.
    pub(crate) fn smallest_seqno(&self) -> SeqNo {
        let lowest = self.write_state.lowest.load(Ordering::Acquire);
        SeqNo(if lowest == u64::MAX { 0 } else { lowest })
    }

    /// The highest sequence number in it; 0 if it is empty.
    pub(crate) fn largest_seqno(&self) -> SeqNo {
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
fn check_pointer(value: &[u8]) -> Result<()> {
    BlobPointer::decode(value).map(drop)
}

/// Counts a pointer that was checked.
#[cold]
fn count_blob_pointer(pointers: &mut BTreeMap<FileNumber, u64>, pointed: &AtomicU64, value: &[u8]) {
    if let Ok(pointer) = BlobPointer::decode(value) {
        *pointers.entry(pointer.logical_file).or_default() += 1;
        pointed.store(pointed.load(Ordering::Relaxed).saturating_add(pointer.frame_len), Ordering::Release);
    }
}

/// A sum over all memtables that charge to it, in bytes of the memory that they have allocated. A memtable adds to it
/// when it allocates, which is once in many insertions. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct MemtableMemory {
    /// Of memtables that take records.
    active: AtomicU64,
    /// Of all that exist: also of sealed ones, and of flushed ones that iterators hold.
    total: AtomicU64,
}

impl MemtableMemory {
    /// Bytes of memtables that take records.
    #[inline]
    pub(crate) fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// Bytes of all memtables that exist.
    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub(in crate::memtable) fn grow(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
        self.active.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn seal(&self, bytes: u64) {
        self.active.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn free(&self, bytes: u64) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::RecordKind;

    fn put(user: &[u8], seqno: u64) -> EntryRef<'_> {
        EntryRef { user_key: user, seqno: SeqNo(seqno), kind: RecordKind::Put, value: user }
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
            assert_eq!(table.insert(put(b"a", seqno)).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!(table.insert(put(&[0; 70_000], 9)).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!((table.len(), table.largest_seqno()), (1, SeqNo(7)));
        assert_eq!(table.get(b"a", None, SeqNo(6)), None);
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
        let least = 3 * value.len() as u64;
        assert!((least..least + (64 << 10)).contains(&table.bytes()));
    }

    #[test]
    fn comparator_panic_leaves_memtable_readable() {
        struct Touchy;
        impl crate::base::comparator::Comparator for Touchy {
            fn name(&self) -> &str {
                "touchy"
            }
            fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
                assert!(a != b"bad" && b != b"bad");
                a.cmp(b)
            }
        }
        let table = Memtable::new(KeyOrder::custom(Arc::new(Touchy)), 1);
        table.insert(put(b"a", 1)).unwrap();
        let insert = std::panic::AssertUnwindSafe(|| table.insert(put(b"bad", 2)));
        assert!(std::panic::catch_unwind(insert).is_err());
        assert_eq!(table.insert(put(b"b", 3)).unwrap_err().kind(), ErrorKind::Poisoned);
        assert_eq!(table.get(b"a", None, SeqNo(9)), Some(put(b"a", 1)));
    }
}
