//! Putting and removing records.
//!
//! A record is written and flushed when its leaf is locked and has a free slot, which is filled then; one fence makes
//! both durable, and the commit word makes them count: with the new slot, and without the one it replaces.
//!
//! Only with the leaf locked a change gets its number, if it has none yet: so those of one key have rising ones,
//! however many threads make them. Whatever may be refused has been refused before.

use crate::base::{EntryRef, ErrorKind, RecordKind, Result, SeqNo};
use crate::mem::atomic::{MutexGuard, Ordering};
use crate::mem::epoch::Pin;
use crate::pmem::allocator::{Allocator, PoolRange};
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::LeafAddr;
use crate::pmem::leaf::{LeafCommitWord, PoolLeaf};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::record::{LeafSlot, PoolRecordHeader, buffer_len_for};
use crate::pmem::tree::{LeafEntry, PoolTree, TreeStep};

/// Hardly a record comes with a sequence number so far above what was visible when its space was set aside.
const SEQNO_LEAD: u64 = 1 << 16;

/// Number of bytes of its space that are prefetched before a record is written, while its leaf is searched.
const RECORD_PREFETCH_LEN: u64 = 256;

/// The number of a change, taken when its leaf is locked; none if it may not be made now.
pub(crate) type AssignedSeqno = Result<Option<SeqNo>>;

/// What came of a put.
enum PutOutcome {
    Done,
    /// Its leaf must be split before.
    LeafFull,
    /// It got no number.
    NoSeqno,
}

/// What came of a removal.
enum RemoveOutcome {
    Removed,
    /// There was none.
    Absent,
    /// It got no number.
    NoSeqno,
}

