//! The state of a transaction: its snapshot, its reads and its writes. [`Transaction`](crate::Transaction) and its
//! untracked reads are the public calls.

use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::split_expiry;
use crate::base::sync::lock;
use crate::base::{Error, RecordKind, Result};
use crate::db::batch::{Batch, BatchMark};
use crate::db::config::{PersistMode, PlantedBug};
use crate::db::handle::DbHandle;
use crate::db::handle::ExclusiveTurn;
use crate::db::iter::db_iter::{DbIter, OwnedBounds, prefix_bounds};
use crate::db::iter::iterators::{Iter, IterState};
use crate::db::partition::Partition;
use crate::db::snapshot::Snapshot;
use crate::db::state::scanned_range::range_bytes;
use crate::db::transaction::read_set::ReadSet;
use crate::db::transaction::transaction_options::{Isolation, TransactionOptions};
use crate::db::transaction::transaction_view::{TransactionView, find_last_write};
use crate::db::writes::commit_check::CommitCheck;
use crate::db::writes::overlay::Overlay;
use crate::engine::{EngineView, ReadMoment, ReadSeqno, SnapshotGuard};
use crate::mem::slice::Slice;
use crate::memtable::Memtable;

/// Up to this many writes, a lookup reads the encoded writes instead of ordering them.
const SCANNED_WRITES_MAX: u32 = 16;

/// When the ranges of the iterators that are in use take more than 1 / `OPEN_RANGES_SHARE` of the memory budget, each
/// counts as having read all of its bounds.
const OPEN_RANGES_SHARE: u64 = 8;

/// Maximum number of bytes of an encoded write beside its key and its value: its head, and a blob pointer or an expiry
/// time.
const RECORD_OVERHEAD_MAX: usize = 100;

/// The state of a transaction.
pub(crate) struct TransactionState {
    // The order of fields is the order of their drops: the turn ends before the handle, which may close the database.
    turn: Option<ExclusiveTurn>,
    snapshot: SnapshotGuard,
    isolation: Isolation,
    reads: Arc<Mutex<ReadSet>>,
    overlay: Mutex<Overlay>,
    savepoints: Vec<(u64, BatchMark)>,
    next_savepoint: u64,
    batch: Batch,
}

/// What the transaction itself has written for a key.
enum OwnWrite {
    Removed,
    Value(Slice),
    Blob(BlobPointer, Vec<u8>),
    /// An operand, which changes an older value.
    Operand,
}

impl TransactionState {
    pub(crate) fn begin(handle: &Arc<DbHandle>, options: &TransactionOptions) -> Result<TransactionState> {
        let turn = if options.exclusive { Some(ExclusiveTurn::begin(handle)?) } else { None };
        let mut state = TransactionState::new(handle, options.isolation);
        state.turn = turn;
        Ok(state)
    }

    pub(crate) fn new(handle: &Arc<DbHandle>, isolation: Isolation) -> TransactionState {
        TransactionState {
            turn: None,
            snapshot: handle.inner.snapshots.register(),
            isolation,
            reads: Arc::new(Mutex::new(ReadSet::new(handle.inner.settings.memory_budget / OPEN_RANGES_SHARE))),
            overlay: Mutex::default(),
            savepoints: Vec::new(),
            next_savepoint: 0,
            batch: Batch::new(Arc::clone(handle)),
        }
    }

    /// Whether reads are recorded. At `Snapshot` isolation only writes are checked, and an exclusive transaction has no
    /// conflicts.
    fn tracks_reads(&self) -> bool {
        self.isolation == Isolation::Serializable && self.turn.is_none()
    }

    /// Marks the present writes; returns the owner and the number of the mark. Without a write since the last mark,
    /// this is the last mark, so that the marks take no more memory than the writes.
    pub(crate) fn savepoint(&mut self) -> (Weak<Mutex<ReadSet>>, u64) {
        let _not_in_a_forked_child = self.enter();
        let mark = self.batch.mark();
        let known = self.savepoints.last().filter(|(_, last)| *last == mark);
        let number = known.map_or(self.next_savepoint, |(number, _)| *number);
        if known.is_none() {
            debug_assert!(self.savepoints.last().is_none_or(|(last, _)| *last < number), "marks are in their order");
            self.next_savepoint += 1;
            self.savepoints.push((number, mark));
        }
        (Arc::downgrade(&self.reads), number)
    }

