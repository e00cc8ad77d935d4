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
use crate::pmem::inner::Goal;
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{Commit, Leaf};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::record::{Head, Slot, buffer_len_for};
use crate::pmem::space::{Range, Space};
use crate::pmem::tree::{Place, Step, Tree};

/// Hardly a record comes with a sequence number so far above what was visible when its space was set aside.
const SEQNO_LEAD: u64 = 1 << 16;

/// So many bytes of its space are fetched into the cache before a record is written, while its leaf is looked for.
const FETCHED: u64 = 256;

/// The number of a change, taken when its leaf is locked; none if it may not be made now.
pub(crate) type Taken = Result<Option<SeqNo>>;

/// What came of a put.
enum Tried {
    Done,
    /// Its leaf must be split before.
    Full,
    /// It got no number.
    NotNow,
}

/// What came of a removal.
enum Removed {
    Record,
    /// There was none.
    Nothing,
    /// It got no number.
    NotNow,
}

/// Space for a record that no leaf names yet. Dropped, it gives its space back.
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
        let len = Head::new(entry)?.buffer_len(entry);
        let range = (self.take(len)?, len);
        self.put_into(entry, range)
    }

    /// The same in space that was set aside for it. If it fails, the space is free again.
    pub(crate) fn put_into(&self, entry: EntryRef<'_>, room: Range) -> Result<()> {
        let mut draft = Draft { tree: self, range: room, used: false };
        let print = self.print(entry.user);
        while let Tried::Full = self.try_put(entry, print, &mut draft, || Ok(Some(entry.seqno)))? {
            let take = |space: &mut Space, medium: &M| space.insist(medium, Space::take_leaf);
            self.or_forgetting(|| self.make_room(entry.user, take))?;
        }
        Ok(())
    }

    /// Gives `key` the value `value` under the number that `turn` gives: false if it gives none.
    ///
    /// # Errors
    /// As [`put`](Tree::put), before a number is asked for; and those of `turn`. Other errors leave nobody knowing.
    pub(crate) fn put_in_turn(&self, key: &[u8], value: &[u8], mut turn: impl FnMut() -> Taken) -> Result<bool> {
        let len = buffer_len_for(key.len(), value.len(), self.highest_soon(1));
        self.check_versions()?;
        let at = self.take(len)?;
        let mut draft = Draft { tree: self, range: (at, len), used: false };
        self.region().prefetch(draft.range.0, len.min(FETCHED));
        let print = self.print(key);
        let entry = EntryRef { user: key, seqno: SeqNo::ZERO, kind: RecordKind::Put, value };
        loop {
            match self.try_put(entry, print, &mut draft, &mut turn)? {
                Tried::Done => return Ok(true),
                Tried::NotNow => return Ok(false),
                Tried::Full => self.or_forgetting(|| self.make_room(key, Space::take_spare_leaf))?,
            }
        }
    }

    /// A number that hardly any of so many changes gets beyond. Not much higher than need be: a record that comes with
    /// a shorter number than it has space for leaves a buffer behind that is too short for the next one of its size.
    pub(crate) fn highest_soon(&self, changes: usize) -> SeqNo {
        SeqNo((self.versions.points().visible().0 + changes as u64 + SEQNO_LEAD).min(SeqNo::MAX.0))
    }

    /// The free space, which has heard of promises that have ended.
    #[inline]
    pub(crate) fn space_after_promises(&self) -> Result<MutexGuard<'_, Space>> {
        let mut space = self.space()?;
        if self.ended.load(Ordering::Relaxed) > 0 {
            space.end_promise(self.ended.swap(0, Ordering::Relaxed));
        }
        Ok(space)
    }

    /// Gives back what was set aside and not used.
    pub(crate) fn give_back(&self, room: Range) {
        if let Ok(mut space) = self.space() {
            space.give_back(room);
        }
    }

    /// Takes the record of `key` away; false if there is none, or a newer one.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory to keep it for those who still read it; then nothing was changed.
    pub(crate) fn remove(&self, key: &[u8], seqno: SeqNo) -> Result<bool> {
        Ok(matches!(self.try_remove(key, || Ok(Some(seqno)))?, Removed::Record))
    }

    /// Takes the record of `key` away, if there is one, under the number that `turn` gives: false if it gives none.
    ///
    /// # Errors
    /// As [`put_in_turn`](Tree::put_in_turn), but `OutOfSpace` only if too much is kept for readers.
    pub(crate) fn remove_in_turn(&self, key: &[u8], turn: impl FnOnce() -> Taken) -> Result<bool> {
        self.check_versions()?;
        Ok(!matches!(self.try_remove(key, turn)?, Removed::NotNow))
    }

    fn try_remove(&self, key: &[u8], turn: impl FnOnce() -> Taken) -> Result<Removed> {
        let print = self.print(key);
        let (leaf, locked) = self.lock_leaf(key)?;
        let commit = leaf.commit();
        let found = {
            let _pin = self.pin()?;
            self.look(leaf, commit, key, print)?
        };
        let Some(seqno) = turn()? else { return Ok(Removed::NotNow) };
        let Some(place) = found.filter(|place| place.record.seqno < seqno) else { return Ok(Removed::Nothing) };
        let kept = self.keep(key, &place, seqno, true)?;
        let left = self.without(leaf, commit, &place, print);
        self.medium.publish(leaf.at, left.0);
        self.medium.flush(leaf.at, 8, Site::RemoveCommit);
        self.medium.fence(Site::RemoveDone);
        self.count(leaf.at, false);
        drop(locked);
        if !kept {
            self.space()?.retire((place.record.at, place.record.buffer_len()));
        }
        // At a quarter, and when it is empty: in between, neighbours that had no room are not asked every time.
        if left.count() == 0 || left.count() == self.slots / 4 {
            self.make_dense(key)?;
        }
        Ok(Removed::Record)
    }

    /// Writes a record into its space, of which it gives back what is too much, and makes its slot.
    fn write(&self, entry: EntryRef<'_>, draft: &mut Draft<'_, M>) -> Result<Slot> {
        let mut head = Head::new(entry)?;
        let (len, (at, room)) = (head.buffer_len(entry), draft.range);
        if len != room {
            self.fit(draft, at, len, room)?;
        }
        let (at, len) = draft.range;
        self.medium.write(at, &[head.seal(&self.file_id, at, entry), entry.user, entry.value]);
        self.medium.flush(at, len, Site::PutRecord);
        Ok(Slot::new(at, len))
    }

    #[cold]
    fn fit(&self, draft: &mut Draft<'_, M>, at: u64, len: u64, room: u64) -> Result<()> {
        let mut space = self.space()?;
        if len < room {
            space.give_back((at + len, room - len));
            draft.range = (at, len);
        } else {
            let longer = (space.insist(&self.medium, |space, medium| space.take(medium, len))?, len);
            space.give_back(std::mem::replace(&mut draft.range, longer));
        }
        Ok(())
    }

    /// Takes space, if need be that of versions that nobody reads any more.
    fn take(&self, len: u64) -> Result<u64> {
        self.or_forgetting(|| self.shelves.take(&self.medium, len, || self.space_after_promises()))
    }

    /// Tries something that wants space, and once more if there were versions that nobody reads any more, or space on
    /// shelves.
    pub(crate) fn or_forgetting<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut full = match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
            done => return done,
        };
        let (freed, shelved) = (self.versions.forget_now()?, self.shelves.clear());
        if !freed.is_empty() || !shelved.is_empty() {
            self.retire_all(freed)?;
            let mut space = self.space()?;
            shelved.into_iter().for_each(|run| space.give_back(run));
            drop(space);
            full = match attempt() {
                Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
                done => return done,
            };
        }
        // It ends, because each round frees leaves.
        while self.pack()? > 0 {
            full = match attempt() {
                Err(error) if error.kind() == ErrorKind::OutOfSpace => error,
                done => return done,
            };
        }
        Err(full)
    }

    /// Gives back what no reader needs any more of what was replaced, soon after the reader has left.
    #[inline]
    pub(crate) fn forget_stale(&self) -> Result<()> {
        if !self.versions.has_stale() { Ok(()) } else { self.retire_all(self.versions.forget_now()?) }
    }

    /// Fails if more is kept for readers than may be, once what no reader needs was forgotten.
    fn check_versions(&self) -> Result<()> {
        self.forget_stale()?;
        if self.versions.check_room().is_err() {
            self.forget_versions()?;
        }
        self.versions.check_room()
    }

    /// Gives back all that no reader needs any more of what was replaced.
    pub(crate) fn forget_versions(&self) -> Result<()> {
        self.retire_all(self.versions.forget_now()?)
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

    /// Puts `entry` into its leaf, under the number that `turn` gives.
    fn try_put(
        &self,
        entry: EntryRef<'_>,
        print: u8,
        draft: &mut Draft<'_, M>,
        turn: impl FnOnce() -> Taken,
    ) -> Result<Tried> {
        let (leaf, locked) = self.lock_leaf(entry.user)?;
        let commit = leaf.commit();
        let old = {
            let _pin = self.pin()?;
            self.look(leaf, commit, entry.user, print)?
        };
        if old.is_none() && commit.count() + 1 >= self.slots {
            return Ok(Tried::Full);
        }
        let Some(seqno) = turn()? else { return Ok(Tried::NotNow) };
        if old.as_ref().is_some_and(|old| old.record.seqno >= seqno) {
            return Ok(Tried::Done);
        }
        let entry = EntryRef { seqno, ..entry };
        let kept = match &old {
            Some(old) => self.keep(entry.user, old, entry.seqno, false)?,
            None => true,
        };
        let n = commit.free().expect("one slot always stays free");
        let slot = self.write(entry, draft)?;
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
        if old.is_none() {
            self.count(leaf.at, true);
        }
        drop(locked);
        match old {
            Some(old) if !kept => self.space()?.retire((old.record.at, old.record.buffer_len())),
            _ => {}
        }
        Ok(Tried::Done)
    }

    /// Has a record that `by` replaces or removes kept for its readers; false if it has none.
    fn keep(&self, key: &[u8], place: &Place, by: SeqNo, removed: bool) -> Result<bool> {
        if !self.does(Step::Versions) || self.replaying.load(Ordering::Acquire) {
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
