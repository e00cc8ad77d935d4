//! Which bytes of a pool are free: known in memory only, and found out anew whenever the pool is opened.
//!
//! Small buffers have a list for each length; they are cut from runs, and put back into the list of their length. Large
//! ones are spans, which grow together with their neighbours. Where many small ones lie free side by side and something
//! else is wanted, they are made spans again ([`Space::gather`]). Threads that only put new records cut them from runs
//! of their own (`shelves.rs`), which go back when nothing else is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::sync::PARTS;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{EXPLORED, spin_loop, yield_now};
use crate::mem::epoch::Moment;
use crate::mem::region::PAGE;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN};
use crate::pmem::medium::Medium;
use crate::pmem::record::{OFFSET_END, STEP};

/// Buffers up to this length are small.
const SMALL_MAX: u64 = 4096;
const CLASSES: usize = (SMALL_MAX / STEP) as usize;
/// What small buffers are cut from.
const RUN: u64 = 64 << 10;
/// Leaves are cut from space for so many.
const LEAF_GROUP: u64 = 16;
/// So many buffers wait together for the readers to leave.
const LIMBO_BATCH: usize = if EXPLORED { 1 } else { 128 };
/// How often the readers are looked for before there is no space; the last times others get the processor first,
/// because a reader that is in the way and does not go on has none.
const PATIENCE: usize = if EXPLORED { 2 } else { 10_000 };
const YIELDS: usize = if EXPLORED { 0 } else { 64 };

/// Up to so many free ranges are sorted and joined whenever there is no space; more of them only once so many bytes
/// came back that a part of the pool (1 / `GATHER_SHARE`) may have become free, or so many requests were refused that
/// one range in `GATHER_STEP` pays for each: a request that fails in a large fragmented pool costs bounded work.
const GATHER_ALWAYS: usize = 4096;
const GATHER_SHARE: u64 = 64;
const GATHER_STEP: usize = 64;
/// While the log is replayed, a pool above its limit grows by this part of its length.
const REPLAY_SHARE: u64 = 16;

/// The length of the runs that threads take for themselves, and of a pool that has any.
const SHELF: u64 = 16 << 10;
const POOL_MIN: u64 = 256 * SHELF;

/// While a pool cannot grow any more, runs go to shelves only if one so long is free: what was taken back from shelves
/// because space is short does not go there again.
const AMPLE: u64 = 2 * PARTS as u64 * SHELF;

/// A buffer, or a leaf: where it begins and how long it is.
pub(crate) type Range = (u64, u64);

/// Buffers that nobody can come by any more, though readers may still be at them.
struct Waiting {
    since: Moment,
    records: Vec<Range>,
    leaves: Vec<u64>,
}

/// Counts of one moment, in bytes but for the leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// The length of the pool.
    pub(crate) len: u64,
    /// Free, with what waits for readers, without leaves.
    pub(crate) free: u64,
    /// Leaves that are cut out and not in use; those that wait for readers, too.
    pub(crate) leaves_free: usize,
}

/// The free space of one pool. One thread at a time.
pub(crate) struct Space {
    len: u64,
    len_max: u64,
    /// The addresses that there are: what it may never exceed.
    hard_max: u64,
    /// The log is being replayed: no reader is in the pool, and the limit does not hold.
    replaying: bool,
    grow_by: u64,
    /// It does not grow any more, whatever it may.
    ended: bool,
    /// There was nothing to grow by when it last tried.
    refused: bool,
    /// Small free buffers of each length, by their offsets; what is there at all, as bits.
    classes: Vec<Vec<u64>>,
    filled: [u64; CLASSES / 64],
    small: u64,
    small_count: usize,
    run: (u64, u64),
    spans: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    /// Bytes of `spans`.
    spanned: u64,
    leaves: Vec<u64>,
    /// A leaf for those who make others denser where there is no space: no space for anything else.
    spare: Option<u64>,
    /// Of the free leaves so many are no space for anything else.
    promised: usize,
    open: (Vec<Range>, Vec<u64>),
    waiting: VecDeque<Waiting>,
    /// Bytes of records in `open` and `waiting`.
    retired: u64,
    /// The first of `waiting` was waited for once, in vain.
    waited: bool,
    /// Bytes that came back since the small ones were last gathered.
    returned: u64,
    /// No free range has a free neighbour.
    joined: bool,
    /// Requests that found no space since the free ranges were last joined.
    refusals: usize,
}

