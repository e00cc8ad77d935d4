//! Replaced and deleted records, retained while readers may need them.
//!
//! A reader at a snapshot that finds a newer record in the tree, or none, searches here. Before a record is removed
//! from its leaf, its slot is inserted into a volatile table under its key and sequence number, together with the
//! sequence number of the change that replaces or removes it: readers from the first up to the second see the record.
//! Entries do not move when leaves are split or merged, and the records themselves stay where they are in the pool.
//!
//! An entry is **needed** while a registered reader sees it, or a later reader may, because its change is not visible
//! yet. So of the versions of a key between two registered readers only the newest is needed. Tables are filled one
//! after another: the versions of a key in one table are older than those in any later table. When the newest table is
//! full and at least half of its entries are not needed, it is written anew with the others. A table without a needed
//! entry is dropped as a whole. Before a change is refused for lack of space, every table is checked that may have got
//! a stale entry since the last such check: because it has new entries, or because a reader has ended that may have
//! seen one of its entries. So a check costs what was written during the lives of the readers that have ended, however
//! many versions an older snapshot needs. The space of the records of dropped entries is freed; iterators that may have
//! their slots notice it ([`PoolTree::retire_all`](crate::pmem::tree::PoolTree::retire_all)).

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex as BatchMutex, PoisonError};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{KeyBounds, PartitionReaders};
use crate::iter::InternalIter;
use crate::mem::atomic::{AtomicBool, AtomicU64, Mutex, Ordering, SCHEDULE_EXPLORATION};
use crate::mem::epoch::EpochCell;
use crate::memtable::Memtable;
use crate::pmem::allocator::PoolRange;
use crate::pmem::record::{LeafSlot, PoolRecord};

/// Maximum number of entries of a table.
const TABLE_ENTRIES_MAX: u64 = if SCHEDULE_EXPLORATION { 4 } else { 2048 };
/// Maximum number of bytes of records that one table retains; in a small pool 1 / `TABLE_POOL_SHARE` of its maximum
/// length.
const TABLE_BYTES_MAX: u64 = 4 << 20;
const TABLE_POOL_SHARE: u64 = 16;
/// The entries may take 1 / `MEMORY_POOL_SHARE` of the pool's maximum length as memory.
const MEMORY_POOL_SHARE: u64 = 8;
/// The limit of the entries' memory is at least this many bytes.
const MEMORY_MIN: u64 = 1 << 20;

/// Length in bytes of an entry's value.
const VALUE_LEN: usize = 24;

/// The value of an entry: where the record is, and the change that replaced or removed it.
#[derive(Clone, Copy)]
struct RetainedRecord {
    slot: LeafSlot,
    buffer_len: u64,
    by: SeqNo,
}

impl RetainedRecord {
    fn encode(&self) -> [u8; VALUE_LEN] {
        let mut value = [0; VALUE_LEN];
        for (out, word) in value.chunks_exact_mut(8).zip([self.slot.0, self.buffer_len, self.by.0]) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        value
    }

    fn of(entry: &EntryRef<'_>) -> RetainedRecord {
        let word = |n: usize| u64::from_le_bytes(entry.value[8 * n..][..8].try_into().expect("eight bytes"));
        RetainedRecord { slot: LeafSlot(word(0)), buffer_len: word(1), by: SeqNo(word(2)) }
    }
}

/// Entries sorted by key and sequence number.
struct VersionTable {
    entries: Arc<Memtable>,
    /// No reader below the first number sees an entry, and none at the second or above.
    min_seqno: AtomicU64,
    max_by: AtomicU64,
    /// The number of removals from the list of readers when a reader was last found that needs it.
    needed_at: AtomicU64,
    /// Bytes of the records.
    bytes: AtomicU64,
    /// Number of entries that were added since [`WrittenTables::checked_readers`] were registered, or whose changes
    /// were not settled then. The others are needed by these readers.
    unchecked: AtomicU64,
}

impl VersionTable {
    fn new(order: &KeyOrder) -> VersionTable {
        VersionTable {
            entries: Arc::new(Memtable::new(order.clone(), 0)),
            min_seqno: AtomicU64::new(u64::MAX),
            max_by: AtomicU64::new(0),
            needed_at: AtomicU64::new(u64::MAX),
            bytes: AtomicU64::new(0),
            unchecked: AtomicU64::new(0),
        }
    }

    /// From which sequence number on and below which one readers may see an entry.
    fn bounds(&self) -> (SeqNo, SeqNo) {
        (SeqNo(self.min_seqno.load(Ordering::Relaxed)), SeqNo(self.max_by.load(Ordering::Relaxed)))
    }

    /// Adds an entry. Returns false if it is there already.
    fn insert(&self, key: &[u8], seqno: SeqNo, record: RetainedRecord) -> Result<bool> {
        self.min_seqno.fetch_min(seqno.0, Ordering::Relaxed);
        self.max_by.fetch_max(record.by.0, Ordering::Relaxed);
        let entry = EntryRef { user_key: key, seqno, kind: RecordKind::Put, value: &record.encode() };
        match self.entries.insert(entry) {
            Err(error) if self.entries.get(key, None, seqno).is_none_or(|entry| entry.seqno != seqno) => {
                Err(error.into_error())
            }
            Err(_) => Ok(false),
            Ok(()) => {
                self.bytes.fetch_add(record.buffer_len, Ordering::Relaxed);
                Ok(true)
            }
        }
    }

