//! Putting and removing records.
//!
//! A record is written and flushed before its leaf is locked. Under the lock a free slot is filled, one fence makes
//! both durable, and the commit word makes them count: with the new slot, and without the one it replaces.

use crate::base::{EntryRef, RecordKind, Result, SeqNo};
use crate::mem::atomic::{MutexGuard, Ordering};
use crate::mem::epoch::Pin;
use crate::pmem::inner::Goal;
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{Commit, Leaf};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::record::{Head, Slot, buffer_len_for};
use crate::pmem::space::Range;
use crate::pmem::tree::{Place, Step, Tree};

/// Hardly a record comes with a sequence number so far above what was visible when its space was set aside.
const SEQNO_LEAD: u64 = 1 << 24;

/// A record that no leaf names yet. Dropped, it gives its space back.
struct Draft<'a, M: Medium> {
    tree: &'a Tree<M>,
    range: Range,
    used: bool,
}

impl<M: Medium> Drop for Draft<'_, M> {
    fn drop(&mut self) {
        if !self.used
            && let Ok(mut space) = self.tree.space()
        {
            space.give_back(self.range);
        }
    }
}

impl<M: Medium> Tree<M> {
    /// Gives `key` the value `value`. Records of one key come with rising sequence numbers; one that is not newer than
    /// what is there is left out, so that a log can be replayed. Durable when it returns, as far as the medium is.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long, `OutOfSpace` if the pool is full; then nothing was changed.
    pub(crate) fn put(&self, key: &[u8], seqno: SeqNo, value: &[u8]) -> Result<()> {
        let entry = EntryRef { user: key, seqno, kind: RecordKind::Put, value };
        let mut head = Head::new(entry)?;
        let len = head.buffer_len(entry);
        let range = (self.take(len)?, len);
        self.put_at(entry, &mut head, range)
    }

    /// The same in space that was set aside for it. If it fails, the space is free again.
    pub(crate) fn put_into(&self, entry: EntryRef<'_>, room: Range) -> Result<()> {
        let mut head = Head::new(entry)?;
        let len = head.buffer_len(entry);
        if len > room.1 {
            self.give_back(room);
            let at = self.space()?.insist(&self.medium, |space, medium| space.take(medium, len))?;
            return self.put_at(entry, &mut head, (at, len));
        }
        if len < room.1 {
            self.give_back((room.0 + len, room.1 - len));
        }
        self.put_at(entry, &mut head, (room.0, len))
    }

    fn put_at(&self, entry: EntryRef<'_>, head: &mut Head, range: Range) -> Result<()> {
        let mut draft = self.draft(entry, head, range);
        let print = self.print(entry.user);
        while !self.try_put(entry, print, &mut draft)? {
            self.make_room(entry.user)?;
        }
        Ok(())
    }