impl Space {
    /// A pool of `len` bytes of which nothing is free. It grows by `grow_by` up to `len_max`, all of them whole pages.
    pub(crate) fn new(len: u64, len_max: u64, grow_by: u64) -> Space {
        Space {
            len,
            len_max: len_max.min(OFFSET_END) / PAGE * PAGE,
            hard_max: len_max.min(OFFSET_END) / PAGE * PAGE,
            replaying: false,
            grow_by: grow_by.next_multiple_of(PAGE).max(PAGE),
            ended: false,
            refused: false,
            classes: (0..CLASSES).map(|_| Vec::new()).collect(),
            filled: [0; CLASSES / 64],
            small: 0,
            small_count: 0,
            run: (0, 0),
            spans: BTreeMap::new(),
            by_len: BTreeSet::new(),
            spanned: 0,
            leaves: Vec::new(),
            spare: None,
            promised: 0,
            open: (Vec::new(), Vec::new()),
            waiting: VecDeque::new(),
            retired: 0,
            waited: false,
            returned: 0,
            joined: false,
            refusals: usize::MAX / GATHER_STEP,
        }
    }

    /// Lets the pool grow to `addresses` where its limit does not hold.
    pub(crate) fn set_addresses(&mut self, addresses: u64) {
        self.hard_max = self.hard_max.max(addresses.min(OFFSET_END) / PAGE * PAGE);
    }

    /// Records of the log are put until [`end_replay`](Space::end_replay): all of them were acknowledged, so the limit
    /// does not hold, and what they replace is free at once because no reader is there.
    pub(crate) fn begin_replay(&mut self) {
        self.replaying = true;
    }

    /// From now on the limit holds.
    pub(crate) fn end_replay(&mut self) {
        self.replaying = false;
    }

    /// Takes a buffer of `len` bytes, a multiple of [`STEP`] and not 0.
    ///
    /// # Errors
    /// `OutOfSpace` if there is none; whatever was free still is.
    pub(crate) fn take<M: Medium>(&mut self, medium: &M, len: u64) -> Result<u64> {
        debug_assert!(len > 0 && len.is_multiple_of(STEP));
        self.settle(false);
        if self.is_over(len) {
            return Err(out_of_space(len));
        }
        if let Some(at) = self.find(len) {
            return Ok(at);
        }
        if self.returned >= self.grow_by.max(self.len / 8) && self.small >= self.returned / 2 {
            self.gather();
            if let Some(at) = self.find(len) {
                return Ok(at);
            }
        }
        let grown = self.grow(medium, len);
        if let (Ok(()), Some(at)) = (&grown, self.find(len)) {
            return Ok(at);
        }
        self.settle(true);
        if self.may_gather() {
            self.gather();
        }
        if let Some(at) = self.find(len) {
            return Ok(at);
        }
        if self.replaying {
            self.grow_beyond(medium, len)?;
        }
        self.find(len).ok_or_else(|| {
            self.refusals += 1;
            grown.err().unwrap_or_else(|| out_of_space(len))
        })
    }

    /// Whether the pool is longer than its limit (the limit was lowered, or the log took more when it was replayed) and
    /// holds as much as it may: then free space is no space.
    fn is_over(&self, len: u64) -> bool {
        self.len > self.len_max && !self.replaying && self.used() + len > self.len_max
    }

    /// Bytes that are neither free nor about to be.
    fn used(&self) -> u64 {
        let leaves = (self.leaves.len() + self.spare.iter().len()) as u64 * LEAF_LEN;
        self.len - (self.spanned + self.small + (self.run.1 - self.run.0) + self.retired + leaves)
    }

    /// Whether joining the free ranges can help, and is worth its work by now.
    fn may_gather(&self) -> bool {
        let pieces = self.small_count + self.spans.len();
        let is_paid =
            || self.returned >= self.len / GATHER_SHARE || self.refusals.saturating_mul(GATHER_STEP) >= pieces;
        !self.joined && (pieces <= GATHER_ALWAYS || is_paid())
    }