    /// Discards the writes since a mark.
    pub(crate) fn rollback_to(&mut self, owner: &Weak<Mutex<ReadSet>>, number: u64) -> Result<()> {
        self.enter()?;
        if !Weak::ptr_eq(owner, &Arc::downgrade(&self.reads)) {
            return Err(Error::invalid("the savepoint belongs to another transaction"));
        }
        let found = self.savepoints.binary_search_by_key(&number, |(number, _)| *number);
        let at = found.map_err(|_| Error::invalid("the savepoint was discarded by a rollback to an earlier one"))?;
        self.savepoints.truncate(at + 1);
        self.batch.reset_to(self.savepoints[at].1);
        lock(&self.overlay).clear();
        Ok(())
    }

    pub(crate) fn durability(&mut self, mode: PersistMode) {
        let _not_in_a_forked_child = self.enter();
        self.batch.durability(mode);
    }

    pub(crate) fn commit(mut self) -> Result<()> {
        self.enter()?;
        let inner = &self.batch.handle().inner;
        if self.batch.writes().1 == 0 && inner.writer.is_none() {
            return inner.check_open();
        }
        let mut reads = lock(&self.reads).take();
        if inner.settings.has_planted_bug(PlantedBug::UntrackedTransactions) {
            reads.clear();
        }
        let includes_writes = self.isolation == Isolation::Snapshot;
        let check = (includes_writes || !reads.is_empty() || self.turn.is_some())
            .then(|| Arc::new(CommitCheck::new(reads, includes_writes, self.turn.is_some(), self.snapshot.seqno())));
        self.batch.commit_with_check(check.as_ref(), self.turn.take())
    }

    /// Begins each call: the exclusive turn, if there is one, belongs to the calling thread from now on. Otherwise a
    /// thread that has only read with the transaction would wait for itself when it writes without the transaction.
    ///
    /// # Errors
    /// `Closed` in a forked child.
    fn enter(&self) -> Result<()> {
        self.batch.handle().inner.check_process()?;
        self.turn.as_ref().map_or(Ok(()), ExclusiveTurn::move_to_this_thread)
    }

    /// Adds a write. After an error nothing has changed.
    pub(crate) fn write(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        self.begin_write(partition, key, value)?;
        self.batch.try_push(partition, kind, key, value)
    }

    fn begin_write(&self, partition: &Partition, key: &[u8], value: &[u8]) -> Result<()> {
        self.enter()?;
        partition.check_same_database(self.batch.handle())?;
        partition.state.tree()?;
        let value_len = if self.batch.stages_value(partition, value.len()) { 0 } else { value.len() };
        self.check_memory(lock(&self.reads).bytes(), key.len() + value_len + RECORD_OVERHEAD_MAX)
    }

    /// Adds a write that expires after `ttl_ms` milliseconds. After an error nothing has changed.
    pub(crate) fn write_expiring(
        &mut self,
        partition: &Partition,
        key: &[u8],
        value: &[u8],
        ttl_ms: u64,
    ) -> Result<()> {
        self.begin_write(partition, key, value)?;
        self.batch.try_push_value(partition, key, value, Some(ttl_ms))
    }

    /// Adds a range delete. After an error nothing has changed.
    pub(crate) fn remove_bounds(&mut self, partition: &Partition, bounds: &OwnedBounds) -> Result<()> {
        self.enter()?;
        partition.check_same_database(self.batch.handle())?;
        self.check_memory(lock(&self.reads).bytes(), range_bytes(bounds) + RECORD_OVERHEAD_MAX)?;
        self.batch.remove_bounds(partition, bounds)
    }