    /// Calls `visit` for each entry. Those of one key come by ascending sequence number.
    fn for_each(&self, mut visit: impl FnMut(EntryRef<'_>, RetainedRecord) -> Result<()>) -> Result<()> {
        self.entries.for_each_from_last(|entry| visit(entry, RetainedRecord::of(&entry)))
    }
}

/// What readers need, as of one point in time.
struct NeededSeqnos {
    registered: Vec<SeqNo>,
    /// A change above this number may not be visible yet, or is a range delete whose records may be in their leaves.
    settled: SeqNo,
}

impl NeededSeqnos {
    /// Whether a current or later reader may read at a sequence number from `from` on and below `to`.
    fn contains(&self, from: SeqNo, to: SeqNo) -> bool {
        to > self.settled || is_any_between(&self.registered, from, to)
    }
}

/// Whether any of `seqnos`, which ascend, is at or above `from` and below `to`.
fn is_any_between(seqnos: &[SeqNo], from: SeqNo, to: SeqNo) -> bool {
    let first = seqnos.partition_point(|seqno| *seqno < from);
    seqnos.get(first).is_some_and(|seqno| *seqno < to)
}

/// Which tables are checked entry by entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckedTables {
    /// None: only those without a needed entry are dropped.
    None,
    Newest,
    /// Those that may have a stale entry. No other table has one.
    MaybeStale,
}

/// State of the writers.
#[derive(Default)]
struct WrittenTables {
    list: VecDeque<Arc<VersionTable>>,
    /// The readers at the last check of all tables that may have had a stale entry: their sequence numbers except for
    /// the last visible one. `None` before the first check.
    checked_readers: Option<Vec<SeqNo>>,
}

/// The tables of one tree. Thread safe: writers are serialized by a lock, readers never wait.
pub(crate) struct RetainedVersions {
    order: KeyOrder,
    table_bytes_max: u64,
    /// The highest sequence number of a change whose replaced or removed record is not retained any more.
    dropped_through: AtomicU64,
    memory_bytes: AtomicU64,
    memory_bytes_max: AtomicU64,
    /// Bytes of memory reserved for batches that are not applied yet, or not visible yet.
    reserved: BatchMutex<Reserved>,
    reservation_ended: Condvar,
    readers: PartitionReaders,
    /// From the oldest to the newest table. Entries are inserted into the newest.
    tables: EpochCell<Vec<Arc<VersionTable>>>,
    /// Number of retained versions.
    version_count: AtomicU64,
    /// Whether there are full tables, which get no more entries.
    has_full_tables: AtomicBool,
    written: Mutex<WrittenTables>,
    /// Number of entries that were checked.
    #[cfg(test)]
    pub(crate) checked_entries: AtomicU64,
}

impl RetainedVersions {
    /// No versions, for a pool of at most `len_max` bytes.
    pub(crate) fn new(order: KeyOrder, readers: PartitionReaders, len_max: u64) -> RetainedVersions {
        RetainedVersions {
            order,
            table_bytes_max: TABLE_BYTES_MAX.min(len_max / TABLE_POOL_SHARE),
            dropped_through: AtomicU64::new(0),
            memory_bytes: AtomicU64::new(0),
            memory_bytes_max: AtomicU64::new(memory_max_of(len_max)),
            reserved: BatchMutex::new(Reserved::default()),
            reservation_ended: Condvar::new(),
            readers,
            tables: EpochCell::new(Arc::new(Vec::new())),
            version_count: AtomicU64::new(0),
            has_full_tables: AtomicBool::new(false),
            written: Mutex::new(WrittenTables::default()),
            #[cfg(test)]
            checked_entries: AtomicU64::new(0),
        }
    }