    /// As [`Space::take`], for a thread that has come to the end of the run on its shelf and may get another.
    pub(crate) fn take_or_shelve<M: Medium>(&mut self, medium: &M, len: u64, shelf: &mut Range) -> Result<u64> {
        self.settle(false);
        let class = class_of(len);
        if self.is_over(SHELF) {
            return self.take(medium, len);
        }
        if let Some(at) = self.pop(class) {
            return Ok(at);
        }
        let is_short = (self.refused || self.len + self.grow_by > self.len_max) && self.longest() < AMPLE;
        let found = if self.len_max >= POOL_MIN && !is_short { self.find(SHELF) } else { None };
        let Some(at) = found else { return self.take(medium, len) };
        self.put(std::mem::replace(shelf, (at + len, SHELF - len)));
        Ok(at)
    }

    /// Takes a leaf.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Space::take`].
    pub(crate) fn take_leaf<M: Medium>(&mut self, medium: &M) -> Result<u64> {
        self.settle(false);
        if self.leaves.is_empty() {
            self.cut_leaves(medium)?;
        }
        Ok(self.leaves.pop().expect("some were cut"))
    }

    /// Takes a leaf that was promised to nobody.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Space::take`].
    pub(crate) fn take_spare_leaf<M: Medium>(&mut self, medium: &M) -> Result<u64> {
        self.promise_leaves(medium, 1)?;
        self.promised -= 1;
        self.take_leaf(medium)
    }

    /// Whether there is a leaf for making others denser.
    pub(crate) fn has_packing_leaf(&mut self) -> bool {
        self.settle(false);
        self.spare.is_some()
    }

    /// The leaf that is there for making others denser; another one comes back for it.
    pub(crate) fn take_packing_leaf(&mut self) -> Option<u64> {
        self.settle(false);
        self.spare.take()
    }

    /// Sets so many leaves aside for those who will take some of them: at most so many.
    ///
    /// # Errors
    /// `OutOfSpace`, as [`Space::take`]; then none are.
    pub(crate) fn promise_leaves<M: Medium>(&mut self, medium: &M, count: usize) -> Result<()> {
        self.settle(false);
        self.promised += count;
        while self.leaves.len() < self.promised {
            // Those that were cut are space for anything else again.
            self.cut_leaves(medium).inspect_err(|_| self.end_promise(count))?;
        }
        Ok(())
    }

    /// Those who were promised leaves have taken what they will take.
    pub(crate) fn end_promise(&mut self, count: usize) {
        self.promised -= count;
        self.joined = false;
    }

    /// As `take`, for what must not fail any more: if need be the pool gets longer than it may be.
    ///
    /// # Errors
    /// `OutOfSpace` if that is not enough.
    pub(crate) fn insist<M: Medium, T>(&mut self, medium: &M, take: impl Fn(&mut Space, &M) -> Result<T>) -> Result<T> {
        take(self, medium).or_else(|_| {
            let limit = std::mem::replace(&mut self.len_max, self.hard_max);
            let taken = take(self, medium);
            self.len_max = limit;
            taken
        })
    }

    fn cut_leaves<M: Medium>(&mut self, medium: &M) -> Result<()> {
        let (there, gap) = (self.leaves.len(), LEAF_ALIGN - STEP);
        let (at, count) = match self.take(medium, LEAF_GROUP * LEAF_LEN + gap) {
            Ok(at) => (at, LEAF_GROUP),
            // A leaf that waited may have come back meanwhile.
            Err(_) if self.leaves.len() > there => return Ok(()),
            Err(_) => (self.take(medium, LEAF_LEN + gap)?, 1),
        };
        let start = at.next_multiple_of(LEAF_ALIGN);
        let end = start + count * LEAF_LEN;
        self.put((at, start - at));
        self.put((end, at + count * LEAF_LEN + gap - end));
        self.leaves.extend((0..count).rev().map(|n| start + n * LEAF_LEN));
        if count > 1 && self.spare.is_none() {
            self.spare = self.leaves.pop();
        }
        Ok(())
    }

    /// Gives back what nobody has seen.
    pub(crate) fn give_back(&mut self, range: Range) {
        self.returned += range.1;
        self.joined = false;
        self.put(range);
    }

