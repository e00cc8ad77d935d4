//! Replaced and deleted records, as long as readers may need them.
//!
//! A reader at a point that finds something newer in the tree, or nothing, looks here. Before a leaf forgets a record,
//! its slot is entered under key and sequence number in a table of this process, and a removal as a tombstone behind
//! it: leaves may be split and merged meanwhile, nothing moves. The records themselves stay where they are in the pool.
//! Tables follow one another; the oldest is dropped as a whole once no point is older than the youngest replacement in
//! it, and the space of its records goes back.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex as BatchMutex, PoisonError};

use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::SnapshotList;
use crate::iter::InternalIter;
use crate::mem::atomic::{AtomicBool, AtomicU64, Mutex, Ordering, SCHEDULE_EXPLORATION};
use crate::mem::epoch::EpochCell;
use crate::memtable::Memtable;
use crate::pmem::allocator::PoolRange;
use crate::pmem::record::{LeafSlot, PoolRecord};

/// Entries of a table.
const TABLE_ENTRIES_MAX: u64 = if SCHEDULE_EXPLORATION { 4 } else { 2048 };
/// Bytes of records that one table keeps, and the share of a small pool.
const TABLE_BYTES_MAX: u64 = 4 << 20;
const TABLE_POOL_SHARE: u64 = 16;
/// The share of a pool's size that entries may take of memory.
const MEMORY_POOL_SHARE: u64 = 8;
/// Memory that entries may take at least, whatever the size of the pool.
const MEMORY_MIN: u64 = 1 << 20;

/// What an entry's value is: the word of a slot, and the length of the record's buffer.
const VALUE_LEN: usize = 16;

/// Entries under key and sequence number.
struct VersionTable {
    entries: Arc<Memtable>,
    /// The highest sequence number that replaced something in it or in a table before it: a point from there on needs
    /// nothing of either.
    max_replacing_seqno: AtomicU64,
    bytes: AtomicU64,
}

/// The tables of one tree. Thread safe: writers take turns, readers never wait.
pub(crate) struct RetainedVersions {
    order: KeyOrder,
    table_bytes_max: u64,
    /// The highest sequence number that replaced or removed something which is not kept any more.
    dropped_through: AtomicU64,
    memory_bytes: AtomicU64,
    memory_bytes_max: AtomicU64,
    /// Bytes of memory that are reserved for batches which are not applied yet, or not visible yet.
    reserved: BatchMutex<Reserved>,
    reservation_ended: Condvar,
    snapshots: Arc<SnapshotList>,
    /// From the oldest to the youngest, which takes entries.
    tables: EpochCell<Vec<Arc<VersionTable>>>,
    /// Whether there is anything at all.
    version_count: AtomicU64,
    /// Tables that take no more entries are there.
    has_full_tables: AtomicBool,
    write_tables: Mutex<VecDeque<Arc<VersionTable>>>,
}

impl RetainedVersions {
    /// None yet, for a pool that may have `len_max` bytes.
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

    /// From now on entries take as much memory as a pool of `len_max` bytes may have for them.
    pub(crate) fn set_limit(&self, len_max: u64) {
        self.memory_bytes_max.store(memory_max_of(len_max), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn snapshots(&self) -> &SnapshotList {
        &self.snapshots
    }

    /// Retains `old`, the record of `key` that `by` replaces or, with `removed`, deletes; false if no reader can need
    /// it. Called before the leaf drops the record; returns the space that is free now because its readers are gone.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, and `Poisoned`; then nothing is kept.
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
            self.dropped_through.fetch_max(by.0, Ordering::Release);
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
        let table = tables.back().expect("there is a youngest one");
        table.max_replacing_seqno.fetch_max(by.0, Ordering::Relaxed);
        let mut value = [0; VALUE_LEN];
        value[..8].copy_from_slice(&old.slot().0.to_le_bytes());
        value[8..].copy_from_slice(&old.buffer_len().to_le_bytes());
        let entered =
            table.entries.insert(EntryRef { user_key: key, seqno: old.seqno, kind: RecordKind::Put, value: &value });
        // It is there already if an earlier removal failed at its tombstone.
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

    fn publish(&self, tables: &VecDeque<Arc<VersionTable>>) {
        self.has_full_tables.store(tables.len() > 1, Ordering::Release);
        let memory = tables.iter().map(|table| table.entries.bytes()).sum();
        self.memory_bytes.store(memory, Ordering::Relaxed);
        self.tables.store(Arc::new(tables.iter().cloned().collect()));
    }

    /// Drops tables that no reader needs; returns the space of their records, which pinned readers may still read.
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
        // Before any reader can miss them.
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

    /// What is free because its readers are gone.
    pub(crate) fn drop_stale(&self) -> Result<Vec<PoolRange>> {
        let mut tables = self.write_tables.lock().map_err(poisoned)?;
        Ok(self.drop_stale_tables(&mut tables))
    }

    /// Whether there is a table that takes no more entries and that no reader needs.
    #[inline]
    pub(crate) fn has_stale_tables(&self) -> bool {
        self.has_full_tables.load(Ordering::Acquire) && {
            let tables = self.tables.load();
            tables.first().is_some_and(|first| is_stale(first, self.snapshots.oldest()))
        }
    }

    /// The tables that a reader at `at` needs. What all others have was replaced by what this reader sees.
    fn tables_needed_at(tables: &[Arc<VersionTable>], at: SeqNo) -> &[Arc<VersionTable>] {
        let stale = tables.iter().take_while(|table| is_stale(table, at)).count();
        &tables[stale..]
    }

    /// Tables that a lookup at `at` asks.
    #[cfg(test)]
    pub(crate) fn tables_searched_at(&self, at: SeqNo) -> usize {
        RetainedVersions::tables_needed_at(&self.tables.load(), at).len()
    }

    /// Bytes of memory that the entries take, but for the youngest table, which has not many. The records themselves
    /// stay in the pool.
    #[inline]
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    fn memory_max(&self) -> u64 {
        self.memory_bytes_max.load(Ordering::Relaxed)
    }

    /// Maximum number of bytes of memory for retaining a record with a key of this many bytes.
    pub(crate) fn bytes_most(key_len: usize, removed: bool) -> u64 {
        let entry = |value_len| Memtable::bytes_most(key_len, value_len);
        entry(VALUE_LEN) + if removed { entry(0) } else { 0 }
    }

    /// Whether a single change may replace or remove something. It does not see what is reserved: one entry more or
    /// less does no harm, and it must not wait for a batch that may be waiting for it.
    ///
    /// # Errors
    /// `OutOfSpace` if so much is kept for readers that nothing more may be replaced.
    #[inline]
    pub(crate) fn check_memory_limit(&self) -> Result<()> {
        if self.memory_bytes() <= self.memory_max() { Ok(()) } else { Err(self.memory_limit_error()) }
    }

    /// Reserves this many bytes of memory for the retained versions of a batch; `None` if they do not fit now, or if
    /// a batch waits.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<VersionsGuard<'_>> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if reserved.next_to_wait == reserved.first_waiting { self.add_reservation(&mut reserved, bytes) } else { None }
    }

    fn add_reservation(&self, reserved: &mut Reserved, bytes: u64) -> Option<VersionsGuard<'_>> {
        let fits = self.memory_bytes().saturating_add(reserved.bytes).saturating_add(bytes) <= self.memory_max();
        fits.then(|| {
            reserved.bytes += bytes;
            VersionsGuard { versions: self, bytes }
        })
    }