    /// Bytes of memory that the transaction takes with one more write of up to `added` bytes, if its reads take
    /// `read_bytes`. The overlay counts before a read needs it, so that no read of own writes exceeds the limit.
    fn memory_bytes(&self, read_bytes: u64, added: usize) -> u64 {
        let encoded = self.batch.payload_bytes(added);
        let ordered = lock(&self.overlay).bytes(self.batch.ordered_bytes_max() + Memtable::bytes_max(0, added));
        let savepoints = self.savepoints.capacity() * size_of::<(u64, BatchMark)>();
        read_bytes + encoded + ordered + savepoints as u64
    }

    /// Fails if the transaction has too little memory for one more write of up to `added` bytes, or for reads of
    /// `read_bytes`.
    fn check_memory(&self, read_bytes: u64, added: usize) -> Result<()> {
        let limit = self.batch.handle().inner.settings.memory_budget / 2;
        if self.memory_bytes(read_bytes, added) <= limit {
            return Ok(());
        }
        Err(Error::invalid(format!("the transaction needs more than half the memory budget ({limit} bytes)")))
    }

    /// Records a read of `key`.
    fn track_key(&self, partition: &Partition, key: &[u8]) -> Result<()> {
        let mut reads = lock(&self.reads);
        self.check_memory(reads.bytes() + key.len() as u64, 0)?;
        reads.add_key(&partition.state, key);
        Ok(())
    }

    /// Returns the value of `key`, and records the read if `tracked`.
    pub(crate) fn read(&self, partition: &Partition, key: &[u8], tracked: bool) -> Result<Option<Slice>> {
        self.enter()?;
        partition.check_same_database(self.batch.handle())?;
        match self.own_write(partition, key)? {
            Some(OwnWrite::Removed) => return Ok(None),
            Some(OwnWrite::Value(value)) => return Ok(Some(value)),
            Some(OwnWrite::Blob(_, pointer)) => {
                return partition.state.tree()?.view().blob_resolver().resolve(&pointer).map(Some);
            }
            Some(OwnWrite::Operand) => return self.read_merged(partition, key, tracked),
            None => {}
        }
        if tracked && self.tracks_reads() {
            self.track_key(partition, key)?;
        }
        match self.followed(partition)? {
            Some(snapshot) => snapshot.get(partition, key),
            None => partition.get_at(key, ReadSeqno::At(self.snapshot.moment())),
        }
    }

    /// Returns the length of the value of `key`, and records the read if `tracked`.
    pub(crate) fn read_size(&self, partition: &Partition, key: &[u8], tracked: bool) -> Result<Option<u32>> {
        self.enter()?;
        partition.check_same_database(self.batch.handle())?;
        match self.own_write(partition, key)? {
            Some(OwnWrite::Removed) => return Ok(None),
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            Some(OwnWrite::Value(value)) => return Ok(Some(value.len() as u32)),
            Some(OwnWrite::Blob(pointer, _)) => return Ok(Some(pointer.value_len)),
            Some(OwnWrite::Operand) => {
                return Ok(self.read_merged(partition, key, tracked)?.map(|value| value.len() as u32));
            }
            None => {}
        }
        if tracked && self.tracks_reads() {
            self.track_key(partition, key)?;
        }
        match self.followed(partition)? {
            Some(snapshot) => snapshot.size_of(partition, key),
            None => partition.size_of_at(key, ReadSeqno::At(self.snapshot.moment())),
        }
    }

    /// In a follower, which may have replaced the state that the transaction reads: its snapshot.
    ///
    /// # Errors
    /// `Closed` if the partition was deleted.
    fn followed(&self, partition: &Partition) -> Result<Option<Snapshot>> {
        let handle = self.batch.handle();
        if handle.inner.follower.is_none() {
            return Ok(None);
        }
        partition.state.tree()?;
        Ok(Some(Snapshot::of_guard(self.snapshot.clone(), Arc::clone(handle))))
    }