    pub(crate) fn give_back_leaf(&mut self, leaf: u64) {
        // Leaves that were promised come first.
        if self.spare.is_none() && self.leaves.len() >= self.promised {
            self.spare = Some(leaf);
            return;
        }
        self.returned += LEAF_LEN;
        self.joined = false;
        self.leaves.push(leaf);
    }

    /// Gives back what nobody can come by any more, once those who are at it have left.
    pub(crate) fn retire(&mut self, range: Range) {
        if self.replaying {
            return self.give_back(range);
        }
        self.retired += range.1;
        self.open.0.push(range);
        if self.open.0.len() >= LIMBO_BATCH {
            self.settle(false);
        }
    }

    /// As [`Space::retire`], for a leaf. These come seldom, and are wanted soon.
    pub(crate) fn retire_leaf(&mut self, leaf: u64) {
        if self.replaying {
            return self.give_back_leaf(leaf);
        }
        self.open.1.push(leaf);
        self.seal();
        self.settle(false);
    }

    fn seal(&mut self) {
        let (records, leaves) = std::mem::take(&mut self.open);
        if !records.is_empty() || !leaves.is_empty() {
            self.waiting.push_back(Waiting { since: Moment::now(), records, leaves });
        }
    }

    /// Takes back what waited for readers that have left; all of it, if they leave soon, if it is `urgent`. True if
    /// nothing waits any more.
    pub(crate) fn settle(&mut self, urgent: bool) -> bool {
        if urgent || self.open.0.len() >= LIMBO_BATCH {
            self.seal();
        }
        // A reader that was waited for in vain may be asleep: not every request that fails waits as long again.
        let mut patience = if !urgent {
            0
        } else if self.waited {
            YIELDS
        } else {
            PATIENCE
        };
        while let Some(first) = self.waiting.front() {
            if first.since.passed() {
                let Waiting { records, leaves, .. } = self.waiting.pop_front().expect("there is a first one");
                self.waited = false;
                for range in records {
                    self.retired -= range.1;
                    self.give_back(range);
                }
                leaves.into_iter().for_each(|leaf| self.give_back_leaf(leaf));
            } else if patience > 0 {
                patience -= 1;
                if patience < YIELDS { yield_now() } else { spin_loop() }
            } else {
                self.waited |= urgent;
                break;
            }
        }
        self.waiting.is_empty()
    }

    /// A buffer from what is free.
    fn find(&mut self, len: u64) -> Option<u64> {
        if len > SMALL_MAX {
            return self.cut_span(len);
        }
        let class = class_of(len);
        if let Some(at) = self.pop(class) {
            return Some(at);
        }
        if let Some(at) = self.cut_run(len) {
            return Some(at);
        }
        if let Some(larger) = self.next_filled(class) {
            let at = self.pop(larger).expect("its bit is set");
            self.put((at + len, (larger - class) as u64 * STEP));
            return Some(at);
        }
        let &(most, at) = self.by_len.last()?;
        self.remove_span(at, most);
        // What is left of the old run is less than `len`, which is small.
        let (old, end) = self.run;
        self.put((old, end - old));
        let run = most.min(RUN.max(len));
        self.run = (at, at + run);
        self.joined = false;
        self.put((at + run, most - run));
        self.cut_run(len)
    }

    fn cut_run(&mut self, len: u64) -> Option<u64> {
        let (at, end) = self.run;
        (end - at >= len).then(|| {
            self.run.0 += len;
            at
        })
    }

    fn cut_span(&mut self, len: u64) -> Option<u64> {
        let &(whole, at) = self.by_len.range((len, 0)..).next()?;
        self.remove_span(at, whole);
        self.put((at + len, whole - len));
        Some(at)
    }

    fn pop(&mut self, class: usize) -> Option<u64> {
        let at = self.classes[class].pop()?;
        if self.classes[class].is_empty() {
            self.filled[class / 64] &= !(1 << (class % 64));
        }
        self.small -= len_of(class);
        self.small_count -= 1;
        Some(at)
    }

    /// The first class behind `class` that has a buffer.
    fn next_filled(&self, class: usize) -> Option<usize> {
        let from = class + 1;
        (from / 64..CLASSES / 64).find_map(|n| {
            let mask = if n == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
            let set = self.filled[n] & mask;
            (set != 0).then(|| 64 * n + set.trailing_zeros() as usize)
        })
    }