    /// Sets space aside for records that will be put, each with the lengths of its key and its value, and for the
    /// leaves that they may need: the number of these. What it fills `rooms` with is to be used with
    /// [`put_into`](Tree::put_into) or [`give_back`](Tree::give_back), and then, in any case,
    /// [`end_promise`](Tree::end_promise).
    ///
    /// # Errors
    /// `OutOfSpace` if the pool is full, or keeps too much for readers; then nothing was set aside.
    pub(crate) fn reserve(&self, records: &[(usize, usize)], rooms: &mut [Range]) -> Result<usize> {
        let end = SeqNo((self.versions.points().visible().0 + SEQNO_LEAD).min(SeqNo::MAX.0));
        // Each leaf that is full by now may be split for the first record that it gets. What a split has left takes
        // half as many as a leaf before it is full again.
        let full = usize::try_from(self.leaves.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let leaves = records.len().min(full) + records.len() / (self.slots / 2 - 1) + 1;
        self.or_forgetting(|| {
            self.versions.check_room()?;
            self.set_aside(records, end, leaves, rooms)
        })?;
        Ok(leaves)
    }

    /// All of it or nothing, under one lock.
    fn set_aside(&self, records: &[(usize, usize)], end: SeqNo, leaves: usize, rooms: &mut [Range]) -> Result<()> {
        let mut space = self.space()?;
        space.end_promise(self.ended.swap(0, Ordering::Relaxed));
        space.promise_leaves(&self.medium, leaves)?;
        for (n, (key_len, value_len)) in records.iter().enumerate() {
            let len = buffer_len_for(*key_len, *value_len, end);
            match space.take(&self.medium, len) {
                Ok(at) => rooms[n] = (at, len),
                Err(error) => {
                    rooms[..n].iter().for_each(|room| space.give_back(*room));
                    space.end_promise(leaves);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives back what was set aside and not used.
    pub(crate) fn give_back(&self, room: Range) {
        if let Ok(mut space) = self.space() {
            space.give_back(room);
        }
    }

    /// No more leaves will be taken of those that were set aside together. The next one to set something aside sees it.
    #[inline]
    pub(crate) fn end_promise(&self, leaves: usize) {
        self.ended.fetch_add(leaves, Ordering::Relaxed);
    }

    /// Takes the record of `key` away; false if there is none, or a newer one.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory to keep it for those who still read it; then nothing was changed.
    pub(crate) fn remove(&self, key: &[u8], seqno: SeqNo) -> Result<bool> {
        let print = self.print(key);
        let (leaf, locked) = self.lock_leaf(key)?;
        let commit = leaf.commit();
        let Some(place) = self.look(leaf, commit, key, print)?.filter(|place| place.record.seqno < seqno) else {
            return Ok(false);
        };
        let kept = self.keep(key, &place, seqno, true)?;
        let left = self.without(leaf, commit, &place, print);
        self.medium.publish(leaf.at, left.0);
        self.medium.flush(leaf.at, 8, Site::RemoveCommit);
        self.medium.fence(Site::RemoveDone);
        self.len.fetch_sub(1, Ordering::Release);
        drop(locked);
        if !kept {
            self.space()?.retire((place.record.at, place.record.buffer_len()));
        }
        // At a quarter, and when it is empty: in between, neighbours that had no room are not asked every time.
        if left.count() == 0 || left.count() == self.slots / 4 {
            self.make_dense(key)?;
        }
        Ok(true)
    }

    /// Writes a record into space of its own.
    fn draft(&self, entry: EntryRef<'_>, head: &mut Head, range: Range) -> Draft<'_, M> {
        let draft = Draft { tree: self, range, used: false };
        self.medium.write(range.0, &[head.seal(&self.file_id, range.0, entry), entry.user, entry.value]);
        self.medium.flush(range.0, range.1, Site::PutRecord);
        draft
    }

    /// Takes space, if need be that of versions that nobody reads any more.
    fn take(&self, len: u64) -> Result<u64> {
        self.or_forgetting(|| self.space()?.take(&self.medium, len))
    }

    /// Tries something that wants space, and once more if there were versions that nobody reads any more.
    fn or_forgetting<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let full = match attempt() {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let freed = self.versions.forget_now()?;
        if freed.is_empty() {
            return Err(full);
        }
        self.retire_all(freed)?;
        attempt()
    }

    /// Gives back the space of records that no leaf and no version names.
    fn retire_all(&self, ranges: Vec<Range>) -> Result<()> {
        let mut space = self.space()?;
        for range in ranges {
            if self.does(Step::Limbo) { space.retire(range) } else { space.give_back(range) }
        }
        Ok(())
    }

    /// The leaf of `key`, locked.
    pub(crate) fn lock_leaf(&self, key: &[u8]) -> Result<(Leaf<'_>, MutexGuard<'_, ()>)> {
        loop {
            let shape = self.shape.load(Ordering::Acquire);
            // Not pinned while it waits: that would hold up all that waits for readers.
            let leaf = self.leaf(Spot(self.inner.leaf(Goal::At(key), &Pin::new())));
            self.region().prefetch(leaf.at, crate::pmem::leaf::LEAF_LEN);
            self.orders.prefetch(leaf.order);
            let locked = self.lock(leaf.at)?;
            if self.shape.load(Ordering::Acquire) == shape {
                return Ok((leaf, locked));
            }
        }
    }

    /// Puts the draft of `entry` into its leaf; false if that is full.
    fn try_put(&self, entry: EntryRef<'_>, print: u8, draft: &mut Draft<'_, M>) -> Result<bool> {
        let (leaf, locked) = self.lock_leaf(entry.user)?;
        let commit = leaf.commit();
        let old = self.look(leaf, commit, entry.user, print)?;
        if old.as_ref().is_some_and(|old| old.record.seqno >= entry.seqno) {
            return Ok(true);
        }
        if old.is_none() && commit.count() + 1 >= self.slots {
            return Ok(false);
        }
        let kept = match &old {
            Some(old) => self.keep(entry.user, old, entry.seqno, false)?,
            None => true,
        };
        let n = commit.free().expect("one slot always stays free");
        let slot = Slot::new(draft.range.0, draft.range.1);
        let mut new = commit.flipped(n, self.seal.of_slot(leaf.at, n, print, slot));
        if let Some(old) = &old {
            new = self.without(leaf, new, old, print);
        }
        self.open(leaf);
        self.medium.store(leaf.slot_at(n), slot.0);
        self.medium.flush(leaf.slot_at(n), 8, Site::PutSlot);
        self.medium.store(leaf.print_at(n), leaf.print_word(n, print));
        self.medium.flush_words(leaf.print_at(n), 8, Site::PutPrint);
        self.medium.fence(Site::PutReady);
        self.medium.publish(leaf.at, new.0);
        self.medium.flush(leaf.at, 8, Site::PutCommit);
        self.medium.fence(Site::PutDone);
        draft.used = true;
        drop(locked);
        match old {
            Some(old) if !kept => self.space()?.retire((old.record.at, old.record.buffer_len())),
            Some(_) => {}
            None => drop(self.len.fetch_add(1, Ordering::Release)),
        }
        Ok(true)
    }

    /// Has a record that `by` replaces or removes kept for its readers; false if it has none.
    fn keep(&self, key: &[u8], place: &Place, by: SeqNo, removed: bool) -> Result<bool> {
        if !self.does(Step::Versions) {
            return Ok(false);
        }
        let (kept, freed) = self.versions.keep(key, &place.record, by, removed)?;
        if !freed.is_empty() {
            self.retire_all(freed)?;
        }
        Ok(kept)
    }

    /// `commit` without the slot of `place`.
    fn without(&self, leaf: Leaf<'_>, commit: Commit, place: &Place, print: u8) -> Commit {
        commit.flipped(place.n, self.seal.of_slot(leaf.at, place.n, print, leaf.slot(place.n)))
    }
}
