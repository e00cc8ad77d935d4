//! Replaced and deleted records, retained while readers may need them.
//!
//! A reader at a snapshot that finds a newer record in the tree, or none, searches here. Before a record is removed
//! from its leaf, its slot is inserted into a volatile table under its key and sequence number. For a removal, a
//! tombstone is inserted as well. Entries do not move when leaves are split or merged, and the records themselves
//! stay where they are in the pool. Tables are filled one after another. The oldest table is dropped as a whole once
//! no snapshot is older than the newest replacement in it; then the space of its records is freed.

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex as BatchMutex, PoisonError};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{KeyBounds, SnapshotList};
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

/// Length in bytes of an entry's value: the word of a slot, and the length of the record's buffer.
const VALUE_LEN: usize = 16;

/// Entries sorted by key and sequence number.
struct VersionTable {
    entries: Arc<Memtable>,
    /// The highest sequence number of a change that replaced or removed a record in this table or in an earlier one:
    /// a reader at that sequence number or a later one needs neither.
    max_replacing_seqno: AtomicU64,
    bytes: AtomicU64,
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
    snapshots: Arc<SnapshotList>,
    /// From the oldest to the newest table. Entries are inserted into the newest.
    tables: EpochCell<Vec<Arc<VersionTable>>>,
    /// Number of retained versions.
    version_count: AtomicU64,
    /// Whether there are full tables, which get no more entries.
    has_full_tables: AtomicBool,
    write_tables: Mutex<VecDeque<Arc<VersionTable>>>,
}