    /// Returns the value of `key`, for which the transaction has written operands.
    fn read_merged(&self, partition: &Partition, key: &[u8], tracked: bool) -> Result<Option<Slice>> {
        let order = partition.state.tree()?.key_order();
        let is_own = self.overlay_with_all_writes()?.has_base(partition.state.id, order, key)?;
        if tracked && self.tracks_reads() && !is_own {
            self.track_key(partition, key)?;
        }
        let bounds = (Bound::Included(key.to_vec()), Bound::Included(key.to_vec()));
        let entry = Iter(IterState::new(self.try_iter(partition, &bounds))).next().transpose()?;
        Ok(entry.map(|(_, value)| value))
    }

    /// Returns what the transaction has written for `key`, if anything.
    fn own_write(&self, partition: &Partition, key: &[u8]) -> Result<Option<OwnWrite>> {
        let (payload, count, partitions) = self.batch.writes();
        if !partitions.iter().any(|written| written.id == partition.state.id) {
            return Ok(None);
        }
        self.batch.handle().inner.check_open()?;
        let order = partition.state.tree()?.key_order();
        // A write expires after the moment that the transaction reads.
        let own = |(kind, value): (RecordKind, &[u8])| match split_expiry(kind, value)? {
            (_, RecordKind::Put, value) => Ok(OwnWrite::Value(Slice::from(value))),
            (_, RecordKind::BlobPointer, value) => Ok(OwnWrite::Blob(BlobPointer::decode(value)?, value.to_vec())),
            (_, RecordKind::Merge, _) => Ok(OwnWrite::Operand),
            _ => Ok(OwnWrite::Removed),
        };
        if count <= SCANNED_WRITES_MAX {
            return find_last_write(payload, partition.state.id, order, key)?.map(own).transpose();
        }
        let overlay = self.overlay_with_all_writes()?;
        let last = overlay.find_last_write(partition.state.id, order, key);
        last.map(|(kind, value)| own((kind, &value))).transpose()
    }

    fn overlay_with_all_writes(&self) -> Result<MutexGuard<'_, Overlay>> {
        let (payload, _, partitions) = self.batch.writes();
        let mut overlay = lock(&self.overlay);
        overlay.apply(payload, partitions, self.snapshot.seqno())?;
        Ok(overlay)
    }

    pub(crate) fn iter_state(&self, partition: &Partition, bounds: OwnedBounds, tracked: bool) -> IterState {
        match self.try_iter(partition, &bounds) {
            Ok(iter) if tracked && self.tracks_reads() => self.track_iter(partition, iter, bounds),
            iter => IterState::new(iter),
        }
    }

    pub(crate) fn prefix_state(&self, partition: &Partition, prefix: &[u8], tracked: bool) -> IterState {
        match partition.check_prefix_order() {
            Ok(()) => self.iter_state(partition, prefix_bounds(prefix), tracked),
            Err(error) => IterState::new(Err(error)),
        }
    }

    fn try_iter(&self, partition: &Partition, bounds: &OwnedBounds) -> Result<DbIter> {
        self.enter()?;
        let handle = self.batch.handle();
        partition.check_same_database(handle)?;
        let (_, count, partitions) = self.batch.writes();
        if !partitions.iter().any(|written| written.id == partition.state.id) {
            return partition.db_iter(bounds.clone(), self.snapshot.clone());
        }
        let overlay = self.overlay_with_all_writes()?;
        let Some(writes) = overlay.memtable(partition.state.id).cloned() else {
            return partition.db_iter(bounds.clone(), self.snapshot.clone());
        };
        let tree = partition.state.tree()?;
        let (order, snapshot) = (tree.key_order().clone(), self.snapshot.moment());
        let range_deletes = writes.range_tombstones_arc();
        let tree_view: Arc<dyn EngineView> = Arc::from(tree.view());
        let view = TransactionView {
            tree: tree_view.unmerged().unwrap_or(tree_view),
            order: order.clone(),
            snapshot,
            writes,
            range_deletes,
            merge_operator: partition.state.merge_operator.if_known().cloned(),
        };
        partition.state.tree()?; // otherwise the iterator may read a tree that was emptied by a deletion
        let at = ReadMoment { seqno: snapshot.seqno.plus(u64::from(count)), ..snapshot };
        let view = Arc::new(view);
        Ok(DbIter::with_view(Arc::clone(handle), view, order, bounds.clone(), self.snapshot.clone(), at))
    }

    fn track_iter(&self, partition: &Partition, iter: DbIter, bounds: OwnedBounds) -> IterState {
        let order = match partition.state.tree() {
            Ok(tree) => tree.key_order().clone(),
            Err(error) => return IterState::new(Err(error)),
        };
        let mut reads = lock(&self.reads);
        match self.check_memory(reads.bytes() + 3 * range_bytes(&bounds) as u64, 0) {
            Ok(()) => IterState::Tracked(Box::new(iter), reads.add_range(&partition.state, order, bounds)),
            Err(error) => IterState::new(Err(error)),
        }
    }

    pub(crate) fn debug(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        let mut shown = f.debug_struct(name);
        shown.field("isolation", &self.isolation).field("exclusive", &self.turn.is_some());
        shown.field("writes", &self.batch.writes().1).finish_non_exhaustive()
    }
}