/// Space for a record that no leaf names yet. Dropped, it gives its space back.
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
    /// Gives `key` the value `value`. Records of one key come with rising sequence numbers; one that is not newer than
    /// what is there is left out, so that a log can be replayed. Durable when it returns, as far as the medium is.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long, `OutOfSpace` if the pool is full; then nothing was changed.
    pub(crate) fn put(&self, key: &[u8], seqno: SeqNo, value: &[u8]) -> Result<()> {
        let entry = EntryRef { user_key: key, seqno, kind: RecordKind::Put, value };
        let len = PoolRecordHeader::new(entry)?.buffer_len(entry);
        let range = (self.allocate(len)?, len);
        self.put_reserved(entry, range)
    }

    /// The same in space that was set aside for it. If it fails, the space is free again.
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

    /// Gives `key` the value `value` under the number that `turn` gives: false if it gives none.
    ///
    /// # Errors
    /// As [`put`](PoolTree::put), before a sequence number is requested; and the errors of `turn`. After other errors
    /// the state is unknown.
    pub(crate) fn put_assigning_seqno(
        &self,
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
        let entry = EntryRef { user_key: key, seqno: SeqNo::ZERO, kind: RecordKind::Put, value };
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

    /// A sequence number that this many changes hardly exceed. It is not much higher than necessary: a record with a
    /// shorter number than its space allows leaves a buffer that is too short for the next record of its size.
    pub(crate) fn seqno_estimate(&self, changes: usize) -> SeqNo {
        SeqNo((self.versions.snapshots().visible().0 + changes as u64 + SEQNO_LEAD).min(SeqNo::MAX.0))
    }

    /// The free space, which has heard of promises that have ended.
    #[inline]
    pub(crate) fn allocator_after_releases(&self) -> Result<MutexGuard<'_, Allocator>> {
        let mut space = self.lock_allocator()?;
        if self.released_leaf_reservations.load(Ordering::Relaxed) > 0 {
            space.release_leaf_reservation(self.released_leaf_reservations.swap(0, Ordering::Relaxed));
        }
        Ok(space)
    }

    /// Gives back what was set aside and not used.
    pub(crate) fn free_reservation(&self, reservation: PoolRange) {
        if let Ok(mut space) = self.lock_allocator() {
            space.free(reservation);
        }
    }

    /// Takes the record of `key` away; false if there is none, or a newer one.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory to retain it for current readers; then nothing was changed.
    pub(crate) fn remove(&self, key: &[u8], seqno: SeqNo) -> Result<bool> {
        Ok(matches!(self.try_remove(key, || Ok(Some(seqno)))?, RemoveOutcome::Removed))
    }

    /// Takes the record of `key` away, if there is one, under the number that `turn` gives: false if it gives none.
    ///
    /// # Errors
    /// As [`put_assigning_seqno`](PoolTree::put_assigning_seqno), but `OutOfSpace` only if too much is kept for
    /// readers.
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
        let kept = self.retain_version(key, &place, seqno, true)?;
        let left = self.commit_without_slot(leaf, commit, &place, fingerprint);
        self.backend.publish(leaf.offset, left.0);
        self.backend.flush(leaf.offset, 8, PersistSite::RemoveCommit);
        self.backend.fence(PersistSite::RemoveDone);
        self.add_to_record_count(leaf.offset, false);
        drop(locked);
        if !kept {
            self.lock_allocator()?.retire((place.record.offset, place.record.buffer_len()));
        }
        // At a quarter, and when it is empty: in between, neighbours that had no room are not asked every time.
        if left.count() == 0 || left.count() == self.slots_per_leaf / 4 {
            self.merge_or_unlink_leaf(key)?;
        }
        Ok(RemoveOutcome::Removed)
    }

    /// Writes a record into its space, of which it gives back what is too much, and makes its slot.
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

    /// Takes space, if necessary the space of versions that no reader needs any more.
    fn allocate(&self, len: u64) -> Result<u64> {
        self.retry_after_reclaim(|| self.thread_caches.allocate(&self.backend, len, || self.allocator_after_releases()))
    }

    /// Runs an operation that needs space, and again if versions that no reader needs, or thread caches, had space.
    pub(crate) fn retry_after_reclaim<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut full = match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
            done => return done,
        };
        let (freed, shelved) = (self.versions.drop_stale()?, self.thread_caches.drain());
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
        // It ends, because each round frees leaves.
        while self.merge_sparse_leaves()? > 0 {
            full = match attempt() {
                Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
                done => return done,
            };
        }
        Err(full)
    }

    /// Gives back what no reader needs any more of what was replaced, soon after the reader has left.
    #[inline]
    pub(crate) fn drop_stale_versions(&self) -> Result<()> {
        if !self.versions.has_stale_tables() { Ok(()) } else { self.retire_all(self.versions.drop_stale()?) }
    }

    /// Fails if more is kept for readers than may be, once what no reader needs was forgotten.
    fn check_version_memory(&self) -> Result<()> {
        self.drop_stale_versions()?;
        if self.versions.check_memory_limit().is_err() {
            self.forget_versions()?;
        }
        self.versions.check_memory_limit()
    }

    /// Gives back all that no reader needs any more of what was replaced.
    pub(crate) fn forget_versions(&self) -> Result<()> {
        self.retire_all(self.versions.drop_stale()?)
    }

    /// Gives back the space of records that no leaf and no version names.
    fn retire_all(&self, ranges: Vec<PoolRange>) -> Result<()> {
        let mut space = self.lock_allocator()?;
        for range in ranges {
            if self.is_step_enabled(TreeStep::EpochReclaim) { space.retire(range) } else { space.free(range) }
        }
        Ok(())
    }

    /// The leaf of `key`, locked.
    pub(crate) fn lock_leaf(&self, key: &[u8]) -> Result<(PoolLeaf<'_>, MutexGuard<'_, ()>)> {
        loop {
            let shape = self.structure_version.load(Ordering::Acquire);
            // Not pinned while it waits: that would hold up all that waits for readers.
            let leaf = self.leaf(LeafAddr(self.inner.find_leaf(LeafTarget::Key(key), &Pin::new())));
            self.region().prefetch(leaf.offset, crate::pmem::leaf::LEAF_LEN);
            self.leaf_orders.prefetch(leaf.order_id);
            let locked = self.lock_stripe(leaf.offset)?;
            if self.structure_version.load(Ordering::Acquire) == shape {
                return Ok((leaf, locked));
            }
        }
    }

    /// Puts `entry` into its leaf, under the number that `turn` gives.
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
        let kept = match &old {
            Some(old) => self.retain_version(entry.user_key, old, entry.seqno, false)?,
            None => true,
        };
        let n = commit.first_free_slot().expect("one slot always stays free");
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
            self.add_to_record_count(leaf.offset, true);
        }
        drop(locked);
        match old {
            Some(old) if !kept => self.lock_allocator()?.retire((old.record.offset, old.record.buffer_len())),
            _ => {}
        }
        Ok(PutOutcome::Done)
    }

    /// Has a record that `by` replaces or removes kept for its readers; false if it has none.
    fn retain_version(&self, key: &[u8], place: &LeafEntry, by: SeqNo, removed: bool) -> Result<bool> {
        if !self.is_step_enabled(TreeStep::RetainVersions) || self.replaying.load(Ordering::Acquire) {
            return Ok(false);
        }
        let (kept, freed) = self.versions.retain(key, &place.record, by, removed)?;
        if !freed.is_empty() {
            self.retire_all(freed)?;
        }
        Ok(kept)
    }

    /// `commit` without the slot of `place`.
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