    /// Sets the memory limit to that of a pool of at most `len_max` bytes.
    pub(crate) fn set_limit(&self, len_max: u64) {
        self.memory_bytes_max.store(memory_max_of(len_max), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn readers(&self) -> &PartitionReaders {
        &self.readers
    }

    /// Retains `old`, the record of `key` that the change `by` replaces or removes. Returns false if no reader can need
    /// it. Called before the record is removed from its leaf. Also returns the space of versions that are not needed
    /// any more. `settled` returns a number below every range delete whose records may still be in their leaves.
    ///
    /// Only a range delete can be visible already, because it removes records after its publication.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, and `Poisoned`; then the record is not retained.
    pub(crate) fn retain(
        &self,
        key: &[u8],
        old: &PoolRecord,
        by: SeqNo,
        settled: impl Fn() -> SeqNo,
    ) -> Result<(bool, Vec<PoolRange>)> {
        let mut written = self.written.lock().map_err(poisoned)?;
        if by <= self.readers.visible() && !self.readers.may_read_between(old.seqno, by) {
            self.raise_dropped_through(by);
            return Ok((false, Vec::new()));
        }
        let mut freed = Vec::new();
        if written.list.back().is_none_or(|newest| self.is_full(newest, 1)) {
            freed = self.drop_unneeded(&mut written, CheckedTables::Newest, self.readers.seqnos(), settled);
            // A table that is nearly full again would be checked again soon.
            if written.list.back().is_none_or(|newest| self.is_full(newest, 2)) {
                written.list.push_back(Arc::new(VersionTable::new(&self.order)));
                self.publish(&written.list);
            }
        }
        let newest = written.list.back().expect("there is a newest table");
        debug_assert!(SCHEDULE_EXPLORATION || !self.is_full(newest, 1), "a full table gets no more entries");
        // The entry exists already if an earlier removal has failed, or if a follower has put the record back.
        if newest.insert(key, old.seqno, RetainedRecord { slot: old.slot(), buffer_len: old.buffer_len(), by })? {
            newest.unchecked.fetch_add(1, Ordering::Relaxed);
            self.version_count.fetch_add(1, Ordering::Release);
        }
        Ok((true, freed))
    }

    /// Whether a table has at least 1 / `share` of the maximum number of entries, or of bytes.
    fn is_full(&self, table: &VersionTable, share: u64) -> bool {
        table.entries.len() >= TABLE_ENTRIES_MAX / share
            || table.bytes.load(Ordering::Relaxed) >= self.table_bytes_max / share
    }

    /// Records that replaced or removed by changes up to `by` are not retained. Called before they are removed.
    pub(crate) fn raise_dropped_through(&self, by: SeqNo) {
        self.dropped_through.fetch_max(by.0, Ordering::Release);
    }

    fn publish(&self, tables: &VecDeque<Arc<VersionTable>>) {
        self.has_full_tables.store(tables.len() > 1, Ordering::Release);
        let memory = tables.iter().map(|table| table.entries.bytes()).sum();
        self.memory_bytes.store(memory, Ordering::Relaxed);
        self.tables.store(Arc::new(tables.iter().cloned().collect()));
    }

    /// Drops tables without a needed entry, and from `checked` tables the entries that the `registered` readers and
    /// later ones do not need. Returns the space of the records, which pinned readers may still read. Drops nothing if
    /// there is no memory for new tables.
    fn drop_unneeded(
        &self,
        written: &mut WrittenTables,
        checked: CheckedTables,
        registered: Vec<SeqNo>,
        settled: impl Fn() -> SeqNo,
    ) -> Vec<PoolRange> {
        debug_assert!(registered.is_sorted(), "sequence numbers of readers ascend");
        let visible = registered.last().copied().unwrap_or_default();
        let ended = written.checked_readers.as_ref().map(|readers| {
            readers.iter().copied().filter(|reader| registered.binary_search(reader).is_err()).collect()
        });
        // Read behind the visible number: a range delete is pending before it is visible.
        let needed = NeededSeqnos { settled: settled().min(visible), registered };
        let (kept, stale) = (VecDeque::new(), Stale::default());
        let mut rewriter = TableRewriter { versions: self, needed, ended, kept, open: None, stale };
        if let Err(error) = rewriter.run(&written.list, checked) {
            debug_assert!(self.order.is_custom() || error.kind() == ErrorKind::OutOfSpace, "{error}");
            written.checked_readers = None;
            return Vec::new();
        }
        let TableRewriter { mut needed, mut kept, open, stale, .. } = rewriter;
        if checked == CheckedTables::MaybeStale {
            needed.registered.pop();
            written.checked_readers = Some(needed.registered);
        }
        if stale.ranges.is_empty() {
            return Vec::new();
        }
        // `dropped_through` is raised before a reader can miss the dropped entries.
        self.raise_dropped_through(stale.through);
        kept.extend(open.map(Arc::new));
        written.list = kept;
        self.publish(&written.list);
        let before = self.version_count.fetch_sub(stale.ranges.len() as u64, Ordering::Release);
        debug_assert!(before >= stale.ranges.len() as u64, "each retained version is counted");
        stale.ranges
    }

    /// Drops all versions that no reader needs. Returns the space of their records. Checks only tables that may have
    /// got a stale entry since the last call. `settled`: see [`retain`](RetainedVersions::retain).
    pub(crate) fn drop_stale(&self, settled: impl Fn() -> SeqNo) -> Result<Vec<PoolRange>> {
        let mut written = self.written.lock().map_err(poisoned)?;
        Ok(self.drop_unneeded(&mut written, CheckedTables::MaybeStale, self.readers.seqnos(), settled))
    }

    /// Drops the full tables that no reader needs. Returns the space of their records. `settled`: see
    /// [`retain`](RetainedVersions::retain).
    pub(crate) fn drop_stale_tables(&self, settled: impl Fn() -> SeqNo) -> Result<Vec<PoolRange>> {
        let mut written = self.written.lock().map_err(poisoned)?;
        Ok(self.drop_unneeded(&mut written, CheckedTables::None, self.readers.seqnos(), settled))
    }

    /// Whether the oldest of several tables is not needed.
    #[inline]
    pub(crate) fn is_oldest_table_stale(&self) -> bool {
        self.has_full_tables.load(Ordering::Acquire) && {
            let tables = self.tables.load();
            tables.first().is_some_and(|first| {
                let ((from, to), removals) = (first.bounds(), self.readers.removals());
                // Until a reader ends, the answer stays: this comparison takes no lock.
                if to > self.readers.visible() || first.needed_at.load(Ordering::Relaxed) == removals {
                    return false;
                }
                let is_needed = self.readers.may_read_between(from, to);
                if is_needed {
                    first.needed_at.store(removals, Ordering::Relaxed);
                }
                !is_needed
            })
        }
    }

    /// Whether any table but the newest is not needed.
    pub(crate) fn has_stale_tables(&self) -> bool {
        self.has_full_tables.load(Ordering::Acquire) && {
            let registered = self.readers.seqnos();
            let settled = registered.last().copied().unwrap_or_default();
            let needed = NeededSeqnos { registered, settled };
            let tables = self.tables.load();
            let is_stale = |table: &Arc<VersionTable>| {
                let (from, to) = table.bounds();
                !needed.contains(from, to)
            };
            tables.split_last().is_some_and(|(_newest, full)| full.iter().any(is_stale))
        }
    }

    /// The tables in which a reader at `at` may see an entry.
    fn tables_needed_at(tables: &[Arc<VersionTable>], at: SeqNo) -> impl Iterator<Item = &VersionTable> {
        tables.iter().map(|table| &**table).filter(move |table| {
            let (from, to) = table.bounds();
            from <= at && at < to
        })
    }

    /// Number of tables that a lookup at `at` searches.
    #[cfg(test)]
    pub(crate) fn tables_searched_at(&self, at: SeqNo) -> usize {
        RetainedVersions::tables_needed_at(&self.tables.load(), at).count()
    }

    /// Number of retained versions.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u64 {
        self.version_count.load(Ordering::Acquire)
    }

    /// Bytes of memory that the entries take, as of the last change of the list of tables: later entries of the
    /// newest table are not included. The records themselves stay in the pool.
    #[inline]
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    /// Maximum number of bytes of memory for the entries.
    pub(crate) fn memory_max(&self) -> u64 {
        self.memory_bytes_max.load(Ordering::Relaxed)
    }

    /// Maximum number of bytes of memory for retaining a record with a key of `key_len` bytes.
    pub(crate) fn bytes_max(key_len: usize) -> u64 {
        Memtable::bytes_max(key_len, VALUE_LEN)
    }

    /// Checks whether a single change may replace or remove a record. It ignores reservations: one entry more or less
    /// does no harm, and the change must not wait for a batch that may be waiting for it.
    ///
    /// # Errors
    /// `OutOfSpace` if the retained versions exceed the memory limit.
    #[inline]
    pub(crate) fn check_memory_limit(&self) -> Result<()> {
        if self.memory_bytes() <= self.memory_max() { Ok(()) } else { Err(self.memory_limit_error()) }
    }

    /// Reserves `bytes` of memory for the retained versions of a batch; `None` if they do not fit now, or if another
    /// batch waits.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<VersionsGuard<'_>> {
        let mut reserved = lock(&self.reserved);
        if reserved.next_to_wait == reserved.first_waiting { self.add_reservation(&mut reserved, bytes) } else { None }
    }