    /// Makes a range free.
    fn put(&mut self, (at, len): Range) {
        if len == 0 {
            return;
        }
        if len <= SMALL_MAX {
            let class = class_of(len);
            self.classes[class].push(at);
            self.filled[class / 64] |= 1 << (class % 64);
            self.small += len;
            self.small_count += 1;
            return;
        }
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &its_len)) = self.spans.range(..at).next_back()
            && before + its_len == at
        {
            self.remove_span(before, its_len);
            start = before;
        }
        if let Some(&its_len) = self.spans.get(&end) {
            self.remove_span(end, its_len);
            end += its_len;
        }
        self.spans.insert(start, end - start);
        self.spanned += end - start;
        self.by_len.insert((end - start, start));
    }

    fn remove_span(&mut self, at: u64, len: u64) {
        self.spans.remove(&at);
        self.spanned -= len;
        self.by_len.remove(&(len, at));
    }

    /// Makes all that is free anew out of what lies side by side; free leaves count as any other space.
    fn gather(&mut self) {
        let mut all: Vec<Range> = std::mem::take(&mut self.spans).into_iter().collect();
        self.by_len.clear();
        for (class, list) in self.classes.iter_mut().enumerate() {
            all.extend(std::mem::take(list).into_iter().map(|at| (at, len_of(class))));
        }
        let promised = self.promised.min(self.leaves.len());
        all.extend(self.leaves.drain(promised..).map(|leaf| (leaf, LEAF_LEN)));
        let (run, end) = std::mem::take(&mut self.run);
        all.push((run, end - run));
        self.filled = [0; CLASSES / 64];
        (self.small, self.small_count, self.spanned, self.returned, self.refusals) = (0, 0, 0, 0, 0);
        let spare = self.spare.take();
        all.extend(spare.map(|leaf| (leaf, LEAF_LEN)));
        all.sort_unstable();
        all.dedup_by(|(at, len), before| {
            let joins = before.0 + before.1 == *at;
            before.1 += if joins { *len } else { 0 };
            joins
        });
        if spare.is_some() {
            // Where it is least in the way.
            let least = all.iter().enumerate().filter(|(_, range)| leaf_in(**range).is_some());
            let least = least.min_by_key(|(_, (_, len))| *len).map(|(n, _)| n);
            least.into_iter().for_each(|n| self.add(all.swap_remove(n)));
        }
        all.into_iter().for_each(|range| self.put(range));
        self.joined = true;
    }

    /// Makes the pool longer by one step, or so that there is a span of `len` bytes; by less, if it may not get longer:
    /// what is free at its end may make up for that.
    fn grow<M: Medium>(&mut self, medium: &M, len: u64) -> Result<()> {
        if self.ended {
            return Err(Error::new(ErrorKind::Closed, "the database is closed"));
        }
        let wanted = self.len.saturating_add(len.max(self.grow_by));
        let to = wanted.checked_next_multiple_of(self.grow_by).unwrap_or(u64::MAX).min(self.len_max);
        self.grow_to(medium, to, len)
    }

    /// The same above its limit, by no more than is needed and a part of its length.
    fn grow_beyond<M: Medium>(&mut self, medium: &M, len: u64) -> Result<()> {
        let by = len.max((self.len / REPLAY_SHARE).min(self.grow_by));
        self.grow_to(medium, self.len.saturating_add(by).next_multiple_of(PAGE).min(self.hard_max), len)
    }

    fn grow_to<M: Medium>(&mut self, medium: &M, to: u64, len: u64) -> Result<()> {
        if to <= self.len {
            return Err(out_of_space(len));
        }
        let grown = medium.grow(to);
        self.refused = grown.is_err();
        grown?;
        let from = std::mem::replace(&mut self.len, to);
        self.joined = false;
        self.put((from, to - from));
        Ok(())
    }

    /// The most bytes that are free side by side.
    fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |(len, _)| *len)
    }

    /// It does not grow any more.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// From now on it grows up to `len_max` only; what it has got, it keeps.
    pub(crate) fn set_limit(&mut self, len_max: u64) {
        self.len_max = len_max.min(OFFSET_END) / PAGE * PAGE;
    }

    /// Makes a range free that was found to be so when the pool was opened.
    pub(crate) fn add(&mut self, (at, len): Range) {
        if let (None, Some(leaf)) = (self.spare, leaf_in((at, len))) {
            self.spare = Some(leaf);
            self.put((at, leaf - at));
            return self.put((leaf + LEAF_LEN, at + len - (leaf + LEAF_LEN)));
        }
        self.put((at, len));
    }

    pub(crate) fn usage(&self) -> Usage {
        let leaves: usize = self.waiting.iter().map(|waiting| waiting.leaves.len()).sum();
        Usage {
            len: self.len,
            free: self.spanned + self.small + (self.run.1 - self.run.0) + self.retired,
            leaves_free: self.leaves.len() + self.spare.iter().len() + leaves + self.open.1.len(),
        }
    }
}

