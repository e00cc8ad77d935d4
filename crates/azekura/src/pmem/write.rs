//! Puts and removals of records.
//!
//! A put locks the leaf of its key, writes and flushes the record, and fills a free slot with its address. One fence
//! makes the record and the slot durable. Then one store of the commit word makes the new slot valid and the replaced
//! slot invalid.
//!
//! A change without a sequence number gets one while its leaf is locked. So the sequence numbers of one key rise in
//! the order of its changes, whatever number of threads make them. The checks that can refuse a change are made
//! before it gets its sequence number.
//!
//! Everything that a batch needs of a pool is reserved before the batch is appended to the WAL, because no step after
//! that may fail: a buffer for each record that it puts, leaves for splits, and memory for the versions that it
//! replaces or removes ([`RetainedVersions::reserve`]). A cheap upper bound is computed from the lengths alone. If the
//! bound does not fit, a closer bound is computed from the existing keys and their leaves.

use crate::base::key::split_expiry;
use crate::base::{EntryRef, ErrorKind, RecordKind, Result, SeqNo};
use crate::engine::{AssignedSeqno, Staged};
use crate::mem::atomic::{MutexGuard, Ordering, SCHEDULE_EXPLORATION, yield_now};
use crate::mem::epoch::Pin;
use crate::pmem::allocator::{Allocator, PoolRange};
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::{LeafAddr, LeafCommitWord, PoolLeaf};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::record::{LeafSlot, PoolRecord, PoolRecordHeader, buffer_len_for};
use crate::pmem::tree::{LeafEntry, PoolTree, TreeStep};
use crate::pmem::versions::{RetainedVersions, VersionsGuard};

/// How far the sequence number of a record is expected to exceed, at most, the last visible one at the time when its
/// buffer is allocated.
const SEQNO_LEAD: u64 = 1 << 16;

/// How often a checkpoint yields to readers that keep retired space from being given back.
const RETIRED_WAIT_YIELDS: usize = if SCHEDULE_EXPLORATION { 0 } else { 64 };

/// Number of bytes of a new buffer that are prefetched while the leaf is searched.
const RECORD_PREFETCH_LEN: u64 = 256;

/// Result of one attempt to put a record.
enum PutOutcome {
    Done,
    /// The leaf must be split first.
    LeafFull,
    /// No sequence number was assigned.
    NoSeqno,
}

/// Result of a removal.
enum RemoveOutcome {
    Removed,
    /// The leaf has no record of the key that is older than the removal.
    Absent,
    /// No sequence number was assigned.
    NoSeqno,
}

/// Space for a record to which no leaf points yet. Frees the space when dropped.
struct UnlinkedBuffer<'a, M: PersistenceBackend> {
    tree: &'a PoolTree<M>,
    range: PoolRange,
    is_linked: bool,
}