    fn add_reservation(&self, reserved: &mut Reserved, bytes: u64) -> Option<VersionsGuard<'_>> {
        let fits = self.memory_bytes().saturating_add(reserved.bytes).saturating_add(bytes) <= self.memory_max();
        fits.then(|| {
            reserved.bytes += bytes;
            VersionsGuard { versions: self, bytes }
        })
    }

    /// As [`try_reserve`](RetainedVersions::try_reserve), after `forget` has dropped stale versions. Waits while
    /// other batches have reservations: these end without this batch, and the memory that they use is freed unless a
    /// snapshot or an iterator needs the versions. Waiting batches are served in the order of their arrival, before
    /// any batch that arrives later.
    ///
    /// # Errors
    /// `OutOfSpace` if `bytes` exceed the limit, or do not fit although no batch has a reservation; those of
    /// `forget`.
    pub(crate) fn reserve(&self, bytes: u64, forget: impl Fn() -> Result<()>) -> Result<VersionsGuard<'_>> {
        if bytes == 0 {
            return Ok(VersionsGuard { versions: self, bytes });
        }
        let mut reserved = lock(&self.reserved);
        let place = reserved.next_to_wait;
        reserved.next_to_wait += 1;
        loop {
            if reserved.first_waiting == place {
                let ended = &self.reservation_ended;
                let mut first = FirstWaiting { reserved: &mut reserved, ended, must_wait: false };
                let done = self.try_first(first.reserved, bytes, &forget);
                first.must_wait = done.is_none();
                if let Some(done) = done {
                    return done;
                }
            }
            debug_assert!(reserved.first_waiting <= place, "no batch overtakes another one");
            reserved = self.reservation_ended.wait(reserved).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tries to serve the first waiting batch; `None` if it has to wait longer.
    fn try_first(
        &self,
        reserved: &mut Reserved,
        bytes: u64,
        forget: impl Fn() -> Result<()>,
    ) -> Option<Result<VersionsGuard<'_>>> {
        if bytes > self.memory_max() {
            return Some(Err(self.too_large_error(bytes)));
        }
        if let Err(error) = forget() {
            return Some(Err(error));
        }
        match self.add_reservation(reserved, bytes) {
            Some(guard) => Some(Ok(guard)),
            None if reserved.bytes == 0 => Some(Err(self.memory_limit_error())),
            None => None,
        }
    }

    /// Ends a reservation of `bytes`: the batch is visible, or will not be applied.
    pub(crate) fn end_reservation(&self, bytes: u64) {
        if bytes > 0 {
            let mut reserved = lock(&self.reserved);
            debug_assert!(bytes <= reserved.bytes, "a reservation ends once");
            reserved.bytes -= bytes;
            drop(reserved);
            self.reservation_ended.notify_all();
        }
    }

    #[cold]
    fn memory_limit_error(&self) -> Error {
        let (oldest, visible) = (self.readers.oldest(), self.readers.visible());
        let behind = visible.0.saturating_sub(oldest.0);
        let message = format!(
            "{} bytes of memory say what was replaced or removed since the oldest snapshot or iterator, which is \
             {behind} records old, at most {} are allowed: drop it, then try again",
            self.memory_bytes(),
            self.memory_max()
        );
        Error::new(ErrorKind::OutOfSpace, message)
    }

    #[cold]
    fn too_large_error(&self, bytes: u64) -> Error {
        let message = format!(
            "the batch replaces or removes so many records that it takes up to {bytes} bytes of memory to keep these \
             until it is visible, at most {} are allowed: make several batches, or `max_size` larger",
            self.memory_max()
        );
        Error::new(ErrorKind::OutOfSpace, message)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.version_count.load(Ordering::Acquire) == 0
    }

    /// Whether every record that was replaced or removed after `at` is still retained. If so, a key that
    /// [`find`](RetainedVersions::find) did not find did not exist at `at`. Called after `find`.
    #[inline]
    pub(crate) fn is_complete_since(&self, at: SeqNo) -> bool {
        self.dropped_through.load(Ordering::Acquire) <= at.0
    }

    /// The retained version of `key` that a reader at `at` sees.
    pub(crate) fn find(&self, key: &[u8], at: SeqNo) -> Option<LeafSlot> {
        if self.is_empty() {
            return None;
        }
        let tables = self.tables.load();
        RetainedVersions::tables_needed_at(&tables, at).find_map(|table| {
            let entry = table.entries.get(key, table.entries.hash_of(key), at)?;
            let record = RetainedRecord::of(&entry);
            (at < record.by).then_some(record.slot)
        })
    }

    /// Whether any version of `key` is retained.
    pub(crate) fn contains_key(&self, key: &[u8]) -> bool {
        let has_key =
            |table: &Arc<VersionTable>| table.entries.get(key, table.entries.hash_of(key), SeqNo::MAX).is_some();
        !self.is_empty() && self.tables.load().iter().any(has_key)
    }

    /// Returns a key within `bounds` that had a version at `since` which was replaced or removed since. A sequence
    /// number at or below `since` is registered, and the key has not changed between the two.
    pub(crate) fn find_changed_key(
        &self,
        order: &KeyOrder,
        (start, end): KeyBounds<'_>,
        since: SeqNo,
    ) -> Result<Option<Vec<u8>>> {
        let is_past_end = |key: &[u8]| match end {
            Bound::Unbounded => false,
            Bound::Included(end) => order.cmp(key, end).is_gt(),
            Bound::Excluded(end) => order.cmp(key, end).is_ge(),
        };
        for table in RetainedVersions::tables_needed_at(&self.tables.load(), since) {
            let mut cursor = table.entries.iter();
            match start {
                Bound::Unbounded => cursor.seek_to_first()?,
                Bound::Included(key) => cursor.seek(InternalKey::before_versions_of(key))?,
                Bound::Excluded(key) => cursor.seek(InternalKey::new(key, SeqNo::ZERO))?,
            }
            while let Some(entry) = cursor.current().filter(|entry| !is_past_end(entry.user_key)) {
                if entry.seqno <= since && since < RetainedRecord::of(&entry).by {
                    return Ok(Some(entry.user_key.to_vec()));
                }
                cursor.next()?;
            }
        }
        Ok(None)
    }

    /// Calls `visit` for each retained version that a reader at `at` sees, of the keys from `low` up to the first key
    /// that `is_past` accepts.
    pub(crate) fn visit_range(
        &self,
        low: Option<&[u8]>,
        is_past: impl Fn(&[u8]) -> bool,
        at: SeqNo,
        mut visit: impl FnMut(EntryRef<'_>, LeafSlot) -> Result<()>,
    ) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        for table in RetainedVersions::tables_needed_at(&self.tables.load(), at) {
            let mut cursor = table.entries.iter();
            match low {
                Some(low) => cursor.seek(InternalKey::before_versions_of(low))?,
                None => cursor.seek_to_first()?,
            }
            while let Some(entry) = cursor.current() {
                if is_past(entry.user_key) {
                    break;
                }
                let record = RetainedRecord::of(&entry);
                if entry.seqno <= at && at < record.by {
                    visit(entry, record.slot)?;
                }
                cursor.next()?;
            }
        }
        Ok(())
    }
}