impl RetainedVersions {
    /// No versions, for a pool of at most `len_max` bytes.
    pub(crate) fn new(order: KeyOrder, snapshots: Arc<SnapshotList>, len_max: u64) -> RetainedVersions {
        let tables = EpochCell::new(Arc::new(Vec::new()));
        let bytes_max = TABLE_BYTES_MAX.min(len_max / TABLE_POOL_SHARE);
        let (len, memory, writing) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(VecDeque::new()));
        let (forgotten, has_older) = (AtomicU64::new(0), AtomicBool::new(false));
        let memory_max = AtomicU64::new(memory_max_of(len_max));
        let (reserved, reservation_ended) = (BatchMutex::new(Reserved::default()), Condvar::new());
        RetainedVersions {
            order,
            table_bytes_max: bytes_max,
            dropped_through: forgotten,
            memory_bytes: memory,
            memory_bytes_max: memory_max,
            reserved,
            reservation_ended,
            snapshots,
            tables,
            version_count: len,
            has_full_tables: has_older,
            write_tables: writing,
        }
    }

    /// Sets the memory limit to that of a pool of at most `len_max` bytes.
    pub(crate) fn set_limit(&self, len_max: u64) {
        self.memory_bytes_max.store(memory_max_of(len_max), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn snapshots(&self) -> &SnapshotList {
        &self.snapshots
    }

    /// Retains `old`, the record of `key` that the change `by` replaces or, with `removed`, deletes. Returns false if
    /// no reader can need it. Called before the record is removed from its leaf. Also returns the space of versions
    /// that became stale.
    ///
    /// Only a range delete can be visible to all readers, because it removes records after its publication. If an older
    /// version of the key is retained, which readers of other versions keep, a tombstone hides it.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, and `Poisoned`; then the record is not retained.
    pub(crate) fn retain(
        &self,
        key: &[u8],
        old: &PoolRecord,
        by: SeqNo,
        removed: bool,
    ) -> Result<(bool, Vec<PoolRange>)> {
        let mut tables = self.write_tables.lock().map_err(poisoned)?;
        let oldest = self.snapshots.oldest();
        if by <= oldest {
            self.raise_dropped_through(by);
            let older = |table: &Arc<VersionTable>| table.entries.get(key, table.entries.hash_of(key), by).is_some();
            if removed
                && tables.iter().any(older)
                && let Some(newest) = tables.back()
            {
                newest.entries.insert(EntryRef { user_key: key, seqno: by, kind: RecordKind::Delete, value: &[] })?;
            }
            return Ok((false, Vec::new()));
        }
        let mut freed = Vec::new();
        let full = |table: &Arc<VersionTable>| {
            table.entries.len() >= TABLE_ENTRIES_MAX || table.bytes.load(Ordering::Relaxed) >= self.table_bytes_max
        };
        let is_full = tables.back().is_none_or(full);
        if is_full || tables.len() > 1 && is_stale(&tables[0], oldest) {
            freed = self.drop_stale_tables(&mut tables);
        }
        if is_full || tables.is_empty() {
            let entries = Arc::new(Memtable::new(self.order.clone(), 0));
            let before = tables.back().map_or(0, |table| table.max_replacing_seqno.load(Ordering::Relaxed));
            let (replaced_by, bytes) = (AtomicU64::new(before), AtomicU64::new(0));
            tables.push_back(Arc::new(VersionTable { entries, max_replacing_seqno: replaced_by, bytes }));
            self.publish(&tables);
        }
        let table = tables.back().expect("there is a newest table");
        table.max_replacing_seqno.fetch_max(by.0, Ordering::Relaxed);
        let mut value = [0; VALUE_LEN];
        value[..8].copy_from_slice(&old.slot().0.to_le_bytes());
        value[8..].copy_from_slice(&old.buffer_len().to_le_bytes());
        let entered =
            table.entries.insert(EntryRef { user_key: key, seqno: old.seqno, kind: RecordKind::Put, value: &value });
        // The entry exists already if an earlier removal failed while it inserted the tombstone.
        let there = || table.entries.get(key, None, old.seqno).is_some_and(|entry| entry.seqno == old.seqno);
        match entered {
            Err(error) if !there() => return Err(error),
            Err(_) => {}
            Ok(()) => drop(table.bytes.fetch_add(old.buffer_len(), Ordering::Relaxed)),
        }
        if removed {
            table.entries.insert(EntryRef { user_key: key, seqno: by, kind: RecordKind::Delete, value: &[] })?;
        }
        self.version_count.fetch_add(1, Ordering::Release);
        Ok((true, freed))
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

    /// Drops the tables that no reader needs. Returns the space of their records, which pinned readers may still
    /// read.
    fn drop_stale_tables(&self, tables: &mut VecDeque<Arc<VersionTable>>) -> Vec<PoolRange> {
        let oldest = self.snapshots.oldest();
        let mut gone = Vec::new();
        while let Some(first) = tables.front()
            && is_stale(first, oldest)
        {
            gone.extend(tables.pop_front());
        }
        if gone.is_empty() {
            return Vec::new();
        }
        // `dropped_through` is raised before a reader can miss the dropped tables.
        let through = gone.iter().map(|table| table.max_replacing_seqno.load(Ordering::Relaxed)).max();
        self.dropped_through.fetch_max(through.unwrap_or_default(), Ordering::Release);
        self.publish(tables);
        let mut freed = Vec::new();
        for table in &gone {
            let mut cursor = table.entries.iter();
            let mut met = cursor.seek_to_first();
            while let (Ok(()), Some(entry)) = (met, cursor.current()) {
                freed.extend(slot_of_entry(&entry).zip(entry.value.last_chunk().map(|len| u64::from_le_bytes(*len))));
                met = cursor.next();
            }
        }
        self.version_count.fetch_sub(freed.len() as u64, Ordering::Release);
        freed.into_iter().map(|(slot, len)| (slot.offset(), len)).collect()
    }

    /// Drops the tables that no reader needs. Returns the space of their records.
    pub(crate) fn drop_stale(&self) -> Result<Vec<PoolRange>> {
        let mut tables = self.write_tables.lock().map_err(poisoned)?;
        Ok(self.drop_stale_tables(&mut tables))
    }

    /// Whether there is a full table that no reader needs.
    #[inline]
    pub(crate) fn has_stale_tables(&self) -> bool {
        self.has_full_tables.load(Ordering::Acquire) && {
            let tables = self.tables.load();
            tables.first().is_some_and(|first| is_stale(first, self.snapshots.oldest()))
        }
    }

    /// The tables that a reader at `at` needs. It sees the replacements of all records in the other tables.
    fn tables_needed_at(tables: &[Arc<VersionTable>], at: SeqNo) -> &[Arc<VersionTable>] {
        let stale = tables.iter().take_while(|table| is_stale(table, at)).count();
        &tables[stale..]
    }

    /// Number of tables that a lookup at `at` searches.
    #[cfg(test)]
    pub(crate) fn tables_searched_at(&self, at: SeqNo) -> usize {
        RetainedVersions::tables_needed_at(&self.tables.load(), at).len()
    }

    /// Bytes of memory that the entries take, as of the last change of the list of tables: later entries of the
    /// newest table are not included. The records themselves stay in the pool.
    #[inline]
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    fn memory_max(&self) -> u64 {
        self.memory_bytes_max.load(Ordering::Relaxed)
    }

    /// Maximum number of bytes of memory for retaining a record with a key of `key_len` bytes.
    pub(crate) fn bytes_most(key_len: usize, removed: bool) -> u64 {
        let entry = |value_len| Memtable::bytes_most(key_len, value_len);
        entry(VALUE_LEN) + if removed { entry(0) } else { 0 }
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
            let done =
                if reserved.first_waiting != place { None } else { self.try_first(&mut reserved, bytes, &forget) };
            if let Some(done) = done {
                reserved.first_waiting += 1;
                self.reservation_ended.notify_all();
                return done;
            }
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
            lock(&self.reserved).bytes -= bytes;
            self.reservation_ended.notify_all();
        }
    }

    #[cold]
    fn memory_limit_error(&self) -> Error {
        let (oldest, visible) = (self.snapshots.oldest(), self.snapshots.visible());
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

    /// The newest retained version of `key` that is not newer than `at`.
    pub(crate) fn find(&self, key: &[u8], at: SeqNo) -> Option<(RecordKind, LeafSlot)> {
        if self.is_empty() {
            return None;
        }
        let tables = self.tables.load();
        let found = RetainedVersions::tables_needed_at(&tables, at).iter().filter_map(|table| {
            let entry = table.entries.get(key, table.entries.hash_of(key), at)?;
            Some((entry.seqno, entry.kind, slot_of_entry(&entry).unwrap_or(LeafSlot(0))))
        });
        found.max_by_key(|(seqno, _, _)| *seqno).map(|(_, kind, slot)| (kind, slot))
    }

    /// Whether any version of `key` is retained.
    pub(crate) fn contains_key(&self, key: &[u8]) -> bool {
        let has_key =
            |table: &Arc<VersionTable>| table.entries.get(key, table.entries.hash_of(key), SeqNo::MAX).is_some();
        !self.is_empty() && self.tables.load().iter().any(has_key)
    }

    /// Returns a key within `bounds` that was removed after `since`, a registered sequence number or a later one.
    pub(crate) fn find_removed_key(
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
                if entry.kind.is_tombstone() && entry.seqno > since {
                    return Ok(Some(entry.user_key.to_vec()));
                }
                cursor.next()?;
            }
        }
        Ok(None)
    }

    /// Calls `visit` for each retained version not newer than `at`, of the keys from `low` up to the first key that
    /// `is_past` accepts.
    pub(crate) fn visit_range(
        &self,
        low: Option<&[u8]>,
        is_past: impl Fn(&[u8]) -> bool,
        at: SeqNo,
        mut visit: impl FnMut(EntryRef<'_>, Option<LeafSlot>) -> Result<()>,
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
                if entry.seqno <= at {
                    visit(entry, slot_of_entry(&entry))?;
                }
                cursor.next()?;
            }
        }
        Ok(())
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

/// Whether readers at `oldest` and at later sequence numbers need no entry of a table.
fn is_stale(table: &VersionTable, oldest: SeqNo) -> bool {
    table.max_replacing_seqno.load(Ordering::Relaxed) <= oldest.0
}

/// The slot in an entry; `None` for a tombstone.
fn slot_of_entry(entry: &EntryRef<'_>) -> Option<LeafSlot> {
    entry.value.first_chunk().map(|word| LeafSlot(u64::from_le_bytes(*word)))
}

/// The error for a lock whose holder panicked.
#[cold]
pub(crate) fn poisoned<T>(_: T) -> Error {
    Error::new(ErrorKind::Poisoned, "a comparator panicked")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::seeded_rng::SeededRng;
    use crate::vfs::env::{Env, SystemEnv};

    #[test]
    fn entries_take_no_more_than_their_bound() {
        for (key_len, removed) in [(1, false), (8, true), (40, false), (100, true), (1000, true), (65_535, true)] {
            let entries = Memtable::new(KeyOrder::bytewise(), 0);
            let (mut dice, mut most) = (SeededRng::new(key_len as u64, 0), 128 << 10);
            for n in 1..=TABLE_ENTRIES_MAX.min((8 << 20) / key_len as u64) {
                let mut key = vec![0; key_len];
                key.iter_mut().take(8).for_each(|byte| *byte = dice.next_u64() as u8);
                let seqno = SeqNo(2 * n);
                let value = &[0; VALUE_LEN];
                entries.insert(EntryRef { user_key: &key, seqno, kind: RecordKind::Put, value }).unwrap();
                if removed {
                    let (seqno, kind) = (seqno.plus(1), RecordKind::Delete);
                    entries.insert(EntryRef { user_key: &key, seqno, kind, value: &[] }).unwrap();
                }
                most += RetainedVersions::bytes_most(key_len, removed);
                assert!(entries.bytes() <= most, "{n} keys of {key_len}: {} of {most}", entries.bytes());
            }
        }
    }

    /// Regression: later batches got the reservation wherever they fitted, so a large batch waited as long as small
    /// ones arrived.
    #[test]
    fn batches_that_wait_are_served_in_order() {
        let points = SnapshotList::new(crate::engine::LastVisibleSeqno::default());
        let (versions, env) = (Arc::new(RetainedVersions::new(KeyOrder::bytewise(), points, 0)), SystemEnv::new());
        let most = versions.memory_max();
        let first = versions.try_reserve(most / 2).unwrap();
        let wait_for = |bytes| {
            let versions = Arc::clone(&versions);
            env.spawn("batch", Box::new(move || drop(versions.reserve(bytes, || Ok(())).unwrap()))).unwrap()
        };
        let second = wait_for(most);
        while versions.reserved.lock().unwrap().next_to_wait == 0 {
            env.sleep(Duration::from_millis(1));
        }
        assert!(versions.try_reserve(1).is_none(), "a later batch overtakes the waiting one");
        let third = wait_for(1);
        assert!(versions.reserve(0, || Ok(())).is_ok(), "a batch that retains nothing does not wait");
        drop(first);
        assert!(second.join() && third.join());
        assert!(versions.try_reserve(most).is_some());
    }
}