impl Drop for TransactionState {
    fn drop(&mut self) {
        if self.batch.handle().inner.is_forked() {
            let overlay = self.overlay.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(overlay)); // the child may wait forever for a lock
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::config::Config;
    use crate::db::options::PartitionCreateOptions;
    use crate::lsm::options::KvSeparationOptions;
    use crate::mem::allocation_counter::allocated_bytes;
    use crate::testing::{MemFs, is_in_own_process};

    /// Regression: as soon as a read had ordered them, small writes used ten times the memory that was counted. Later,
    /// the list of encoded writes doubled after the check: a transaction used up to 4/3 of its limit, and each later
    /// call failed. Ordered writes above 4 KiB used up to three times their length, and twice their length was counted.
    /// Now writes use at most the limit, and 128 KiB for each partition.
    #[test]
    fn writes_take_no_more_than_is_counted() {
        if !is_in_own_process("db::transaction::transaction_state::tests::writes_take_no_more_than_is_counted") {
            return; // memory of other tests that this thread frees would count
        }
        let cases = [0, 20, 100, 1_000, 3_000, 4_200, 40_000, 300_000].map(|len| [(len, 4 << 19), (len, 7 << 19)]);
        for (value_len, limit) in cases.into_iter().flatten() {
            let config = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(2 * limit);
            let db = config.open().unwrap();
            let part = db.open_partition("p", Default::default()).unwrap();
            let before = allocated_bytes();
            let mut tx = TransactionState::new(&part.handle, Isolation::Serializable);
            let value = vec![7; value_len];
            let write = |tx: &mut TransactionState, n: u32| tx.write(&part, RecordKind::Put, &n.to_be_bytes(), &value);
            let refused = (0..1_000_000).find(|n| write(&mut tx, *n).is_err()).unwrap();
            assert!(tx.read(&part, &(refused - 1).to_be_bytes(), true).unwrap().is_some());
            let allocated = allocated_bytes() - before - value_len as i64;
            assert!(allocated <= limit as i64 + (128 << 10), "{value_len}: {allocated} of {limit}");
            let unused = value_len as i64 * 5;
            assert!(4 * (allocated + unused) > limit as i64, "{value_len}: {allocated} of {limit}, then refused");
            if value_len < 100 {
                tx.read(&part, b"another key", true).unwrap();
            }
            let tx_iter = tx.iter_state(&part, (Bound::Unbounded, Bound::Unbounded), false);
            let (_, mark) = tx.savepoint();
            tx.rollback_to(&Arc::downgrade(&tx.reads), mark).unwrap();
            let ordered = lock(&tx.overlay).bytes(0);
            assert!(ordered > 0, "an iterator holds the discarded writes");
            drop(tx_iter);
            assert_eq!(lock(&tx.overlay).bytes(0), 0);
        }
    }

    /// Regression: each savepoint took memory without a limit. A loop that undoes its last write each time had as many.
    #[test]
    fn savepoints_take_less_than_their_writes() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let mut tx = TransactionState::new(&part.handle, Isolation::Serializable);
        let (owner, first) = tx.savepoint();
        for n in 0..10_000u32 {
            let (_, before) = tx.savepoint();
            tx.write(&part, RecordKind::Put, &n.to_be_bytes(), b"undone").unwrap();
            tx.rollback_to(&owner, before).unwrap();
        }
        assert_eq!(tx.savepoints.len(), 1);
        tx.write(&part, RecordKind::Put, b"k", b"kept").unwrap();
        let (_, second) = tx.savepoint();
        assert!(second > first && tx.savepoint().1 == second);
        tx.rollback_to(&owner, second).unwrap();
        assert!(tx.read(&part, b"k", true).unwrap().is_some());
        tx.rollback_to(&owner, first).unwrap();
        assert!(tx.read(&part, b"k", true).unwrap().is_none());
        tx.rollback_to(&owner, second).unwrap_err();
    }