/// Entries that are not needed.
#[derive(Default)]
struct Stale {
    /// The space of the records.
    ranges: Vec<PoolRange>,
    /// The highest change that replaced or removed one.
    through: SeqNo,
}

/// Sorts tables and entries into needed and stale ones.
struct TableRewriter<'a> {
    versions: &'a RetainedVersions,
    needed: NeededSeqnos,
    /// Those of [`WrittenTables::checked_readers`] that have ended since.
    ended: Option<Vec<SeqNo>>,
    kept: VecDeque<Arc<VersionTable>>,
    /// The table that needed entries are copied to.
    open: Option<VersionTable>,
    stale: Stale,
}

impl TableRewriter<'_> {
    fn run(&mut self, tables: &VecDeque<Arc<VersionTable>>, checked: CheckedTables) -> Result<()> {
        let mut with_stale = Vec::with_capacity(tables.len());
        for (n, table) in tables.iter().enumerate() {
            let (is_newest, (from, to)) = (n + 1 == tables.len(), table.bounds());
            let is_needed = self.needed.contains(from, to);
            with_stale.push(match checked {
                CheckedTables::None => !is_needed && !is_newest,
                CheckedTables::Newest => {
                    !is_needed || is_newest && self.count_stale(table)?.0 >= table.entries.len().div_ceil(2)
                }
                CheckedTables::MaybeStale => self.may_have_stale(table) && self.check(table)? > 0,
            });
        }
        if !with_stale.contains(&true) {
            return Ok(());
        }
        for (table, has_stale) in tables.iter().zip(with_stale) {
            // A table with few entries takes much more memory than these.
            let is_sparse = || checked == CheckedTables::MaybeStale && !self.versions.is_full(table, 2);
            match has_stale || is_sparse() {
                true => self.copy_needed(table, checked)?,
                false => {
                    self.close_open_table(); // its entries are older
                    self.kept.push_back(Arc::clone(table));
                }
            }
        }
        Ok(())
    }

    /// Keeps the table that needed entries are copied to. It gets no more entries.
    fn close_open_table(&mut self) {
        self.kept.extend(self.open.take().map(Arc::new));
    }

    /// Whether `table` may have a stale entry: it has unchecked entries, or a reader has ended that may have needed
    /// one.
    fn may_have_stale(&self, table: &VersionTable) -> bool {
        let (from, to) = table.bounds();
        let any_ended = || self.ended.as_ref().is_none_or(|ended| is_any_between(ended, from, to));
        table.unchecked.load(Ordering::Relaxed) > 0 || any_ended()
    }

    /// Checks all entries of `table`. Returns the number of stale ones.
    fn check(&self, table: &VersionTable) -> Result<u64> {
        let (stale, unsettled) = self.count_stale(table)?;
        table.unchecked.store(stale + unsettled, Ordering::Relaxed);
        Ok(stale)
    }

    /// The number of stale entries, and of those that are needed because their changes are not settled.
    fn count_stale(&self, table: &VersionTable) -> Result<(u64, u64)> {
        let (mut stale, mut unsettled) = (0, 0);
        #[cfg(test)]
        self.versions.checked_entries.fetch_add(table.entries.len(), Ordering::Relaxed);
        table.for_each(|entry, record| {
            stale += u64::from(!self.needed.contains(entry.seqno, record.by));
            unsettled += u64::from(record.by > self.needed.settled);
            Ok(())
        })?;
        Ok((stale, unsettled))
    }

    /// Copies the needed entries of `table`.
    fn copy_needed(&mut self, table: &VersionTable, checked: CheckedTables) -> Result<()> {
        table.for_each(|entry, record| {
            if !self.needed.contains(entry.seqno, record.by) {
                self.stale.ranges.push((record.slot.offset(), record.buffer_len));
                self.stale.through = self.stale.through.max(record.by);
                return Ok(());
            }
            if self.open.as_ref().is_some_and(|open| self.versions.is_full(open, 1)) {
                self.close_open_table();
            }
            debug_assert!(SCHEDULE_EXPLORATION || self.is_newer_than_kept(&entry), "the tables are out of order");
            let open = self.open.get_or_insert_with(|| VersionTable::new(&self.versions.order));
            let is_unchecked = checked != CheckedTables::MaybeStale || record.by > self.needed.settled;
            open.unchecked.fetch_add(u64::from(is_unchecked), Ordering::Relaxed);
            open.insert(entry.user_key, entry.seqno, record).map(drop)
        })
    }

    /// Whether the last kept table has no newer version of the key of `entry`.
    fn is_newer_than_kept(&self, entry: &EntryRef<'_>) -> bool {
        self.kept.back().is_none_or(|kept| {
            let newest = kept.entries.get(entry.user_key, kept.entries.hash_of(entry.user_key), SeqNo::MAX);
            newest.is_none_or(|newest| newest.seqno <= entry.seqno)
        })
    }
}