impl<M: PersistenceBackend> Drop for UnlinkedBuffer<'_, M> {
    fn drop(&mut self) {
        if !self.is_linked
            && let Ok(mut space) = self.tree.lock_allocator()
        {
            space.free(self.range);
        }
    }
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// As [`put_entry`](PoolTree::put_entry), of a value that does not expire.
    #[cfg(test)]
    pub(crate) fn put(&self, key: &[u8], seqno: SeqNo, value: &[u8]) -> Result<()> {
        self.put_entry(EntryRef { user_key: key, seqno, kind: RecordKind::Put, value })
    }

    /// Sets the value of a key. A record that is not newer than the existing one is ignored, so that the WAL can be
    /// replayed; otherwise the caller passes rising sequence numbers for one key. When it returns, the change is as
    /// durable as the backend can make it.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long, `OutOfSpace` if the pool is full; then nothing was changed.
    pub(crate) fn put_entry(&self, entry: EntryRef<'_>) -> Result<()> {
        let len = PoolRecordHeader::new(entry)?.buffer_len(entry);
        let range = (self.allocate(len)?, len);
        self.put_reserved(entry, range)
    }

    /// As [`put_entry`](PoolTree::put_entry), in a reserved buffer. Frees the buffer on failure.
    pub(crate) fn put_reserved(&self, entry: EntryRef<'_>, reservation: PoolRange) -> Result<()> {
        let mut draft = UnlinkedBuffer { tree: self, range: reservation, is_linked: false };
        let fingerprint = self.fingerprint(entry.user_key);
        while let PutOutcome::LeafFull = self.try_put(entry, fingerprint, &mut draft, || Ok(Some(entry.seqno)))? {
            let take =
                |space: &mut Allocator, backend: &M| space.allocate_beyond_limit(backend, Allocator::allocate_leaf);
            self.retry_after_reclaim(|| self.split_leaf(entry.user_key, take))?;
        }
        Ok(())
    }

    /// Sets the value of `key` with the sequence number that `assign_seqno` returns. Returns false if that is none.
    /// `kind` is a value, which may expire.
    ///
    /// # Errors
    /// Those of [`put_entry`](PoolTree::put_entry), before `assign_seqno` is called, and those of `assign_seqno`.
    /// After any other error the state is unknown.
    pub(crate) fn put_assigning_seqno(
        &self,
        kind: RecordKind,
        key: &[u8],
        value: &[u8],
        mut assign_seqno: impl FnMut() -> AssignedSeqno,
    ) -> Result<bool> {
        let len = buffer_len_for(key.len(), value.len(), self.seqno_estimate(1));
        self.check_version_memory()?;
        let at = self.allocate(len)?;
        let mut draft = UnlinkedBuffer { tree: self, range: (at, len), is_linked: false };
        self.region().prefetch(draft.range.0, len.min(RECORD_PREFETCH_LEN));
        let fingerprint = self.fingerprint(key);
        let entry = EntryRef { user_key: key, seqno: SeqNo::ZERO, kind, value };
        loop {
            match self.try_put(entry, fingerprint, &mut draft, &mut assign_seqno)? {
                PutOutcome::Done => return Ok(true),
                PutOutcome::NoSeqno => return Ok(false),
                PutOutcome::LeafFull => {
                    self.retry_after_reclaim(|| self.split_leaf(key, Allocator::allocate_unreserved_leaf))?
                }
            }
        }
    }

    /// A sequence number that the next `changes` changes are not expected to exceed. It is not much higher than
    /// necessary, because a record whose sequence number takes fewer bytes than allocated gets a shorter buffer,
    /// which is later too short for the next record of its size.
    pub(crate) fn seqno_estimate(&self, changes: usize) -> SeqNo {
        SeqNo((self.versions.readers().visible().0 + changes as u64 + SEQNO_LEAD).min(SeqNo::MAX.0))
    }

    /// Locks the allocator and releases the leaf reservations that have ended.
    #[inline]
    pub(crate) fn allocator_after_releases(&self) -> Result<MutexGuard<'_, Allocator>> {
        let mut space = self.lock_allocator()?;
        if self.released_leaf_reservations.load(Ordering::Relaxed) > 0 {
            space.release_leaf_reservation(self.released_leaf_reservations.swap(0, Ordering::Relaxed));
        }
        Ok(space)
    }

    /// Removes the record of `key`. Returns false if there is no record older than `seqno`.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory to retain the record for current readers; then nothing was changed.
    pub(crate) fn remove(&self, key: &[u8], seqno: SeqNo) -> Result<bool> {
        Ok(matches!(self.try_remove(key, || Ok(Some(seqno)))?, RemoveOutcome::Removed))
    }

    /// Removes the record of `key`, if there is one, with the sequence number that `assign_seqno` returns. Returns
    /// false if that is none.
    ///
    /// # Errors
    /// As [`put_assigning_seqno`](PoolTree::put_assigning_seqno), but `OutOfSpace` only if the retained versions
    /// exceed their memory limit.
    pub(crate) fn remove_assigning_seqno(
        &self,
        key: &[u8],
        assign_seqno: impl FnOnce() -> AssignedSeqno,
    ) -> Result<bool> {
        self.check_version_memory()?;
        Ok(!matches!(self.try_remove(key, assign_seqno)?, RemoveOutcome::NoSeqno))
    }

    fn try_remove(&self, key: &[u8], assign_seqno: impl FnOnce() -> AssignedSeqno) -> Result<RemoveOutcome> {
        let fingerprint = self.fingerprint(key);
        let (leaf, locked) = self.lock_leaf(key)?;
        let commit = leaf.commit_word();
        let found = {
            let _pin = self.pin()?;
            self.find_in_leaf(leaf, commit, key, fingerprint)?
        };
        let Some(seqno) = assign_seqno()? else { return Ok(RemoveOutcome::NoSeqno) };
        let Some(place) = found.filter(|place| place.record.seqno < seqno) else { return Ok(RemoveOutcome::Absent) };
        let is_retained = self.retain_version(key, &place.record, seqno)?;
        let without_record = self.commit_without_slot(leaf, commit, &place, fingerprint);
        self.backend.publish(leaf.offset, without_record.0);
        self.backend.flush(leaf.offset, 8, PersistSite::RemoveCommit);
        self.backend.fence(PersistSite::RemoveDone);
        self.add_to_record_count(leaf.offset, -1);
        drop(locked);
        if !is_retained {
            self.lock_allocator()?.retire((place.record.offset, place.record.buffer_len()));
        }
        // A merge is tried only when the leaf is empty or exactly a quarter full, so that adjacent leaves that are
        // too full for a merge are not checked after every removal.
        if without_record.count() == 0 || without_record.count() == self.slots_per_leaf / 4 {
            self.merge_or_unlink_leaf(key)?;
        }
        Ok(RemoveOutcome::Removed)
    }

    /// Writes a record into its buffer, frees the rest of the buffer, and returns the slot for it.
    fn write_record(&self, entry: EntryRef<'_>, draft: &mut UnlinkedBuffer<'_, M>) -> Result<LeafSlot> {
        let mut head = PoolRecordHeader::new(entry)?;
        let (len, (at, allocated_len)) = (head.buffer_len(entry), draft.range);
        if len != allocated_len {
            self.resize_buffer(draft, at, len, allocated_len)?;
        }
        let (at, len) = draft.range;
        self.backend.write(at, &[head.encode(&self.file_id, at, entry), entry.user_key, entry.value]);
        self.backend.flush(at, len, PersistSite::PutRecord);
        Ok(LeafSlot::new(at, len))
    }

    #[cold]
    fn resize_buffer(&self, draft: &mut UnlinkedBuffer<'_, M>, at: u64, len: u64, allocated_len: u64) -> Result<()> {
        let mut space = self.lock_allocator()?;
        if len < allocated_len {
            space.free((at + len, allocated_len - len));
            draft.range = (at, len);
        } else {
            let longer =
                (space.allocate_beyond_limit(&self.backend, |space, backend| space.allocate(backend, len))?, len);
            space.free(std::mem::replace(&mut draft.range, longer));
        }
        Ok(())
    }

    /// Allocates a buffer of `len` bytes, if necessary from the space of versions that no reader needs any more.
    fn allocate(&self, len: u64) -> Result<u64> {
        self.retry_after_reclaim(|| self.thread_caches.allocate(&self.backend, len, || self.allocator_after_releases()))
    }

    /// Runs an operation that allocates space. If that fails, frees stale versions and thread caches, then merges
    /// sparse leaves, and retries after each step.
    pub(crate) fn retry_after_reclaim<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut full = match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
            done => return done,
        };
        let (freed, shelved) = (self.versions.drop_stale(|| self.settled_seqno())?, self.thread_caches.drain());
        if !freed.is_empty() || !shelved.is_empty() {
            self.retire_all(freed)?;
            let mut space = self.lock_allocator()?;
            shelved.into_iter().for_each(|run| space.free(run));
            drop(space);
            full = match attempt() {
                Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
                done => return done,
            };
        }
        // The loop ends, because each round frees leaves.
        while self.merge_sparse_leaves()? > 0 {
            full = match attempt() {
                Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
                done => return done,
            };
        }
        Err(full)
    }

    /// Frees the full tables of retained versions that no reader needs any more, soon after the last such reader
    /// ended.
    #[inline]
    pub(crate) fn drop_stale_versions(&self) -> Result<()> {
        if !self.versions.is_oldest_table_stale() { Ok(()) } else { self.drop_stale_tables() }
    }

    /// Frees all full tables of retained versions that no reader needs any more.
    pub(crate) fn drop_stale_tables(&self) -> Result<()> {
        self.retire_all(self.versions.drop_stale_tables(|| self.settled_seqno())?)
    }

    /// A sequence number below every range delete whose records may still be in their leaves.
    pub(crate) fn settled_seqno(&self) -> SeqNo {
        SeqNo(self.range_deletes.first().0 - 1)
    }

    /// Drops stale versions, then fails if the retained versions exceed their memory limit.
    fn check_version_memory(&self) -> Result<()> {
        self.drop_stale_versions()?;
        if self.versions.check_memory_limit().is_err() {
            self.forget_versions()?;
        }
        self.versions.check_memory_limit()
    }

    /// Drops all retained versions that no reader needs any more, and retires their space.
    pub(crate) fn forget_versions(&self) -> Result<()> {
        self.retire_all(self.versions.drop_stale(|| self.settled_seqno())?)
    }

    /// Gives free space at the end of the pool back, if at least half of the pool is free.
    pub(crate) fn release_free_end(&self) -> Result<()> {
        self.forget_versions()?;
        if !self.lock_allocator()?.is_mostly_free() {
            return Ok(());
        }
        let shelved = self.thread_caches.drain();
        let mut space = self.allocator_after_releases()?;
        shelved.into_iter().for_each(|run| space.free(run));
        space.seal_retired_batch();
        drop(space);
        for _ in 0..RETIRED_WAIT_YIELDS {
            if self.lock_allocator()?.reclaim_retired(false) {
                break;
            }
            yield_now();
        }
        let mut space = self.lock_allocator()?;
        // Writers allocate while the memory is given back, until one has to grow the pool: it waits for this guard with
        // the allocator locked, so later allocations that need the allocator wait, too.
        let Some(growth) = self.backend.block_growth() else { return Ok(()) };
        let shorter = space.cut_free_end();
        drop(space);
        if let Some(len) = shorter {
            self.backend.shrink(len, &growth);
        }
        Ok(())
    }

    /// Retires the space of records to which no leaf and no retained version points. An iterator may have their slots
    /// if they are not visible to it; see [`retirements`](PoolTree::retirements).
    pub(crate) fn retire_all(&self, ranges: Vec<PoolRange>) -> Result<()> {
        if ranges.is_empty() {
            return Ok(());
        }
        self.count_retirement();
        let mut space = self.lock_allocator()?;
        for range in ranges {
            if self.is_step_enabled(TreeStep::EpochReclaim) { space.retire(range) } else { space.free(range) }
        }
        Ok(())
    }

    /// Makes iterators read their leaves again before they continue.
    pub(crate) fn count_retirement(&self) {
        if self.is_step_enabled(TreeStep::CountRetirements) {
            // Before the epoch that the retired space gets: a thread that is pinned and loads the old number keeps the
            // space from being reused.
            self.retirements.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Finds the leaf of `key` and locks it.
    pub(crate) fn lock_leaf(&self, key: &[u8]) -> Result<(PoolLeaf<'_>, MutexGuard<'_, ()>)> {
        loop {
            let shape = self.structure_version.load(Ordering::Acquire);
            // The thread is not pinned while it waits for the lock, because its pin would delay every reuse of space.
            let leaf = self.leaf(LeafAddr(self.inner.find_leaf(LeafTarget::Key(key), &Pin::new())));
            self.region().prefetch(leaf.offset, crate::pmem::leaf::LEAF_LEN);
            self.leaf_orders.prefetch(leaf.order_id);
            let locked = self.lock_stripe(leaf.offset)?;
            if self.structure_version.load(Ordering::Acquire) == shape {
                return Ok((leaf, locked));
            }
        }
    }

    /// Tries to put `entry` into its leaf with the sequence number that `assign_seqno` returns.
    fn try_put(
        &self,
        entry: EntryRef<'_>,
        fingerprint: u8,
        draft: &mut UnlinkedBuffer<'_, M>,
        assign_seqno: impl FnOnce() -> AssignedSeqno,
    ) -> Result<PutOutcome> {
        let (leaf, locked) = self.lock_leaf(entry.user_key)?;
        let commit = leaf.commit_word();
        let old = {
            let _pin = self.pin()?;
            self.find_in_leaf(leaf, commit, entry.user_key, fingerprint)?
        };
        if old.is_none() && commit.count() + 1 >= self.slots_per_leaf {
            return Ok(PutOutcome::LeafFull);
        }
        let Some(seqno) = assign_seqno()? else { return Ok(PutOutcome::NoSeqno) };
        if old.as_ref().is_some_and(|old| old.record.seqno >= seqno) {
            return Ok(PutOutcome::Done);
        }
        let entry = EntryRef { seqno, ..entry };
        let is_retained = match &old {
            Some(old) => self.retain_version(entry.user_key, &old.record, entry.seqno)?,
            None => true,
        };
        let n = commit.first_free_slot().expect("one slot is always free");
        let slot = self.write_record(entry, draft)?;
        let mut new = commit.flipped(n, self.check_seed.slot_check(leaf.offset, n, fingerprint, slot));
        if let Some(old) = &old {
            new = self.commit_without_slot(leaf, new, old, fingerprint);
        }
        self.begin_slot_write(leaf);
        self.backend.store(leaf.slot_offset(n), slot.0);
        self.backend.flush(leaf.slot_offset(n), 8, PersistSite::PutSlot);
        self.backend.store(leaf.fingerprint_offset(n), leaf.fingerprint_word(n, fingerprint));
        self.backend.flush_words(leaf.fingerprint_offset(n), 8, PersistSite::PutFingerprint);
        self.backend.fence(PersistSite::PutReady);
        self.backend.publish(leaf.offset, new.0);
        self.backend.flush(leaf.offset, 8, PersistSite::PutCommit);
        self.backend.fence(PersistSite::PutDone);
        draft.is_linked = true;
        if old.is_none() {
            self.add_to_record_count(leaf.offset, 1);
        }
        if entry.kind.has_expiry() {
            self.expiry.add(split_expiry(entry.kind, entry.value)?.0);
        }
        drop(locked);
        match old {
            Some(old) if !is_retained => self.lock_allocator()?.retire((old.record.offset, old.record.buffer_len())),
            _ => {}
        }
        Ok(PutOutcome::Done)
    }

    /// Retains a record that the change `by` replaces or removes. Returns false if no reader can need it.
    pub(crate) fn retain_version(&self, key: &[u8], record: &PoolRecord, by: SeqNo) -> Result<bool> {
        if !self.is_step_enabled(TreeStep::RetainVersions) || self.replaying.load(Ordering::Acquire) {
            return Ok(false);
        }
        let (is_retained, freed) = self.versions.retain(key, record, by, || self.settled_seqno())?;
        self.retire_all(freed)?;
        Ok(is_retained)
    }

    /// `commit` with the slot of `place` invalid.
    fn commit_without_slot(
        &self,
        leaf: PoolLeaf<'_>,
        commit: LeafCommitWord,
        place: &LeafEntry,
        fingerprint: u8,
    ) -> LeafCommitWord {
        commit.flipped(
            place.slot_index,
            self.check_seed.slot_check(leaf.offset, place.slot_index, fingerprint, leaf.slot(place.slot_index)),
        )
    }
}

/// Maximum number of bytes of memory for the version that a change of one key replaces or removes.
fn version_bytes_max(record: &EntryRef<'_>) -> u64 {
    RetainedVersions::bytes_max(record.user_key.len())
}

/// Whether a record concerns one key.
fn is_single(record: &EntryRef<'_>) -> bool {
    record.kind != RecordKind::RangeDelete
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Reserves what a batch needs: a buffer for each value, to be passed to
    /// [`put_reserved`](PoolTree::put_reserved), leaves for splits, and memory for versions. The caller passes all of
    /// them to [`release`](PoolTree::release) afterwards. Waits for other batches while these have reserved the memory
    /// for versions that it needs.
    ///
    /// # Errors
    /// `OutOfSpace` if the pool is full, or the retained versions take too much memory; then nothing is reserved.
    pub(crate) fn reserve(&self, records: &[(u32, EntryRef<'_>)]) -> Result<Vec<(u32, Staged)>> {
        let mut counted = None;
        let versions = self.reserve_versions(records, &mut counted)?;
        let mut staged = Vec::new();
        let leaves = self.reserve_buffers(records, &mut counted, &mut staged)?;
        staged.push((u32::MAX, Staged::SplitsAndVersions(leaves, VersionsGuard::into_bytes(versions))));
        Ok(staged)
    }

    /// Reserves memory for the versions that a batch replaces or removes. Without a reader, range deletes are not
    /// refused for lack of memory: then nothing is reserved for the records that they cover. The limit is exceeded only
    /// for readers that begin before the batch is visible, as long as these last.
    fn reserve_versions(
        &self,
        records: &[(u32, EntryRef<'_>)],
        counted: &mut Option<(u64, usize)>,
    ) -> Result<VersionsGuard<'_>> {
        let single_records = records.iter().map(|(_, record)| record).filter(|record| is_single(record));
        let single_max: u64 = single_records.map(version_bytes_max).sum();
        let has_ranges = !records.iter().all(|(_, record)| is_single(record));
        let mut in_ranges = 0;
        // Mostly there is enough memory for an estimate that reads no record.
        for exact in [false, true] {
            if has_ranges {
                in_ranges = self.range_delete_version_bytes(records, exact)?;
            }
            if let Some(guard) = self.versions.try_reserve(single_max + in_ranges) {
                return Ok(guard);
            }
            if !has_ranges {
                break;
            }
        }
        let (version_bytes, _) = *counted.insert(self.count_needs(records)?);
        let reserve = |bytes| self.versions.reserve(bytes, || self.forget_versions());
        match reserve(version_bytes + in_ranges) {
            Err(error)
                if error.kind() == ErrorKind::OutOfSpace && in_ranges > 0 && self.versions.readers().count() == 0 =>
            {
                reserve(version_bytes)
            }
            done => done,
        }
    }

    /// Reserves leaves, and buffers, which it adds to `staged`: as many leaves as the values need at most in any
    /// leaves, or, if there is no space for these, as many as they need in the leaves to which they belong. Returns the
    /// number of leaves.
    fn reserve_buffers(
        &self,
        records: &[(u32, EntryRef<'_>)],
        counted: &mut Option<(u64, usize)>,
        staged: &mut Vec<(u32, Staged)>,
    ) -> Result<usize> {
        let puts = records.iter().filter(|(_, record)| record.kind.is_value()).count();
        if puts == 0 {
            return Ok(0);
        }
        staged.reserve_exact(puts + 1);
        let end = self.seqno_estimate(records.len());
        // Each leaf that is full now may be split for its first new record. The half that a split leaves behind takes
        // half a leaf's records before it is full again.
        let full = usize::try_from(self.leaf_count.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let leaves_max = puts.min(full) + puts / (self.slots_per_leaf / 2 - 1) + 1;
        let mut leaves = counted.map_or(leaves_max, |(_, leaves)| leaves.min(leaves_max));
        self.retry_after_reclaim(|| {
            let full = match self.try_reserve(records, end, leaves, staged) {
                Err(error) if error.kind() == ErrorKind::OutOfSpace && counted.is_none() => error,
                done => return done,
            };
            let (_, needed) = *counted.insert(self.count_needs(records)?);
            if needed >= leaves {
                return Err(full);
            }
            leaves = needed;
            self.try_reserve(records, end, leaves, staged)
        })?;
        Ok(leaves)
    }

    /// Reserves all leaves and buffers, or none, under one lock of the allocator.
    fn try_reserve(
        &self,
        records: &[(u32, EntryRef<'_>)],
        end: SeqNo,
        leaves: usize,
        staged: &mut Vec<(u32, Staged)>,
    ) -> Result<()> {
        debug_assert!(staged.is_empty());
        let mut space = self.allocator_after_releases()?;
        space.reserve_leaves(&self.backend, leaves)?;
        for (number, record) in records.iter().filter(|(_, record)| record.kind.is_value()) {
            let len = buffer_len_for(record.user_key.len(), record.value.len(), end);
            match space.allocate(&self.backend, len) {
                Ok(at) => staged.push((*number, Staged::Buffer(at, len))),
                Err(error) => {
                    for (_, buffer) in staged.drain(..) {
                        if let Staged::Buffer(at, len) = buffer {
                            space.free((at, len));
                        }
                    }
                    space.release_leaf_reservation(leaves);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Counts the needs of the records with the current keys: bytes of memory for versions, and leaves, as if every
    /// leaf that gets a new key were full. Other writers may change the keys before the batch is applied. Then an
    /// additional version is retained for each key that they put and the batch replaces, or the pool grows slightly
    /// beyond its limit
    /// ([`Allocator::allocate_beyond_limit`](crate::pmem::allocator::Allocator::allocate_beyond_limit)).
    fn count_needs(&self, records: &[(u32, EntryRef<'_>)]) -> Result<(u64, usize)> {
        let mut sorted: Vec<&EntryRef<'_>> =
            records.iter().map(|(_, record)| record).filter(|record| is_single(record)).collect();
        sorted.sort_by(|a, b| self.key_order.cmp(a.user_key, b.user_key));
        let (mut version_bytes, mut leaves, mut all_new_keys) = (0, 0, 0);
        // For the leaf of the previous key: the number of new keys, and its upper bound. Its free slots do not count,
        // because packing and other writers may fill them before the batch is applied.
        let (mut new_keys, mut leaf_high) = (0, Some(Vec::new()));
        for same in sorted.chunk_by(|a, b| self.key_order.keys_equal(a.user_key, b.user_key)) {
            let pin = self.pin()?;
            let key = same[0].user_key;
            if leaf_high.as_deref().is_some_and(|leaf_high| self.key_order.cmp(key, leaf_high).is_ge()) {
                leaves += self.splits_max(new_keys);
                new_keys = 0;
                leaf_high = self.inner.find_position(LeafTarget::Key(key), &pin).high.map(<[u8]>::to_vec);
            }
            let exists = self.find_newest(key, &pin)?.is_some();
            // The first change of a key that does not exist replaces nothing.
            version_bytes += same[usize::from(!exists)..].iter().map(|record| version_bytes_max(record)).sum::<u64>();
            let is_new = !exists && same.iter().any(|record| record.kind.is_value());
            new_keys += usize::from(is_new);
            all_new_keys += usize::from(is_new);
        }
        leaves += self.splits_max(new_keys);
        // A leaf that is merged after removals is fuller than before, up to five eighths.
        let removals = sorted.iter().filter(|record| !record.kind.is_value()).count();
        Ok((version_bytes, leaves + removals.min(all_new_keys / (self.slots_per_leaf * 3 / 8).max(1)) + 1))
    }

    /// Maximum number of splits of a full leaf that gets `new_keys` new records.
    fn splits_max(&self, new_keys: usize) -> usize {
        if new_keys > 0 { 1 + (new_keys - 1) / (self.slots_per_leaf / 2 - 1) } else { 0 }
    }

    /// Ends what was [reserved](PoolTree::reserve) for a batch that was applied or will not be. The next caller that
    /// locks the allocator for a reservation or an allocation returns the leaves.
    pub(crate) fn release(&self, staged: Staged, is_applied: bool) {
        match staged {
            Staged::Buffer(at, len) if !is_applied => {
                if let Ok(mut space) = self.lock_allocator() {
                    space.free((at, len));
                }
            }
            Staged::SplitsAndVersions(leaves, version_bytes) => {
                self.released_leaf_reservations.fetch_add(leaves, Ordering::Relaxed);
                self.versions.end_reservation(version_bytes);
            }
            _ => {}
        }
    }
}