    /// Regression: the list of values that are in blob files did not count.
    #[test]
    fn staged_values_take_what_is_counted() {
        let limit = 4 << 20;
        let config = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(2 * limit);
        let db = config.open().unwrap();
        let separated = KvSeparationOptions::default().separation_threshold(16).direct_write_threshold(16);
        let options = PartitionCreateOptions::default().with_kv_separation(separated);
        let part = db.open_partition("p", options).unwrap();
        let mut tx = TransactionState::new(&part.handle, Isolation::Serializable);
        let mut add = |n: u32| tx.write(&part, RecordKind::Put, &n.to_be_bytes(), &[7; 20]);
        add(0).unwrap(); // makes the blob file
        let refused = (1..1_000_000).find(|n| add(*n).is_err()).unwrap();
        let (ordered, payload) = (tx.batch.ordered_bytes_max(), tx.batch.payload_bytes(0));
        let list = refused as usize * size_of::<crate::db::writes::staged_records::StagedRecord>();
        let held = ordered + tx.batch.writes().0.len() as u64 + 2 * list as u64;
        assert!(held <= limit, "{refused} values: {held} of {limit}");
        assert!(4 * (ordered + payload) > 3 * limit, "{ordered} + {payload} of {limit}, then refused");
    }

    /// Regression: a range delete counted as much memory as another write. One inside of another takes up to twice as
    /// much, so that each call after the first read of own writes failed.
    #[test]
    fn range_deletes_take_what_is_counted() {
        let limit = 2 << 20;
        let config = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(2 * limit);
        let db = config.open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let mut tx = TransactionState::new(&part.handle, Isolation::Serializable);
        let key = |n: u32| n.to_be_bytes().to_vec();
        let nested = |n: u32| (Bound::Included(key(n)), Bound::Excluded(key(u32::MAX - n)));
        assert!((0..1_000_000).any(|n| tx.remove_bounds(&part, &nested(n)).is_err()));
        assert!(tx.read(&part, &key(1 << 30), true).unwrap().is_none());
        let ordered = lock(&tx.overlay).bytes(0);
        assert!((limit / 2..limit).contains(&ordered), "{ordered} bytes");
        tx.read(&part, &[u8::MAX; 5], true).unwrap(); // not removed, so it is recorded
    }

    #[test]
    fn reads_take_no_more_than_is_counted() {
        if !is_in_own_process("db::transaction::transaction_state::tests::reads_take_no_more_than_is_counted") {
            return; // memory of other tests that this thread frees would count
        }
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(4 << 20).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        for key_len in [4, 22, 23, 100, 1_000] {
            let tx = TransactionState::new(&part.handle, Isolation::Serializable);
            let before = allocated_bytes();
            let read = |n: u32| {
                let mut key = vec![0; key_len];
                key[..4].copy_from_slice(&n.to_be_bytes());
                tx.read(&part, &key, true)
            };
            assert!((0..1_000_000).any(|n| read(n).is_err()));
            let (allocated, counted) = (allocated_bytes() - before, lock(&tx.reads).bytes() as i64);
            assert!(allocated <= counted + 10_000, "{key_len}: {allocated} bytes are allocated, {counted} counted");
        }
    }
}