/// The reservations of batches, and the queue of waiting batches.
#[derive(Debug, Default)]
struct Reserved {
    bytes: u64,
    /// Positions in the queue: `first_waiting` is served next, `next_to_wait` is assigned to the next batch that
    /// arrives.
    first_waiting: u64,
    next_to_wait: u64,
}

/// The batch at the head of the queue, which leaves the queue when this is dropped, also by a panic of a comparator.
struct FirstWaiting<'a> {
    reserved: &'a mut Reserved,
    ended: &'a Condvar,
    /// The batch stays at the head of the queue.
    must_wait: bool,
}

impl Drop for FirstWaiting<'_> {
    fn drop(&mut self) {
        if !self.must_wait {
            self.reserved.first_waiting += 1;
            debug_assert!(self.reserved.first_waiting <= self.reserved.next_to_wait, "a batch leaves the queue once");
            self.ended.notify_all();
        }
    }
}

/// A reservation of memory for the retained versions of a batch. Ends the reservation when dropped.
pub(crate) struct VersionsGuard<'a> {
    versions: &'a RetainedVersions,
    bytes: u64,
}

impl VersionsGuard<'_> {
    /// Returns the reserved bytes, which stay reserved until [`RetainedVersions::end_reservation`].
    pub(crate) fn into_bytes(mut guard: VersionsGuard<'_>) -> u64 {
        std::mem::take(&mut guard.bytes)
    }
}