/// The first leaf that a range has place for.
fn leaf_in((at, len): Range) -> Option<u64> {
    let leaf = at.next_multiple_of(LEAF_ALIGN);
    (leaf + LEAF_LEN <= at + len).then_some(leaf)
}

fn class_of(len: u64) -> usize {
    (len / STEP) as usize - 1
}

fn len_of(class: usize) -> u64 {
    (class as u64 + 1) * STEP
}

#[cold]
fn out_of_space(len: u64) -> Error {
    Error::new(ErrorKind::OutOfSpace, format!("the pool is as large as it may be and has no {len} bytes left"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::epoch::Pin;
    use crate::mem::epoch::tests::eventually;
    use crate::pmem::medium::Image;
    use crate::vfs::dice::Dice;

    const LEN_MAX: u64 = 1 << 20;

    fn space() -> (Image, Space) {
        (Image::new(LEN_MAX).unwrap(), Space::new(0, LEN_MAX, 16 << 10))
    }

    /// What is taken, with what is known to be free, is the whole pool, and nothing is taken twice.
    fn check(space: &Space, taken: &BTreeMap<u64, u64>, leaves: usize) {
        let mut end = 0;
        for (&at, &len) in taken {
            assert!(at >= end && at.is_multiple_of(STEP), "{at} is taken twice");
            end = at + len;
        }
        let Usage { len, free, leaves_free } = space.usage();
        assert!(end <= len);
        let taken: u64 = taken.values().sum();
        assert_eq!(taken + free + (leaves_free - leaves) as u64 * LEAF_LEN, len, "bytes were lost");
    }

    #[test]
    fn nothing_is_taken_twice_and_nothing_is_lost() {
        let (image, mut space) = space();
        let mut dice = Dice::new(5, 0);
        let mut taken = BTreeMap::new();
        let mut refused = 0;
        for round in 0..20_000 {
            let len = match dice.below(20) {
                0 => 16 * (1 + dice.below(4000) as u64),
                1 => LEAF_LEN,
                _ => 16 * (1 + dice.below(40) as u64),
            };
            if dice.below(100) < if round / 2000 % 2 == 0 { 60 } else { 35 } {
                let at = if len == LEAF_LEN { space.take_leaf(&image) } else { space.take(&image, len) };
                match at {
                    Ok(at) => assert_eq!(taken.insert(at, len), None),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        refused += 1;
                    }
                }
            } else if let Some((&at, &len)) = taken.range(dice.below(LEN_MAX as usize) as u64..).next() {
                taken.remove(&at);
                match (len, dice.below(2)) {
                    (LEAF_LEN, 0) => space.retire_leaf(at),
                    (LEAF_LEN, _) => space.give_back_leaf(at),
                    (_, 0) => space.retire((at, len)),
                    _ => space.give_back((at, len)),
                }
            }
            if round % 100 == 0 {
                check(&space, &taken, 0);
            }
        }
        assert!(refused > 0, "it was never full");
        for (at, len) in std::mem::take(&mut taken) {
            space.give_back((at, len));
        }
        // Other tests of this process may be reading something.
        eventually(|| space.settle(true));
        space.gather();
        assert_eq!((space.spans.len(), space.spare), (1, Some(0)), "all of it lies side by side again");
        assert_eq!(space.find(space.len - LEAF_LEN), Some(LEAF_LEN));
    }

    #[test]
    fn small_buffers_that_came_back_serve_other_lengths() {
        let (image, mut space) = space();
        let small: Vec<u64> = std::iter::from_fn(|| space.take(&image, 48).ok()).collect();
        // What is left of each run is too short.
        assert!(small.len() as u64 >= LEN_MAX / 48 - 2 * LEN_MAX / RUN, "{}", small.len());
        small.iter().for_each(|at| space.give_back((*at, 48)));
        let other: Vec<u64> = std::iter::from_fn(|| space.take(&image, 4000).ok()).collect();
        assert!(other.len() as u64 >= LEN_MAX / 4000 - 2 * LEN_MAX / RUN, "{}", other.len());
        other.iter().for_each(|at| space.give_back((*at, 4000)));
        space.take(&image, LEN_MAX).unwrap();
    }

    /// A request that failed in a large fragmented pool joined all free ranges, each time.
    #[test]
    fn requests_fail_at_once_when_nothing_came_back() {
        let (image, mut space) = space();
        let all: Vec<u64> = std::iter::from_fn(|| space.take(&image, 48).ok()).collect();
        all.iter().step_by(2).for_each(|at| space.give_back((*at, 48)));
        assert!(space.small_count > 2 * GATHER_ALWAYS);
        for refused in 1..50 {
            assert!(space.take(&image, 4000).is_err());
            assert_eq!(space.refusals, refused, "the free ranges were joined again");
        }
        // Nor for each little that comes back.
        for (n, at) in all.iter().skip(1).step_by(2).take(20).enumerate() {
            space.give_back((*at, 48));
            assert!(space.take(&image, 4000).is_err());
            assert_eq!(space.refusals, 50 + n);
        }
        // What came back is space in the end.
        all.iter().skip(41).step_by(2).for_each(|at| space.give_back((*at, 48)));
        assert!(space.take(&image, 4000).is_ok());
    }

    #[test]
    fn what_is_free_at_the_end_counts_where_the_pool_can_hardly_grow() {
        let (image, mut space) = space();
        space.take(&image, 16 << 10).unwrap();
        let at = space.take(&image, LEN_MAX - (32 << 10)).unwrap();
        assert_eq!((space.usage().len, at), (LEN_MAX - (16 << 10), 16 << 10));
        space.give_back((at, LEN_MAX - (32 << 10)));
        assert_eq!(space.take(&image, LEN_MAX - (16 << 10)).unwrap(), 16 << 10);
        assert_eq!(space.usage(), Usage { len: LEN_MAX, free: 0, leaves_free: 0 });
    }

    #[test]
    fn free_leaves_are_space_when_there_is_no_other() {
        let (image, mut space) = space();
        let leaves: Vec<u64> = std::iter::from_fn(|| space.take_leaf(&image).ok()).collect();
        assert!(leaves.iter().all(|leaf| leaf.is_multiple_of(LEAF_ALIGN)));
        assert!(leaves.len() as u64 >= LEN_MAX / (LEAF_LEN + LEAF_ALIGN), "{}", leaves.len());
        leaves.iter().for_each(|leaf| space.give_back_leaf(*leaf));
        space.take(&image, LEN_MAX / 2).unwrap();
    }

    #[test]
    fn promised_leaves_are_nobody_elses_space() {
        let (image, mut space) = space();
        space.promise_leaves(&image, 100).unwrap();
        while space.take(&image, 16).is_ok() {}
        let mut leaves: Vec<u64> = (0..100).map(|_| space.take_leaf(&image).unwrap()).collect();
        assert_eq!(space.take_leaf(&image).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(space.promise_leaves(&image, 1).unwrap_err().kind(), ErrorKind::OutOfSpace);
        space.end_promise(100);
        leaves.drain(..).for_each(|leaf| space.give_back_leaf(leaf));
        space.take(&image, 16).unwrap();
    }

    #[test]
    fn what_is_retired_waits_for_who_is_pinned() {
        let (image, mut space) = space();
        let at = space.take(&image, LEN_MAX - PAGE).unwrap();
        let pin = Pin::new();
        space.retire((at, LEN_MAX - PAGE));
        assert_eq!(space.take(&image, 2 * PAGE).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(space.usage().free, LEN_MAX, "it is counted");
        drop(pin);
        eventually(|| space.take(&image, 2 * PAGE).is_ok());
    }
}