    /// The same, once `forget` has dropped what no reader needs. Waits while other batches have reservations, because
    /// these end by themselves, and what they keep goes with them unless a snapshot or an iterator needs it. Batches
    /// that wait are served in the order in which they came, before any that comes later.
    ///
    /// # Errors
    /// `OutOfSpace` if it does not fit although no batch has a reservation; those of `forget`.
    pub(crate) fn reserve(&self, bytes: u64, forget: impl Fn() -> Result<()>) -> Result<VersionsGuard<'_>> {
        if bytes == 0 {
            return Ok(VersionsGuard { versions: self, bytes });
        }
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// What becomes of the first batch that waits; none if it has to wait on.
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

    /// A batch that had reserved this many bytes is visible, or will not be applied.
    pub(crate) fn end_reservation(&self, bytes: u64) {
        if bytes > 0 {
            self.reserved.lock().unwrap_or_else(PoisonError::into_inner).bytes -= bytes;
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

    /// Whether all is kept still that was replaced or removed behind `at`: then what is not found was not there. To be
    /// asked after [`find`](RetainedVersions::find).
    #[inline]
    pub(crate) fn is_complete_since(&self, at: SeqNo) -> bool {
        self.dropped_through.load(Ordering::Acquire) <= at.0
    }

    /// The newest version of `key` not newer than `at`, of those that are kept.
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

    /// Shows `visit` the versions not newer than `at` of the keys from `low` up to the first that `is_past` its end.
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

/// What batches have reserved, and which of them wait.
#[derive(Debug, Default)]
struct Reserved {
    bytes: u64,
    /// Places in the order of waiting: the first one that was not served yet, and the next one to be given.
    first_waiting: u64,
    next_to_wait: u64,
}

/// Memory that is reserved for the entries of a batch. Dropped, it is free again.
pub(crate) struct VersionsGuard<'a> {
    versions: &'a RetainedVersions,
    bytes: u64,
}

impl VersionsGuard<'_> {
    /// The bytes that it had reserved, which stay so until [`RetainedVersions::end_reservation`].
    pub(crate) fn into_bytes(mut guard: VersionsGuard<'_>) -> u64 {
        std::mem::take(&mut guard.bytes)
    }
}

impl Drop for VersionsGuard<'_> {
    fn drop(&mut self) {
        self.versions.end_reservation(self.bytes);
    }
}

/// The most bytes of memory for the entries of a pool of `len_max` bytes.
fn memory_max_of(len_max: u64) -> u64 {
    MEMORY_MIN.max(len_max / MEMORY_POOL_SHARE)
}

/// Whether readers at `oldest` and later points need nothing of a table.
fn is_stale(table: &VersionTable, oldest: SeqNo) -> bool {
    table.max_replacing_seqno.load(Ordering::Relaxed) <= oldest.0
}

/// The slot in an entry; a tombstone has none.
fn slot_of_entry(entry: &EntryRef<'_>) -> Option<LeafSlot> {
    entry.value.first_chunk().map(|word| LeafSlot(u64::from_le_bytes(*word)))
}

/// A lock whose holder panicked.
#[cold]
pub(crate) fn poisoned<T>(_: T) -> Error {
    Error::new(ErrorKind::Poisoned, "a comparator panicked")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::vfs::env::{Env, SystemEnv};
    use crate::vfs::seeded_rng::SeededRng;

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

    /// Before, a batch that waited came last for as long as others came: they were let in wherever they fitted.
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
        assert!(versions.try_reserve(1).is_none(), "a later batch goes ahead");
        let third = wait_for(1);
        assert!(versions.reserve(0, || Ok(())).is_ok(), "what keeps nothing waits for none");
        drop(first);
        assert!(second.join() && third.join());
        assert!(versions.try_reserve(most).is_some());
    }
}