impl Drop for VersionsGuard<'_> {
    fn drop(&mut self) {
        self.versions.end_reservation(self.bytes);
    }
}

/// Maximum number of bytes of memory for the entries of a pool of at most `len_max` bytes.
fn memory_max_of(len_max: u64) -> u64 {
    MEMORY_MIN.max(len_max / MEMORY_POOL_SHARE)
}

/// The error for a lock whose holder panicked.
#[cold]
pub(crate) fn poisoned<T>(_: T) -> Error {
    Error::new(ErrorKind::Poisoned, "a comparator panicked")
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    use super::*;
    use crate::base::version_edit::PartitionId;
    use crate::engine::{LastVisibleSeqno, SnapshotList};
    use crate::testing::FnComparator;
    use crate::testing::seeded_rng::SeededRng;
    use crate::vfs::env::{Env, SystemEnv};

    #[test]
    fn entries_take_no_more_than_their_bound() {
        for key_len in [1, 8, 40, 100, 1000, 65_535] {
            let entries = Memtable::new(KeyOrder::bytewise(), 0);
            let (mut rng, mut max_bytes) = (SeededRng::new(key_len as u64), 128 << 10);
            for n in 1..=TABLE_ENTRIES_MAX.min((8 << 20) / key_len as u64) {
                let mut key = vec![0; key_len];
                key.iter_mut().take(8).for_each(|byte| *byte = rng.next_u64() as u8);
                let seqno = SeqNo(2 * n);
                let value = &[0; VALUE_LEN];
                entries.insert(EntryRef { user_key: &key, seqno, kind: RecordKind::Put, value }).unwrap();
                max_bytes += RetainedVersions::bytes_max(key_len);
                assert!(entries.bytes() <= max_bytes, "{n} keys of {key_len}: {} of {max_bytes}", entries.bytes());
            }
        }
    }

    /// Regression: the entries of a table were visited by searches. With a comparator that contradicts itself, some
    /// were visited twice, so their space was freed twice, or the visit did not end.
    #[test]
    fn a_contradiction_frees_no_version_twice() {
        let is_reversed = Arc::new(AtomicBool::new(false));
        let reversed = Arc::clone(&is_reversed);
        let compare = move |a: &[u8], b: &[u8]| if reversed.load(Ordering::SeqCst) { b.cmp(a) } else { a.cmp(b) };
        let order = KeyOrder::custom(Arc::new(FnComparator(compare)));
        let visible = LastVisibleSeqno::default();
        let readers = SnapshotList::new(visible.clone()).readers_of(PartitionId(1));
        let versions = RetainedVersions::new(order, readers, 64 << 20);
        for n in 1..=500u64 {
            let record = PoolRecord {
                offset: n * 64,
                seqno: SeqNo(n),
                kind: RecordKind::Put,
                key_offset: n * 64 + 16,
                key_len: 8,
                value_len: 8,
            };
            assert!(versions.retain(&n.to_be_bytes(), &record, SeqNo(1_000 + n), || SeqNo::ZERO).unwrap().1.is_empty());
        }
        is_reversed.store(true, Ordering::SeqCst);
        visible.publish(SeqNo(2_000));
        let mut freed = versions.drop_stale(|| SeqNo(2_000)).unwrap();
        freed.sort_unstable();
        freed.dedup();
        assert_eq!((freed.len(), versions.len()), (500, 0));
    }

    /// Readers of any age begin and end between searches, changes become visible later, and a range delete is pending
    /// at times: no search leaves a stale entry, or drops a needed one. In every other run a table is full after a few
    /// entries.
    #[test]
    fn search_finds_every_stale_entry() {
        let visible = LastVisibleSeqno::default();
        let snapshots = SnapshotList::new(visible.clone());
        let (mut freed, mut retained) = (0, 0);
        for seed in 0..20 {
            let readers = snapshots.readers_of(PartitionId(1));
            let len_max = if seed % 2 == 0 { 64 << 20 } else { 8_192 };
            let (versions, mut rng) =
                (RetainedVersions::new(KeyOrder::bytewise(), readers, len_max), SeededRng::new(seed));
            let (mut open, mut newest) = (Vec::new(), vec![visible.get(); 200]);
            let mut seqno = visible.get();
            for _ in 0..2_000 {
                match rng.below(8) {
                    0 => open.push(snapshots.register()),
                    1 if !open.is_empty() => drop(open.swap_remove(rng.below(open.len()))),
                    2 => visible.publish(seqno),
                    _ => {
                        let (n, settled) = (rng.below(newest.len()), visible.get());
                        seqno = seqno.plus(1);
                        let old = PoolRecord {
                            offset: seqno.0 * 64,
                            seqno: std::mem::replace(&mut newest[n], seqno),
                            kind: RecordKind::Put,
                            key_offset: seqno.0 * 64 + 16,
                            key_len: 2,
                            value_len: 8,
                        };
                        let key = (n as u16).to_be_bytes();
                        freed += versions.retain(&key, &old, seqno, || settled).unwrap().1.len();
                    }
                }
                if rng.below(20) > 0 {
                    continue;
                }
                let settled = SeqNo(visible.get().0.saturating_sub(rng.below(3) as u64 * 10));
                freed += versions.drop_stale(|| settled).unwrap().len();
                let needed = NeededSeqnos { registered: versions.readers.seqnos(), settled };
                for table in versions.tables.load().iter() {
                    let visit = |entry: EntryRef<'_>, record: RetainedRecord| {
                        assert!(needed.contains(entry.seqno, record.by), "seed {seed}: a stale entry was not found");
                        retained += 1;
                        Ok(())
                    };
                    table.for_each(visit).unwrap();
                }
            }
            visible.publish(seqno);
        }
        assert!(freed > 5_000 && retained > 5_000, "{freed} entries were dropped, {retained} were retained");
    }

    /// Regression: a search for stale versions retained a full table, and moved the needed entries of sparse older
    /// tables after it. The next search that copied both found the versions of a key out of order. It failed and
    /// dropped no version, as did all later searches, until the pool refused puts and removals for lack of space.
    #[test]
    fn tables_keep_their_order() {
        let visible = LastVisibleSeqno::default();
        let snapshots = SnapshotList::new(visible.clone());
        let readers = snapshots.readers_of(PartitionId(1));
        let versions = RetainedVersions::new(KeyOrder::bytewise(), readers, 64 << 20);
        let retain = |key: &[u8], old: u64, by: u64| {
            let old = PoolRecord {
                offset: by * 64,
                seqno: SeqNo(old),
                kind: RecordKind::Put,
                key_offset: by * 64 + 16,
                key_len: key.len(),
                value_len: 8,
            };
            versions.retain(key, &old, SeqNo(by), || visible.get()).unwrap();
            visible.publish(SeqNo(by));
        };
        let register_at = |seqno| {
            visible.publish(SeqNo(seqno));
            snapshots.register()
        };
        let drop_stale = || versions.drop_stale(|| visible.get()).unwrap().len();
        let _first = register_at(100);
        let second = register_at(5_000);
        retain(b"K", 50, 5_001);
        (0..2_047u64).for_each(|n| retain(&n.to_be_bytes(), 200 + n, 5_002 + n)); // the first table is full
        let _third = register_at(8_000);
        retain(b"K", 5_001, 8_001);
        (0..1_500u64).for_each(|n| retain(&n.to_be_bytes(), 5_002 + n, 8_002 + n));
        let fourth = register_at(9_600);
        retain(b"h", 9_600, 9_601);
        visible.publish(SeqNo(9_700));
        drop(second);
        assert_eq!(drop_stale(), 2_047, "all of the first table but one are stale");
        drop(fourth);
        assert_eq!(drop_stale(), 1);
        for (at, key, is_there) in [(100, "K", true), (8_000, "K", true), (9_600, "h", false)] {
            assert_eq!(versions.find(key.as_bytes(), SeqNo(at)).is_some(), is_there, "{key} at {at}");
        }
    }

    /// Regression: later batches got a reservation as soon as they fitted, so a large batch waited as long as small
    /// ones arrived.
    #[test]
    fn batches_that_wait_are_served_in_order() {
        let readers = SnapshotList::new(LastVisibleSeqno::default()).readers_of(PartitionId(1));
        let (versions, env) = (Arc::new(RetainedVersions::new(KeyOrder::bytewise(), readers, 0)), SystemEnv::new());
        let max_bytes = versions.memory_max();
        let first = versions.try_reserve(max_bytes / 2).unwrap();
        let wait_for = |bytes| {
            let versions = Arc::clone(&versions);
            env.spawn("batch", Box::new(move || drop(versions.reserve(bytes, || Ok(())).unwrap()))).unwrap()
        };
        let second = wait_for(max_bytes);
        while versions.reserved.lock().unwrap().next_to_wait == 0 {
            env.sleep(Duration::from_millis(1));
        }
        assert!(versions.try_reserve(1).is_none(), "a later batch overtakes the waiting one");
        let third = wait_for(1);
        assert!(versions.reserve(0, || Ok(())).is_ok(), "a batch that retains nothing does not wait");
        drop(first);
        assert!(second.join() && third.join());
        assert!(versions.try_reserve(max_bytes).is_some());
    }

    /// Regression: a comparator panicked while a batch dropped stale versions. The batch stayed at the head of the
    /// queue, so every later batch of the pool waited forever.
    #[test]
    fn batch_leaves_the_queue_after_a_panic() {
        let readers = SnapshotList::new(LastVisibleSeqno::default()).readers_of(PartitionId(1));
        let versions = RetainedVersions::new(KeyOrder::bytewise(), readers, 0);
        let panics = || panic!("a comparator panics");
        assert!(catch_unwind(AssertUnwindSafe(|| versions.reserve(1, panics).is_ok())).is_err());
        assert!(versions.try_reserve(1).is_some(), "the queue is not empty");
        assert!(versions.reserve(1, || Ok(())).is_ok());
    }
}
